"""``flashinfer-cake``: FlashInfer's Cake union program, also where its API would choose the CuTe kernel.

Beside ``flashinfer`` it gives the best of FlashInfer's kernels for a call.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from pwbench.errors import VariantUnavailable
from pwbench.operator import SparsePrefillCall
from pwbench.variants import _flashinfer
from pwbench.variants._base import Options, Prepared, Stage, Variant

MODULE = "flashinfer.msa_ops.cake_hopper_sm90"


class FlashInferCake(Variant):
    name = "flashinfer-cake"
    summary = "FlashInfer 0.7.4, its Cake program whatever its API would choose"
    precisions = ("fast", "accurate")

    def unavailable(self, device: torch.device) -> str | None:
        return _flashinfer.unavailable(self.name, device, MODULE)

    def prepare(self, call: SparsePrefillCall, options: Options) -> Prepared:
        reason = self.unavailable(call.device)
        if reason:
            raise VariantUnavailable(reason)
        _flashinfer.check_layout(self.name, call)
        _flashinfer.check_selections(self.name, call)
        offset = _flashinfer.query_offset(self.name, call)
        cake: Any = importlib.import_module(MODULE)
        out = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.device)

        def run() -> None:
            cake.hopper_msa_sparse_attention(
                call.q,
                call.k,
                call.v,
                call.topk,
                call.cu_seqlens_q,
                page_table=call.page_table,
                seqused_k=call.seq_lens,
                out=out,
                q_offset=offset,
                softmax_scale=call.softmax_scale * call.k_scale,
            )
            if call.v_scale != 1.0:
                out.mul_(call.v_scale)

        _flashinfer.warm(self.name, run, call.device)
        plan = cake.plan_sparse_prefill(
            num_q_heads=call.q_heads, num_kv_heads=call.kv_heads, max_pages=call.page_table.shape[1]
        )
        return Prepared(
            run=run,
            stages=[Stage("attention", run)],
            out=out,
            details={"peer": f"flashinfer {_flashinfer.version()}: Cake {plan.impl}"},
        )


VARIANT = FlashInferCake()
