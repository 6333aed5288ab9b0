"""The page-major kernels and their host code, run thread by thread on the CPU against the reference."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pwbench import kernels
from pwbench.operator import supports, visible_tokens
from pwbench.page_plan import list_queries, tiles
from pwbench.reference import attend, compare
from pwbench.variants import _page_union_gpu
from pwbench.variants._page_union_gpu import PageKernels, StreamKernels
from tests.calls import make_call
from tests.hopper import Program, compile_program

ENTRIES = {
    "clean_supports": ("page_lists.cu", ["ListParams"]),
    "count_lists": ("page_lists.cu", ["ListParams"]),
    "scan_lists": ("page_lists.cu", ["ListParams"]),
    "write_lists": ("page_lists.cu", ["ListParams"]),
    "pack_values": ("pack_values.cu", ["PackParams"]),
    "quantise_queries": ("page_union.cu", ["QueryParams"]),
    "page_union_partials": ("page_union.cu", ["TensorMap", "PartialParams"]),
    "reduce_partials": ("page_union.cu", ["ReduceParams"]),
    "page_union_stream": ("page_stream.cu", ["TensorMap", "StreamParams"]),
}
FAST = 6e-2
UNTOUCHED = -77

CALLS = {
    "one row": dict(q_lens=(1,), prefix_lens=(0,)),
    "a page and a bit": dict(q_lens=(5,), prefix_lens=(100,)),
    "nothing selected": dict(q_lens=(40,), selection="empty"),
    "k and v apart": dict(q_lens=(12,), prefix_lens=(300,), separate=True),
    "requests, heads and junk": dict(
        q_lens=(9, 0, 40, 1), prefix_lens=(0, 300, 700, 2100), kv_heads=2, selection="dirty",
        shared_pages=4, k_scale=0.5, v_scale=3.0,
    ),
    "chunks beyond the ring": dict(q_lens=(170,), prefix_lens=(300,), selection="local"),
}  # fmt: skip


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Program]:
    """Every source of the page-major kernels, compiled over the emulated instructions."""
    folder = tmp_path_factory.mktemp("sources")
    sources = {source for source, _ in ENTRIES.values()}
    return {
        source: compile_program(
            folder, source, {e: args for e, (of, args) in ENTRIES.items() if of == source}
        )
        for source in sources
    }


@pytest.fixture
def on_cpu(programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bind the host code to the emulated programs, on a GPU that holds six attention blocks."""

    class Kernel:
        def __init__(self, source: str, name: str):
            self.program, self.name = programs[source], name

        def bind(self, grid, block, *arguments):
            together = self.name == "page_union_stream"
            return lambda: self.program.launch(self.name, grid[0], block, arguments, together)

    def tensor_map(address, element, sizes, strides, box):
        opaque = np.zeros(16 + 8, np.uint64)
        opaque = opaque[(-opaque.ctypes.data % 64) // 8 :][:16]
        opaque[:4] = [address, *strides]
        return opaque

    monkeypatch.setattr(kernels, "get", lambda source, name, shared=0: Kernel(source, name))
    monkeypatch.setattr(kernels, "tensor_map", tensor_map)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    lane = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: lane)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: lane)
    monkeypatch.setattr(torch.cuda, "stream", lambda chosen: nullcontext())
    small = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)


def bound(form, call, chunk_rows, tiles_per_load):
    """The launches of a call over a workspace full of NaN and nonsense."""
    made = _page_union_gpu.prepare(form, call, chunk_rows, tiles_per_load)
    for tensor in (made.partial, made.statistics, made.out):
        tensor.fill_(torch.nan)
    for name in ("supports", "counts", "visible", "members", "totals", "chunk_loads", "entries", "loads"):
        getattr(made, name).fill_(UNTOUCHED)
    made.progress.fill_(UNTOUCHED)
    made.images.fill_(0x7F)
    made.queries.fill_(0x7F)
    made.metadata()
    return made


def whole(call, chunk_rows, tiles_per_load=2):
    made = bound(PageKernels, call, chunk_rows, tiles_per_load)
    for chunk in range(made.chunks):
        made.attention(chunk)
        made.reduction(chunk)
    return made


def streamed(call, tiles_per_load=2):
    made = bound(StreamKernels, call, 32, tiles_per_load)
    made.stream()
    return made


def call_of(name):
    return make_call(seed=3, **{"query_gain": 1.0, **CALLS[name]})


@pytest.mark.parametrize("name", CALLS)
def test_lists_are_the_oracles_and_the_output_is_the_references(on_cpu, name):
    call = call_of(name)
    made = whole(call, 64)
    found, (pages, counts) = made.download(), supports(call)
    np.testing.assert_array_equal(found["supports"], pages)
    np.testing.assert_array_equal(found["counts"], counts)
    np.testing.assert_array_equal(found["visible"], visible_tokens(call))
    lists = list_queries(pages, call.cu_seqlens_q.numpy(), 64)
    packed = lists.rows.astype(np.uint32) << 4 | lists.slots.astype(np.uint32)
    _, entries = tiles(lists)
    wanted = np.where(entries >= 0, packed[np.maximum(entries, 0)] if len(packed) else 0, 0xFFFFFFFF)
    np.testing.assert_array_equal(found["entries"], wanted)
    assert found["chunk_loads"][-1] == lists.load_counts(2).sum()

    ref = attend(call)
    assert bool(made.out.isfinite().all())
    assert compare(made.out, ref).rel_l2 <= FAST
    assert not made.out[ref.abs().amax((1, 2)) == 0].any()


@pytest.mark.parametrize("name", CALLS)
def test_the_stream_and_every_chunking_write_the_same_bits(on_cpu, name):
    call = call_of(name)
    out = streamed(call).out
    assert torch.equal(out, whole(call, max(1, call.total_q), tiles_per_load=1).out)


def test_a_block_that_falls_far_behind_keeps_its_place_in_the_ring(on_cpu):
    """Fourteen chunks of one page a row: blocks run ahead of a slow one as far as the protocol lets them."""
    call = make_call(6, (440,), (300,))
    call.topk[:, :, 1:] = -1
    wanted = whole(call, 440).out
    assert compare(wanted, attend(call)).rel_l2 <= FAST
    for _ in range(2):
        assert torch.equal(streamed(call).out, wanted)


def test_a_query_that_is_nan_spoils_no_other_row(on_cpu):
    call = make_call(5, (8,), (300,), selection="identical")
    clean = whole(call, 8).out.clone()
    call.q[3] = torch.nan
    out = whole(call, 8).out
    assert bool(out[3].isnan().all())
    others = torch.arange(8) != 3
    assert torch.equal(out[others], clean[others])
