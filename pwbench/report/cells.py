"""What tables and sentences are written with: a table of text cells, and how each kind of value reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pwbench import stats
from pwbench.results import Row

ACCURATE = 2.5e-3
"""rel-L2 that pwbench allows a kernel at its `accurate` precision. It is no limit for other libraries, which
have an error of their own."""


@dataclass
class Table:
    """A table of text cells.

    Attributes:
        title: what it shows, without a final stop.
        columns: headings; those in ``text`` are aligned left, the rest right.
        rows: cells, as many as columns.
        notes: sentences below it that a reader needs to read it rightly.
        strong: indices of rows to set in bold (a total, the best).
        breaks: indices of rows before which a new block begins.
    """

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    text: tuple[int, ...] = (0,)
    strong: set[int] = field(default_factory=set)
    breaks: set[int] = field(default_factory=set)

    def without_empty_columns(self) -> Table:
        """The same table less the columns that hold nothing (a stage no variant has)."""
        keep = [i for i in range(len(self.columns)) if not self.rows or any(row[i] for row in self.rows)]
        return Table(
            self.title,
            [self.columns[i] for i in keep],
            [[row[i] for i in keep] for row in self.rows],
            self.notes,
            tuple(keep.index(i) for i in self.text if i in keep),
            self.strong,
            self.breaks,
        )


# Cells --------------------------------------------------------------------------------------


def times(ratio: float | None) -> str:
    """A speed-up, ``1.70x``."""
    if ratio is None or not math.isfinite(ratio):
        return ""
    return f"{ratio:.{0 if ratio >= 100 else 2 if ratio >= 0.1 else 4}f}x"


def interval(ratio: stats.Ratio | None) -> str:
    """The interval of a speed-up, or why there is none."""
    if ratio is None:
        return ""
    if not ratio.known:
        return f"none: {ratio.samples} sample{'s' if ratio.samples != 1 else ''}"
    digits = 4 if ratio.value < 0.1 else 3
    return f"{ratio.low:.{digits}f} to {ratio.high:.{digits}f}"


def percent(share: float | None, signed: bool = False) -> str:
    """A share of one, in percent."""
    if share is None or not math.isfinite(share):
        return ""
    return f"{100 * share:{'+' if signed else ''}.1f} %"


def error(value: float | None) -> str:
    """A relative error in scientific notation."""
    if value is None or not math.isfinite(value):
        return ""
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}e{int(power)}" if value else "0"


def count(value: Any) -> str:
    """A counter with thousands separated."""
    return "" if value is None else f"{int(value):,}"


def clock(values: Iterable[float | None]) -> tuple[str, Callable[[float | None], str]]:
    """A unit that fits all of ``values`` (microseconds) and the function that writes one in it."""
    largest = max((abs(v) for v in values if v is not None), default=0.0)
    unit, scale = ("ms", 1e3) if largest >= 1e5 else ("us", 1.0)

    def write(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return ""
        value /= scale
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"

    return unit, write


def with_interval(ratio: stats.Ratio | None) -> str:
    """A speed-up with its interval in brackets."""
    if ratio is None:
        return ""
    return f"{times(ratio.value)} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.known else times(ratio.value)


def worst(rows: Iterable[Row], name: str) -> float | None:
    """The largest value of a column, None where no row has one."""
    return max((float(row[name]) for row in rows if row[name] is not None), default=None)
