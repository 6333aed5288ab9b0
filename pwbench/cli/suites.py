"""``pwbench suites``: what the standard suites hold, how to make them, how their layers were chosen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from pwbench.cli._common import CONTEXT_SETTINGS, emit_json, handle_errors, json_option, progress, say
from pwbench.errors import CheckFailed, InputError

DEFINITIONS = click.option(
    "--definitions",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("captures/suites.toml"),
    show_default=True,
    help="The file that defines the suites.",
)
MODEL = click.option("--model", type=click.Path(path_type=Path), help="A transformers model directory.")
PROMPTS = click.option(
    "--prompts", type=click.Path(path_type=Path), help="Folder of <prompt>.txt or .txt.xz."
)
DEVICE = click.option(
    "--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or balanced."
)


@click.group(context_settings=CONTEXT_SETTINGS, invoke_without_command=True)
@DEFINITIONS
@json_option
@click.pass_context
def suites(ctx: click.Context, definitions: Path, as_json: bool) -> None:
    """List the stored suites and their captures; `make` makes them, `compare` says whether two folders of
    them agree, `survey` helps to choose layers.

    \b
    Example:
      pwbench suites
      pwbench suites make --model msa-30m --prompts prompts --suite six --out captures
    """
    if ctx.invoked_subcommand is None:
        handle_errors(_list)(definitions, as_json)


@suites.command(context_settings=CONTEXT_SETTINGS)
@DEFINITIONS
@MODEL
@PROMPTS
@DEVICE
@click.option("--suite", "names", multiple=True, help="Only this suite; may be given again. [default: all]")
@click.option("--out", type=click.Path(path_type=Path), default=Path("captures"), show_default=True)
@click.option("--kind", type=click.Choice(["tables", "full"]), help="[default: what each definition says]")
@click.option(
    "--full-out", type=click.Path(path_type=Path), help="Also write full captures here, from the same run."
)
@click.option(
    "--full-suite", "full_suites", multiple=True, help="With --full-out: only this suite; may be given again."
)
@click.option("--against", type=click.Path(path_type=Path), help="Compare tables with those stored here.")
@click.option("--overwrite", is_flag=True, help="Replace captures whose tables differ.")
@json_option
@handle_errors
def make(
    definitions: Path,
    model: Path | None,
    prompts: Path | None,
    device: str,
    names: tuple[str, ...],
    out: Path,
    kind: str | None,
    full_out: Path | None,
    full_suites: tuple[str, ...],
    against: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Make captures of suites: one model run per prompt records all that is wanted of it.

    A capture that is already there with equal tables is kept. One with other tables stays too, and how
    many rows differ is said: near-tied choices of a bf16 model fall differently on another GPU or
    library version. Exit code 1 then, unless --overwrite.

    \b
    Example (stored tables, and full tensors of the same run to measure with):
      pwbench suites make --model msa-30m --prompts prompts --out captures --full-out /tmp/full
    """
    from pwbench import suites as library

    specs = _chosen(library.load_suites(definitions), names)
    if unknown := set(full_suites) - {spec.suite for spec in specs}:
        raise InputError(f"--full-suite names {min(unknown)!r}, which is not among the suites to make.")
    loaded = None
    if model is not None and library.runs(specs):
        from pwbench.capture.transformers import Model

        loaded = Model(model, device)
    with _bar("making captures", len(library.runs(specs))) as report:
        made = library.make(
            specs,
            out,
            model=loaded,
            prompts=prompts,
            kind=kind,
            full_out=full_out,
            full_suites=full_suites or None,
            against=against,
            overwrite=overwrite,
            progress=report,
        )
    if as_json:
        emit_json({"captures": [vars(one) | {"path": str(one.path)} for one in made]})
    else:
        for one in made:
            note = "" if one.differing_rows is None else f", {one.differing_rows} of {one.rows} rows differ"
            click.echo(f"{one.state:8} {one.path}{note}")
    different = [one for one in made if one.state == "differs"]
    if different:
        raise CheckFailed(
            f"{len(different)} captures in {out} have other tables than this run made and were left as they "
            "are; choose another --out, or replace them with --overwrite."
        )


