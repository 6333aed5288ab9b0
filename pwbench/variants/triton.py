"""``triton``: one query position per program, what serving engines run on Hopper today.

No page is shared between queries: every row loads its own 16 pages, FP8 widened to bfloat16.
"""

from __future__ import annotations

import importlib.util
import math
from functools import partial
from typing import Any

import torch

from pwbench.errors import VariantUnavailable
from pwbench.operator import GROUP_HEADS, HEAD_DIM, PAGE, TOPK, SparsePrefillCall
from pwbench.variants._base import Options, Prepared, Stage, Variant

INSTALL = "pip install triton"
CONFIGS = ((4, 3), (4, 2), (8, 2), (8, 3), (2, 3), (4, 4))
"""(warps, pipeline stages) that prepare chooses among; the first runs where tuning does not pay."""
TUNED_ROWS = 1024
"""Query rows times KV heads below which the first configuration is taken untimed."""

_chosen: dict[tuple[int, ...], tuple[int, int]] = {}


class Triton(Variant):
    name = "triton"
    summary = "our Triton kernel, one query position per program"
    # One arithmetic (bfloat16 products); it stands beside either precision of the others.
    precisions = ("fast", "accurate")

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "triton needs a CUDA GPU."
        if not torch.cuda.is_available():
            return "triton needs a CUDA GPU and torch sees none."
        if importlib.util.find_spec("triton") is None:
            return f"The package triton is not installed: {INSTALL}."
        if torch.cuda.get_device_capability(device) < (8, 9):
            return "triton needs compute capability 8.9 or higher for FP8 conversion."
        return None

    def prepare(self, call: SparsePrefillCall, options: Options) -> Prepared:
        reason = self.unavailable(call.device)
        if reason:
            raise VariantUnavailable(reason)
        _check_strides(call)
        import triton

        launches = _Launches(call)
        warps, stages = launches.choose()
        return Prepared(
            run=launches.run,
            stages=[Stage("metadata", launches.metadata), Stage("attention", launches.attention)],
            out=launches.out,
            details={"peer": f"triton {triton.__version__}: {warps} warps, {stages} stages"},
        )


def _check_strides(call: SparsePrefillCall) -> None:
    """Any strides of tokens, heads and pages will do; everything else has to be dense.

    Raises:
        VariantUnavailable: naming the tensor and its strides.
    """
    if call.q.stride(-1) != 1 or call.k.stride() != call.v.stride() or call.k.stride(-1) != 1:
        raise VariantUnavailable(
            f"triton needs q, k and v contiguous in their last dimension and k and v laid out alike; "
            f"their strides are {call.q.stride()}, {call.k.stride()} and {call.v.stride()}."
        )
    for name in ("topk", "page_table", "cu_seqlens_q", "seq_lens", "positions"):
        tensor = getattr(call, name)
        if not tensor.is_contiguous():
            raise VariantUnavailable(f"triton needs {name} contiguous; its strides are {tensor.stride()}.")


class _Launches:
    """The two kernels bound to one call and its workspace."""

    def __init__(self, call: SparsePrefillCall) -> None:
        # Here and not above: without a GPU there need be no Triton.
        from pwbench.variants import _triton_kernel

        self.kernels: Any = _triton_kernel
        self.call = call
        heads, rows = call.kv_heads, call.total_q
        integers = partial(torch.empty, dtype=torch.int32, device=call.device)
        self.out = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.device)
        self.pages = integers((heads, rows, TOPK))
        self.rows = integers((heads, rows, TOPK))
        self.counts = integers((heads, rows))
        self.visible = integers((heads, rows))
        self.k, self.v = call.k.view(torch.uint8), call.v.view(torch.uint8)
        self.grid = (rows, heads)
        self.config = CONFIGS[0]

    def run(self) -> None:
        self.metadata()
        self.attention()

    def metadata(self) -> None:
        call = self.call
        if not call.total_q:
            return
        self.kernels.clean_ids[self.grid](
            call.topk,
            call.page_table,
            call.cu_seqlens_q,
            call.seq_lens,
            call.positions,
            self.pages,
            self.rows,
            self.counts,
            self.visible,
            call.total_q,
            call.requests,
            call.page_table.stride(0),
            PAGE=PAGE,
            TOPK=TOPK,
            REQUESTS=max(4, 1 << (call.requests - 1).bit_length()),
            num_warps=1,
        )

    def attention(self) -> None:
        call, (warps, stages) = self.call, self.config
        if not call.total_q:
            return
        self.kernels.attend[self.grid](
            call.q,
            self.k,
            self.v,
            self.out,
            self.pages,
            self.rows,
            self.counts,
            self.visible,
            call.q.stride(0),
            call.q.stride(1),
            *self.k.stride()[:3],
            call.softmax_scale * call.k_scale * math.log2(math.e),
            call.v_scale,
            call.total_q,
            HEADS=GROUP_HEADS,
            HEAD_DIM=HEAD_DIM,
            PAGE=PAGE,
            TOPK=TOPK,
            num_warps=warps,
            num_stages=stages,
        )

    def choose(self) -> tuple[int, int]:
        """Pick the fastest configuration for this shape class and leave both kernels compiled."""
        call = self.call
        work = call.total_q * call.kv_heads
        key = (call.device.index or 0, call.kv_heads, self.k.stride(2), int(math.log2(max(work, 1))))
        if work < TUNED_ROWS:
            self.config = CONFIGS[0]
        elif key in _chosen:
            self.config = _chosen[key]
        else:
            self.metadata()
            self.config = min(CONFIGS, key=self._time)
            _chosen[key] = self.config
        self.run()  # compiles what is not compiled yet, so that a graph can capture it
        torch.cuda.synchronize(call.device)
        return self.config

    def _time(self, config: tuple[int, int]) -> float:
        """Best of three runs of the attention kernel in milliseconds; infinite where it does not fit."""
        import triton

        self.config = config
        try:
            self.attention()
        except triton.runtime.errors.OutOfResources:
            return math.inf
        times = []
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.attention()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return min(times)


VARIANT = Triton()
