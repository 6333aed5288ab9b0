"""``pwbench replay``: what is printed where, and the exit code."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pwbench import results
from pwbench.cli.main import main
from pwbench.columns import COLUMNS


def _replay(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


def test_json_on_stdout_is_the_rows_and_nothing_else(small_captures: Path) -> None:
    result = _replay(small_captures, "-v", "union8", "--samples", 2, "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [row["capture"] for row in rows] == ["one", "two"]
    assert list(rows[0]) == [column.name for column in COLUMNS]
    assert rows[0]["device"] == "cpu" and rows[0]["precision"] == "fast" and rows[0]["l2"] == "cold"


def test_a_person_sees_one_table_per_capture(small_captures: Path) -> None:
    result = _replay(small_captures, "-v", "union8", "-v", "flashinfer", "--samples", 1)
    assert result.exit_code == 0
    assert "small/one on" in result.stdout and "small/two on" in result.stdout
    assert "(unavailable)" in result.stdout and "needs a CUDA GPU" in result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_naming_only_what_cannot_run_is_exit_code_3(small_captures: Path) -> None:
    result = _replay(small_captures, "--variant", "flashinfer")
    assert result.exit_code == 3
    assert "nothing that was asked for can be measured here: flashinfer needs a CUDA GPU" in result.stderr


def test_a_failed_measurement_is_exit_code_3_and_the_rest_is_kept(
    small_captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pwbench import _checked_run

    monkeypatch.setitem(_checked_run.LIMITS, "fast", 0.0)
    out = tmp_path / "rows.parquet"
    result = _replay(small_captures / "small" / "one", "-v", "union8", "--out", out, "--samples", 1)
    assert result.exit_code == 3 and "union8 failed on one" in result.stderr
    assert results.load_rows(out)[0]["status"] == "failed"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--variant", "union9"], "No variant is called 'union9'"),
        (["--mode", "graph"], "needs a CUDA device"),
        (["--window", "96"], "Invalid value for '--window'"),
        (["--samples", "0"], "Invalid value for '--samples'"),
    ],
)
def test_bad_usage_is_exit_code_2(small_captures: Path, arguments: list[str], words: str) -> None:
    result = _replay(small_captures, *arguments)
    assert result.exit_code == 2 and words in result.stderr and "Traceback" not in result.stderr


def test_a_path_without_captures_is_exit_code_2(tmp_path: Path) -> None:
    result = _replay(tmp_path / "nowhere")
    assert result.exit_code == 2 and "no such directory" in result.stderr
    assert _replay("--captures-dir", tmp_path).exit_code == 2


def test_an_out_file_that_is_something_else_is_not_overwritten(small_captures: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    out.write_text("precious")
    result = _replay(small_captures, "-v", "union8", "--out", out)
    assert result.exit_code == 2 and "not a readable Parquet file" in result.stderr
    assert out.read_text() == "precious"


def test_a_dry_run_prints_the_plan_and_measures_nothing(small_captures: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    result = _replay(
        small_captures, "-v", "union8", "-v", "triton", "--samples", 7, "--dry-run", "--out", out
    )
    assert result.exit_code == 0 and not out.exists()
    assert "small/one (full): union8, triton" in result.stdout
    assert "not available: triton" in result.stdout
    assert "4 variants on captures, 28 timed samples. Nothing was run." in result.stdout
    plan = json.loads(_replay(small_captures, "--dry-run", "--json").stdout)
    assert [one["capture"] for one in plan["captures"]] == ["one", "two"]


def test_the_same_command_again_measures_nothing_new_and_still_prints_the_rows(
    small_captures: Path, tmp_path: Path
) -> None:
    out = tmp_path / "rows.parquet"
    arguments = (small_captures, "-v", "union8", "--samples", 1, "--out", out, "--json")
    first, again = _replay(*arguments), _replay(*arguments)
    assert json.loads(first.stdout)["rows"][0]["session"] == json.loads(again.stdout)["rows"][0]["session"]
    assert "already holds the rows of small/one, small/two" in again.stderr
    assert len(results.load_rows(out)) == 2
    _replay(*arguments, "--fresh")
    fresh = results.load_rows(out)
    assert len(fresh) == 2 and fresh[0]["session"] != json.loads(first.stdout)["rows"][0]["session"]


def test_ctrl_c_keeps_finished_captures_and_says_how_to_go_on(
    small_captures: Path, tmp_path: Path, repository: Path
) -> None:
    root, out = tmp_path / "captures", tmp_path / "rows.parquet"
    for index in range(12):
        shutil.copytree(small_captures / "small" / "two", root / "many" / f"c{index:02}")
    command = [
        sys.executable, "-m", "pwbench.cli.main", "replay", str(root), "-v", "reference", "--samples", "6",
        "--l2", "warm", "--out", str(out),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)}
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not out.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    said = re.search(r"interrupted\. The rows of (\d+) of 12 captures are in (\S+);", stderr)
    assert said and said[2] == str(out), stderr
    kept = {row["capture"] for row in results.load_rows(out)}
    # The signal may fall between storing a capture and saying so.
    assert len(kept) - int(said[1]) in (0, 1) and 0 < len(kept) < 12


def test_a_disk_that_fills_up_while_saving_outputs_is_not_blamed_on_the_variant(
    small_captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    result = _replay(small_captures, "-v", "union8", "--samples", 1, "--save-outputs", tmp_path)
    assert result.exit_code == 2 and "the disk is full while writing" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_storing_rows_leaves_the_old_file(
    small_captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.parquet"
    one = small_captures / "small" / "one"
    assert _replay(one, "-v", "union8", "--samples", 1, "--out", out).exit_code == 0
    before = out.read_bytes()

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    result = _replay(small_captures, "-v", "union8", "--samples", 1, "--out", out)
    assert result.exit_code == 3 and "No space left on device" in result.stderr
    assert out.read_bytes() == before
