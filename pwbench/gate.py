"""The gate: did a change alter what a call costs (exact counters), or make it slower (timed samples)?

Tier 1 runs anywhere: counters of the stored captures, or of result rows, must equal the blessed
baseline exactly. Tier 2 compares the times of two results files of one GPU against the noise floor.
A baseline changes only by blessing, which records who, when and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from pwbench import counter_baseline, stats, variants
from pwbench.errors import InputError
from pwbench.report.contenders import samples_of
from pwbench.results import CONFIG, Row, rows_in_order
from pwbench.variants import Variant

COUNTERS = (
    "groups", "selected_pages", "union_pages", "subgroup_pages", "kv_bytes", "mma_flops", "useful_flops",
)  # fmt: skip
"""The columns that tier 1 compares exactly."""

FAILING = ("SLOWER", "CHANGED", "MISSING", "FAILED", "LESS ACCURATE")
"""Verdicts that fail the gate. UNSURE fails only a strict one; SAME, FASTER and NEW pass."""

_ACCURACY_SLACK = 1.25
_KEY = ("suite", "capture", "variant", "window", "precision", "mode", "l2", "tensors")


@dataclass(frozen=True)
class Finding:
    """One comparison and its verdict.

    Attributes:
        tier: 1 (counters) or 2 (times).
        suite, capture: where.
        what: what was compared: a grouping or a variant with how it was run.
        verdict: SAME, FASTER, SLOWER, UNSURE, CHANGED, MISSING, NEW, FAILED or LESS ACCURATE.
        message: the numbers, one sentence.
        change: new time / old time, for tier 2.
        floor: the noise floor that the change was held against.
    """

    tier: int
    suite: str
    capture: str
    what: str
    verdict: str
    message: str
    change: stats.Ratio | None = None
    floor: float | None = None


@dataclass
class Outcome:
    """All findings of one run of the gate."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    strict: bool = False

    @property
    def failures(self) -> list[Finding]:
        failing = (*FAILING, "UNSURE") if self.strict else FAILING
        return [f for f in self.findings if f.verdict in failing]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def counts(self) -> dict[str, int]:
        """How many findings have each verdict, most frequent first."""
        return dict(Counter(f.verdict for f in self.findings).most_common())


# Tier 1 -------------------------------------------------------------------------------------


def compare_counters(blessed: Mapping[str, Any], current: Mapping[str, Any]) -> list[Finding]:
    """Counters of captures against the blessed ones, exactly.

    Args:
        blessed, current: ``{"suite/capture": {"tables_sha256", "groupings": {name: counters}}}``, as
            `pwbench.counter_baseline.count_captures` makes them.
    """
    found = []
    for name in sorted(set(blessed) | set(current)):
        suite, _, capture = name.rpartition("/")
        if name not in current:
            found.append(
                Finding(1, suite, capture, "capture", "MISSING", "It is blessed but is not there now.")
            )
        elif name not in blessed:
            text = "It is not blessed yet; `pwbench gate --bless --why ...` adds it."
            found.append(Finding(1, suite, capture, "capture", "CHANGED", text))
        else:
            found += _compare_capture(suite, capture, blessed[name], current[name])
    return found


