"""The report as one self-contained page: no scripts, no files beside it, light and dark."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from pwbench import __version__, variants
from pwbench.columns import COLUMNS
from pwbench.errors import PwbenchError
from pwbench.report import drawing, figures, glossary, reach, studies, tables
from pwbench.report.cells import ACCURATE, Table, error, times, worst
from pwbench.report.contenders import ONE_PRECISION, OWN_PRECISION, Contender
from pwbench.report.formats import sections
from pwbench.report.headline import Headline, headline
from pwbench.report.model import Report, Scope
from pwbench.results import CHOICES

_ABSENT = "–"
_QUIET: Callable[[str], None] = lambda text: None  # noqa: E731


@dataclass
class Part:
    """What the page shows of one scope.

    Attributes:
        marks: the lines that its figure of accuracy draws (`figures.accuracy_marks`).
        ceilings_source: where the GPU's ceilings are from, ``measured`` or ``documented``.
    """

    scope: Scope
    title: str
    anchor: str
    headline: Headline
    geomean: Table
    figures: dict[str, list[str]] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    ceilings_source: str = ""

    @property
    def elsewhere(self) -> str:
        """What the mark beside some speed-ups means, empty where none has it."""
        marked = any(self.scope.elsewhere(*key) for key in self.scope.speedups if key[0] in self.scope.shown)
        return tables.elsewhere_note(self.scope) if marked else ""

    @property
    def one_precision(self) -> bool:
        """Whether the baseline has one arithmetic only."""
        return self.scope.baseline in ONE_PRECISION


def html(
    report: Report, captures: str | Path | None = "captures", note: Callable[[str], None] = _QUIET
) -> str:
    """The whole page.

    Args:
        captures: folder of captures; where a row's capture is there (same tables), its union sizes are
            drawn as distributions. None or an absent folder: counters only.
        note: told what is being drawn.
    """
    parts = [_part(report, scope, captures, note) for scope in report.main_scopes() if scope.cells]
    shown = {id(part.scope) for part in parts}
    others = [tables.geomean(report, s) for s in report.scopes if s.cells and id(s) not in shown]
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["whole"] = _whole
    template = environment.from_string(
        resources.files("pwbench.report").joinpath("page.html.j2").read_text("utf-8")
    )
    facts = dict(
        report=report,
        parts=parts,
        glance=_glance(report, parts),
        glance_probes=bool(_probes([part.scope for part in parts if not part.scope.synthetic])),
        about=_about(parts),
        purposes=_purposes(captures),
        others=[table for table in others if table.rows],
        studies=sections(report, report.main_scopes()),
        unavailable=tables.unavailable(report),
        provenance=studies.provenance(report),
        version=__version__,
        limit=error(ACCURATE),
    )
    # What a page explains is found in the page itself, made without its explanations.
    words = glossary.explained(template.render(**facts, words=[], columns=[]))
    columns = [c for c in COLUMNS if c.section not in ("Where the row comes from",)]
    return template.render(**facts, words=words, columns=columns)


def _whole(text: str) -> Markup:
    """Escaped text whose numbers like 2.5e-3 are never broken at their minus by the end of a line."""
    return Markup(re.sub(r"\d(?:\.\d+)?e-\d+", r'<span class="whole">\g<0></span>', str(escape(text))))


def _part(report: Report, scope: Scope, captures: str | Path | None, note: Callable[[str], None]) -> Part:
    note(scope.suite)
    anchor = f"{scope.suite}-{scope.device}-{abs(drawing.hash_of(scope.gpu)) % 9973}"
    part = Part(scope, tables.title_of(scope), anchor, headline(report, scope), tables.geomean(report, scope))
    drawn = part.figures
    drawn.update({"speedups": [], "accuracy": [], "capture speedups": []})
    if scope.speedups:
        drawn["speedups"] = [figures.speedups(scope)]
        drawn["accuracy"] = [figure for figure in [figures.accuracy(scope)] if figure]
        part.marks = list(figures.accuracy_marks(scope))
        drawn["capture speedups"] = [
            figures.capture_speedups(scope, c)
            for c in scope.captures
            if any(key[1] == c for key in scope.speedups)
        ]
    drawn["stages"] = [figures.stages(scope, capture) for capture in scope.captures]
    drawn["regroup"] = _regroup_figures(scope)
    drawn["unions"] = _union_figures(scope, captures, note)
    reached = reach.reached(scope)
    drawn["ceilings"] = [figures.ceilings(scope, reached)] if reached else []
    part.ceilings_source = reach.source(scope)
    made = [
        tables.speedups(report, scope),
        tables.split(report, scope),
        studies.regroup(report, scope),
        tables.accuracy(report, scope),
        tables.counters(report, scope),
        tables.roofline(report, scope),
    ]
    part.tables = [table for table in made if table.rows]
    return part


def _glance(report: Report, parts: list[Part]) -> Table | None:
    """Geomeans of all suites of the first device side by side."""
    if len(parts) < 2:
        return None
    first = parts[0].scope
    scopes = [p.scope for p in parts if (p.scope.device, p.scope.gpu) == (first.device, first.gpu)]
    scopes = [scope for scope in scopes if scope.geomeans and not scope.synthetic]
    if len(scopes) < 2:
        return None
    table = Table(
        f"All suites on {first.gpu or first.device}: geomean speed-up over {first.baseline}",
        ["variant", "precision", "worst rel-L2", *(scope.suite for scope in scopes)],
        text=(0, 1),
    )
    seen: dict[Contender, Scope] = {}
    for scope in scopes:
        for contender in scope.shown:
            seen.setdefault(contender, scope)
    probes = _probes(scopes)
    order = (*CHOICES["precision"], OWN_PRECISION)
    blocks: dict[tuple[bool, int], list[Contender]] = {}
    for contender, scope in seen.items():
        key = (contender in probes, order.index(scope.precision_of(contender)))
        blocks.setdefault(key, []).append(contender)
    for _, block in sorted(blocks.items()):
        table.breaks.add(len(table.rows))
        for contender in block:
            means = [scope.geomeans.get(contender) for scope in scopes]
            cells = [times(m.value) if m else _ABSENT for m in means]
            found = worst((row for scope in scopes for row in scope.rows_of(contender)), "rel_l2")
            precision = seen[contender].precision_of(contender)
            table.rows.append([contender.label, precision, error(found) or _ABSENT, *cells])
    if any(_ABSENT in cells[3:] for cells in table.rows):
        table.notes.append(f"{_ABSENT} not measured.")
    for precision in CHOICES["precision"]:
        lacking = [scope.suite for scope in scopes if precision in scope.unmeasured]
        if lacking:
            table.notes.append(f"{precision}: not measured in {', '.join(lacking)}.")
    return table


def _probes(scopes: list[Scope]) -> set[Contender]:
    return {contender for scope in scopes for contender in scope.probes}


def _about(parts: list[Part]) -> list[tuple[str, str]]:
    """(name, what it is) of every variant on the page that this pwbench knows."""
    shown = {contender.variant: None for part in parts for contender in part.scope.shown}
    known = {name: variants.get(name) for name in shown if name in variants.names()}
    return [(name, _sentences(v.summary, getattr(v, "choice", ""))) for name, v in known.items()]


def _sentences(summary: str, choice: str) -> str:
    return f"{summary}. {choice}" if choice else summary


def _purposes(captures: str | Path | None) -> dict[str, str]:
    """What each suite is for, where the captures' definitions are at hand."""
    path = None if captures is None else Path(captures) / "suites.toml"
    if path is None or not path.is_file():
        return {}
    from pwbench.suites import load_suites

    try:
        return {name: suite.purpose.replace("`", "") for name, suite in load_suites(path).items()}
    except PwbenchError:
        return {}  # the page does without; `pwbench suites` names what is wrong


