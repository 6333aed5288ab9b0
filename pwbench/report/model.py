"""What a report is made of: which rows are current, which may be compared, and by how much they differ.

Rows are compared only inside a `Scope`: one suite on one device, with one launch mode and one L2
state. A geomean never leaves its scope, so CPU and GPU rows, suites, and real and synthetic
captures never meet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import pandas as pd

from pwbench import stats
from pwbench.report.contenders import (
    DEFAULT_WINDOW,
    ONE_PRECISION,
    OWN_PRECISION,
    Contender,
    Gain,
    compare,
    contender_of,
)
from pwbench.results import CHOICES, INPUTS, Row

DEFAULT_BASELINE = "flashinfer"
CPU_BASELINE = "reference"
SYNTHETIC_SUITES = ("extremes", "shapes", "affinity", "synthetic")
"""Suites of made-up selections: reported, always apart and last, never headlined."""

BOUNDS = ("extremes",)
"""Suites of best and worst cases: each capture is a bound of its own."""
SWEEP = "affinity"
"""The suite whose captures, in order, differ in one thing only."""


@dataclass
class Scope:
    """Rows that may be compared: one suite, device, GPU, mode and L2 state.

    Attributes:
        baseline: the variant the others are compared with, None when it has no ok row here.
        note: what the reader must know about the baseline, empty if nothing.
        tip: what to ask for to get speed-ups, where there are none.
        cells: the current ok row of every contender on every capture.
        others: all ok rows of the scope, older sessions included, to find partners for pairing.
        missing: current rows that are not ok.
    """

    suite: str
    device: str
    gpu: str
    mode: str
    l2: str
    baseline: str | None = None
    note: str = ""
    tip: str = ""
    cells: dict[tuple[Contender, str], Row] = field(default_factory=dict)
    others: list[Row] = field(default_factory=list)
    missing: list[Row] = field(default_factory=list)

    @property
    def synthetic(self) -> bool:
        return self.suite in SYNTHETIC_SUITES

    @property
    def bounds(self) -> bool:
        """Whether its captures are bounds made up one by one, over which no mean has a meaning."""
        return self.suite in BOUNDS

    @property
    def config(self) -> str:
        """How it was run, in words."""
        launch = "CUDA graph" if self.mode == "graph" else "eager launches"
        return (
            f"{self.gpu or self.device}, {launch}, {self.l2} L2"
            if self.device == "cuda"
            else f"CPU ({self.gpu})"
        )

    @cached_property
    def tensors(self) -> list[str]:
        """The kinds of tensors that the current rows were measured on."""
        return sorted({str(row["tensors"]) for row in self.cells.values() if row["tensors"]})

    @cached_property
    def captures(self) -> list[str]:
        """Captures with an ok row, short contexts first."""
        context = {capture: row.get("context") or 0 for (_, capture), row in self.cells.items()}
        return sorted(context, key=lambda c: (context[c], c))

    @cached_property
    def contenders(self) -> list[Contender]:
        """Contenders with an ok row: fastest first by geomean, then by name."""

        def order(c: Contender) -> tuple[float, str, str, int]:
            mean = self.geomeans.get(c)
            return (-mean.value if mean else 0.0, c.variant, c.precision, c.window or 0)

        return sorted({c for c, _ in self.cells}, key=order)

    @cached_property
    def shown(self) -> list[Contender]:
        """`contenders` for a reader: `probes` last, and once what computes the same in both precisions."""
        hidden, probes = self.twins, self.probes
        kept = [c for c in self.contenders if c not in hidden]
        return [c for c in kept if c not in probes] + [c for c in kept if c in probes]

    @cached_property
    def twins(self) -> set[Contender]:
        """Contenders whose results are those of another precision of the same variant, which is shown."""
        hidden = set()
        for variant, window in {(c.variant, c.window) for c in self.contenders}:
            if variant not in (*ONE_PRECISION, self.baseline):
                continue
            mine = [c for c in self.contenders if (c.variant, c.window) == (variant, window)]
            mine.sort(key=lambda c: (-len(self.rows_of(c)), CHOICES["precision"].index(c.precision)))
            hidden |= {c for c in mine[1:] if self._same_results(mine[0], c)}
        return hidden

    @cached_property
    def probes(self) -> list[Contender]:
        """Contenders that nobody would choose, measured to tell what a search is worth: those handed their
        permutation, and the fixed paths of a kernel that is here with its own choice."""
        have = {(c.variant, c.precision) for c in self.contenders}
        return [
            c
            for c in self.contenders
            if not c.competes or (c.fixed_path and (c.variant.split("-")[0], c.precision) in have)
        ]

    def _same_results(self, one: Contender, other: Contender) -> bool:
        both = [c for c in self.captures if (one, c) in self.cells and (other, c) in self.cells]
        errors = [(self.cells[one, c]["rel_l2"], self.cells[other, c]["rel_l2"]) for c in both]
        return bool(both) and all(a is not None and a == b for a, b in errors)

    def precision_of(self, contender: Contender) -> str:
        """The contender's precision, `OWN_PRECISION` where its variant has but one arithmetic."""
        mine = [c for c in self.contenders if c.variant == contender.variant]
        shown = {c.precision for c in mine if c not in self.twins}
        one = contender.variant in ONE_PRECISION or any(c in self.twins for c in mine)
        return OWN_PRECISION if one and len(shown) == 1 else contender.precision

    def named(self, contender: Contender) -> str:
        """The contender's label with its precision."""
        precision = self.precision_of(contender)
        return f"{contender.label} ({'own precision' if precision == OWN_PRECISION else precision})"

    @cached_property
    def unmeasured(self) -> list[str]:
        """Precisions that no contender with a choice of precision has an ok row at, in a scope that has one
        at another."""
        have = {self.precision_of(c) for c in self.contenders} - {OWN_PRECISION}
        return [p for p in CHOICES["precision"] if p not in have] if have else []

    @cached_property
    def speedups(self) -> dict[tuple[Contender, str], stats.Ratio]:
        """Baseline time / contender time, wherever both are known."""
        found = {}
        for (contender, capture), row in self.cells.items():
            base = self.base_row(contender, capture)
            if base is not None:
                found[contender, capture] = compare(base, row)
        return found

    @cached_property
    def geomeans(self) -> dict[Contender, stats.Ratio]:
        """Geometric mean of each contender's speed-ups over the captures that it and the baseline ran."""
        per: dict[Contender, list[stats.Ratio]] = {}
        for (contender, _), ratio in self.speedups.items():
            per.setdefault(contender, []).append(ratio)
        return {contender: stats.geomean(ratios) for contender, ratios in per.items()}

    def counted(self, contender: Contender) -> int:
        """Captures in the contender's geomean."""
        return sum(c == contender for c, _ in self.speedups)

    def rows_of(self, contender: Contender) -> list[Row]:
        """The contender's rows in capture order."""
        return [self.cells[contender, c] for c in self.captures if (contender, c) in self.cells]

    def base_row(self, contender: Contender, capture: str) -> Row | None:
        """The baseline's row for ``contender`` on ``capture``: its own precision and window where the
        baseline has them, and the same session where there is one."""
        own = self.cells[contender, capture]
        if self.baseline is None:
            return None
        if (
            own["variant"] == self.baseline
            and self.baseline_precision(contender.precision) == contender.precision
        ):
            return own
        precision = self.baseline_precision(contender.precision)
        fits = [
            row
            for row in self.others
            if row["variant"] == self.baseline
            and row["capture"] == capture
            and row["precision"] == precision
            and all(row[name] == own[name] for name in INPUTS)
        ]
        windows = (contender.window, DEFAULT_WINDOW, None)
        return max(
            fits,
            key=lambda row: (
                row["window"] in windows and -windows.index(row["window"]),
                row["session"] == own["session"],
                row["created_utc"] or "",
            ),
            default=None,
        )

    def elsewhere(self, contender: Contender, capture: str) -> bool:
        """Whether the speed-up is over another row of the baseline than the one that is shown, so that the
        printed times do not give it."""
        if (contender, capture) not in self.speedups:
            return False
        base = self.base_row(contender, capture)
        shown = [row for (c, where), row in self.cells.items() if where == capture and c in self.shown]
        return not any(row is base for row in shown)

    def baseline_precision(self, wanted: str) -> str | None:
        """The precision of the baseline that ``wanted`` is compared with: the same, or its only one."""
        have = {c.precision for c, _ in self.cells if c.variant == self.baseline}
        return wanted if wanted in have else next(iter(sorted(have)), None)

    @property
    def baseline_label(self) -> str:
        """The baseline, with its precision where it has a choice of them."""
        mine = [c for c in self.contenders if c.variant == self.baseline]
        if any(self.precision_of(c) == OWN_PRECISION for c in mine):
            return str(self.baseline)
        have = sorted({c.precision for c in mine})
        return f"{self.baseline} ({have[0]})" if len(have) == 1 else f"{self.baseline} (same precision)"

    def floor(self, rows: Iterable[Row]) -> float:
        """The noise floor for comparing ``rows`` with each other."""
        rows = list(rows)
        sessions = {row["session"] for row in rows}
        return stats.floor_of(*(row.get("noise_floor") for row in rows), same_session=len(sessions) <= 1)

    def pairs(self, contender: Contender) -> list[tuple[Row, Row]]:
        """(baseline's row, contender's row) of every capture in the contender's geomean, in capture order."""
        found = []
        for capture in self.captures:
            base = self.base_row(contender, capture) if (contender, capture) in self.speedups else None
            if base is not None:
                found.append((base, self.cells[contender, capture]))
        return found

    def says(self, contender: Contender) -> str:
        """faster, slower, same or unsure: the contender's geomean against the baseline."""
        mean = self.geomeans.get(contender)
        if mean is None or contender.variant == self.baseline:
            return ""
        floor = self.floor(row for pair in self.pairs(contender) for row in pair)
        return stats.verdict(mean.inverse(), floor).lower()

    @cached_property
    def gains(self) -> list[Gain]:
        """Regrouping's three paths for every kernel, precision, window and capture that has them."""
        found = []
        for (contender, capture), online in self.cells.items():
            stem = contender.variant.removesuffix("-regroup")
            chosen = stem == contender.variant
            if chosen and not self._searched(contender, capture):
                continue
            named = self._twin(f"{stem}-original", contender, capture)
            original = named if named or chosen else self._twin(stem, contender, capture)
            precomputed = self._twin(f"{stem}-precomputed", contender, capture)
            if original is None:
                continue
            found.append(
                Gain(
                    capture,
                    contender,
                    original,
                    online,
                    precomputed,
                    compare(original, online),
                    None if precomputed is None else compare(original, precomputed),
                )
            )
        place = {capture: index for index, capture in enumerate(self.captures)}
        return sorted(
            found,
            key=lambda g: (
                g.kernel,
                g.contender.precision != "fast",
                -(g.contender.window or 0),
                place[g.capture],
            ),
        )

    def _searched(self, contender: Contender, capture: str) -> bool:
        """Whether a variant that chooses by itself searched here, with no ``-regroup`` beside it."""
        always = self._twin(f"{contender.variant}-regroup", contender, capture)
        searched = self.cells[contender, capture]["window"] is not None
        return contender.competes and searched and always is None

    def _twin(self, variant: str, contender: Contender, capture: str) -> Row | None:
        """``variant`` beside the contender on ``capture``: the row of the same session where there is one,
        since between sessions the card drifts by more than a search gains."""
        own = self.cells[contender, capture]
        for window in (contender.window, None):
            twin = Contender(variant, contender.precision, window)
            current = self.cells.get((twin, capture))
            if current is None:
                continue
            alike = ("capture", "session", *INPUTS)
            same = [
                row
                for row in self.others
                if all(row[name] == own[name] for name in alike) and contender_of(row) == twin
            ]
            return same[-1] if same else current
        return None


@dataclass(frozen=True)
class Caution:
    """One thing to know before trusting a number, however many rows it is about.

    Attributes:
        text: a sentence with the count of rows in it.
        where: one entry per capture it is about, ``suite/capture: how many rows``.
    """

    text: str
    where: tuple[str, ...] = ()


@dataclass
class Report:
    """Everything the formats are rendered from.

    Attributes:
        baseline: the variant that was asked for.
        scopes: real suites first, GPU before CPU, graph before eager, cold before warm.
        rows: every current row, with ``speedup`` and its interval where it has one.
        cautions: what the reader must know before trusting a number.
        frame: all rows that were given, older ones included.
    """

    baseline: str
    scopes: list[Scope]
    rows: list[Row]
    cautions: list[Caution]
    frame: pd.DataFrame

    @property
    def warnings(self) -> list[str]:
        """The cautions as sentences, without the captures they are about."""
        return [caution.text for caution in self.cautions]

    def main_scopes(self) -> list[Scope]:
        """The first scope of each (suite, device): the one that details are shown for."""
        seen: dict[tuple[str, str, str], Scope] = {}
        for scope in self.scopes:
            seen.setdefault((scope.suite, scope.device, scope.gpu), scope)
        return list(seen.values())
