"""The page-major kernels bound to one call: workspace planned, parameters packed, launches ready."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, TypeVar

import numpy as np
import torch

from pwbench import kernels
from pwbench.errors import VariantUnavailable
from pwbench.operator import GROUP_HEADS, HEAD_DIM, PAGE, TOPK, SparsePrefillCall
from pwbench.page_plan import RING, TILE_QUERIES
from pwbench.variants._union_gpu import check_layout

_LISTS, _UNION, _STREAM = "page_lists.cu", "page_union.cu", "page_stream.cu"
_LIST_BLOCK = 32
"""Page lists that one block of the list kernels makes."""
_STAGE_BYTES = 2 * PAGE * HEAD_DIM + 8 * PAGE
_SHARED_BYTES = 2 * _STAGE_BYTES + 2 * 8 + 1024
"""Dynamic shared memory of page_union_partials: two pages with their ones, two barriers, alignment."""
_BLOCKS_AN_SM = 3
_MAX_ROWS = 1 << 27
_PACK_BLOCKS = 4096


class _Lists(ABC):
    """Page lists and what else attention needs: launches that put kernels on the current torch stream
    and do nothing else.

    The grids are bounds that follow from shapes alone; how many tiles and page loads there are is
    counted on the device, so ids and lengths may change in place between runs.

    Attributes:
        chunks: row ranges that are attended and reduced one after the other.
        out: ``[total_q, Hq, D]`` bfloat16, every row written once by the reduction of its chunk.
        supports, counts, visible: of every row, as `pwbench.operator` defines them.
        totals, chunk_loads, entries, loads: the page lists; see the kernels for their form.
    """

    def __init__(self, call: SparsePrefillCall, chunk_rows: int, tiles_per_load: int) -> None:
        self.call = call
        self.chunk_rows = chunk_rows
        self.tiles_per_load = tiles_per_load
        self.chunks = -(-call.total_q // chunk_rows)
        self.out = torch.empty_like(call.q)
        self._allocate()
        anything = call.total_q > 0 and call.requests > 0
        self._lists = self._bind_lists() if anything else []
        self._operands = [self._bind_pack(), self._bind_quantise()] if anything else []
        self._side = torch.cuda.Stream()
        self._bind_attention()

    def metadata(self) -> None:
        """Page lists, and beside them on a second stream the V images and e4m3 queries: the lists are a
        chain of short kernels that leave most of the GPU idle."""
        here = torch.cuda.current_stream()
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            for launch in self._operands:
                launch()
        for launch in self._lists:
            launch()
        here.wait_stream(self._side)

    @abstractmethod
    def _bind_attention(self) -> None:
        """Pack the parameters of everything behind the lists."""

    @abstractmethod
    def _segments_held(self) -> int:
        """Chunks of one KV head whose partial outputs have a place in the workspace."""

    def _progress_words(self) -> int:
        """Counters that the attention kernel expects to be zero."""
        return 0

    # Workspace ----------------------------------------------------------------------------------

    def _allocate(self) -> None:
        call, heads = self.call, self.call.kv_heads
        rows = heads * call.total_q
        self.words = -(-call.total_q // 32)
        self.page_columns = max(1, -(-call.page_table.shape[1] // _LIST_BLOCK)) * _LIST_BLOCK
        lists = self.chunks * heads * call.requests * self.page_columns
        self.list_blocks = lists // _LIST_BLOCK
        # A list of n entries fills ceil(n / 4) tiles: at most 3 of 4 places of its last tile stay empty.
        selected = rows * TOPK
        tiles = selected // TILE_QUERIES + 3 * min(selected, lists) // TILE_QUERIES + 1
        self.load_bound = tiles // self.tiles_per_load + min(selected, lists) + 1
        if self.list_blocks >= 1 << 31 or tiles >= 1 << 31:
            raise VariantUnavailable(
                f"{lists} page lists with {tiles} tiles are more than 32-bit indices reach; use fewer rows."
            )

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=call.device)

        self.supports = empty(heads, call.total_q, TOPK)
        self.counts = empty(heads, call.total_q)
        self.visible = empty(call.total_q)
        self.members = empty(heads, self.words, self.page_columns)
        self.totals = empty(self.list_blocks, 2)
        self.chunk_loads = empty(self.chunks * heads + 1)
        self.entries = empty(tiles, TILE_QUERIES)
        self.loads = empty(self.load_bound, 4)
        self.queries = empty(rows, GROUP_HEADS * HEAD_DIM, dtype=torch.uint8)
        self.row_factor = empty(rows, GROUP_HEADS, dtype=torch.float32)
        self.images = empty(call.k.shape[0] * heads, PAGE * HEAD_DIM, dtype=torch.uint8)
        self.progress = empty(self._progress_words())
        slots = self._segments_held() * self.chunk_rows * TOPK
        self.partial = empty(slots, GROUP_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        self.statistics = empty(slots, GROUP_HEADS, 2, dtype=torch.float32)

    # Launches -----------------------------------------------------------------------------------

    def download(self) -> dict[str, Any]:
        """The page lists that the last run made, for tests: as many of each as there are."""
        torch.cuda.synchronize()
        chunk_loads = self.chunk_loads.cpu().numpy()
        loads = self.loads.cpu().numpy()[: chunk_loads[-1]]
        tiles = int((loads[:, 1] & 0xFF).sum())
        return {
            "supports": self.supports.cpu().numpy(),
            "counts": self.counts.cpu().numpy(),
            "visible": self.visible.cpu().numpy(),
            "chunk_loads": chunk_loads,
            "loads": loads,
            "entries": self.entries.cpu().numpy()[:tiles].view(np.uint32),
        }

    def _bind_lists(self) -> list[kernels.Launch]:
        call = self.call
        params = kernels.pack(
            kernels.params_dtype(_LISTS, "ListParams"),
            topk=call.topk,
            page_table=call.page_table,
            cu_seqlens_q=call.cu_seqlens_q,
            seq_lens=call.seq_lens,
            positions=call.positions,
            supports=self.supports,
            counts=self.counts,
            visible=self.visible,
            members=self.members,
            totals=self.totals,
            chunk_loads=self.chunk_loads,
            entries=self.entries,
            loads=self.loads,
            total_q=call.total_q,
            kv_heads=call.kv_heads,
            requests=call.requests,
            table_width=call.page_table.shape[1],
            words=self.words,
            page_columns=self.page_columns,
            chunk_rows=self.chunk_rows,
            chunks=self.chunks,
            tiles_per_load=self.tiles_per_load,
            progress=self.progress,
            progress_words=self.progress.numel(),
        )
        # A warp for each word of a chunk's rows: short chunks make many small blocks.
        threads = 32 * min(32, max(4, -(-self.chunk_rows // 32)))
        kernel = {
            name: kernels.get(_LISTS, name)
            for name in ("clean_supports", "count_lists", "scan_lists", "write_lists")
        }
        return [
            kernel["clean_supports"].bind((call.kv_heads * -(-self.words // 4),), 128, params),
            kernel["count_lists"].bind((self.list_blocks,), threads, params),
            kernel["scan_lists"].bind((1,), 1024, params),
            kernel["write_lists"].bind((self.list_blocks,), threads, params),
        ]

    def _bind_quantise(self) -> kernels.Launch:
        """e4m3 queries: once a call, whatever the chunks."""
        call = self.call
        quantise = kernels.pack(
            kernels.params_dtype(_UNION, "QueryParams"),
            q=call.q,
            queries=self.queries,
            row_factor=self.row_factor,
            query_bytes=call.q.stride(0) * call.q.element_size(),
            scale_log2=call.softmax_scale * call.k_scale * math.log2(math.e),
            total_q=call.total_q,
            kv_heads=call.kv_heads,
        )
        blocks = -(-call.kv_heads * call.total_q // 8)
        return kernels.get(_UNION, "quantise_queries").bind((blocks,), 256, quantise)

    def _bind_pack(self) -> kernels.Launch:
        call = self.call
        v = call.v
        pages = call.requests * call.page_table.shape[1] * call.kv_heads
        blocks = min(pages, _PACK_BLOCKS)
        params = kernels.pack(
            kernels.params_dtype("pack_values.cuh", "PackParams"),
            v=v,
            images=self.images,
            page_table=call.page_table,
            seq_lens=call.seq_lens,
            page_stride=v.stride(0),
            head_stride=v.stride(1),
            token_stride=v.stride(2),
            requests=call.requests,
            max_pages=call.page_table.shape[1],
            kv_heads=call.kv_heads,
            blocks=blocks,
        )
        return kernels.get("pack_values.cu", "pack_values").bind((blocks,), 256, params)

    def _blocks(self) -> int:
        """Blocks of the attention kernels that the GPU holds at once."""
        sms = torch.cuda.get_device_properties(self.call.device).multi_processor_count
        return _BLOCKS_AN_SM * sms

    def _key_map(self) -> np.ndarray:
        k = self.call.k
        if not k.shape[0]:
            return np.zeros(1, "V128")  # an empty pool: no page load will name it
        return kernels.tensor_map(
            k.data_ptr(),
            "uint8",
            sizes=(HEAD_DIM, PAGE, k.shape[1], k.shape[0]),
            strides=(k.stride(2), k.stride(1), k.stride(0)),
            box=(HEAD_DIM, PAGE, 1, 1),
        )


class PageKernels(_Lists):
    """Chunk by chunk: partial outputs of all its rows, then their reduction."""

    def attention(self, chunk: int) -> None:
        self._partials[chunk]()

    def reduction(self, chunk: int) -> None:
        self._reductions[chunk]()

    def _segments_held(self) -> int:
        return self.call.kv_heads

    def _bind_attention(self) -> None:
        self._partials = [self._bind_partials(chunk) for chunk in range(self.chunks)]
        self._reductions = [self._bind_reduction(chunk) for chunk in range(self.chunks)]

    def _bind_partials(self, chunk: int) -> kernels.Launch:
        call = self.call
        params = kernels.pack(
            kernels.params_dtype(_UNION, "PartialParams"),
            values=self.images,
            queries=self.queries,
            row_factor=self.row_factor,
            visible=self.visible,
            entries=self.entries,
            loads=self.loads,
            chunk_loads=self.chunk_loads,
            partial=self.partial,
            statistics=self.statistics,
            total_q=call.total_q,
            kv_heads=call.kv_heads,
            chunk=chunk,
            chunk_rows=self.chunk_rows,
        )
        kernel = kernels.get(_UNION, "page_union_partials", shared=_SHARED_BYTES)
        return kernel.bind((min(self.load_bound, self._blocks()),), 128, self._key_map(), params)

    def _bind_reduction(self, chunk: int) -> kernels.Launch:
        call = self.call
        params = kernels.pack(
            kernels.params_dtype(_UNION, "ReduceParams"),
            partial=self.partial,
            statistics=self.statistics,
            counts=self.counts,
            out=self.out,
            row_bytes=self.out.stride(0) * self.out.element_size(),
            v_scale=call.v_scale,
            total_q=call.total_q,
            kv_heads=call.kv_heads,
            chunk=chunk,
            chunk_rows=self.chunk_rows,
        )
        rows = min(self.chunk_rows, call.total_q - chunk * self.chunk_rows)
        return kernels.get(_UNION, "reduce_partials").bind((call.kv_heads * rows,), 256, params)


class StreamKernels(_Lists):
    """The same lists worked through by one kernel, whose partial outputs live in a ring in L2."""

    def stream(self) -> None:
        """Attention and reduction of every chunk."""
        self._stream()

    @property
    def _segments(self) -> int:
        return self.chunks * self.call.kv_heads

    def _segments_held(self) -> int:
        return RING

    def _progress_words(self) -> int:
        """The queue, then page loads and reductions done of each segment."""
        return 1 + 2 * self._segments

    def _bind_attention(self) -> None:
        call = self.call
        params = kernels.pack(
            kernels.params_dtype(_STREAM, "StreamParams"),
            values=self.images,
            queries=self.queries,
            row_factor=self.row_factor,
            visible=self.visible,
            counts=self.counts,
            entries=self.entries,
            loads=self.loads,
            chunk_loads=self.chunk_loads,
            partial=self.partial,
            statistics=self.statistics,
            queue=self.progress,
            loaded=self.progress[1:],
            reduced=self.progress[1 + self._segments :],
            out=self.out,
            row_bytes=self.out.stride(0) * self.out.element_size(),
            v_scale=call.v_scale,
            total_q=call.total_q,
            kv_heads=call.kv_heads,
            chunk_rows=self.chunk_rows,
            segments=self._segments,
        )
        kernel = kernels.get(_STREAM, "page_union_stream", shared=_SHARED_BYTES)
        grid = self._blocks() if self._lists else 0
        self._stream = kernel.bind((grid,), 128, self._key_map(), params)


Form = TypeVar("Form", PageKernels, StreamKernels)


def prepare(form: type[Form], call: SparsePrefillCall, chunk_rows: int, tiles_per_load: int) -> Form:
    """Compile, allocate and bind; nothing is computed.

    Raises:
        VariantUnavailable: the call's strides or sizes are none the kernels take.
        MeasurementError: no compiler, no Hopper GPU, or a launch the driver refuses.
    """
    check_layout(call)
    if call.total_q >= _MAX_ROWS:
        raise VariantUnavailable(f"The call has {call.total_q} query rows, expected fewer than {_MAX_ROWS}.")
    with torch.cuda.device(call.device):
        return form(call, chunk_rows, tiles_per_load)
