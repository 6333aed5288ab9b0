"""Search and union preparation on the device, bit for bit against `pwbench.grouping`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from pwbench import grouping
from pwbench.gate import searches_by_matching
from pwbench.operator import PAGE, SparsePrefillCall, supports
from pwbench.variants import Prepared
from pwbench.variants._union_plan import BUCKETS
from tests.gpu.cases import CASES, batch, mild, rows_of
from tests.gpu.harness import DEVICE, UNIONS, Case, built, gpu, prepare, run

pytestmark = gpu

SEARCHING = [name for name in UNIONS if name.endswith(("-regroup", "-precomputed"))]
"""Variants that search every call; pageweaver decides by the call."""


@dataclass(frozen=True)
class Shape:
    """A named call for the search: what matters here is selections and boundaries."""

    name: str
    build: Any

    def __str__(self) -> str:
        return self.name


def topics(head: int, row: int) -> range:
    """Even rows and odd rows have nothing in common."""
    return range(row % 2 * 15, row % 2 * 15 + 15)


SHAPES = [
    Shape("all rows alike, every choice a tie", partial(mild, q_lens=(300,), selection="identical")),
    Shape("nothing selected, every choice a tie", partial(mild, q_lens=(140,), selection="empty")),
    Shape("drifting selections", partial(mild, q_lens=(513,), prefix_lens=(5000,), selection="local")),
    Shape("independent selections", partial(mild, q_lens=(300,), prefix_lens=(9000,))),
    Shape("disjoint neighbours", partial(mild, q_lens=(200,), prefix_lens=(9000,), selection="disjoint")),
    Shape("junk among the ids", partial(mild, q_lens=(150, 61), selection="dirty", kv_heads=2)),
    Shape(
        "two interleaved topics", partial(rows_of, lambda h, row: range(row % 2 * 15, row % 2 * 15 + 15), 256)
    ),
    Shape("tail windows", partial(batch, *[128 + t for t in (1, 2, 7, 8, 9, 63, 64, 65, 126, 127)])),
    Shape("short requests", partial(batch, *range(1, 18))),
    Shape("empty requests", partial(batch, 0, 30, 0, 0, 130, 0)),
    Shape("four heads", partial(batch, 127, 129, 64, kv_heads=4)),
    Shape("513 pages", partial(mild, q_lens=(200,), prefix_lens=(513 * PAGE,))),
    Shape("4096 pages", partial(mild, q_lens=(130,), prefix_lens=(4095 * PAGE,))),
]
"""Ties, tails, boundaries and contexts beyond the 512 pages of the paper's bitmap."""


def order_of(prepared: Prepared, call: SparsePrefillCall) -> np.ndarray:
    run(prepared)
    ids = prepared.query_ids()
    if ids is None:
        return grouping.identity_order(call.kv_heads, call.total_q)
    return ids.cpu().numpy()


def found_by_oracle(variant: str, prepared: Prepared, call: SparsePrefillCall) -> np.ndarray:
    """The oracle's order for the windows and groups that the variant says it searched."""
    window, group = (int(prepared.details[key]) for key in ("window", "search_group"))
    if searches_by_matching(variant):
        return grouping.match(supports(call)[0], call.cu_seqlens_q.cpu().numpy(), window)
    return grouping.regroup(supports(call)[0], call.cu_seqlens_q.cpu().numpy(), window, group)


@cache
def made(shape: Shape) -> SparsePrefillCall:
    return shape.build().to(DEVICE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [64, 128])
