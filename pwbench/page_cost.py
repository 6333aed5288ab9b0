"""A cost model of page-major against group-major attention, and of a hybrid of the two.

Both designs run *rounds*: 64 tile rows (4 rows x 16 query heads) against one page. Group-major runs one
for every page of a 4-row subgroup's union, some of its places empty; page-major fills its tiles from
the page's own list, but writes a partial output per entry and reads it again.

    loop     rounds x tensor clocks + live places x softmax clocks, over all SMs
    L2       K|V pages brought into shared memory, and the queries of each page-major tile
    HBM      partial outputs, written by attention and read by the reduction; Q, output, cache pages

The phases of a design run one after the other; inside a phase the largest term counts. What the model
leaves out is common to both designs (page lists, V images, launches) or unknown before measuring
(tails, imbalance), so it speaks of differences, not of absolute times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pwbench.ceilings import H200, Rates
from pwbench.counters import PAGE_BYTES
from pwbench.grouping import prepare_unions
from pwbench.operator import GROUP_HEADS, HEAD_DIM
from pwbench.page_plan import PARTIAL_BYTES, TILE_QUERIES, PageLists

_ROW_IO = GROUP_HEADS * HEAD_DIM * 2
_QUERY_BYTES = GROUP_HEADS * HEAD_DIM


@dataclass(frozen=True)
class Machine:
    """What a round costs, and the rates the bytes move at.

    Attributes:
        sms, clock: streaming multiprocessors and their clock under FP8 load with page traffic, Hz.
        tensor_clocks: QK and PV of one round on the tensor cores, per SM.
        softmax_clocks: what a round whose 4 places are all live costs beyond that; empty places
            skip their softmax. Measured with data resident: 846 clocks a full round.
        rates: as `pwbench.ceilings` stores them.
    """

    sms: int = 132
    clock: float = 1.40e9
    tensor_clocks: float = 512.0
    softmax_clocks: float = 334.0
    rates: Rates = H200.rates

    def loop_us(self, rounds: float, live: float) -> float:
        """Rounds with ``live`` rows among their places, spread over all SMs, microseconds."""
        clocks = rounds * self.tensor_clocks + live / TILE_QUERIES * self.softmax_clocks
        return clocks / (self.sms * self.clock) * 1e6

    def hbm_us(self, amount: float) -> float:
        return amount / (self.rates.hbm or np.inf) * 1e6

    def l2_us(self, amount: float, multicast: bool) -> float:
        rate = self.rates.l2_multicast if multicast else self.rates.l2
        return amount / (rate or np.inf) * 1e6


@dataclass(frozen=True)
class Cost:
    """Predicted time of one design, microseconds.

    Attributes:
        attention_us: the phase that multiplies, and the term that sets it.
        reduction_us: merging partial outputs.
    """

    attention_us: float
    reduction_us: float
    term: str

    @property
    def us(self) -> float:
        return self.attention_us + self.reduction_us


def group_major(counters: Mapping[str, float], row_heads: int, machine: Machine) -> Cost:
    """Attention over the unions that ``counters`` describe; ``row_heads`` = rows x KV heads."""
    return _phase(
        {
            "loop": machine.loop_us(counters["subgroup_pages"], counters["selected_pages"]),
            "L2": machine.l2_us(counters["kv_bytes"], multicast=True),
            "HBM": machine.hbm_us(2 * _ROW_IO * row_heads),
        }
    )


def page_major(counters: Mapping[str, float], row_heads: int, machine: Machine) -> Cost:
    """Attention page by page and the reduction, from `pwbench.page_plan.counters`."""
    entries, half = counters["selected_pages"], counters["partial_bytes"] / 2
    attention = _phase(
        {
            "loop": machine.loop_us(counters["subgroup_pages"], entries),
            "L2": machine.l2_us(counters["kv_bytes"] + entries * _QUERY_BYTES, multicast=False),
            "HBM": machine.hbm_us(half + _ROW_IO * row_heads),
        }
    )
    reduction = machine.hbm_us(half + _ROW_IO * row_heads)
    return Cost(attention.attention_us, reduction, attention.term)


def page_stream(counters: Mapping[str, float], row_heads: int, machine: Machine) -> Cost:
    """Page by page with partial outputs that stay in L2: one phase in which everything overlaps."""
    entries = counters["selected_pages"]
    into_sms = counters["kv_bytes"] + entries * _QUERY_BYTES + counters["partial_bytes"] / 2
    return _phase(
        {
            "loop": machine.loop_us(counters["subgroup_pages"], entries),
            "L2": machine.l2_us(into_sms, multicast=False),
            "HBM": machine.hbm_us(2 * _ROW_IO * row_heads),
        }
    )


def _phase(terms: Mapping[str, float]) -> Cost:
    term = max(terms, key=lambda name: terms[name])
    return Cost(terms[term], 0.0, term)


# Hybrid -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PageShares:
    """What each selected page costs either design, one entry per (KV head, request, page).

    Attributes:
        entries: rows that selected the page.
        rounds: group-major rounds it takes part in: subgroups of 4 slots with a member.
        visits: groups that have it in their union.
        tiles, loads: page-major tiles and page loads of its list.
    """

    entries: np.ndarray
    rounds: np.ndarray
    visits: np.ndarray
    tiles: np.ndarray
    loads: np.ndarray


def page_shares(
    supports: np.ndarray,
    order: np.ndarray,
    cu_seqlens_q: np.ndarray,
    lists: PageLists,
    tiles_per_load: int,
    group: int = 8,
) -> PageShares:
    """Both designs' costs page by page; ``lists`` of one chunk, groups from ``order``."""
    unions = prepare_unions(supports, order, cu_seqlens_q, group)
    owner = np.repeat(np.arange(unions.groups), unions.lengths)
    bounds = np.asarray(cu_seqlens_q, dtype=np.int64)
    request = np.searchsorted(bounds, unions.begin, side="right") - 1
    width = int(max(unions.pages.max(initial=0), lists.page.max(initial=0))) + 1
    requests = max(1, len(bounds) - 1)

    def key(head: np.ndarray, req: np.ndarray, page: np.ndarray) -> np.ndarray:
        return (head.astype(np.int64) * requests + req) * width + page

    listed = key(lists.kv_head, lists.request, lists.page)
    place = np.searchsorted(listed, key(unions.kv_head[owner], request[owner], unions.pages))
    rounds = sum(((unions.masks >> np.uint32(low)) & np.uint32(15)) != 0 for low in range(0, group, 4))
    return PageShares(
        entries=lists.lengths,
        rounds=np.bincount(place, weights=rounds, minlength=len(listed)),
        visits=np.bincount(place, minlength=len(listed)),
        tiles=lists.tile_counts,
        loads=lists.load_counts(tiles_per_load),
    )


