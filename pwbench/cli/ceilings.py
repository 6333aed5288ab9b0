"""``pwbench ceilings``: what this GPU can do at most."""

from __future__ import annotations

from pathlib import Path

import click

from pwbench.cli._common import CONTEXT_SETTINGS, emit_json, handle_errors, json_option, progress, say


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="cuda", show_default=True)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.json",
    help="Where to store them. [default: results/ceilings-<gpu>.json, where replay looks]",
)  # fmt: skip
@click.option("--show", is_flag=True, help="Measure nothing; print what replay would use here.")
@json_option
@handle_errors
def ceilings(device: str, out: Path | None, show: bool, as_json: bool) -> None:
    """Measure this GPU's bandwidths and rates and store them; replay's roofline uses them from then on.

    Copy bandwidth, L2 to shared memory without and with multicast, FP8 and BF16 matrix rates, exp2 rate,
    launch gaps. Takes a few seconds; the GPU should be idle.

    \b
    Example:
      pwbench ceilings
      pwbench ceilings --show --device cpu      # the documented H200, which CPU rows are held against
    """
    from pwbench import ceilings as roofs
    from pwbench import probes
    from pwbench.device import info, resolve
    from pwbench.errors import InputError

    chosen = resolve(device)
    if show:
        name = info(chosen).name if chosen.type == "cuda" else None
        known = roofs.find(name)
        if known is None:
            raise InputError(f"No ceilings are known for the {name}; measure them: pwbench ceilings.")
        _print(known, {}, as_json)
        return
    with progress("ceilings", len(probes.PROBES)) as task:

        def started(name: str) -> None:
            task.note(roofs.DESCRIPTIONS[name][0])
            task.advance()

        found = probes.measure(chosen, started)
    path = out or roofs.path_for(found.ceilings.gpu)
    roofs.store(found.ceilings, path)
    _print(found.ceilings, found.missing, as_json)
    say(f"Stored in {path}.")


def _print(known: object, missing: dict[str, str], as_json: bool) -> None:
    from pwbench import ceilings as roofs

    assert isinstance(known, roofs.Ceilings)
    if as_json:
        emit_json(roofs.as_dict(known))
        return
    click.echo(f"{known.gpu} ({known.source})")
    for name, (what, unit, factor) in roofs.DESCRIPTIONS.items():
        value = getattr(known.rates, name)
        shown = (
            f"{value / factor:10,.2f} {unit}" if value else f"not measured: {missing.get(name, 'unknown')}"
        )
        click.echo(f"  {what:<44} {shown}")
