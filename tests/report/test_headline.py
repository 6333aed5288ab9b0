"""The sentences say no more than the numbers do."""

from __future__ import annotations

import re

import pytest

from pwbench import results
from pwbench.report import build, studies, tables
from pwbench.report.headline import headline
from pwbench.report.html import html
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
    assert found.answer == (
        "Nothing beats flashinfer: the best, union8 (fast), reaches 0.80x, with rel-L2 2.9e-2 where "
        "flashinfer has 1.9e-3 (geomean over 1 capture)."
    )


def test_the_errors_beside_the_speedup_are_the_worst_of_the_captures_compared(tmp_path):
    rows = [row("union8", "a", rel_l2=1e-2), row("union8", "b", rel_l2=3e-2), row("union8", "c", rel_l2=0.9)]
    rows += [{**peer(capture=c), "rel_l2": e} for c, e in (("a", 1.1e-3), ("b", 1.7e-3))]
    answer = said(tmp_path, *rows).answer
    assert (
        "with rel-L2 3.0e-2 where flashinfer has 1.7e-3 (geomean over 2 captures, errors the worst" in answer
    )


def test_an_answer_that_was_not_checked_names_no_error(tmp_path):
    found = said(tmp_path, {**peer(), "rel_l2": None}, row("union8", rel_l2=None))
    assert "rel-L2" not in found.answer
    assert dict(found.facts)["At what accuracy?"] == "It was not checked against the reference."
    half = said(
        tmp_path, {**peer(), "rel_l2": None, "created_utc": "2027"}, row("union8", created_utc="2027")
    )
    assert "with rel-L2 2.9e-2 (geomean" in half.answer


def test_an_accurate_contender_is_named_beside_a_fast_one(tmp_path):
    exact = row("union8", complete_us=150, precision="accurate", rel_l2=2e-3)
    found = said(tmp_path, peer(), row("union8"), exact)
    assert re.match(r"At like accuracy: union8 \(accurate\), 1\.3\dx with rel-L2 2\.0e-3 where", found.alike)
    text = dict(found.facts)["At what accuracy?"]
    assert "union8 (fast): rel-L2 2.9e-2; flashinfer: 1.9e-3" in text
    assert "The limit of 2.5e-3 is pwbench's own" in text and "flashinfer has one precision, its own" in text


def test_like_accuracy_is_within_the_larger_of_the_limit_and_the_baselines_error(tmp_path):
    for theirs, errors, named in (
        (1.0e-3, {"a": 2.9e-2, "b": 2.4e-3, "c": 1e-3}, "pageweaver"),
        (2.9e-3, {"a": 2.9e-2, "b": 2.8e-3, "c": 1e-3}, "pageweaver"),
        (2.9e-3, {"a": 2.9e-2, "b": 3.0e-3, "c": 1e-3}, "triton"),
        (1.9e-3, {"a": 2.9e-2, "b": 2.6e-3, "c": 0.0}, "triton"),
    ):
        variants = {"a": ("union8", 60), "b": ("pageweaver", 80), "c": ("triton", 90)}
        rows = [
            row(v, complete_us=us, rel_l2=errors[k], precision="accurate") for k, (v, us) in variants.items()
        ]
        found = said(tmp_path, {**peer(), "rel_l2": theirs}, *rows)
        (tmp_path / "rows.parquet").unlink()
        assert found.alike.startswith(f"At like accuracy: {named} ("), (theirs, errors, found.alike)


def test_a_fastest_that_is_as_exact_as_the_baseline_needs_no_second_answer(tmp_path):
    rows = [row("union8", precision=p, rel_l2=1.8e-3) for p in ("fast", "accurate")]
    assert said(tmp_path, peer(), *rows).alike == ""
    (tmp_path / "rows.parquet").unlink()
    assert said(tmp_path, peer(), rows[1]).alike == "Not measured at fast in this suite."


