"""Tensors made from a seed, for captures that store only tables.

The same seed gives the same bytes on every machine, library version and device: raw 64-bit words of
NumPy's PCG64 (a stream NumPy promises to keep) index a table of normal quantiles. Nothing depends on
floating-point arithmetic at replay. Values are as large as a trained model's: unit-variance keys and
values, and queries of standard deviation 1.5, so that logits q.k/sqrt(D) have standard deviation 1.5.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from pwbench.capture.quantize import to_e4m3
from pwbench.operator import GROUP_HEADS, HEAD_DIM, PAGE

GENERATOR = "pcg64-normal-quantiles/1"
Q_STD = 1.5
KV_STD = 1.0

_Q_LEVELS = 1 << 16
_KV_LEVELS = 1 << 8


def declaration(seed: int) -> dict[str, Any]:
    """What the manifest says about seeded tensors."""
    return {"generator": GENERATOR, "seed": seed, "q_std": Q_STD, "kv_std": KV_STD}


def queries(seed: int, total_q: int, q_heads: int) -> torch.Tensor:
    """``[total_q, Hq, D]`` bfloat16 on the CPU."""
    count = total_q * q_heads * HEAD_DIM
    words = _words(seed, 0, count * 2).view(np.uint16)[:count]
    bits = _q_table()[words]
    return torch.from_numpy(bits).view(torch.bfloat16).view(total_q, q_heads, HEAD_DIM)


def cache(seed: int, cache_pages: int, kv_heads: int) -> torch.Tensor:
    """``[cache_pages, Hkv, P, 2D]`` float8_e4m3fn on the CPU."""
    shape = (cache_pages, kv_heads, PAGE, 2 * HEAD_DIM)
    count = int(np.prod(shape))
    words = _words(seed, 1, count).view(np.uint8)[:count]
    return torch.from_numpy(_kv_table()[words]).view(torch.float8_e4m3fn).view(shape)


def q_heads(kv_heads: int) -> int:
    """Query heads of a call with ``kv_heads`` KV heads."""
    return GROUP_HEADS * kv_heads


def _words(seed: int, stream: int, size: int) -> np.ndarray:
    """``size`` bytes, rounded up to whole words, as little-endian uint64."""
    generator = np.random.PCG64(np.random.SeedSequence([seed, stream]))
    return generator.random_raw(-(-size // 8)).astype("<u8", copy=False)


@lru_cache(maxsize=1)
def _q_table() -> np.ndarray:
    """uint16 word -> bits of a bfloat16 normal quantile."""
    values = torch.tensor(_quantiles(_Q_LEVELS, Q_STD), dtype=torch.float64)
    return values.float().to(torch.bfloat16).view(torch.int16).numpy()


@lru_cache(maxsize=1)
def _kv_table() -> np.ndarray:
    """uint8 byte -> E4M3 code of a normal quantile."""
    values = torch.tensor(_quantiles(_KV_LEVELS, KV_STD), dtype=torch.float64)
    return to_e4m3(values, 1.0).view(torch.uint8).numpy()


def _quantiles(levels: int, std: float) -> list[float]:
    normal = NormalDist(0.0, std)
    return [normal.inv_cdf((level + 0.5) / levels) for level in range(levels)]
