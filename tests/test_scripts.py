"""The scripts for a GPU host, as far as they can be tried without one."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pwbench import results, variants
from pwbench.capture import write
from tests.calls import make_call

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SCRIPTS / script, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("script", ["h200.sh", "sanitize.sh"])
def test_an_output_folder_is_asked_for(script: str) -> None:
    done = run(script)
    assert done.returncode != 0
    assert f"usage: {script} OUT" in done.stderr


def test_an_unknown_step_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = run("h200.sh", str(tmp_path / "out"), "build", "benchmark")
    assert done.returncode == 2
    assert "not 'benchmark'" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_taken_for_a_pass(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = run("h200.sh", str(tmp_path / "out"), "test", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 3
    assert "torch sees no CUDA GPU" in done.stderr


def rehearse(tmp_path: Path, *steps: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """h200.sh on the CPU over one small suite of every name it asks for."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for suite in ("six", "five-64k"):
        call = make_call(3, q_lens=(17,), selection="local", poison="none", spare_pages=0)
        write(tmp_path / "store" / suite / "small", call, kind="full")
    settings = {
        "DEVICE": "cpu", "MODE": "eager", "SAMPLES": "2", "VARIANTS": "union8 union8-regroup",
        "STORE": str(tmp_path / "store"), "FULL": str(tmp_path / "store"),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }  # fmt: skip
    return run("h200.sh", str(tmp_path / "out"), *steps, **settings, **environment)


def test_the_measuring_steps_leave_their_rows_and_pack_their_logs(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "full:50", "windows", PRECISIONS="fast", PACK="1")
    assert done.returncode == 0, done.stdout + done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    files = {"h200-full.parquet", "h200-windows-64.parquet", "h200-windows-128.parquet"}
    assert names == {*files, "logs.tar"}
    rows = {name: results.load_rows(tmp_path / "out" / name) for name in files}
    kinds = {(row["variant"], row["tensors"], row["l2"]) for row in rows["h200-full.parquet"]}
    assert len(kinds) == 8 and len({row["session"] for row in rows["h200-full.parquet"]}) == 1
    for window in (64, 128):
        measured = rows[f"h200-windows-{window}.parquet"]
        assert {(row["suite"], row["variant"], row["window"]) for row in measured} == {
            (suite, variant, searched)
            for suite in ("six", "five-64k")
            for variant, searched in (("union8", None), ("union8-regroup", window))
        }


def test_a_step_ends_when_its_time_is_over_and_starts_nothing_more(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "windows:1")
    assert done.returncode == 1
    assert "Out of time, not started: python3 -m pwbench.cli.main replay" in done.stdout
    assert "---- windows    exit code 1" in (tmp_path / "out" / "steps.log").read_text()


def test_a_missing_sanitizer_is_one_sentence(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "mkdir", "dirname", "head", "ls"):
        (tools / name).symlink_to(next(p for d in ("/bin", "/usr/bin") if (p := Path(d, name)).exists()))
    if any(Path("/usr/local/cuda").glob("**/compute-sanitizer")):
        pytest.skip("compute-sanitizer is installed where the script looks without PATH")
    done = run("sanitize.sh", str(tmp_path / "out"), PATH=str(tools))
    assert done.returncode == 3
    assert done.stderr.strip() == "compute-sanitizer is not installed; it comes with the CUDA toolkit."


def test_the_sanitizers_calls_are_valid_and_small() -> None:
    from sanitize import CALLS

    for arguments in CALLS.values():
        call = make_call(seed=1, query_gain=1.0, **arguments)
        assert call.total_q <= 200


def test_a_form_of_an_attention_kernel_is_its_design_with_macros_of_its_own(monkeypatch) -> None:
    from attention_bench import macros_of, with_macros

    from pwbench.variants import _union_plan

    monkeypatch.setattr(_union_plan, "DESIGNS", dict(_union_plan.DESIGNS))
    assert with_macros("pageweaver", macros_of("")) == "pageweaver"
    name = with_macros("pageweaver", macros_of("TRY=-1,MORE=2"))
    assert "-" not in name, "the part of a variant's name before the first hyphen names the design"
    for precision, shipped in _union_plan.DESIGNS["pageweaver"].items():
        form = _union_plan.DESIGNS[name][precision]
        assert form == replace(shipped, defines={**shipped.defines, "TRY": -1, "MORE": 2})
    for junk in ("TRY", "TRY=x", "TRY=1=2"):
        with pytest.raises(ArgumentTypeError, match=r"is not NAME=NUMBER"):
            macros_of(junk)


@pytest.mark.parametrize("name", ["union8", "union8-precomputed"])
def test_every_form_has_a_line_of_figures_or_says_why_not(name: str) -> None:
    from attention_bench import COLUMNS, lines

    call = make_call(2, q_lens=(70,), selection="local")
    good = variants.get(name).prepare(call, variants.Options())
    bad = replace(good, run=lambda: 1 / 0, stages=[])
    first, second = lines("a capture", call, {"": good, "TRY=1": bad}, 2, 132, mode="eager")
    assert first.split()[:4] == ["a", "capture", "as", "shipped"]
    figures = first.split()[4:]
    assert len(figures) == len(COLUMNS)
    assert all(float(figure) >= 0 for figure in figures[:-1])
    assert float(figures[4]) < 0.1
    assert "division by zero" in second


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_bench_of_forms_asks_for_a_gpu(capsys) -> None:
    from attention_bench import main

    assert main(["captures", "--form", "TRY=1"]) == 3
    assert "no CUDA GPU" in capsys.readouterr().err
