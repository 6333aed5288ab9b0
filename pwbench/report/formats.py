"""Report -> Markdown, CSV and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from pwbench import stats
from pwbench.report import studies, tables
from pwbench.report.cells import Table
from pwbench.report.contenders import DEFAULT_WINDOW, Contender
from pwbench.report.model import Report, Scope
from pwbench.results import COLUMNS

_HEAVY = ("complete_samples", "stage_samples")
_SPEEDUP = ("baseline", "speedup", "speedup_low", "speedup_high")


# Markdown -----------------------------------------------------------------------------------


def markdown_table(table: Table, heading: str | None = None) -> str:
    """One table in Markdown, its notes below it."""
    lines = [] if heading is None else [heading, ""]
    lines.append("| " + " | ".join(table.columns) + " |")
    lines.append(
        "| " + " | ".join("---" if i in table.text else "---:" for i in range(len(table.columns))) + " |"
    )
    for index, row in enumerate(table.rows):
        cells = [cell.replace("|", "\\|") for cell in row]
        if index in table.strong:
            cells = [f"**{cell}**" if cell else "" for cell in cells]
        lines.append("| " + " | ".join(cells) + " |")
    for note in table.notes:
        lines += ["", note]
    return "\n".join(lines)


def markdown(report: Report) -> str:
    """The whole report in Markdown."""
    parts = ["# pwbench report"]
    parts += [f"> {warning}" for warning in report.warnings]
    for table in all_tables(report):
        parts.append(markdown_table(table, f"## {table.title}"))
    return "\n\n".join(parts) + "\n"


def all_tables(report: Report) -> list[Table]:
    """The report's tables in reading order: every scope's geomeans, then details of the main scopes."""
    found = [tables.geomean(report, scope) for scope in report.scopes if scope.cells]
    for scope in report.main_scopes():
        if not scope.cells:
            continue
        if (len(scope.captures) > 1 or scope.bounds) and scope.speedups:
            found.append(tables.speedups(report, scope))
        found += [
            tables.split(report, scope),
            studies.regroup(report, scope),
            tables.accuracy(report, scope),
            tables.counters(report, scope),
            tables.roofline(report, scope),
        ]
    found += [tables.unavailable(report), studies.provenance(report)]
    return [table for table in found if table.rows]


# Data ---------------------------------------------------------------------------------------


def csv(report: Report) -> str:
    """Every current row as CSV, samples left out, with its speed-up and interval."""
    names = [c.name for c in COLUMNS if c.name not in _HEAVY] + list(_SPEEDUP)
    return pd.DataFrame(plain_rows(report), columns=names).to_csv(index=False)


def data(report: Report) -> dict[str, Any]:
    """The report as plain data, ready for JSON.

    ``suites[suite].variants[variant]`` holds the geomean of the variant's first way of being run
    (GPU before CPU, fast, graph, cold, window 128); all of them, that one included, are in its
    ``by``, keyed ``device/precision/mode/l2`` with ``/wN`` for a window and the GPU's name when
    there are several.
    """
    suites: dict[str, Any] = {}
    several = len({scope.gpu for scope in report.scopes if scope.device == "cuda"}) > 1
    for scope in report.scopes:
        variants = suites.setdefault(scope.suite, {"variants": {}})["variants"]
        for contender in sorted(scope.contenders, key=_plainest):
            entry = _entry(scope, contender)
            key = f"{scope.device}/{contender.precision}/{scope.mode}/{scope.l2}"
            key += f"/w{contender.window}" if contender.window else ""
            key += f"/{scope.gpu}" if several and scope.device == "cuda" else ""
            variants.setdefault(contender.variant, {**entry, "by": {}})["by"][key] = entry
    used = [scope.baseline for scope in report.scopes if scope.baseline]
    baseline = report.baseline if report.baseline in used or not used else used[0]
    return {"baseline": baseline, "suites": suites, "rows": plain_rows(report), "warnings": report.warnings}


def plain_rows(report: Report) -> list[dict[str, Any]]:
    """Current rows with plain Python values, samples left out."""
    names = [c.name for c in COLUMNS if c.name not in _HEAVY] + list(_SPEEDUP)
    return [{name: _plain(row.get(name)) for name in names} for row in report.rows]


def _plainest(contender: Contender) -> tuple[Any, ...]:
    return (
        contender.variant,
        contender.precision != "fast",
        contender.window not in (DEFAULT_WINDOW, None),
        contender.window or 0,
    )


def _entry(scope: Scope, contender: Contender) -> dict[str, Any]:
    mean: stats.Ratio | None = scope.geomeans.get(contender)
    return {
        "geomean_speedup": None if mean is None else mean.value,
        "ci": [mean.low, mean.high] if mean is not None and mean.known else None,
        "rows": scope.counted(contender) if mean is not None else len(scope.rows_of(contender)),
        "baseline": scope.baseline,
        "device": scope.device,
        "gpu": scope.gpu,
        "precision": contender.precision,
        "mode": scope.mode,
        "l2": scope.l2,
        "window": contender.window,
        "verdict": scope.says(contender),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def sections(report: Report, scopes: Iterable[Scope]) -> list[Table]:
    """Tables that compare variants with themselves over all of ``scopes``, empty ones left out."""
    chosen = list(scopes)
    found = [
        studies.unions(report, chosen),
        studies.windows(report, chosen),
        studies.cache(report, report.scopes),
        studies.tensors(report, chosen),
        studies.losses(report, chosen),
    ]
    return [table for table in found if table.rows]
