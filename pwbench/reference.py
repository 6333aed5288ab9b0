"""The oracle: every query row computed by itself in float64, straight from the set A_i.

Nothing here knows groups, unions or an execution order, so an error in those cannot hide in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pwbench.errors import InputError
from pwbench.operator import (
    GROUP_HEADS,
    HEAD_DIM,
    PAGE,
    SparsePrefillCall,
    request_of_rows,
    supports,
    visible_tokens,
)

_BATCH_BYTES = {"cpu": 16 << 20, "cuda": 2 << 30}
"""Gathered K and V held at once: small enough to stay in a CPU's cache, large enough to fill a GPU."""


class Accuracy(NamedTuple):
    """How far an output is from the reference.

    Attributes:
        rel_l2: ``|out - ref| / |ref|`` over all elements; 0 when both are zero, infinite when only
            the reference is.
        max_abs: largest absolute difference of one element.
        cosine: of the two flattened outputs; 1 when both are zero, 0 when one is.
    """

    rel_l2: float
    max_abs: float
    cosine: float


def attend(
    call: SparsePrefillCall,
    rows: Sequence[int] | np.ndarray | torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The operator's output for some rows, from its definition.

    Args:
        call: a valid call, on any device; the work is done there.
        rows: query rows wanted, ``[n]``, any order, repeats allowed; None = all, in order.
        dtype: float64, or float32 where that is too slow.

    Returns:
        ``[n, Hq, D]`` of ``dtype`` on the call's device. Rows with an empty A_i are exactly 0.

    Raises:
        InputError: a row is out of range.
    """
    chosen = _checked_rows(rows, call.total_q)
    pages, counts = supports(call)
    request = request_of_rows(call.cu_seqlens_q.cpu().numpy())[chosen]
    visible = visible_tokens(call)[chosen]
    table = call.page_table.cpu().numpy()

    out = torch.zeros((len(chosen), call.q_heads, HEAD_DIM), dtype=dtype, device=call.device)
    for head in range(call.kv_heads):
        heads = slice(head * GROUP_HEADS, (head + 1) * GROUP_HEADS)
        count = counts[head, chosen]
        # Rows with as many pages go together, so that none is padded with another's work.
        for size in np.unique(count[count > 0]).tolist():
            alike = np.flatnonzero(count == size)
            for part in np.array_split(alike, -(-len(alike) // _rows_at_once(call.device, size, dtype))):
                logical = pages[head, chosen[part], :size]
                tokens = logical[:, :, None].astype(np.int64) * PAGE + np.arange(PAGE)
                out[_on(part, call.device), heads] = _attend_batch(
                    call.q[_on(chosen[part], call.device), heads].to(dtype),
                    gather(call.k, head, table[request[part, None], logical]).to(dtype),
                    gather(call.v, head, table[request[part, None], logical]).to(dtype),
                    _on((tokens < visible[part, None, None]).reshape(len(part), -1), call.device),
                    call.softmax_scale * call.k_scale,
                    call.v_scale,
                )
    return out


def compare(out: torch.Tensor, ref: torch.Tensor) -> Accuracy:
    """Distance of ``out`` from ``ref``, both of one shape, in float64.

    A NaN or infinity in either makes every figure NaN or infinite, so that any limit is failed.

    Raises:
        InputError: the shapes differ.
    """
    if out.shape != ref.shape:
        raise InputError(f"The output is {list(out.shape)}, expected {list(ref.shape)} as the reference.")
    got, want = out.detach().double().flatten(), ref.detach().double().flatten().to(out.device)
    if not got.numel():
        return Accuracy(0.0, 0.0, 1.0)
    difference = got - want
    error, norm, size = (float(torch.linalg.vector_norm(x)) for x in (difference, want, got))
    if norm == 0 or size == 0:
        nothing = norm == size
        ratio = 0.0 if nothing else error / norm if norm else float("inf") * error
        cosine = 1.0 if nothing else 0.0 if np.isfinite(error) else float("nan")
        return Accuracy(ratio, float(difference.abs().max()), cosine)
    cosine = float(np.clip(float(got @ want) / (norm * size), -1.0, 1.0))
    return Accuracy(error / norm, float(difference.abs().max()), cosine)


def _attend_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float, v_scale: float
) -> torch.Tensor:
    """Attention of ``q [n, 16, D]`` over ``k, v [n, T, D]`` where ``seen [n, T]``; every row sees a token."""
    # Select, never add: a masked key may be NaN, and 0 * NaN would carry a masked value into the sum.
    logits = torch.where(seen[:, None, :], q @ k.transpose(1, 2) * scale, -torch.inf)
    values = torch.where(seen[:, :, None], v, 0)
    return torch.softmax(logits, dim=-1) @ values * v_scale


def gather(cache: torch.Tensor, head: int, physical: np.ndarray) -> torch.Tensor:
    """Tokens of one KV head on the cache rows ``physical [n, m]``: of ``cache [n_pages, Hkv, P, D]`` (keys or
    values), ``[n, m * P, D]``, still FP8."""
    rows = _on(physical.astype(np.int64), cache.device)
    # Bytes, because indexing is not implemented for FP8 everywhere.
    picked = cache.view(torch.uint8)[rows, head]
    return picked.view(torch.float8_e4m3fn).flatten(1, 2)


def _rows_at_once(device: torch.device, pages: int, dtype: torch.dtype) -> int:
    row_bytes = pages * PAGE * 2 * HEAD_DIM * dtype.itemsize
    return max(1, _BATCH_BYTES.get(device.type, 16 << 20) // row_bytes)


def _on(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _checked_rows(rows: Sequence[int] | np.ndarray | torch.Tensor | None, total_q: int) -> np.ndarray:
    if rows is None:
        return np.arange(total_q)
    if isinstance(rows, torch.Tensor):
        rows = rows.cpu().numpy()
    chosen = np.asarray(rows, dtype=np.int64)
    outside = chosen[(chosen < 0) | (chosen >= total_q)]
    if len(outside):
        raise InputError(f"Row {outside[0]} was asked for, expected rows 0 to {total_q - 1}.")
    return chosen
