"""Source: invented selections, for questions that no recording answers. Always labelled synthetic.

`persistent` models what trained selectors do: tokens come in a few kinds, each kind keeps most of the
pages it used last and drops a few, and every query selects the page it sits in. The extremes bound every
kernel: selections that share nothing, that are all the same, uniformly random ones, and empty ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pwbench.capture import seeded
from pwbench.capture.combine import combine
from pwbench.capture.recorder import Recording
from pwbench.errors import InputError
from pwbench.operator import INVALID, PAGE, TOPK, SparsePrefillCall

KINDS = 4
"""Kinds of tokens of the persistent pattern."""
PATTERNS = ("persistent", "random", "identical", "disjoint", "empty")
SOURCE = {"engine": "synthetic", "version": "1", "hook": None}


def generate(
    context: int,
    queries: int,
    *,
    pattern: str = "persistent",
    affinity: float = 0.9,
    seed: int = 0,
    kv_heads: int = 1,
) -> Recording:
    """Invent one request's call: the last ``queries`` positions of ``context`` tokens.

    Args:
        context: tokens of the request.
        queries: query rows, at most ``context``.
        pattern: ``persistent`` (see ``affinity``), ``random`` (uniform over visible pages),
            ``identical`` (all rows choose the same old pages), ``disjoint`` (neighbours share nothing
            while there are pages enough), ``empty`` (nothing selected). The local page is always
            selected, except by ``empty`` and ``disjoint``.
        affinity: 0 to 1: chance that a query is of its predecessor's kind, and that a kind keeps a page;
            each dropped page is replaced by another one, near pages being likelier.
        seed: for selections and tensors.
        kv_heads: KV heads, each with its own selections.

    Raises:
        InputError: a value is out of range.
    """
    if not 0 < queries <= context:
        raise InputError(f"queries is {queries}, expected between 1 and the context of {context}.")
    if pattern not in PATTERNS:
        raise InputError(f"pattern is {pattern!r}, expected one of {', '.join(PATTERNS)}.")
    if not 0.0 <= affinity <= 1.0:
        raise InputError(f"affinity is {affinity}, expected between 0 and 1.")
    if kv_heads < 1 or seed < 0:
        raise InputError(f"kv_heads is {kv_heads} and seed {seed}, expected at least 1 and at least 0.")
    positions = np.arange(context - queries, context)
    # NumPy promises to keep RandomState's streams, so a seed means the same selections for good.
    draw = np.random.RandomState(seed % (1 << 32))
    topk = np.stack([_select(pattern, positions, affinity, draw) for _ in range(kv_heads)])
    cache_pages = -(-context // PAGE)
    call = SparsePrefillCall(
        q=seeded.queries(seed, positions, kv_heads),
        kv=seeded.cache(seed, np.arange(cache_pages), kv_heads),
        topk=torch.from_numpy(topk),
        page_table=torch.arange(cache_pages, dtype=torch.int32)[None],
        cu_seqlens_q=torch.tensor([0, queries], dtype=torch.int32),
        seq_lens=torch.tensor([context], dtype=torch.int32),
        positions=torch.from_numpy(positions.astype(np.int32)),
    ).validate()
    facts: dict[str, Any] = {
        "source": SOURCE,
        "synthetic": {
            "pattern": pattern,
            "affinity": affinity if pattern == "persistent" else None,
            "seed": seed,
        },
        "chunk": {"begin": context - queries, "queries": queries, "context": context},
        "selector": {"type": "synthetic", "topk": TOPK},
    }
    return Recording(call, None, facts)


def generate_batch(
    context: int,
    queries: int,
    *,
    requests: int,
    pattern: str = "persistent",
    affinity: float = 0.9,
    seed: int = 0,
    kv_heads: int = 1,
) -> Recording:
    """Invent one call of many requests of unlike lengths, as a busy server would batch them.

    Contexts are spread evenly in their logarithm from 1/32 of ``context`` to all of it; the rows are
    shared out at random, at least one to each request. Pages lie scattered over the cache.

    Args:
        context: tokens of the longest request.
        queries: query rows of the call, at least ``requests``.
        requests: how many.
        pattern, affinity, seed, kv_heads: as of `generate`; each request draws selections of its own.

    Raises:
        InputError: a value is out of range.
    """
    if not 0 < requests <= queries:
        raise InputError(f"requests is {requests}, expected between 1 and the {queries} query rows.")
    draw = np.random.RandomState(seed % (1 << 32))
    contexts = np.maximum(1, context / 32.0 ** draw.random_sample(requests)).astype(np.int64)
    contexts[0] = context
    lengths = 1 + np.diff(np.sort(draw.randint(0, queries - requests + 1, requests - 1)), prepend=0)
    lengths = np.append(lengths, queries - lengths.sum())
    if (lengths > contexts).any():
        # Few long requests and many rows: no request can ask more rows than it has tokens.
        raise InputError(f"{queries} rows do not fit {requests} requests of at most {context} tokens.")
    parts = [
        generate(int(c), int(n), pattern=pattern, affinity=affinity, seed=seed + i, kv_heads=kv_heads)
        for i, (c, n) in enumerate(zip(contexts, lengths, strict=True))
    ]
    whole = combine(parts, placement_seed=seed)
    whole.facts["synthetic"] = {**whole.facts["synthetic"], "seed": seed, "requests": requests}
    return whole


def _select(pattern: str, positions: np.ndarray, affinity: float, draw: np.random.RandomState) -> np.ndarray:
    """``[queries, TOPK]`` int32 selections of one KV head."""
    if pattern == "empty":
        return np.full((len(positions), TOPK), INVALID, dtype=np.int32)
    if pattern == "disjoint":
        return _disjoint(positions)
    if pattern == "identical":
        return _identical(positions)
    if pattern == "random":
        return _random(positions, draw)
    return _persistent(positions, affinity, draw)


def _disjoint(positions: np.ndarray) -> np.ndarray:
    """Row i takes the i-th block of TOPK pages among those visible to the chunk's first row."""
    pages = int(positions[0]) // PAGE + 1
    start = np.arange(len(positions)) * TOPK
    ids = (start[:, None] + np.arange(TOPK)) % pages
    ids[:, pages:] = INVALID
    return ids.astype(np.int32)


