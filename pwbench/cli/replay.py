"""``pwbench replay``: captures through competing kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pwbench.cli._common import (
    CONTEXT_SETTINGS,
    emit_json,
    fail,
    json_option,
    on_interrupt,
    progress,
    say,
    terminal,
)

if TYPE_CHECKING:
    from pwbench.plan import Plan, Settings
    from pwbench.results import Row

_BOTH = {"graph": ("graph",), "eager": ("eager",), "cold": ("cold",), "warm": ("warm",)}
_TIMES = ("complete", "search", "metadata", "attention")


def _variant_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from pwbench import variants

    return [name for name in variants.names() if name.startswith(incomplete)]


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("captures", nargs=-1, metavar="[CAPTURE]...", type=click.Path())
@click.option(
    "--variant", "-v", "names", multiple=True, metavar="NAME", shell_complete=_variant_names,
    help="A competitor; may be given several times. Default: all that can run on the device.",
)  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option(
    "--precision", type=click.Choice(["fast", "accurate"]), default="fast", show_default=True,
    help="fast: Q and P in 8 bits; accurate: rel-L2 at most 2.5e-3. A variant that has one runs in it.",
)  # fmt: skip
@click.option(
    "--window", type=click.Choice(["64", "128"]), default="128", show_default=True,
    help="Query positions of a regroup window.",
)  # fmt: skip
@click.option(
    "--samples", type=click.IntRange(min=1), help="Timed samples of each variant. [default: 50; 3 on the CPU]"
)
@click.option(
    "--mode", type=click.Choice(["graph", "eager", "both"]),
    help="Time CUDA-graph replays or eager calls. [default: graph; eager on the CPU]",
)  # fmt: skip
@click.option(
    "--l2", type=click.Choice(["cold", "warm", "both"]), default="cold", show_default=True,
    help="Flush the L2 cache before each sample, or warm it.",
)  # fmt: skip
@click.option(
    "--tensors", type=click.Choice(["auto", "stored", "seeded", "both"]), default="auto", show_default=True,
    help="Q and KV as captured, or seeded random values. auto: as captured where they are stored. both: in "
    "one session, to see whether the time differs.",
)  # fmt: skip
@click.option(
    "--baseline", metavar="NAME", default="flashinfer", show_default=True,
    help="Runs twice per session (A/A) to find the noise floor; the first that runs when it cannot.",
)  # fmt: skip
@click.option(
    "--check-rows", type=click.IntRange(min=1), default=512, show_default=True,
    help="Output rows compared with the float64 reference.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True,
    help="Of the sampling order and the checked rows.",
)  # fmt: skip
@click.option(
    "--save-outputs", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Write <capture>.<variant>.safetensors with `out` and `query_ids`.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.parquet",
    help="Store the rows. Rows that the file already holds are not measured again.",
)  # fmt: skip
@click.option("--fresh", is_flag=True, help="Measure everything again and replace FILE.")
@click.option(
    "--captures-dir", type=click.Path(file_okay=False), default="captures", show_default=True,
    help="Where captures are looked for when none is named.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the plan and measure nothing.")
@json_option
def replay(
    captures: tuple[str, ...], names: tuple[str, ...], out: Path | None, fresh: bool, captures_dir: str,
    dry_run: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Run CAPTUREs through competing kernels: check every output, time every stage, store every sample.

    A CAPTURE is a capture's directory or a folder of them; none named means all below captures/.
    Ctrl-C keeps the captures that are finished, and the same command goes on from there.

    \b
    Example:
      pwbench replay                                     # everything, on whatever this machine has
      pwbench replay captures/real-8k -v union8 -v union8-regroup --samples 5 --out results/mine.parquet
      pwbench replay captures/h200-64k -v flashinfer -v union8-regroup --mode both --l2 both --dry-run
    """
    from pwbench import plan as planning
    from pwbench import results, variants
    from pwbench.replay import run

    variants.get(options["baseline"])  # unknown ones are refused here
    settings = _settings(**options)
    # Read even when it is to be replaced: what is no results file of ours is not.
    stored = results.load_rows(out) if out and out.exists() else []
    existing = [] if fresh else stored
    chosen = planning.plan(captures or (captures_dir,), names, settings, existing)
    if dry_run:
        _show_plan(chosen, out, as_json)
        return
    if chosen.done:
        say(f"{out} already holds the rows of {', '.join(chosen.done)}; --fresh would measure them again.")
    if out and chosen.work:
        results.check_writable(out)
    rows: list[Row] = []
    with progress("replay", chosen.steps) as task:
        on_interrupt(_kept(0, chosen, out))
        for finished in run(chosen, task):
            if out:
                _store(out, finished, settings, replace=fresh and not rows)
            rows += finished
            on_interrupt(_kept(len({(row["suite"], row["capture"]) for row in rows}), chosen, out))
    wanted = existing + rows
    if as_json:
        emit_json({"rows": wanted})
    else:
        _show(rows)
        if out and rows:
            say(f"{len(rows)} rows are in {out}; see them with: pwbench report {out}")
    _judge(rows, bool(names))


