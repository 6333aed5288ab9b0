"""The calls of the test list, by family. Numbers are those of the list; `TITLES` says what each means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from pwbench.operator import HEAD_DIM, PAGE, TOPK, SparsePrefillCall
from tests.calls import INT_MAX, INT_MIN, make_call
from tests.gpu.harness import Case

TITLES = {
    1: "one query, one page, one visible key",
    2: "sequence lengths around page boundaries",
    3: "query at the first and last slot of a page",
    4: "context shorter than the Top-K",
    5: "nothing selected anywhere",
    6: "empty and full rows side by side",
    7: "only future pages selected",
    8: "own page and future pages",
    9: "repeated ids",
    10: "ids out of range",
    12: "NaN wherever no query may read",
    13: "garbage in the page table past the last page",
    14: "positions past the sequence length",
    15: "page tables: reversed, shared, far apart",
    16: "batches",
    18: "tail groups and tail windows",
    23: "union sizes around the ring's length",
    24: "pages live for some warps only",
    25: "one quad with a page, its neighbours with 64",
    30: "magnitudes",
    35: "scales other than one",
    37: "contexts of many pages",
    38: "chunk lengths and explicit positions",
    44: "error budget on independent data",
    45: "pages that one query or thousands select",
}

# Selections that make_call does not know -------------------------------------------------------


def select(call: SparsePrefillCall, choose: Callable[[int, int], Sequence[int]]) -> SparsePrefillCall:
    """The call with ``choose(kv_head, row)`` as Top-K ids, padded with -1."""
    ids = np.full(tuple(call.topk.shape), -1, np.int64)
    for head in range(call.kv_heads):
        for row in range(call.total_q):
            chosen = list(choose(head, row))[:TOPK]
            ids[head, row, : len(chosen)] = chosen
    return replace(call, topk=torch.from_numpy(ids.astype(np.int32)))


def mild(**arguments) -> SparsePrefillCall:
    """make_call with logits of standard deviation one, where 8-bit operands keep their error budget."""
    return make_call(**{"query_gain": 1.0, **arguments})


def clean(**arguments) -> SparsePrefillCall:
    """A call whose selections will be replaced: only bytes past L and unowned pages are poisoned."""
    return mild(**{"poison": "tails", **arguments})


def rows_of(
    choose: Callable[[int, int], Sequence[int]], q_len: int = 64, prefix: int = 4000, **more
) -> SparsePrefillCall:
    return select(clean(q_lens=(q_len,), prefix_lens=(prefix,), **more), choose)


def masked(keep: Callable[[int], bool], **more) -> SparsePrefillCall:
    """16 pages for the rows that ``keep``, nothing for the others."""
    return rows_of(lambda head, row: range(row % 8, row % 8 + 16) if keep(row) else (), **more)


def union_of(size: int, rows: int) -> SparsePrefillCall:
    """Every group of ``rows`` rows has a union of exactly ``size`` pages; needs size <= 16 * rows."""

    def choose(head: int, row: int) -> list[int]:
        first = (row % rows) * TOPK
        return [(first + i) % size for i in range(min(TOPK, size))]

    return rows_of(choose, q_len=3 * rows, prefix=(size + 1) * PAGE)


def far_pages(separate: bool) -> SparsePrefillCall:
    """The cache at the end of a pool whose byte offsets do not fit 32 bits."""
    call = mild(q_lens=(40,), prefix_lens=(900,), separate=separate)
    parts = call.kv if separate else (call.kv,)
    assert isinstance(parts, tuple)
    shift = (1 << 31) // (parts[0][0].numel()) + 3
    device = "cuda" if torch.cuda.is_available() else "cpu"
    moved = []
    for part in parts:
        pool = torch.empty((shift + len(part), *part.shape[1:]), dtype=torch.uint8, device=device)
        pool[shift:] = part.view(torch.uint8).to(device)
        moved.append(pool.view(torch.float8_e4m3fn))
    far = call.page_table.long() + shift
    table = torch.where((call.page_table >= 0) & (far < INT_MAX), far, call.page_table.long())
    kv = tuple(moved) if separate else moved[0]
    return replace(call.to(device), kv=kv, page_table=table.int().to(device))


def reversed_table() -> SparsePrefillCall:
    call = clean(q_lens=(50,), prefix_lens=(1200,), poison="none", spare_pages=0)
    pages = -(-int(call.seq_lens[0]) // PAGE)
    table = torch.full_like(call.page_table, INT_MIN)
    table[0, :pages] = torch.arange(pages - 1, -1, -1)
    return replace(call, page_table=table)


# Magnitudes ------------------------------------------------------------------------------------


def gained(gain: float) -> SparsePrefillCall:
    return mild(q_lens=(40,), query_gain=gain)


def zero_rows(part: str) -> SparsePrefillCall:
    call = clean(q_lens=(40,))
    if part == "q":
        q = call.q.clone()
        q[::3] = 0
        return replace(call, q=q)
    return replace(call, kv=fill(call, key=0.0))


def fill(
    call: SparsePrefillCall, key: float | None = None, value: float | torch.Tensor | None = None
) -> torch.Tensor:
    """The call's interleaved cache with every key or value replaced, past L too."""
    assert isinstance(call.kv, torch.Tensor)
    wide = call.kv.float()
    if key is not None:
        wide[..., :HEAD_DIM] = key
    if value is not None:
        wide[..., HEAD_DIM:] = value
    return wide.nan_to_num(0.0).to(torch.float8_e4m3fn)


