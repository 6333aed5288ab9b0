"""What a union variant needs on a GPU, from shapes alone: designs, grids, buffers, records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from pwbench.errors import VariantUnavailable
from pwbench.grouping import Unions
from pwbench.operator import HEAD_DIM, PAGE, TOPK, SparsePrefillCall

BLOCK = 256
"""Threads of every metadata block (metadata.cuh)."""
MAX_PAGES = 1 << 16
"""Logical ids are 16 bits wide in page records."""
SELECTION_BLOCKS = TOPK // 4
"""Blocks that pack what one query row selected (pack_values.cuh)."""
PACK_BLOCKS = {1: 8, 2: 6}
"""Blocks of 256 threads a multiprocessor can hold, each with an image in shared memory, by `value_bytes`."""

PAGE_RECORD = np.dtype([("row", "i4"), ("logical", "u2"), ("members", "u2")])
SLOTS = 16
TASK_RECORD = np.dtype(
    [
        *((name, "i4") for name in ("pages", "queries", "kv_head", "request")),
        ("slots", [("query", "i4"), ("visible", "i4")], SLOTS),
    ]
)
BUCKETS = 32
TASK_QUEUE = np.dtype(
    {
        "names": ["count", "next", "turns"],
        "formats": [("u4", (BUCKETS, 2)), "u4", "u4"],
    }
)
"""Mirrors of records.cuh, to read back what the kernels wrote."""


@dataclass(frozen=True)
class Design:
    """An attention kernel and the tasks it wants.

    Attributes:
        source: file with the entry ``attention(keys, params)``. It declares the dynamic shared memory
            it needs as the constant ``shared_bytes``.
        queries: execution slots of a task, at most 16.
        search_group: queries the search puts together, a divisor of ``queries``; None = as many.
        search_window: query rows of its windows; None = as the options ask.
        threads: of a block.
        cluster: blocks of a cluster; the source fixes it with ``__cluster_dims__``.
        persistent: as many blocks as fit the machine, which take tasks from a counter, longest first;
            otherwise a cluster for each task.
        matching: search by matching (`pwbench.grouping.match`) instead of greedily (`regroup`); groups of 4
            in windows of at most 64 rows.
        programmatic: launches overlap the tail of the one before; the source must wait for it.
        defines: macros of the source.
        value_bytes: of an element of the V^T images that the source reads: 1, e4m3, or 2, f16.
    """

    source: str
    queries: int
    threads: int
    cluster: int = 1
    search_group: int | None = None
    search_window: int | None = None
    persistent: bool = False
    matching: bool = False
    programmatic: bool = False
    defines: Mapping[str, int] = field(default_factory=dict)
    value_bytes: int = 1


_PAGEWEAVER = Design(
    "pageweaver.cu",
    queries=8,
    threads=384,
    search_group=4,
    search_window=64,
    matching=True,
    persistent=True,
    programmatic=True,
)

DESIGNS: dict[str, dict[str, Design]] = {
    "union8": {
        "fast": Design("union8.cu", queries=8, threads=128, cluster=2),
        "accurate": Design(
            "union8.cu", queries=8, threads=128, cluster=2, defines={"ACCURATE": 1}, value_bytes=2
        ),
    },
    "pageweaver": {
        "fast": _PAGEWEAVER,
        "accurate": replace(_PAGEWEAVER, defines={"ACCURATE": 1}, value_bytes=2),
    },
}
"""Attention kernel by the first part of the variant's name and precision."""


