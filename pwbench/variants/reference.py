"""Every query row by itself: nothing shared, nothing reordered, a plain softmax over its own tokens."""

from __future__ import annotations

import numpy as np
import torch

from pwbench.operator import (
    GROUP_HEADS,
    HEAD_DIM,
    PAGE,
    SparsePrefillCall,
    request_of_rows,
    supports,
    visible_tokens,
)
from pwbench.variants._base import Options, Prepared, Stage, Variant
from pwbench.variants._union import cuda_missing
from pwbench.variants._union_cpu import float_pages

_ROWS_AT_ONCE = {"cpu": 4, "cuda": 512}
"""Rows gathered together: a few MiB of a CPU's cache, enough to fill a GPU."""


class Reference(Variant):
    name = "reference"
    summary = "per query, float32, plain torch; on any device"
    precisions = ("fast", "accurate")

    def unavailable(self, device: torch.device) -> str | None:
        return cuda_missing(device)

    def prepare(self, call: SparsePrefillCall, options: Options) -> Prepared:
        on_cpu = call.device.type == "cpu"
        out = torch.empty(
            (call.total_q, call.q_heads, HEAD_DIM),
            dtype=torch.float32 if on_cpu else torch.bfloat16,
            device=call.device,
        )

        def attention() -> None:
            _attention(call, out)

        return Prepared(
            run=attention,
            stages=[Stage("attention", attention)],
            out=out,
            graphable=False,
            details={"peer": f"torch {torch.__version__}, float32 per query"},
        )


def _attention(call: SparsePrefillCall, out: torch.Tensor) -> None:
    out.zero_()
    pages, counts = supports(call)
    request, visible = request_of_rows(call.cu_seqlens_q.cpu().numpy()), visible_tokens(call)
    at_once = _ROWS_AT_ONCE.get(call.device.type, 4)
    for head in range(call.kv_heads):
        # Rows with as many pages go together; rows without a page stay 0.
        rows = np.argsort(counts[head], kind="stable")
        rows = rows[counts[head, rows] > 0]
        heads = slice(head * GROUP_HEADS, (head + 1) * GROUP_HEADS)
        used = pages[head] >= 0
        owner = np.broadcast_to(request[:, None], used.shape)
        entry = np.zeros(used.shape, dtype=np.int64)
        entry[used], k, v = float_pages(call, head, owner[used], pages[head][used].astype(np.int64))
        for first in range(0, len(rows), at_once):
            batch = rows[first : first + at_once]
            width = int(counts[head, batch].max())
            logical, place = pages[head, batch, :width], entry[batch, :width]
            tokens = logical[:, :, None].astype(np.int64) * PAGE + np.arange(PAGE)
            seen = (logical >= 0)[:, :, None] & (tokens < visible[batch, None, None])
            hidden = torch.from_numpy(~seen.reshape(len(batch), 1, -1)).to(call.device)
            index = torch.from_numpy(batch).to(call.device)
            at = torch.from_numpy(place).to(call.device)
            q = call.q[index, heads].float() * (call.softmax_scale * call.k_scale)
            weights = torch.bmm(q, k[at].flatten(1, 2).transpose(1, 2)).masked_fill_(hidden, -torch.inf)
            result = torch.bmm(torch.softmax(weights, dim=-1), v[at].flatten(1, 2)) * call.v_scale
            out[index, heads] = result.to(out.dtype)


VARIANT = Reference()
