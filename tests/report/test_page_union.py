"""The page-union study: tables, places in the document, and where the break-even comes from."""

import re
from dataclasses import replace

import pytest

from pwbench import results
from pwbench.capture import synthetic
from pwbench.errors import InputError
from pwbench.report.page_selections import Selections
from pwbench.report.page_union import DOCUMENT, Study, break_even
from tests.rows import row as make_row

NAMES = ("reuse", "cost", "affinity", "chunks", "hybrid")


def selections(name, affinity, suite="made"):
    call = synthetic.generate(20_000, 1024, affinity=affinity, seed=1).call
    return Selections(suite, name, call, affinity)


@pytest.fixture(scope="module")
def points():
    return [selections("low", 0.1), selections("high", 0.95)]


def measured(tmp_path, times):
    """A results frame: ``{(capture, variant): complete_us}``."""
    rows = [
        make_row(variant, capture, suite="made", complete_us=us)
        | {"complete_us": us, "attention_us": us / 2, "reduction_us": us / 4}
        for (capture, variant), us in times.items()
    ]
    results.write(tmp_path / "x.parquet", rows)
    return results.load(tmp_path / "x.parquet")


def test_every_table_has_a_row_for_each_capture_and_no_measurement_is_invented(points):
    study = Study(points, points)
    for name in NAMES:
        table = getattr(study, name)()
        assert len(table.rows) >= 1
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert all(row[-6:] == ["-"] * 6 for row in study.cost().rows)
    assert "No stored result" in study.provenance()


def test_measured_times_stand_beside_the_predictions(points, tmp_path):
    times = {("low", "page-union"): 301.0, ("low", "union8"): 402.0, ("high", "page-union"): 303.0,
             ("high", "union8"): 204.0}  # fmt: skip
    study = Study(points, points, measured(tmp_path, times))
    row = next(row for row in study.cost().rows if row[0] == "made/low")
    assert row[-6:] == ["150", "75", "301", "-", "402", "-"]
    assert "Measured with union8: affinity 0." in study.affinity().notes[0]
    assert "Measured on" in study.provenance()


def test_rows_of_other_settings_are_not_taken(points, tmp_path):
    frame = measured(tmp_path, {("low", "page-union"): 301.0})
    for column, other in (("device", "cpu"), ("mode", "eager"), ("l2", "warm"), ("status", "failed")):
        assert Study(points, (), frame.assign(**{column: other})).times == {}


def test_times_of_the_session_that_measured_page_union_are_preferred(points, tmp_path):
    rows = [
        make_row("union8", "low", suite="made", complete_us=200.0) | {"complete_us": 200.0},
        make_row("page-union", "low", suite="made", complete_us=300.0),
        make_row("union8", "low", suite="made", complete_us=210.0, session="b", created_utc="2027-01-01")
        | {"complete_us": 210.0},
    ]
    results.write(tmp_path / "x.parquet", rows)
    assert Study(points, (), results.load(tmp_path)).time(points[0], "union8") == 200.0


def test_the_break_even_is_interpolated_between_the_points_around_it(points):
    low, high = points
    assert break_even(points, lambda one: (30.0, 20.0) if one is low else (10.0, 20.0)) == pytest.approx(
        (low.affinity + high.affinity) / 2
    )
    assert break_even(points, lambda one: (30.0, 20.0)) is None
    assert break_even(points, lambda one: (None, 20.0)) is None
    assert break_even([replace(high, affinity=None)], lambda one: (1.0, 2.0)) is None


def test_the_document_asks_only_for_tables_that_exist_and_is_filled_twice_alike(points):
    study = Study(points, points)
    text = DOCUMENT.read_text()
    filled = study.fill(text)
    assert study.fill(filled) == filled
    assert set(re.findall(r"<!-- study:([\w-]+) -->", text)) == {*NAMES, "provenance"}
    assert len(re.findall("<!-- end -->", text)) == len(NAMES) + 1


def test_an_unknown_table_is_refused(points):
    with pytest.raises(InputError, match="asks for study 'nonsense'"):
        Study(points).fill("<!-- study:nonsense -->\n<!-- end -->")


def test_the_figure_is_the_same_every_time(points):
    study = Study(points, points)
    first = study.figure()
    assert first.startswith("<?xml") and first == study.figure()


def test_no_capture_and_no_result_make_empty_tables():
    study = Study([])
    assert study.times == {}
    assert all(getattr(study, name)().rows == [] for name in NAMES)
