"""What a call costs, counted exactly from its selections: the same on every machine, kernel and day.

A group of query rows walks one list of pages. Two sums decide its cost: the pages of the whole group
move through memory once, and each subgroup of 4 rows, whose 4 x 16 query heads fill the 64 rows of
one tensor-core round, multiplies with every page that any of its rows selected.
"""

from __future__ import annotations

import numpy as np

from pwbench.grouping import SUBGROUP, check_order, prepare_unions
from pwbench.operator import GROUP_HEADS, HEAD_DIM, PAGE, SparsePrefillCall, visible_tokens

PAGE_BYTES = PAGE * 2 * HEAD_DIM
"""Bytes of one K|V page of one KV head in FP8: 32768."""
ROUND_FLOPS = SUBGROUP * GROUP_HEADS * PAGE * HEAD_DIM * 2 * 2
"""Tensor-core work of one round: 64 rows x 128 keys x 128 channels, 2 products (QK and PV), 2 flops."""


def count(call: SparsePrefillCall, supports: np.ndarray, order: np.ndarray, group: int) -> dict[str, int]:
    """The counters of one execution order.

    Args:
        call: the call counted.
        supports: first result of `pwbench.operator.supports`, ``[Hkv, total_q, K]`` int32.
        order: row executed at each slot, ``[Hkv, total_q]`` int32.
        group: rows that share one page list; 1 where nothing is shared.

    Returns:
        ``groups``: sum over KV heads and requests of ceil(q_len / group).
        ``selected_pages``: sum of |S_i| over rows and KV heads.
        ``union_pages``: sum of |U_G| over groups: page visits that move bytes.
        ``subgroup_pages``: sum of |U_4| over each group's subgroups of 4 consecutive slots: page
        visits that occupy the tensor cores. A group of fewer than 4 rows is one subgroup.
        ``kv_bytes``: union_pages x 32768 bytes, the K|V page of one KV head.
        ``mma_flops``: subgroup_pages x 64 rows x 128 keys x 128 channels x 2 products x 2 flops.
        ``useful_flops``: 4 x D x 16 query heads x |A_i|, summed over rows and KV heads, where
        |A_i| counts tokens: the last page of a row only as far as it is visible.

    Raises:
        InputError: ``order`` is not a bijection inside each request, or ``group`` is out of range.
    """
    bounds = call.cu_seqlens_q.cpu().numpy()
    check_order(order, bounds)
    unions = prepare_unions(supports, order, bounds, group)
    union_pages, subgroup_pages = len(unions.pages), unions.subgroup_pages()
    return {
        "groups": unions.groups,
        "selected_pages": int(np.count_nonzero(supports >= 0)),
        "union_pages": union_pages,
        "subgroup_pages": subgroup_pages,
        "kv_bytes": union_pages * PAGE_BYTES,
        "mma_flops": subgroup_pages * ROUND_FLOPS,
        "useful_flops": 4 * HEAD_DIM * GROUP_HEADS * _visible_keys(call, supports),
    }


def _visible_keys(call: SparsePrefillCall, supports: np.ndarray) -> int:
    """Sum of |A_i| over rows and KV heads."""
    visible = visible_tokens(call)
    begin = supports.astype(np.int64) * PAGE
    keys = np.clip(visible[None, :, None] - begin, 0, PAGE)
    return int(keys[supports >= 0].sum())
