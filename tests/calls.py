"""Calls for tests: small, seeded, and hostile wherever the contract leaves bytes undefined.

`make_call` shuffles the page table over a pool larger than needed, writes garbage into the page table
past each request's last page, and fills with NaN every byte of KV that no query may read. A kernel
that reads one byte too many shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from pwbench.operator import (
    GROUP_HEADS,
    HEAD_DIM,
    PAGE,
    TOPK,
    SparsePrefillCall,
    right_aligned_positions,
    supports,
)

Selection = Literal["random", "local", "identical", "disjoint", "empty", "dirty"]
SELECTIONS: tuple[Selection, ...] = ("random", "local", "identical", "disjoint", "empty", "dirty")

NAN_BYTES = (0x7F, 0xFF)
"""The two NaN of float8_e4m3fn."""
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


def make_call(
    seed: int = 0,
    q_lens: Sequence[int] = (37,),
    prefix_lens: Sequence[int] | None = None,
    kv_heads: int = 1,
    selection: Selection = "random",
    separate: bool = False,
    *,
    seq_lens: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    shared_pages: int = 0,
    spare_pages: int = 5,
    poison: Literal["none", "tails", "unselected"] = "unselected",
    query_gain: float = 2.0,
    softmax_scale: float = HEAD_DIM**-0.5,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    device: str | torch.device = "cpu",
) -> SparsePrefillCall:
    """One valid call, the same for the same arguments.

    Args:
        seed: draws everything.
        q_lens: query rows of each request; 0 is allowed.
        prefix_lens: tokens cached before this chunk, per request; default 600 each.
        kv_heads: KV heads; there are 16 query heads to each.
        selection: how rows choose among the pages they can see.
            ``random``: up to 16 distinct pages, independent of the neighbours'.
            ``local``: the first page, the own page, and pages that mostly stay from row to row.
            ``identical``: every row of a request the same pages.
            ``disjoint``: neighbours share as few pages as the context allows.
            ``empty``: nothing at all.
            ``dirty``: random rows, then repeats, future pages, ids out of range, padding in the
            middle and whole rows empty.
        separate: K and V as a pair of tensors instead of side by side.
        seq_lens: L of each request; default prefix + queries. Fewer than positions reach is allowed.
        positions: causal position of each row; default right-aligned in prefix + queries.
        shared_pages: leading logical pages that later requests take from the first one, where both
            hold them whole.
        spare_pages: pages of the pool that no request owns.
        poison: ``tails`` puts NaN past L and in pages nobody owns; ``unselected`` also in pages that no
            row of that KV head selected; ``none`` leaves all bytes finite.
        query_gain: multiplies unit normal queries; larger is a sharper softmax.
        softmax_scale, k_scale, v_scale: as in the call.
        device: where the tensors end up.
    """
    rng = np.random.default_rng(seed)
    q_lens = [int(n) for n in q_lens]
    prefix_lens = [600] * len(q_lens) if prefix_lens is None else [int(n) for n in prefix_lens]
    full = [prefix + n for prefix, n in zip(prefix_lens, q_lens, strict=True)]
    lengths = full if seq_lens is None else [int(n) for n in seq_lens]
    bounds = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    if positions is None:
        where = right_aligned_positions(bounds, np.asarray(full))
    else:
        where = np.asarray(positions, dtype=np.int32)

    table, pool = _page_table(rng, lengths, shared_pages, spare_pages)
    topk = np.full((kv_heads, int(bounds[-1]), TOPK), -1, dtype=np.int32)
    for head in range(kv_heads):
        for request, length in enumerate(lengths):
            rows = range(bounds[request], bounds[request + 1])
            seen = [-(-min(length, int(where[row]) + 1) // PAGE) for row in rows]
            if seen:
                topk[head, rows.start : rows.stop] = _select(rng, selection, seen, -(-length // PAGE))

    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    q = torch.randn(len(where), GROUP_HEADS * kv_heads, HEAD_DIM, generator=generator) * query_gain
    kv = torch.randn(pool, kv_heads, PAGE, 2 * HEAD_DIM, generator=generator).to(torch.float8_e4m3fn)
    call = SparsePrefillCall(
        q=q.to(torch.bfloat16),
        kv=kv,
        topk=torch.from_numpy(topk),
        page_table=torch.from_numpy(table),
        cu_seqlens_q=torch.from_numpy(bounds),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        positions=torch.from_numpy(where),
        softmax_scale=softmax_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if poison != "none":
        _poison(rng, call, selected_only=poison == "unselected")
    if separate:
        call = _with_separate_kv(call)
    return call.validate().to(device)


def _page_table(
    rng: np.random.Generator, lengths: list[int], shared: int, spare: int
) -> tuple[np.ndarray, int]:
    """A shuffled page table, ``[B, max_pages]`` int32 with garbage past each last page, and the pool size."""
    needed = [-(-length // PAGE) for length in lengths]
    pool = sum(needed) + spare
    free = rng.permutation(pool).tolist()
    width = max([*needed, 1]) + 2
    table = rng.choice(np.array([-1, INT_MIN, INT_MAX, pool], dtype=np.int64), (len(lengths), width))
    for request, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        table[request, :count] = [free.pop() for _ in range(count)]
        if request:
            whole = min(shared, length // PAGE, lengths[0] // PAGE)
            table[request, :whole] = table[0, :whole]
    return table.astype(np.int32), pool


def _select(rng: np.random.Generator, selection: Selection, seen: list[int], pages: int) -> np.ndarray:
    """Top-K rows of one request and head, ``[rows, TOPK]``; ``seen``: pages each row can see."""
    rows = np.full((len(seen), TOPK), -1, dtype=np.int64)
    if selection == "empty":
        return rows
    same = rng.permutation(min(seen))[:TOPK]
    kept: list[int] = []
    for index, count in enumerate(seen):
        if selection == "identical":
            chosen = same
        elif selection == "disjoint":
            chosen = (index * TOPK + np.arange(min(TOPK, count))) % max(count, 1)
        elif selection == "local":
            kept = _drift(rng, kept, count)
            chosen = np.array(kept, dtype=np.int64)
        else:
            chosen = rng.permutation(count)[: rng.integers(1, TOPK + 1)]
        rows[index, : len(chosen)] = rng.permutation(chosen)
    return _soil(rng, rows, seen, pages) if selection == "dirty" else rows


def _drift(rng: np.random.Generator, kept: list[int], count: int) -> list[int]:
    """The next row's pages: first, own, and those of the row before, each staying with 9 in 10."""
    if count == 0:
        return []
    stay = [page for page in kept if page < count and rng.random() < 0.9]
    new = dict.fromkeys([0, count - 1, *stay, *rng.permutation(count)[: 2 * TOPK].tolist()])
    return list(new)[:TOPK]


