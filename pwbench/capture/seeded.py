"""Tensors made from a seed, for captures that store only tables.

The same seed gives the same bytes on every machine, library version and device: raw 64-bit words of
NumPy's PCG64 (a stream NumPy promises to keep) index a table of normal quantiles and choose signs. No value
comes of floating-point arithmetic but the table's, whose rounding to 8 and 16 bits forgives a last digit.

What a running softmax costs, and the power that its products take, hang on where a query's large logits
lie. Three traits of trained models are therefore built in; all else is independent noise:

- spread: queries of standard deviation 2.1 on keys of 1 give logits of about 2.5 (models at hand: 2.0 to
  2.9), so that most probabilities are too small to matter;
- nearness: the signs of the first `CODED` channels of keys and queries follow a code of the position, random
  signs that each last `KEPT` tokens, so that near keys score higher. RoPE's slow channels do the same;
- late maxima: some heads of some stretches of queries look for a mark that a few pages bear in one of their
  tokens, and find it there and not among their neighbours. How often is a capture's own trait, see
  `pwbench.capture.logits`.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from pwbench.capture.quantize import to_e4m3
from pwbench.operator import GROUP_HEADS, HEAD_DIM, INVALID, PAGE

GENERATOR = "pcg64-near-and-late/2"
Q_STD = 2.1
KV_STD = 1.0
LATE_MAXIMA = 0.3
"""Of a capture that does not say: few, near those 0.2 of the layers of the model at hand that have fewest."""
CODED = 48
KEPT = 512
MARKS = 16
STRETCH = 64
"""Neighbouring positions whose heads look for the same marks."""

_Q_LEVELS = 1 << 16
_KV_LEVELS = 1 << 8
_MARK_BYTE = 0x3D  # 1.625 in e4m3
_PAGES_AT_ONCE = 256  # their code takes twelve times their bytes while it is made
_PERIOD = 1 << 14  # stretches after which codes and searches come again: 8 and 1 million tokens
# Late maxima of a query when no head looks for a mark, and more for each head that does: a mark is borne by
# one page in `MARKS`, so that among 15 pages and not in the first one it is found by half of them.
_LATE_ANYWAY, _LATE_PER_HEAD = 0.04, 0.75
_QUERIES, _CACHE, _CODE, _PAGES, _MARKS, _SOUGHT = range(6)  # streams


def declaration(seed: int, late_maxima: float | None) -> dict[str, Any]:
    """What the manifest says about seeded tensors; ``late_maxima`` as `pwbench.capture.logits` counts."""
    late = LATE_MAXIMA if late_maxima is None else late_maxima
    return {
        "generator": GENERATOR,
        "seed": seed,
        "q_std": Q_STD,
        "kv_std": KV_STD,
        "late_maxima": round(late, 3),
    }


def queries(
    seed: int, positions: np.ndarray, kv_heads: int = 1, late_maxima: float = LATE_MAXIMA
) -> torch.Tensor:
    """``[total_q, 16 * kv_heads, D]`` bfloat16 on the CPU, for rows at ``positions [total_q]``."""
    positions = np.asarray(positions, dtype=np.int64)
    shape = (len(positions), kv_heads, GROUP_HEADS, HEAD_DIM)
    count = int(np.prod(shape))
    bits = _q_table()[_words(seed, _QUERIES, count * 2).view(np.uint16)[:count]].reshape(shape)
    magnitudes = bits[..., :CODED] & 0x7FFF
    signs = np.broadcast_to(_code(seed, positions)[:, None, None], magnitudes.shape)
    sought = _sought(seed, positions, kv_heads, late_maxima)
    signs = np.where(sought[..., None] == INVALID, signs, _marks(seed)[sought])
    bits[..., :CODED] = magnitudes | signs.astype(np.int16) << 15
    return torch.from_numpy(bits).view(torch.bfloat16).view(len(positions), -1, HEAD_DIM)


def cache(seed: int, logical: np.ndarray, kv_heads: int = 1) -> torch.Tensor:
    """``[len(logical), Hkv, P, 2D]`` float8_e4m3fn on the CPU; ``logical`` holds the logical page of each row
    of the pool, -1 where it has none (see `logical_pages`)."""
    logical = np.asarray(logical, dtype=np.int64)
    shape = (len(logical), kv_heads, PAGE, 2 * HEAD_DIM)
    count = int(np.prod(shape))
    codes = _kv_table()[_words(seed, _CACHE, count).view(np.uint8)[:count]].reshape(shape)
    valid = np.flatnonzero(logical != INVALID)
    words = _words(seed, _PAGES, 8 * (int(logical.max(initial=0)) + 1))
    marks = _marks(seed)
    for begin in range(0, len(valid), _PAGES_AT_ONCE):
        rows = valid[begin : begin + _PAGES_AT_ONCE]
        pages = logical[rows]
        signs = _code(seed, pages[:, None] * PAGE + np.arange(PAGE)) << 7
        keys = codes[rows, :, :, :CODED]
        codes[rows, :, :, :CODED] = keys & 0x7F | signs[:, None]
        marked, token = (words[pages] % MARKS).astype(np.int64), (words[pages] >> 32) % PAGE
        codes[rows, :, token, :CODED] = (_MARK_BYTE | marks[marked] << 7)[:, None]
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def logical_pages(page_table: np.ndarray, cache_pages: int) -> np.ndarray:
    """Logical page of each of ``cache_pages`` rows of the pool, -1 where no request has it, ``[cache_pages]``
    int64; of a page that requests share, the last one's. ``page_table``: as in `Tables`, -1 past an end."""
    logical = np.full(cache_pages, INVALID, dtype=np.int64)
    request, page = np.nonzero(page_table >= 0)
    logical[page_table[request, page]] = page
    return logical


def _code(seed: int, positions: np.ndarray) -> np.ndarray:
    """Sign bits ``[..., CODED]`` uint8 of positions: each channel's changes at a `KEPT`-th of its own."""
    channels = np.arange(CODED)
    stretch = (positions[..., None] + channels * KEPT // CODED) // KEPT % _PERIOD
    words = _words(seed, _CODE, 8 * (int(stretch.max(initial=0)) + 1))
    return (words[stretch] >> channels.astype(np.uint64) & 1).astype(np.uint8)


def _marks(seed: int) -> np.ndarray:
    """Sign bits of each mark, ``[MARKS, CODED]`` uint8."""
    words = _words(seed, _MARKS, 8 * MARKS)
    return (words[:, None] >> np.arange(CODED, dtype=np.uint64) & 1).astype(np.uint8)


def _sought(seed: int, positions: np.ndarray, kv_heads: int, late_maxima: float) -> np.ndarray:
    """The mark that each head of a row looks for or -1, ``[total_q, kv_heads, 16]`` int64."""
    stretch = positions // STRETCH % _PERIOD
    words = _words(seed, _SOUGHT, 16 * kv_heads * (int(stretch.max(initial=0)) + 1)).reshape(-1, kv_heads, 2)
    chance, marks = words[stretch, :, 0], words[stretch, :, 1]
    mean = min(max(0.0, (late_maxima - _LATE_ANYWAY) / _LATE_PER_HEAD), float(GROUP_HEADS))
    heads = int(mean) + (chance >> 32 < int((mean - int(mean)) * 2**32))
    lanes = np.arange(GROUP_HEADS)
    mark = (marks[..., None] >> (4 * lanes).astype(np.uint64) & (MARKS - 1)).astype(np.int64)
    return np.where(lanes < heads[..., None], mark, INVALID)


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
