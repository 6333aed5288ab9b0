"""Tables that compare a variant with itself: regrouping, window sizes, cache states, seeded tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from pwbench import stats
from pwbench.report.cells import Table, clock, count, interval, percent, times
from pwbench.report.contenders import Contender, Gain, compare, contender_of, samples_of
from pwbench.report.model import Report, Scope
from pwbench.results import INPUTS, Row

OURS = ("union8", "pageweaver", "page-union")
"""How the names of pwbench's own kernels begin: what their rows say in ``peer`` is no library."""


def regroup(report: Report, scope: Scope) -> Table:
    """Does the search pay for itself? T_original, T_online and T_precomputed of every kernel."""
    return _gain_table(
        f"Regrouping, {scope.suite}: {scope.config}", [(scope, g) for g in scope.gains], means=True
    )


def losses(report: Report, scopes: Iterable[Scope]) -> Table:
    """Every capture, of all suites, on which the online path is slower than the original order, beyond the
    noise."""
    lost = [(s, g) for s in scopes for g in s.gains if g.says == "slower"]
    lost.sort(key=lambda item: item[1].online_ratio.value)
    table = _gain_table("Where regrouping loses, worst first", lost, means=False)
    table.notes.append(
        "Only captures on which the verdict is slower: the whole interval lies beyond the noise floor."
    )
    return table


def _gain_table(title: str, gains: list[tuple[Scope, Gain]], means: bool) -> Table:
    unit, write = clock(g.original["complete_us"] for _, g in gains)
    table = Table(
        title,
        [
            "capture",
            "kernel",
            "precision",
            "window",
            f"T original, {unit}",
            f"T online, {unit}",
            f"T precomputed, {unit}",
            "net gain",
            "95 % interval",
            f"attention saved, {unit}",
            f"search + metadata paid, {unit}",
            "gain if the search were free",
            "union pages saved",
            "4-query pages saved",
        ],
        notes=[
            "original: queries in their own order. online: the permutation is found inside the timed call. "
            "precomputed: the same permutation handed in. net gain = (T original - T online) / T original."
        ],
        text=(0, 1, 2),
    )
    blocks: dict[Contender, list[Gain]] = {}
    for scope, gain in gains:
        contender = gain.contender
        if means and contender not in blocks:
            _close(table, blocks)
            table.breaks.add(len(table.rows))
        blocks.setdefault(contender, []).append(gain)
        pre = gain.precomputed
        name = gain.capture if means else f"{scope.suite}/{gain.capture}"
        table.rows.append(
            [
                name,
                gain.kernel,
                contender.precision,
                str(gain.window or ""),
                write(gain.original["complete_us"]),
                write(gain.online["complete_us"]),
                write(pre["complete_us"]) if pre else "",
                percent(1 - 1 / gain.online_ratio.value, True),
                _share_interval(gain.online_ratio),
                write(gain.attention_saved_us),
                write(gain.overhead_paid_us),
                percent(1 - 1 / gain.precomputed_ratio.value, True) if gain.precomputed_ratio else "",
                _saved(gain, "union_pages"),
                _saved(gain, "subgroup_pages"),
            ]
        )
    if means:
        _close(table, blocks)
    return table


def _close(table: Table, blocks: dict[Contender, list[Gain]]) -> None:
    """End a kernel's block with its geomean over the captures."""
    if not blocks:
        return
    contender, gains = list(blocks.items())[-1]
    online = stats.geomean([g.online_ratio for g in gains])
    pre = [g.precomputed_ratio for g in gains if g.precomputed_ratio]
    free = percent(1 - 1 / stats.geomean(pre).value, True) if pre else ""
    table.strong.add(len(table.rows))
    table.rows.append(
        [
            "geomean",
            gains[0].kernel,
            contender.precision,
            str(gains[0].window or ""),
            "",
            "",
            "",
            percent(1 - 1 / online.value, True),
            _share_interval(online),
            "",
            "",
            free,
            "",
            "",
        ]
    )


def _share_interval(ratio: stats.Ratio) -> str:
    if not ratio.known:
        return interval(ratio)
    return f"{100 * (1 - 1 / ratio.low):+.1f} to {100 * (1 - 1 / ratio.high):+.1f} %"


def _saved(gain: Gain, counter: str) -> str:
    before, after = gain.original[counter], gain.online[counter]
    return percent(1 - after / before) if before and after is not None else ""


