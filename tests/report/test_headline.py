"""The sentences say no more than the numbers do."""

from __future__ import annotations

import re

from pwbench import results
from pwbench.report import build
from pwbench.report.headline import headline
from tests.rows import row


def said(tmp_path, *rows):
    results.write(tmp_path / "rows.parquet", rows)
    report = build(results.load(tmp_path))
    return headline(report, report.scopes[0])


def peer(**changes):
    return row("flashinfer", complete_us=200, precision="accurate", rel_l2=1.9e-3, **changes)


def test_the_fastest_is_named_with_its_speedup(tmp_path):
    found = said(tmp_path, peer(), row("union8"), row("pageweaver", complete_us=80))
    assert re.match(r"pageweaver \(fast\) is fastest: 2\.(49|5\d)x as fast as flashinfer", found.answer)
    assert found.sure


def test_a_path_that_is_handed_its_permutation_is_never_the_fastest(tmp_path):
    found = said(tmp_path, peer(), row("union8"), row("union8-precomputed", complete_us=50))
    assert found.answer.startswith("union8 (fast) is fastest")


def test_too_few_samples_only_look_faster(tmp_path):
    found = said(tmp_path, peer(samples=5), row("union8", samples=5))
    assert "union8 (fast) looks fastest" in found.answer
    assert not found.sure
    assert dict(found.facts)["How sure?"].startswith("Not sure: 5 samples per capture are too few")


def test_when_nothing_beats_the_baseline_it_says_so(tmp_path):
    found = said(tmp_path, peer(), row("union8", complete_us=250))
    assert found.answer == "Nothing beats flashinfer: the best, union8 (fast), reaches 0.80x."


def test_an_accurate_contender_is_named_beside_a_fast_one(tmp_path):
    exact = row("union8", complete_us=150, precision="accurate", rel_l2=2e-3)
    text = dict(said(tmp_path, peer(), row("union8"), exact).facts)["At what accuracy?"]
    assert "Its worst rel-L2 error is 2.9e-2, flashinfer's 1.9e-3." in text
    assert "Fastest within 2.5e-3: union8 (accurate) at 1.3" in text


def test_losing_captures_are_counted_when_regrouping_is_judged(tmp_path):
    rows = [row("union8", "a"), row("union8", "b"), peer(capture="a"), peer(capture="b")]
    rows += [row("union8-regroup", "a", complete_us=80), row("union8-regroup", "b", complete_us=104)]
    text = dict(said(tmp_path, *rows).facts)["Does the search pay?"]
    assert "regrouping saves 8." in text or "regrouping saves 9." in text
    assert "it loses on 1 of 2 captures" in text


def test_cpu_times_are_not_sold_as_speed(tmp_path):
    cpu = {"device": "cpu", "gpu": "Xeon", "mode": "eager"}
    found = said(tmp_path, row("reference", complete_us=200, **cpu), row("union8", **cpu))
    assert "they say nothing about a GPU" in found.answer
    assert "roofline" not in dict(found.facts)["Why?"]


def test_the_fixed_paths_of_a_kernel_stand_back_behind_its_own_choice(tmp_path):
    rows = [
        row("pageweaver", complete_us=81, window=64),
        row("pageweaver-regroup", complete_us=80, window=64),
    ]
    assert said(tmp_path, peer(), *rows).answer.startswith("pageweaver (fast) is fastest")
    assert said(tmp_path, peer(), rows[1]).answer.startswith("pageweaver-regroup (fast) is fastest")


def test_where_a_kernel_chose_not_to_search_it_says_so(tmp_path):
    rows = [peer(), row("pageweaver"), row("pageweaver-original")]
    rows += [row("pageweaver-regroup", complete_us=110, window=64)]
    text = dict(said(tmp_path, *rows).facts)["Does the search pay?"]
    assert "regrouping costs" in text
    assert "left to itself it searches on 0 of 1 capture" in text
