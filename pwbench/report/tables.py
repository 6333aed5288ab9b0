"""The report's tables of one scope, from which every format is rendered."""

from __future__ import annotations

import math
from typing import Any

from pwbench.report.cells import (
    ACCURATE,
    Table,
    clock,
    count,
    error,
    interval,
    percent,
    times,
    with_interval,
    worst,
)
from pwbench.report.contenders import (
    ONE_PRECISION,
    OWN_PRECISION,
    WINDOWS,
    Contender,
    contender_of,
    shares_pages,
)
from pwbench.report.model import Report, Scope
from pwbench.results import STAGES, Row

# Tables of one scope ------------------------------------------------------------------------


def title_of(scope: Scope) -> str:
    """The scope in words: suite, how it ran, and what it is compared with."""
    against = f", against {scope.baseline_label}" if scope.baseline else ""
    made_up = " (made-up selections)" if scope.synthetic else ""
    return f"{scope.suite}{made_up}: {scope.config}{against}"


def geomean(report: Report, scope: Scope) -> Table:
    """Who is fastest over the suite, by how much, how sure, at what accuracy."""
    if scope.bounds:
        return Table(f"Geomean speed-up, {title_of(scope)}", [])
    table = Table(
        f"Geomean speed-up, {title_of(scope)}",
        ["variant", "precision", "speed-up", "worst rel-L2", "95 % interval", "verdict", "captures"],
        text=(0, 1, 5),
    )
    total = len(scope.captures)
    for contender in scope.shown:
        mean = scope.geomeans.get(contender)
        rows = scope.rows_of(contender)
        used = scope.counted(contender) if mean else len(rows)
        table.rows.append(
            [
                contender.label,
                scope.precision_of(contender),
                times(mean.value if mean else None),
                error(worst(rows, "rel_l2")),
                "" if contender.variant == scope.baseline else interval(mean),
                "baseline" if contender.variant == scope.baseline else scope.says(contender),
                str(used) if used == total else f"{used} of {total}",
            ]
        )
        if contender in scope.probes and not table.breaks:
            table.breaks.add(len(table.rows) - 1)
    if scope.note:
        table.notes.append(scope.note)
    table.notes += _about_precisions(scope)
    if any(" W" in contender.label for contender in scope.shown):
        table.notes.append(WINDOWS)
    if scope.probes:
        names = ", ".join(dict.fromkeys(contender.variant for contender in scope.probes))
        table.notes.append(
            f"{names}: measured to tell what a search is worth, not to choose from. original never "
            "searches, regroup always does, precomputed is handed what a search finds."
        )
    return table.without_empty_columns()


def _about_precisions(scope: Scope) -> list[str]:
    """What ``its own`` means where it stands, and which precision has no rows."""
    notes = []
    own = [c.variant for c in scope.shown if scope.precision_of(c) == OWN_PRECISION]
    if own:
        have = f"{', '.join(own)} {'has' if len(own) == 1 else 'have'} one precision"
        limit = (
            f"The limit of {error(ACCURATE)} is pwbench's, for its own kernels at accurate on seeded tensors."
        )
        notes.append(f"{OWN_PRECISION}: {have}, whichever stands beside it. {limit}")
    notes += [f"{precision}: not measured." for precision in scope.unmeasured]
    return notes


def speedups(report: Report, scope: Scope) -> Table:
    """Speed-up of every contender on every capture, the geomean last."""
    table = Table(
        f"Speed-up per capture, {title_of(scope)}",
        ["variant", "precision", *scope.captures, "geomean"],
        text=(0, 1),
    )
    for contender in scope.shown:
        if contender.variant == scope.baseline and len(scope.shown) > 1:
            continue
        cells = [with_interval(scope.speedups.get((contender, capture))) for capture in scope.captures]
        mean = [] if scope.bounds else [with_interval(scope.geomeans.get(contender))]
        table.rows.append([contender.label, scope.precision_of(contender), *cells, *mean])
    if scope.bounds:
        table.columns.remove("geomean")
        table.notes.append("Bounds, each for itself: a mean over them would say nothing.")
    table.notes += [scope.note] if scope.note else []
    table.notes.append("In brackets: 95 % bootstrap interval of the ratio of medians.")
    return table


