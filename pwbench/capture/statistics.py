"""Union sizes of a call's selections: how many distinct pages groups of neighbouring queries need."""

from __future__ import annotations

import numpy as np

from pwbench.capture.format import Tables
from pwbench.errors import CaptureError
from pwbench.operator import INVALID, PAGE


def union_sizes(tables: Tables, group: int, order: np.ndarray | None = None) -> np.ndarray:
    """|U_G| of every group of ``group`` consecutive slots.

    Args:
        tables: the call's selections.
        group: queries per group; a request's last group may be short.
        order: slot -> query row, ``[Hkv, total_q]``; None is the original order.

    Returns:
        int64 sizes, KV head by KV head, request by request.

    Raises:
        CaptureError: a selection names a page that no request has.
    """
    lowest, highest = int(tables.pages.min(initial=INVALID)), int(tables.pages.max(initial=INVALID))
    if lowest < INVALID or highest * PAGE >= max(tables.context, 1):
        raise CaptureError(
            f"Selections name pages from {lowest} to {highest}, expected {INVALID} to "
            f"{-(-tables.context // PAGE) - 1}; the capture is damaged: see what `pwbench verify` says of it."
        )
    bounds = tables.cu_seqlens_q.astype(np.int64)
    lengths = np.diff(bounds)
    groups_of = -(-lengths // group)
    first_group = np.cumsum(groups_of) - groups_of
    slot = np.arange(bounds[-1])
    request = np.repeat(np.arange(len(lengths)), lengths)
    group_of = first_group[request] + (slot - bounds[:-1][request]) // group
    total_groups = int(groups_of.sum())
    width = highest + 2
    sizes = []
    for head in range(tables.kv_heads):
        pages = tables.pages[head] if order is None else tables.pages[head][order[head]]
        seen = np.zeros((total_groups, width), dtype=bool)
        # The padding id -1 lands in the last column, which is left out of the count.
        seen[group_of[:, None], np.where(pages == INVALID, width - 1, pages)] = True
        sizes.append(seen[:, :-1].sum(axis=1))
    return np.concatenate(sizes) if sizes else np.zeros(0, dtype=np.int64)


def summary(sizes: np.ndarray) -> dict[str, float]:
    """Groups, sum, mean and percentiles of union sizes."""
    if not len(sizes):
        return {"groups": 0, "sum": 0, "mean": 0.0, "p10": 0.0, "p50": 0.0, "p90": 0.0}
    p10, p50, p90 = np.percentile(sizes, (10, 50, 90))
    return {
        "groups": len(sizes),
        "sum": int(sizes.sum()),
        "mean": float(sizes.mean()),
        "p10": float(p10),
        "p50": float(p50),
        "p90": float(p90),
    }
