"""The direct KV-page union as a stream: partial outputs are merged while they are still in the L2 cache."""

from __future__ import annotations

from pwbench.operator import SparsePrefillCall
from pwbench.page_plan import RING, ROW_BYTES, tiles_per_load_for
from pwbench.variants._base import Options, Prepared, Stage
from pwbench.variants._page_union_cpu import PageWalk
from pwbench.variants.page_union import PageUnion, prepared

CHUNK_ROWS = 128
"""Rows of a chunk: four chunks of one KV head keep 33 MiB of partial outputs, which the L2 holds."""
MOST_TILES = 4
"""Tiles that share a page load; a chunk's lists are short."""


class PageUnionStream(PageUnion):
    """One kernel works a queue of page loads and row reductions; the rows of a chunk are reduced while
    the page loads of later chunks go on. Sharing is limited to a chunk, the partials never reach HBM."""

    name = "page-union-stream"
    summary = "page lists of 128 rows each, partial outputs merged inside the L2 cache"

    def prepare(self, call: SparsePrefillCall, options: Options) -> Prepared:
        tiles_per_load = min(MOST_TILES, tiles_per_load_for(call.total_q, call.kv_heads))
        held = RING * CHUNK_ROWS * ROW_BYTES
        if call.device.type == "cuda":
            from pwbench.variants import _page_union_gpu  # needs CuPy and a driver

            form = _page_union_gpu.StreamKernels
            kernels = _page_union_gpu.prepare(form, call, CHUNK_ROWS, tiles_per_load)
            stages = [Stage("metadata", kernels.metadata), Stage("attention", kernels.stream)]
            return prepared(call, kernels, stages, tiles_per_load, held)
        walk = PageWalk(call, CHUNK_ROWS)

        def attention() -> None:
            for chunk in range(walk.chunks):
                walk.attention(chunk)
                walk.reduction(chunk)

        stages = [Stage("metadata", walk.metadata), Stage("attention", attention)]
        return prepared(call, walk, stages, tiles_per_load, held)


VARIANT = PageUnionStream()