def _regroup_figures(scope: Scope) -> list[str]:
    kernels: dict[Contender, list[Any]] = {}
    for gain in scope.gains:
        kernels.setdefault(gain.contender, []).append(gain)
    return [
        f"<h4>{contender.full.replace('-regroup', '')}</h4>{figures.regrouping(gains)}"
        for contender, gains in kernels.items()
    ]


def _union_figures(scope: Scope, captures: str | Path | None, note: Callable[[str], None]) -> list[str]:
    """Distributions of union sizes, for the captures that are at hand with the very same tables."""
    if captures is None or not Path(captures).is_dir() or not scope.gains:
        return []
    from pwbench.capture import load
    from pwbench.capture.statistics import union_sizes
    from pwbench.gate import search_group, searches_by_matching
    from pwbench.grouping import match, regroup

    drawn = []
    for capture in scope.captures:
        gain = next((g for g in scope.gains if g.capture == capture), None)
        folder = Path(captures) / scope.suite / capture
        if gain is None or not folder.is_dir():
            continue
        note(f"{scope.suite}: union sizes of {capture}")
        try:
            found = load(folder)
            if found.tables_sha256 != gain.online["tables_sha256"]:
                continue
            loaded = found.tables
        except PwbenchError:
            continue  # a damaged capture has no place in the figure; `pwbench verify` names it
        group = search_group(gain.contender.variant)
        if searches_by_matching(gain.contender.variant):
            order = match(loaded.pages, loaded.cu_seqlens_q)
        else:
            order = regroup(loaded.pages, loaded.cu_seqlens_q, window=gain.window or 128, group=group)
        sizes = union_sizes(loaded, group), union_sizes(loaded, group, order)
        drawn.append(figures.unions(f"{capture}, {gain.kernel}", *sizes, group))
    return drawn
