"""The ``pwbench`` command: finds a subcommand by name and imports only that one."""

from __future__ import annotations

import importlib
from typing import Any

import click

from pwbench import __version__
from pwbench.cli._common import CONTEXT_SETTINGS, guarded

COMMANDS = {
    "capture": "Record the inputs of the operator from a model, a file or a generator.",
    "inspect": "Show a capture's geometry, provenance and union sizes.",
    "verify": "Prove that captures are whole and keep every rule of the format.",
    "suites": "List the stored suites and their captures.",
    "replay": "Run captures through competing kernels and store what was measured.",
    "report": "Turn stored results into speed-up tables, figures or data.",
    "gate": "Compare results with a blessed baseline and fail on a regression.",
    "doctor": "Check this machine and say how to mend what is missing.",
    "ceilings": "Measure this GPU's bandwidths and rates, which the roofline uses.",
}
"""Command -> one line of help. The module ``pwbench.cli.<command>`` is imported when it is needed."""


class LazyGroup(click.Group):
    """A group whose commands are imported by name, so that ``pwbench --help`` stays instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"pwbench.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        return guarded(ctx, super().invoke)


@click.group(cls=LazyGroup, context_settings=CONTEXT_SETTINGS)
@click.version_option(__version__, "-V", "--version", prog_name="pwbench")
def main() -> None:
    """Measure Top-K page-sparse attention prefill on the inputs a real model produced.

    \b
    Example:
      pwbench replay captures/real-8k --variant union8 --variant union8-regroup --out results/a.parquet
      pwbench report results/a.parquet

    \b
    Exit codes: 0 ok, 1 a check or gate failed, 2 bad usage or input, 3 a measurement could not be made.
    Tab completion: eval "$(_PWBENCH_COMPLETE=bash_source pwbench)"   (or zsh_source, fish_source)
    """


if __name__ == "__main__":
    main()
