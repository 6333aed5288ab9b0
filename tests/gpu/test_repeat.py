"""The same call again: bit for bit, in graphs, with inputs changed in place, on two streams."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pwbench import reference
from pwbench.operator import SparsePrefillCall
from pwbench.variants import Prepared
from tests.gpu.cases import mild
from tests.gpu.harness import ACCURATE, DEVICE, FAST, check, every_run, gpu, needs_cuda, prepare, run, same

pytestmark = gpu

REPEATS = 50


def limit(precision: str) -> float:
    return FAST if precision == "fast" else ACCURATE


def roomy(seed: int = 0, **more) -> SparsePrefillCall:
    """Two requests with every token of the context finite, so that lengths may change in place."""
    return mild(
        **{"seed": seed, "q_lens": (70, 45), "prefix_lens": (2500, 1700), "poison": "none", **more}
    ).to(DEVICE)


def overwrite(call: SparsePrefillCall, other: SparsePrefillCall) -> None:
    """Give ``call`` the selections, lengths, positions, boundaries and queries of ``other``, in place."""
    for name in ("q", "topk", "seq_lens", "positions", "cu_seqlens_q"):
        getattr(call, name).copy_(getattr(other, name))


def shorter(seed: int) -> SparsePrefillCall:
    return roomy(seed, prefix_lens=(900, 1300), selection="local")


@every_run
def test_fifty_runs_are_bitwise_equal_beside_other_kernels(variant: str, precision: str) -> None:
    call = mild(q_lens=(200, 33), prefix_lens=(5000, 700), kv_heads=2, selection="local").to(DEVICE)
    prepared = prepare(variant, precision, call)
    first = run(prepared)
    noise = torch.randn(1024, 1024, device=DEVICE)
    beside = torch.cuda.Stream() if DEVICE.type == "cuda" else None
    for _ in range(REPEATS if beside else 2):
        if beside:
            with torch.cuda.stream(beside):
                noise = (noise @ noise).clamp(-1, 1)
        assert same(run(prepared), first)


@every_run
@pytest.mark.parametrize("smaller", [True, False], ids=["smaller", "as large"])
def test_changed_inputs_leave_nothing_of_the_call_before(smaller: bool, variant: str, precision: str) -> None:
    """The workspace still holds the larger call's lists, images and barriers."""
    call = roomy()
    prepared = prepare(variant, precision, call)
    run(prepared)
    overwrite(call, shorter(1) if smaller else roomy(2))
    fresh = replace(call, q=call.q.clone())
    check(run(prepared), reference.attend(fresh), limit(precision), "the second call")


def capture(prepared: Prepared) -> torch.cuda.CUDAGraph:
    if not prepared.graphable:
        pytest.skip("this variant does not claim to be capturable")
    run(prepared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.run()
    return graph


def replay(graph: torch.cuda.CUDAGraph, prepared: Prepared) -> torch.Tensor:
    prepared.out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return prepared.out.clone()


@needs_cuda
@every_run
def test_a_graph_replays_the_call(variant: str, precision: str) -> None:
    prepared = prepare(variant, precision, roomy())
    eager = run(prepared)
    assert same(replay(capture(prepared), prepared), eager)


@needs_cuda
@every_run
def test_a_graph_follows_ids_and_lengths_changed_in_place(variant: str, precision: str) -> None:
    call = roomy()
    prepared = prepare(variant, precision, call)
    graph = capture(prepared)
    for other in (shorter(3), roomy(4), roomy(5, selection="dirty"), roomy(6, selection="empty"), roomy()):
        overwrite(call, other)
        check(replay(graph, prepared), reference.attend(call), limit(precision), "after a change in place")


@needs_cuda
@every_run
def test_a_graph_follows_request_boundaries_changed_in_place(variant: str, precision: str) -> None:
    if variant.endswith("-precomputed"):
        pytest.skip("an order that was found beforehand belongs to the boundaries it was found for")
    call = roomy()
    prepared = prepare(variant, precision, call)
    graph = capture(prepared)
    for q_lens in ((1, 114), (115, 0), (57, 58)):
        overwrite(call, roomy(7, q_lens=q_lens, prefix_lens=(1200, 1100)))
        check(replay(graph, prepared), reference.attend(call), limit(precision), f"boundaries {q_lens}")


@needs_cuda
@every_run
def test_two_streams_do_not_disturb_each_other(variant: str, precision: str) -> None:
    calls = [roomy(8), roomy(9, q_lens=(100, 3))]
    prepared = [prepare(variant, precision, call) for call in calls]
    alone = [run(one) for one in prepared]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for one in prepared:
        one.out.fill_(torch.nan)
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, one in zip(streams, prepared, strict=True):
            with torch.cuda.stream(stream):
                one.run()
    torch.cuda.synchronize()
    for one, want in zip(prepared, alone, strict=True):
        assert same(one.out, want)


@needs_cuda
@every_run
def test_the_call_neither_allocates_nor_waits(variant: str, precision: str) -> None:
    prepared = prepare(variant, precision, roomy())
    if not prepared.graphable:
        pytest.skip("this variant does not claim to be capturable")
    run(prepared)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        prepared.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@every_run
def test_the_stages_in_order_are_the_complete_call(variant: str, precision: str) -> None:
    prepared = prepare(variant, precision, roomy())
    whole = run(prepared)
    prepared.out.fill_(torch.nan)
    for stage in prepared.stages:
        stage.run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert same(prepared.out, whole)