def details(report: Report, scope: Scope) -> Table:
    """Per capture and contender: speed-up, where the time goes, accuracy and page visits."""
    unit, write = clock(row["complete_us"] for row in scope.cells.values())
    stages = [f"{name}, {unit}" for name in ("complete", *STAGES, "gap")]
    table = Table(
        f"Each capture, {title_of(scope)}",
        ["capture", "variant", "precision", "speed-up", *stages, "rel-L2", "union pages"],
        text=(0, 1, 2),
    )
    marked = False
    for capture in scope.captures:
        table.breaks.add(len(table.rows))
        for contender in scope.shown:
            row = scope.cells.get((contender, capture))
            if row is None:
                continue
            ratio = scope.speedups.get((contender, capture))
            elsewhere = scope.elsewhere(contender, capture)
            marked |= elsewhere
            table.rows.append(
                [
                    capture,
                    contender.label,
                    scope.precision_of(contender),
                    times(ratio.value if ratio else None) + (ELSEWHERE if elsewhere else ""),
                    *(write(row[f"{name}_us"]) for name in ("complete", *STAGES, "gap")),
                    error(row["rel_l2"]),
                    count(row["union_pages"]),
                ]
            )
    if marked:
        table.notes.append(elsewhere_note(scope))
    return table.without_empty_columns()


ELSEWHERE = "\N{DAGGER}"
"""Marks a speed-up over a row of the baseline that is not shown."""


def elsewhere_note(scope: Scope) -> str:
    """What `ELSEWHERE` means."""
    return (
        f"{ELSEWHERE} over another run of {scope.baseline} than the one whose time is shown (beside this "
        "variant in its own session, or beside its precision), so that the times here do not give it."
    )


def split(report: Report, scope: Scope) -> Table:
    """Where the complete call's time goes."""
    unit, write = clock(row["complete_us"] for row in scope.cells.values())
    names = ("complete", *STAGES, "gap")
    table = Table(
        f"Where the time goes, {title_of(scope)}",
        ["capture", "variant", "precision", *(f"{name}, {unit}" for name in names), "prepare, ms"],
        notes=[
            "gap = complete - sum of the stages; negative means that stages overlap. A variant that cannot "
            "be split reports its whole time as attention. prepare is untimed and one-off."
        ],
        text=(0, 1, 2),
    )
    for capture in scope.captures:
        table.breaks.add(len(table.rows))
        for contender in scope.shown:
            row = scope.cells.get((contender, capture))
            if row is not None:
                cells = [write(row[f"{name}_us"]) for name in names]
                prepare = "" if row["prepare_ms"] is None else f"{row['prepare_ms']:,.0f}"
                table.rows.append([capture, contender.label, scope.precision_of(contender), *cells, prepare])
    return table.without_empty_columns()


def accuracy(report: Report, scope: Scope) -> Table:
    """Worst error of every contender over the suite, beside what the FP8 cache itself costs.

    Rows on seeded tensors and rows on the model's own stand in blocks of their own: their errors differ by
    more than those of two kernels do.
    """
    table = Table(
        f"Accuracy, {scope.suite}: {scope.config}",
        [
            "tensors",
            "variant",
            "precision",
            "rel-L2",
            "max abs",
            "cosine",
            "rows checked",
            "error of the FP8 cache itself",
        ],
        text=(0, 1, 2),
    )
    measured = _by_tensors(scope)
    used = scope.tensors
    for kind in sorted(measured, key=lambda kind: (kind not in used, kind)):
        table.breaks.add(len(table.rows))
        mine = measured[kind]
        for contender in sorted(mine, key=lambda c: (worst(mine[c], "rel_l2") or math.inf, c.label)):
            rows = mine[contender]
            lowest = min((row["cosine"] for row in rows if row["cosine"] is not None), default=None)
            table.rows.append(
                [
                    TENSORS.get(kind, kind),
                    contender.label,
                    scope.precision_of(contender),
                    error(worst(rows, "rel_l2")),
                    error(worst(rows, "max_abs")),
                    "" if lowest is None else f"{lowest:.6f}",
                    count(sum(row["checked_rows"] or 0 for row in rows)),
                    error(worst(rows, "fp8_cache_rel_l2")),
                ]
            )
    table.notes.append("The worst over the captures, against the reference on the stored FP8 cache.")
    if used:
        kinds = " and ".join(TENSORS.get(kind, kind) for kind in used)
        table.notes.append(f"The headline and the speed-ups of this suite are of rows on tensors: {kinds}.")
    table.notes.append(f"The limit of accurate, {error(ACCURATE)}, is meant on seeded tensors.")
    if "stored" in measured:
        table.notes.append(
            "The last column is the distance between that reference and the model's own output: the price "
            "of storing K and V in FP8."
        )
    return table.without_empty_columns()