def _soil(rng: np.random.Generator, rows: np.ndarray, seen: list[int], pages: int) -> np.ndarray:
    """Random rows with everything in them that a selector must be allowed to hand over."""
    for index, row in enumerate(rows):
        kind = rng.integers(6)
        if kind == 0:
            row[:] = rng.choice([-1, -2, INT_MIN, INT_MAX, pages, pages + 1], TOPK)
        elif kind == 1:
            row[:] = rng.choice(row, TOPK)
        elif kind == 2:
            row[:] = rng.integers(0, max(pages, 1) + 2, TOPK)
        elif kind == 3:
            row[rng.integers(0, TOPK, 6)] = rng.choice([-1, -2, INT_MIN, INT_MAX, pages, seen[index]], 6)
        rng.shuffle(row)
    return rows


def _poison(rng: np.random.Generator, call: SparsePrefillCall, selected_only: bool) -> None:
    """Turn every byte that no query may read into one of the two NaN, in place."""
    assert isinstance(call.kv, torch.Tensor)
    pool, kv_heads = call.kv.shape[:2]
    readable = np.zeros((pool, kv_heads, PAGE), dtype=bool)
    pages, _ = supports(call)
    bounds, table = call.cu_seqlens_q.numpy(), call.page_table.numpy()
    for request, length in enumerate(call.seq_lens.tolist()):
        for head in range(kv_heads):
            logical = np.arange(-(-length // PAGE))
            if selected_only:
                chosen = pages[head, bounds[request] : bounds[request + 1]]
                logical = np.unique(chosen[chosen >= 0])
            tokens = logical[:, None] * PAGE + np.arange(PAGE)
            readable[table[request, logical], head] |= tokens < length
    bytes_ = call.kv.view(torch.uint8).numpy()
    noise = rng.choice(np.array(NAN_BYTES, dtype=np.uint8), (pool, 1, PAGE, 2 * HEAD_DIM))
    np.copyto(bytes_, noise, where=~readable[..., None])


def _with_separate_kv(call: SparsePrefillCall) -> SparsePrefillCall:
    return replace(call, kv=(call.k.contiguous(), call.v.contiguous()))
