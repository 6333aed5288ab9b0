"""The conventions: stdout is data, errors are one sentence with the right exit code, Ctrl-C is said."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from pwbench import errors
from pwbench.cli import _common


def _run(body, *, guard=_common.handle_errors, **kwargs):
    command = click.command()(guard(body))
    return CliRunner().invoke(command, [], **kwargs)


def _raise(error: BaseException):
    def body() -> None:
        raise error

    return body


@pytest.mark.parametrize(
    "error, code",
    [
        (errors.PwbenchError("a"), 2),
        (errors.InputError("a"), 2),
        (errors.OperatorError("a"), 2),
        (errors.CaptureError("a"), 2),
        (errors.CheckFailed("a"), 1),
        (errors.MeasurementError("a"), 3),
        (errors.VariantUnavailable("a"), 3),
    ],
)
def test_each_error_has_its_exit_code_and_one_line(error: errors.PwbenchError, code: int) -> None:
    result = _run(_raise(error))
    assert result.exit_code == code
    assert result.stderr == "pwbench: a\n" and result.stdout == ""


def test_a_full_disk_is_a_sentence_with_a_way_out() -> None:
    result = _run(_raise(OSError(errno.ENOSPC, "No space left on device", "/data/rows.parquet")))
    assert result.exit_code == 2
    assert "the disk is full while writing /data/rows.parquet" in result.stderr
    assert "run the same command again" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "error, words",
    [
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), "no permission to use /root/x"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "gone"), "gone does not exist"),
        (OSError(errno.EIO, "Input/output error", "/dev/sda"), "refused an operation on /dev/sda"),
    ],
)
def test_what_the_system_refuses_is_a_sentence_too(error: OSError, words: str) -> None:
    result = _run(_raise(error))
    assert result.exit_code == 2 and words in result.stderr


def test_ctrl_c_says_what_was_kept() -> None:
    def body() -> None:
        _common.on_interrupt("first")
        _common.on_interrupt("Rows of 3 of 8 captures are in x.parquet; run the same command again.")
        raise KeyboardInterrupt

    result = _run(body)
    assert result.exit_code == 130
    assert result.stderr == (
        "pwbench: interrupted. Rows of 3 of 8 captures are in x.parquet; run the same command again.\n"
    )


def test_ctrl_c_before_anything_was_kept_says_so() -> None:
    assert "Nothing was written" in _run(_raise(KeyboardInterrupt())).stderr


def test_a_bug_is_not_dressed_up_as_bad_input() -> None:
    assert isinstance(_run(_raise(ZeroDivisionError())).exception, ZeroDivisionError)


def test_the_traceback_is_there_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWBENCH_TRACEBACK", "1")
    assert isinstance(_run(_raise(errors.InputError("a"))).exception, errors.InputError)


def test_json_is_plain_whatever_the_values_are(capsys: pytest.CaptureFixture[str]) -> None:
    _common.emit_json(
        {
            "path": Path("a/b"),
            "numbers": np.arange(3),
            "one": np.float64(1.5),
            "nan": float("nan"),
            "deep": [{"inf": np.inf, "none": None, "yes": True}],
            1: ("x",),
        }
    )
    assert json.loads(capsys.readouterr().out) == {
        "path": "a/b",
        "numbers": [0, 1, 2],
        "one": 1.5,
        "nan": None,
        "deep": [{"inf": None, "none": None, "yes": True}],
        "1": ["x"],
    }


def test_progress_is_silent_where_nobody_looks() -> None:
    def body() -> None:
        with _common.progress("work", 3) as task:
            for _ in _common.track(range(3), "inner"):
                task.note("x")
                task.advance()

    result = _run(body)
    assert result.exit_code == 0 and result.output == ""


def test_progress_goes_to_the_terminal_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with _common.progress("replaying things", 2) as task:
        task.note("one")
        task.advance()
    seen = capsys.readouterr()
    assert "replaying things" in seen.err and seen.out == ""
