"""The page-major variant on the CPU against the reference, chunked and whole."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pwbench import variants
from pwbench.kernels import source_dir
from pwbench.operator import supports
from pwbench.page_plan import RING, ROW_BYTES, TILE_QUERIES, counters, list_queries
from pwbench.reference import attend, compare
from pwbench.variants import Options
from pwbench.variants._page_union_cpu import PageWalk
from pwbench.variants.page_union import PageUnion
from tests.calls import SELECTIONS, make_call

LIMIT = 1e-5
CORNERS = {
    "one token": {"q_lens": (1,), "prefix_lens": (0,)},
    "no request": {"q_lens": (), "prefix_lens": ()},
    "no row": {"q_lens": (0, 0), "prefix_lens": (10, 0)},
    "k and v apart": {"q_lens": (20,), "prefix_lens": (0,), "separate": True},
    "fewer tokens than positions": {"q_lens": (33,), "prefix_lens": (300,), "seq_lens": (310,)},
    "any positions": {"q_lens": (4,), "positions": (603, 0, 127, 128)},
    "beyond 512 pages": {"q_lens": (3,), "prefix_lens": (70_000,)},
    "33 requests": {"q_lens": [1] * 33, "prefix_lens": [130] * 33, "shared_pages": 1},
    "sharp softmax": {"q_lens": (10,), "query_gain": 1e3},
}


def hostile(seed=0, selection="random", **more):
    q_lens, prefixes = (9, 0, 135, 1), (0, 300, 700, 2100)
    return make_call(seed, q_lens, prefixes, 2, selection, shared_pages=4, k_scale=0.5, v_scale=3.0, **more)


def poisoned_run(call, workspace_bytes=256 << 20):
    prepared = PageUnion(workspace_bytes).prepare(call, Options())
    prepared.out.fill_(torch.nan)
    prepared.run()
    return prepared


@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_row_is_written_and_equals_the_reference(selection):
    call = hostile(1, selection)
    out = poisoned_run(call).out
    assert out.shape == call.q.shape
    ref = attend(call)
    accuracy = compare(out, ref)
    assert accuracy.rel_l2 <= LIMIT and accuracy.cosine >= 1 - LIMIT
    empty = ref.abs().amax((1, 2)) == 0
    assert not out[empty].any()


@pytest.mark.parametrize("corner", CORNERS)
def test_corners_equal_the_reference(corner):
    call = make_call(5, **CORNERS[corner])
    assert compare(poisoned_run(call).out, attend(call)).rel_l2 <= LIMIT


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10_000), st.sampled_from(SELECTIONS), st.lists(st.integers(0, 40), min_size=1, max_size=4)
)
def test_any_call_equals_the_reference(seed, selection, q_lens):
    call = make_call(seed, q_lens, [37 * (seed % 11)] * len(q_lens), selection=selection)
    assert compare(poisoned_run(call).out, attend(call)).rel_l2 <= LIMIT


def test_chunks_change_nothing_but_the_workspace():
    call = hostile(2, "dirty")
    whole = poisoned_run(call)
    chunked = poisoned_run(call, workspace_bytes=40 * 2 * ROW_BYTES)
    assert [stage.name for stage in whole.stages] == ["search", "metadata", "attention", "reduction"]
    names = [stage.name for stage in chunked.stages]
    assert names == ["search", "metadata"] + ["attention", "reduction"] * 5
    assert "5 chunks of 32 rows" in chunked.details["peer"]
    assert compare(chunked.out, whole.out).rel_l2 <= LIMIT


def test_the_workspace_of_a_chunk_stays_below_its_limit():
    call = hostile(2)
    limit = 70 * 2 * ROW_BYTES
    walk = PageWalk(call, 64)
    held = walk.partial.numel() * 2 + (walk.top.numel() + walk.weight.numel()) * 4
    assert held == 64 * 2 * ROW_BYTES <= limit


def test_the_reduction_reads_no_slot_that_attention_did_not_write():
    call = hostile(3, "dirty")
    walk = PageWalk(call, call.total_q)
    walk.metadata()
    walk.attention(0)
    _, counts = supports(call)
    written = ~walk.top.isnan().any(dim=-1)
    slots = np.arange(16) < counts[:, :, None]
    assert (written.numpy() == slots).all()
    walk.out.fill_(torch.nan)
    walk.reduction(0)
    assert walk.out.isfinite().all()


def test_runs_repeat_bit_for_bit():
    call = hostile(4, "local")
    prepared = poisoned_run(call)
    first = prepared.out.clone()
    prepared.run()
    assert torch.equal(prepared.out, first)


def test_the_stream_equals_the_reference_and_counts_its_own_chunks():
    call = make_call(8, (300, 9), (700, 300), selection="local")
    stream = variants.get("page-union-stream").prepare(call, Options())
    stream.out.fill_(torch.nan)
    stream.run()
    assert compare(stream.out, attend(call)).rel_l2 <= LIMIT
    assert [stage.name for stage in stream.stages] == ["metadata", "attention"]
    whole = variants.get("page-union").prepare(call, Options())
    assert stream.counters is not None and whole.counters is not None
    assert stream.counters()["groups"] > whole.counters()["groups"]
    assert stream.counters()["partial_bytes"] == whole.counters()["partial_bytes"]


def test_the_kernels_constants_are_the_plans():
    folder = source_dir()
    ring = re.search(r"constexpr int RING = (\d+);", (folder / "page_stream.cu").read_text())
    assert ring and int(ring[1]) == RING
    tile = re.search(r"constexpr int TILE_QUERIES = (\d+);", (folder / "page_lists.cu").read_text())
    assert tile and int(tile[1]) == TILE_QUERIES


def test_attention_before_metadata_is_refused():
    with pytest.raises(RuntimeError, match="metadata"):
        PageWalk(hostile(0), 32).attention(0)


def test_the_variant_counts_page_loads_and_tiles_instead_of_groups():
    call = hostile(6, "local")
    prepared = variants.get("page-union").prepare(call, Options())
    pages, _ = supports(call)
    lists = list_queries(pages, call.cu_seqlens_q.numpy())
    assert prepared.counters is not None
    assert prepared.counters() == counters(call, pages, lists, 1)
    assert prepared.query_ids() is None


def test_a_query_that_is_nan_spoils_no_other_row():
    call = make_call(7, (12,), (700,), selection="local")
    clean = poisoned_run(call).out.clone()
    call.q[5] = torch.nan
    out = poisoned_run(call).out
    assert out[5].isnan().all()
    others = torch.arange(12) != 5
    assert torch.equal(out[others], clean[others])


def test_a_replayed_row_carries_the_page_counters(tmp_path):
    from pwbench.capture import synthetic, write
    from pwbench.replay import replay

    made = synthetic.generate(1500, 40, seed=1)
    write(tmp_path / "one", made.call, facts=made.facts)
    (row,) = replay([tmp_path / "one"], ["page-union"], device="cpu", samples=1)
    assert row["status"] == "ok", row["reason"]
    assert 0 < row["tile_occupancy"] <= 1
    assert row["partial_bytes"] == 2 * row["selected_pages"] * 16 * 264
    assert row["mma_flops"] == row["subgroup_pages"] * 64 * 128 * 128 * 4
    assert row["reduction_us"] > 0