@dataclass(frozen=True)
class Plan:
    """Sizes of one call that follow from shapes alone: grids, buffers, shared memory.

    Attributes:
        queries: slots of a task.
        search_group: slots that the search fills together.
        window: query rows of a search window, a multiple of ``queries`` so that groups fill tasks.
        tasks_per_head, windows_per_head: bounds; request boundaries are only known on the device.
        value_bytes: of an element of a V^T image.
        matching: whether the search is the one by matching.
        images: V^T images, one for each row of the cache and KV head.
        image_bytes: of one of them.
    """

    total_q: int
    requests: int
    kv_heads: int
    max_pages: int
    pool_pages: int
    queries: int
    search_group: int
    window: int
    value_bytes: int = 1
    matching: bool = False

    @classmethod
    def of(cls, call: SparsePrefillCall, design: Design, window: int) -> Plan:
        """Raises:
        VariantUnavailable: the page table is wider than a page record's logical id.
        """
        max_pages = call.page_table.shape[1]
        window = design.search_window or window
        if max_pages > MAX_PAGES:
            raise VariantUnavailable(
                f"The page table is {max_pages} pages wide, the kernels' records hold ids up to {MAX_PAGES}."
            )
        return cls(
            total_q=call.total_q,
            requests=call.requests,
            kv_heads=call.kv_heads,
            max_pages=max_pages,
            pool_pages=call.k.shape[0],
            queries=design.queries,
            search_group=design.search_group or design.queries,
            window=max(window - window % design.queries, design.queries),
            value_bytes=design.value_bytes,
            matching=design.matching,
        )

    @property
    def tasks_per_head(self) -> int:
        return -(-self.total_q // self.queries) + self.requests

    @property
    def tasks(self) -> int:
        return self.kv_heads * self.tasks_per_head

    @property
    def record_stride(self) -> int:
        return self.queries * TOPK

    @property
    def windows_per_head(self) -> int:
        return -(-self.total_q // self.window) + self.requests

    @property
    def windows(self) -> int:
        return self.kv_heads * self.windows_per_head

    @property
    def images(self) -> int:
        return self.pool_pages * self.kv_heads

    @property
    def image_bytes(self) -> int:
        return PAGE * HEAD_DIM * self.value_bytes

    @property
    def packs_selected(self) -> bool:
        """Whether to make V^T images of the selected pages alone: worth its look at the neighbours' ids
        when there are few queries for the pages that the page table has room for."""
        return self.total_q * SELECTION_BLOCKS < self.requests * self.max_pages

    def pack_blocks(self, multiprocessors: int) -> int:
        """Blocks that make the V^T images: for selected pages a fixed number a query row and head;
        otherwise one for each possible page, or as many as run at once."""
        if self.packs_selected:
            return self.total_q * self.kv_heads * SELECTION_BLOCKS
        at_once = PACK_BLOCKS[self.value_bytes] * multiprocessors
        return min(self.requests * self.max_pages * self.kv_heads, at_once)

    @property
    def _bitmap_bytes(self) -> int:
        return -(-self.max_pages // 32) * 6  # a bitmap word and a 16-bit prefix

    @property
    def prepare_shared(self) -> int:
        """Dynamic shared memory of `prepare` (UnionScratch, then the bitmap), never less than a V image."""
        return max(BLOCK * (PAGE_RECORD.itemsize + 4) + 64 + self._bitmap_bytes, self.image_bytes)

    @property
    def regroup_shared(self) -> int:
        """Dynamic shared memory of `regroup` (WindowScratch, then the bitmap), never less than a V image."""
        columns = 64 if self.window <= 64 else 128
        groups = -(-self.window // self.search_group)
        scratch = columns * 448 if self.matching else columns * (256 + 168) + 64 + 8 * groups
        return max(scratch + self._bitmap_bytes, self.image_bytes)


@dataclass(frozen=True)
class Workspace:
    """Device buffers of one prepared call; nothing is allocated afterwards.

    Attributes:
        order: row executed at each slot, ``[Hkv, total_q]`` int32; original order until searched.
        tasks, pages: `TASK_RECORD` and `PAGE_RECORD` bytes.
        task_order: ``[BUCKETS, tasks]`` int32, tasks in use by descending work; see `listed_tasks`.
        queue: one `TASK_QUEUE`, zero before the first launch.
        images: `Plan.images` of `Plan.image_bytes` each.
    """

    order: torch.Tensor
    tasks: torch.Tensor
    pages: torch.Tensor
    task_order: torch.Tensor
    queue: torch.Tensor
    images: torch.Tensor

    @classmethod
    def allocate(cls, plan: Plan, device: torch.device) -> Workspace:
        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def octets(count: int) -> torch.Tensor:
            return torch.empty(count, dtype=torch.uint8, device=device)

        order = torch.arange(plan.total_q, dtype=torch.int32, device=device)
        return cls(
            order=order.repeat(plan.kv_heads, 1),
            tasks=octets(plan.tasks * TASK_RECORD.itemsize),
            pages=octets(plan.tasks * plan.record_stride * PAGE_RECORD.itemsize),
            task_order=integers(BUCKETS, plan.tasks),
            queue=integers(TASK_QUEUE.itemsize // 4),
            images=octets(plan.images * plan.image_bytes),
        )

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in vars(self).values())


def listed_tasks(queue: np.void, task_order: np.ndarray) -> np.ndarray:
    """The tasks that the last metadata launch listed, in the order in which persistent blocks take them.

    Which tasks a bucket holds follows from the call; their order inside it depends on timing.

    Args:
        queue: a `TASK_QUEUE`.
        task_order: ``[BUCKETS, tasks]`` int32.

    Returns:
        int32, one index of a task record for each task in use.
    """
    counts = queue["count"][:, 1 - (int(queue["turns"]) >> 31)]
    return np.concatenate([bucket[:count] for bucket, count in zip(task_order, counts, strict=True)])


def unions_of(tasks: np.ndarray, pages: np.ndarray) -> Unions:
    """Task and page records as the `Unions` that `pwbench.grouping.prepare_unions` would make.

    Args:
        tasks: ``[T]`` of `TASK_RECORD`; unused ones are dropped.
        pages: ``[T, record_stride]`` of `PAGE_RECORD`.
    """
    used = np.flatnonzero(tasks["queries"] > 0)
    tasks, pages = tasks[used], pages[used]
    listed = np.arange(pages.shape[1]) < tasks["pages"][:, None]
    size = tasks["queries"].astype(np.int32)
    begin = np.zeros_like(size)
    for head in np.unique(tasks["kv_head"]):
        own = tasks["kv_head"] == head
        begin[own] = np.cumsum(size[own]) - size[own]
    return Unions(
        kv_head=tasks["kv_head"].astype(np.int32),
        begin=begin,
        size=size,
        offsets=np.concatenate([[0], np.cumsum(tasks["pages"], dtype=np.int64)]),
        pages=pages["logical"][listed].astype(np.int32),
        masks=pages["members"][listed].astype(np.uint32),
    )