def test_where_nothing_is_as_exact_the_answer_tells_not_measured_from_too_inexact(tmp_path):
    found = said(tmp_path, peer(), row("union8"))
    assert found.alike == "At like accuracy: not measured; this suite has no rows at accurate."
    found = said(tmp_path, peer(), row("union8"), row("union8", precision="accurate", rel_l2=9e-3))
    assert found.alike == "At like accuracy: nothing that was measured comes within 2.5e-3."
    (tmp_path / "rows.parquet").unlink()
    triton = row("triton", complete_us=300, rel_l2=2.1e-3)
    found = said(tmp_path, peer(), row("union8"), triton)
    assert found.alike == (
        "Nothing measured at like accuracy is faster than flashinfer; union8 (accurate): not measured."
    )
    (tmp_path / "rows.parquet").unlink()
    found = said(tmp_path, peer(), row("union8"), {**triton, "precision": "accurate"},
                 row("union8", precision="accurate", rel_l2=9e-3))  # fmt: skip
    assert found.alike == "Nothing measured at like accuracy is faster than flashinfer."
    (tmp_path / "rows.parquet").unlink()
    triton = row("triton", complete_us=150, rel_l2=2.1e-3)
    found = said(tmp_path, peer(), row("union8"), triton)
    assert re.match(r"At like accuracy: triton \(own precision\), 1\.3\dx with rel-L2 2\.1e-3", found.alike)
    assert found.alike.endswith(" Not measured at accurate in this suite.")


@pytest.mark.parametrize(("theirs", "limit"), [(1.9e-3, "2.5e-3"), (2.9e-3, "2.9e-3")])
def test_the_rule_of_like_accuracy_is_said_in_words(theirs, limit, tmp_path):
    text = dict(said(tmp_path, {**peer(), "rel_l2": theirs}, row("union8")).facts)["At what accuracy?"]
    assert "at most the larger of that limit and flashinfer's own worst on the same captures: here" in text
    assert text.endswith(f"here {limit}.")


@pytest.mark.parametrize("kernel", ["union8", "pageweaver"])
@pytest.mark.parametrize("left_out", ["", "unsearched", "searched", "both"])
def test_why_climbs_from_the_baseline_to_the_fastest_over_what_was_measured(kernel, left_out, tmp_path):
    names = {"union8": ("union8", "union8-regroup"), "pageweaver": ("pageweaver-original", "pageweaver")}
    unsearched, searched = names[kernel]
    steps = [(unsearched, "accurate", 160), (searched, "accurate", 125), (searched, "fast", 80)]
    rows = [row(v, complete_us=us, precision=p, noise=0.0, rel_l2=2e-3) for v, p, us in steps]
    gone = {"": (), "unsearched": (0,), "searched": (1,), "both": (0, 1)}[left_out]
    rows = [r for index, r in enumerate(rows) if index not in gone]
    why = dict(said(tmp_path, row("flashinfer", complete_us=200, noise=0.0), *rows).facts)["Why?"]
    values = [f"{v} ({p}) {200 / us:.2f}x" for v, p, us in steps]
    want = " → ".join(["flashinfer 1.00x", *(v for i, v in enumerate(values) if i not in gone)])
    assert (f"Step by step: {want}." in why) == (left_out != "both"), why
    assert ("Step by step" in why) == (left_out != "both")


@pytest.mark.parametrize("kind", ["seeded", "stored"])
def test_seeded_tensors_are_admitted_and_only_they(kind, tmp_path):
    text = dict(said(tmp_path, peer(tensors=kind), row("union8", tensors=kind)).facts)["At what accuracy?"]
    assert ("Q and KV were seeded random values, not the model's own." in text) == (kind == "seeded")
    assert ("Q and KV were the model's own values" in text) == (kind == "stored")
    assert "for its kernels at accurate on seeded tensors." in text


