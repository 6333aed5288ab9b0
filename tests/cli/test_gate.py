"""``pwbench gate``: exit codes, blessing, and the files for CI systems."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from pwbench import results
from pwbench.capture import write
from pwbench.cli.main import main
from tests.calls import make_call
from tests.rows import row


def run(*arguments):
    return CliRunner().invoke(main, ["gate", *map(str, arguments)])


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A checkout with two captures and a blessed baseline of their counters."""
    monkeypatch.chdir(tmp_path)
    for index, name in enumerate(("one", "two")):
        write(tmp_path / "captures" / "small" / name, make_call(index, (19,)), kind="tables")
    assert run("--bless", "--why", "first").exit_code == 0
    return tmp_path


def results_file(path, *rows):
    results.write(path, rows)
    return path


def test_unchanged_captures_pass(repository):
    result = run()
    assert result.exit_code == 0
    assert result.stdout == "passed: 14 SAME\n"


def test_a_changed_capture_fails_until_it_is_blessed(repository):
    folder = repository / "captures" / "small" / "two"
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    write(folder, make_call(9, (21,)), kind="tables")
    failed = run()
    assert failed.exit_code == 1
    assert "small/two" in failed.stdout
    assert "the gate failed: 1 of 8 comparisons" in failed.stderr
    assert run("--bless", "--why", "two was recorded anew", "--who", "Ada").exit_code == 0
    assert run().exit_code == 0
    history = json.loads((repository / "results" / "counters.json").read_text())["blessed"]
    assert [(e["why"], e["who"] == "Ada") for e in history] == [
        ("first", False),
        ("two was recorded anew", True),
    ]


def test_some_captures_can_be_judged_or_blessed_alone(repository):
    assert run("--captures", repository / "captures" / "small" / "one").stdout == "passed: 7 SAME\n"
    one = repository / "captures" / "small" / "one"
    assert run("--captures", one, "--bless", "--why", "again").exit_code == 0
    assert run().stdout == "passed: 14 SAME\n"


def test_without_a_baseline_the_command_that_makes_one_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run()
    assert result.exit_code == 2
    assert "`pwbench gate --bless --why 'first'` makes one" in result.stderr


def test_a_slower_row_fails_and_ci_files_are_written(tmp_path):
    old = results_file(tmp_path / "old.parquet", row("union8", samples=200))
    new = results_file(tmp_path / "new.parquet", row("union8", samples=200, complete_us=110, session="b"))
    junit, summary = tmp_path / "out" / "gate.xml", tmp_path / "out" / "summary.md"
    summary.parent.mkdir()
    summary.write_text("# Before\n")
    result = run("--baseline", old, "--current", new, "--junit", junit, "--summary", summary)
    assert result.exit_code == 1
    assert "SLOWER" in result.stdout
    assert ElementTree.parse(junit).getroot().find("testsuite").get("failures") == "1"
    assert summary.read_text().startswith("# Before\n## pwbench gate: FAILED")


def test_the_same_results_pass(tmp_path):
    old = results_file(tmp_path / "old.parquet", row("union8", samples=200))
    result = run("--baseline", old, "--current", old)
    assert (result.exit_code, result.stdout) == (0, "passed: 1 SAME\n")


def test_unsure_passes_unless_strict(tmp_path):
    old = results_file(tmp_path / "old.parquet", row("union8", samples=6))
    assert run("--baseline", old, "--current", old).exit_code == 0
    assert run("--baseline", old, "--current", old, "--strict").exit_code == 1


def test_results_of_another_gpu_are_refused_with_exit_code_2(tmp_path):
    old = results_file(tmp_path / "old.parquet", row("union8"))
    new = results_file(tmp_path / "new.parquet", row("union8", gpu="NVIDIA H100"))
    result = run("--baseline", old, "--current", new)
    assert result.exit_code == 2
    assert "differ in gpu" in result.stderr


def test_times_are_blessed_with_who_when_and_why(tmp_path):
    old = results_file(tmp_path / "old.parquet", row("union8", samples=200))
    new = results_file(tmp_path / "new.parquet", row("union8", samples=200, complete_us=110, session="b"))
    arguments = ("--baseline", old, "--current", new)
    assert run(*arguments).exit_code == 1
    assert run(*arguments, "--bless", "--why", "more exact, 10 % slower", "--who", "Ada").exit_code == 0
    assert run(*arguments).exit_code == 0
    (entry,) = results.describe(old)["provenance"]["blessed"]
    assert (entry["who"], entry["why"]) == ("Ada", "more exact, 10 % slower")


def test_json_lists_every_finding_even_when_the_gate_fails(tmp_path):
    old = results_file(tmp_path / "old.parquet", row("union8", samples=200))
    new = results_file(tmp_path / "new.parquet", row("union8", samples=200, complete_us=110))
    result = run("--baseline", old, "--current", new, "--json")
    data = json.loads(result.stdout)
    assert (result.exit_code, data["passed"], data["counts"]) == (1, False, {"SLOWER": 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bless"], "needs a reason"),
        (["--current", "new.parquet", "--captures", "captures"], "exclude each other"),
        (["--baseline", "old.parquet"], "name the results to judge with --current"),
        (["--baseline", "old.parquet", "--bless", "--why", "x"], "name the results with --current"),
        (["--current", "new.parquet", "--bless", "--why", "x"], "leave --current out"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(repository, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_results_are_held_against_the_blessed_counters(repository):
    from pwbench.capture import load
    from pwbench.counter_baseline import count_capture

    capture = load(repository / "captures" / "small" / "one")
    where = {"suite": "small", "capture": "one", "tables_sha256": capture.tables_sha256}
    counted = count_capture(capture)["original"]
    good = results_file(repository / "good.parquet", row("union8", **where, **counted))
    bad = results_file(repository / "bad.parquet", row("union8", **where, **{**counted, "union_pages": 1}))
    assert run("--current", good).stdout == "passed: 1 SAME\n"
    assert run("--current", bad).exit_code == 1
