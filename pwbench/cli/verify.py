"""``pwbench verify``: prove that captures are whole and keep every rule of the format."""

from __future__ import annotations

from pathlib import Path

import click

from pwbench.cli._common import CONTEXT_SETTINGS, emit_json, handle_errors, json_option, track
from pwbench.errors import CheckFailed


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("captures", nargs=-1, type=click.Path(path_type=Path))
@click.option("--all-checks", is_flag=True, help="Also list the checks that pass.")
@json_option
@handle_errors
def verify(captures: tuple[Path, ...], all_checks: bool, as_json: bool) -> None:
    """Check CAPTURES (or folders of them; none named = all below captures/) against every rule.

    Exit code 1 when a rule is broken, 2 when there is no capture to check.

    \b
    Example:
      pwbench verify captures/real-8k
    """
    from pwbench import capture as library

    found = library.discover(captures)
    results = {path: library.verify(path) for path in track(found, "verifying")}
    broken = [path for path, checks in results.items() if not all(check.ok for check in checks)]
    if as_json:
        emit_json(
            {
                "captures": [
                    {"path": str(p), "ok": p not in broken, "checks": [vars(check) for check in checks]}
                    for p, checks in results.items()
                ]
            }
        )
    else:
        for path, checks in results.items():
            click.echo(f"{'FAILED' if path in broken else 'ok':6} {path}  ({len(checks)} checks)")
            for check in checks:
                if all_checks or not check.ok:
                    mark = "ok" if check.ok else "FAILED"
                    click.echo(f"         {mark:6} {check.name}: {check.seen}; expected {check.expected}")
    if broken:
        raise CheckFailed(f"{len(broken)} of {len(results)} captures break the format; do not use them.")
