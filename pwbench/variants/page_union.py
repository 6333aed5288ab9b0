"""The direct KV-page union: every page meets all rows that selected it, partial outputs are merged."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from pwbench.operator import SparsePrefillCall, supports
from pwbench.page_plan import (
    ROW_BYTES,
    TILE_QUERIES,
    WORKSPACE_BYTES,
    chunk_rows_for,
    counters,
    list_queries,
    tiles_per_load_for,
)
from pwbench.variants._base import Options, Prepared, Stage, Variant
from pwbench.variants._page_union_cpu import PageWalk
from pwbench.variants._union import hopper_missing

if TYPE_CHECKING:
    from pwbench.variants._page_union_gpu import PageKernels, StreamKernels


class PageUnion(Variant):
    """Work organised by KV page: page lists, partial outputs per (row, page), a reduction per row.

    Args:
        workspace_bytes: limit of the partial outputs held at once. A call that needs more runs in
            chunks of rows, each attended and reduced before the next one reuses the workspace.
    """

    name = "page-union"
    summary = "each page once for all rows that selected it, then a reduction of partial outputs"
    precisions = ("fast",)

    def __init__(self, workspace_bytes: int = WORKSPACE_BYTES) -> None:
        self.workspace_bytes = workspace_bytes

    def unavailable(self, device: torch.device) -> str | None:
        return hopper_missing(device)

    def prepare(self, call: SparsePrefillCall, options: Options) -> Prepared:
        chunk_rows = chunk_rows_for(call.total_q, call.kv_heads, self.workspace_bytes)
        tiles_per_load = tiles_per_load_for(chunk_rows, call.kv_heads)
        walk: PageWalk | PageKernels
        if call.device.type == "cuda":
            from pwbench.variants import _page_union_gpu  # needs CuPy and a driver

            walk = _page_union_gpu.prepare(_page_union_gpu.PageKernels, call, chunk_rows, tiles_per_load)
        else:
            walk = PageWalk(call, chunk_rows)
        stages = [Stage("search", _nothing), Stage("metadata", walk.metadata)]
        for chunk in range(walk.chunks):
            stages.append(Stage("attention", partial(walk.attention, chunk)))
            stages.append(Stage("reduction", partial(walk.reduction, chunk)))
        return prepared(call, walk, stages, tiles_per_load, ROW_BYTES * chunk_rows * call.kv_heads)


def prepared(
    call: SparsePrefillCall,
    walk: PageWalk | PageKernels | StreamKernels,
    stages: list[Stage],
    tiles_per_load: int,
    workspace_bytes: int,
) -> Prepared:
    """What a page-major walk offers the replay: its run, its own counters, its plan in words."""

    def run() -> None:
        for stage in stages:
            stage.run()

    def count() -> dict[str, float]:
        pages, _ = supports(call)
        lists = list_queries(pages, call.cu_seqlens_q.cpu().numpy(), walk.chunk_rows)
        return counters(call, pages, lists, tiles_per_load)

    split = f"{walk.chunks} chunk{'s' * (walk.chunks != 1)} of {walk.chunk_rows} rows"
    shared = f"at most {tiles_per_load} tile{'s' * (tiles_per_load != 1)} a page load"
    return Prepared(
        run=run,
        stages=stages,
        out=walk.out,
        group=TILE_QUERIES * tiles_per_load,
        graphable=call.device.type == "cuda",
        details={"peer": f"{split}, {workspace_bytes >> 20} MiB of partial outputs, {shared}"},
        counters=count,
        debug=walk.download,
    )


def _nothing() -> None:
    """Page lists need no search: there is no order to choose."""


VARIANT = PageUnion()