def values(report: Report, scope: Scope) -> Table:
    """Errors on the model's own Q, K and V, capture by capture, below what the FP8 cache itself costs."""
    mine: dict[tuple[Contender, str], Row] = {
        (contender_of(row), row["capture"]): row for row in scope.others if row["tensors"] == "stored"
    }
    captures = [c for c in scope.captures if any(c == capture for _, capture in mine)]
    table = Table(
        f"rel-L2 on the model's own tensors, {scope.suite}: {scope.config}",
        ["what", "precision", *captures],
        notes=[
            "First row: the reference on the FP8 cache against the model's own bf16 output, which is what "
            "storing K and V in FP8 costs before any kernel runs. Below it each kernel against that "
            "reference."
        ],
        text=(0, 1),
    )
    if not mine:
        return table
    cache = [
        worst((r for (_, c), r in mine.items() if c == capture), "fp8_cache_rel_l2") for capture in captures
    ]
    table.strong.add(0)
    table.rows.append(["the FP8 cache itself", "", *(error(value) for value in cache)])
    present = {c for c, _ in mine if c not in scope.twins}
    for contender in sorted(present, key=lambda c: (c.precision != "fast", c.label)):
        errors = [mine[contender, c]["rel_l2"] if (contender, c) in mine else None for c in captures]
        table.rows.append(
            [contender.label, scope.precision_of(contender), *(error(value) for value in errors)]
        )
    return table


def counters(report: Report, scope: Scope) -> Table:
    """The exact counters, one line per capture and way of grouping, naming those that share it."""
    names = ("groups", "selected_pages", "union_pages", "subgroup_pages")
    table = Table(
        f"Counters, {scope.suite} (exact, the same on every device)",
        [
            "capture",
            "context",
            "grouping of",
            "groups",
            "selected pages",
            "union pages",
            "of selected",
            "4-query pages",
            "K and V read, MB",
            "useful share of FLOP",
        ],
        text=(0, 2),
    )
    uncounted: set[str] = set()
    for capture in scope.captures:
        table.breaks.add(len(table.rows))
        shared: dict[tuple[Any, ...], list[str]] = {}
        rows: dict[tuple[Any, ...], Row] = {}
        alone: list[str] = []
        for contender in scope.shown:
            row = scope.cells.get((contender, capture))
            if row is not None and row["union_pages"] is not None and not shares_pages(row):
                alone.append(contender.label)
            elif row is not None and row["union_pages"] is not None:
                key = tuple(row[name] for name in (*names, "kv_bytes", "mma_flops"))
                shared.setdefault(key, []).append(contender.label)
                rows[key] = row
        for key, labels in sorted(shared.items(), key=lambda item: -item[0][2]):
            row = rows[key]
            table.rows.append(
                [
                    capture,
                    count(row["context"]),
                    ", ".join(sorted(set(labels))),
                    *(count(row[n]) for n in names[:3]),
                    percent(row["union_pages"] / row["selected_pages"]) if row["selected_pages"] else "",
                    count(row["subgroup_pages"]),
                    "" if row["kv_bytes"] is None else f"{row['kv_bytes'] / 1e6:,.0f}",
                    percent(row["useful_flops"] / row["mma_flops"])
                    if row["mma_flops"] and row["useful_flops"]
                    else "",
                ]
            )
        if alone:
            uncounted |= set(alone)
            row = next(
                r for (_, c), r in scope.cells.items() if c == capture and r["union_pages"] is not None
            )
            known = [
                capture,
                count(row["context"]),
                ", ".join(sorted(set(alone))),
                "",
                count(row["selected_pages"]),
            ]
            table.rows.append([*known, *[""] * (len(table.columns) - len(known))])
    if uncounted:
        table.notes.append(
            f"{', '.join(sorted(uncounted))}: how queries share pages is not counted, so that a row says "
            "only what was selected."
        )
    return table


