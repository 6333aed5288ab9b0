"""The frame: every command is found by name, explains itself, and fails in one sentence."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from pwbench import __version__
from pwbench.cli.main import COMMANDS, main


def _everything() -> list[tuple[str, ...]]:
    """Every command and subcommand by its words."""
    found: list[tuple[str, ...]] = []

    def walk(command: click.Command, words: tuple[str, ...]) -> None:
        found.append(words)
        if isinstance(command, click.Group):
            context = click.Context(command, **command.context_settings)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None, f"{name} is listed and cannot be found"
                walk(child, (*words, name))

    walk(main, ())
    return found


@pytest.mark.parametrize("words", _everything(), ids=" ".join)
def test_the_help_of_every_command_has_an_example_of_itself(words: tuple[str, ...]) -> None:
    for flag in ("-h", "--help"):
        result = CliRunner().invoke(main, [*words, flag])
        assert result.exit_code == 0, result.output
    assert "Example" in result.output
    example = result.output.split("Example", 1)[1].split("Options:")[0]
    assert " ".join(["pwbench", *words]) in example


@pytest.mark.parametrize("words", [w for w in _everything() if w], ids=" ".join)
def test_every_command_prints_data_on_request(words: tuple[str, ...]) -> None:
    assert "--json" in CliRunner().invoke(main, [*words, "-h"]).output or len(words) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_named_as_its_module(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None and command.name == name
    assert command.help, "its help is its documentation"


def test_an_unknown_command_is_bad_usage() -> None:
    result = CliRunner().invoke(main, ["replai"])
    assert result.exit_code == 2 and "No such command" in result.output


def test_the_version_is_the_package_s() -> None:
    assert CliRunner().invoke(main, ["--version"]).output.strip().endswith(__version__)


def test_help_does_not_import_what_only_commands_need() -> None:
    code = (
        "import sys; from pwbench.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pandas', 'pyarrow', 'scipy', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "replay" in done.stdout


@pytest.mark.parametrize("shell, word", [("bash", "complete"), ("zsh", "compdef"), ("fish", "complete")])
def test_shell_completion_is_offered(shell: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PWBENCH_COMPLETE", f"{shell}_source")
    result = CliRunner().invoke(main, prog_name="pwbench", complete_var="_PWBENCH_COMPLETE")
    assert word in result.output


def test_completion_knows_the_variants() -> None:
    from click.shell_completion import ShellComplete

    completer = ShellComplete(main, {}, "pwbench", "_PWBENCH_COMPLETE")
    names = [item.value for item in completer.get_completions(["replay", "--variant"], "union8-")]
    assert names == ["union8-precomputed", "union8-regroup"]
