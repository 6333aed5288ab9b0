"""Synthetic result rows for tests: plausible numbers, deterministic, never shipped."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

SESSION = "00000000-0000-4000-8000-000000000001"


def samples(
    median_us: float, count: int = 100, noise: float = 0.01, outliers: float = 0.02, seed: int = 0
) -> list[float]:
    """``count`` times around ``median_us``: Gaussian relative noise and a share of slow outliers."""
    rng = np.random.default_rng(seed)
    values = median_us * (1 + noise * rng.standard_normal(count))
    slow = rng.random(count) < outliers
    return [float(v) for v in np.where(slow, values * (1.2 + rng.random(count)), values)]


def row(variant: str = "union8", capture: str = "code-8k", **changes: Any) -> dict[str, Any]:
    """One ok row on the GPU; ``complete_us`` may be changed and the samples follow it."""
    complete = changes.pop("complete_us", 100.0)
    count = changes.pop("samples", 100)
    noise = changes.pop("noise", 0.01)
    search, metadata = changes.pop("search_us", None), changes.pop("metadata_us", None)
    attention = complete - (search or 0) - (metadata or 0) - 2.0
    seed = changes.pop("seed", zlib.crc32(f"{variant}/{capture}/{complete}".encode()))
    values = samples(complete, count, noise, seed=seed)
    stages = {"search": search, "metadata": metadata, "attention": attention}
    base: dict[str, Any] = {
        "session": SESSION,
        "created_utc": "2026-01-02T03:04:05+00:00",
        "suite": "six",
        "capture": capture,
        "tables_sha256": f"{zlib.crc32(capture.encode()):064x}",
        "kind": "tables",
        "tensors": "seeded",
        "generator": "pcg64/1",
        "commit": "0123456",
        "variant": variant,
        "window": 128 if "regroup" in variant or "precomputed" in variant else None,
        "device": "cuda",
        "gpu": "NVIDIA H200",
        "driver": "580.0",
        "cuda": "13.0",
        "torch": "2.13.0",
        "cupy": "14.0",
        "peer": None,
        "precision": "fast",
        "mode": "graph",
        "l2": "cold",
        "status": "ok",
        "samples": count,
        "complete_us": float(np.median(values)),
        "search_us": search,
        "metadata_us": metadata,
        "attention_us": attention,
        "gap_us": float(np.median(values)) - (search or 0) - (metadata or 0) - attention,
        "prepare_ms": 12.0,
        "complete_samples": values,
        "stage_samples": {k: samples(v, count, noise, seed=seed + 1) for k, v in stages.items() if v},
        "sm_clock_mhz": 1980.0,
        "throttle": "",
        "noise_floor": 0.004,
        "rel_l2": 2.9e-2,
        "max_abs": 0.011,
        "cosine": 0.9996,
        "checked_rows": 256,
        "fp8_cache_rel_l2": 3.1e-2,
        "total_q": 8192,
        "context": 8192,
        "kv_heads": 1,
        "groups": 1024,
        "selected_pages": 131072,
        "union_pages": 40000,
        "subgroup_pages": 60000,
        "kv_bytes": 40000 * 32768,
        "mma_flops": 60000 * 2 * 2 * 64 * 128 * 128,
        "useful_flops": 131072 * 2 * 2 * 16 * 128 * 128,
        "roofline_us": complete * 0.6,
        "roofline_term": "bytes",
    }
    return {**base, **changes}


def unavailable(variant: str, reason: str, **changes: Any) -> dict[str, Any]:
    """A row that says why a variant did not run."""
    kept = (
        "session",
        "created_utc",
        "suite",
        "capture",
        "tables_sha256",
        "kind",
        "tensors",
        "generator",
        "commit",
        "variant",
        "window",
        "device",
        "gpu",
        "precision",
        "mode",
        "l2",
    )
    whole = row(variant, **changes)
    return {**{name: whole[name] for name in kept}, "status": "unavailable", "reason": reason}


CAPTURES = ("code-8k", "prose-16k", "code-32k", "prose-64k", "code-64k", "prose-128k")


def suite_rows(
    suite: str = "six", captures: tuple[str, ...] = CAPTURES, **changes: Any
) -> list[dict[str, Any]]:
    """Every kind of variant over ``captures``, as one session on the GPU would give them."""
    rows = []
    for index, capture in enumerate(captures):
        scale = 100.0 * (1 + 0.15 * index)
        size = {"context": 8192 << min(index, 4), "suite": suite, "capture": capture}
        pages = 40000 + 9000 * index
        fewer = {
            "union_pages": int(pages * 0.8),
            "kv_bytes": int(pages * 0.8) * 32768,
            "subgroup_pages": int(pages * 1.4),
        }
        plain = {"union_pages": pages, "kv_bytes": pages * 32768, "subgroup_pages": int(pages * 1.5)}
        regroup = {"search_us": 6.0, "metadata_us": 5.0, **fewer}
        made = [
            (
                "flashinfer",
                1.7 * scale,
                {
                    "precision": "accurate",
                    "rel_l2": 1.9e-3,
                    "cosine": 0.999998,
                    "peer": "flashinfer 0.6",
                    "roofline_us": None,
                    "roofline_term": None,
                },
            ),
            ("union8", scale, {"metadata_us": 5.0, **plain}),
            ("union8-regroup", 0.95 * scale, regroup),
            ("union8-precomputed", 0.95 * scale - 6.0, {"metadata_us": 5.0, **fewer}),
            ("pageweaver", 0.8 * scale, {"metadata_us": 4.0, **plain}),
            ("pageweaver-regroup", 0.75 * scale, {**regroup, "search_us": 3.0}),
        ]
        for variant, complete, extra in made:
            rows.append(row(variant, complete_us=complete, **{**size, **extra, **changes}))
        rows.append(
            row(
                "pageweaver",
                complete_us=0.95 * scale,
                **{**size, **plain, "precision": "accurate", "rel_l2": 2.0e-3, "cosine": 0.999998, **changes},
            )
        )
        rows.append(unavailable("triton", "Triton is not installed: pip install triton", **size, **changes))
    return rows
