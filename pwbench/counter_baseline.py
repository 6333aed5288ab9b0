"""The blessed counters of the stored captures: counted without replay, kept with who, when, why."""

from __future__ import annotations

import getpass
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pwbench import counters, page_plan
from pwbench.capture import Capture, discover, load
from pwbench.errors import InputError, MeasurementError
from pwbench.files import parse_json, replace_text
from pwbench.grouping import MATCHING_WINDOW, identity_order, match, regroup
from pwbench.operator import GROUP_HEADS, HEAD_DIM, PAGE, SparsePrefillCall, supports
from pwbench.variants.page_union_stream import CHUNK_ROWS, MOST_TILES

SCHEMA_NAME = "pwbench.counters"
SCHEMA_MAJOR, SCHEMA_MINOR = 1, 0
DEFAULT = Path("results") / "counters.json"
GROUP = 8
SEARCHES = {"regroup-w64": 64, "regroup-w128": 128}
"""Window of the greedy searches that are counted, for groups of `GROUP` queries."""
MATCHING = f"match-w{MATCHING_WINDOW}"
"""The search by matching, counted too."""
PAGE_MAJOR = {
    "page-union": (None, page_plan.MOST_TILES_PER_LOAD),
    "page-union-stream": (CHUNK_ROWS, MOST_TILES),
}
"""Rows of a chunk (None: as many as fit the workspace) and most tiles of a page load, by variant."""


def count_captures(
    paths: Sequence[str | Path] = (), done: Callable[[str], None] = lambda name: None
) -> dict[str, Any]:
    """Counters of captures in every order the gate watches.

    Args:
        paths: captures or folders of them; none = all under ``captures/``.
        done: told each capture's name when it is finished.

    Returns:
        ``{"suite/capture": {"tables_sha256": ..., "groupings": {name: counters}}}`` with groupings
        ``per-query``, ``original``, the names of `SEARCHES`, `MATCHING` and those of `PAGE_MAJOR`.

    Raises:
        CaptureError: a path holds no capture, or one is damaged.
    """
    found: dict[str, Any] = {}
    for path in discover([str(path) for path in paths]):
        capture = load(path)
        name = f"{capture.suite}/{capture.name}"
        found[name] = {"tables_sha256": capture.tables_sha256, "groupings": count_capture(capture)}
        done(name)
    return found


def count_capture(capture: Capture) -> dict[str, dict[str, int]]:
    """Counters of one capture, by grouping."""
    call = _call_without_values(capture)
    pages, _ = supports(call)
    bounds = call.cu_seqlens_q.numpy()
    original = identity_order(call.kv_heads, call.total_q)
    found = {
        "per-query": counters.count(call, pages, original, 1),
        "original": counters.count(call, pages, original, GROUP),
    }
    for name, window in SEARCHES.items():
        order = regroup(pages, bounds, window=window, group=GROUP)
        found[name] = counters.count(call, pages, order, GROUP)
    found[MATCHING] = counters.count(call, pages, match(pages, bounds), GROUP)
    for name in PAGE_MAJOR:
        found[name] = count_page_major(name, call, pages)
    return found


def count_page_major(name: str, call: SparsePrefillCall, pages: np.ndarray) -> dict[str, int]:
    """Counters of a variant of `PAGE_MAJOR`.

    Args:
        name: the variant.
        pages: first result of `pwbench.operator.supports` of ``call``.
    """
    chunk_rows, most_tiles = PAGE_MAJOR[name]
    fitting = page_plan.chunk_rows_for(call.total_q, call.kv_heads, page_plan.WORKSPACE_BYTES)
    # The stream's blocks share one queue of all chunks, so its loads are split by the whole call.
    per_load = page_plan.tiles_per_load_for(call.total_q if chunk_rows else fitting, call.kv_heads)
    lists = page_plan.list_queries(pages, call.cu_seqlens_q.numpy(), chunk_rows or fitting)
    counted = page_plan.counters(call, pages, lists, min(most_tiles, per_load))
    return {key: int(value) for key, value in counted.items() if key != "tile_occupancy"}


