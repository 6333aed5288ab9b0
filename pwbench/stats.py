"""How sure a ratio of times is: bootstrap intervals, the noise floor, and verdicts.

Times are compared by the ratio of their medians. When both were sampled in turn in one session,
equal sample indices are a pair (they saw the same clock and the same neighbours), and resampling
keeps pairs together, so that drift common to both cancels. Outliers stay in; the median is what
makes them harmless, and `outlier_share` shows them.

The interval of a geometric mean describes the spread of the measurement over a fixed set of
captures. It does not claim anything about captures outside the set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from scipy.stats import bootstrap

from pwbench.errors import InputError

CONFIDENCE = 0.95
RESAMPLES = 2000
FEWEST = 5
"""Below this many samples an interval would be fiction and none is given."""
ENOUGH = 20
"""Below this many samples an interval is given and flagged, and no verdict is founded on it."""
SAME_SESSION_FLOOR = 0.002
"""Smallest difference that is ever called one inside a session: timer steps and code placement."""
CROSS_SESSION_FLOOR = 0.01
"""The same between sessions, whose clocks, allocations and neighbours differ in ways that an A/A
run inside one session cannot see."""
_OUTLIER = 1.5


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians (or a geometric mean of them) with its bootstrap interval.

    Attributes:
        value: the ratio of the observed medians.
        low, high: ends of the interval; NaN when there were fewer than `FEWEST` samples.
        samples: how many samples the smaller side had (the smallest of all captures in a geomean).
        paired: whether samples were resampled as pairs of one session.
        draws: the resampled ratios, ``[RESAMPLES]``, from which geomeans are made.
    """

    value: float
    low: float
    high: float
    samples: int
    paired: bool
    draws: np.ndarray = field(repr=False, compare=False)

    @property
    def known(self) -> bool:
        """Whether there is an interval at all."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def enough(self) -> bool:
        """Whether a verdict may be founded on it."""
        return self.known and self.samples >= ENOUGH

    def inverse(self) -> Ratio:
        """The ratio the other way round."""
        return Ratio(1 / self.value, 1 / self.high, 1 / self.low, self.samples, self.paired, 1 / self.draws)


def ratio_of_medians(
    numerator: Sequence[float], denominator: Sequence[float], paired: bool, seed: int = 0
) -> Ratio:
    """``median(numerator) / median(denominator)`` with its percentile-bootstrap interval.

    Args:
        numerator, denominator: samples of two times, microseconds.
        paired: equal indices belong together (same session); both must then be equally long.
        seed: of the resampling; the same samples and seed give the same interval.

    Raises:
        InputError: no samples, a time that is not a positive finite number, or pairs that do not match.
    """
    top, bottom = _times(numerator), _times(denominator)
    return _ratio(top.tobytes(), bottom.tobytes(), paired, seed)


@lru_cache(maxsize=2048)
def _ratio(numerator: bytes, denominator: bytes, paired: bool, seed: int) -> Ratio:
    """`ratio_of_medians` of checked samples; a report asks for the same pair many times."""
    top, bottom = np.frombuffer(numerator), np.frombuffer(denominator)
    if paired and len(top) != len(bottom):
        raise InputError(f"Paired samples number {len(top)} and {len(bottom)}, expected equally many.")
    fewest = min(len(top), len(bottom))
    value = float(np.median(top) / np.median(bottom))
    if fewest < FEWEST:
        return Ratio(value, math.nan, math.nan, fewest, paired, np.full(RESAMPLES, value))
    if np.ptp(top) == 0 and np.ptp(bottom) == 0:
        return Ratio(value, value, value, fewest, paired, np.full(RESAMPLES, value))
    # The percentile method: BCa's jackknife is degenerate for a median.
    result = bootstrap(
        (top, bottom),
        _median_ratio,
        n_resamples=RESAMPLES,
        paired=paired,
        vectorized=True,
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=np.random.default_rng(seed),
    )
    interval = result.confidence_interval
    return Ratio(
        value, float(interval.low), float(interval.high), fewest, paired, result.bootstrap_distribution
    )


def geomean(ratios: Sequence[Ratio]) -> Ratio:
    """Geometric mean of one ratio per capture; captures are resampled independently of each other.

    Raises:
        InputError: there are no ratios.
    """
    if not ratios:
        raise InputError("A geometric mean needs at least one ratio, got none.")
    value = math.exp(sum(math.log(r.value) for r in ratios) / len(ratios))
    # Each capture's draws come from the same seed: shuffle them, or their errors would add up in step.
    rng = np.random.default_rng(len(ratios))
    draws = np.exp(np.mean([np.log(rng.permutation(r.draws)) for r in ratios], axis=0))
    if all(r.known for r in ratios):
        tail = 100 * (1 - CONFIDENCE) / 2
        low, high = (float(x) for x in np.percentile(draws, [tail, 100 - tail]))
    else:
        low = high = math.nan
    return Ratio(value, low, high, min(r.samples for r in ratios), all(r.paired for r in ratios), draws)


def noise_floor(first: Sequence[float], second: Sequence[float], paired: bool = True) -> float:
    """Half width of the A/A interval: how far from 1 the baseline's ratio against itself may lie.

    The interval is taken symmetric around 1 (the farther end counts), so that a bias between the
    two places in the sampling order counts as noise too.

    Raises:
        InputError: fewer than `FEWEST` samples, or as `ratio_of_medians`.
    """
    ratio = ratio_of_medians(first, second, paired)
    if not ratio.known:
        raise InputError(f"A noise floor needs at least {FEWEST} samples of each, got {ratio.samples}.")
    return max(abs(ratio.low - 1), abs(ratio.high - 1))


def verdict(change: Ratio, floor: float) -> str:
    """What ``new time / old time`` says: SLOWER, FASTER, SAME or UNSURE.

    SLOWER and FASTER need the whole interval beyond the floor; SAME needs the whole interval within
    twice the floor of 1; everything else, and everything with too few samples, is UNSURE.
    """
    if not change.enough:
        return "UNSURE"
    if change.low > 1 + floor:
        return "SLOWER"
    if change.high < 1 - floor:
        return "FASTER"
    if change.low > 1 - 2 * floor and change.high < 1 + 2 * floor:
        return "SAME"
    return "UNSURE"


def floor_of(*measured: float | None, same_session: bool) -> float:
    """The floor a comparison is held against: the largest A/A floor measured (nulls are skipped),
    never below what `SAME_SESSION_FLOOR` or `CROSS_SESSION_FLOOR` allows for."""
    least = SAME_SESSION_FLOOR if same_session else CROSS_SESSION_FLOOR
    return max([least, *(float(m) for m in measured if m is not None and math.isfinite(m))])


def outlier_share(samples: Sequence[float]) -> float:
    """Share of samples above 1.5 times the median. They are kept; this is to show them."""
    times = _times(samples)
    return float(np.mean(times > _OUTLIER * np.median(times)))


def _median_ratio(top: np.ndarray, bottom: np.ndarray, axis: int = -1) -> np.ndarray:
    ratio: np.ndarray = np.median(top, axis=axis) / np.median(bottom, axis=axis)
    return ratio


def _times(samples: Sequence[float]) -> np.ndarray:
    times = np.asarray(samples, dtype=np.float64)
    if times.ndim != 1 or times.size == 0:
        raise InputError(f"Samples have shape {list(times.shape)}, expected a list of at least one time.")
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise InputError(
            "Samples hold a time that is not a positive finite number; the row cannot be compared."
        )
    return times
