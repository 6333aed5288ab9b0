"""The README tells the truth: its commands exist, and those that need no GPU and no model run."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pwbench.cli.main import main

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
COMMANDS = [shlex.split(line[2:])[1:] for line in README.splitlines() if line.startswith("$ pwbench ")]
ELSEWHERE = (["ceilings"], ["suites", "make"], ["capture", "transformers"], ["capture", "tensors"], ["gate"])
"""Beginnings of commands that need a GPU, a model, or a file that the reader has."""
RUNNABLE = [words for words in COMMANDS if not any(words[: len(begin)] == begin for begin in ELSEWHERE)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_of_the_readme_is_one_that_pwbench_understands(words: list[str]) -> None:
    command, context = main, None
    while isinstance(command, click.Group):
        name, *words = words or [""]
        if not name:
            return  # a group that does something by itself
        context = click.Context(command, parent=context, info_name=name, **command.context_settings)
        command = command.get_command(context, name)
        assert command is not None, f"there is no command {name}"
    files = [word for word in words if word in ("dump.safetensors", "FILE", "DIR")]
    known = {
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    assert not [word for word in words if word.startswith("-") and word not in known], files


def test_the_commands_that_run_anywhere_run(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "captures").mkdir()
    for stored in (repository / "captures").iterdir():
        (tmp_path / "captures" / stored.name).symlink_to(stored)
    (tmp_path / "results").mkdir()
    for rows in (repository / "results").glob("*.parquet"):
        (tmp_path / "results" / rows.name).symlink_to(rows)
    monkeypatch.chdir(tmp_path)
    assert len(RUNNABLE) >= 7
    for words in RUNNABLE:
        short = [
            "2" if word == "20" else word.replace("65536", "4096").replace("8192", "64") for word in words
        ]
        result = CliRunner().invoke(main, short)
        assert result.exit_code == 0, f"pwbench {' '.join(short)}: {result.output}"
    assert (tmp_path / "results" / "mine.parquet").exists()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_both_commands_set_up_what_they_need(target: str, repository: Path) -> None:
    assert f"make {target}\n" in README
    dry = subprocess.run(
        ["make", "--dry-run", "VENV=/nonexistent/venv", target],
        cwd=repository,
        capture_output=True,
        text=True,
    )
    assert dry.returncode == 0, dry.stderr
    assert "-m venv /nonexistent/venv" in dry.stdout and "pip install" in dry.stdout


def test_continuous_integration_runs_the_readme_s_test_command(repository: Path) -> None:
    script = (repository / ".ci" / "run").read_text()
    assert re.search(r"^make test$", script, re.M)
    assert script.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in script
    assert (repository / ".ci" / "run").stat().st_mode & 0o111


def test_every_link_of_the_readme_leads_somewhere(repository: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (repository / target).exists(), target


def test_every_variant_is_in_the_readme() -> None:
    from pwbench import variants

    assert not [name for name in variants.names() if f"`{name}`" not in README]


def test_the_columns_the_readme_explains_exist() -> None:
    from pwbench.columns import COLUMNS

    known = {column.name for column in COLUMNS}
    for name in ("selected_pages", "union_pages", "subgroup_pages", "roofline_us", "noise_floor"):
        assert name in known and f"`{name}`" in README


def test_the_numbers_of_the_headline_are_those_of_the_stored_rows(repository: Path) -> None:
    from pwbench import load_results
    from pwbench.report import build

    scope = build(load_results([repository / "results"])).scopes[0]
    assert (scope.suite, scope.device) == ("six", "cuda")
    found = re.search(r"has ([\d.]+)x the speed of FlashInfer .* and\s+([\d.]+)x at", README, flags=re.S)
    assert found is not None
    means = {c.precision: m.value for c, m in scope.geomeans.items() if c.label == "pageweaver"}
    assert found.groups() == (f"{means['fast']:.2f}", f"{means['accurate']:.2f}")


def test_the_session_shows_what_its_command_prints(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    (session,) = re.findall(r"\$ pwbench (report results/h200.*?)```", README, flags=re.S)
    command, *lines = session.splitlines()
    said = [line.strip(" █").split() for line in lines]
    shown = [words for words in said if words[1:2] in (["fast"], ["its"])]
    printed = CliRunner().invoke(main, shlex.split(command)).output.splitlines()
    rows = [line.strip(" █").split() for line in printed]
    assert len(shown) >= 14
    for words in shown:
        assert any(_in_order(words, row) for row in rows), words


def _in_order(words: list[str], row: list[str]) -> bool:
    rest = iter(row)
    return all(word in rest for word in words)