def roofline(report: Report, scope: Scope) -> Table:
    """How close each contender comes to what the GPU's measured ceilings allow."""
    unit, write = clock(row["complete_us"] for row in scope.cells.values())
    table = Table(
        f"Roofline, {title_of(scope)}",
        [
            "capture",
            "variant",
            "precision",
            f"complete, {unit}",
            f"attention, {unit}",
            f"roofline, {unit}",
            "bound by",
            "complete call reaches",
        ],
        notes=["The roofline is the least time that the GPU's ceilings allow a kernel with the same groups."],
        text=(0, 1, 2, 6),
    )
    for capture in scope.captures:
        table.breaks.add(len(table.rows))
        for contender in scope.shown:
            row = scope.cells.get((contender, capture))
            if row is None or not row["roofline_us"] or scope.device == "cpu":
                continue
            bound, attention = row["roofline_us"], row["attention_us"]
            table.rows.append(
                [
                    capture,
                    contender.label,
                    scope.precision_of(contender),
                    write(row["complete_us"]),
                    write(attention),
                    write(bound),
                    row["roofline_term"] or "",
                    percent(bound / row["complete_us"]),
                ]
            )
    return table


def unavailable(report: Report) -> Table:
    """What could not run or failed, and why."""
    table = Table(
        "Not measured, and why",
        ["variant", "precision", "where", "status", "captures", "reason"],
        text=(0, 1, 2, 3, 5),
    )
    seen: dict[tuple[str, ...], list[str]] = {}
    for scope in report.scopes:
        for row in scope.missing:
            where = scope.gpu if scope.device == "cuda" else "CPU"
            own = row["variant"] in ONE_PRECISION
            key = (
                row["variant"],
                OWN_PRECISION if own else row["precision"],
                where,
                row["status"],
                row["reason"] or "",
            )
            seen.setdefault(key, []).append(f"{row['suite']}/{row['capture']}")
    for (variant, precision, where, status, reason), captures in sorted(seen.items()):
        distinct = sorted(set(captures))
        listed = distinct[0] if len(distinct) == 1 else str(len(distinct))
        table.rows.append([variant, precision, where, status, listed, reason])
    return table


TENSORS = {"seeded": "seeded", "stored": "the model's own"}
"""The values of the column ``tensors`` for a reader."""


def _by_tensors(scope: Scope) -> dict[str, dict[Contender, list[Row]]]:
    """Of every kind of tensors the shown contenders' rows: the current, or of other kinds the newest."""
    found: dict[str, dict[Contender, dict[str, Row]]] = {}
    tables = {capture: row["tables_sha256"] for (_, capture), row in scope.cells.items()}
    current = [scope.cells[key] for key in scope.cells]
    for row in [*scope.others, *current]:
        if row["tables_sha256"] == tables.get(row["capture"]):
            kind = found.setdefault(str(row["tensors"]), {})
            kind.setdefault(contender_of(row), {})[row["capture"]] = row
    shown = {
        kind: {c: list(rows.values()) for c, rows in mine.items() if c in scope.shown}
        for kind, mine in found.items()
    }
    return {kind: mine for kind, mine in shown.items() if mine}