def _call_without_values(capture: Capture) -> SparsePrefillCall:
    """The recorded call with tensors that were never written: counters look only at the selections."""
    tables = capture.tables
    heads, pages = tables.kv_heads, max(tables.cache_pages, 1)
    q = torch.empty((tables.total_q, GROUP_HEADS * heads, HEAD_DIM), dtype=torch.bfloat16)
    kv = torch.empty((1, heads, PAGE, 2 * HEAD_DIM), dtype=torch.float8_e4m3fn).expand(pages, -1, -1, -1)
    return tables.call(q, kv, softmax_scale=1.0)


def read(path: str | Path) -> dict[str, Any]:
    """A stored baseline: ``{"blessed": [...], "captures": {...}}``.

    Raises:
        InputError: it is absent, no JSON, foreign or of an unknown major version.
    """
    path = Path(path)
    try:
        stored = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"There is no counter baseline at {path}; `pwbench gate --bless --why 'first'` makes one."
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no readable baseline ({error}); bless again.") from error
    schema = stored.get("schema") if isinstance(stored, dict) else None
    if not isinstance(schema, dict) or schema.get("name") != SCHEMA_NAME:
        raise InputError(
            f"{path} is JSON but not a counter baseline of pwbench (its schema does not say so)."
        )
    if schema.get("major") != SCHEMA_MAJOR:
        raise InputError(
            f"{path} has format {schema.get('major')}, this pwbench reads {SCHEMA_MAJOR}: bless anew."
        )
    for what in _misshapen(stored):
        raise InputError(f"{path}: {what}; the file was edited: restore it, or move it away and bless anew.")
    return dict(stored)


def _misshapen(stored: dict[str, Any]) -> Iterator[str]:
    """What of a baseline is not as `bless` writes it."""
    if not isinstance(stored.get("blessed"), list):
        yield "blessed is no list"
    captures = stored.get("captures")
    if not isinstance(captures, dict):
        yield "captures is no JSON object"
        return
    for name, entry in captures.items():
        groupings = entry.get("groupings") if isinstance(entry, dict) else None
        if not isinstance(groupings, dict) or not isinstance(entry.get("tables_sha256"), str):
            yield f"the entry of {name} lacks tables_sha256 or groupings"
        elif not all(isinstance(counted, dict) for counted in groupings.values()):
            yield f"a grouping of {name} is no JSON object"


def bless(path: str | Path, captures: dict[str, Any], why: str, who: str | None = None) -> dict[str, str]:
    """Make ``captures`` the baseline at ``path`` and add to its history who did so, when and why.

    Raises:
        InputError: no reason is given, or the file there is something else.
        MeasurementError: it could not be written; the old one is unchanged.
    """
    path = Path(path)
    entry = blessing(why, who)
    history = read(path)["blessed"] if path.exists() else []
    stored = {
        "schema": {"name": SCHEMA_NAME, "major": SCHEMA_MAJOR, "minor": SCHEMA_MINOR},
        "blessed": [*history, entry],
        "captures": captures,
    }
    try:
        replace_text(path, json.dumps(stored, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise MeasurementError(
            f"Could not write {path}: {error.strerror}; the old baseline is unchanged."
        ) from error
    return entry


def blessing(why: str, who: str | None = None) -> dict[str, str]:
    """Who blesses, when and why.

    Raises:
        InputError: no reason is given.
    """
    if not why.strip():
        raise InputError("A blessing needs a reason: --why 'what changed and why that is right'.")
    return {
        "who": who or _whoami(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "why": why.strip(),
    }


def _whoami() -> str:
    """The committer's name where git knows it, else the login name."""
    try:
        named = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, timeout=10)
        if named.returncode == 0 and named.stdout.strip():
            return named.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        pass
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
