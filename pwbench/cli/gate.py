"""``pwbench gate``: exact counters and timed samples against a blessed baseline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pwbench.cli._common import CONTEXT_SETTINGS, emit_json, handle_errors, json_option, progress, say
from pwbench.errors import CheckFailed, InputError
from pwbench.files import replace_text

if TYPE_CHECKING:
    from pwbench.gate import Outcome

_FILE = click.Path(dir_okay=False, path_type=Path)
_SHOWN = 40


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--baseline", type=_FILE, help="What to compare with. [default: results/counters.json]")
@click.option("--current", type=_FILE, help="Results to judge. [default: count the stored captures]")
@click.option(
    "--captures",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Captures to count; may be given again. [default: captures/]",
)
@click.option("--bless", is_flag=True, help="Make what was measured or counted the new baseline.")
@click.option("--why", default="", help="The reason for blessing; kept in the baseline.")
@click.option("--who", help="Who blesses. [default: git's user.name]")
@click.option("--junit", type=_FILE, help="Write the verdicts as JUnit XML.")
@click.option("--summary", type=_FILE, help="Append a Markdown summary (GitHub: $GITHUB_STEP_SUMMARY).")
@click.option("--strict", is_flag=True, help="UNSURE fails too.")
@json_option
@handle_errors
def gate(
    baseline: Path | None,
    current: Path | None,
    captures: tuple[Path, ...],
    bless: bool,
    why: str,
    who: str | None,
    junit: Path | None,
    summary: Path | None,
    strict: bool,
    as_json: bool,
) -> None:
    """Fail when counters changed or times got slower than the blessed baseline.

    Without options: exact counters of the stored captures, no GPU needed. With two results files:
    every row's time against the noise floor, SAME, FASTER, SLOWER or UNSURE; SLOWER fails.
    Exit codes: 0 passed, 1 failed, 2 the files cannot be compared.

    \b
    Example:
      pwbench gate
      pwbench gate --bless --why "two captures added to suite batch"
      pwbench gate --baseline results/h200.parquet --current new.parquet --junit gate.xml
    """
    from pwbench import counter_baseline

    target = baseline or counter_baseline.DEFAULT
    if current is not None and captures:
        raise InputError("--current and --captures exclude each other: judge results or count captures.")
    if bless:
        _bless(target, current, captures, why, who, as_json)
        return
    if target.suffix == ".parquet":
        if current is None:
            raise InputError(
                f"The baseline {target} holds results; name the results to judge with --current."
            )
        outcome = _compare_results(target, current)
    else:
        outcome = _compare_counters(target, current, captures)
    outcome.strict = strict
    _publish(outcome, junit, summary, as_json)
    if not outcome.passed:
        first = outcome.failures[0]
        raise CheckFailed(
            f"the gate failed: {len(outcome.failures)} of {len(outcome.findings)} comparisons, first "
            f"{first.suite}/{first.capture} {first.what}: {first.verdict}. {first.message}"
        )


def _compare_results(baseline: Path, current: Path) -> Outcome:
    from pwbench import load_results
    from pwbench.gate import compare_results

    return compare_results(load_results(baseline), load_results(current))


def _compare_counters(baseline: Path, current: Path | None, captures: tuple[Path, ...]) -> Outcome:
    from pwbench import counter_baseline, load_results
    from pwbench import gate as library
    from pwbench.results import rows_in_order

    blessed = counter_baseline.read(baseline)["captures"]
    if current is not None:
        return library.Outcome(library.compare_row_counters(blessed, rows_in_order(load_results(current))))
    counted = _count(captures)
    if captures:  # only some captures were asked for: the others are not missing
        blessed = {name: entry for name, entry in blessed.items() if name in counted}
    return library.Outcome(library.compare_counters(blessed, counted))


def _count(captures: tuple[Path, ...]) -> dict[str, Any]:
    from pwbench import counter_baseline
    from pwbench.capture import discover

    total = len(discover([str(path) for path in captures]))
    with progress("counting", total) as task:

        def done(name: str) -> None:
            task.note(name)
            task.advance()

        return counter_baseline.count_captures(captures, done)


def _bless(
    target: Path, current: Path | None, captures: tuple[Path, ...], why: str, who: str | None, as_json: bool
) -> None:
    from pwbench import counter_baseline, results

    if target.suffix == ".parquet":
        if current is None:
            raise InputError(f"To bless times into {target}, name the results with --current.")
        entry = counter_baseline.blessing(why, who)
        about = results.describe(current)["provenance"]
        history = results.describe(target)["provenance"].get("blessed") if target.exists() else []
        history = history if isinstance(history, list) else []
        results.write(target, results.load_rows(current), {**about, "blessed": [*history, entry]})
    else:
        if current is not None:
            raise InputError("Counters are blessed from captures, not from results: leave --current out.")
        counter_baseline.blessing(why, who)  # refuse before minutes of counting
        counted = _count(captures)
        if captures and target.exists():
            counted = {**counter_baseline.read(target)["captures"], **counted}
        entry = counter_baseline.bless(target, counted, why, who)
    say(f"blessed {target}: {entry['who']}, {entry['when']}: {entry['why']}")
    if as_json:
        emit_json({"blessed": entry, "baseline": str(target)})


def _publish(outcome: Outcome, junit: Path | None, summary: Path | None, as_json: bool) -> None:
    from pwbench.report import verdicts

    if junit is not None:
        replace_text(junit, verdicts.junit(outcome))
    if summary is not None:
        summary.parent.mkdir(parents=True, exist_ok=True)
        with summary.open("a", encoding="utf-8") as file:
            file.write(verdicts.markdown(outcome))
    if as_json:
        emit_json(verdicts.data(outcome))
        return
    notable = [f for f in outcome.findings if f.verdict != "SAME"]
    for finding in notable[:_SHOWN]:
        style = "red" if finding in outcome.failures else "green" if finding.verdict == "FASTER" else "yellow"
        label = click.style(f"{finding.verdict:13}", fg=style)
        click.echo(f"{label} {finding.suite}/{finding.capture}  {finding.what}: {finding.message}")
    if len(notable) > _SHOWN:
        click.echo(f"... and {len(notable) - _SHOWN} more; --json lists all.")
    for note in outcome.notes:
        click.echo(note)
    counts = (
        ", ".join(f"{number} {verdict}" for verdict, number in outcome.counts.items()) or "nothing compared"
    )
    click.echo(f"{'passed' if outcome.passed else 'failed'}: {counts}")