def _settings(device: str, window: str, mode: str | None, l2: str, **options: Any) -> Settings:
    from pwbench.device import resolve
    from pwbench.plan import Settings

    return Settings(
        device=resolve(device),
        window=int(window),
        modes=() if mode is None else _BOTH.get(mode, ("graph", "eager")),
        l2=_BOTH.get(l2, ("cold", "warm")),
        **options,
    )


def _store(out: Path, rows: list[Row], settings: Settings, replace: bool) -> None:
    from pwbench import results
    from pwbench.device import provenance

    (results.write if replace else results.append)(out, rows, provenance(settings.device))


def _kept(finished: int, chosen: Plan, out: Path | None) -> str:
    total = len(chosen.work)
    if out is None:
        return f"{finished} of {total} captures were finished, but without --out nothing is kept."
    return (
        f"The rows of {finished} of {total} captures are in {out}; run the same command again "
        "to go on with the rest."
    )


def _judge(rows: list[Row], named: bool) -> None:
    """Exit code 3 when something that was asked for could not be measured."""
    failed = [row for row in rows if row["status"] == "failed"]
    for row in failed:
        say(f"pwbench: {row['variant']} failed on {row['capture']} ({row['mode']}): {row['reason']}")
    if failed:
        fail(f"{len(failed)} of {len(rows)} measurements failed; the others are good.", 3)
    if rows and named and not any(row["status"] == "ok" for row in rows):
        fail(f"nothing that was asked for can be measured here: {rows[0]['reason']}", 3)


# What a person sees -----------------------------------------------------------------------------


def _show_plan(chosen: Plan, out: Path | None, as_json: bool) -> None:
    settings = chosen.settings
    data = {
        "device": str(settings.device),
        "precision": settings.precision,
        "window": settings.window,
        "samples": settings.samples,
        "modes": settings.modes,
        "l2": settings.l2,
        "out": out,
        "captures": [
            {"suite": one.suite, "capture": one.name, "kind": one.kind, "variants": names}
            for one, names in chosen.work
        ],
        "unavailable": chosen.unavailable,
        "done": chosen.done,
    }
    if as_json:
        emit_json(data)
        return
    click.echo(
        f"On {data['device']}: {settings.samples} samples, mode {' and '.join(settings.modes)}, "
        f"L2 {' and '.join(settings.l2)}, precision {settings.precision}, window {settings.window}."
    )
    for one, names in chosen.work:
        click.echo(f"  {one.suite}/{one.name} ({one.kind}): {', '.join(names)}")
    for name, reason in chosen.unavailable.items():
        click.echo(f"  not available: {name}: {reason}")
    for name in chosen.done:
        click.echo(f"  already in {out}: {name}")
    calls = sum(len(names) for _, names in chosen.work) * len(settings.one_by_one)
    click.echo(f"{calls} variants on captures, {calls * settings.rounds} timed samples. Nothing was run.")


def _show(rows: list[Row]) -> None:
    from itertools import groupby

    from rich.table import Table

    console = terminal(soft_wrap=True)
    for place, members in groupby(rows, key=_place):
        group = list(members)
        times = [row["complete_us"] for row in group if row["complete_us"] is not None]
        unit, factor = ("ms", 1e-3) if times and max(times) >= 1e5 else ("us", 1.0)
        table = Table(
            title=f"{place}, {unit}", title_justify="left", title_style="bold", box=None, pad_edge=False
        )
        table.add_column("variant", min_width=18)
        for name in (*_TIMES, "rel-L2", "pages"):
            table.add_column(name, justify="right", min_width=7)
        for row in group:
            if row["status"] == "ok":
                shown = [_number(row[f"{name}_us"], factor) for name in _TIMES]
                table.add_row(row["variant"], *shown, f"{row['rel_l2']:.1e}", f"{row['union_pages']:,}")
            else:
                table.add_row(row["variant"], f"({row['status']})", style="yellow")
        console.print(table)
        console.print()
    for row in rows:
        if row["status"] == "unavailable":
            say(f"{row['variant']} was not measured on {row['capture']} ({row['mode']}): {row['reason']}")


def _place(row: Row) -> str:
    return f"{row['suite']}/{row['capture']} on {row['gpu']}, {row['mode']}, L2 {row['l2']}"


def _number(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{value * factor:,.1f}"
