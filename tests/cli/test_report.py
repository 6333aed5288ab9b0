"""``pwbench report``: each format on stdout or in a file, filters, documents, and refusals."""

from __future__ import annotations

import io
import json

import pytest
from click.testing import CliRunner

from pwbench import results
from pwbench.cli.main import main
from tests.rows import CAPTURES, row, suite_rows


def run(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.parquet"
    results.write(path, suite_rows(captures=CAPTURES[:2]) + suite_rows("extremes", CAPTURES[:1]))
    return path


def test_the_terminal_report_shows_speedups_stages_regrouping_and_what_is_missing(stored):
    text = run(stored).stdout
    for part in ("Geomean speed-up, six", "2.27x", "2.26", "Each capture, six", "code-8k",
                 "where the time goes",
                 "Regrouping, six", "net gain", "Triton is not installed", "█"):  # fmt: skip
        assert part in text
    assert max(map(len, text.splitlines())) <= 150


def test_brief_leaves_the_captures_out(stored):
    text = run(stored, "--brief").stdout
    assert "Geomean speed-up, six" in text
    assert "Each capture" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_narrow_terminal_gets_fewer_columns_but_never_half_a_number(stored, width):
    from rich.console import Console

    from pwbench.cli import _report_view
    from pwbench.report import build, tables

    report = build(results.load(stored))
    console = Console(width=width, record=True, file=io.StringIO())
    _report_view._details(console, report, report.scopes[0])
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    table = tables.details(report, report.scopes[0])
    assert all(cells[1] in text and cells[3] in text for cells in table.rows)
    assert ("search" in text.split("where")[0]) or width < 100


def test_json_is_alone_on_stdout(stored):
    for arguments in (["--json"], ["--format", "json"]):
        result = run(stored, *arguments)
        assert result.exit_code == 0
        data = json.loads(result.stdout)
        assert set(data["suites"]["six"]["variants"]["union8"]) >= {"geomean_speedup", "ci", "rows"}


@pytest.mark.parametrize(
    ("form", "start"),
    [("markdown", "# pwbench report"), ("csv", "session,"), ("html", "<!doctype html>"), ("json", "{")],
)
def test_every_format_can_be_written_to_a_file(tmp_path, stored, form, start):
    out = tmp_path / "deep" / "report"
    result = run(stored, "--format", form, "--out", out, "--captures", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert out.read_text().startswith(start)
    assert result.stdout == ""
    assert f"wrote {out}" in result.stderr


def test_only_the_suites_asked_for_are_reported(stored):
    data = json.loads(run(stored, "--suite", "six", "--json").stdout)
    assert list(data["suites"]) == ["six"]


def test_another_baseline_can_be_named(stored):
    data = json.loads(run(stored, "--baseline", "union8", "--json").stdout)
    assert data["baseline"] == "union8"
    assert data["suites"]["six"]["variants"]["flashinfer"]["geomean_speedup"] == pytest.approx(
        1 / 1.7, rel=0.02
    )


def test_a_fallback_serves_where_the_baseline_has_no_rows(tmp_path):
    results.write(tmp_path / "a.parquet", [row("union8"), row("pageweaver", complete_us=50)])
    path = tmp_path / "a.parquet"
    assert "Name --fallback pageweaver" in run(path).stdout
    assert "compared with union8, as asked" in run(path, "--fallback", "union8").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.parquet"], "There are no results at absent.parquet"),
        (["--suite", "seven"], "The results have no suite 'seven'; there are extremes, six."),
        (["--check"], "--check goes with --fill"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(stored, arguments, message):
    result = run(*([] if arguments[0].endswith(".parquet") else [stored]), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_no_result_named_means_the_results_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run().exit_code == 2
    results.write(tmp_path / "results" / "a.parquet", suite_rows(captures=CAPTURES[:1]))
    assert "Geomean speed-up, six" in run().stdout


def test_documents_are_filled_and_checked(tmp_path, stored):
    page = tmp_path / "page.md"
    page.write_text("<!-- table:geomean suite=six -->\n<!-- end -->\n")
    stale = run(stored, "--fill", page, "--check")
    assert stale.exit_code == 1
    assert "differs from what the stored results give; run `pwbench report --fill" in stale.stderr
    assert run(stored, "--fill", page).exit_code == 0
    assert "pageweaver-regroup" in page.read_text()
    assert run(stored, "--fill", page, "--check").exit_code == 0


def test_documents_can_be_filled_before_anything_was_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text("<!-- table:geomean suite=six -->\n<!-- end -->\n")
    assert run("--fill", "page.md").exit_code == 0
    assert "No rows yet" in (tmp_path / "page.md").read_text()
