"""Markdown, CSV and JSON say the same, and JSON has the promised shape."""

from __future__ import annotations

import io
import json

import pandas as pd
import pytest

from pwbench import report as library
from pwbench import results
from tests.rows import CAPTURES, row, suite_rows, unavailable

TWO = CAPTURES[:2]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    rows = suite_rows(captures=TWO) + suite_rows(captures=TWO, l2="warm") + suite_rows("extremes", TWO)
    rows += [row("union8-regroup", c, window=64, complete_us=97, search_us=4.0) for c in TWO]
    results.write(folder / "rows.parquet", rows)
    return library.build(results.load(folder))


def test_json_has_the_promised_shape(made):
    data = json.loads(json.dumps(library.data(made), allow_nan=False))
    assert data["baseline"] == "flashinfer"
    assert set(data["suites"]) == {"six", "extremes"}
    entry = data["suites"]["six"]["variants"]["pageweaver"]
    assert entry["geomean_speedup"] == pytest.approx(2.125, rel=0.02)
    assert entry["ci"][0] < entry["geomean_speedup"] < entry["ci"][1]
    assert entry["rows"] == 2


def test_a_variants_own_numbers_are_those_of_its_default_way_and_all_ways_are_listed(made):
    variants = library.data(made)["suites"]["six"]["variants"]
    entry = variants["pageweaver"]
    assert (entry["precision"], entry["mode"], entry["l2"]) == ("fast", "graph", "cold")
    assert set(entry["by"]) == {"cuda/fast/graph/cold", "cuda/accurate/graph/cold", "cuda/fast/graph/warm",
                                "cuda/accurate/graph/warm"}  # fmt: skip
    assert entry["by"]["cuda/fast/graph/cold"] == {k: v for k, v in entry.items() if k != "by"}
    assert variants["flashinfer"]["precision"] == "accurate"
    assert variants["union8-regroup"]["window"] == 128
    assert "cuda/fast/graph/cold/w64" in variants["union8-regroup"]["by"]


def test_json_rows_carry_the_columns_of_a_result(made):
    rows = library.data(made)["rows"]
    expected = {c.name for c in results.COLUMNS} - {"complete_samples", "stage_samples"}
    assert all(expected <= set(r) for r in rows)
    assert {r["status"] for r in rows} == {"ok", "unavailable"}


def test_without_any_baseline_the_speedup_is_null(tmp_path):
    results.write(tmp_path / "a.parquet", [row("union8"), unavailable("flashinfer", "not installed")])
    data = library.data(library.build(results.load(tmp_path)))
    entry = data["suites"]["six"]["variants"]["union8"]
    assert (entry["geomean_speedup"], entry["ci"], entry["rows"]) == (None, None, 1)
    assert "flashinfer" not in data["suites"]["six"]["variants"]


def test_cpu_only_results_name_the_baseline_that_was_used(tmp_path):
    cpu = {"device": "cpu", "gpu": "Xeon", "mode": "eager"}
    results.write(tmp_path / "a.parquet", [row("reference", complete_us=200, **cpu), row("union8", **cpu)])
    assert library.data(library.build(results.load(tmp_path)))["baseline"] == "reference"


def test_csv_has_one_line_per_row_with_speedups(made):
    frame = pd.read_csv(io.StringIO(library.csv(made)))
    assert len(frame) == len(made.rows)
    line = frame[(frame.variant == "union8") & (frame.l2 == "cold") & (frame.suite == "six")].iloc[0]
    assert line.speedup_low < line.speedup < line.speedup_high


def test_markdown_has_every_section(made):
    text = library.markdown(made)
    for heading in ("Geomean speed-up, six", "Speed-up per capture, six", "Where the time goes, six",
                    "Regrouping, six", "Accuracy, six", "Counters, six", "Roofline, six",
                    "Not measured, and why", "Provenance"):  # fmt: skip
        assert f"## {heading}" in text
    assert "extremes (made-up selections)" in text
    assert "Triton is not installed: pip install triton" in text


def test_markdown_tables_are_rectangular_and_pipes_are_escaped(made):
    table = library.formats.markdown_table(library.tables.Table("t", ["a", "b"], [["x|y", "1"]]))
    assert "x\\|y" in table
    for block in library.markdown(made).split("\n\n"):
        widths = {line.replace("\\|", "").count("|") for line in block.splitlines() if line.startswith("|")}
        assert len(widths) <= 1
