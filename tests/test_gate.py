"""The gate: exact counters, times against the noise floor, and refusal of what was not measured alike."""

from __future__ import annotations

import copy
from xml.etree import ElementTree

import pytest

from pwbench import gate, results
from pwbench.errors import InputError
from pwbench.report import verdicts
from tests.rows import row, suite_rows, unavailable

COUNTS = dict.fromkeys(gate.COUNTERS, 10)
BLESSED = {"six/a": {"tables_sha256": "x" * 64, "groupings": {"original": COUNTS, "regroup-w128": COUNTS}}}


def verdicts_of(findings):
    return [(f.capture, f.what, f.verdict) for f in findings]


def frame(tmp_path, name, rows):
    results.write(tmp_path / name, rows)
    return results.load(tmp_path / name)


def compared(tmp_path, old, new):
    return gate.compare_results(frame(tmp_path, "old.parquet", old), frame(tmp_path, "new.parquet", new))


# Tier 1


def test_equal_counters_pass():
    outcome = gate.Outcome(gate.compare_counters(BLESSED, copy.deepcopy(BLESSED)))
    assert outcome.passed
    assert outcome.counts == {"SAME": 2}


@pytest.mark.parametrize("name", gate.COUNTERS)
def test_any_counter_that_differs_by_one_fails(name):
    current = copy.deepcopy(BLESSED)
    current["six/a"]["groupings"]["original"] = {**COUNTS, name: 11}
    outcome = gate.Outcome(gate.compare_counters(BLESSED, current))
    assert not outcome.passed
    assert f"{name} 11 (blessed 10)" in outcome.failures[0].message


def test_a_capture_that_vanished_appeared_or_changed_fails():
    changed = {"six/a": {**BLESSED["six/a"], "tables_sha256": "y" * 64}}
    more = {**BLESSED, "six/b": BLESSED["six/a"]}
    for current, verdict in (({}, "MISSING"), (more, "CHANGED"), (changed, "CHANGED")):
        outcome = gate.Outcome(gate.compare_counters(BLESSED, current))
        assert [f.verdict for f in outcome.failures] == [verdict]


def test_a_grouping_that_is_no_longer_counted_fails():
    current = {"six/a": {**BLESSED["six/a"], "groupings": {"original": COUNTS}}}
    failures = gate.Outcome(gate.compare_counters(BLESSED, current)).failures
    assert verdicts_of(failures) == [("a", "regroup-w128", "CHANGED")]


def test_result_rows_are_held_against_the_grouping_they_ran_in():
    counted = {**COUNTS, "groups": 2}
    blessed = {"six/a": {"tables_sha256": "x", "groupings": {
        "original": COUNTS, "regroup-w64": {**COUNTS, "union_pages": 7}, "per-query": counted,
        "match-w64": {**COUNTS, "union_pages": 6}}}}  # fmt: skip
    common = {"capture": "a", "tables_sha256": "x", **COUNTS}
    rows = [row("union8", **common), row("union8-regroup", **{**common, "window": 64, "union_pages": 7}),
            row("pageweaver", **{**common, "window": 64, "union_pages": 6}),
            row("triton", **{**common, "groups": 2}), row("reference", **{**common, "groups": None}),
            row("page-union", **{**common, "union_pages": 8}),
            row("union8", **{**common, "capture": "other"}),
            row("union8", **{**common, "tables_sha256": "y"})]  # fmt: skip
    found = [f.verdict for f in gate.compare_row_counters(blessed, rows)]
    assert found == ["SAME", "SAME", "SAME", "SAME", "CHANGED", "MISSING", "CHANGED"]


# Tier 2


def test_results_against_themselves_are_the_same(tmp_path):
    rows = suite_rows(captures=("code-8k", "prose-16k"))
    outcome = compared(tmp_path, rows, rows)
    assert outcome.passed
    assert set(outcome.counts) == {"SAME"}


@pytest.mark.parametrize(
    ("times", "verdict", "passed"), [(1.0, "SAME", True), (1.03, "SLOWER", False), (0.95, "FASTER", True)]
)
def test_a_changed_time_is_found_between_sessions(tmp_path, times, verdict, passed):
    old = row("union8", complete_us=100, samples=200)
    new = row("union8", complete_us=100 * times, samples=200, session="later", seed=5)
    outcome = compared(tmp_path, [old], [new])
    assert [f.verdict for f in outcome.findings if f.tier == 2] == [verdict]
    assert outcome.passed is passed


def test_a_difference_below_the_noise_floor_is_not_called_one(tmp_path):
    old = row("union8", complete_us=100, samples=200, noise_floor=0.05)
    new = row("union8", complete_us=103, samples=200, session="later", noise_floor=0.01)
    assert compared(tmp_path, [old], [new]).counts == {"SAME": 1}


