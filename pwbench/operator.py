"""The operator: one call of Top-K page-sparse attention prefill, its shapes and its checks.

One call is one layer of one tensor-parallel rank over one prefill chunk of B requests. Every other
module takes this dataclass and nothing else for an input; this module imports none of them.

Query row i of KV head h attends to A_i = {t : floor(t/P) in S_i, t < L_i, t <= c_i}, where the
support S_i is the set of distinct logical pages that the row selected and that hold at least one
visible token. Its output in each of the head's query heads is

    o_i = sum over t in A_i of softmax(q_i . k_t * softmax_scale * k_scale)_t * v_t * v_scale

and exactly zero when A_i is empty (``k_t`` and ``v_t`` are the stored FP8 values).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import torch

from pwbench.errors import OperatorError

PAGE = 128
"""Tokens a page holds (P)."""
HEAD_DIM = 128
"""Channels of one head (D)."""
TOPK = 16
"""Selected pages a query position carries at most."""
GROUP_HEADS = 16
"""Query heads that share one KV head."""
INVALID = -1
"""Pads a Top-K row that selected fewer than TOPK pages."""


@dataclass(frozen=True, eq=False)
class SparsePrefillCall:
    """The inputs of one call. All tensors live on one device.

    Attributes:
        q: queries after norm and RoPE, ``[total_q, Hq, D]`` bfloat16, ``Hq = 16 * Hkv``.
        kv: paged cache, ``[n_pages, Hkv, P, 2D]`` float8_e4m3fn with K and V of a token side by
            side, or a pair ``(k, v)`` of ``[n_pages, Hkv, P, D]`` tensors.
        topk: logical page ids, ``[Hkv, total_q, TOPK]`` int32, any order; -1 pads, ids that are
            out of range, in the future or repeated add nothing.
        page_table: logical page -> row of ``kv``, ``[B, max_pages]`` int32; entries past a
            request's last page are never read.
        cu_seqlens_q: request boundaries in ``q``, ``[B + 1]`` int32.
        seq_lens: valid KV tokens of each request, this chunk included, ``[B]`` int32.
        positions: absolute causal position of each query row, ``[total_q]`` int32.
        softmax_scale: multiplies the logits, usually ``1 / sqrt(D)``.
        k_scale, v_scale: stored = value / scale.
    """

    q: torch.Tensor
    kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    topk: torch.Tensor
    page_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    softmax_scale: float = HEAD_DIM**-0.5
    k_scale: float = 1.0
    v_scale: float = 1.0

    # Sizes ----------------------------------------------------------------------------------

    @property
    def total_q(self) -> int:
        return self.q.shape[0]

    @property
    def q_heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.topk.shape[0]

    @property
    def requests(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def k(self) -> torch.Tensor:
        """Stored keys, ``[n_pages, Hkv, P, D]`` (a strided view when K and V are interleaved)."""
        return self.kv[..., :HEAD_DIM] if isinstance(self.kv, torch.Tensor) else self.kv[0]

    @property
    def v(self) -> torch.Tensor:
        """Stored values, ``[n_pages, Hkv, P, D]`` (a strided view when interleaved)."""
        return self.kv[..., HEAD_DIM:] if isinstance(self.kv, torch.Tensor) else self.kv[1]

    def to(self, device: str | torch.device) -> SparsePrefillCall:
        """The same call with every tensor on ``device``."""
        moved: dict[str, Any] = {
            name: getattr(self, name).to(device)
            for name in ("q", "topk", "page_table", "cu_seqlens_q", "seq_lens", "positions")
        }
        if isinstance(self.kv, torch.Tensor):
            moved["kv"] = self.kv.to(device)
        else:
            moved["kv"] = (self.kv[0].to(device), self.kv[1].to(device))
        return replace(self, **moved)

    # Checks ---------------------------------------------------------------------------------

    def validate(self) -> SparsePrefillCall:
        """Check every rule of the contract that does not depend on tensor contents being sane
        selections (ids of ``topk`` may be anything: bad ones add nothing).

        Returns:
            self, so that a constructor call can be checked in place.

        Raises:
            OperatorError: one sentence naming the tensor, the value seen and the value expected.
        """
        _check_tensor("q", self.q, torch.bfloat16, 3)
        _check_tensor("topk", self.topk, torch.int32, 3)
        for name, rank in (("page_table", 2), ("cu_seqlens_q", 1), ("seq_lens", 1), ("positions", 1)):
            _check_tensor(name, getattr(self, name), torch.int32, rank)
        _expect(self.q.shape[2] == HEAD_DIM, f"q has head dim {self.q.shape[2]}, expected {HEAD_DIM}")
        heads = self.kv_heads
        _expect(heads > 0, "topk has no KV head, expected at least one")
        _expect(
            self.q_heads == GROUP_HEADS * heads,
            f"q has {self.q_heads} heads, expected {GROUP_HEADS} per KV head = {GROUP_HEADS * heads}",
        )
        _expect(
            tuple(self.topk.shape[1:]) == (self.total_q, TOPK),
            f"topk is {list(self.topk.shape)}, expected [{heads}, {self.total_q}, {TOPK}]",
        )
        _expect(
            self.positions.shape[0] == self.total_q,
            f"positions has {self.positions.shape[0]} rows, expected one per query = {self.total_q}",
        )
        self._check_kv()
        self._check_devices()
        self._check_requests()
        for name in ("softmax_scale", "k_scale", "v_scale"):
            value = getattr(self, name)
            _expect(
                isinstance(value, Real) and 0 < float(value) < float("inf"),
                f"{name} is {value}, expected a positive finite number",
            )
        return self

    def _check_kv(self) -> None:
        names: tuple[str, ...]
        parts: tuple[torch.Tensor, ...]
        if isinstance(self.kv, torch.Tensor):
            last, names, parts = 2 * HEAD_DIM, ("kv",), (self.kv,)
        else:
            pair = isinstance(self.kv, tuple) and len(self.kv) == 2
            _expect(pair, f"kv is a {type(self.kv).__name__}, expected one tensor or a pair (k, v)")
            last, names, parts = HEAD_DIM, ("k", "v"), self.kv
        for name, part in zip(names, parts, strict=True):
            _check_tensor(name, part, torch.float8_e4m3fn, 4)
            _expect(
                tuple(part.shape[1:]) == (self.kv_heads, PAGE, last),
                f"{name} is {list(part.shape)}, expected [n_pages, {self.kv_heads}, {PAGE}, {last}]",
            )
        _expect(
            parts[0].shape == parts[-1].shape, f"k is {list(parts[0].shape)} but v is {list(parts[-1].shape)}"
        )

    def _check_devices(self) -> None:
        for name in ("k", "v", "topk", "page_table", "cu_seqlens_q", "seq_lens", "positions"):
            device = getattr(self, name).device
            _expect(device == self.device, f"{name} is on {device}, expected {self.device} as q")

    def _check_requests(self) -> None:
        bounds, lengths = self.cu_seqlens_q.tolist(), self.seq_lens.tolist()
        requests = len(lengths)
        _expect(
            len(bounds) == requests + 1,
            f"cu_seqlens_q has {len(bounds)} entries, expected one more than seq_lens = {requests + 1}",
        )
        _expect(
            self.page_table.shape[0] == requests,
            f"page_table has {self.page_table.shape[0]} rows, expected one per request = {requests}",
        )
        _expect(
            bounds[0] == 0 and bounds[-1] == self.total_q,
            f"cu_seqlens_q runs from {bounds[0]} to {bounds[-1]}, expected 0 to total_q = {self.total_q}",
        )
        pages = self.k.shape[0]
        table = self.page_table.cpu().numpy()
        for request, length in enumerate(lengths):
            begin, end = bounds[request], bounds[request + 1]
            _expect(
                begin <= end,
                f"cu_seqlens_q falls from {begin} to {end} at request {request}, expected rising",
            )
            _expect(length >= 0, f"seq_lens[{request}] is {length}, expected at least 0")
            needed = -(-length // PAGE)
            _expect(
                needed <= table.shape[1],
                f"request {request} needs {needed} pages for {length} tokens, "
                f"page_table has room for {table.shape[1]}",
            )
            used = table[request, :needed]
            bad = used[(used < 0) | (used >= pages)]
            _expect(
                bad.size == 0,
                f"page_table of request {request} names pages {bad[:3].tolist()}, expected 0 to {pages - 1}",
            )
        if self.total_q:
            lowest = int(self.positions.min())
            _expect(lowest >= 0, f"positions holds {lowest}, expected at least 0")


def request_of_rows(cu_seqlens_q: np.ndarray) -> np.ndarray:
    """Request index of every query row, ``[total_q]`` int64, from ``[B + 1]`` boundaries."""
    bounds = np.asarray(cu_seqlens_q, dtype=np.int64)
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


def right_aligned_positions(cu_seqlens_q: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """Default causal positions: the last query of a request sits at its last token.

    Returns ``[total_q]`` int32; never below 0 (a request may be given fewer tokens than queries).
    """
    bounds = np.asarray(cu_seqlens_q, dtype=np.int64)
    lengths = np.asarray(seq_lens, dtype=np.int64)
    request = request_of_rows(bounds)
    from_end = bounds[1:][request] - np.arange(bounds[-1])
    return np.maximum(lengths[request] - from_end, 0).astype(np.int32)


def supports(call: SparsePrefillCall) -> tuple[np.ndarray, np.ndarray]:
    """S_i of every query row: the one definition that grouping, counters and kernels start from.

    Returns:
        ``(pages, counts)``: logical ids ascending, distinct, visible, -1 last,
        ``[Hkv, total_q, TOPK]`` int32, and how many there are, ``[Hkv, total_q]`` int32.
    """
    return visible_supports(call.topk.cpu().numpy(), visible_tokens(call))


def visible_tokens(call: SparsePrefillCall) -> np.ndarray:
    """Leading tokens that each query row may see at all, min(L, c + 1), ``[total_q]`` int64."""
    request = request_of_rows(call.cu_seqlens_q.cpu().numpy())
    length = call.seq_lens.cpu().numpy().astype(np.int64)[request]
    return np.minimum(length, call.positions.cpu().numpy().astype(np.int64) + 1)


def visible_supports(topk: np.ndarray, visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`supports` on plain arrays: ``topk [Hkv, total_q, K]``, visible tokens ``[total_q]``."""
    ids = topk.astype(np.int64)
    absent = np.iinfo(np.int64).max
    ids = np.where((ids >= 0) & (ids * PAGE < visible[None, :, None]), ids, absent)
    ids.sort(axis=-1)
    ids[..., 1:][ids[..., 1:] == ids[..., :-1]] = absent
    ids.sort(axis=-1)
    counts = (ids != absent).sum(axis=-1)
    return np.where(ids == absent, INVALID, ids).astype(np.int32), counts.astype(np.int32)


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise OperatorError(message + ".")


def _check_tensor(name: str, tensor: Any, dtype: torch.dtype, rank: int) -> None:
    _expect(isinstance(tensor, torch.Tensor), f"{name} is a {type(tensor).__name__}, expected a torch tensor")
    _expect(tensor.dtype == dtype, f"{name} is {tensor.dtype}, expected {dtype}")
    _expect(tensor.dim() == rank, f"{name} has {tensor.dim()} dimensions, expected {rank}")
