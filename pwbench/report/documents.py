"""Documents whose tables are made from stored results: fill them, or prove that they are current.

A table's place in a Markdown file is marked, and may be narrowed to some of the rows:

    <!-- table:geomean suite=six l2=cold -->
    <!-- end -->

Everything between the two lines is replaced; the rest of the document is prose and stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from pwbench.columns import column_dictionary
from pwbench.errors import InputError
from pwbench.files import replace_text
from pwbench.report import studies, tables
from pwbench.report.build import build
from pwbench.report.cells import Table
from pwbench.report.formats import markdown_table
from pwbench.report.model import DEFAULT_BASELINE, Report, Scope
from pwbench.report.paper import paper

_PLACE = re.compile(
    r"<!-- table:(?P<name>[\w-]+)(?P<filters>(?: [\w-]+=\S+)*) -->\n(?P<body>.*?)<!-- end -->", re.S
)
_OPEN = re.compile(r"<!-- table:")

PER_SCOPE: dict[str, Callable[[Report, Scope], Table]] = {
    "geomean": tables.geomean,
    "speedups": tables.speedups,
    "details": tables.details,
    "split": tables.split,
    "accuracy": tables.accuracy,
    "values": tables.values,
    "counters": tables.counters,
    "roofline": tables.roofline,
    "regroup": studies.regroup,
}
"""Tables of one scope: a place that matches several scopes shows them one after the other."""

OVER_SCOPES: dict[str, Callable[[Report, list[Scope]], Table]] = {
    "losses": studies.losses,
    "unions": studies.unions,
    "windows": studies.windows,
    "cache": studies.cache,
    "tensors": studies.tensors,
}
"""Tables over all scopes that match."""

OVERALL: dict[str, Callable[[Report], Table]] = {
    "unavailable": tables.unavailable,
    "paper": paper,
    "provenance": studies.provenance,
}
FILTERS = ("suite", "device", "gpu", "mode", "l2", "variant", "precision", "baseline")
"""What may narrow a place: columns of the rows (several values with commas), and the baseline to compare
with, whose rows are always there."""
_ROW_FILTERS = ("variant", "precision")

_FULL = "full/six --tensors both --l2 both --device cuda --out results/h200-full.parquet"
MAKERS = {
    "windows": "captures/five-64k -v union8 -v union8-regroup --window 64 --device cuda "
    "--out results/h200-windows.parquet",
    "cache": "captures/six --l2 both --device cuda --out results/h200-six.parquet",
    "tensors": _FULL,
    "values": _FULL,
}
"""Arguments of the replay that makes the rows of a table, where it is more than a suite on a device."""


def fill(text: str, frame: pd.DataFrame | None) -> str:
    """``text`` with every marked table made anew.

    Args:
        text: a Markdown document.
        frame: rows as `pwbench.load_results` gives them; None when there are none yet, and then each
            place says which command makes them.

    Raises:
        InputError: a place names a table or filter that does not exist, or is never closed.
    """
    reports: dict[str, Report] = {}
    if len(_OPEN.findall(text)) != len(_PLACE.findall(text)):
        raise InputError(
            "A table's place is not closed: expected `<!-- table:NAME -->` ... `<!-- end -->`, each alone."
        )

    def replaced(match: re.Match[str]) -> str:
        name, filters = match["name"], dict(pair.split("=", 1) for pair in match["filters"].split())
        unknown = sorted(set(filters) - set(FILTERS))
        if unknown:
            raise InputError(
                f"table:{name} is narrowed by {unknown[0]!r}, expected one of {', '.join(FILTERS)}."
            )
        body = _table_text(name, filters, frame, reports)
        return f"<!-- table:{name}{match['filters']} -->\n{body}\n<!-- end -->"

    return _PLACE.sub(replaced, text)


def fill_files(paths: list[Path], frame: pd.DataFrame | None, check: bool = False) -> list[Path]:
    """Fill the documents at ``paths``.

    Args:
        check: write nothing.

    Returns:
        The documents that were (or with ``check`` would be) changed.
    """
    changed = []
    for path in paths:
        try:
            old = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{path} is not a readable text file ({error}); name a Markdown document."
            ) from error
        new = fill(old, frame)
        if new != old:
            changed.append(path)
            if not check:
                replace_text(path, new)
    return changed


def with_tables(root: Path) -> list[Path]:
    """README and the pages under docs/ of the repository at ``root`` that have a table to fill."""
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return [page for page in pages if page.is_file() and _PLACE.search(page.read_text(encoding="utf-8"))]


def names() -> list[str]:
    """Every table a document may ask for."""
    return sorted(["columns", *PER_SCOPE, *OVER_SCOPES, *OVERALL])


def _table_text(
    name: str, filters: Mapping[str, str], frame: pd.DataFrame | None, reports: dict[str, Report]
) -> str:
    if name == "columns":
        return column_dictionary().rstrip()
    if name not in names():
        raise InputError(f"A document asks for table {name!r}; there are {', '.join(names())}.")
    if frame is None or frame.empty:
        return _nothing(name, filters)
    baseline = filters.get("baseline", DEFAULT_BASELINE)
    narrow = {key: filters[key].split(",") for key in _ROW_FILTERS if key in filters}
    chosen_rows = f"{baseline} {narrow}"
    if chosen_rows not in reports:
        reports[chosen_rows] = build(_narrowed(frame, narrow, baseline), baseline)
    report = reports[chosen_rows]
    if name in OVERALL:
        table = OVERALL[name](report)
        return (
            markdown_table(table)
            if table.rows
            else _nothing(name, filters)
            if name == "paper"
            else "Nothing."
        )
    wanted = {key: value for key, value in filters.items() if key not in (*_ROW_FILTERS, "baseline")}
    scopes = [s for s in report.scopes if all(getattr(s, key) == value for key, value in wanted.items())]
    if name in OVER_SCOPES:
        chosen = (
            scopes if name in ("cache", "tensors") or {"mode", "l2"} & set(wanted) else _first_of_each(scopes)
        )
        shown = [(OVER_SCOPES[name](report, chosen), chosen)]
    else:
        chosen = scopes if {"mode", "l2"} & set(wanted) else _first_of_each(scopes)
        shown = [(PER_SCOPE[name](report, scope), [scope]) for scope in chosen]
    parts = [_captioned(table, used, filters) for table, used in shown if table.rows]
    if not parts and name == "losses" and any(scope.gains for scope in scopes):
        return "Nowhere: on no capture is the online path slower than the original order beyond the noise."
    return "\n\n".join(parts) if parts else _nothing(name, filters)


def _first_of_each(scopes: list[Scope]) -> list[Scope]:
    first: dict[tuple[str, str, str], Scope] = {}
    for scope in scopes:
        first.setdefault((scope.suite, scope.device, scope.gpu), scope)
    return list(first.values())


def _captioned(table: Table, scopes: list[Scope], filters: Mapping[str, str]) -> str:
    return f"**{table.title}**\n\n{markdown_table(table)}\n\n{_source(scopes, filters)}"


def _source(scopes: list[Scope], filters: Mapping[str, str]) -> str:
    """Where a table's numbers come from: command, machine, versions, date."""
    rows = [row for scope in scopes for row in scope.cells.values()]
    facts = sorted({str(row["gpu"]) for row in rows if row["gpu"]})
    for heading, column in (("driver", "driver"), ("CUDA", "cuda"), ("torch", "torch")):
        values = sorted({str(row[column]) for row in rows if row[column]})
        if values:
            facts.append(f"{heading} {', '.join(values)}")
    dates = sorted({str(row["created_utc"])[:10] for row in rows if row["created_utc"]})
    if dates:
        facts.append(dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}")
    files = sorted({_shown(str(row["file"])) for row in rows if row.get("file")})
    baseline = f" --baseline {filters['baseline']}" if "baseline" in filters else ""
    return f"<sub>{'; '.join(facts)}. `pwbench report{baseline} {' '.join(files)}`</sub>"


def _shown(file: str) -> str:
    path = Path(file)
    if path.is_absolute():
        return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
    return file


def _narrowed(frame: pd.DataFrame, narrow: Mapping[str, list[str]], baseline: str) -> pd.DataFrame:
    """The rows of the named variants and precisions, and the baseline's."""
    keep = pd.Series(True, index=frame.index)
    for column, values in narrow.items():
        keep &= frame[column].isin(values) | ((frame["variant"] == baseline) & (column == "variant"))
    return frame[keep]


def _nothing(name: str, filters: Mapping[str, str]) -> str:
    suite = filters.get("suite", "")
    device = filters.get("device", "cuda")
    captures = f"captures/{suite}/* " if suite else ""
    usual = f"{captures}--device {device} --out results/{suite or device}.parquet"
    return f"_No rows yet._ They are made by `pwbench replay {MAKERS.get(name, usual)}`."
