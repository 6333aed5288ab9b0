"""What the reader must know before trusting a number: one sentence per cause, and where it holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from pwbench import stats
from pwbench.report.contenders import samples_of
from pwbench.report.model import Caution, Scope
from pwbench.results import Row

_CLOCKS_APART = 0.03
_OUTLIERS = 0.05


def gather(scopes: Sequence[Scope], remeasured: Sequence[str] = ()) -> list[Caution]:
    """Every cause for caution in ``scopes``, once, with the count of rows over all of them.

    Args:
        remeasured: captures, ``suite/capture``, with older rows on other selections or seeded tensors.
    """
    made = [
        _other_selections(remeasured),
        _held_back(scopes),
        _few_samples(scopes),
        _outliers(scopes),
        _unpaired(scopes),
        _clocks(scopes),
    ]
    return [caution for caution in made if caution is not None]


def _other_selections(captures: Sequence[str]) -> Caution | None:
    if not captures:
        return None
    text = (
        f"On {_captures(len(captures))} older rows were measured on other selections, or on seeded tensors "
        "of another generator, and are left out."
    )
    return Caution(text, tuple(captures))


def _held_back(scopes: Sequence[Scope]) -> Caution | None:
    found = _Found(scopes, lambda row: bool(row.get("throttle")))
    if not found.rows:
        return None
    causes = sorted({cause for row in found.rows for cause in _causes(row)})
    return found.caution(
        f"The GPU was held back while {found.share} were sampled ({', '.join(causes)}): their times are not "
        "the best that it can do. Variants of one session took turns, so that ratios of their times compare "
        "like with like."
    )


def _few_samples(scopes: Sequence[Scope]) -> Caution | None:
    found = _Found(scopes, lambda row: len(samples_of(row)) < stats.ENOUGH)
    if not found.rows:
        return None
    have = "has" if len(found.rows) == found.of == 1 else "have"
    return found.caution(
        f"{found.share[:1].upper()}{found.share[1:]} {have} fewer than {stats.ENOUGH} samples, too few to "
        "call anything faster or slower; replay with more --samples."
    )


def _outliers(scopes: Sequence[Scope]) -> Caution | None:
    def strays(row: Row) -> bool:
        values = samples_of(row)
        return len(values) >= stats.ENOUGH and stats.outlier_share(values) > _OUTLIERS

    found = _Found(scopes, strays)
    if not found.rows:
        return None
    return found.caution(
        f"In {found.share} more than {_OUTLIERS:.0%} of the samples are outliers (kept); something else may "
        "have used the machine."
    )


def _unpaired(scopes: Sequence[Scope]) -> Caution | None:
    ratios = [(s, c, capture, ratio) for s in scopes for (c, capture), ratio in s.speedups.items()]
    apart = [(scope, c, capture) for scope, c, capture, ratio in ratios if not ratio.paired]
    if not apart:
        return None
    named: dict[str, dict[str, None]] = {}
    for scope, contender, _ in apart:
        named.setdefault(scope.suite, {})[scope.named(contender)] = None
    who = "; ".join(f"{suite}: {', '.join(names)}" for suite, names in named.items())
    text = (
        f"{len(apart)} of {len(ratios)} speed-ups compare rows of two different sessions, in which the two "
        f"sides did not take turns ({who}). There, differences below {stats.CROSS_SESSION_FLOOR:.0%} mean "
        "nothing."
    )
    of = [(scope, capture) for scope, _, capture, _ in ratios]
    return Caution(text, _counted([(scope, capture) for scope, _, capture in apart], of, "speed-ups"))


def _clocks(scopes: Sequence[Scope]) -> Caution | None:
    """Clocks are held against each other inside a scope: that is where rows are compared."""
    where, ends = [], []
    for scope in scopes:
        clocks = [float(row["sm_clock_mhz"]) for row in scope.cells.values() if row.get("sm_clock_mhz")]
        if clocks and max(clocks) > (1 + _CLOCKS_APART) * min(clocks):
            where.append(f"{scope.suite}, {scope.config}: {min(clocks):.0f} to {max(clocks):.0f} MHz")
            ends += [min(clocks), max(clocks)]
    if not where:
        return None
    span = f"{min(ends):.0f} to {max(ends):.0f} MHz"
    return Caution(f"SM clocks differ between rows that are compared ({span}).", tuple(where))


class _Found:
    """The current rows that something holds for, in all scopes."""

    def __init__(self, scopes: Sequence[Scope], holds: Callable[[Row], bool]) -> None:
        cells = [(scope, c, row) for scope in scopes for (_, c), row in scope.cells.items()]
        self.hits = [(scope, c) for scope, c, row in cells if holds(row)]
        self.rows = [row for _, _, row in cells if holds(row)]
        self.all = [(scope, c) for scope, c, _ in cells]
        self.of = len(cells)

    @property
    def share(self) -> str:
        """How many of the rows, in words."""
        return "all rows" if len(self.rows) == self.of else f"{len(self.rows)} of {self.of} rows"

    def caution(self, text: str) -> Caution:
        return Caution(text, _counted(self.hits, self.all, "rows"))


def _counted(
    hits: Iterable[tuple[Scope, str]], everything: Iterable[tuple[Scope, str]], what: str
) -> tuple[str, ...]:
    """``suite/capture: how many of how many``, in the order of the scopes."""
    found, total = _tally(hits), _tally(everything)
    return tuple(f"{name}: {number} of {total[name]} {what}" for name, number in found.items())


def _tally(pairs: Iterable[tuple[Scope, str]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for scope, capture in pairs:
        name = f"{scope.suite}/{capture} ({scope.config})"
        counts[name] = counts.get(name, 0) + 1
    return counts


def _causes(row: Row) -> list[str]:
    """The reasons a row names, without the number of rounds that each was seen in."""
    return [re.sub(r" in \d+ rounds?$", "", part.strip()) for part in re.split("[;,]", str(row["throttle"]))]


def _captures(number: int) -> str:
    return f"{number} capture{'' if number == 1 else 's'}"
