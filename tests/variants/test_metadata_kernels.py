"""The kernels ahead of attention, run thread by thread on the CPU against `pwbench.grouping`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from pwbench import kernels
from pwbench.grouping import Unions, identity_order, prepare_unions, regroup
from pwbench.operator import PAGE, SparsePrefillCall, supports, visible_tokens
from pwbench.variants._union_plan import BLOCK, IMAGE_BYTES, PAGE_RECORD, TASK_RECORD, Plan, unions_of
from tests.calls import SELECTIONS, make_call
from tests.emulator import Emulated, compile_for_cpu

UNTOUCHED = -77


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def far_into(call: SparsePrefillCall, tokens: int) -> SparsePrefillCall:
    """The call's first request moved to the end of a long context, its ids spread over it; the cache stays
    small, so its rows repeat in the page table."""
    pages = -(-tokens // PAGE)
    rng = np.random.default_rng(tokens)
    table = torch.from_numpy(rng.integers(0, call.k.shape[0], (1, pages)).astype(np.int32))
    ids = torch.from_numpy(rng.integers(-1, pages + 1, call.topk.shape).astype(np.int32))
    length = torch.tensor([tokens], dtype=torch.int32)
    start = tokens - call.total_q
    positions = torch.arange(start, tokens, dtype=torch.int32)
    return replace(call, page_table=table, topk=ids, seq_lens=length, positions=positions)


# Launching ------------------------------------------------------------------------------------


def tables(call: SparsePrefillCall, plan: Plan) -> dict[str, object]:
    return {
        "topk": call.topk,
        "cu_seqlens_q": call.cu_seqlens_q,
        "seq_lens": call.seq_lens,
        "positions": call.positions,
        "total_q": plan.total_q,
        "requests": plan.requests,
        "max_pages": plan.max_pages,
    }


def run_regroup(
    folder: Path,
    call: SparsePrefillCall,
    window: int,
    group: int,
    gate: float = 0.0,
    source: str = "regroup.cu",
) -> np.ndarray:
    plan = Plan.of(call, group, window)
    assert plan.window == window
    program = compile_for_cpu(
        folder, "regroup.cu", {"regroup": ["RegroupParams"]}, {"WINDOW": window, "GROUP": group}
    )
    order = np.full((plan.kv_heads, plan.total_q), UNTOUCHED, np.int32)
    params = kernels.pack(
        kernels.params_dtype("regroup.cu", "RegroupParams"),
        **tables(call, plan),
        order=order.ctypes.data,
        windows_per_head=plan.windows_per_head,
        gate=gate,
    )
    program.launch("regroup", plan.windows, BLOCK, params)
    return order


def pack_params(call: SparsePrefillCall, images: np.ndarray, blocks: int) -> np.ndarray:
    page, head, token, _ = call.v.stride()
    return kernels.pack(
        kernels.params_dtype("pack_values.cuh", "PackParams"),
        v=call.v,
        images=images.ctypes.data,
        page_table=call.page_table,
        seq_lens=call.seq_lens,
        page_stride=page,
        head_stride=head,
        token_stride=token,
        requests=call.requests,
        max_pages=call.page_table.shape[1],
        kv_heads=call.kv_heads,
        blocks=blocks,
    )


class Prepared:
    """What one run of the union preparation wrote."""

    def __init__(
        self, folder: Path, call: SparsePrefillCall, queries: int, order: np.ndarray | None, pack: int = 0
    ) -> None:
        plan = self.plan = Plan.of(call, queries, 128)
        program = self.program(folder, queries)
        self.tasks = np.full(plan.tasks, UNTOUCHED, np.int32).repeat(36).view(TASK_RECORD)
        self.pages = np.zeros((plan.tasks, plan.record_stride), PAGE_RECORD)
        self.task_order = np.full(plan.tasks, UNTOUCHED, np.int32)
        self.counters = np.array([5, 0], np.int32)
        self.images = np.full((plan.pool_pages, plan.kv_heads, PAGE, PAGE), 0xEE, np.uint8)
        work = np.full(plan.tasks, UNTOUCHED, np.int32)
        params = kernels.pack(
            kernels.params_dtype("prepare.cu", "PrepareParams"),
            **tables(call, plan),
            order=None if order is None else order.ctypes.data,
            page_table=call.page_table,
            task_records=self.tasks.ctypes.data,
            page_records=self.pages.ctypes.data,
            next_task=self.counters.ctypes.data,
            task_work=work.ctypes.data,
            task_order=self.task_order.ctypes.data,
            finished_tasks=self.counters[1:].ctypes.data,
            kv_heads=plan.kv_heads,
            tasks_per_head=plan.tasks_per_head,
        )
        if pack:
            values = pack_params(call, self.images, pack)
            program.launch("prepare_and_pack", plan.tasks + pack, BLOCK, params, values)
        else:
            program.launch("prepare", plan.tasks, BLOCK, params)

    @staticmethod
    def program(folder: Path, queries: int) -> Emulated:
        entries = {"prepare": ["PrepareParams"], "prepare_and_pack": ["PrepareParams", "PackParams"]}
        return compile_for_cpu(folder, "prepare.cu", entries, {"TASK_QUERIES": queries})


def unpacked(image: np.ndarray) -> np.ndarray:
    """``[token, channel]`` bytes of one V^T image, by the definition of its format."""
    token = channel = np.arange(PAGE)
    s, h, c, t, q = token >> 5, token >> 4 & 1, token >> 3 & 1, token >> 1 & 3, token & 1
    slot = 32 * s + 16 * h + 4 * t + 2 * c + q
    g, t, j, q = channel >> 5, channel >> 3 & 3, channel >> 1 & 3, channel & 1
    row = 32 * g + 8 * j + 2 * t + q
    at = row[None] * 128 + (((slot[:, None] >> 4) ^ (row[None] & 7)) << 4) + (slot[:, None] & 15)
    return image.reshape(-1)[at]


def assert_same(seen: Unions, expected: Unions) -> None:
    for name in ("kv_head", "begin", "size", "offsets", "pages", "masks"):
        np.testing.assert_array_equal(getattr(seen, name), getattr(expected, name), err_msg=name)


# The search -----------------------------------------------------------------------------------


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize(("window", "group"), [(128, 8), (64, 8), (120, 12), (64, 16), (128, 4)])
def test_search_is_the_greedy_oracle_bit_for_bit(
    folder: Path, selection: str, window: int, group: int
) -> None:
    call = make_call(window + group, (131, 0, 1, 300), kv_heads=2, selection=selection)  # type: ignore[arg-type]
    expected = regroup(supports(call)[0], call.cu_seqlens_q.numpy(), window, group)
    np.testing.assert_array_equal(run_regroup(folder, call, window, group), expected)


def test_search_has_no_limit_on_pages(folder: Path) -> None:
    call = far_into(make_call(5, (130,)), tokens=300_000)
    first = np.arange(130)[:, None] * 16 + np.arange(16)
    call.topk[0] = torch.from_numpy(np.where(first % 3 == 0, first // 50, first).astype(np.int32))
    pages = supports(call)[0]
    assert len(np.unique(pages[:, :128])) > 1024
    np.testing.assert_array_equal(
        run_regroup(folder, call, 128, 8), regroup(pages, call.cu_seqlens_q.numpy(), 128, 8)
    )


def test_search_finds_its_request_among_more_than_a_warp_of_them(folder: Path) -> None:
    lengths = [(7 * r) % 5 for r in range(70)]
    call = make_call(9, lengths, selection="local")
    np.testing.assert_array_equal(
        run_regroup(folder, call, 64, 8), regroup(supports(call)[0], call.cu_seqlens_q.numpy(), 64, 8)
    )


def test_gate_keeps_only_windows_whose_neighbours_already_share(folder: Path) -> None:
    call = make_call(2, (128, 128), selection="random")
    pages = supports(call)[0].copy()
    call.topk[0, :128] = call.topk[0, 0]
    call.positions[:128] = call.positions[127]
    pages = supports(call)[0]
    mean = [
        np.mean([len((set(a) | set(b)) - {-1}) for a, b in pairwise(w)])
        for w in pages[0].reshape(2, 128, -1).tolist()
    ]
    seen = run_regroup(folder, call, 128, 8, gate=(mean[0] + mean[1]) / 2)
    expected = regroup(pages, call.cu_seqlens_q.numpy(), 128, 8)
    np.testing.assert_array_equal(seen[0, :128], np.arange(128))
    np.testing.assert_array_equal(seen[0, 128:], expected[0, 128:])
    assert (expected[0, 128:] != np.arange(128, 256)).any()
    for gate, order in ((mean[1], identity_order(1, 256)), (mean[1] - 0.001, seen)):
        np.testing.assert_array_equal(run_regroup(folder, call, 128, 8, gate=gate), order)


# Union preparation ----------------------------------------------------------------------------


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("queries", [8, 12, 16])
@pytest.mark.parametrize("regrouped", [False, True])
def test_unions_are_the_oracles(folder: Path, selection: str, queries: int, regrouped: bool) -> None:
    call = make_call(queries, (70, 0, 1, 33), kv_heads=2, selection=selection)  # type: ignore[arg-type]
    pages, bounds = supports(call)[0], call.cu_seqlens_q.numpy()
    order = regroup(pages, bounds, 64 - 64 % queries, queries)
    given = order if regrouped else identity_order(2, call.total_q)
    seen = Prepared(folder, call, queries, order if regrouped else None)
    assert_same(unions_of(seen.tasks, seen.pages), prepare_unions(pages, given, bounds, queries))
    assert seen.counters.tolist() == [0, 0]


def test_records_carry_rows_of_the_cache_and_what_each_query_sees(folder: Path) -> None:
    call = make_call(4, (29, 3), kv_heads=2, selection="dirty", positions=None)
    order = regroup(supports(call)[0], call.cu_seqlens_q.numpy(), 64, 8)
    seen = Prepared(folder, call, 8, order)
    visible, table = visible_tokens(call), call.page_table.numpy()
    flat = {0: iter(order[0]), 1: iter(order[1])}
    for task, pages in zip(seen.tasks, seen.pages, strict=True):
        listed = pages[: task["pages"]]
        np.testing.assert_array_equal(listed["row"], table[task["request"], listed["logical"]])
        for index, slot in enumerate(task["slots"]):
            if index < task["queries"]:
                assert slot["query"] == next(flat[int(task["kv_head"])])
                assert slot["visible"] == visible[slot["query"]]
            else:
                assert slot.tolist() == (-1, 0)
    assert all(next(rest, None) is None for rest in flat.values())


def test_a_position_at_the_integer_limit_sees_the_whole_request(folder: Path) -> None:
    call = make_call(6, (9,), selection="random", seq_lens=(500,))
    call.positions[:] = 2**31 - 1
    seen = Prepared(folder, call, 8, None)
    assert set(seen.tasks["slots"]["visible"][seen.tasks["queries"] > 0].ravel().tolist()) == {0, 500}


def test_unions_of_a_million_token_context(folder: Path) -> None:
    call = make_call(8, (20,), selection="random")
    call = far_into(call, tokens=1 << 20)
    seen = Prepared(folder, call, 12, None)
    pages, bounds = supports(call)[0], call.cu_seqlens_q.numpy()
    assert_same(unions_of(seen.tasks, seen.pages), prepare_unions(pages, identity_order(1, 20), bounds, 12))


@pytest.mark.parametrize("queries", [8, 12])
def test_tasks_are_ordered_by_descending_subgroup_pages_then_index(folder: Path, queries: int) -> None:
    call = make_call(11, (500, 0, 77), kv_heads=2, selection="dirty")
    seen = Prepared(folder, call, queries, None)
    work = np.zeros(len(seen.tasks), np.int64)
    for index, (task, pages) in enumerate(zip(seen.tasks, seen.pages, strict=True)):
        members = pages["members"][: task["pages"]]
        work[index] = sum(np.count_nonzero(members >> low & 15) for low in range(0, queries, 4))
    np.testing.assert_array_equal(seen.task_order, np.argsort(-work, kind="stable"))


# V images -------------------------------------------------------------------------------------


@pytest.mark.parametrize("separate", [False, True])
def test_images_hold_every_token_of_every_used_page_and_no_nan(folder: Path, separate: bool) -> None:
    call = make_call(3, (40, 0, 5), kv_heads=2, selection="random", separate=separate)
    images = np.full((call.k.shape[0], 2, PAGE, PAGE), 0xEE, np.uint8)
    program = compile_for_cpu(folder, "pack_values.cu", {"pack_values": ["PackParams"]}, {})
    program.launch("pack_values", 5, BLOCK, pack_params(call, images, blocks=5))
    check_images(call, images)


def check_images(call: SparsePrefillCall, images: np.ndarray) -> None:
    stored = call.v.contiguous().view(torch.uint8).numpy()
    clean = np.where((stored & 0x7F) == 0x7F, 0, stored)
    assert (clean != stored).any()
    used = np.zeros(len(images), bool)
    for request, length in enumerate(call.seq_lens.tolist()):
        used[call.page_table[request, : -(-length // PAGE)].numpy()] = True
    for row in range(len(images)):
        for head in range(call.kv_heads):
            if used[row]:
                np.testing.assert_array_equal(unpacked(images[row, head]), clean[row, head])
            else:
                assert (images[row, head] == 0xEE).all()
    assert used.any()
    assert not used.all()


def test_fused_launches_write_what_the_separate_ones_do(folder: Path) -> None:
    call = make_call(13, (90, 20), kv_heads=2, selection="dirty")
    pages, bounds = supports(call)[0], call.cu_seqlens_q.numpy()
    seen = Prepared(folder, call, 8, None, pack=7)
    assert_same(unions_of(seen.tasks, seen.pages), prepare_unions(pages, identity_order(2, 110), bounds, 8))
    check_images(call, seen.images)

    plan = Plan.of(call, 8, 64)
    entries = {"regroup_and_pack": ["RegroupParams", "PackParams"]}
    program = compile_for_cpu(folder, "regroup.cu", entries, {"WINDOW": 64, "GROUP": 8})
    order = np.full((2, 110), UNTOUCHED, np.int32)
    images = np.full((plan.images, IMAGE_BYTES), 0xEE, np.uint8)
    search = kernels.pack(
        kernels.params_dtype("regroup.cu", "RegroupParams"),
        **tables(call, plan),
        order=order.ctypes.data,
        windows_per_head=plan.windows_per_head,
        gate=0,
    )
    program.launch("regroup_and_pack", plan.windows + 3, BLOCK, search, pack_params(call, images, 3))
    np.testing.assert_array_equal(order, regroup(pages, bounds, 64, 8))
    check_images(call, images.reshape(seen.images.shape))
