"""The kernels ahead of attention, run thread by thread on the CPU against `pwbench.grouping`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pwbench import kernels
from pwbench.grouping import Unions, identity_order, match, prepare_unions, regroup
from pwbench.operator import PAGE, SparsePrefillCall, request_of_rows, supports, visible_tokens
from pwbench.variants._union_plan import (
    BLOCK,
    BUCKETS,
    PAGE_RECORD,
    TASK_QUEUE,
    TASK_RECORD,
    Design,
    Plan,
    listed_tasks,
    unions_of,
)
from tests.calls import SELECTIONS, Selection, make_call
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


class Run:
    """Buffers of one call on the CPU, and the kernels that fill them."""

    def __init__(
        self,
        folder: Path,
        call: SparsePrefillCall,
        queries: int,
        window: int = 128,
        search_group: int | None = None,
        value_bytes: int = 1,
        *,
        matching: bool = False,
    ) -> None:
        self.folder, self.call, self.matching = folder, call, matching
        design = Design(
            "any.cu",
            queries,
            threads=128,
            search_group=search_group,
            matching=matching,
            value_bytes=value_bytes,
        )
        plan = self.plan = Plan.of(call, design, window)
        self.order = np.full((plan.kv_heads, plan.total_q), UNTOUCHED, np.int32)
        self.tasks = np.full((plan.tasks, TASK_RECORD.itemsize // 4), UNTOUCHED, np.int32).view(TASK_RECORD)[
            :, 0
        ]
        self.pages = np.zeros((plan.tasks, plan.record_stride), PAGE_RECORD)
        self.task_order = np.full((BUCKETS, plan.tasks), UNTOUCHED, np.int32)
        self.queue = np.zeros(1, TASK_QUEUE)
        self.queue["next"] = 5
        self.images = np.full((plan.pool_pages, plan.kv_heads, plan.image_bytes), 0xEE, np.uint8)
        self.packers = plan.pack_blocks(1) if plan.packs_selected else 5

    @property
    def unions(self) -> Unions:
        return unions_of(self.tasks, self.pages)

    def regroup(self) -> np.ndarray:
        shared = self.plan.regroup_shared
        self._search().launch("regroup", self.plan.windows, BLOCK, self._regroup_params(), shared=shared)
        return self.order

    def plan_and_pack(self) -> None:
        params = (self._regroup_params(), self._prepare_params(None), self._pack_params())
        blocks, shared = self.plan.windows + self.packers, self.plan.regroup_shared
        self._search().launch("plan_and_pack", blocks, BLOCK, *params, shared=shared)

    def prepare(self, order: np.ndarray | None = None) -> None:
        params, shared = self._prepare_params(order), self.plan.prepare_shared
        self._lists().launch("prepare", self.plan.tasks, BLOCK, params, shared=shared)

    def prepare_and_pack(self) -> None:
        params = (self._prepare_params(None), self._pack_params())
        blocks, shared = self.plan.tasks + self.packers, self.plan.prepare_shared
        self._lists().launch("prepare_and_pack", blocks, BLOCK, *params, shared=shared)

    def pack_values(self) -> None:
        entries = {"pack_values": ["PackParams"], "pack_selected": ["PackParams", "Selection"]}
        program = compile_for_cpu(self.folder, "pack_values.cu", entries, self._images)
        if not self.plan.packs_selected:
            program.launch("pack_values", self.packers, BLOCK, self._pack_params())
            return
        selection = kernels.pack(
            kernels.params_dtype("pack_values.cuh", "Selection"),
            topk=self.call.topk,
            cu_seqlens_q=self.call.cu_seqlens_q,
            positions=self.call.positions,
            total_q=self.plan.total_q,
        )
        program.launch("pack_selected", self.packers, BLOCK, self._pack_params(), selection)

    def _search(self) -> Emulated:
        entries = {
            "regroup": ["RegroupParams"],
            "plan_and_pack": ["RegroupParams", "PrepareParams", "PackParams"],
        }
        defines = {
            "WINDOW": self.plan.window,
            "GROUP": self.plan.search_group,
            "TASK_QUERIES": self.plan.queries,
            **({"MATCHING": 1} if self.matching else {}),
            **self._fused,
        }
        return compile_for_cpu(self.folder, "regroup.cu", entries, defines)

    def _lists(self) -> Emulated:
        entries = {"prepare": ["PrepareParams"], "prepare_and_pack": ["PrepareParams", "PackParams"]}
        defines = {"TASK_QUERIES": self.plan.queries, **self._fused}
        return compile_for_cpu(self.folder, "prepare.cu", entries, defines)

    @property
    def _fused(self) -> dict[str, int]:
        return {**self._images, **({"PACK_SELECTED": 1} if self.plan.packs_selected else {})}

    @property
    def _images(self) -> dict[str, int]:
        return {"VALUE_BYTES": self.plan.value_bytes} if self.plan.value_bytes > 1 else {}

    def _tables(self) -> dict[str, object]:
        return {
            "topk": self.call.topk,
            "cu_seqlens_q": self.call.cu_seqlens_q,
            "seq_lens": self.call.seq_lens,
            "positions": self.call.positions,
            "total_q": self.plan.total_q,
            "requests": self.plan.requests,
            "max_pages": self.plan.max_pages,
            "kv_heads": self.plan.kv_heads,
        }

    def _regroup_params(self) -> np.ndarray:
        return kernels.pack(
            kernels.params_dtype("window.cuh", "RegroupParams"),
            **self._tables(),
            order=self.order.ctypes.data,
            windows_per_head=self.plan.windows_per_head,
        )

    def _prepare_params(self, order: np.ndarray | None) -> np.ndarray:
        return kernels.pack(
            kernels.params_dtype("tasks.cuh", "PrepareParams"),
            **self._tables(),
            order=None if order is None else order.ctypes.data,
            page_table=self.call.page_table,
            task_records=self.tasks.ctypes.data,
            page_records=self.pages.ctypes.data,
            task_order=self.task_order.ctypes.data,
            queue=self.queue.ctypes.data,
            tasks_per_head=self.plan.tasks_per_head,
        )

    def _pack_params(self) -> np.ndarray:
        page, head, token, _ = self.call.v.stride()
        return kernels.pack(
            kernels.params_dtype("pack_values.cuh", "PackParams"),
            v=self.call.v,
            images=self.images.ctypes.data,
            page_table=self.call.page_table,
            seq_lens=self.call.seq_lens,
            page_stride=page,
            head_stride=head,
            token_stride=token,
            requests=self.plan.requests,
            max_pages=self.plan.max_pages,
            kv_heads=self.plan.kv_heads,
            blocks=self.packers,
        )


# Oracles --------------------------------------------------------------------------------------


def greedy(call: SparsePrefillCall, window: int, group: int) -> np.ndarray:
    return regroup(supports(call)[0], call.cu_seqlens_q.numpy(), window, group)


def matched(call: SparsePrefillCall, window: int = 64) -> np.ndarray:
    return match(supports(call)[0], call.cu_seqlens_q.numpy(), window)


def oracle_unions(call: SparsePrefillCall, order: np.ndarray, queries: int) -> Unions:
    return prepare_unions(supports(call)[0], order, call.cu_seqlens_q.numpy(), queries)


def unpacked(image: np.ndarray) -> np.ndarray:
    """``[token, channel]`` bits of a V^T image, e4m3 or by its size f16, by the definition of its format."""
    token = channel = np.arange(PAGE)
    g, t, j, q = channel >> 5, channel >> 3 & 3, channel >> 1 & 3, channel & 1
    row = 32 * g + 8 * j + 2 * t + q
    if image.size == PAGE * PAGE:
        s, h, c, t, q = token >> 5, token >> 4 & 1, token >> 3 & 1, token >> 1 & 3, token & 1
        part, byte = 0 * token, 32 * s + 16 * h + 4 * t + 2 * c + q
    else:
        part, byte = token // 64, token % 64 * 2
    at = row * 128 + ((byte[:, None] >> 4 ^ row & 7) << 4) + (byte[:, None] & 15) + 16384 * part[:, None]
    return image[at] if image.size == PAGE * PAGE else image.view(np.uint16)[at // 2]


def assert_same(seen: Unions, expected: Unions) -> None:
    for name in ("kv_head", "begin", "size", "offsets", "pages", "masks"):
        np.testing.assert_array_equal(getattr(seen, name), getattr(expected, name), err_msg=name)


def assert_records(run: Run, order: np.ndarray) -> None:
    """Rows of the cache, original query rows and visible tokens of every record, unused tasks and slots."""
    visible, table = visible_tokens(run.call), run.call.page_table.numpy()
    rows = [iter(head) for head in order]
    for task, pages in zip(run.tasks, run.pages, strict=True):
        listed = pages[: task["pages"]]
        np.testing.assert_array_equal(listed["row"], table[task["request"], listed["logical"]])
        for index, slot in enumerate(task["slots"]):
            row = next(rows[task["kv_head"]]) if index < task["queries"] else -1
            assert slot.tolist() == (row, visible[row] if row >= 0 else 0)
        assert task["queries"] > 0 or task["pages"] == 0
    assert all(next(rest, None) is None for rest in rows)


def assert_task_order(run: Run) -> None:
    """Every task in use is listed once, in the bucket of its work, and the queue is ready for the next."""
    work = np.zeros(len(run.tasks), np.int64)
    for index, (task, pages) in enumerate(zip(run.tasks, run.pages, strict=True)):
        members = pages["members"][: task["pages"]]
        work[index] = sum(np.count_nonzero(members >> low & 15) for low in range(0, run.plan.queries, 4))
    listed = listed_tasks(run.queue[0], run.task_order)
    np.testing.assert_array_equal(np.sort(listed), np.flatnonzero(run.tasks["queries"] > 0))
    largest = run.plan.record_stride
    bucket = (largest - work[listed]) * BUCKETS // (largest + 1)
    coming = int(run.queue["turns"][0]) >> 31
    np.testing.assert_array_equal(
        run.queue["count"][0, :, 1 - coming], np.bincount(bucket, minlength=BUCKETS)
    )
    assert (np.diff(bucket) >= 0).all()
    assert not run.queue["count"][0, :, coming].any()
    assert run.queue["next"][0] == 0 and run.queue["turns"][0] % (1 << 31) == 0


def assert_images(
    call: SparsePrefillCall, images: np.ndarray, wanted: set[tuple[int, int]] | None = None
) -> None:
    """Every image wanted, (row of the cache, head), holds its page without NaN, and no other was touched.
    Wanted by default: all pages that hold a token."""
    stored = call.v.contiguous().view(torch.uint8).numpy()
    clean = np.where((stored & 0x7F) == 0x7F, 0, stored)
    assert (clean != stored).any()
    if images.shape[-1] > PAGE * PAGE:
        clean = torch.from_numpy(clean).view(torch.float8_e4m3fn).to(torch.float16).numpy().view(np.uint16)
    if wanted is None:
        wanted = {
            (row, head)
            for request, length in enumerate(call.seq_lens.tolist())
            for row in call.page_table[request, : -(-length // PAGE)].tolist()
            for head in range(call.kv_heads)
        }
    for row in range(len(images)):
        for head in range(call.kv_heads):
            if (row, head) in wanted:
                np.testing.assert_array_equal(unpacked(images[row, head]), clean[row, head])
            else:
                assert (images[row, head] == 0xEE).all()
    assert 0 < len(wanted) < images.shape[0] * images.shape[1]


# The search -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "group"), [(128, 8), (64, 8), (64, 4), (64, 16)])
def test_search_alone_is_the_greedy_oracle_bit_for_bit(folder: Path, window: int, group: int) -> None:
    call = make_call(window + group, (131, 0, 1, 70), kv_heads=2, selection="dirty")
    run = Run(folder, call, max(group, 8), window, group)
    np.testing.assert_array_equal(run.regroup(), greedy(call, window, group))


def test_search_has_no_limit_on_pages(folder: Path) -> None:
    call = far_into(make_call(5, (130,)), tokens=300_000)
    first = np.arange(130)[:, None] * 16 + np.arange(16)
    call.topk[0] = torch.from_numpy(np.where(first % 3 == 0, first // 50, first).astype(np.int32))
    assert len(np.unique(supports(call)[0][:, :128])) > 1024
    run = Run(folder, call, 8)
    run.plan_and_pack()
    np.testing.assert_array_equal(run.order, greedy(call, 128, 8))
    assert_same(run.unions, oracle_unions(call, run.order, 8))


@pytest.mark.parametrize("group", [8, 4])
def test_search_finds_its_request_among_more_than_a_warp_of_them(folder: Path, group: int) -> None:
    call = make_call(9, [(7 * r) % 5 for r in range(70)], selection="local")
    run = Run(folder, call, 8, 64, group)
    run.plan_and_pack()
    np.testing.assert_array_equal(run.order, greedy(call, 64, group))
    assert_same(run.unions, oracle_unions(call, run.order, 8))


@pytest.mark.parametrize("rows", range(1, 17))
def test_a_task_takes_whichever_of_its_search_groups_there_are(folder: Path, rows: int) -> None:
    """Windows that end in the first group of a task, in its second, or on the edge of either."""
    call = make_call(rows, (rows, 64 + rows), kv_heads=2)
    run = Run(folder, call, 8, 64, search_group=4)
    run.plan_and_pack()
    np.testing.assert_array_equal(run.order, greedy(call, 64, 4))
    assert_same(run.unions, oracle_unions(call, run.order, 8))
    assert_records(run, run.order)
    assert_task_order(run)


def test_groups_smaller_than_a_task_are_filled_one_by_one_not_a_task_at_a_time(folder: Path) -> None:
    call = make_call(17, (128,), (9000,))
    orders = {group: Run(folder, call, 8, 64, group).regroup() for group in (4, 8)}
    assert (orders[4] != orders[8]).any()
    for group, order in orders.items():
        np.testing.assert_array_equal(order, greedy(call, 64, group))


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_search_by_matching_is_its_oracle_bit_for_bit(
    folder: Path, selection: Selection, kv_heads: int
) -> None:
    call = make_call(kv_heads, (131, 0, 1, 70, 64), (5000, 0, 0, 900, 20_000), kv_heads, selection)
    run = Run(folder, call, 8, 64, 4, matching=True)
    np.testing.assert_array_equal(run.regroup(), matched(call))


def test_search_by_matching_moves_rows(folder: Path) -> None:
    call = make_call(3, (128,), (9000,))
    order = Run(folder, call, 8, 64, 4, matching=True).regroup()
    assert (order != identity_order(1, 128)).any() and (order != greedy(call, 64, 4)).any()


@pytest.mark.parametrize("rows", range(1, 65, 3))
def test_search_by_matching_keeps_rows_that_fill_no_quad(folder: Path, rows: int) -> None:
    call = make_call(rows, (rows, 64 + rows), (3000, 700), kv_heads=2, selection="dirty")
    run = Run(folder, call, 8, 64, 4, matching=True)
    run.plan_and_pack()
    np.testing.assert_array_equal(run.order, matched(call))
    assert_same(run.unions, oracle_unions(call, run.order, 8))
    assert_records(run, run.order)
    assert_task_order(run)


def test_search_by_matching_finds_its_request_among_more_than_a_warp_of_them(folder: Path) -> None:
    call = make_call(9, [(7 * r) % 23 for r in range(70)], selection="local", kv_heads=2)
    run = Run(folder, call, 8, 64, 4, matching=True)
    run.plan_and_pack()
    np.testing.assert_array_equal(run.order, matched(call))
    assert_same(run.unions, oracle_unions(call, run.order, 8))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [64, 40])
def test_search_by_matching_of_any_ids_is_its_oracle(folder: Path, seed: int, window: int) -> None:
    """Ids that repeat, lie outside the page table or in the future, whole rows without any, and as many
    distinct pages as a window can have."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 90, rng.integers(1, 4)).tolist()
    call = far_into(make_call(seed, (sum(rows) + 1,), kv_heads=2), tokens=300_000)
    spread = int(rng.choice([2, 20, 200, 2400]))
    ids = rng.integers(-spread // 4 - 1, spread, call.topk.shape)
    ids[rng.random(ids.shape[:2]) < 0.1] = -1
    ids[rng.random(ids.shape) < 0.02] = 2**31 - 1
    call.topk[:] = torch.from_numpy(ids.astype(np.int32))
    run = Run(folder, call, 8, window, 4, matching=True)
    run.plan_and_pack()
    np.testing.assert_array_equal(run.order, matched(call, window))
    assert_same(run.unions, oracle_unions(call, run.order, 8))
    assert_task_order(run)


@pytest.mark.parametrize(("queries", "window"), [(8, 8), (12, 36), (16, 64)])
def test_search_by_matching_fills_tasks_of_any_whole_quads(folder: Path, queries: int, window: int) -> None:
    call = make_call(queries, (131, 0, 9), (5000, 0, 900), kv_heads=4, selection="local")
    run = Run(folder, call, queries, window, 4, matching=True)
    run.plan_and_pack()
    np.testing.assert_array_equal(run.order, matched(call, window))
    assert_same(run.unions, oracle_unions(call, run.order, queries))
    assert_records(run, run.order)
    assert_task_order(run)


@pytest.mark.parametrize("pages", [1, 31, 32, 33, 8192, 8193, 65535, 65536])
@pytest.mark.parametrize("entry", ["matching", "greedy", "prepare"])
def test_page_tables_of_any_width_are_listed_to_the_last_page(folder: Path, entry: str, pages: int) -> None:
    """A word of the bitmap that is not full, a thread that ranks more than one, and ids of all 16 bits."""
    call = far_into(make_call(pages, (75,), selection="random"), tokens=pages * PAGE)
    call.topk[0, ::2, 3] = pages - 1
    assert call.page_table.shape[1] == pages and (supports(call)[0] == pages - 1).any()
    run = Run(folder, call, 8, 64, 4, matching=entry == "matching")
    expected = identity_order(1, 75)
    if entry == "prepare":
        run.prepare()
    else:
        expected = matched(call) if entry == "matching" else greedy(call, 64, 4)
        run.plan_and_pack()
        np.testing.assert_array_equal(run.order, expected)
    assert_same(run.unions, oracle_unions(call, expected, 8))
    assert_records(run, expected)
    assert_task_order(run)


# Union preparation ----------------------------------------------------------------------------


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("queries", [8, 12, 16])
def test_unions_of_any_order_are_the_oracles(folder: Path, selection: Selection, queries: int) -> None:
    call = make_call(queries, (70, 0, 1, 33), kv_heads=2, selection=selection)
    run = Run(folder, call, queries)
    for order in (None, greedy(call, 64, queries)):
        run.prepare(order)
        given = identity_order(2, call.total_q) if order is None else order
        assert_same(run.unions, oracle_unions(call, given, queries))
        assert_records(run, given)
        assert_task_order(run)


def test_a_position_at_the_integer_limit_sees_the_whole_request(folder: Path) -> None:
    call = make_call(6, (9,), selection="random", seq_lens=(500,))
    call.positions[:] = 2**31 - 1
    run = Run(folder, call, 8)
    run.prepare()
    assert set(run.tasks["slots"]["visible"].ravel().tolist()) == {0, 500}


def test_unions_of_a_million_token_context(folder: Path) -> None:
    call = far_into(make_call(8, (20,), selection="random"), tokens=1 << 20)
    run = Run(folder, call, 12)
    run.prepare()
    assert_same(run.unions, oracle_unions(call, identity_order(1, 20), 12))


def test_tasks_are_listed_anew_whichever_launches_came_before(folder: Path) -> None:
    """Launches with a block a window and with a block a task, one after the other or alone in a row."""
    calls = [make_call(seed, (40, 0, 31), kv_heads=2, selection=kind) for seed, kind in enumerate(SELECTIONS)]
    run = Run(folder, calls[0], 8, 64, search_group=4)
    for turn, entry in enumerate(
        ("plan_and_pack", "plan_and_pack", "prepare", "prepare", "plan_and_pack") * 2
    ):
        run.call = calls[turn % len(calls)]
        getattr(run, entry)()
        assert_task_order(run)


def test_the_longest_and_the_shortest_tasks_have_buckets(folder: Path) -> None:
    """Tasks without a page are listed too, last, and those that no query needs are not."""
    call = make_call(31, (24,), (200 * PAGE,), poison="none")
    call.topk[:] = -1
    call.topk[0, :8] = torch.arange(128, dtype=torch.int32).reshape(8, 16)
    call.topk[0, 16:24, :5] = torch.arange(5, dtype=torch.int32)
    run = Run(folder, call, 8)
    run.prepare()
    assert_task_order(run)
    assert listed_tasks(run.queue[0], run.task_order).tolist() == [0, 2, 1]
    assert np.flatnonzero(run.queue["count"][0, :, 0]).tolist() == [0, BUCKETS - 3, BUCKETS - 1]


# V images and fused launches ------------------------------------------------------------------


@pytest.mark.parametrize("value_bytes", [1, 2])
@pytest.mark.parametrize("separate", [False, True])
def test_images_hold_every_token_of_every_used_page_and_no_nan(
    folder: Path, separate: bool, value_bytes: int
) -> None:
    call = make_call(3, (40, 0, 5), kv_heads=2, selection="random", separate=separate)
    run = Run(folder, call, 8, value_bytes=value_bytes)
    run.pack_values()
    assert_images(call, run.images)


@pytest.mark.parametrize("value_bytes", [1, 2])
@pytest.mark.parametrize("entry", ["pack_values", "prepare_and_pack", "plan_and_pack"])
def test_few_queries_in_a_long_context_pack_what_they_select_and_no_more(
    folder: Path, entry: str, value_bytes: int
) -> None:
    call = make_call(21, (3, 0, 75), prefix_lens=(30_000, 0, 9_000), kv_heads=2, selection="dirty")
    call.topk[:, 3:30] = call.topk[:, 3:4]  # repeats, of pages the first of them may not see yet
    call.positions[3:10] = 300
    run = Run(folder, call, 8, 64, value_bytes=value_bytes)
    assert run.plan.packs_selected
    getattr(run, entry)()
    request = request_of_rows(call.cu_seqlens_q.numpy())
    head, row, position = np.nonzero(supports(call)[0] >= 0)
    rows = call.page_table.numpy()[request[row], supports(call)[0][head, row, position]]
    assert_images(call, run.images, set(zip(rows.tolist(), head.tolist(), strict=True)))


@pytest.mark.parametrize("value_bytes", [1, 2])
def test_preparing_beside_packing_writes_what_each_does_alone(folder: Path, value_bytes: int) -> None:
    call = make_call(13, (90, 20), kv_heads=2, selection="dirty")
    run = Run(folder, call, 8, value_bytes=value_bytes)
    run.prepare_and_pack()
    assert_same(run.unions, oracle_unions(call, identity_order(2, 110), 8))
    assert_task_order(run)
    assert_images(call, run.images)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize(
    ("window", "queries", "group", "value_bytes"),
    [
        (128, 8, 8, 1),
        (128, 8, 8, 2),
        (64, 8, 8, 1),
        (64, 8, 4, 1),
        (64, 8, 4, 2),
        (128, 8, 2, 1),
        (120, 12, 12, 1),
        (64, 16, 16, 1),
    ],
)
def test_one_launch_plans_and_packs_as_the_stages_do(
    folder: Path, selection: Selection, window: int, queries: int, group: int, value_bytes: int
) -> None:
    call = make_call(queries, (131, 0, 1, 20), kv_heads=2, selection=selection)
    run = Run(folder, call, queries, window, group, value_bytes)
    run.plan_and_pack()
    np.testing.assert_array_equal(run.order, greedy(call, window, group))
    assert_same(run.unions, oracle_unions(call, run.order, queries))
    assert_records(run, run.order)
    assert_task_order(run)
    assert_images(call, run.images)
