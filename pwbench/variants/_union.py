"""The union variants: one walk over each group's pages, differing in how the groups come about."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch

from pwbench.operator import SparsePrefillCall
from pwbench.variants import _union_cpu
from pwbench.variants._base import Options, Prepared, Variant

Order = Literal["original", "online", "precomputed"]
"""Where the execution order comes from: the rows as they are, a search inside the timed call, or the
same search done beforehand, outside it."""


def cuda_missing(device: torch.device) -> str | None:
    """Why torch cannot use ``device``, or None: the CPU always, CUDA where torch sees one."""
    if device.type not in ("cpu", "cuda"):
        return f"pwbench runs on cpu and cuda devices, not on {device.type}."
    if device.type == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device; pwbench doctor says what is missing."
    return None


def hopper_missing(device: torch.device) -> str | None:
    """Why our kernels cannot run on ``device``, or None: the CPU always, a Hopper GPU with CuPy."""
    if missing := cuda_missing(device):
        return missing
    if device.type == "cpu":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"The device has compute capability {capability[0]}.{capability[1]}, the kernels need 9.0."
    if find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'pwbench[cuda13]', or [cuda12] for a CUDA 12 driver."
    return None


class UnionVariant(Variant):
    """A page walk over groups: in float32 on the CPU, by the CUDA kernels on a Hopper GPU."""

    precisions = ("fast", "accurate")

    def __init__(
        self,
        name: str,
        summary: str,
        order: Order,
        *,
        group: int = 8,
        search_group: int = 8,
        search_window: int | None = None,
        matching: bool = False,
    ) -> None:
        """``group`` rows share a page list; the search puts ``search_group`` of them together, in windows
        of ``search_window`` rows (None: as the options ask), greedily or by ``matching``."""
        self.name = name
        self.summary = summary
        self.order: Order = order
        self.group = group
        self.search_group = search_group
        self.search_window = search_window
        self.matching = matching

    def order_for(self, call: SparsePrefillCall, options: Options) -> Order:
        """The order for one call, from what the host knows of it."""
        return self.order

    def unavailable(self, device: torch.device) -> str | None:
        return hopper_missing(device)

    def prepare(self, call: SparsePrefillCall, options: Options) -> Prepared:
        if call.device.type == "cuda":
            from pwbench.variants import _union_gpu  # needs CuPy and a driver

            return _union_gpu.prepare(call, options, name=self.name, order=self.order_for(call, options))
        return _union_cpu.prepare(
            call,
            options,
            order=self.order_for(call, options),
            group=self.group,
            search_group=self.search_group,
            window=self.search_window,
            matching=self.matching,
        )
