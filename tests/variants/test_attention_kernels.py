"""The attention kernels, run thread by thread on the CPU against the reference.

The task lists come from `pwbench.grouping`, so that what the metadata kernels would make of a call can be
bent into shapes that a scheduler rarely produces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pwbench import kernels
from pwbench.grouping import identity_order, prepare_unions, regroup
from pwbench.operator import HEAD_DIM, PAGE, TOPK, SparsePrefillCall, supports, visible_tokens
from pwbench.reference import attend, compare
from pwbench.variants._union_plan import BUCKETS, DESIGNS, PAGE_RECORD, TASK_QUEUE, TASK_RECORD, Design
from tests.calls import make_call
from tests.hopper import Program, compile_program

DESIGN_NAMES = [(name, precision) for name in DESIGNS for precision in DESIGNS[name]]
LIMIT = {"fast": 7e-2, "accurate": 3e-3}


def images_of(call: SparsePrefillCall, value_bytes: int) -> np.ndarray:
    """V^T images of every page by the definition of their format (pack_values.cuh)."""
    stored = call.v.contiguous().view(torch.uint8).numpy()
    clean = np.where((stored & 0x7F) == 0x7F, 0, stored).swapaxes(2, 3)
    row = np.arange(PAGE)
    g, j, t, q = row >> 5, row >> 3 & 3, row >> 1 & 3, row & 1
    clean = clean[:, :, 32 * g + 8 * t + 2 * j + q]
    byte = np.arange(PAGE)
    if value_bytes == 1:
        s, h, t, c, q = byte >> 5, byte >> 4 & 1, byte >> 2 & 3, byte >> 1 & 1, byte & 1
        halves = clean[:, :, None, :, 32 * s + 16 * h + 8 * c + 2 * t + q]
    else:
        numbers = torch.from_numpy(clean.copy()).view(torch.float8_e4m3fn).half().numpy()
        halves = np.stack([numbers[..., :64], numbers[..., 64:]], axis=2).view(np.uint8)
    place = ((byte[None] >> 4) ^ (row[:, None] & 7)) << 4 | (byte[None] & 15)
    images = np.empty_like(halves)
    np.put_along_axis(images, np.broadcast_to(place, halves.shape), halves, axis=4)
    return np.ascontiguousarray(images)


@dataclass
class Tasks:
    """Task and page records of a call, as the metadata kernels would write them."""

    records: np.ndarray
    pages: np.ndarray
    order: np.ndarray
    queue: np.ndarray

    @classmethod
    def of(cls, call: SparsePrefillCall, queries: int, order: np.ndarray, unused: int = 1) -> Tasks:
        """``unused`` empty records follow the used ones; page records past a list's end are nonsense."""
        bounds, visible, table = call.cu_seqlens_q.numpy(), visible_tokens(call), call.page_table.numpy()
        unions = prepare_unions(supports(call)[0], order, bounds, queries)
        count = len(unions.size)
        records = np.zeros(count + unused, TASK_RECORD)
        pages = np.zeros((count + unused, queries * TOPK), PAGE_RECORD)
        pages["row"], pages["members"], pages["logical"] = 1 << 30, 0xFFFF, 0xFFFF
        records["slots"]["query"] = -1
        for task in range(count):
            listed = slice(unions.offsets[task], unions.offsets[task + 1])
            begin, size, head = unions.begin[task], unions.size[task], unions.kv_head[task]
            rows = order[head, begin : begin + size]
            record, length = records[task], listed.stop - listed.start
            record["request"] = np.searchsorted(bounds, begin, side="right") - 1
            record["pages"], record["queries"], record["kv_head"] = length, size, head
            record["slots"]["query"][:size] = rows
            record["slots"]["visible"][:size] = visible[rows]
            pages[task]["logical"][:length] = unions.pages[listed]
            pages[task]["members"][:length] = unions.masks[listed]
            pages[task]["row"][:length] = table[record["request"], unions.pages[listed]]
        tasks = cls(records, pages, np.empty((BUCKETS, count + unused), np.int32), np.zeros(1, TASK_QUEUE))
        tasks.list_in([list(range(count))])
        return tasks

    def list_in(self, buckets: list[list[int]], turns: int = 1) -> None:
        """These tasks in these buckets, by the last of so many metadata launches; elsewhere nonsense."""
        self.order[:] = 1 << 30
        self.queue["turns"] = turns % 2 << 31
        counts = self.queue["count"][0, :, (turns + 1) % 2]
        counts[:] = 0
        self.queue["count"][0, :, turns % 2] = 7  # of a launch still to come: none of attention's business
        for bucket, tasks in enumerate(buckets):
            counts[bucket] = len(tasks)
            self.order[bucket, : len(tasks)] = tasks


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Design], Program]]:
    """Compiles the attention kernels over the emulated instructions, all ahead of the first use."""
    entries = {"attention": ["TensorMap", "AttentionParams"]}
    pool = ThreadPoolExecutor(max_workers=2)
    made = {}
    for name, precision in DESIGN_NAMES:
        design, folder = DESIGNS[name][precision], tmp_path_factory.mktemp(f"{name}-{precision}")
        made[name, precision] = pool.submit(compile_program, folder, design.source, entries, design.defines)
    names = {id(DESIGNS[name][precision]): (name, precision) for name, precision in DESIGN_NAMES}
    yield lambda design: made[names[id(design)]].result()
    pool.shutdown(cancel_futures=True)