def largest() -> SparsePrefillCall:
    """Keys and values at +-448 and small queries: no overflow on the way."""
    call = clean(q_lens=(40,), query_gain=2e-3)
    assert isinstance(call.kv, torch.Tensor)
    return replace(call, kv=(torch.sign(call.kv.float()).nan_to_num(0.0) * 448).to(torch.float8_e4m3fn))


def dominated(by_last: bool) -> SparsePrefillCall:
    """One page's logits lie 2^40 above all others: the maximum arrives last, or first."""
    call = clean(q_lens=(24,), prefix_lens=(PAGE * 14,), poison="none")
    pages = -(-int(call.seq_lens[0]) // PAGE)
    call = select(call, lambda head, row: range(14))
    kv = fill(call, key=0.0)
    winner = 13 if by_last else 0
    wide = kv.float()
    wide[call.page_table[0, winner], :, :, :HEAD_DIM] = 1.0
    q = torch.full_like(call.q, 1.0)
    assert pages >= 14
    # q . k = 128 in the winning page; 40 octaves above the zeros elsewhere.
    scale = 40 * np.log(2) / HEAD_DIM
    return replace(call, q=q, kv=wide.to(torch.float8_e4m3fn), softmax_scale=float(scale))


# The list --------------------------------------------------------------------------------------

LENGTHS = (1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 2047, 2048, 2049)
HUGE = (-2, INT_MIN, INT_MAX, INT_MAX - 127)


def ragged(lengths: Sequence[int], tail: int = 5, **more) -> SparsePrefillCall:
    """One request per length, each with up to ``tail`` queries at its end."""
    q_lens = [min(n, tail) for n in lengths]
    return mild(q_lens=q_lens, prefix_lens=[n - q for n, q in zip(lengths, q_lens, strict=True)], **more)


def batch(*q_lens: int, **more) -> SparsePrefillCall:
    return mild(q_lens=q_lens, prefix_lens=[200 + 37 * (i % 9) for i in range(len(q_lens))], **more)


def future(own: bool) -> SparsePrefillCall:
    call = clean(q_lens=(300,), prefix_lens=(0,), seq_lens=(300 + 20 * PAGE,))
    return select(
        call,
        lambda head, row: ([row // PAGE] if own else []) + list(range(row // PAGE + 1, row // PAGE + 16)),
    )


def repeats(kind: str) -> SparsePrefillCall:
    choices = {
        "one page 16 times": lambda head, row: [row % 5] * 16,
        "pairs": lambda head, row: [page for page in range(row % 4, row % 4 + 8) for _ in range(2)],
        "far apart": lambda head, row: [*range(8), *range(7, -1, -1)],
    }
    return rows_of(choices[kind], q_len=40)


def strange(head: int, row: int) -> list[int]:
    pages = -(-(4000 + 40) // PAGE)
    good = list(range(row % 3, row % 3 + 6))
    return [pages, *good, pages + 1, INT_MAX, -2, INT_MIN, 1 << 24, -1][:TOPK]


def lopsided(row: int, light: bool) -> list[int]:
    """One page for the light half of a group of eight, 16 pages of their own for the others."""
    return [0] if light else list(range(row % 4 * 16, row % 4 * 16 + 16))


def late_positions() -> SparsePrefillCall:
    """Queries placed beyond the tokens there are: min of both counts."""
    return mild(q_lens=(30, 30), prefix_lens=(500, 100), seq_lens=(400, 120))


CASES = [
    Case(1, "position 0", partial(mild, q_lens=(1,), prefix_lens=(0,))),
    Case(1, "two heads", partial(mild, q_lens=(1,), prefix_lens=(0,), kv_heads=2)),
    Case(2, "one batch", partial(ragged, LENGTHS)),
    *[Case(2, f"length {n}", partial(ragged, (n,), 3)) for n in (1, 2, 127, 128, 129, 256, 257, 2049)],
    Case(3, "first and last slots", partial(ragged, (128, 129, 256, 257, 384, 385), 2)),
    Case(3, "whole pages", partial(mild, q_lens=(256,), prefix_lens=(128,))),
    Case(4, "all pages of five", partial(rows_of, lambda head, row: range(5), 30, 600)),
    Case(4, "all pages of sixteen", partial(rows_of, lambda head, row: range(16), 30, 16 * PAGE - 30)),
    Case(5, "one request", partial(mild, q_lens=(37,), selection="empty")),
    Case(5, "batch", partial(mild, q_lens=(3, 0, 20), selection="empty", kv_heads=2)),
    Case(6, "every other row", partial(masked, lambda row: row % 2 == 0)),
    Case(6, "one row of a quad", partial(masked, lambda row: row % 4 == 1)),
    Case(6, "every other quad", partial(masked, lambda row: row // 4 % 2 == 1)),
    Case(6, "every other eight", partial(masked, lambda row: row // 8 % 2 == 0)),
    Case(6, "every other sixteen", partial(masked, lambda row: row // 16 % 2 == 1)),
    Case(6, "last row only", partial(masked, lambda row: row == 63)),
    Case(6, "all but one", partial(masked, lambda row: row != 20, q_len=61)),
    Case(7, "chunk from the start", partial(future, own=False)),
    Case(8, "chunk from the start", partial(future, own=True)),
    *[Case(9, kind, partial(repeats, kind)) for kind in ("one page 16 times", "pairs", "far apart")],
    Case(10, "around the end and extremes", partial(rows_of, strange, 40)),
    Case(10, "dirty rows", partial(mild, q_lens=(90, 40), selection="dirty", kv_heads=2)),
    Case(10, "nothing but junk", partial(rows_of, lambda head, row: HUGE * 4, 40)),
    Case(12, "tails", partial(mild, q_lens=(40, 70), prefix_lens=(311, 1111), poison="tails")),
    Case(12, "all that is not selected", partial(mild, q_lens=(40, 70), prefix_lens=(311, 1111))),
    Case(12, "separate K and V", partial(mild, q_lens=(40, 70), prefix_lens=(311, 1111), separate=True)),
    Case(13, "mid-page ends", partial(ragged, (130, 200, 390, 600), 20)),
    Case(14, "chunks past the end", late_positions),
    Case(14, "no tokens at all", partial(mild, q_lens=(9, 9), prefix_lens=(100, 100), seq_lens=(0, 50))),
    Case(15, "reversed", reversed_table),
    Case(15, "pages shared by requests", partial(batch, 40, 40, 40, shared_pages=2)),
    Case(15, "wide pool", partial(mild, q_lens=(40,), spare_pages=300)),
    Case(15, "beyond 2 GiB", partial(far_pages, separate=False)),
    Case(15, "beyond 2 GiB, separate", partial(far_pages, separate=True)),
    Case(16, "1", partial(batch, 1)),
    Case(16, "1 1 1", partial(batch, 1, 1, 1)),
    Case(16, "1 700", partial(batch, 1, 700)),
    Case(16, "127 129 64", partial(batch, 127, 129, 64)),
    Case(16, "127 129 64, four heads", partial(batch, 127, 129, 64, kv_heads=4)),
    Case(16, "three heads", partial(batch, 50, 3, kv_heads=3)),
    Case(16, "empty request inside", partial(batch, 20, 0, 33)),
    Case(16, "empty requests at the ends", partial(batch, 0, 0, 20, 0)),
    Case(16, "33 requests", partial(batch, *[1 + i % 11 for i in range(33)])),
    Case(16, "64 requests", partial(batch, *[1 + (i * 7) % 19 for i in range(64)])),
    Case(18, "groups of 1 to 17", partial(batch, *range(1, 18))),
    Case(18, "windows", partial(batch, *[128 + t for t in (1, 2, 7, 8, 9, 63, 64, 65, 126, 127)])),
    *[Case(23, f"{n} pages", partial(union_of, n, 8)) for n in (1, 2, 6, 7, 16, 17, 127, 128)],
    *[Case(23, f"{n} pages of 16 rows", partial(union_of, n, 16)) for n in (255, 256)],
    *[
        Case(
            24,
            f"page for slot {slot} only",
            partial(rows_of, lambda h, row, s=slot: [0, 1 + row // 8 % 9 if row % 8 == s else 0]),
        )
        for slot in (0, 3, 4, 7)
    ],
    Case(24, "alternating", partial(rows_of, lambda head, row: range(row % 2, 30, 2))),
    Case(24, "a page for each row", partial(rows_of, lambda head, row: [row % 30])),
    Case(24, "second half of eight", partial(rows_of, lambda h, row: range(16) if row % 8 >= 4 else [0])),
    Case(24, "second eight of sixteen", partial(rows_of, lambda h, row: range(16) if row % 16 >= 8 else [3])),
    Case(25, "1 and 64", partial(rows_of, lambda h, row: lopsided(row, row % 8 < 4), 64, 9000)),
    Case(25, "64 and 1", partial(rows_of, lambda h, row: lopsided(row, row % 8 >= 4), 64, 9000)),
    Case(30, "queries of 1e-6", partial(gained, 1e-6)),
    Case(30, "queries of 1e4", partial(gained, 1e4), fast=None, accurate=None),
    Case(30, "zero queries", partial(zero_rows, "q")),
    Case(30, "zero keys", partial(zero_rows, "k")),
    Case(30, "cache at 448", largest),
    Case(30, "last page dominates", partial(dominated, True)),
    Case(30, "first page dominates", partial(dominated, False)),
    Case(35, "all three", partial(mild, q_lens=(40,), softmax_scale=0.06, k_scale=1.7, v_scale=0.31)),
    Case(35, "small", partial(mild, q_lens=(40,), k_scale=2.0**-9, v_scale=2.0**-7, query_gain=500.0)),
    *[
        Case(37, f"{n} pages", partial(mild, q_lens=(33,), prefix_lens=(n * PAGE - 40,)))
        for n in (512, 513, 600, 800, 1408, 4096)
    ],
    *[Case(38, f"chunk {n}", partial(mild, q_lens=(n,), selection="local")) for n in (63, 64, 65)],
    Case(38, "chunk 8192", partial(mild, q_lens=(8192,), prefix_lens=(0,), selection="local", poison="none")),
    Case(38, "explicit positions", partial(mild, q_lens=(40,), positions=range(100, 140), seq_lens=(900,))),
    Case(
        38,
        "scattered positions",
        partial(mild, q_lens=(40,), positions=[(i * 313) % 900 for i in range(40)], seq_lens=(900,)),
    ),
    *[
        Case(44, f"{kind} selections", partial(mild, q_lens=(400,), prefix_lens=(6000,), selection=kind))
        for kind in ("random", "local", "identical", "disjoint")
    ],
    Case(
        45,
        "a page of 4200 queries",
        partial(mild, q_lens=(4200,), prefix_lens=(1000,), selection="identical", poison="none"),
    ),
    Case(45, "pages of one query", partial(rows_of, lambda head, row: [row], 64, 70 * PAGE)),
]
