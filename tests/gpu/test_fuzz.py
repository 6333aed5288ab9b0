"""Random calls against the reference. A failure prints the seed; ``PWBENCH_FUZZ=N`` sets how many."""

from __future__ import annotations

import os
from functools import cache

import numpy as np
import pytest
import torch

from pwbench import reference
from pwbench.operator import SparsePrefillCall
from tests.calls import SELECTIONS, make_call
from tests.gpu.harness import (
    ACCURATE,
    DEVICE,
    FAST,
    ON_GPU,
    ONE_PRECISION,
    check,
    every_run,
    gpu,
    prepare,
    run,
)

pytestmark = gpu

SEEDS = int(os.environ.get("PWBENCH_FUZZ", "60" if ON_GPU else "2"))
CHUNK = 20


@cache
def fuzzed(seed: int) -> tuple[SparsePrefillCall, torch.Tensor]:
    """A call drawn by ``seed`` alone, and its reference."""
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, 7))
    q_lens = [int(n) for n in rng.choice([0, 1, 3, 8, 17, 63, 64, 65, 130], requests)]
    if not sum(q_lens):
        q_lens[0] = 5
    prefix = [int(n) for n in rng.integers(0, 40, requests) * rng.integers(1, 130)]
    full = [p + n for p, n in zip(prefix, q_lens, strict=True)]
    cut = bool(rng.random() < 0.2)
    scattered = bool(rng.random() < 0.2)
    call = make_call(
        seed,
        q_lens,
        prefix,
        kv_heads=int(rng.integers(1, 4)),
        selection=SELECTIONS[int(rng.integers(len(SELECTIONS)))],
        separate=bool(rng.random() < 0.3),
        seq_lens=[max(0, n - int(rng.integers(0, 200))) for n in full] if cut else None,
        positions=rng.integers(0, max(full) + 1, sum(q_lens)).tolist() if scattered else None,
        shared_pages=int(rng.integers(0, 3)) * int(not cut),
        query_gain=1.0,
        softmax_scale=float(rng.uniform(0.03, 0.1)),
        k_scale=float(rng.uniform(0.5, 1.5)),
        v_scale=float(rng.uniform(0.3, 3.0)),
    ).to(DEVICE)
    return call, reference.attend(call)


@every_run
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_calls_agree_with_the_reference(first: int, variant: str, precision: str) -> None:
    limit = FAST if precision == "fast" and variant not in ONE_PRECISION else ACCURATE
    for seed in range(first, min(first + CHUNK, SEEDS)):
        call, ref = fuzzed(seed)
        window = 64 if seed % 2 else 128
        prepared = prepare(variant, precision, call, window, poison=seed % 5 == 0)
        check(run(prepared), ref, limit, f"seed {seed}")
