"""The baselines on the calls they are made for: accurate, repeatable, and sent to the kernel they say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from pwbench import reference
from pwbench.operator import PAGE, SparsePrefillCall, supports
from tests.gpu.cases import mild
from tests.gpu.harness import DEVICE, PEERS, check, gpu, prepare, run, same

ITS_OWN = 5e-3
"""rel-L2 that a baseline may have: twice what pwbench allows its own kernels; theirs are not ours to mend."""

pytestmark = gpu


@dataclass(frozen=True)
class Shape:
    """A call of the form serving engines make, and the kernel that FlashInfer's API sends it to."""

    name: str
    route: str
    build: Any

    def __str__(self) -> str:
        return self.name


def served(**more) -> SparsePrefillCall:
    """Sorted ids with the own page among them, right-aligned positions, finite bytes in every page."""
    call = mild(**{"selection": "local", "poison": "tails", **more})
    # No promise of theirs covers what an engine never writes past a request's last page.
    table = torch.where((call.page_table < 0) | (call.page_table >= len(call.k)), 0, call.page_table)
    return replace(call, topk=torch.from_numpy(supports(call)[0]), page_table=table)


SHAPES = [
    Shape("short", "Cake v2", partial(served, q_lens=(300,), prefix_lens=(5000,))),
    Shape("batch", "Cake v2", partial(served, q_lens=(100, 33, 1), prefix_lens=(5000, 900, 2000))),
    Shape("two heads", "Cake v2", partial(served, q_lens=(200,), prefix_lens=(3000,), kv_heads=2)),
    Shape("100 pages", "Cake v1", partial(served, q_lens=(300,), prefix_lens=(100 * PAGE,))),
    Shape("1000 pages", "Cake v1", partial(served, q_lens=(100,), prefix_lens=(1000 * PAGE,))),
    Shape("chunk of 8192", "CuTe union", partial(served, q_lens=(8192,), prefix_lens=(4096,))),
    Shape("scales", "Cake v2", partial(served, q_lens=(64,), k_scale=1.5, v_scale=0.4, softmax_scale=0.07)),
]


@cache
def made(shape: Shape) -> SparsePrefillCall:
    return shape.build().to(DEVICE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", [*PEERS, "triton"])
def test_a_baseline_is_accurate(variant: str, shape: Shape) -> None:
    call = made(shape)
    prepared = prepare(variant, "accurate", call)
    out = run(prepared)
    check(out, reference.attend(call), ITS_OWN, f"{variant}, {shape}")
    assert same(run(prepared), out)
    if variant == "flashinfer":
        assert prepared.details["peer"].endswith(shape.route)