def test_why_uses_the_headlines_own_mean(tmp_path):
    rows = [row("flashinfer", c, complete_us=us, noise=0.0) for c, us in (("a", 100), ("b", 900))]
    rows += [row("union8", c, complete_us=us, noise=0.0) for c, us in (("a", 50), ("b", 100))]
    found = said(tmp_path, *rows)
    (speed,) = re.findall(r"fastest: ([\d.]+)x", found.answer)
    ours, theirs, ratio = re.search(
        r"A call takes ([\d.]+) us instead of flashinfer's ([\d.]+) \(the geomean over .*, hence ([\d.]+)x",
        dict(found.facts)["Why?"],
    ).groups()
    assert ratio == speed == f"{float(theirs) / float(ours):.2f}"
    assert abs(float(theirs) - 300) < 5 and abs(float(ours) - 70.7) < 2


def test_why_says_that_overlapping_stages_exceed_the_call_and_only_then(tmp_path):
    for attention, overlaps in ((70.0, False), (99.0, True)):
        ours = {**row("union8", search_us=10.0, metadata_us=5.0), "attention_us": attention}
        why = dict(said(tmp_path, peer(), ours).facts)["Why?"]
        (tmp_path / "rows.parquet").unlink()
        assert "search 10%, metadata 5%, attention" in why
        assert ("together they exceed 100 %" in why) == overlaps


@pytest.mark.parametrize("baseline", ["flashinfer", "triton", "union8"])
def test_page_visits_are_held_against_the_baselines_only_where_those_are_counted(baseline, tmp_path):
    alone = {"groups": 8192, "union_pages": 131072}
    base = row(baseline, complete_us=200, **({} if baseline == "union8" else alone))
    results.write(tmp_path / "rows.parquet", [base, row("pageweaver", union_pages=30000)])
    report = build(results.load(tmp_path), baseline=baseline)
    why = dict(headline(report, report.scopes[0]).facts)["Why?"]
    assert ("30,000, union8's 40,000 (75%)" in why) == (baseline == "union8")
    assert ("23% of the 131,072 that there would be if no two queries shared" in why) == (
        baseline != "union8"
    )
    assert ("How many flashinfer makes is not counted" in why) == (baseline == "flashinfer")


def test_how_sure_names_interval_samples_sessions_and_noise(tmp_path):
    rows = [peer(capture=c, noise_floor=f) for c, f in (("a", 0.004), ("b", 0.013))]
    rows += [row("union8", "a", samples=100), row("union8", "b", session="another", samples=40)]
    text = dict(said(tmp_path, *rows).facts)["How sure?"]
    assert re.match(r"The speed-up lies between [\d.]+ and [\d.]+ \(95 % interval\)\.", text)
    assert "Each side was timed 40 to 100 times on every capture" in text
    assert "drawn again at random 2,000 times, and 95 % of the geomeans" in text
    assert "On 1 of 2 captures the two were measured in different sessions" in text
    assert "timed against itself in the same way, flashinfer seemed up to 1.3% faster or slower" in text
    assert "only where the whole interval lies beyond 1.3%" in text


def test_how_sure_says_that_sides_took_turns_where_they_did_and_is_silent_on_noise_never_measured(tmp_path):
    text = dict(said(tmp_path, peer(noise_floor=None), row("union8", noise_floor=None)).facts)["How sure?"]
    assert "took turns, sample by sample, in one session" in text
    assert "A/A" not in text and "beyond 0.2%" in text


def test_losing_captures_are_counted_when_regrouping_is_judged(tmp_path):
    rows = [row("union8", "a"), row("union8", "b"), peer(capture="a"), peer(capture="b")]
    rows += [row("union8-regroup", "a", complete_us=80), row("union8-regroup", "b", complete_us=104)]
    text = dict(said(tmp_path, *rows).facts)["Does the search pay?"]
    assert "regrouping saves 8." in text or "regrouping saves 9." in text
    assert "(of 2 captures it wins on 1, loses on 1)" in text


