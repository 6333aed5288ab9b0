"""From rows to a `Report`: which rows are current, what the baseline is, what the reader must be told."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pandas as pd

from pwbench import stats
from pwbench.report.cautions import gather
from pwbench.report.model import (
    CPU_BASELINE,
    DEFAULT_BASELINE,
    Contender,
    Report,
    Scope,
    contender_of,
)
from pwbench.results import CHOICES, INPUTS, Row, rows_in_order

SUITE_ORDER = ("six", "six-2k", "five-64k", "batch")


def build(frame: pd.DataFrame, baseline: str = DEFAULT_BASELINE, fallback: str | None = None) -> Report:
    """Find the current rows of ``frame`` and compare them.

    Args:
        frame: rows as `pwbench.load_results` gives them.
        baseline: the variant the others are compared with. Where it has no ok row there is no
            speed-up, and the report says so; CPU rows are then compared with ``reference``.
        fallback: the variant to use there instead.
    """
    rows = rows_in_order(frame)
    remeasured: list[str] = []
    scopes: dict[tuple[str, ...], Scope] = {}
    for row in rows:
        suite, device, gpu, mode, l2 = (str(row[n] or "") for n in ("suite", "device", "gpu", "mode", "l2"))
        scopes.setdefault((suite, device, gpu, mode, l2), Scope(suite, device, gpu, mode, l2)).others.append(
            row
        )
    for scope in scopes.values():
        remeasured += _fill(scope)
        _choose_baseline(scope, baseline, fallback)
        _bring_together(scope)
    ordered = sorted(scopes.values(), key=_scope_order)
    cautions = gather(ordered, list(dict.fromkeys(remeasured)))
    return Report(baseline, ordered, _with_speedups(ordered), cautions, frame)


def _fill(scope: Scope) -> list[str]:
    """Split the scope's rows into current cells and what is missing.

    Returns:
        The captures, ``suite/capture``, with rows that were measured on other selections, or on seeded
        tensors of another generator, and are left out.
    """
    rows, remeasured = scope.others, []
    scope.others = [row for row in rows if row["status"] == "ok"]
    for capture in dict.fromkeys(row["capture"] for row in rows):
        mine = [row for row in rows if row["capture"] == capture]
        tables = mine[-1]["tables_sha256"]
        if any(row["tables_sha256"] != tables for row in mine):
            remeasured.append(f"{scope.suite}/{capture}")
            mine = [row for row in mine if row["tables_sha256"] == tables]
        tensors = _prevalent([row["tensors"] for row in mine if row["status"] == "ok"])
        alike = [row for row in mine if row["status"] == "ok" and row["tensors"] == tensors]
        generator = alike[-1]["generator"] if alike else None
        if any(row["generator"] != generator for row in alike):
            remeasured.append(f"{scope.suite}/{capture}")
        current: dict[Contender, Row] = {}
        for row in mine:
            if row["status"] != "ok" or (row["tensors"], row["generator"]) == (tensors, generator):
                current[contender_of(row)] = row
        for contender, row in current.items():
            if row["status"] == "ok":
                scope.cells[contender, capture] = row
            else:
                scope.missing.append(row)
    return remeasured


def _prevalent(tensors: list[Any]) -> Any:
    """The tensors most rows were measured on: a capture's rows are compared on one kind."""
    return max(dict.fromkeys(tensors), key=lambda t: (tensors.count(t), t == "stored"), default=None)


def _choose_baseline(scope: Scope, baseline: str, fallback: str | None) -> None:
    have = {contender.variant for contender, _ in scope.cells}
    if baseline in have:
        scope.baseline = baseline
        return
    reasons = sorted({row["reason"] for row in scope.missing if row["variant"] == baseline and row["reason"]})
    why = f" ({reasons[0].rstrip('.')})" if reasons else ""
    if fallback in have:
        scope.baseline = fallback
        scope.note = f"{baseline} has no result here{why}; compared with {fallback}, as asked."
    elif scope.device == "cpu" and CPU_BASELINE in have:
        scope.baseline = CPU_BASELINE
        scope.note = (
            f"CPU rows: baseline {CPU_BASELINE}. They show that the variants work, not how fast a GPU is."
        )
    else:
        named = f"--fallback {min(have)}" if have else "another baseline"
        scope.note = f"{baseline} has no result here{why}, so there are no speed-ups."
        scope.tip = f"Name {named} to get some."


def _bring_together(scope: Scope) -> None:
    """Make those rows current that shared a session with the baseline, where the code was the same.

    Two rows of one session were sampled in turn, two of different sessions were not. So of a contender's
    equivalent rows (same selections, tensors and commit as its newest) the newest is taken that was measured
    beside the baseline, if there is one. A row of older code never stands for a newer one, and which other
    variants there are changes nothing.
    """
    if scope.baseline is None:
        return
    measured: defaultdict[tuple[Contender, str], list[Row]] = defaultdict(list)
    for row in scope.others:
        measured[contender_of(row), row["capture"]].append(row)
    for (contender, capture), current in list(scope.cells.items()):
        if contender.variant == scope.baseline:
            continue
        precision = scope.baseline_precision(contender.precision)
        beside = {
            row["session"]
            for row in scope.others
            if (row["variant"], row["capture"], row["precision"]) == (scope.baseline, capture, precision)
            and all(row[name] == current[name] for name in INPUTS)
        }
        shared = [
            row
            for row in measured[contender, capture]
            if row["session"] in beside and _same_program(row, current)
        ]
        if shared:
            scope.cells[contender, capture] = shared[-1]


def _same_program(row: Row, current: Row) -> bool:
    """Whether ``row`` could stand for ``current``: known to be the same code on the same inputs."""
    alike = ("commit", "peer", *INPUTS)
    return bool(current["commit"]) and all(row[name] == current[name] for name in alike)


def _scope_order(scope: Scope) -> tuple[Any, ...]:
    known = SUITE_ORDER.index(scope.suite) if scope.suite in SUITE_ORDER else len(SUITE_ORDER)
    return (
        scope.synthetic,
        scope.device == "cpu",
        known,
        scope.suite,
        scope.gpu,
        CHOICES["mode"].index(scope.mode),
        CHOICES["l2"].index(scope.l2),
    )


def _with_speedups(scopes: list[Scope]) -> list[Row]:
    rows = []
    for scope in scopes:
        for (contender, capture), row in scope.cells.items():
            rows.append({**row, **_speedup_columns(scope, scope.speedups.get((contender, capture)))})
        rows += [{**row, **_speedup_columns(scope, None)} for row in scope.missing]
    return rows


def _speedup_columns(scope: Scope, ratio: stats.Ratio | None) -> Row:
    known = ratio if ratio is not None and ratio.known else None
    return {
        "baseline": scope.baseline,
        "speedup": None if ratio is None else ratio.value,
        "speedup_low": None if known is None else known.low,
        "speedup_high": None if known is None else known.high,
    }