@dataclass(frozen=True)
class Hybrid:
    """The best split between the designs that the model finds.

    Attributes:
        us: its predicted time; ``pure_us`` that of the better pure design.
        moved_pages, moved_entries: shares of the pages and entries that go page-major.
        most_popular_moved: whether the page that most rows selected is among them.
    """

    us: float
    pure_us: float
    moved_pages: float
    moved_entries: float
    most_popular_moved: bool

    @property
    def gain(self) -> float:
        """Share of the better pure design's time that the hybrid saves."""
        return 1 - self.us / self.pure_us if self.pure_us else 0.0


def best_hybrid(shares: PageShares, row_heads: int, machine: Machine, folded: bool = False) -> Hybrid:
    """Split the pages so that the predicted time is least.

    Pages move to page-major in the order of rounds they save per partial output they cost, and every
    prefix of that order is tried: none moved is group-major, all moved is page-major.

    Args:
        shares: of `page_shares`.
        row_heads: rows x KV heads.
        folded: the optimistic form, in which the group-major walk reads the partials in its epilogue,
            wholly hidden under its rounds; else a reduction reads them, and one more partial for the walk.
    """
    order = np.argsort(-(shares.rounds - shares.tiles) / shares.entries, kind="stable")

    def moved(values: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(values[order])])

    entries, tiles, loads = moved(shares.entries), moved(shares.tiles), moved(shares.loads)
    left = entries[-1] - entries
    rounds = float(shares.rounds.sum()) - moved(shares.rounds)
    visits = float(shares.visits.sum()) - moved(shares.visits)
    io = np.full(len(entries), machine.hbm_us(_ROW_IO * row_heads))
    partials = np.array([machine.hbm_us(n * PARTIAL_BYTES) for n in entries])

    def loop(r: np.ndarray, live: np.ndarray) -> np.ndarray:
        return np.array([machine.loop_us(a, b) for a, b in zip(r, live, strict=True)])

    page_l2 = loads * machine.l2_us(PAGE_BYTES, False) + entries * machine.l2_us(_QUERY_BYTES, False)
    page = np.maximum.reduce([loop(tiles, entries), page_l2, partials + np.where(entries > 0, io, 0)])
    group_l2 = visits * machine.l2_us(PAGE_BYTES, True)
    reads = partials if folded else 0.0
    group = np.maximum.reduce([loop(rounds, left), group_l2, 2 * io + reads])
    group = np.where(left > 0, group, 0.0)
    extra = np.where(left > 0, machine.hbm_us(2 * PARTIAL_BYTES * row_heads), 0.0)
    merge = np.where(entries > 0, io + partials + extra, 0.0)
    if folded:
        merge = np.where((entries > 0) & (left == 0), io + partials, 0.0)
    total = page + group + merge
    best = int(np.argmin(total))
    popular = int(np.argmax(shares.entries)) if len(order) else -1
    return Hybrid(
        us=float(total[best]),
        pure_us=float(min(total[0], total[-1])),
        moved_pages=best / max(1, len(order)),
        moved_entries=float(entries[best] / max(1.0, entries[-1])),
        most_popular_moved=popular in order[:best],
    )