@pytest.mark.parametrize(
    ("times", "said_of_it"),
    [
        ((80, 80), ""),
        ((80, 100), "(of 2 captures it wins on 1, makes no difference on 1)"),
        ((104, 104), "(of 2 captures it loses on 2)"),
        ((80, 100.6), "(of 2 captures it wins on 1, unsure on 1)"),
    ],
)
def test_a_search_wins_and_loses_only_beyond_the_noise(times, said_of_it, tmp_path):
    rows = [peer(capture=c) for c in "ab"] + [row("union8", c, noise=0.02, seed=3) for c in "ab"]
    for capture, us in zip("ab", times, strict=True):
        noise = 0.02 if us == 100.6 else 1e-4
        same = {"seed": 3, "noise": 0.02} if us == 100 else {"noise": noise}
        rows.append(row("union8-regroup", capture, complete_us=us, **same))
    results.write(tmp_path / "rows.parquet", rows)
    report = build(results.load(tmp_path))
    text = dict(headline(report, report.scopes[0]).facts)["Does the search pay?"]
    assert said_of_it in text and ("(of" in text) == bool(said_of_it), text
    lost = studies.losses(report, report.scopes)
    assert [c[0] for c in lost.rows] == [f"six/{c}" for c, us in zip("ab", times, strict=True) if us > 101]


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


@pytest.mark.parametrize(
    ("overtakes", "captures", "words"),
    [
        (
            False,
            3,
            "union8 (fast) has the shortest time on all 3 captures. It is never overtaken: no break-even",
        ),
        (False, 1, "union8 (fast) has the shortest time on 1 capture."),
        (True, 3, "The shortest time has union8 (fast) on 2 of 3 captures, triton (own precision) on 1 of 3"),
    ],
)
def test_without_a_baseline_the_answer_is_who_is_fastest_where(overtakes, captures, words, tmp_path):
    names = [f"affinity-0{i}0" for i in range(captures)]
    rows = [row("union8", c, suite="affinity", complete_us=100) for c in names]
    rows += [
        row("triton", c, suite="affinity", complete_us=90 if overtakes and c == names[-1] else 150)
        for c in names
    ]
    rows += [row("union8-precomputed", c, suite="affinity", complete_us=20) for c in names]
    found = said(tmp_path, *rows)
    assert words in found.answer and "--" not in found.answer
    crossing = "triton (own precision) overtakes union8 (fast) between affinity-010 and affinity-020."
    text = dict(found.facts)["Against what?"]
    assert (crossing in text) == overtakes and "--" not in text and "flashinfer has no result here" in text
    results.write(tmp_path / "again.parquet", rows)
    scope = build(results.load(tmp_path)).scopes[0]
    table = tables.geomean(None, scope)
    assert {"speed-up", "verdict"}.isdisjoint(table.columns) and len(table.rows) == 3
    assert all(any(cells[i] for cells in table.rows) for i in range(len(table.columns)))


def test_bounds_have_no_mean_anywhere(tmp_path):
    rows = [row(v, c, suite="extremes", complete_us=us, noise=0.0)
            for v, c, us in (("flashinfer", "a", 200), ("flashinfer", "b", 300), ("union8", "a", 100),
                             ("union8", "b", 400))]  # fmt: skip
    results.write(tmp_path / "rows.parquet", rows)
    report = build(results.load(tmp_path))
    scope = report.scopes[0]
    found = headline(report, scope)
    assert found.answer == (
        "Bounds, each for itself, of union8 (fast) over flashinfer: 2.00x on a, 0.75x on b."
    )
    assert [question for question, _ in found.facts] == ["At what accuracy?"]
    assert tables.geomean(report, scope).rows == []
    assert "geomean" not in tables.speedups(report, scope).columns
    assert all(
        len(c) == len(tables.speedups(report, scope).columns) for c in tables.speedups(report, scope).rows
    )
    drawn = [text for _, text in found.facts] + [html(report, captures=None)]
    sqrt = f"{1.5**0.5:.2f}x"
    assert not any(sqrt in text for text in drawn)
