"""``flashinfer``: the public API ``msa_sparse_attention`` of FlashInfer 0.7.4, its own choice of kernel."""

from __future__ import annotations

import importlib

import torch

from pwbench.errors import VariantUnavailable
from pwbench.operator import SparsePrefillCall
from pwbench.variants import _flashinfer
from pwbench.variants._base import Options, Prepared, Stage, Variant


class FlashInfer(Variant):
    name = "flashinfer"
    summary = "FlashInfer 0.7.4 msa_sparse_attention"
    # One arithmetic (Q and P as pairs of FP8, or widened to FP16): the baseline of both precisions.
    precisions = ("fast", "accurate")

    def unavailable(self, device: torch.device) -> str | None:
        return _flashinfer.unavailable(self.name, device, "flashinfer.msa_ops")

    def prepare(self, call: SparsePrefillCall, options: Options) -> Prepared:
        reason = self.unavailable(call.device)
        if reason:
            raise VariantUnavailable(reason)
        _flashinfer.check_layout(self.name, call)
        _flashinfer.check_selections(self.name, call)
        offset = _flashinfer.query_offset(self.name, call)
        attend = importlib.import_module("flashinfer.msa_ops").msa_sparse_attention
        out = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.device)

        def run() -> None:
            attend(
                call.q,
                call.k,
                call.v,
                call.topk,
                call.cu_seqlens_q,
                causal=True,
                softmax_scale=call.softmax_scale * call.k_scale,
                page_table=call.page_table,
                seqused_k=call.seq_lens,
                v_global_scale=call.v_scale,
                q_offset=offset,
                out=out,
            )

        _flashinfer.warm(self.name, run, call.device)
        return Prepared(
            run=run,
            stages=[Stage("attention", run)],
            out=out,
            details={"peer": f"flashinfer {_flashinfer.version()}: {_flashinfer.route(call)}"},
        )


VARIANT = FlashInfer()
