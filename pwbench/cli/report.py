"""``pwbench report``: stored results as tables, figures or data, and documents filled from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pwbench.cli._common import CONTEXT_SETTINGS, emit_json, handle_errors, json_option, progress, say
from pwbench.errors import CheckFailed, InputError
from pwbench.files import replace_text

if TYPE_CHECKING:
    import pandas as pd

    from pwbench.report import Report


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("results", nargs=-1, type=click.Path(path_type=Path), metavar="[RESULT]...")
@click.option("--baseline", default="flashinfer", show_default=True, help="The variant to compare with.")
@click.option("--fallback", help="The variant to compare with where the baseline has no result.")
@click.option(
    "--format",
    "form",
    default="table",
    show_default=True,
    type=click.Choice(["table", "markdown", "csv", "json", "html"]),
    help="What to make.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write to a file, not to stdout."
)
@click.option("--suite", "suites", multiple=True, help="Only this suite; may be given again.")
@click.option("--brief", is_flag=True, help="On the terminal: geomeans and regrouping only.")
@click.option(
    "--captures",
    type=click.Path(path_type=Path),
    default=Path("captures"),
    show_default=True,
    help="Where the captures lie, for the union-size histograms of html.",
)
@click.option(
    "--fill",
    "documents",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Fill the tables of this Markdown document instead; may be given again.",
)
@click.option(
    "--check", is_flag=True, help="With --fill: write nothing, exit 1 if a document is out of date."
)
@json_option
@handle_errors
def report(
    results: tuple[Path, ...],
    baseline: str,
    fallback: str | None,
    form: str,
    out: Path | None,
    suites: tuple[str, ...],
    brief: bool,
    captures: Path,
    documents: tuple[Path, ...],
    check: bool,
    as_json: bool,
) -> None:
    """Say what is fastest, by how much, how sure, why, and at what accuracy.

    RESULT is a results file or a folder of them. None named = all under results/. Speed-ups are
    ratios of medians with a 95 % bootstrap interval; geomeans never cross suites or devices.

    \b
    Example:
      pwbench report
      pwbench report results/h200.parquet --format html --out report.html
      pwbench report --baseline union8 --format json
      pwbench report --fill README.md --fill docs/results.md --check
    """
    if documents:
        _fill(results, documents, check)
        return
    if check:
        raise InputError("--check goes with --fill; name the documents to check.")
    form = "json" if as_json else form
    from pwbench import load_results
    from pwbench.report import build

    frame = load_results(list(results) or ["results"])
    if suites:
        frame = _only(frame, suites)
    made = build(frame, baseline, fallback)
    if form == "table" and out is None:
        from pwbench.cli._report_view import show

        show(made, full=not brief)
        return
    if form == "json" and out is None:
        from pwbench.report import data

        emit_json(data(made))
        return
    _emit(_text(made, form, captures), out)


def _text(made: Report, form: str, captures: Path) -> str:
    import json

    from pwbench import report as library

    if form == "html":
        from pwbench.report.html import html

        with progress("drawing", None) as task:
            return html(made, captures, note=task.note)
    if form == "csv":
        return library.csv(made)
    if form == "json":
        return json.dumps(library.data(made), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return library.markdown(made)


def _emit(text: str, out: Path | None) -> None:
    if out is None:
        click.echo(text, nl=False)
        return
    replace_text(out, text)
    say(f"wrote {out}")


def _only(frame: pd.DataFrame, suites: tuple[str, ...]) -> pd.DataFrame:
    have = sorted(frame["suite"].unique())
    unknown = [name for name in suites if name not in have]
    if unknown:
        raise InputError(f"The results have no suite {unknown[0]!r}; there are {', '.join(have)}.")
    return frame[frame["suite"].isin(suites)]


def _fill(results: tuple[Path, ...], documents: tuple[Path, ...], check: bool) -> None:
    from pwbench import load_results
    from pwbench.report.documents import fill_files
    from pwbench.results import stored

    frame = load_results(list(results)) if results else stored()
    changed = fill_files(list(documents), frame, check)
    if check and changed:
        again = " ".join(f"--fill {path}" for path in documents)
        raise CheckFailed(
            f"{', '.join(map(str, changed))} differs from what the stored results give; "
            f"run `pwbench report {again}` and commit."
        )
    for path in documents:
        say(f"{path}: {'filled' if path in changed else 'current'}")
