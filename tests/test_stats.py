"""Intervals hold what they promise on simulated times: drift and outliers raise no false alarm, and a
true 2 % slowdown is found."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pwbench import stats
from pwbench.errors import InputError

SAMPLES = 200
RUNS = 80


def session(rng, medians, drift=0.05, noise=0.01, outliers=0.02):
    """Interleaved samples of several kernels that share one drifting clock, ``[len(medians), SAMPLES]``."""
    phase = rng.uniform(0, 2 * np.pi)
    clock = 1 + drift * np.sin(np.linspace(phase, phase + 4, SAMPLES)) + drift * np.linspace(0, 1, SAMPLES)
    times = np.outer(medians, clock) * (1 + noise * rng.standard_normal((len(medians), SAMPLES)))
    slow = rng.random(times.shape) < outliers
    return np.where(slow, times * rng.uniform(1.2, 3, times.shape), times)


def alarms(change, drift):
    """How many of RUNS simulated comparisons end in each verdict; ``change`` is the true ratio."""
    counts = dict.fromkeys(("SLOWER", "FASTER", "SAME", "UNSURE"), 0)
    for run in range(RUNS):
        rng = np.random.default_rng(run)
        old, again, new = session(rng, [100, 100, 100 * change], drift)
        floor = stats.floor_of(stats.noise_floor(old, again), same_session=True)
        counts[stats.verdict(stats.ratio_of_medians(new, old, paired=True), floor)] += 1
    return counts


@pytest.mark.parametrize("drift", [0.0, 0.05])
def test_no_false_alarm_above_five_percent_on_a_against_a_with_drift(drift):
    counts = alarms(1.0, drift)
    assert counts["SLOWER"] + counts["FASTER"] <= 0.05 * RUNS


def test_a_true_two_percent_slowdown_is_found_with_two_hundred_samples():
    counts = alarms(1.02, drift=0.0)
    assert counts["SLOWER"] >= 0.95 * RUNS
    assert counts["FASTER"] == 0


def test_a_two_percent_slowdown_is_found_between_sessions_too():
    found = 0
    for run in range(40):
        rng = np.random.default_rng(run)
        old, new = session(rng, [100], drift=0.0)[0], session(rng, [102], drift=0.0)[0]
        change = stats.ratio_of_medians(new, old, paired=False)
        found += stats.verdict(change, stats.floor_of(same_session=False)) == "SLOWER"
    assert found >= 38


def test_sessions_whose_clocks_differ_a_little_raise_no_false_alarm():
    alarmed = 0
    for run in range(40):
        rng = np.random.default_rng(run)
        level = rng.uniform(0.995, 1.005)
        old, new = session(rng, [100], drift=0.01)[0], session(rng, [100 * level], drift=0.01)[0]
        change = stats.ratio_of_medians(new, old, paired=False)
        alarmed += stats.verdict(change, stats.floor_of(same_session=False)) in ("SLOWER", "FASTER")
    assert alarmed <= 2


def test_pairs_cancel_drift_that_both_saw():
    old, new = session(np.random.default_rng(1), [100, 101], drift=0.2, noise=0.001, outliers=0)
    together = stats.ratio_of_medians(new, old, paired=True)
    apart = stats.ratio_of_medians(new, old, paired=False)
    assert together.high - together.low < 0.25 * (apart.high - apart.low)
    assert together.low <= 1.01 <= together.high


def test_the_interval_of_a_ratio_covers_the_truth_about_as_often_as_it_says():
    covered = 0
    for run in range(200):
        old, new = session(np.random.default_rng(1000 + run), [100, 120], drift=0.0, outliers=0)
        ratio = stats.ratio_of_medians(new, old, paired=True, seed=run)
        covered += ratio.low <= 1.2 <= ratio.high
    assert covered >= 180


def test_the_interval_of_a_geomean_is_narrower_than_that_of_its_parts():
    rng = np.random.default_rng(3)
    ratios = [
        stats.ratio_of_medians(*session(rng, [100 * r, 100], drift=0.0), paired=True) for r in (1.5, 2, 1.2)
    ]
    mean = stats.geomean(ratios)
    assert mean.value == pytest.approx(math.prod(r.value for r in ratios) ** (1 / 3))
    assert mean.low < mean.value < mean.high
    widest = max((r.high - r.low) / r.value for r in ratios)
    assert 0.3 * widest < (mean.high - mean.low) / mean.value < widest


def test_the_geomean_of_ratios_made_from_one_seed_does_not_let_their_errors_add_up():
    a, b = session(np.random.default_rng(5), [150, 100], drift=0.0)
    one = stats.ratio_of_medians(a, b, paired=True)
    four = stats.geomean([one] * 4)
    assert (four.high - four.low) == pytest.approx((one.high - one.low) / 2, rel=0.25)


def test_too_few_samples_give_a_value_without_an_interval():
    ratio = stats.ratio_of_medians([2.0, 2.1], [1.0, 1.0], paired=True)
    assert ratio.value == pytest.approx(2.05)
    assert not ratio.known
    assert not stats.geomean([ratio]).known
    with pytest.raises(InputError, match="at least 5 samples of each, got 2"):
        stats.noise_floor([2.0, 2.1], [1.0, 1.0])


def test_few_samples_give_an_interval_but_no_verdict():
    rng = np.random.default_rng(0)
    ratio = stats.ratio_of_medians(200 + rng.random(10), 100 + rng.random(10), paired=True)
    assert ratio.known
    assert not ratio.enough
    assert stats.verdict(ratio, 0.01) == "UNSURE"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.02, 1.03, "SLOWER"), (0.9, 0.95, "FASTER"), (0.995, 1.015, "SAME"), (0.97, 1.05, "UNSURE"),
     (1.005, 1.03, "UNSURE")],
)  # fmt: skip
def test_the_verdict_follows_from_where_the_interval_lies(low, high, expected):
    ratio = stats.Ratio((low + high) / 2, low, high, 100, True, np.ones(4))
    assert stats.verdict(ratio, 0.01) == expected


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=30), st.floats(0.1, 10))
@settings(max_examples=25, deadline=None)
def test_scaling_one_side_scales_the_ratio_and_its_interval(times, scale):
    plain = stats.ratio_of_medians(times, times, paired=True)
    scaled = stats.ratio_of_medians([t * scale for t in times], times, paired=True)
    assert scaled.value == pytest.approx(scale * plain.value)
    assert plain.value == 1
    if plain.known:
        # Paired with itself nothing can vary.
        assert scaled.low == pytest.approx(scale)
        assert scaled.high == pytest.approx(scale)


def test_the_inverse_swaps_the_ends():
    a, b = session(np.random.default_rng(0), [150, 100])
    ratio = stats.ratio_of_medians(a, b, paired=True)
    inverse = ratio.inverse()
    assert (inverse.low, inverse.high) == (1 / ratio.high, 1 / ratio.low)


def test_the_floor_is_the_largest_measured_and_never_below_the_least():
    assert stats.floor_of(None, 0.03, math.nan, same_session=True) == 0.03
    assert stats.floor_of(None, same_session=True) == stats.SAME_SESSION_FLOOR
    assert stats.floor_of(0.001, same_session=False) == stats.CROSS_SESSION_FLOOR


def test_outliers_are_counted():
    assert stats.outlier_share([1.0] * 9 + [2.0]) == 0.1


@pytest.mark.parametrize(
    ("top", "bottom", "message"),
    [([], [1.0], "at least one time"), ([1.0, 2.0], [1.0], "number 2 and 1"),
     ([1.0], [0.0], "positive finite"), ([math.nan], [1.0], "positive finite"),
     ([math.inf], [1.0], "positive finite")],
)  # fmt: skip
def test_samples_that_cannot_be_compared_are_refused(top, bottom, message):
    with pytest.raises(InputError, match=message):
        stats.ratio_of_medians(top, bottom, paired=True)


def test_a_geomean_of_nothing_is_refused():
    with pytest.raises(InputError, match="at least one ratio"):
        stats.geomean([])