def unions(report: Report, scopes: Iterable[Scope]) -> Table:
    """Page visits before and after regrouping, from the exact counters."""
    table = Table(
        "Union pages before and after regrouping (exact counters)",
        [
            "suite",
            "capture",
            "context",
            "kernel",
            "window",
            "selected pages",
            "union pages before",
            "after",
            "saved",
            "4-query pages before",
            "after",
            "saved",
            "pages per union before",
            "after",
        ],
        notes=[
            "Union pages are page visits, which decide the bytes moved; 4-query pages are tensor rounds. "
            "union8's search puts 8 queries together and minimises the first only; pageweaver's puts the 4 "
            "of a tile together for the second, then pairs tiles for the first."
        ],
        text=(0, 1, 3),
    )
    seen: set[tuple[Any, ...]] = set()
    for scope in scopes:
        table.breaks.add(len(table.rows))
        for gain in sorted(
            scope.gains, key=lambda g: (scope.captures.index(g.capture), g.kernel, g.window or 0)
        ):
            before, after = gain.original, gain.online
            key = (
                scope.suite,
                gain.capture,
                gain.kernel,
                gain.window,
                before["union_pages"],
                after["union_pages"],
            )
            if key in seen or not before["union_pages"] or after["union_pages"] is None:
                continue
            seen.add(key)
            mean = [f"{r['union_pages'] / r['groups']:.1f}" if r["groups"] else "" for r in (before, after)]
            four = [r["subgroup_pages"] for r in (before, after)]
            table.rows.append(
                [
                    scope.suite,
                    gain.capture,
                    count(before["context"]),
                    gain.kernel,
                    str(gain.window or ""),
                    count(before["selected_pages"]),
                    count(before["union_pages"]),
                    count(after["union_pages"]),
                    _saved(gain, "union_pages"),
                    count(four[0]),
                    count(four[1]),
                    _saved(gain, "subgroup_pages"),
                    *mean,
                ]
            )
    return table


def windows(report: Report, scopes: Iterable[Scope]) -> Table:
    """The same variant with two window sizes, per capture."""
    pairs = []
    for scope in scopes:
        for (contender, capture), row in scope.cells.items():
            twin = Contender(contender.variant, contender.precision, 128)
            if contender.window == 64 and (twin, capture) in scope.cells:
                pairs.append((scope, contender, capture, row, scope.cells[twin, capture]))
    unit, write = clock(row["complete_us"] for *_, row, _ in pairs)
    table = Table(
        "Window of 64 against 128 query positions",
        [
            "suite",
            "capture",
            "variant",
            "precision",
            f"T with W64, {unit}",
            f"T with W128, {unit}",
            "W64 / W128",
            "95 % interval",
            "net gain W64",
            "W128",
            "union pages W64",
            "W128",
        ],
        notes=[
            "Below 1 the smaller window is faster: its search is shorter, its unions are larger. The two run "
            "in different sessions; each net gain is over the original order of its own session, and is the "
            "fairer comparison."
        ],
        text=(0, 1, 2, 3),
    )
    for scope, contender, capture, small, large in pairs:
        ratio = compare(small, large)
        gains = {g.contender.window: g for g in scope.gains if _same_kernel(g, contender, capture)}
        table.rows.append(
            [
                scope.suite,
                capture,
                contender.variant,
                contender.precision,
                write(small["complete_us"]),
                write(large["complete_us"]),
                f"{ratio.value:.3f}",
                interval(ratio),
                *(
                    percent(1 - 1 / gains[w].online_ratio.value, True) if w in gains else ""
                    for w in (64, 128)
                ),
                count(small["union_pages"]),
                count(large["union_pages"]),
            ]
        )
    return table


def _same_kernel(gain: Gain, contender: Contender, capture: str) -> bool:
    mine = (gain.contender.variant, gain.contender.precision, gain.capture)
    return mine == (contender.variant, contender.precision, capture)


def cache(report: Report, scopes: Iterable[Scope]) -> Table:
    """Cold against warm L2: each contender's speed-up in both, and what a cold cache costs it."""
    scopes = list(scopes)
    table = Table(
        "L2 cold against warm",
        [
            "suite",
            "variant",
            "precision",
            "speed-up cold",
            "speed-up warm",
            "cold time / warm time",
            "captures",
        ],
        notes=[
            "Cold: the cache is flushed before each sample. The last ratio is a geomean over the captures."
        ],
        text=(0, 1, 2),
    )
    for cold in (s for s in scopes if s.l2 == "cold"):
        same = (cold.suite, cold.device, cold.gpu, cold.mode)
        warm = next(
            (s for s in scopes if s.l2 == "warm" and (s.suite, s.device, s.gpu, s.mode) == same), None
        )
        if warm is None:
            continue
        table.breaks.add(len(table.rows))
        for contender in (c for c in cold.contenders if c not in cold.twins):
            both = [c for c in cold.captures if (contender, c) in cold.cells and (contender, c) in warm.cells]
            if not both:
                continue
            ratio = stats.geomean([compare(*_cold_and_warm(cold, warm, contender, c)) for c in both])
            means = [s.geomeans.get(contender) for s in (cold, warm)]
            table.rows.append(
                [
                    cold.suite,
                    contender.label,
                    cold.precision_of(contender),
                    *(times(m.value if m else None) for m in means),
                    f"{ratio.value:.3f}",
                    str(len(both)),
                ]
            )
    return table