@pytest.mark.parametrize("variant", SEARCHING)
def test_the_order_is_the_oracles_and_never_leaves_a_window(variant: str, window: int, shape: Shape) -> None:
    call = made(shape)
    prepared = prepare(variant, "fast", call, window)
    window = int(prepared.details["window"])  # a design may fix it, and whole tasks may round it down
    order = order_of(prepared, call)
    bounds = call.cu_seqlens_q.cpu().numpy()
    grouping.check_order(order, bounds)
    for begin, end in pairwise(bounds.tolist()):
        slots = np.arange(end - begin)
        of_window = (order[:, begin:end] - begin) // window
        assert np.array_equal(of_window, np.tile(slots // window, (len(order), 1)))
    assert np.array_equal(order, found_by_oracle(variant, prepared, call))


@pytest.mark.parametrize(
    ("searched", "q_lens", "prefix", "kv_heads"),
    [
        (False, (60,), 40_000, 1),
        (False, (4096,), 1000, 1),
        (True, (4200,), 34_000, 1),
        (True, (900, 124), 34_000, 4),
    ],
)
def test_pageweaver_searches_where_that_pays_and_else_keeps_the_order(
    searched: bool, q_lens: tuple[int, ...], prefix: int, kv_heads: int
) -> None:
    prefixes = [prefix] * len(q_lens)
    call = mild(q_lens=q_lens, prefix_lens=prefixes, kv_heads=kv_heads, poison="none").to(DEVICE)
    prepared = prepare("pageweaver", "fast", call)
    order = order_of(prepared, call)
    assert ("window" in prepared.details) == searched
    if searched:
        assert np.array_equal(order, found_by_oracle("pageweaver", prepared, call))
    assert searched == (order != np.arange(call.total_q)).any()


@pytest.mark.parametrize("variant", ["union8", "pageweaver-original"])
def test_variants_without_a_search_report_the_original_order(variant: str) -> None:
    call = mild(q_lens=(256,), prefix_lens=(9000,)).to(DEVICE)
    prepared = prepare(variant, "fast", call)
    run(prepared)
    assert prepared.query_ids() is None and "window" not in prepared.details


@pytest.mark.parametrize("case", [case for case in CASES if "8192" not in case.name], ids=str)
@pytest.mark.parametrize("variant", UNIONS)
def test_the_page_lists_are_the_oracles(variant: str, case: Case) -> None:
    call, _ = built(case)
    prepared = prepare(variant, "fast", call)
    order = order_of(prepared, call)
    if prepared.debug is None:
        pytest.skip(f"{variant} does not hand out its page lists on {DEVICE.type}")
    seen = prepared.debug()["unions"]
    want = grouping.prepare_unions(supports(call)[0], order, call.cu_seqlens_q.cpu().numpy(), prepared.group)
    for name in ("kv_head", "begin", "size", "offsets", "pages", "masks"):
        assert np.array_equal(getattr(seen, name), getattr(want, name)), name


@pytest.mark.parametrize("variant", UNIONS)
def test_every_task_in_use_is_listed_once_by_every_launch(variant: str) -> None:
    """Complete calls and stages differ in how many blocks list tasks; the lists start anew each time."""
    call = mild(q_lens=(150, 0, 61), prefix_lens=(900, 0, 3000), selection="dirty", kv_heads=2).to(DEVICE)
    prepared = prepare(variant, "fast", call)
    if prepared.debug is None:
        pytest.skip(f"{variant} does not hand out its task order on {DEVICE.type}")
    for _ in range(3):
        for launch in (prepared.run, prepared.run, *(stage.run for stage in prepared.stages)):
            launch()
            seen = prepared.debug()
            if seen["task_order"] is None:
                pytest.skip(f"{variant} takes tasks as they come")
            used = np.flatnonzero(seen["tasks"]["queries"] > 0)
            assert np.array_equal(np.sort(seen["task_order"]), used)
            members = seen["pages"]["members"]
            listed = np.arange(members.shape[1]) < seen["tasks"]["pages"][:, None]
            tiles = ((members & 15) != 0).astype(int) + ((members >> 4) != 0)
            work = (tiles * listed).sum(axis=1)[seen["task_order"]]
            largest = members.shape[1]
            assert (np.diff((largest - work) * BUCKETS // (largest + 1)) >= 0).all()


@pytest.mark.parametrize(
    ("original", "online"), [("union8", "union8-regroup"), ("pageweaver-original", "pageweaver-regroup")]
)
def test_regrouping_changes_the_order_and_not_the_sets(original: str, online: str) -> None:
    call = mild(q_lens=(256,), prefix_lens=(9000,), kv_heads=2).to(DEVICE)
    straight, sought = prepare(original, "accurate", call), prepare(online, "accurate", call)
    a, b = run(straight), run(sought)
    order = order_of(sought, call)
    assert (order != np.arange(256)).any()
    assert np.array_equal(np.sort(order, axis=1), np.tile(np.arange(256), (2, 1)))
    assert float((a.float() - b.float()).norm() / a.float().norm()) <= 3e-3


@pytest.mark.parametrize("kernels", ["union8", "pageweaver"])
def test_the_precomputed_order_is_the_online_one(kernels: str) -> None:
    call = mild(q_lens=(256,), prefix_lens=(9000,)).to(DEVICE)
    online, before = (prepare(f"{kernels}-{order}", "fast", call) for order in ("regroup", "precomputed"))
    assert np.array_equal(order_of(online, call), order_of(before, call))
    assert torch.equal(run(online), run(before))
