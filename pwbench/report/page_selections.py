"""One call's selections under every page-major and group-major design: counters and predictions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from pwbench import counters, page_cost, page_plan
from pwbench.capture import Capture, synthetic
from pwbench.grouping import identity_order
from pwbench.operator import GROUP_HEADS, HEAD_DIM, PAGE, SparsePrefillCall, supports
from pwbench.variants.page_union_stream import CHUNK_ROWS, MOST_TILES

GROUP = 8
CONTEXT, QUERIES, SEED = 65536, 8192, 1
SUITE = "affinity"
MACHINE = page_cost.Machine()


@dataclass(frozen=True, eq=False)
class Selections:
    """One call's selections under both designs.

    Attributes:
        suite, name: of the capture.
        call: the recorded call; its tensors hold no values.
        affinity: of a synthetic capture, else None.
    """

    suite: str
    name: str
    call: SparsePrefillCall
    affinity: float | None = None

    @classmethod
    def of(cls, capture: Capture) -> Selections:
        tables = capture.tables
        q = torch.empty((tables.total_q, GROUP_HEADS * tables.kv_heads, HEAD_DIM), dtype=torch.bfloat16)
        pages = (max(tables.cache_pages, 1), tables.kv_heads, PAGE, 2 * HEAD_DIM)
        call = tables.call(q, torch.empty(pages, dtype=torch.float8_e4m3fn), softmax_scale=1.0)
        return cls(capture.suite, capture.name, call)

    @classmethod
    def of_affinity(cls, affinity: float) -> Selections:
        call = synthetic.generate(CONTEXT, QUERIES, affinity=affinity, seed=SEED).call
        return cls(SUITE, f"affinity-{100 * affinity:03.0f}", call, affinity)

    @property
    def rows(self) -> int:
        return self.call.total_q * self.call.kv_heads

    @property
    def bounds(self) -> np.ndarray:
        return self.call.cu_seqlens_q.numpy()

    @cached_property
    def pages(self) -> np.ndarray:
        return supports(self.call)[0]

    @cached_property
    def order(self) -> np.ndarray:
        return identity_order(self.call.kv_heads, self.call.total_q)

    @cached_property
    def groups(self) -> dict[str, int]:
        """Counters of Union8 in the original order."""
        return counters.count(self.call, self.pages, self.order, GROUP)

    def lists(self, chunk_rows: int) -> dict[str, float]:
        """Counters of page-union in chunks of ``chunk_rows``."""
        made = page_plan.list_queries(self.pages, self.bounds, chunk_rows)
        per_load = page_plan.tiles_per_load_for(chunk_rows, self.call.kv_heads)
        return page_plan.counters(self.call, self.pages, made, per_load)

    @cached_property
    def by_page(self) -> dict[str, float]:
        """Counters of page-union with its default workspace."""
        limit = page_plan.WORKSPACE_BYTES
        return self.lists(page_plan.chunk_rows_for(self.call.total_q, self.call.kv_heads, limit))

    @cached_property
    def by_stream(self) -> dict[str, float]:
        """Counters of page-union-stream."""
        per_load = min(MOST_TILES, page_plan.tiles_per_load_for(self.call.total_q, self.call.kv_heads))
        made = page_plan.list_queries(self.pages, self.bounds, CHUNK_ROWS)
        return page_plan.counters(self.call, self.pages, made, per_load)

    @cached_property
    def predicted(self) -> tuple[page_cost.Cost, page_cost.Cost, page_cost.Cost]:
        """Group-major, page-major, streamed."""
        return (
            page_cost.group_major(self.groups, self.rows, MACHINE),
            page_cost.page_major(self.by_page, self.rows, MACHINE),
            page_cost.page_stream(self.by_stream, self.rows, MACHINE),
        )

    def hybrids(self) -> tuple[page_cost.Hybrid, page_cost.Hybrid]:
        """With the partials read by a reduction, and read under the group-major walk."""
        made = page_plan.list_queries(self.pages, self.bounds)
        per_load = page_plan.tiles_per_load_for(self.call.total_q, self.call.kv_heads)
        shares = page_cost.page_shares(self.pages, self.order, self.bounds, made, per_load, GROUP)
        serial = page_cost.best_hybrid(shares, self.rows, MACHINE)
        return serial, page_cost.best_hybrid(shares, self.rows, MACHINE, folded=True)
