"""The page lists on the device against `pwbench.page_plan`, bit for bit, and what chunks may change."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from pwbench import page_plan, reference
from pwbench.operator import SparsePrefillCall, supports, visible_tokens
from pwbench.variants import Options, Prepared
from pwbench.variants.page_union import PageUnion
from tests.gpu import harness
from tests.gpu.cases import batch, mild, rows_of
from tests.gpu.harness import DEVICE, FAST, check, gpu, needs_cuda, poison_free_memory, run, same

pytestmark = gpu

SHAPES = {
    "one row": partial(mild, q_lens=(1,), prefix_lens=(0,)),
    "a word of rows and one more": partial(mild, q_lens=(33,), prefix_lens=(3000,)),
    "drifting selections": partial(mild, q_lens=(513,), prefix_lens=(5000,), selection="local"),
    "all rows alike": partial(mild, q_lens=(1100,), prefix_lens=(2048,), selection="identical"),
    "disjoint neighbours": partial(mild, q_lens=(200,), prefix_lens=(9000,), selection="disjoint"),
    "nothing selected": partial(mild, q_lens=(140,), selection="empty"),
    "junk among the ids": partial(mild, q_lens=(150, 61), selection="dirty", kv_heads=2),
    "requests that share words": partial(batch, *range(1, 18)),
    "empty requests": partial(batch, 0, 30, 0, 0, 130, 0),
    "four heads": partial(batch, 127, 129, 64, kv_heads=4),
    "33 requests": partial(batch, *[3] * 33),
    "1024 pages": partial(mild, q_lens=(300,), prefix_lens=(1024 * 128,)),
    "4096 pages": partial(mild, q_lens=(70,), prefix_lens=(4095 * 128,)),
    "one page for all, one for each": partial(
        rows_of, lambda head, row: [0, 1 + row % 60], q_len=256, prefix=61 * 128
    ),
}


def prepare(call: SparsePrefillCall, chunk_rows: int | None = None) -> Prepared:
    limit = page_plan.WORKSPACE_BYTES
    if chunk_rows is not None:
        limit = chunk_rows * call.kv_heads * page_plan.ROW_BYTES
    variant = PageUnion(limit)
    if reason := variant.unavailable(call.device):
        pytest.skip(reason)
    poison_free_memory()
    return variant.prepare(call, Options())


@needs_cuda
@pytest.mark.parametrize("chunk_rows", [None, 64], ids=["whole", "chunks of 64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_page_lists_are_the_oracles(shape: str, chunk_rows: int | None) -> None:
    call = SHAPES[shape]().to(DEVICE)
    prepared = prepare(call, chunk_rows)
    run(prepared)
    assert prepared.debug is not None
    found = prepared.debug()
    pages, counts = supports(call)
    np.testing.assert_array_equal(found["supports"], pages)
    np.testing.assert_array_equal(found["counts"], counts)
    np.testing.assert_array_equal(found["visible"], visible_tokens(call))

    rows = page_plan.chunk_rows_for(
        call.total_q,
        call.kv_heads,
        page_plan.WORKSPACE_BYTES if chunk_rows is None else chunk_rows * call.kv_heads * page_plan.ROW_BYTES,
    )
    per_load = page_plan.tiles_per_load_for(rows, call.kv_heads)
    lists = page_plan.list_queries(pages, call.cu_seqlens_q.cpu().numpy(), rows)
    _, entries = page_plan.tiles(lists)
    packed = lists.rows.astype(np.uint32) << 4 | lists.slots.astype(np.uint32)
    wanted = np.where(entries >= 0, packed[np.maximum(entries, 0)] if len(packed) else 0, 0xFFFFFFFF)
    np.testing.assert_array_equal(found["entries"], wanted)
    loads, marks = expected_loads(call, lists, per_load)
    np.testing.assert_array_equal(found["loads"], loads)
    of_each = np.arange(-(-call.total_q // rows) * call.kv_heads + 1)
    np.testing.assert_array_equal(found["chunk_loads"], np.searchsorted(marks, of_each))


def expected_loads(
    call: SparsePrefillCall, lists: page_plan.PageLists, per_load: int
) -> tuple[np.ndarray, np.ndarray]:
    """Load records, ``[n, 4]`` int32, and which (chunk, KV head) each belongs to."""
    counts = lists.load_counts(per_load)
    owner = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    first_tile = np.cumsum(lists.tile_counts) - lists.tile_counts
    done = nth * per_load
    tiles = np.minimum(per_load, lists.tile_counts[owner] - done)
    physical = call.page_table.cpu().numpy()[lists.request[owner], lists.page[owner]]
    records = [
        physical,
        lists.kv_head[owner].astype(np.int64) << 8 | tiles,
        lists.page[owner],
        first_tile[owner] + done,
    ]
    mark = lists.chunk[owner] * call.kv_heads + lists.kv_head[owner]
    return np.stack(records, axis=1).astype(np.int32).reshape(-1, 4), mark


@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_is_the_references_whatever_the_chunks(shape: str) -> None:
    call = SHAPES[shape]().to(DEVICE)
    ref = reference.attend(call)
    whole = run(prepare(call))
    check(whole, ref, FAST, shape)
    check(run(prepare(call, 64)), ref, FAST, f"{shape}, in chunks")


@needs_cuda
@pytest.mark.parametrize("chunk_rows", [32, 96, 512])
def test_chunks_do_not_change_a_bit(chunk_rows: int) -> None:
    """A partial output depends on its row and page alone, and the slots have one order."""
    call = mild(q_lens=(700, 200), prefix_lens=(5000, 900), kv_heads=2, selection="local").to(DEVICE)
    assert same(run(prepare(call, chunk_rows)), run(prepare(call)))


@needs_cuda
@pytest.mark.parametrize("shape", SHAPES)
def test_the_stream_writes_the_same_bits(shape: str) -> None:
    """Partial outputs that pass through a ring of four chunks are those of the whole call."""
    call = SHAPES[shape]().to(DEVICE)
    stream = harness.prepare("page-union-stream", "fast", call)
    assert same(run(stream), run(prepare(call)))
    assert same(run(stream), run(prepare(call))), "a second run differs"


@needs_cuda
def test_two_streams_of_one_call_beside_each_other_finish() -> None:
    """Blocks that wait for each other must not depend on all of a grid being resident."""
    call = mild(q_lens=(4000,), prefix_lens=(5000,), selection="local").to(DEVICE)
    wanted = run(harness.prepare("page-union-stream", "fast", call))
    both = [harness.prepare("page-union-stream", "fast", call, poison=False) for _ in range(2)]
    lanes = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    for _ in range(5):
        for prepared, lane in zip(both, lanes, strict=True):
            with torch.cuda.stream(lane):
                prepared.run()
    torch.cuda.synchronize()
    assert all(same(prepared.out, wanted) for prepared in both)


@needs_cuda
def test_chunks_replay_from_a_graph() -> None:
    call = mild(q_lens=(300,), prefix_lens=(5000,), selection="local").to(DEVICE)
    prepared = prepare(call, 64)
    eager = run(prepared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.run()
    prepared.out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert same(prepared.out, eager)


def test_a_page_that_thousands_select_beside_pages_of_one_row() -> None:
    call = rows_of(
        lambda head, row: [0, 1 + row % 7, 8 + row // 8], q_len=4300, prefix=(8 + 540) * 128, seed=3
    ).to(DEVICE)
    rows = np.r_[0:64, 2000:2064, 4236:4300]
    out = run(prepare(call))
    assert bool(torch.isfinite(out).all())
    index = torch.from_numpy(rows).to(out.device)
    check(out[index], reference.attend(call, rows), FAST, "popular and lonely pages")