@suites.command(context_settings=CONTEXT_SETTINGS)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--against", type=click.Path(path_type=Path), default=Path("captures"), show_default=True)
@json_option
@handle_errors
def compare(folder: Path, against: Path, as_json: bool) -> None:
    """Say whether the captures below FOLDER select what their namesakes below --against select.

    Full captures made from a model are evidence about the stored tables only where both are of one run, or
    of two that agree to the row. Exit code 1 where any row differs.

    \b
    Example:
      pwbench suites compare /tmp/full --against captures
    """
    from pwbench import suites as library

    found = library.compare(folder, against)
    if as_json:
        emit_json({"captures": [vars(one) for one in found]})
    else:
        for one in found:
            click.echo(f"{one.name:28} {_agreement(one.rows, one.differing_rows)}")
    differing = [one.name for one in found if one.differing_rows]
    if differing:
        raise CheckFailed(
            f"{', '.join(differing)} in {folder} select other pages than in {against}: not the same run. "
            "Replay either the one or the other; rows of both do not compare."
        )


@suites.command(context_settings=CONTEXT_SETTINGS)
@MODEL
@PROMPTS
@DEVICE
@click.option("--prompt", "names", multiple=True, help="Only this prompt. [default: all in the folder]")
@click.option("--contexts", default="8192,16384,32768,65536", show_default=True, help="Token counts.")
@click.option("--queries", type=click.IntRange(min=1), default=8192, show_default=True)
@json_option
@handle_errors
def survey(
    model: Path | None,
    prompts: Path | None,
    device: str,
    names: tuple[str, ...],
    contexts: str,
    queries: int,
    as_json: bool,
) -> None:
    """Print union sizes of every (prompt, context, layer), to choose a suite's layers by.

    \b
    Example:
      pwbench suites survey --model msa-30m --prompts prompts --contexts 8192,65536
    """
    from pwbench import suites as library
    from pwbench.capture.transformers import Model

    if model is None or prompts is None:
        raise InputError("A survey needs --model and --prompts.")
    try:
        lengths = sorted({int(part) for part in contexts.split(",")})
    except ValueError:
        raise InputError(f"--contexts is {contexts!r}, expected token counts such as 8192,65536.") from None
    found = names or tuple(sorted(p.name.split(".")[0] for p in prompts.glob("*.txt*")))
    if not found:
        raise InputError(f"{prompts} holds no .txt or .txt.xz file.")
    with _bar("surveying", len(found)) as report:
        rows = library.survey(Model(model, device), prompts, found, lengths, queries, progress=report)
    if as_json:
        emit_json({"rows": rows})
        return
    click.echo(
        f"{'context':>8} {'prompt':10} {'layer':>5} {'queries':>8} {'U4':>7} {'U8':>7} {'quantile':>9}"
    )
    for r in rows:
        click.echo(
            f"{r['context']:8} {r['prompt']:10} {r['layer']:5} {r['queries']:8} {r['u4']:7.1f} "
            f"{r['u8']:7.1f} {r['quantile']:9.2f}"
        )


def _agreement(rows: int, differing: int | None) -> str:
    if differing is None:
        return "not stored there"
    return f"{differing} of {rows} rows differ" if differing else f"the same selections in all {rows} rows"


def _list(definitions: Path, as_json: bool) -> None:
    from pwbench import suites as library

    found = library.load_suites(definitions)
    stored = {
        (suite.name, spec.name): (definitions.parent / suite.name / spec.name / "manifest.json").is_file()
        for suite in found.values()
        for spec in suite.captures
    }
    if as_json:
        emit_json(
            {
                name: {
                    "purpose": suite.purpose,
                    "captures": [
                        {"name": s.name, "reason": s.reason, "layer": s.layer, "stored": stored[name, s.name]}
                        for s in suite.captures
                    ],
                }
                for name, suite in found.items()
            }
        )
        return
    for name, suite in found.items():
        click.echo(f"{name}: {suite.purpose}")
        for spec in suite.captures:
            mark = " " if stored[name, spec.name] else "-"
            click.echo(f"  {mark} {spec.name:20} {spec.reason}")
    if not all(stored.values()):
        click.echo("\n- not stored here; `pwbench suites make` makes it.")


def _chosen(found: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    unknown = [name for name in names if name not in found]
    if unknown:
        raise InputError(f"No suite is called {unknown[0]!r}; there are {', '.join(found)}.")
    return [spec for name in (names or tuple(found)) for spec in found[name].captures]


@contextmanager
def _bar(what: str, runs: int) -> Any:
    """A progress callback over model runs: a bar on a terminal, one line per run otherwise."""
    with progress(what, None) as task:
        begun, last = 0, ("", 0)

        def report(prompt: str, done: int, total: int) -> None:
            nonlocal begun, last
            if prompt != last[0] or done <= last[1]:  # a prompt may have a second run
                begun += 1
                last = (prompt, 0)
                say(f"{prompt}: {total} tokens (run {begun} of {runs})")
            task.note(f"{prompt} {done}/{total}")
            task.advance(done - last[1])
            last = (prompt, done)

        callback: Callable[[str, int, int], None] = report
        yield callback