def test_too_few_samples_are_unsure_and_fail_only_a_strict_gate(tmp_path):
    outcome = compared(tmp_path, [row("union8", samples=8)], [row("union8", samples=8, session="later")])
    assert outcome.counts == {"UNSURE": 1}
    assert "8 samples are too few" in outcome.findings[0].message
    assert outcome.passed
    outcome.strict = True
    assert not outcome.passed


def test_a_row_that_stopped_working_fails(tmp_path):
    old = [row("union8"), row("triton")]
    outcome = compared(tmp_path, old, [row("union8"), unavailable("triton", "it broke")])
    assert [(f.verdict, f.message) for f in outcome.failures] == [
        ("FAILED", "It is unavailable now: it broke")
    ]


def test_a_row_that_is_gone_fails_and_a_new_one_passes(tmp_path):
    outcome = compared(tmp_path, [row("union8"), row("triton")], [row("union8"), row("pageweaver")])
    assert [f.verdict for f in outcome.failures] == ["MISSING"]
    assert outcome.counts["NEW"] == 1


def test_a_larger_error_fails(tmp_path):
    outcome = compared(tmp_path, [row("union8", rel_l2=2e-3)], [row("union8", rel_l2=4e-3)])
    assert [f.verdict for f in outcome.failures] == ["LESS ACCURATE"]
    assert "rel-L2 is 4.00e-03, was 2.00e-03" in outcome.failures[0].message


def test_changed_counters_fail_even_when_times_do_not_change(tmp_path):
    outcome = compared(tmp_path, [row("union8")], [row("union8", union_pages=1)])
    assert [f.verdict for f in outcome.failures] == ["CHANGED"]


def test_cpu_times_are_never_judged(tmp_path):
    cpu = {"device": "cpu", "gpu": "Xeon", "mode": "eager"}
    outcome = compared(
        tmp_path, [row("union8", complete_us=100, **cpu)], [row("union8", complete_us=300, **cpu)]
    )
    assert outcome.passed
    assert [f.tier for f in outcome.findings] == [1]
    assert "times were not" in outcome.notes[0]


def test_disturbed_samples_are_said(tmp_path):
    outcome = compared(tmp_path, [row("union8")], [row("union8", throttle="SW thermal slowdown")])
    assert "Disturbed: SW thermal slowdown." in outcome.findings[0].message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "NVIDIA H100"}, "differ in gpu: baseline NVIDIA H200, current NVIDIA H100"),
        ({"precision": "accurate"}, "differ in precision"),
        ({"mode": "eager"}, "differ in mode"),
        ({"l2": "warm"}, "differ in l2"),
        ({"tensors": "stored"}, "differ in tensors"),
        ({"generator": "pcg64/2"}, "differ in generator"),
        ({"device": "cpu"}, "differ in device"),
        ({"capture": "other"}, "different captures"),
        ({"tables_sha256": "f" * 64}, "different captures"),
    ],
)
def test_results_that_were_not_measured_alike_are_refused(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        compared(tmp_path, [row("union8")], [row("union8", **change)])


# For people and CI


@pytest.fixture
def mixed(tmp_path):
    old = [row("union8", samples=200), row("triton"), row("pageweaver", samples=8)]
    new = [row("union8", complete_us=110, samples=200, session="b"),
           row("pageweaver", samples=8, session="b"),
           row("mine", session="b")]  # fmt: skip
    return compared(tmp_path, old, new)


def test_junit_has_one_case_per_comparison(mixed):
    root = ElementTree.fromstring(verdicts.junit(mixed))
    suite = root.find("testsuite")
    assert suite is not None
    assert [suite.get(n) for n in ("tests", "failures", "errors", "skipped")] == ["4", "1", "1", "1"]
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert failure.get("type") == "SLOWER"
    assert suite.find("testcase").get("classname") == "six.code-8k"


def test_the_summary_puts_failures_first_and_leaves_out_what_is_the_same(mixed):
    text = verdicts.markdown(mixed)
    assert text.startswith("## pwbench gate: FAILED")
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert rows[0].startswith("| **")
    assert rows[1].startswith("| **")
    assert "SAME" not in text


def test_the_summary_of_a_passed_gate_is_short(tmp_path):
    text = verdicts.markdown(compared(tmp_path, [row("union8")], [row("union8")]))
    assert text == "## pwbench gate: passed\n\n1 SAME.\n"


def test_data_is_ready_for_json(mixed):
    data = verdicts.data(mixed)
    assert data["passed"] is False
    slower = next(f for f in data["findings"] if f["verdict"] == "SLOWER")
    assert slower["ci"][0] < slower["ratio"] < slower["ci"][1]