def _compare_capture(
    suite: str, capture: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> list[Finding]:
    if old["tables_sha256"] != new["tables_sha256"]:
        text = (
            f"The selections differ: tables {new['tables_sha256'][:12]}, blessed {old['tables_sha256'][:12]}."
        )
        return [Finding(1, suite, capture, "tables", "CHANGED", text)]
    found = []
    for grouping in sorted(set(old["groupings"]) | set(new["groupings"])):
        before, after = old["groupings"].get(grouping), new["groupings"].get(grouping)
        if before is None or after is None:
            text = f"The grouping is {'not blessed' if before is None else 'no longer counted'}."
            found.append(Finding(1, suite, capture, grouping, "CHANGED", text))
        else:
            found.append(_counter_finding(suite, capture, grouping, before, after))
    return found


def _counter_finding(
    suite: str, capture: str, what: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Finding:
    differing = [name for name in COUNTERS if before.get(name) != after.get(name)]
    if not differing:
        return Finding(1, suite, capture, what, "SAME", f"{len(COUNTERS)} counters are equal.")
    text = ", ".join(f"{name} {after.get(name)} (blessed {before.get(name)})" for name in differing)
    return Finding(1, suite, capture, what, "CHANGED", text + ".")


def compare_row_counters(blessed: Mapping[str, Any], rows: Iterable[Row]) -> list[Finding]:
    """Counters of result rows against a blessed counter baseline, exactly.

    Rows of captures that are not in the baseline are MISSING from it; rows without counters are
    left out.
    """
    found = []
    for row in rows:
        if row["status"] != "ok" or row["groups"] is None:
            continue
        what = _what(row)
        old = blessed.get(f"{row['suite']}/{row['capture']}")
        if old is None:
            found.append(
                Finding(1, row["suite"], row["capture"], what, "MISSING", "The capture is not blessed.")
            )
        elif old["tables_sha256"] != row["tables_sha256"]:
            text = "The row was measured on other selections than those blessed."
            found.append(Finding(1, row["suite"], row["capture"], what, "CHANGED", text))
        else:
            before = _grouping_of(row, old["groupings"])
            found.append(_counter_finding(row["suite"], row["capture"], what, before, row))
    return found


def _grouping_of(row: Row, groupings: Mapping[str, Any]) -> Mapping[str, Any]:
    if row["variant"] in groupings:  # one that counts in a way of its own
        return dict(groupings[row["variant"]])
    if row["window"] is not None:
        matching = searches_by_matching(row["variant"])
        name = counter_baseline.MATCHING if matching else f"regroup-w{int(row['window'])}"
        return groupings.get(name, {})
    alone = groupings.get("per-query", {})
    return alone if alone.get("groups") == row["groups"] else groupings.get("original", {})


def search_group(variant: str) -> int:
    """Queries that the variant's search puts together; of one that is not here any more, the usual 8."""
    return int(getattr(_known(variant), "search_group", counter_baseline.GROUP))


def searches_by_matching(variant: str) -> bool:
    """Whether the variant's search is `pwbench.grouping.match`, not the greedy one."""
    return bool(getattr(_known(variant), "matching", False))


def _known(variant: str) -> Variant | None:
    return variants.get(variant) if variant in variants.names() else None


# Tier 2 -------------------------------------------------------------------------------------


def compare_results(baseline: pd.DataFrame, current: pd.DataFrame) -> Outcome:
    """Times, accuracy and counters of two results files, row by row.

    Rows of a CPU are compared by counters and accuracy only: CPU times say nothing about a GPU.

    Raises:
        InputError: the files are of different GPUs, precisions, modes, L2 states or captures.
    """
    old = {_key(row): row for row in rows_in_order(baseline)}
    new = {_key(row): row for row in rows_in_order(current)}
    _refuse_unlike(list(old.values()), list(new.values()))
    outcome = Outcome()
    for key in sorted(set(old) | set(new), key=str):
        row = new.get(key) or old[key]
        where = (row["suite"], row["capture"], _what(row))
        if key not in old:
            outcome.findings.append(Finding(2, *where, "NEW", "The baseline has no such row."))
        elif old[key]["status"] != "ok":
            continue
        elif key not in new:
            outcome.findings.append(
                Finding(2, *where, "MISSING", "The baseline has this row, the current file not.")
            )
        elif new[key]["status"] != "ok":
            text = f"It is {new[key]['status']} now: {new[key]['reason']}"
            outcome.findings.append(Finding(2, *where, "FAILED", text))
        else:
            outcome.findings += _compare_rows(where, old[key], new[key])
    if all(row["device"] == "cpu" for row in new.values()):
        outcome.notes.append("CPU rows: counters and accuracy were compared, times were not.")
    return outcome


def _compare_rows(where: tuple[str, str, str], old: Row, new: Row) -> list[Finding]:
    found = []
    if old["groups"] is not None:
        counters = _counter_finding(*where, old, new)
        if counters.verdict != "SAME" or new["device"] == "cpu":
            found.append(counters)
    before, after = old["rel_l2"], new["rel_l2"]
    if before is not None and (after is None or after > _ACCURACY_SLACK * before + 1e-6):
        text = f"rel-L2 is {after if after is None else f'{after:.2e}'}, was {before:.2e}."
        found.append(Finding(2, *where, "LESS ACCURATE", text))
    if new["device"] == "cuda":
        found.append(_time_finding(where, old, new))
    return found


def _time_finding(where: tuple[str, str, str], old: Row, new: Row) -> Finding:
    same_session = old["session"] == new["session"]
    first, second = samples_of(new), samples_of(old)
    change = stats.ratio_of_medians(first, second, same_session and len(first) == len(second))
    floor = stats.floor_of(old["noise_floor"], new["noise_floor"], same_session=same_session)
    verdict = stats.verdict(change, floor)
    text = f"{old['complete_us']:.2f} -> {new['complete_us']:.2f} us, ratio {change.value:.4f}"
    if change.known:
        text += f" [{change.low:.4f}, {change.high:.4f}], noise floor {floor:.2%}."
    if verdict == "UNSURE":
        text += (
            " The interval straddles the floor; take more samples."
            if change.enough
            else f" {change.samples} samples are too few, at least {stats.ENOUGH} are needed."
        )
    throttled = "; ".join(sorted({str(r["throttle"]) for r in (old, new) if r["throttle"]}))
    if throttled:
        text += f" Disturbed: {throttled}."
    return Finding(2, *where, verdict, text, change, floor)


def _refuse_unlike(old: list[Row], new: list[Row]) -> None:
    """Two files that were not measured alike are not compared at all."""
    for name in (*CONFIG, "tensors", "generator"):
        before, after = ({row[name] for row in rows if row["status"] == "ok"} for rows in (old, new))
        if before != after:
            raise InputError(
                f"The files differ in {name}: baseline {_listed(before)}, current {_listed(after)}. "
                "Only results measured alike are compared; replay again as the baseline was."
            )
    captures = [{(row["suite"], row["capture"], row["tables_sha256"]) for row in rows} for rows in (old, new)]
    if captures[0] != captures[1]:
        odd = sorted(f"{suite}/{name}" for suite, name, _ in captures[0] ^ captures[1])
        raise InputError(
            f"The files hold different captures ({', '.join(dict.fromkeys(odd))} differ or are only in one). "
            "Replay the same captures, or bless a new baseline."
        )


def _listed(values: set[Any]) -> str:
    return ", ".join(sorted(map(str, values))) or "nothing"


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _KEY)


def _what(row: Row) -> str:
    window = "" if row["window"] is None else f" W{int(row['window'])}"
    return f"{row['variant']}{window} ({row['precision']}, {row['mode']}, L2 {row['l2']}, {row['tensors']})"
