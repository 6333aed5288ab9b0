"""``pwbench doctor``: the verdict and its exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from click.testing import CliRunner

from pwbench.cli.main import main


def test_a_healthy_machine_is_exit_code_0(small_captures: Path) -> None:
    result = CliRunner().invoke(main, ["doctor", str(small_captures)])
    assert result.exit_code == 0, result.output
    assert "No problems." in result.stdout and "2 captures, every check holds" in result.stdout


def test_a_damaged_capture_is_a_problem_with_a_cure(small_captures: Path, tmp_path: Path) -> None:
    shutil.copytree(small_captures, tmp_path / "captures")
    with (tmp_path / "captures" / "small" / "two" / "queries.parquet").open("r+b") as file:
        file.truncate(100)
    result = CliRunner().invoke(main, ["doctor", str(tmp_path / "captures"), "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["healthy"] is False
    (problem,) = [one for one in report["findings"] if one["state"] == "problem"]
    assert problem["section"] == "captures" and "two" in problem["text"] and problem["mend"]
