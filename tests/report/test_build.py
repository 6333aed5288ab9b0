"""Which rows are current, which may be compared, and what the reader is told."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest

from pwbench import results
from pwbench.report import build, formats, studies, tables
from pwbench.report.contenders import ONE_PRECISION, Contender
from tests.rows import CAPTURES, row, suite_rows, unavailable

TWO = CAPTURES[:2]
BOTH = ("six", "batch")


def report_of(tmp_path, rows, **options):
    results.write(tmp_path / "rows.parquet", rows)
    return build(results.load(tmp_path), **options)


def geomeans(report, index=0):
    return {c.full: mean.value for c, mean in report.scopes[index].geomeans.items()}


def test_the_geomean_is_that_of_the_captures_ratios(tmp_path):
    rows = [
        row("flashinfer", c, complete_us=t, precision="accurate", noise=0.0)
        for c, t in (("a", 200), ("b", 300))
    ]
    rows += [row("union8", c, complete_us=100, noise=0.0) for c in ("a", "b")]
    report = report_of(tmp_path, rows)
    assert geomeans(report)["union8 (fast)"] == pytest.approx(6**0.5, rel=1e-2)
    assert report.scopes[0].counted(Contender("union8", "fast", None)) == 2


def test_a_baseline_with_one_precision_is_compared_with_both(tmp_path):
    report = report_of(tmp_path, suite_rows(captures=TWO))
    assert {"pageweaver (fast)", "pageweaver (accurate)", "flashinfer (accurate)"} <= set(geomeans(report))
    assert report.scopes[0].baseline_label == "flashinfer"


def test_a_baseline_with_both_precisions_is_compared_precision_by_precision(tmp_path):
    rows = [row("union8", complete_us=100), row("union8", complete_us=150, precision="accurate")]
    rows += [row("pageweaver", complete_us=50), row("pageweaver", complete_us=100, precision="accurate")]
    means = geomeans(report_of(tmp_path, rows, baseline="union8"))
    assert means["pageweaver (fast)"] == pytest.approx(2, rel=0.02)
    assert means["pageweaver (accurate)"] == pytest.approx(1.5, rel=0.02)


@pytest.mark.parametrize(
    "change",
    [{"device": "cpu", "gpu": "Xeon", "mode": "eager"}, {"gpu": "NVIDIA H100"}, {"mode": "eager"},
     {"l2": "warm"}, {"suite": "extremes"}],
)  # fmt: skip
def test_rows_that_were_not_measured_alike_never_meet(tmp_path, change):
    rows = suite_rows(captures=TWO) + [{**r, **change} for r in suite_rows(captures=TWO)]
    report = report_of(tmp_path, rows)
    assert len(report.scopes) == 2
    for scope in report.scopes:
        assert all(scope.counted(c) == 2 for c in scope.geomeans)
        for row_ in scope.cells.values():
            assert (row_["suite"], row_["device"], row_["gpu"], row_["mode"], row_["l2"]) == (
                scope.suite, scope.device, scope.gpu, scope.mode, scope.l2)  # fmt: skip


def test_made_up_suites_come_last(tmp_path):
    rows = suite_rows("extremes", TWO) + suite_rows("zebra", TWO) + suite_rows("six", TWO)
    rows += suite_rows("six", TWO, device="cpu", gpu="Xeon", mode="eager")
    order = [(s.suite, s.device) for s in report_of(tmp_path, rows).scopes]
    assert order == [("six", "cuda"), ("zebra", "cuda"), ("six", "cpu"), ("extremes", "cuda")]


def test_cpu_rows_are_compared_with_the_reference_and_the_report_says_so(tmp_path):
    cpu = {"device": "cpu", "gpu": "Xeon", "mode": "eager"}
    report = report_of(
        tmp_path, [row("reference", complete_us=200, **cpu), row("union8", complete_us=100, **cpu)]
    )
    assert report.scopes[0].baseline == "reference"
    assert report.scopes[0].note.startswith("CPU rows: baseline reference")
    assert geomeans(report)["union8 (fast)"] == pytest.approx(2, rel=0.02)


def test_without_the_baseline_there_is_no_speedup_and_the_reason_is_named(tmp_path):
    rows = [row("union8"), unavailable("flashinfer", "FlashInfer is not installed.", precision="accurate")]
    report = report_of(tmp_path, rows)
    assert report.scopes[0].baseline is None
    assert report.scopes[0].speedups == {}
    assert "flashinfer has no result here (FlashInfer is not installed)" in report.scopes[0].note
    assert "--fallback union8" in report.scopes[0].tip


def test_a_fallback_is_used_only_when_the_user_names_one(tmp_path):
    rows = [row("union8", complete_us=100), row("pageweaver", complete_us=50)]
    report = report_of(tmp_path, rows, fallback="union8")
    assert report.scopes[0].baseline == "union8"
    assert "compared with union8, as asked" in report.scopes[0].note


def test_the_newest_row_counts(tmp_path):
    rows = [row("flashinfer", complete_us=200), row("union8", complete_us=100),
            row("union8", complete_us=50, created_utc="2026-02-01T00:00:00+00:00")]  # fmt: skip
    assert geomeans(report_of(tmp_path, rows))["union8 (fast)"] == pytest.approx(4, rel=0.02)


def test_rows_of_different_sessions_are_compared_unpaired_with_a_warning(tmp_path):
    report = report_of(tmp_path, [row("flashinfer", complete_us=200), row("union8", session="another")])
    assert not next(iter(report.scopes[0].speedups.values())).paired or len(report.scopes[0].speedups) == 2
    assert report.scopes[0].speedups[Contender("union8", "fast", None), "code-8k"].paired is False
    assert any("compare rows of two different sessions" in warning for warning in report.warnings)


def test_a_partner_of_the_same_session_is_preferred_to_a_newer_one(tmp_path):
    rows = [row("flashinfer", complete_us=200), row("union8", complete_us=100),
            row("flashinfer", complete_us=300, session="later", created_utc="2026-03-01")]  # fmt: skip
    assert geomeans(report_of(tmp_path, rows))["union8 (fast)"] == pytest.approx(2, rel=0.02)


def test_rows_measured_on_other_selections_are_left_out_with_a_warning(tmp_path):
    rows = [row("flashinfer", complete_us=200, tables_sha256="0" * 64), row("flashinfer", complete_us=300),
            row("union8", complete_us=100, created_utc="2026-03-01T00:00:00+00:00")]  # fmt: skip
    report = report_of(tmp_path, rows)
    assert geomeans(report)["union8 (fast)"] == pytest.approx(3, rel=0.02)
    assert any("other selections" in warning for warning in report.warnings)


def test_rows_on_seeded_tensors_of_another_generator_are_left_out_with_a_warning(tmp_path):
    rows = [row("flashinfer", complete_us=200), row("union8", complete_us=150),
            row("flashinfer", complete_us=300, generator="pcg64/2", created_utc="2026-03-01"),
            row("union8", complete_us=100, generator="pcg64/2", created_utc="2026-03-01")]  # fmt: skip
    report = report_of(tmp_path, rows)
    assert geomeans(report)["union8 (fast)"] == pytest.approx(3, rel=0.02)
    assert any("of another generator" in warning for warning in report.warnings)
    # Nor does the baseline of the old one stand in for a missing new one.
    alone = report_of(tmp_path, [rows[0], rows[3]])
    assert "union8 (fast)" not in geomeans(alone)


def test_seeded_and_stored_tensors_of_one_capture_are_not_mixed(tmp_path):
    rows = [row("flashinfer", complete_us=200), row("union8", complete_us=100),
            row("flashinfer", complete_us=400, tensors="stored"),
            row("union8", complete_us=100, tensors="stored")]  # fmt: skip
    report = report_of(tmp_path, rows)
    assert geomeans(report)["union8 (fast)"] == pytest.approx(4, rel=0.02)  # a tie goes to the stored ones


def test_few_samples_throttling_outliers_and_clocks_are_said(tmp_path):
    values = np.where(np.arange(100) % 10 == 0, 500.0, 100.0)
    rows = [row("flashinfer", samples=8), row("union8", throttle="SW power cap"),
            row("triton", complete_samples=values.tolist(), complete_us=100.0),
            row("pageweaver", sm_clock_mhz=1500.0)]  # fmt: skip
    text = " ".join(report_of(tmp_path, rows).warnings)
    assert "1 of 4 rows have fewer than 20 samples" in text
    assert "held back while 1 of 4 rows were sampled (SW power cap)" in text
    assert re.search(r"In [12] of 4 rows more than 5% of the samples are outliers", text)
    assert "SM clocks differ between rows that are compared (1500 to 1980 MHz)" in text


def test_a_cause_is_one_sentence_however_many_suites_and_rounds_it_was_seen_in(tmp_path):
    rows = [row(v, c, suite=s, throttle=f"power cap in {n} rounds")
            for n, (v, c, s) in enumerate(product(("union8", "flashinfer"), TWO, BOTH))]  # fmt: skip
    rows += [row("union8", TWO[0], suite="extremes", throttle="thermal in 1 round; power cap in 3 rounds")]
    rows += [row("union8", TWO[1], suite="extremes")]
    (caution,) = [c for c in report_of(tmp_path, rows).cautions if "held back" in c.text]
    assert "while 9 of 10 rows were sampled (power cap, thermal)" in caution.text
    config = "NVIDIA H200, CUDA graph, cold L2"
    assert caution.where == tuple(
        [f"{s}/{c} ({config}): 2 of 2 rows" for s in BOTH for c in TWO]
        + [f"extremes/{TWO[0]} ({config}): 1 of 1 rows"]
    )


def test_every_caution_says_where_it_holds(tmp_path):
    rows = [row("flashinfer", samples=8), row("union8", throttle="power cap"),
            row("triton", complete_samples=[100.0] * 80 + [500.0] * 20, complete_us=100.0),
            row("pageweaver", sm_clock_mhz=1500.0), row("union8-regroup", session="another")]  # fmt: skip
    rows += [row("union8", TWO[1], tables_sha256="0" * 64), row("union8", TWO[1], created_utc="2026-02-01")]
    cautions = report_of(tmp_path, rows).cautions
    assert len(cautions) == 6
    for caution in cautions:
        assert caution.where and all(place.startswith("six") for place in caution.where), caution


def test_nothing_is_called_faster_on_three_samples(tmp_path):
    report = report_of(tmp_path, [row("flashinfer", complete_us=200, samples=3), row("union8", samples=3)])
    scope = report.scopes[0]
    assert scope.says(Contender("union8", "fast", None)) == "unsure"
    assert not scope.geomeans[Contender("union8", "fast", None)].known


def test_regrouping_is_split_into_what_attention_saves_and_what_the_search_costs(tmp_path):
    report = report_of(tmp_path, suite_rows(captures=("code-8k",)))
    gain = next(g for g in report.scopes[0].gains if g.contender.variant == "union8-regroup")
    assert gain.net_us == pytest.approx(5, abs=0.5)
    assert gain.attention_saved_us == pytest.approx(11)
    assert gain.overhead_paid_us == pytest.approx(6)
    assert gain.precomputed is not None
    assert gain.precomputed_ratio.value > gain.online_ratio.value > 1


def test_any_kernel_that_follows_the_naming_has_its_regroup_gain(tmp_path):
    rows = [row("mine", complete_us=100), row("mine-regroup", complete_us=90, search_us=3.0)]
    gains = report_of(tmp_path, rows).scopes[0].gains
    assert [(g.contender.variant, g.precomputed) for g in gains] == [("mine-regroup", None)]


def test_windows_are_apart_and_matched_with_their_own_precomputed_path(tmp_path):
    rows = [row("union8", complete_us=100)]
    for window, time in ((64, 95), (128, 90)):
        rows.append(row("union8-regroup", complete_us=time, window=window))
        rows.append(row("union8-precomputed", complete_us=time - 5, window=window))
    gains = report_of(tmp_path, rows).scopes[0].gains
    assert {g.contender.window: round(g.precomputed["complete_us"]) for g in gains} == {64: 90, 128: 85}
    assert {g.contender.label for g in gains} == {"union8-regroup W64", "union8-regroup"}


def test_a_kernel_that_chooses_by_itself_is_one_contender_where_it_searches_and_where_not(tmp_path):
    rows = [row("flashinfer", c, complete_us=200) for c in ("a", "b")]
    rows += [row("pageweaver", "a", complete_us=50, window=64), row("pageweaver", "b", complete_us=50)]
    report = report_of(tmp_path, rows)
    means = {c.label: report.scopes[0].counted(c) for c in report.scopes[0].contenders}
    assert means == {"flashinfer": 2, "pageweaver": 2}


def test_a_kernel_that_chose_to_search_shows_what_that_gained(tmp_path):
    rows = [row("pageweaver", "a", complete_us=95, window=64), row("pageweaver-original", "a")]
    rows += [row("pageweaver", "b"), row("pageweaver-original", "b")]
    (gain,) = report_of(tmp_path, rows).scopes[0].gains
    assert (gain.capture, gain.kernel, gain.window) == ("a", "pageweaver", 64)
    rows += [row("pageweaver-regroup", "a", complete_us=90, window=64)]
    (gain,) = report_of(tmp_path, rows).scopes[0].gains
    assert gain.contender.variant == "pageweaver-regroup"


def test_a_variant_with_one_arithmetic_is_shown_once_and_never_as_fast_or_accurate(tmp_path):
    for variant in ONE_PRECISION:
        rows = [row(variant, precision=p, complete_us=200, rel_l2=2e-3) for p in ("fast", "accurate")]
        rows += [row("union8", precision=p) for p in ("fast", "accurate")]
        for kept in (rows, rows[1:], [rows[0], *rows[2:]]):
            scope = report_of(tmp_path, kept, baseline=variant).scopes[0]
            mine = [c for c in scope.shown if c.variant == variant]
            assert [scope.named(c) for c in mine] == [f"{variant} (own precision)"]
            assert [scope.precision_of(c) for c in mine] == ["its own"]
            assert scope.baseline_label == variant
            (tmp_path / "rows.parquet").unlink()


def test_results_that_differ_between_precisions_are_never_hidden(tmp_path):
    rows = [row(v, precision=p, rel_l2=e) for v in ("flashinfer", "triton", "union8")
            for p, e in (("fast", 2e-3), ("accurate", 1e-3))]  # fmt: skip
    scope = report_of(tmp_path, rows).scopes[0]
    assert len(scope.shown) == len(scope.contenders) == 6
    assert {scope.precision_of(c) for c in scope.shown} == {"fast", "accurate"}


def test_no_table_calls_a_variant_with_one_arithmetic_fast_or_accurate(tmp_path):
    rows = []
    for l2, kind, precision in product(("cold", "warm"), ("stored", "seeded"), ("fast", "accurate")):
        how = {"l2": l2, "tensors": kind, "precision": precision}
        rows += [row(v, **how) for v in ("union8", "flashinfer", "flashinfer-cake", "triton")]
        rows += [unavailable("flashinfer-paged", "not installed", **how)]
    report = report_of(tmp_path, rows)
    made = [*formats.all_tables(report), *formats.sections(report, report.scopes)]
    made += [tables.values(report, scope) for scope in report.scopes]
    checked = 0
    for table in (table for table in made if "precision" in table.columns):
        at = table.columns.index("precision")
        mine = [cells for cells in table.rows if set(cells) & set(ONE_PRECISION)]
        assert {cells[at] for cells in mine} <= {"its own"}, (table.title, mine)
        keys = [tuple(cells[: at + 1]) for cells in mine]
        assert len(keys) == len(set(keys)), "one line each"
        checked += bool(mine)
    assert checked >= 9


def test_windows_of_a_baseline_are_not_taken_for_precisions_of_it(tmp_path):
    rows = [row("union8-regroup", window=w) for w in (64, 128)]
    scope = report_of(tmp_path, rows, baseline="union8-regroup").scopes[0]
    assert [scope.precision_of(c) for c in scope.shown] == ["fast", "fast"]


def test_the_variants_with_one_arithmetic_are_those_that_offer_both_precisions_and_are_not_ours():
    from pwbench import variants

    ours = ("union8", "pageweaver", "page-union")
    offered = {name for name in variants.names() if len(variants.get(name).precisions) == 2}
    assert set(ONE_PRECISION) == {name for name in offered if not name.startswith(ours)}


def test_a_precision_without_rows_is_named_in_every_scope_that_lacks_it(tmp_path):
    both = [row("union8", precision=p) for p in ("fast", "accurate")]
    only = [row("union8", suite="six-2k"), row("flashinfer", suite="six-2k", precision="accurate")]
    exact = [row("union8", suite="batch", precision="accurate")]
    peers = [row("triton", suite="five-64k"), row("flashinfer", suite="five-64k")]
    scopes = {s.suite: s for s in report_of(tmp_path, both + only + exact + peers).scopes}
    assert {name: scope.unmeasured for name, scope in scopes.items()} == {
        "six": [], "six-2k": ["accurate"], "batch": ["fast"], "five-64k": []
    }  # fmt: skip


LATER = {"session": "later", "created_utc": "2026-03-01T00:00:00+00:00"}


def test_a_gain_is_over_the_original_order_of_its_own_session(tmp_path):
    rows = [row("union8", complete_us=100), row("union8-regroup", complete_us=90),
            row("union8", complete_us=120, **LATER)]  # fmt: skip
    (gain,) = report_of(tmp_path, rows).scopes[0].gains
    assert gain.online_ratio.paired and gain.online_ratio.value == pytest.approx(100 / 90, rel=0.02)


def test_windows_of_different_sessions_stand_beside_their_own_gains(tmp_path):
    rows = [row("union8", complete_us=100), row("union8-regroup", complete_us=90),
            row("union8", complete_us=120, **LATER),
            row("union8-regroup", complete_us=114, window=64, **LATER)]  # fmt: skip
    report = report_of(tmp_path, rows)
    (cells,) = studies.windows(report, report.scopes).rows
    small, large = (float(cell.removesuffix(" %")) for cell in cells[8:10])
    assert small == pytest.approx(5, abs=1) and large == pytest.approx(10, abs=1)


def test_stored_and_seeded_tensors_are_compared_inside_one_session_and_l2_state(tmp_path):
    rows = []
    for l2, us in (("cold", 100), ("warm", 80)):
        rows += [row("union8", l2=l2, complete_us=us, tensors=kind, **LATER) for kind in ("stored", "seeded")]
        rows.append(row("union8", l2=l2, complete_us=us * 1.3, created_utc="2026-04-01T00:00:00+00:00"))
    report = report_of(tmp_path, rows)
    table = studies.tensors(report, report.scopes)
    assert [(cells[2], cells[7], cells[10]) for cells in table.rows] == [
        ("cold", "1.000", "same"), ("warm", "1.000", "same")
    ]  # fmt: skip
    assert table.notes[0].startswith("same in 2 of 2 pairs")


def test_cold_and_warm_are_compared_on_the_same_tensors_of_one_session(tmp_path):
    rows = [row("union8", l2=l2, complete_us=us, tensors="stored", **LATER)
            for l2, us in (("cold", 100), ("warm", 80))]  # fmt: skip
    rows += [row("union8", complete_us=130), row("union8", complete_us=131)]
    report = report_of(tmp_path, rows)
    ((*_, ratio, _captures),) = studies.cache(report, report.scopes).rows
    assert float(ratio) == pytest.approx(1.25, rel=0.02)


def test_errors_on_real_values_stand_below_what_the_fp8_cache_costs(tmp_path):
    stored = {"tensors": "stored", "fp8_cache_rel_l2": 0.031}
    errors = {"fast": 0.021, "accurate": 0.0018}
    rows = [row("union8", c, rel_l2=e, precision=p, **stored) for c in TWO for p, e in errors.items()]
    rows += [row("union8", c, rel_l2=0.5) for c in TWO]
    report = report_of(tmp_path, rows)
    table = tables.values(report, report.scopes[0])
    assert table.columns == ["what", "precision", *TWO]
    assert table.rows == [
        ["the FP8 cache itself", "", "3.1e-2", "3.1e-2"],
        ["union8", "fast", "2.1e-2", "2.1e-2"],
        ["union8", "accurate", "1.8e-3", "1.8e-3"],
    ]


@pytest.mark.parametrize("same", ["commit", "tensors", "tables_sha256", None])
def test_a_row_that_took_turns_with_the_baseline_stands_for_an_equivalent_newer_one(same, tmp_path):
    change = {} if same is None else {same: "stored" if same == "tensors" else "other"}
    newer = [row("union8", complete_us=80, **{**LATER, **change})]
    if same == "tensors":
        newer += [row("page-union", **LATER, **change), row("triton", **LATER, **change)]
    rows = [row("flashinfer", complete_us=200), row("union8", complete_us=100), *newer]
    scope = report_of(tmp_path, rows).scopes[0]
    shown = scope.cells[Contender("union8", "fast", None), "code-8k"]
    assert (shown["session"] == "later") == (same is not None), "older code never stands for newer"


@pytest.mark.parametrize("others", [(), ("triton", "page-union"), ("triton", "page-union", "reference")])
def test_which_row_is_compared_does_not_hang_on_what_else_was_measured(others, tmp_path):
    third = {"session": "third", "created_utc": "2026-04-01T00:00:00+00:00"}
    rows = [row(v, complete_us=us) for v, us in (("flashinfer", 200), ("union8", 100), ("pageweaver", 50))]
    rows += [row(v, complete_us=us, **LATER) for v, us in (("flashinfer", 210), ("union8", 101))]
    rows += [row("union8", complete_us=102, **third)] + [row(v) for v in others]
    report = report_of(tmp_path, rows)
    scope = report.scopes[0]
    sessions = {c.variant: row_["session"] for (c, _), row_ in scope.cells.items()}
    assert sessions == {"flashinfer": "later", "union8": "later"} | dict.fromkeys(
        ("pageweaver", *others), rows[0]["session"]
    )
    assert all(ratio.paired for ratio in scope.speedups.values())
    assert not any("different sessions" in warning for warning in report.warnings)
    elsewhere = {c.variant for c in scope.contenders if scope.elsewhere(c, "code-8k")}
    assert elsewhere == {"pageweaver", *others}, "their own session's baseline is not the one shown"


def test_the_times_printed_give_the_speedup_printed_or_the_row_is_marked(tmp_path):
    rows = [row("flashinfer", complete_us=200), row("flashinfer", complete_us=230, precision="accurate"),
            row("union8", complete_us=100), row("union8", complete_us=150, precision="accurate"),
            row("pageweaver", complete_us=50, **{**LATER, "commit": "other"})]  # fmt: skip
    report = report_of(tmp_path, rows)
    table = tables.details(report, report.scopes[0])
    time = {(c[1], c[2]): float(c[table.columns.index("complete, us")]) for c in table.rows}
    checked = 0
    for cells in table.rows:
        given = time["flashinfer", "its own"] / time[cells[1], cells[2]]
        if not cells[3].endswith(tables.ELSEWHERE):
            assert float(cells[3].rstrip("x")) == pytest.approx(given, abs=0.011)
            checked += 1
    assert 0 < checked < len(table.rows)
    assert [tables.ELSEWHERE in note for note in table.notes] == [True]


def test_the_caution_on_sessions_names_who_is_compared_across_them(tmp_path):
    power = {"throttle": "power cap in 3 rounds"}
    rows = [row("flashinfer", complete_us=200, **power), row("union8", **power),
            row("pageweaver", complete_us=50, session="another", **power)]  # fmt: skip
    held, apart = report_of(tmp_path, rows).warnings
    assert "Variants of one session took turns" in held
    assert apart.startswith("1 of 3 speed-ups compare rows of two different sessions")
    assert "(six: pageweaver (fast))" in apart


@pytest.mark.parametrize("current", ["seeded", "stored"])
def test_errors_on_both_kinds_of_tensors_stand_apart_and_the_headlines_kind_is_named(current, tmp_path):
    errors = {("seeded", "fast"): 5e-2, ("stored", "fast"): 4e-2}
    errors |= {("seeded", "accurate"): 1.8e-3, ("stored", "accurate"): 3.9e-3}
    rows = [
        row("union8", c, rel_l2=e, precision=p, tensors=kind) for c in TWO for (kind, p), e in errors.items()
    ]
    rows += [row("pageweaver", c, rel_l2=7e-2, tensors=current) for c in TWO]
    scope = report_of(tmp_path, rows).scopes[0]
    table = tables.accuracy(None, scope)
    found = {(cells[0], cells[1], cells[2]): cells[3] for cells in table.rows}
    names = {"seeded": "seeded", "stored": "the model's own"}
    for (kind, precision), value in errors.items():
        assert found[names[kind], "union8", precision] == f"{value:.1e}".replace("e-0", "e-")
    kinds = [cells[0] for cells in table.rows]
    assert kinds[0] == names[current] and len(table.breaks) == 2
    assert kinds == sorted(kinds, key=kinds.index), "each kind in one block"
    assert ("pageweaver" in {c[1] for c in table.rows if c[0] == names[current]}) and len(found) == 5
    assert any(f"are of rows on tensors: {names[current]}." in note for note in table.notes)
    assert any("accurate, 2.5e-3, is meant on seeded tensors" in note for note in table.notes)


@pytest.mark.parametrize("variant", ["flashinfer", "triton", "flashinfer-cake", "pageweaver"])
def test_counters_of_what_does_not_tell_how_it_shares_are_left_blank(variant, tmp_path):
    alone = {"groups": 8192, "union_pages": 131072, "subgroup_pages": None}
    rows = [row("union8", c) for c in TWO] + [row(variant, c, **alone) for c in TWO]
    table = tables.counters(None, report_of(tmp_path, rows).scopes[0])
    by = {cells[2]: cells for cells in table.rows}
    assert all(by["union8"])
    known = {"capture", "context", "grouping of", "selected pages"}
    assert {name for name, cell in zip(table.columns, by[variant], strict=True) if cell} == known
    assert any(note.startswith(f"{variant}: how queries share pages is not counted") for note in table.notes)


def test_provenance_tells_libraries_from_how_our_kernels_divide_their_work(tmp_path):
    rows = [row("flashinfer", peer="flashinfer 0.7.4: CuTe union"), row("triton", peer="triton 3.6.0")]
    rows += [row(v, peer="3 chunks of 2752 rows") for v in ("page-union", "page-union-stream")]
    rows += [row("union8"), row("pageweaver")]
    found = dict(studies.provenance(report_of(tmp_path, rows)).rows)
    assert found["other libraries"] == "flashinfer 0.7.4: CuTe union; triton 3.6.0"
    assert found["how our kernels divided the work"] == "3 chunks of 2752 rows"


def test_every_variant_of_ours_is_known_as_ours_and_no_other():
    from pwbench import variants

    theirs = {"reference", "triton", "flashinfer", "flashinfer-cake", "flashinfer-paged"}
    assert {name for name in variants.names() if not name.startswith(studies.OURS)} == theirs


@pytest.mark.parametrize("windows", [(128,), (64, 128)])
def test_a_window_in_a_name_is_explained_below_the_table(windows, tmp_path):
    table = tables.geomean(
        None, report_of(tmp_path, [row("union8-regroup", window=w) for w in windows]).scopes[0]
    )
    explained = any("A name without it means 128 for union8, and 64 for pageweaver" in n for n in table.notes)
    assert explained == (64 in windows)


def test_sweeps_and_shapes_are_made_up(tmp_path):
    rows = [row(suite=name) for name in ("shapes", "affinity", "six")]
    assert [s.suite for s in report_of(tmp_path, rows).scopes if not s.synthetic] == ["six"]
