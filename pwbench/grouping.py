"""Regrouping and union preparation on the CPU: the bit-exact oracle of the search and metadata kernels.

A *group* is up to ``group`` consecutive execution slots of one KV head and one request that walk one
shared list of KV pages. `regroup` chooses which queries sit together; `prepare_unions` lists the
pages of every group and which of its slots selected each.

``supports`` is everywhere the first result of `pwbench.operator.supports`: distinct visible logical
page ids of every query row, -1 last, ``[Hkv, total_q, K]`` int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pwbench.errors import InputError
from pwbench.operator import request_of_rows

MAX_GROUP = 32
"""Most slots that one membership mask can describe."""
SUBGROUP = 4
"""Slots whose 4 x 16 query heads fill the 64 rows of one tensor-core round."""

_WINDOWS_AT_ONCE = 256
"""Windows searched together: they fill a cache and bound the working memory, the result is the same."""


@dataclass(frozen=True, eq=False)
class Unions:
    """The page list of every group, sorted by KV head, then request, then slot.

    Attributes:
        kv_head: KV head of each group, ``[G]`` int32.
        begin: first execution slot of each group in ``order[kv_head]``, ``[G]`` int32.
        size: slots in each group, ``[G]`` int32: ``group``, or less for the last of a request.
        offsets: group g owns entries ``offsets[g]:offsets[g + 1]`` below, ``[G + 1]`` int64.
        pages: logical page ids, ascending inside a group, ``[N]`` int32.
        masks: bit s says that slot ``begin + s`` selected the page, ``[N]`` uint32, never 0.
    """

    kv_head: np.ndarray
    begin: np.ndarray
    size: np.ndarray
    offsets: np.ndarray
    pages: np.ndarray
    masks: np.ndarray

    @property
    def groups(self) -> int:
        return len(self.size)

    @property
    def lengths(self) -> np.ndarray:
        """|U_G| of every group, ``[G]`` int64."""
        return np.diff(self.offsets)

    def subgroup_pages(self, width: int = SUBGROUP) -> int:
        """Sum of |U_w| over the subgroups of ``width`` consecutive slots: page visits each executes."""
        block = np.uint32((1 << width) - 1)
        return sum(
            int(np.count_nonzero((self.masks >> np.uint32(low)) & block))
            for low in range(0, MAX_GROUP, width)
        )


def identity_order(kv_heads: int, total_q: int) -> np.ndarray:
    """The original order as an execution order, ``[kv_heads, total_q]`` int32."""
    return np.tile(np.arange(total_q, dtype=np.int32), (kv_heads, 1))


def regroup(supports: np.ndarray, cu_seqlens_q: np.ndarray, window: int = 128, group: int = 8) -> np.ndarray:
    """The greedy search of PageWeaver (Algorithm 1): an execution order in which neighbours share pages.

    Windows of ``window`` consecutive query rows start at each request's first row and never cross a
    request. Inside a window: the lowest unassigned row opens a group with U = S_row; then the row j
    minimising (|S_j - U|, j) joins it and U grows by S_j, until the group is full. The last window of
    a request and the last group of a window may be short. There is no limit on pages.

    Args:
        supports: distinct page ids of every row, -1 elsewhere, ``[Hkv, total_q, K]`` int32.
        cu_seqlens_q: request boundaries, ``[B + 1]``.
        window: query rows that one search sees, at least 1 (64 or 128 in the kernels).
        group: queries that share one page list, at least 1.

    Returns:
        Row executed at each slot, ``[Hkv, total_q]`` int32: a bijection inside every window.

    Raises:
        InputError: ``window`` or ``group`` is below 1, or the boundaries do not cover the rows.
    """
    if window < 1 or group < 1:
        raise InputError(f"window is {window} and group is {group}, expected both to be at least 1.")
    kv_heads, total_q, _ = supports.shape
    bounds = _checked_bounds(cu_seqlens_q, total_q)
    begin, size = _windows(bounds, window)
    begins = np.tile(begin, kv_heads)
    sizes = np.tile(size, kv_heads)
    heads = np.repeat(np.arange(kv_heads), len(begin))
    order = np.empty((kv_heads, total_q), dtype=np.int32)
    for first in range(0, len(begins), _WINDOWS_AT_ONCE):
        part = slice(first, first + _WINDOWS_AT_ONCE)
        _search(supports, heads[part], begins[part], sizes[part], group, order)
    return order


def _windows(bounds: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """First row and length of every search window, each ``[nW]`` int64."""
    lengths = np.diff(bounds)
    per_request = -(-lengths // window)
    request = np.repeat(np.arange(len(lengths)), per_request)
    nth = np.arange(len(request)) - np.repeat(np.cumsum(per_request) - per_request, per_request)
    begin = bounds[:-1][request] + nth * window
    return begin, np.minimum(bounds[1:][request] - begin, window)


def _search(
    supports: np.ndarray,
    heads: np.ndarray,
    begins: np.ndarray,
    sizes: np.ndarray,
    group: int,
    order: np.ndarray,
) -> None:
    """Search many windows in lock step and write their slots of ``order``."""
    windows, width = len(begins), int(sizes.max())
    local = np.arange(width)
    exists = local < sizes[:, None]
    rows = begins[:, None] + np.minimum(local, sizes[:, None] - 1)
    pages = supports[heads[:, None], rows].astype(np.int64)
    used = exists[:, :, None] & (pages >= 0)

    # One flat number per (window, page): a single byte array then says which pages U still lacks,
    # whatever the ids are. Number `count` stands for "no page" and is never lacking. K leads, so that
    # adding over a row's pages is a sum of whole arrays.
    windowed = pages + (np.arange(windows) * (int(pages.max(initial=0)) + 1))[:, None, None]
    distinct, number = np.unique(windowed[used], return_inverse=True)
    count = len(distinct)
    numbers = np.full(pages.shape, count, dtype=np.intp)
    numbers[used] = number
    numbers = np.ascontiguousarray(numbers.transpose(2, 0, 1))

    lacking = np.zeros(count + 1, dtype=np.uint8)
    missing = np.empty(numbers.shape, dtype=np.uint8)
    score = np.empty((windows, width), dtype=np.uint16)
    taken = ~exists
    every = np.arange(windows)
    for slot in range(width):
        if slot % group == 0:
            lacking[:count] = 1
            pick = np.argmin(taken, axis=1)
        else:
            np.take(lacking, numbers, out=missing, mode="clip")
            np.sum(missing, axis=0, dtype=np.uint16, out=score)
            score[taken] = np.iinfo(np.uint16).max
            pick = np.argmin(score, axis=1)
        # A finished window has every row taken: it picks row 0 again, which changes nothing of it.
        lacking[numbers[:, every, pick]] = 0
        taken[every, pick] = True
        live = slot < sizes
        order[heads[live], begins[live] + slot] = (begins + pick)[live]


def prepare_unions(
    supports: np.ndarray, order: np.ndarray, cu_seqlens_q: np.ndarray, group: int = 8
) -> Unions:
    """The page list and membership masks of every group of an execution order.

    Groups are ``group`` consecutive slots counted from each request's first slot and never cross a
    request: request r contributes ``ceil(q_len / group)`` of them to every KV head.

    Args:
        supports: page ids of every row, -1 pads, ``[Hkv, total_q, K]`` int32. Repeats add nothing.
        order: row executed at each slot, ``[Hkv, total_q]`` int32.
        cu_seqlens_q: request boundaries, ``[B + 1]``.
        group: slots in a group, 1 to 32.

    Raises:
        InputError: ``group`` is out of range, or shapes or boundaries disagree.
    """
    if not 1 <= group <= MAX_GROUP:
        raise InputError(f"group is {group}, expected 1 to {MAX_GROUP}.")
    kv_heads, total_q, _ = supports.shape
    if order.shape != (kv_heads, total_q):
        raise InputError(f"order is {list(order.shape)}, expected [{kv_heads}, {total_q}].")
    bounds = _checked_bounds(cu_seqlens_q, total_q)
    begin, size = _windows(bounds, group)
    per_head = len(begin)
    groups = kv_heads * per_head

    group_of_slot = np.repeat(np.arange(per_head), size)
    bit_of_slot = np.uint32(1) << (np.arange(total_q) - begin[group_of_slot]).astype(np.uint32)
    pages = supports[np.arange(kv_heads)[:, None], order].astype(np.int64)
    used = pages >= 0
    stride = int(pages.max(initial=0)) + 1
    keys = pages + ((np.arange(kv_heads)[:, None] * per_head + group_of_slot) * stride)[:, :, None]
    keys = keys[used]
    bits = np.broadcast_to(bit_of_slot[None, :, None], used.shape)[used]

    by_key = np.argsort(keys, kind="stable")
    keys = keys[by_key]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    masks = np.bitwise_or.reduceat(bits[by_key], starts) if len(starts) else np.empty(0, dtype=np.uint32)
    owner, page = np.divmod(keys[starts], stride)
    return Unions(
        kv_head=np.repeat(np.arange(kv_heads, dtype=np.int32), per_head),
        begin=np.tile(begin, kv_heads).astype(np.int32),
        size=np.tile(size, kv_heads).astype(np.int32),
        offsets=np.searchsorted(owner, np.arange(groups + 1)).astype(np.int64),
        pages=page.astype(np.int32),
        masks=masks.astype(np.uint32),
    )


def check_order(order: np.ndarray, cu_seqlens_q: np.ndarray) -> None:
    """Prove that an execution order runs every row of every request exactly once, inside its request.

    Raises:
        InputError: naming the KV head and the first slot at fault.
    """
    total_q = order.shape[1]
    bounds = _checked_bounds(cu_seqlens_q, total_q)
    request = request_of_rows(bounds)
    for head, slots in enumerate(order):
        outside = np.flatnonzero((slots < 0) | (slots >= total_q))
        if not len(outside):
            outside = np.flatnonzero(request[slots] != request)
        if len(outside):
            slot = int(outside[0])
            first, last = bounds[request[slot]], bounds[request[slot] + 1] - 1
            raise InputError(
                f"The order of KV head {head} runs row {slots[slot]} at slot {slot}, "
                f"expected a row of that slot's request, {first} to {last}."
            )
        times = np.bincount(slots, minlength=total_q)
        if (times != 1).any():
            row = int(np.flatnonzero(times != 1)[0])
            raise InputError(f"The order of KV head {head} runs row {row} {times[row]} times, expected once.")


def _checked_bounds(cu_seqlens_q: np.ndarray, total_q: int) -> np.ndarray:
    bounds = np.asarray(cu_seqlens_q, dtype=np.int64)
    if (
        bounds.ndim != 1
        or not len(bounds)
        or bounds[0] != 0
        or bounds[-1] != total_q
        or (np.diff(bounds) < 0).any()
    ):
        raise InputError(
            f"cu_seqlens_q is {bounds.tolist()}, expected boundaries rising from 0 to {total_q} query rows."
        )
    return bounds