def _identical(positions: np.ndarray) -> np.ndarray:
    """The first TOPK - 1 pages and the local one."""
    local = positions // PAGE
    ids = np.tile(np.arange(TOPK), (len(positions), 1))
    ids[:, -1] = np.maximum(local, TOPK - 1)
    return np.where(ids <= local[:, None], ids, INVALID).astype(np.int32)


def _persistent(positions: np.ndarray, affinity: float, draw: np.random.RandomState) -> np.ndarray:
    """Tokens of a few kinds, each kind with page sets that drift; ``affinity`` is the chance that a query
    is of its predecessor's kind, and that its kind keeps a page."""
    out = np.full((len(positions), TOPK), INVALID, dtype=np.int32)
    pages_of: list[list[int]] = [[] for _ in range(KINDS)]
    kind = 0
    for row, local in enumerate((positions // PAGE).tolist()):
        if draw.random_sample() >= affinity:
            kind = int(draw.random_sample() * KINDS)
        chosen = _drift(pages_of[kind], local, affinity, draw, near=True)
        pages_of[kind] = chosen
        out[row, : len(chosen) + 1] = [*chosen, local]
    return out


def _random(positions: np.ndarray, draw: np.random.RandomState) -> np.ndarray:
    out = np.full((len(positions), TOPK), INVALID, dtype=np.int32)
    for row, local in enumerate((positions // PAGE).tolist()):
        chosen = _drift([], local, 0.0, draw, near=False)
        out[row, : len(chosen) + 1] = [*chosen, local]
    return out


def _drift(pages: list[int], local: int, keep: float, draw: np.random.RandomState, near: bool) -> list[int]:
    """Pages before ``local``, ascending, up to TOPK - 1: those kept of ``pages`` and new ones."""
    kept = draw.random_sample(len(pages)) < keep
    chosen = {page for page, stays in zip(pages, kept, strict=True) if stays and page < local}
    while len(chosen) < min(TOPK - 1, local):
        age = draw.random_sample()
        # Cubing the age makes near pages likelier: half of all draws fall in the nearest eighth.
        chosen.add(local - 1 - int((age**3 if near else age) * local))
    return sorted(chosen)