def _cold_and_warm(cold: Scope, warm: Scope, contender: Contender, capture: str) -> tuple[Row, Row]:
    """The current warm row and the cold one of its session and tensors, or else the current cold one."""
    row = warm.cells[contender, capture]
    alike = ("capture", "session", *INPUTS)
    same = [
        other
        for other in cold.others
        if all(other[name] == row[name] for name in alike) and contender_of(other) == contender
    ]
    return (same[-1] if same else cold.cells[contender, capture]), row


def tensors(report: Report, scopes: Iterable[Scope]) -> Table:
    """Does a capture with seeded Q and KV time like the same capture with the model's own tensors?"""
    pairs = [pair for scope in scopes for pair in _tensor_pairs(scope)]
    unit, write = clock(row["complete_us"] for *_, stored, seeded in pairs for row in (stored, seeded))
    table = Table(
        "Seeded tensors against the model's own: does it change the time?",
        [
            "suite",
            "capture",
            "L2",
            "variant",
            "precision",
            f"stored, {unit}",
            f"seeded, {unit}",
            "seeded / stored",
            "95 % interval",
            "noise floor",
            "verdict",
        ],
        text=(0, 1, 2, 3, 4, 10),
    )
    ratios, verdicts = [], []
    for scope, contender, stored, seeded in pairs:
        ratio = compare(seeded, stored)
        same_session = stored["session"] == seeded["session"]
        floor = stats.floor_of(stored["noise_floor"], seeded["noise_floor"], same_session=same_session)
        ratios.append(ratio)
        verdicts.append(stats.verdict(ratio, floor).lower())
        table.rows.append(
            [
                scope.suite,
                stored["capture"],
                scope.l2,
                contender.label,
                scope.precision_of(contender),
                write(stored["complete_us"]),
                write(seeded["complete_us"]),
                f"{ratio.value:.3f}",
                interval(ratio),
                percent(floor),
                verdicts[-1],
            ]
        )
    if ratios:
        mean, low, high = stats.geomean(ratios), *(end(r.value for r in ratios) for end in (min, max))
        table.notes = [
            f"same in {verdicts.count('same')} of {len(pairs)} pairs: the whole interval lies within twice "
            f"the noise floor of 1. Geomean of seeded / stored {mean.value:.3f}, from {low:.3f} to "
            f"{high:.3f}."
        ]
    return table


def _tensor_pairs(scope: Scope) -> list[tuple[Scope, Contender, Row, Row]]:
    """The newest stored and seeded row of each contender and capture, of one session where there are such."""
    newest: dict[tuple[Any, ...], dict[str, Row]] = {}
    together: dict[tuple[Any, ...], dict[str, dict[str, Row]]] = {}
    for row in scope.others:
        key = (row["capture"], row["tables_sha256"], contender_of(row))
        newest.setdefault(key, {})[row["tensors"]] = row
        together.setdefault(key, {}).setdefault(row["session"], {})[row["tensors"]] = row
    found = []
    for key, apart in newest.items():
        pairs = [both for both in together[key].values() if len(both) == 2]
        both = pairs[-1] if pairs else apart
        if {"stored", "seeded"} <= set(both) and key[2] not in scope.twins:
            found.append((scope, key[2], both["stored"], both["seeded"]))
    return found


def provenance(report: Report) -> Table:
    """What was measured, where, when and with which versions."""
    frame = report.frame
    table = Table("Provenance", ["what", "value"], text=(0, 1))
    names = {
        "gpu": "machine",
        "driver": "driver",
        "cuda": "CUDA",
        "torch": "PyTorch",
        "cupy": "CuPy",
        "peer": "other libraries",
        "commit": "pwbench commit",
        "mode": "launch",
        "l2": "L2 state",
        "tensors": "Q and KV",
    }
    for column, heading in names.items():
        ours = frame["variant"].str.startswith(OURS)
        if column == "peer":
            _list(table, heading, frame[column][~ours])
            _list(table, "how our kernels divided the work", frame[column][ours])
        else:
            _list(table, heading, frame[column])
    dates = sorted(str(d)[:10] for d in frame["created_utc"].dropna())
    if dates:
        table.rows.append(["measured", dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"])
    sizes = [len(samples_of(row)) for scope in report.scopes for row in scope.cells.values()]
    if sizes:
        table.rows.append(
            [
                "samples per row",
                f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}",
            ]
        )
    table.rows.append(["rows", f"{len(frame)} from {frame['session'].nunique()} session(s)"])
    if "file" in frame:
        table.rows.append(["files", ", ".join(sorted({str(f) for f in frame["file"]}))])
    return table


def _list(table: Table, heading: str, column: pd.Series) -> None:
    values = sorted({str(v) for v in column.dropna() if str(v)})
    if values:
        table.rows.append([heading, "; ".join(values)])
