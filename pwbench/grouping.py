"""Regrouping and union preparation on the CPU: the bit-exact oracle of the search and metadata kernels.

A *group* is up to ``group`` consecutive execution slots of one KV head and one request that walk one
shared list of KV pages. `regroup` chooses which queries sit together; `prepare_unions` lists the
pages of every group and which of its slots selected each.

``supports`` is everywhere the first result of `pwbench.operator.supports`: distinct visible logical
page ids of every query row, -1 last, ``[Hkv, total_q, K]`` int32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pwbench.errors import InputError
from pwbench.operator import request_of_rows

MAX_GROUP = 32
"""Most slots that one membership mask can describe."""
SUBGROUP = 4
"""Slots whose 4 x 16 query heads fill the 64 rows of one tensor-core round."""
MATCHING_WINDOW = 64
"""Query rows of a window that `match` searches at once."""
MATCHING_REACH = 32
"""Items that `match` may pair with each other: rows of half a window, all of its pairs, all of its quads."""
MATCHING_STARTS = 8
"""Arrangements that `match` improves side by side; the best is kept."""
MATCHING_SWEEPS = 1
"""Times that an arrangement has every two of its pairs meet."""

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
    order = np.empty((kv_heads, total_q), dtype=np.int32)
    for part in _window_parts(bounds, kv_heads, window):
        _search(supports, *part, group, order)
    return order


def _windows(bounds: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """First row and length of every search window, each ``[nW]`` int64."""
    lengths = np.diff(bounds)
    per_request = -(-lengths // window)
    request = np.repeat(np.arange(len(lengths)), per_request)
    nth = np.arange(len(request)) - np.repeat(np.cumsum(per_request) - per_request, per_request)
    begin = bounds[:-1][request] + nth * window
    return begin, np.minimum(bounds[1:][request] - begin, window)


def _window_parts(
    bounds: np.ndarray, kv_heads: int, window: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """KV head, first row and length of all search windows, `_WINDOWS_AT_ONCE` at a time."""
    begin, size = _windows(bounds, window)
    heads = np.repeat(np.arange(kv_heads), len(begin))
    begins, sizes = np.tile(begin, kv_heads), np.tile(size, kv_heads)
    for first in range(0, len(begins), _WINDOWS_AT_ONCE):
        part = slice(first, first + _WINDOWS_AT_ONCE)
        yield heads[part], begins[part], sizes[part]


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


def match(supports: np.ndarray, cu_seqlens_q: np.ndarray, window: int = MATCHING_WINDOW) -> np.ndarray:
    """The search of `pageweaver`: an execution order whose quads, `SUBGROUP` slots each, share pages, and
    whose neighbouring quads do.

    Windows are those of `regroup`. In each, three times the same step: rows are paired so that the partners'
    common pages are many; then the pairs, with the unions of their pages, are paired into quads, for which
    the tensor cores pay; then the quads into eights, for which the page copies do. A step improves
    `MATCHING_STARTS` arrangements of pairs by exchange (`_Arrangements`) and keeps the one with the most
    common pages, the earliest of several. What was paired then goes by its lowest row, and so do the
    partners. Rows past a window's last whole quad keep their places, and so does a last quad without a
    partner.

    Args:
        supports: distinct page ids of every row, -1 elsewhere, ``[Hkv, total_q, K]`` int32, K at most 16.
        cu_seqlens_q: request boundaries, ``[B + 1]``.
        window: query rows that one search sees, 1 to `MATCHING_WINDOW`.

    Returns:
        Row executed at each slot, ``[Hkv, total_q]`` int32: a bijection inside every window.

    Raises:
        InputError: ``window`` is out of range, or the boundaries do not cover the rows.
    """
    if not 1 <= window <= MATCHING_WINDOW:
        raise InputError(f"window is {window}, expected 1 to {MATCHING_WINDOW}.")
    kv_heads, total_q, _ = supports.shape
    bounds = _checked_bounds(cu_seqlens_q, total_q)
    order = identity_order(kv_heads, total_q)
    for part in _window_parts(bounds, kv_heads, window):
        _match_windows(supports, *part, order)
    return order


def _match_windows(
    supports: np.ndarray, heads: np.ndarray, begins: np.ndarray, sizes: np.ndarray, order: np.ndarray
) -> None:
    """Match many windows at once and write the slots of their whole quads."""
    local = np.arange(MATCHING_WINDOW)
    quads = sizes // SUBGROUP
    exists = local < quads[:, None] * SUBGROUP
    rows = begins[:, None] + np.minimum(local, sizes[:, None] - 1)
    selected = _selected(np.where(exists[:, :, None], supports[heads[:, None], rows], -1))

    every = np.arange(len(begins))[:, None]
    slots = np.broadcast_to(np.arange(MATCHING_WINDOW), exists.shape)
    for pairs in (quads * 2, quads, quads // 2):
        partners = _pair_up(selected, pairs)
        selected = np.maximum(selected[every, partners[..., 0]], selected[every, partners[..., 1]])
        rows_of = slots.reshape(len(begins), 2 * partners.shape[1], -1)
        slots = rows_of[every[..., None], partners].reshape(len(begins), MATCHING_WINDOW)
    window, slot = np.nonzero(exists)
    order[heads[window], begins[window] + slot] = begins[window] + slots[window, slot]


def _selected(pages: np.ndarray) -> np.ndarray:
    """Which of its window's distinct pages every row selected, ``[nW, rows, most pages]`` of 0.0 and 1.0."""
    windows, rows, width = pages.shape
    flat = pages.reshape(windows, -1)
    ascending = np.argsort(flat, axis=1, kind="stable")
    ranked = np.take_along_axis(flat, ascending, axis=1)
    fresh = (ranked >= 0) & (np.diff(ranked, axis=1, prepend=-1) != 0)
    number = np.empty_like(flat, dtype=np.int64)
    np.put_along_axis(number, ascending, np.cumsum(fresh, axis=1) - 1, axis=1)
    selected = np.zeros((windows, rows, max(int(fresh.sum(axis=1).max(initial=0)), 1)), dtype=np.float32)
    window, entry = np.nonzero(flat >= 0)
    selected[window, entry // width, number[window, entry]] = 1.0
    return selected


def _pair_up(selected: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Pair the first ``2 * pairs[w]`` items of every window by the pages that they share, in stretches of
    `MATCHING_REACH` items.

    Args:
        selected: ``[nW, items, pages]`` of 0.0 and 1.0.
        pairs: ``[nW]``.

    Returns:
        Partners, the lower first, by the lower: ``[nW, items / 2, 2]``. Pairs past the last stay where
        they are.
    """
    windows, items, pages = selected.shape
    reach = min(items, MATCHING_REACH)
    begin = np.arange(0, items, reach)
    apart = selected.reshape(-1, reach, pages)
    shared = (apart @ apart.transpose(0, 2, 1)).astype(np.int16)
    arrangements = _Arrangements.start(shared, np.clip(pairs[:, None] - begin // 2, 0, reach // 2).ravel())
    for sweep in range(MATCHING_SWEEPS):
        arrangements.sweep(ties=sweep < MATCHING_SWEEPS - 1)
    found = np.sort(arrangements.best(), axis=2)
    by_lower = np.argsort(found[..., :1], axis=1)
    found = np.take_along_axis(found, by_lower, axis=1).reshape(windows, len(begin), -1, 2)
    return (found + begin[:, None, None]).reshape(windows, items // 2, 2)


class _Arrangements:
    """Several arrangements of every window's items in pairs, improved by exchange until all pairs have met.

    Half of the pairs sit in places ``x``, half in ``y``; at each place, pair (a, b) of x meets pair (c, d) of
    y, and they become (a, c), (b, d) or (a, d), (c, b) if those share more pages. Between the meetings y
    moves to the places 1 ^ ... away of a Gray code: after as many meetings as places, every x has met every
    y. Then the pairs of x part to meet each other on half of the places, and those of y on the other half,
    and so on with halves of halves.

    Attributes:
        x, y: ``[3, nW, starts, places]`` int16: two items and the pages that they share. A pair past the
            window's last shares `_ABSENT`, more than any exchange could offer.
    """

    _ABSENT = 127

    def __init__(self, shared: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        self.shared, self.x, self.y = shared, x, y
        self._window = np.arange(len(shared))[:, None, None]

    @classmethod
    def start(cls, shared: np.ndarray, pairs: np.ndarray) -> _Arrangements:
        """Pair p is items 2p and 2p + 1. Arrangement s puts it at place ``p (2s + 1)`` modulo the pairs there
        can be: even ones in x, odd ones in y, so that neighbours meet first."""
        windows, items, _ = shared.shape
        places = items // 2
        pair = np.arange(places)
        overlap = np.where(pair < pairs[:, None], shared[:, 2 * pair, 2 * pair + 1], cls._ABSENT)
        all_pairs = np.stack([np.broadcast_to(2 * pair, overlap.shape), 0 * overlap + 2 * pair + 1, overlap])
        at = pair * (2 * np.arange(MATCHING_STARTS)[:, None] + 1) % places
        placed = np.empty((3, windows, MATCHING_STARTS, places), dtype=np.int16)
        placed[:, :, np.arange(MATCHING_STARTS)[:, None], at] = all_pairs[:, :, None]
        return cls(shared, placed[..., 0::2], placed[..., 1::2])

    def sweep(self, ties: bool) -> None:
        """All pairs meet. ``ties``: exchange also where as many pages are shared as before."""
        places = self.x.shape[-1]
        place = np.arange(places)
        reach = places
        while reach:
            for meeting in range(1, reach + 1):
                self._meet(ties)
                if reach > 1:
                    step = reach // 2 if meeting == reach else meeting & -meeting
                    self.y = self.y[..., place ^ step]
            half = reach // 2
            if half:
                upper = (place & half) != 0
                x, y = self.x[..., place ^ half], self.y[..., place ^ half]
                self.x, self.y = np.where(upper, y, self.x), np.where(upper, self.y, x)
            reach = half

    def _meet(self, ties: bool) -> None:
        (a, b, kept_x), (c, d, kept_y) = self.x, self.y
        window, shared = self._window, self.shared
        ac, bd, ad, cb = (
            shared[window, a, c],
            shared[window, b, d],
            shared[window, a, d],
            shared[window, c, b],
        )
        straight, crossed = ac + bd, ad + cb
        change = np.maximum(straight, crossed) + ties > kept_x + kept_y
        first, second = change & (straight >= crossed), change & (straight < crossed)
        conditions = [first, second]
        self.x = np.stack([a, np.select(conditions, [c, d], b), np.select(conditions, [ac, ad], kept_x)])
        self.y = np.stack(
            [
                np.select(conditions, [b, c], c),
                np.select(conditions, [d, b], d),
                np.select(conditions, [bd, cb], kept_y),
            ]
        )

    def best(self) -> np.ndarray:
        """The arrangement of every window that shares the most pages, ``[nW, pairs, 2]``."""
        pairs = np.concatenate([self.x, self.y], axis=-1)
        pick = np.argmax(pairs[2].sum(axis=-1), axis=1)
        return pairs[:2, np.arange(len(pick)), pick].transpose(1, 2, 0)


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
