"""``pwbench doctor``: what works here, what does not, and how to mend it."""

from __future__ import annotations

from dataclasses import asdict

import click

from pwbench.cli._common import CONTEXT_SETTINGS, emit_json, handle_errors, json_option, progress

_MARKS = {"ok": ("ok", "green"), "note": ("--", "yellow"), "problem": ("!!", "red")}


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("captures", nargs=-1, type=click.Path(), metavar="[CAPTURE]...")
@click.option("--quick", is_flag=True, help="Read captures' manifests only, without proving every invariant.")
@json_option
@handle_errors
def doctor(captures: tuple[str, ...], quick: bool, as_json: bool) -> None:
    """Look this machine over: Python, torch, CuPy, driver, compiler, GPU, competitors, captures.

    Every problem comes with the command that mends it. Exit code 1 when there is a problem; a note only
    says that something optional is absent.

    \b
    Example:
      pwbench doctor
      pwbench doctor captures/real-8k --json
    """
    from pwbench.doctor import examine

    findings = []
    with progress("looking", None) as task:
        for finding in examine(captures or ("captures",), deep=not quick):
            task.note(finding.section)
            task.advance()
            findings.append(finding)
    problems = [finding for finding in findings if finding.state == "problem"]
    if as_json:
        emit_json({"healthy": not problems, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            mark, colour = _MARKS[finding.state]
            click.echo(f"{click.style(mark, fg=colour)} {finding.section:<10} {finding.text}")
            if finding.mend:
                click.echo(f"   {'':<10} mend: {finding.mend}")
        click.echo(f"{len(problems)} problems." if problems else "No problems.")
    if problems:
        raise click.exceptions.Exit(1)
