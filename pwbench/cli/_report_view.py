"""The report on a terminal: rich tables, bars for speed-ups and for where the time goes."""

from __future__ import annotations

import textwrap

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from pwbench.cli._common import terminal
from pwbench.report import studies, tables
from pwbench.report.cells import Table
from pwbench.report.model import Report, Scope
from pwbench.results import STAGES, Row

_BAR = 20
_PIPE_WIDTH = 150
_MARKS = {
    "search": ("▓", "magenta"),
    "metadata": ("▒", "yellow"),
    "attention": ("█", "cyan"),
    "reduction": ("▚", "blue"),
    "gap": ("░", "white"),
}
_VERDICT_STYLES = {"faster": "green", "slower": "red", "baseline": "bold"}
# What a narrow terminal does without, first to last.
_SPARE = (
    "captures",
    "gain if the search were free",
    "bar",
    "gap",
    "union pages",
    "metadata",
    "search",
    "rel-L2",
    "worst rel-L2",
    "4-query pages saved",
    "union pages saved",
    "95 % interval",
    "T precomputed",
    "window",
    "reduction",
    "attention",
)


def show(report: Report, full: bool = True) -> None:
    """Print ``report`` on stdout.

    Args:
        full: with a table per capture; otherwise geomeans and regrouping only.
    """
    console = terminal(_PIPE_WIDTH)
    for scope in report.scopes:
        if scope.cells:
            _geomean(console, report, scope)
    for scope in report.main_scopes():
        if not scope.cells:
            continue
        if full:
            _details(console, report, scope)
        _print(console, studies.regroup(report, scope))
    _print(console, tables.unavailable(report), wrap=True)
    for warning in report.warnings:
        console.print(Text.assemble(("note: ", "bold yellow"), warning))


def _geomean(console: Console, report: Report, scope: Scope) -> None:
    if scope.bounds:
        _print(console, tables.speedups(report, scope))
        return
    table = tables.geomean(report, scope)
    top = max((mean.value for mean in scope.geomeans.values()), default=0.0)
    verdict = table.columns.index("verdict") if "verdict" in table.columns else 0
    bars = []
    for contender, cells in zip(scope.shown, table.rows, strict=True):
        mean = scope.geomeans.get(contender)
        length = max(1, round(_BAR * mean.value / top)) if mean and top else 0
        bars.append(Text("█" * length, style=_VERDICT_STYLES.get(cells[verdict], "dim")))
    _print(console, table, bars if top else None)
    if scope.tip:
        console.print(scope.tip)


def _details(console: Console, report: Report, scope: Scope) -> None:
    """One block per capture, the stages as a stacked bar in the scale of the capture's slowest."""
    table = tables.details(report, scope)
    cells = [
        (capture, scope.cells[contender, capture])
        for capture in scope.captures
        for contender in scope.shown
        if (contender, capture) in scope.cells
    ]
    bars = []
    for capture, row in cells:
        longest = max(other["complete_us"] for name, other in cells if name == capture)
        bars.append(_stacked(row, longest))
    legend = Text("where the time goes: ", style="dim")
    used = [name for name in STAGES if any(row[f"{name}_us"] for _, row in cells)]
    for name in [*used, "gap"]:
        legend.append(f"{_MARKS[name][0]} {name}  ", style=_MARKS[name][1])
    _print(console, table, bars, blocks=True, legend=legend)


def _stacked(row: Row, longest: float) -> Text:
    bar, used, done = Text(), 0, 0.0
    for name, (mark, style) in _MARKS.items():
        done += max(row[f"{name}_us"] or 0.0, 0.0)
        cells = round(_BAR * min(done / longest, 1.0)) - used
        bar.append(mark * cells, style=style)
        used += cells
    return bar


def _print(
    console: Console,
    table: Table,
    bars: list[Text] | None = None,
    blocks: bool = False,
    wrap: bool = False,
    legend: Text | None = None,
) -> None:
    """Print ``table``, doing without the columns of `_SPARE` until it fits.

    Args:
        bars: one bar per row, in a last column.
        blocks: the first column is the heading of a block of rows instead of a column.
        wrap: the last column is prose and may wrap.
    """
    if not table.rows:
        return
    for spared in range(len(_SPARE) + 1):
        rich = _rich(table, bars, blocks, wrap, set(_SPARE[:spared]))
        if Measurement.get(console, console.options.update(max_width=1000), rich).maximum < console.width:
            break
    unit = next((name.split(", ")[1] for name in table.columns if name.endswith((", us", ", ms"))), "")
    title = f"{table.title}; times in {unit}" if unit else table.title
    console.print(Text(title, style="bold underline"))
    console.print(rich)
    if legend is not None and "bar" not in _SPARE[:spared]:
        console.print(legend)
    for note in table.notes:
        console.print(Text(note, style="dim"))
    console.print()


def _rich(table: Table, bars: list[Text] | None, blocks: bool, wrap: bool, without: set[str]) -> RichTable:
    rich = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    kept = [
        index
        for index, name in enumerate(table.columns)
        if name.split(",")[0] not in without and not (blocks and index == 0)
    ]
    for index in kept:
        prose = wrap and index == len(table.columns) - 1
        rich.add_column(
            _heading(table.columns[index]),
            justify="left" if index in table.text else "right",
            no_wrap=not prose,
            overflow="fold",
        )
    bar = bars is not None and "bar" not in without
    if bar:
        rich.add_column("", no_wrap=True)
    for index, row in enumerate(table.rows):
        if index in table.breaks and index:
            rich.add_section()
        if blocks and index in table.breaks:
            rich.add_row(Text(row[0], style="bold"))
        cells = [Text(row[i], style=_style(table.columns[i], row[i])) for i in kept]
        rich.add_row(*cells, *([bars[index]] if bars and bar else []), style=_row_style(table, index))
    return rich


def _style(column: str, cell: str) -> str:
    if column == "verdict":
        return _VERDICT_STYLES.get(cell, "")
    return {"speed-up": "bold", "net gain": "bold"}.get(column, "")


def _row_style(table: Table, index: int) -> str:
    return "bold" if index in table.strong else ""


def _heading(name: str) -> str:
    name = name.removesuffix(", us").removesuffix(", ms")
    return textwrap.fill(name, max(11, *(len(word) for word in name.split())))
