"""The study of the direct KV-page union: docs/page-union.md, made from captures and stored results.

    python -m pwbench.report.page_union            # rewrite the tables and the figure
    python -m pwbench.report.page_union --check    # exit code 1 when they are not current

Counters and predictions follow from the captures alone; measured times are taken from the results
where there are rows of page-union, and a dash stands where there are none.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from pwbench import page_plan, results
from pwbench.capture import discover, load
from pwbench.errors import InputError
from pwbench.files import replace_text
from pwbench.report.cells import Table, count, percent
from pwbench.report.formats import markdown_table
from pwbench.report.model import SYNTHETIC_SUITES
from pwbench.report.page_selections import SUITE, Selections

DOCUMENT = Path("docs/page-union.md")
FIGURE = Path("docs/page-union.svg")
_PLACE = re.compile(r"<!-- study:(?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- end -->", re.S)
AFFINITIES = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
CHUNKS = (128, 256, 512, 1024, 2048, 4096)
MEASURED = ("page-union", "page-union-stream", "union8", "pageweaver")


class Study:
    """Captures, the affinity sweep, and what has been measured of them."""

    def __init__(
        self,
        captures: Iterable[Selections],
        sweep: Iterable[Selections] = (),
        measured: pd.DataFrame | None = None,
    ) -> None:
        self.captures = list(captures)
        self.sweep = list(sweep)
        self.times = _latest(measured)

    def time(self, one: Selections, variant: str, column: str = "complete_us") -> float | None:
        row = self.times.get((one.suite, one.name, variant))
        return None if row is None else row[column]

    # Tables -------------------------------------------------------------------------------------

    def reuse(self) -> Table:
        """What page lists share that groups of 8 neighbours do not."""
        table = Table(
            "Reuse",
            ["capture", "context", "pages a row", "Union8 visits", "page loads", "bytes saved",
             "Union8 rounds", "tiles", "rounds saved", "tile occupancy", "rows a page",
             "streamed: loads", "tiles", "tile occupancy"],
            notes=["Visits and loads bring one K|V page (32 KiB) into shared memory; a round or tile is "
                   "64 x 128 scores and their product with V. Union8 is counted in the original order."],
        )  # fmt: skip
        for one in self._worth_showing():
            group, page = one.groups, one.by_page
            table.rows.append([
                _title(one),
                count(int(one.call.seq_lens.max())),
                f"{group['selected_pages'] / one.rows:.1f}",
                count(group["union_pages"]),
                count(page["union_pages"]),
                percent(1 - page["kv_bytes"] / group["kv_bytes"]),
                count(group["subgroup_pages"]),
                count(page["subgroup_pages"]),
                percent(1 - page["subgroup_pages"] / group["subgroup_pages"]),
                f"{page['tile_occupancy']:.3f}",
                f"{page['selected_pages'] / page['groups']:.0f}",
                count(one.by_stream["union_pages"]),
                count(one.by_stream["subgroup_pages"]),
                f"{one.by_stream['tile_occupancy']:.3f}",
            ])  # fmt: skip
        return table

    def cost(self) -> Table:
        """Predicted against measured, phase by phase."""
        table = Table(
            "Cost, microseconds",
            ["capture", "partials, MB", "predicted attention", "bound by", "predicted reduction",
             "predicted sum", "predicted Union8", "predicted stream", "measured attention",
             "measured reduction", *(f"measured {name}" for name in MEASURED)],
            text=(0, 3),
            notes=["Predicted phases leave out what all designs need (page lists, V images, launches). "
                   "Measured attention and reduction are stages of page-union; the others are complete calls "
                   "(CUDA graph, cold L2, precision fast)."],
        )  # fmt: skip
        for one in self._worth_showing():
            group, page, stream = one.predicted
            table.rows.append([
                _title(one),
                f"{one.by_page['partial_bytes'] / 1e6:,.0f}",
                f"{page.attention_us:.0f}",
                page.term,
                f"{page.reduction_us:.0f}",
                f"{page.us:.0f}",
                f"{group.us:.0f}",
                f"{stream.us:.0f}",
                _us(self.time(one, "page-union", "attention_us")),
                _us(self.time(one, "page-union", "reduction_us")),
                *(_us(self.time(one, name)) for name in MEASURED),
            ])  # fmt: skip
        return table

    def affinity(self) -> Table:
        """The break-even sweep."""
        table = Table(
            "Affinity sweep, microseconds",
            ["affinity", "pages a 4-row union", "predicted Union8", "predicted page-union",
             "predicted stream", *(f"measured {name}" for name in MEASURED)],
            notes=[_break_even_text(self.sweep, self)],
            text=(),
        )  # fmt: skip
        for one in self.sweep:
            table.rows.append([
                f"{one.affinity:.2f}",
                f"{_u4(one):.1f}",
                *(f"{cost.us:.0f}" for cost in one.predicted),
                *(_us(self.time(one, name)) for name in MEASURED),
            ])  # fmt: skip
        return table

    def chunks(self) -> Table:
        """What smaller chunks cost in reuse and save in workspace."""
        table = Table(
            "Chunk size",
            ["capture", "rows of a chunk", "partial outputs held, MiB", "page loads", "tiles",
             "tile occupancy"],
        )  # fmt: skip
        for one in self._widest():
            table.breaks.add(len(table.rows))
            sizes = [size for size in CHUNKS if size < one.call.total_q]
            for size in [*sizes, one.call.total_q]:
                made = one.lists(size)
                held = size * one.call.kv_heads * page_plan.ROW_BYTES
                table.rows.append([
                    _title(one),
                    count(size),
                    f"{held / 2**20:,.0f}",
                    count(made["union_pages"]),
                    count(made["subgroup_pages"]),
                    f"{made['tile_occupancy']:.3f}",
                ])  # fmt: skip
        return table

    def hybrid(self) -> Table:
        """What choosing a design per page would save."""
        table = Table(
            "Hybrid",
            ["capture", "better pure design, us", "hybrid with a reduction, us", "gain",
             "hybrid folded into the walk, us", "gain", "entries moved", "most popular page moved",
             "stream, us"],
            text=(0, 7),
        )  # fmt: skip
        for one in [*self._worth_showing(), *self.sweep]:
            serial, folded = one.hybrids()
            table.rows.append([
                _title(one),
                f"{serial.pure_us:.0f}",
                f"{serial.us:.0f}",
                percent(serial.gain),
                f"{folded.us:.0f}",
                percent(folded.gain),
                percent(folded.moved_entries),
                "yes" if folded.most_popular_moved else "no",
                f"{one.predicted[2].us:.0f}",
            ])  # fmt: skip
        return table

    def _worth_showing(self) -> list[Selections]:
        """Captures of a chunk or more in which something is selected."""
        return [one for one in self.captures if one.call.total_q >= 1024 and one.groups["selected_pages"]]

    def _widest(self) -> list[Selections]:
        """The real capture whose neighbours share least, or nothing."""
        real = [one for one in self._worth_showing() if one.suite not in SYNTHETIC_SUITES]
        return [max(real, key=_u4)] if real else []

    # Document -----------------------------------------------------------------------------------

    def fill(self, text: str) -> str:
        """``text`` with every marked place made anew.

        Raises:
            InputError: a place names a table that does not exist.
        """
        makers: Mapping[str, Callable[[], Table]] = {
            "reuse": self.reuse,
            "cost": self.cost,
            "affinity": self.affinity,
            "chunks": self.chunks,
            "hybrid": self.hybrid,
        }

        def replaced(match: re.Match[str]) -> str:
            name = match["name"]
            if name == "provenance":
                return f"<!-- study:{name} -->\n{self.provenance()}\n<!-- end -->"
            if name not in makers:
                raise InputError(
                    f"The document asks for study {name!r}; there are {', '.join([*makers, 'provenance'])}."
                )
            return f"<!-- study:{name} -->\n{markdown_table(makers[name]())}\n<!-- end -->"

        return _PLACE.sub(replaced, text)

    def provenance(self) -> str:
        """Where the measured numbers come from, in one sentence."""
        mine = [row for (_, _, variant), row in self.times.items() if variant == "page-union"]
        if not mine:
            return "No stored result holds page-union on a GPU yet: its measured columns are empty."
        facts = [sorted({str(row[name]) for row in mine}) for name in ("gpu", "driver", "cuda", "commit")]
        dates = sorted({str(row["created_utc"])[:10] for row in mine})
        gpu, driver, cuda, commit = (", ".join(one) for one in facts)
        return (
            f"Measured on {gpu}, driver {driver}, CUDA {cuda}, commit {commit}, {dates[0]}"
            f"{'' if len(dates) == 1 else f' to {dates[-1]}'}."
        )

    def figure(self) -> str:
        """Time against affinity as SVG: predictions as lines, measurements as points."""
        from matplotlib import rc_context  # slow to import
        from matplotlib.figure import Figure

        with rc_context({"svg.hashsalt": "pwbench", "svg.fonttype": "none", "font.size": 9}):
            figure = Figure(figsize=(6.4, 3.6), layout="constrained")
            axes = figure.add_subplot()
            at = [one.affinity or 0.0 for one in self.sweep]
            for index, variant in enumerate(("union8", "page-union", "page-union-stream")):
                predicted = [one.predicted[index].us for one in self.sweep]
                axes.plot(at, predicted, color=f"C{index}", label=f"{variant}, predicted")
                known = [(one.affinity, self.time(one, variant)) for one in self.sweep]
                points = [(x, y) for x, y in known if y is not None]
                if points:
                    axes.plot(
                        *zip(*points, strict=True), "o", color=f"C{index}", label=f"{variant}, measured"
                    )
            axes.set_xlabel("affinity: chance that a row keeps a page of the row before")
            axes.set_ylabel("microseconds")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def break_even(sweep: Sequence[Selections], at: Callable[[Selections], tuple[Any, Any]]) -> float | None:
    """Affinity at which two times cross, by linear interpolation; None where they do not, or are unknown.

    Args:
        sweep: points in rising affinity.
        at: the two times of a point.
    """
    known = [(one.affinity or 0.0, *at(one)) for one in sweep]
    known = [point for point in known if point[1] is not None and point[2] is not None]
    for (x0, a0, b0), (x1, a1, b1) in pairwise(known):
        before, after = a0 - b0, a1 - b1
        if before == 0 or (before > 0) != (after > 0):
            return float(x0 + (x1 - x0) * before / (before - after)) if before != after else float(x0)
    return None


def _break_even_text(sweep: Sequence[Selections], study: Study) -> str:
    parts = []
    for index, mine in ((1, "page-union"), (2, "page-union-stream")):

        def model(one: Selections, index: int = index) -> tuple[float, float]:
            return one.predicted[0].us, one.predicted[index].us

        parts.append(f"Predicted break-even of {mine} with union8: {_crossing(sweep, model)}.")
        for name in ("union8", "pageweaver"):

            def both(
                one: Selections, name: str = name, mine: str = mine
            ) -> tuple[float | None, float | None]:
                return study.time(one, name), study.time(one, mine)

            if sweep and all(None not in both(one) for one in sweep):
                parts.append(f"Measured with {name}: {_crossing(sweep, both)}.")
    return " ".join(parts)


def _crossing(sweep: Sequence[Selections], at: Callable[[Selections], tuple[Any, Any]]) -> str:
    """Where the page-major design becomes the slower one, in words."""
    found = break_even(sweep, at)
    if found is not None:
        return f"affinity {found:.2f}, faster below it"
    first, second = at(sweep[0]) if sweep else (0.0, 0.0)
    return "none, faster throughout" if second < first else "none, slower throughout"


def _u4(one: Selections) -> float:
    return one.groups["subgroup_pages"] * 4 / max(1, one.rows)


def _title(one: Selections) -> str:
    return f"{one.suite}/{one.name}"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _latest(frame: pd.DataFrame | None) -> dict[tuple[str, str, str], results.Row]:
    """The newest good GPU row of each (suite, capture, variant): graph mode, cold L2, precision fast. Of the
    session that measured page-union where it has one: between sessions a card drifts."""
    if frame is None:
        return {}
    wanted = {"device": "cuda", "mode": "graph", "l2": "cold", "precision": "fast", "status": "ok"}
    found: dict[tuple[str, str, str], results.Row] = {}
    sessions: dict[str, dict[tuple[str, str, str], results.Row]] = {}
    for row in results.rows_in_order(frame):
        if all(row[name] == value for name, value in wanted.items()):
            sessions.setdefault(row["session"], {})[row["suite"], row["capture"], row["variant"]] = row
    for rows in sessions.values():
        found |= rows
    for rows in sessions.values():
        studied = {place[:2] for place in rows if place[2] == "page-union"}
        found |= {place: row for place, row in rows.items() if place[:2] in studied}
    return found


def make(captures: Sequence[str | Path] = (), stored: str | Path = "results") -> Study:
    """The study of the captures below ``captures`` (none = all), with what ``stored`` holds of them."""
    try:
        measured = results.load(stored)
    except InputError:
        measured = None
    chosen = [Selections.of(load(path)) for path in discover(captures)]
    shown = [one for one in chosen if one.suite != SUITE]
    return Study(shown, [Selections.of_affinity(a) for a in AFFINITIES], measured)


def main(arguments: Sequence[str] = ()) -> int:
    """Rewrite the document and its figure; with ``--check`` only compare, exit code 1 on a difference."""
    study = make()
    wanted = {DOCUMENT: study.fill(DOCUMENT.read_text(encoding="utf-8")), FIGURE: study.figure()}
    stale = [
        path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in arguments:
        for path in stale:
            print(f"{path} is not current: run python -m pwbench.report.page_union", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        replace_text(path, wanted[path])
        print(f"{path} rewritten", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
