"""Where a query's large logits lie among its pages, as far as times depend on it."""

from __future__ import annotations

import math

import numpy as np
import torch

from pwbench.operator import (
    GROUP_HEADS,
    INVALID,
    PAGE,
    SparsePrefillCall,
    request_of_rows,
    supports,
    visible_tokens,
)
from pwbench.reference import gather

LATE_OCTAVES = 4.5
FEW_TOKENS = 32
SAMPLED_ROWS = 512
_AT_ONCE = 32


def late_maxima(call: SparsePrefillCall, rows: int = SAMPLED_ROWS) -> float | None:
    """How often a running softmax would have to move its reference, per query row and KV head.

    A row's pages are walked from the newest to the oldest; where fewer than `FEW_TOKENS` of the newest are
    seen, it comes second. A head's reference is the largest logit of the first; a page
    that holds one of more than `LATE_OCTAVES` octaves (factors of two in probability) above it is a late
    maximum, counted once for however many heads, and its largest logit becomes the reference of those.
    Kernels that rescale what they have summed pay for each; those that read the pages in another order,
    or with another reach, pay for others, but for about as many.

    Args:
        call: on the CPU, with the values that the model computed.
        rows: at most so many are looked at, evenly spaced.

    Returns:
        the mean count; None where the call has no values (its queries are all zero).
    """
    if not bool(call.q.any()):
        return None
    pages, counts = supports(call)
    visible = visible_tokens(call)
    chosen = np.unique(np.linspace(0, call.total_q - 1, min(rows, call.total_q)).astype(np.int64))
    table = call.page_table.numpy()
    request = request_of_rows(call.cu_seqlens_q.numpy())[chosen]
    scale = call.softmax_scale * call.k_scale * math.log2(math.e)
    found = 0
    for head in range(call.kv_heads):
        # A row without a page may be of a request without one, whose page table says nothing.
        rows_with_pages = np.flatnonzero(counts[head, chosen])
        for begin in range(0, len(rows_with_pages), _AT_ONCE):
            part = rows_with_pages[begin : begin + _AT_ONCE]
            ids = -np.sort(-pages[head, chosen[part]].astype(np.int64), axis=1)  # newest first, -1 last
            physical = table[request[part, None], np.maximum(ids, 0)]
            tokens = ids[:, :, None] * PAGE + np.arange(PAGE)
            seen = (ids != INVALID)[:, :, None] & (tokens < visible[chosen[part], None, None])
            tops = _tops(call, head, chosen[part], physical, seen) * scale
            hasty = torch.from_numpy((seen[:, 0].sum(axis=1) < FEW_TOKENS) & seen[:, 1].any(axis=1))
            tops[hasty, :2] = tops[hasty, :2].flip(1)
            found += _late(tops)
    return found / (len(chosen) * call.kv_heads)


def _tops(
    call: SparsePrefillCall, head: int, rows: np.ndarray, physical: np.ndarray, seen: np.ndarray
) -> torch.Tensor:
    """Largest raw logit of each head on each page, ``[rows, pages, 16]`` float32; -inf where none is seen."""
    keys = gather(call.k, head, physical).unflatten(1, (-1, PAGE)).float()
    q = call.q[torch.from_numpy(rows), head * GROUP_HEADS : (head + 1) * GROUP_HEADS].float()
    logits = keys @ q.transpose(1, 2)[:, None]
    return torch.where(torch.from_numpy(seen)[..., None], logits, -torch.inf).amax(dim=2)


def _late(tops: torch.Tensor) -> int:
    """Late maxima in base-2 logits ``[rows, pages, heads]``, pages in the order of the walk."""
    reference, found = tops[:, 0].clone(), 0
    for page in tops[:, 1:].unbind(1):
        outgrown = page > reference + LATE_OCTAVES
        found += int(outgrown.any(dim=1).sum())
        reference = torch.where(outgrown, page, reference)
    return found