class Attention:
    """One call bound to an emulated attention kernel."""

    def __init__(self, program: Program, design: Design, call: SparsePrefillCall, tasks: Tasks) -> None:
        self.program, self.design, self.call, self.tasks = program, design, call, tasks
        self.images = images_of(call, design.value_bytes)
        self.out = torch.full_like(call.q, torch.nan)

    def run(self, blocks: int = 2, seed: int = 1, laggard: int = -1) -> torch.Tensor:
        self.out.fill_(torch.nan)
        self.program.shuffle(seed, laggard)
        blocks = blocks if self.design.persistent else len(self.tasks.records) * self.design.cluster
        self.program.launch(
            "attention",
            blocks,
            self.design.threads,
            [self._keys(), self._params()],
            together=self.design.persistent,
            cluster=self.design.cluster,
        )
        return self.out.clone()

    def _keys(self) -> np.ndarray:
        page, head, token, _ = self.call.k.stride()
        opaque = np.zeros(16 + 8, np.uint64)
        opaque = opaque[(-opaque.ctypes.data % 64) // 8 :][:16]
        opaque[:5] = [self.call.k.data_ptr(), token, head, page, self.call.k.shape[0]]
        return opaque

    def _params(self) -> np.ndarray:
        call, tasks = self.call, self.tasks
        return kernels.pack(
            kernels.params_dtype("records.cuh", "AttentionParams"),
            q=call.q,
            out=self.out,
            values=self.images.ctypes.data,
            task_records=tasks.records.ctypes.data,
            page_records=tasks.pages.ctypes.data,
            task_order=tasks.order.ctypes.data if self.design.persistent else None,
            queue=tasks.queue.ctypes.data if self.design.persistent else None,
            query_bytes=call.q_heads * HEAD_DIM * 2,
            tasks=len(tasks.records),
            kv_heads=call.kv_heads,
            record_stride=tasks.pages.shape[1],
            scale_log2=call.softmax_scale * call.k_scale * math.log2(math.e),
            v_scale=call.v_scale,
        )


def grouped(call: SparsePrefillCall) -> np.ndarray:
    return regroup(supports(call)[0], call.cu_seqlens_q.numpy(), 128, 4)


def straight(call: SparsePrefillCall) -> np.ndarray:
    return identity_order(call.kv_heads, call.total_q)


def only(call: SparsePrefillCall, ids: dict[int, list[int]]) -> SparsePrefillCall:
    """The call with the rows named selecting these pages and the others nothing."""
    call.topk[:] = -1
    for row, pages in ids.items():
        call.topk[:, row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    return call


# Shapes -----------------------------------------------------------------------------------------


def one_tile_short() -> SparsePrefillCall:
    """The first tile of the task has one page, the other 64."""
    call = make_call(3, (8,), (64 * PAGE,), poison="none")
    return only(call, {0: [5], **{4 + i: list(range(16 * i, 16 * i + 16)) for i in range(4)}})


def wide_gaps() -> SparsePrefillCall:
    """A tile's own pages lie up to 20 apart in the list of its task, which the other tile fills."""
    call = make_call(4, (8,), (64 * PAGE,), poison="none")
    return only(call, {0: [0, 1, 7, 11, 12, 17, 37, 61], **{4 + i: list(range(i, 64, 4)) for i in range(4)}})


def tiles_without_pages() -> SparsePrefillCall:
    """Tasks in which the first tile, the second, both or none has a page, in runs of several."""
    wanted = "B2112200011122220B1B1120021B"
    call = make_call(5, (8 * len(wanted),), (6 * PAGE,), poison="none")
    pages = {"0": {}, "1": {1: [0]}, "2": {6: [3]}, "B": {0: [2, 3], 5: [1, 2, 4]}}
    rows = {8 * i + slot: ids for i, which in enumerate(wanted) for slot, ids in pages[which].items()}
    return only(call, rows)


def narrow_gaps() -> SparsePrefillCall:
    """The first tile walks every fourth page of its tasks, or every second, the other tile all 64: what lies
    one ring before a page of the first is not its own, and may still be on its way when the page before is
    there."""
    call = make_call(10, (32,), (64 * PAGE,), poison="none")
    rows = {}
    for task, step in enumerate((4, 2, 4, 2)):
        own = list(range(2, 64, step))
        rows |= {8 * task + i: own[16 * i : 16 * i + 16] for i in range(4 // step)}
        rows |= {8 * task + 4 + i: list(range(i, 64, 4)) for i in range(4)}
    return only(call, rows)


CALLS: dict[str, Callable[[], SparsePrefillCall]] = {
    "one query": lambda: make_call(1, (1,), (300,)),
    "one token": lambda: make_call(1, (1,), (0,)),
    "a tail of one": lambda: make_call(2, (25,), (900,)),
    "nothing selected": lambda: make_call(2, (70,), selection="empty"),
    "one tile short": one_tile_short,
    "wide gaps": wide_gaps,
    "narrow gaps": narrow_gaps,
    "tiles without pages": tiles_without_pages,
    "requests, heads and junk": lambda: make_call(
        6, (9, 0, 40, 1, 3, 2, 5, 12), (0, 300, 700, 2100, 130, 0, 64, 512), kv_heads=2, selection="dirty",
        shared_pages=4, k_scale=0.5, v_scale=3.0,
    ),
    "a request a row": lambda: make_call(7, [1] * 33, [130 + r for r in range(33)], shared_pages=1),
    "k and v apart": lambda: make_call(8, (12,), (300,), separate=True),
    "many pages": lambda: make_call(9, (24,), (90 * PAGE,), query_gain=1.0),
}  # fmt: skip


AS_THEY_ARE = ("narrow gaps", "tiles without pages")
"""Calls whose rows stand in their tasks' order already."""


@pytest.fixture(params=DESIGN_NAMES, ids="-".join)
def design(request: pytest.FixtureRequest) -> tuple[Design, str]:
    name, precision = request.param
    return DESIGNS[name][precision], precision


@pytest.mark.parametrize("name", CALLS)
def test_every_row_is_written_and_close_to_the_reference(program, design, name) -> None:
    kind, precision = design
    call = CALLS[name]()
    order = straight(call) if name in AS_THEY_ARE else grouped(call)
    tasks = Tasks.of(call, kind.queries, order)
    attention = Attention(program(kind), kind, call, tasks)
    wanted = attend(call)
    out = attention.run()
    assert bool(out.isfinite().all())
    assert compare(out, wanted).rel_l2 <= LIMIT[precision]
    assert not out[wanted.abs().amax((1, 2)) == 0].any()


def test_the_list_of_programs_knows_the_shared_memory_of_each(program, design) -> None:
    kind, _ = design
    listed = [
        one.shared
        for one in kernels.programs()
        if one.source == kind.source and one.defines.get("ACCURATE") == kind.defines.get("ACCURATE")
    ]
    assert listed == [program(kind).constant("shared_bytes")]


def test_any_grid_order_and_repetition_write_the_same_bits(program, design) -> None:
    kind, _ = design
    call = make_call(11, (20, 0, 9), (700, 0, 300), kv_heads=2)
    tasks = Tasks.of(call, kind.queries, grouped(call))
    attention = Attention(program(kind), kind, call, tasks)
    first = attention.run(blocks=2)
    for blocks in (1, 2, len(tasks.records) + 3):  # more blocks than tasks: some get none
        assert tasks.queue["next"] == 0
        assert torch.equal(attention.run(blocks, seed=blocks), first)
    if kind.persistent:
        used = np.random.default_rng(1).permutation(np.flatnonzero(tasks.records["queries"]))
        for turns, sizes in ((2, [0, 1, 0, 0, 2]), (3, [1] * 4), (4, [0] * (BUCKETS - 1) + [len(used)])):
            buckets = [part.tolist() for part in np.split(used, np.cumsum(sizes))]
            tasks.list_in(buckets[:BUCKETS], turns)
            assert torch.equal(attention.run(seed=turns), first)


def test_tasks_that_are_not_listed_do_not_run(program) -> None:
    kind = DESIGNS["pageweaver"]["fast"]
    call = make_call(14, (30,), (300,))
    tasks = Tasks.of(call, kind.queries, straight(call))
    attention = Attention(program(kind), kind, call, tasks)
    whole = attention.run()
    tasks.list_in([[], [2], [], [0]])
    for _ in range(2):  # the queue is as it was
        out = attention.run(blocks=3)
        listed = torch.arange(30) // 8 % 2 == 0
        assert torch.equal(out[listed], whole[listed])
        assert bool(out[~listed].isnan().all())
    tasks.list_in([])
    assert bool(attention.run().isnan().all())


def test_a_query_that_is_nan_spoils_no_other_row(program, design) -> None:
    kind, _ = design
    call = make_call(12, (12,), (300,), selection="identical")
    attention = Attention(program(kind), kind, call, Tasks.of(call, kind.queries, straight(call)))
    clean = attention.run()
    call.q[3] = torch.nan
    out = attention.run(seed=2)
    assert bool(out[3].isnan().all())
    others = torch.arange(12) != 3
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_channel_that_is_not_finite_spoils_no_other_head(program, design, value) -> None:
    """Not by one bit: a row moves its reference score only when it would itself saturate."""
    kind, _ = design
    call = make_call(13, (5,), (300,))
    attention = Attention(program(kind), kind, call, Tasks.of(call, kind.queries, straight(call)))
    clean = attention.run()
    call.q[2, 7, 100] = value
    out = attention.run(seed=2)
    spoilt = torch.zeros(out.shape[:2], dtype=torch.bool)
    spoilt[2, 7] = True
    assert bool(out[spoilt].isnan().all())
    assert torch.equal(out[~spoilt], clean[~spoilt])


@pytest.mark.parametrize("name", ["tiles without pages", "nothing selected"])
def test_any_warp_may_be_outrun_by_the_others(program, design, name) -> None:
    """Tasks of few pages or none pass through the rings faster than a warp that looks late can see."""
    kind, _ = design
    call = CALLS[name]()
    attention = Attention(program(kind), kind, call, Tasks.of(call, kind.queries, straight(call)))
    first = attention.run(blocks=1)
    for warp in range(kind.threads // 32):
        assert torch.equal(attention.run(blocks=1, seed=warp, laggard=warp), first)


@pytest.mark.parametrize("gain", [1000, -1000])
def test_logits_of_sixteen_thousand_octaves(program, design, gain) -> None:
    """All alike, so that the output is the mean of V. At ``fast`` no offset in f16 lifts a row so far below
    zero: it comes out as if nothing were selected."""
    kind, precision = design
    call = make_call(15, (9,), (300,), selection="identical", poison="none")
    call.q[:] = gain
    call.k.copy_(torch.ones(call.k.shape).to(call.k.dtype))
    assert abs(gain) * HEAD_DIM * call.softmax_scale * math.log2(math.e) > 16_000
    out = Attention(program(kind), kind, call, Tasks.of(call, kind.queries, straight(call))).run()
    if precision == "fast" and gain < 0:
        assert bool((out == 0).all())
    else:
        assert compare(out, attend(call)).rel_l2 < LIMIT[precision]
