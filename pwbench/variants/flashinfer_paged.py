"""``flashinfer-paged``: FlashInfer's paged wrapper with one request per query position and KV head.

The path there was before FlashInfer had the operator. Its plan reads the page lists on the host, so
the complete call waits for the GPU and cannot be captured into a graph; plan is the metadata stage.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from pwbench.errors import VariantUnavailable
from pwbench.operator import GROUP_HEADS, HEAD_DIM, PAGE, TOPK, SparsePrefillCall, supports
from pwbench.variants import _flashinfer
from pwbench.variants._base import Options, Prepared, Stage, Variant

WORKSPACE = 256 << 20
"""Bytes of FlashInfer's float workspace."""


class FlashInferPaged(Variant):
    name = "flashinfer-paged"
    summary = "FlashInfer 0.7.4 paged decode wrapper, one request per query position"
    precisions = ("fast", "accurate")

    def unavailable(self, device: torch.device) -> str | None:
        return _flashinfer.unavailable(self.name, device, "flashinfer.decode")

    def prepare(self, call: SparsePrefillCall, options: Options) -> Prepared:
        reason = self.unavailable(call.device)
        if reason:
            raise VariantUnavailable(reason)
        if not call.q.is_contiguous() or not call.k.stride() == call.v.stride():
            raise VariantUnavailable(f"{self.name} takes contiguous q and k and v laid out alike.")
        empty = int((supports(call)[1] == 0).sum())
        if empty:
            raise VariantUnavailable(
                f"{self.name} makes a request of every row, and {empty} rows of this call select nothing."
            )
        paged = _Paged(call)
        _flashinfer.warm(self.name, paged.run, call.device)
        return Prepared(
            run=paged.run,
            stages=[Stage("metadata", paged.plan), Stage("attention", paged.attend)],
            out=paged.out,
            graphable=False,
            details={"peer": f"flashinfer {_flashinfer.version()}: paged decode wrapper, fa2 tensor cores"},
        )


class _Paged:
    """The wrapper bound to one call; a request of it is (query row, KV head), in that order."""

    def __init__(self, call: SparsePrefillCall) -> None:
        decode: Any = importlib.import_module("flashinfer.decode")
        self.call = call
        self.out = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.device)
        self.kv = _flashinfer.kv_views(call)
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=call.device)
        self.wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(
            workspace, kv_layout="HND", use_tensor_cores=True, backend="fa2"
        )
        self.head = torch.arange(call.kv_heads, device=call.device)
        self.slot = torch.arange(TOPK, device=call.device)
        self.row = torch.arange(call.total_q, device=call.device)

    def run(self) -> None:
        self.plan()
        self.attend()

    def plan(self) -> None:
        """From selections to FlashInfer's page lists, then its own plan."""
        call = self.call
        request = torch.bucketize(self.row, call.cu_seqlens_q[1:].long(), right=True)
        seen = torch.minimum(call.seq_lens[request].long(), call.positions.long() + 1)
        ids = call.topk.long().transpose(0, 1)  # [total_q, Hkv, TOPK]
        visible = (ids >= 0) & (ids * PAGE < seen[:, None, None])
        ids = torch.where(visible, ids, torch.iinfo(torch.int64).max).sort(-1).values
        repeated = torch.zeros_like(visible)
        repeated[..., 1:] = ids[..., 1:] == ids[..., :-1]
        kept = (ids != torch.iinfo(torch.int64).max) & ~repeated
        count = kept.sum(-1)
        # Only the highest page can be cut short: every other one lies wholly before it.
        last = torch.where(kept, ids, -1).amax(-1)
        last_tokens = torch.where(count > 0, torch.clamp(seen[:, None] - last * PAGE, max=PAGE), 0)
        logical = torch.where(kept, ids, 0)
        physical = call.page_table[request[:, None, None], logical].long()
        rows = physical * call.kv_heads + self.head[None, :, None]
        indptr = torch.zeros(call.total_q * call.kv_heads + 1, dtype=torch.int32, device=call.device)
        indptr[1:] = count.flatten().cumsum(0)
        self.wrapper.plan(
            indptr,
            rows[kept].int(),
            last_tokens.flatten().int(),
            GROUP_HEADS,
            1,
            HEAD_DIM,
            PAGE,
            q_data_type=call.q.dtype,
            kv_data_type=self.kv[0].dtype,
            sm_scale=call.softmax_scale * call.k_scale,
        )

    def attend(self) -> None:
        rows = self.call.total_q * self.call.kv_heads
        self.wrapper.run(
            self.call.q.view(rows, GROUP_HEADS, HEAD_DIM),
            self.kv,
            v_scale=self.call.v_scale,
            out=self.out.view(rows, GROUP_HEADS, HEAD_DIM),
        )


VARIANT = FlashInferPaged()
