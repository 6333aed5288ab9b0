"""Page lists on the CPU: for every KV page the query rows that selected it, the oracle of page-union.

The direct KV-page design turns the selections around. A *page list* holds the rows of one request
that selected one logical page of one KV head, ascending, so rows far apart share a page without a
window and without a permutation. Four entries of a list fill one M64 *tile* (4 rows x 16 query
heads); a *page load* brings K|V once for up to ``tiles_per_load`` tiles of one list.

Each entry yields one partial output. It lands in the slot that is the page's rank in the row's own
ascending support: which page owns a slot, and the order in which slots are added up, follow from the
selections alone.

Rows are cut into *chunks* where the partial outputs of the whole call would not fit; a chunk is
planned like a call of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pwbench.counters import PAGE_BYTES, ROUND_FLOPS, count
from pwbench.errors import InputError
from pwbench.grouping import identity_order
from pwbench.operator import GROUP_HEADS, HEAD_DIM, TOPK, SparsePrefillCall, request_of_rows

BLOCKS = 3 * 132
"""Thread blocks of the attention kernel that an H200 holds at once."""
WORKSPACE_BYTES = 256 << 20
"""Default limit of the partial outputs of one chunk."""
RING = 4
"""Chunks of one KV head whose partial outputs the stream keeps at once."""
MOST_TILES_PER_LOAD = 8
"""Tiles that share one page load at most."""
TILE_QUERIES = 4
"""Entries of one page list that one M64 tile holds."""
PARTIAL_BYTES = GROUP_HEADS * (HEAD_DIM * 2 + 8)
"""One entry's partial output, written once and read once: 16 heads x (bf16 channels, fp32 maximum
and sum)."""
ROW_BYTES = TOPK * PARTIAL_BYTES
"""Workspace one row of one KV head takes: every slot has its place, used or not."""


@dataclass(frozen=True, eq=False)
class PageLists:
    """The rows of every selected page, sorted by chunk, KV head, request, page, then row.

    Attributes:
        chunk, kv_head, request, page: of each list, ``[n]`` int32; no list is empty.
        offsets: list i owns entries ``offsets[i]:offsets[i + 1]`` below, ``[n + 1]`` int64.
        rows: query rows, ascending inside a list, ``[N]`` int32.
        slots: rank of the page in the row's ascending support, 0 to 15, ``[N]`` int32.
    """

    chunk: np.ndarray
    kv_head: np.ndarray
    request: np.ndarray
    page: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    slots: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Entries of every list, ``[n]`` int64."""
        return np.diff(self.offsets)

    @property
    def tile_counts(self) -> np.ndarray:
        """M64 tiles of every list, ``[n]`` int64."""
        return -(-self.lengths // TILE_QUERIES)

    def load_counts(self, tiles_per_load: int) -> np.ndarray:
        """Page loads of every list, ``[n]`` int64."""
        return -(-self.tile_counts // tiles_per_load)


def list_queries(supports: np.ndarray, cu_seqlens_q: np.ndarray, chunk_rows: int | None = None) -> PageLists:
    """Turn selections around: page -> queries.

    Args:
        supports: first result of `pwbench.operator.supports`, ``[Hkv, total_q, K]`` int32.
        cu_seqlens_q: request boundaries, ``[B + 1]``.
        chunk_rows: rows of one chunk; None puts every row into one.

    Raises:
        InputError: ``chunk_rows`` is below 1.
    """
    if chunk_rows is not None and chunk_rows < 1:
        raise InputError(f"chunk_rows is {chunk_rows}, expected at least 1 query row.")
    head, row, slot = np.nonzero(supports >= 0)
    page = supports[head, row, slot]
    request = request_of_rows(cu_seqlens_q)[row]
    chunk = row // (chunk_rows or max(1, supports.shape[1]))
    order = np.lexsort((row, page, request, head, chunk))
    keys = np.stack([chunk, head, request, page])[:, order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    starts = np.flatnonzero(first)
    chunk, head, request, page = keys[:, starts].astype(np.int32)
    return PageLists(
        chunk=chunk,
        kv_head=head,
        request=request,
        page=page,
        offsets=np.append(starts, len(order)).astype(np.int64),
        rows=row[order].astype(np.int32),
        slots=slot[order].astype(np.int32),
    )


def tiles(lists: PageLists) -> tuple[np.ndarray, np.ndarray]:
    """The M64 tiles of all lists, list by list.

    Returns:
        ``(owner, entries)``: list of each tile, ``[T]`` int64, and its entries as indices into
        ``lists.rows``, ``[T, 4]`` int64, -1 where the list has no more.
    """
    counts = lists.tile_counts
    owner = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    entries = lists.offsets[owner, None] + nth[:, None] * TILE_QUERIES + np.arange(TILE_QUERIES)
    return owner, np.where(entries < lists.offsets[owner + 1, None], entries, -1)


def chunk_rows_for(total_q: int, kv_heads: int, workspace_bytes: int) -> int:
    """Rows of one chunk so that its partial outputs fit in ``workspace_bytes``: at least 1, a multiple
    of 32 where possible (a word of the membership bits), and all rows alike where they fit."""
    fit = workspace_bytes // (ROW_BYTES * max(1, kv_heads))
    if fit >= total_q:
        return max(1, total_q)
    chunks = -(-total_q // max(32, fit // 32 * 32))
    return -(-total_q // chunks // 32) * 32


def tiles_per_load_for(chunk_rows: int, kv_heads: int) -> int:
    """Tiles that share one page load, 1 to 8: as many as leave each thread block of an H200 several
    loads. A function of the call alone, so that the counters are the same on every device."""
    full_tiles = chunk_rows * kv_heads * TOPK // TILE_QUERIES
    return int(np.clip(full_tiles // (4 * BLOCKS), 1, MOST_TILES_PER_LOAD))


def counters(
    call: SparsePrefillCall, supports: np.ndarray, lists: PageLists, tiles_per_load: int
) -> dict[str, float]:
    """The counters of a page-major run, under the names of `pwbench.counters.count` and two more.

    ``groups``: page lists. ``selected_pages``: entries. ``union_pages``: page loads.
    ``subgroup_pages``: tiles. ``kv_bytes`` and ``mma_flops`` follow from those two; ``useful_flops``
    is the call's own.
    ``partial_bytes``: partial outputs and their statistics, written once and read once.
    ``tile_occupancy``: entries per tile place, 1 when every tile is full (and when there is none).
    """
    entries, tile_count = len(lists.rows), int(lists.tile_counts.sum())
    loads = int(lists.load_counts(tiles_per_load).sum())
    alone = count(call, supports, identity_order(call.kv_heads, call.total_q), group=1)
    return {
        **alone,
        "groups": len(lists.page),
        "union_pages": loads,
        "subgroup_pages": tile_count,
        "kv_bytes": loads * PAGE_BYTES,
        "mma_flops": tile_count * ROUND_FLOPS,
        "partial_bytes": 2 * entries * PARTIAL_BYTES,
        "tile_occupancy": entries / (tile_count * TILE_QUERIES) if tile_count else 1.0,
    }
