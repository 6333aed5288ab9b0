"""What the GPU tests share: a case, a poisoned run, and the comparison with the float64 reference.

``PWBENCH_TEST_DEVICE=cpu`` runs the same cases through the CPU forms of the variants, which proves the
cases themselves where there is no GPU. ``PWBENCH_TEST_VARIANTS="union8 triton"`` keeps to those variants.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from pwbench import reference, variants
from pwbench.errors import VariantUnavailable
from pwbench.operator import SparsePrefillCall
from pwbench.variants import Options, Prepared

DEVICE = torch.device(os.environ.get("PWBENCH_TEST_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda"
gpu = pytest.mark.gpu if ON_GPU else pytest.mark.skipif(False, reason="")
"""Marks a module of GPU tests; a dry run on the CPU leaves it unmarked."""
needs_cuda = pytest.mark.skipif(not ON_GPU, reason="graphs, streams and kernels need CUDA")

FAST, ACCURATE = 6e-2, 3e-3
"""rel-L2 allowed in each precision; ``accurate`` is 2.5e-3 and the rounding of the bf16 output."""
WHOLE_BLOCK = 64 << 20

PEERS = ("flashinfer", "flashinfer-cake", "flashinfer-paged")
ONE_PRECISION = ("triton", "reference")
"""Variants whose arithmetic does not depend on the precision asked for: always held to ``accurate``."""


def tested() -> list[str]:
    """The variants under test: ours, or those of them that the environment names."""
    wanted = os.environ.get("PWBENCH_TEST_VARIANTS", "").split()
    ours = [name for name in variants.names() if name not in (*PEERS, "reference")]
    return [name for name in ours if not wanted or name in wanted]


def runs() -> list[tuple[str, str]]:
    """Every (variant, precision) of ours that the operator's full contract binds."""
    chosen = []
    for name in tested():
        precisions = variants.get(name).precisions
        chosen += [(name, p) for p in (precisions[-1:] if name in ONE_PRECISION else precisions)]
    return chosen


RUNS = runs()
every_run = pytest.mark.parametrize(("variant", "precision"), RUNS, ids=[f"{n}-{p}" for n, p in RUNS])
UNIONS = [name for name in tested() if name.startswith(("union8", "pageweaver"))]


@dataclass(frozen=True, eq=False)
class Case:
    """One named call of a family of the test list.

    Attributes:
        family: number in the list; its title is in `tests.gpu.cases`.
        name: what is special about it.
        build: makes the call, on the CPU.
        fast: rel-L2 allowed in ``fast``; None where 8-bit operands cannot promise one (outputs must
            still be finite).
        accurate: rel-L2 allowed in ``accurate``.
    """

    family: int
    name: str
    build: Callable[[], SparsePrefillCall]
    fast: float | None = FAST
    accurate: float | None = ACCURATE

    def __str__(self) -> str:
        return f"{self.family:02d}-{self.name}"

    def limit(self, variant: str, precision: str) -> float | None:
        exact = precision == "accurate" or variant in ONE_PRECISION
        return self.accurate if exact else self.fast


@cache
def built(case: Case) -> tuple[SparsePrefillCall, torch.Tensor]:
    """The case's call on the device and its float64 reference, made once."""
    call = case.build().to(DEVICE)
    return call, reference.attend(call)


def poison_free_memory() -> None:
    """Leave NaN bytes in what the allocators will hand out next, so that unwritten workspace shows."""
    if not ON_GPU:
        return
    pools = [torch.full((WHOLE_BLOCK,), 0xFF, dtype=torch.uint8, device=DEVICE)]
    pools += [torch.full((1 << 19,), 0xFF, dtype=torch.uint8, device=DEVICE) for _ in range(16)]
    del pools


def prepare(
    variant: str, precision: str, call: SparsePrefillCall, window: int = 128, poison: bool = True
) -> Prepared:
    """Bind a variant to a call; skips the test where it says that it cannot run."""
    chosen = variants.get(variant)
    reason = chosen.unavailable(call.device)
    if reason:
        pytest.skip(reason)
    if poison:
        poison_free_memory()
    try:
        return chosen.prepare(call, Options(precision=precision, window=window))
    except VariantUnavailable as error:
        pytest.skip(str(error))


def run(prepared: Prepared) -> torch.Tensor:
    """One complete call into a poisoned output; a copy of what it wrote."""
    prepared.out.fill_(torch.nan)
    prepared.run()
    synchronize()
    return prepared.out.clone()


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize(DEVICE)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality, NaN included."""
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def check(out: torch.Tensor, ref: torch.Tensor, limit: float | None, what: object) -> None:
    """``out`` against the reference: no poison left, empty rows exactly zero, rel-L2 within the limit."""
    assert bool(torch.isfinite(out).all()), f"{what}: {int((~torch.isfinite(out)).sum())} values not finite"
    empty = ref.abs().amax((1, 2)) == 0
    assert not bool(out[empty].any()), f"{what}: rows with nothing to attend to are not zero"
    if limit is None:
        return
    accuracy = reference.compare(out, ref)
    assert accuracy.rel_l2 <= limit, f"{what}: rel-L2 {accuracy.rel_l2:.2e} above {limit:.1e}"
    # The norm over everything can hide one wrong row among many right ones.
    norms = ref.flatten(1).norm(dim=1)
    rows = (out.double() - ref).flatten(1).norm(dim=1) / norms.clamp_min(float(norms.max()) * 1e-3 + 1e-30)
    assert float(rows.max()) <= 4 * limit, (
        f"{what}: row {int(rows.argmax())} has rel-L2 {float(rows.max()):.2e}, above {4 * limit:.1e}"
    )
