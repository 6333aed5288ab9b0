"""The report's figures as inline SVG.

Every figure is drawn for the width of a phone; wide pages set several side by side. Labels stand above
their bars instead of left of them, because names are long and phones narrow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from pwbench import stats
from pwbench.report import drawing
from pwbench.report.cells import ACCURATE, clock, times, worst
from pwbench.report.contenders import Contender, Gain
from pwbench.report.drawing import TOKEN
from pwbench.report.model import Scope
from pwbench.report.reach import binding_terms
from pwbench.report.tables import ELSEWHERE
from pwbench.results import STAGES


def speedups(scope: Scope) -> str:
    """Speed-up of each contender: its geomean (diamond) and every capture (dots), with their intervals."""
    shown = [c for c in scope.shown if c in scope.geomeans]
    values = [ratio.value for ratio in scope.speedups.values()]
    with rc_context(drawing.RC):
        figure, axes = drawing.rows(len(shown), f"times as fast as {scope.baseline}, logarithmic")
        axes.set_xscale("log")
        axes.set_xlim(0.8 * min(min(values), 1.0), 1.25 * max(max(values), 1.0))
        axes.axvline(1.0, color=TOKEN["ink"], linewidth=0.8)
        drawing.plain_ticks(axes, log=True)
        for place, contender in enumerate(shown):
            colour = TOKEN[_colour(scope, contender)]
            mean = scope.geomeans[contender]
            value = "" if scope.bounds else f"{times(mean.value)}{_plus_minus(mean)}"
            drawing.label(axes, place, scope.named(contender), value)
            captures = [c for c in scope.captures if (contender, c) in scope.speedups]
            spread = np.linspace(-0.12, 0.12, len(captures)) if len(captures) > 1 else [0.0]
            for offset, capture in zip(spread, captures, strict=True):
                own = TOKEN[_colour(scope, contender, capture)]
                drawing.point(axes, scope.speedups[contender, capture], place + offset, own, "o", 2.2, 0.55)
            if not scope.bounds:
                drawing.point(axes, mean, place, colour, "D", 4.5, 1.0)
        return drawing.svg(figure, f"Speed-ups over {scope.baseline}: geomean and every capture")


def capture_speedups(scope: Scope, capture: str) -> str:
    """Speed-up of each contender on one capture, bars with intervals."""
    shown = [c for c in scope.shown if (c, capture) in scope.speedups]
    with rc_context(drawing.RC):
        figure, axes = drawing.rows(len(shown), "times as fast as " + str(scope.baseline))
        axes.axvline(1.0, color=TOKEN["ink"], linewidth=0.8)
        for place, contender in enumerate(shown):
            ratio = scope.speedups[contender, capture]
            drawing.label(axes, place, scope.named(contender), f"{times(ratio.value)}{_plus_minus(ratio)}")
            axes.barh(place, ratio.value, 0.34, color=TOKEN[_colour(scope, contender, capture)])
            if ratio.known:
                ends = [[max(ratio.value - ratio.low, 0.0)], [max(ratio.high - ratio.value, 0.0)]]
                axes.errorbar(ratio.value, place, xerr=ends, color=TOKEN["ink"], capsize=2.5, linewidth=0.9)
        axes.set_xlim(0, 1.06 * max(1.0, *(scope.speedups[c, capture].value for c in shown)))
        return drawing.svg(figure, f"Speed-ups on {capture}")


def stages(scope: Scope, capture: str) -> str:
    """Where each contender's time goes on one capture: a stacked bar of its stages."""
    shown = [(c, scope.cells[c, capture]) for c in scope.shown if (c, capture) in scope.cells]
    totals = [row["complete_us"] for _, row in shown]
    limit = min(max(totals), 4 * float(np.median(totals)))
    unit, write = clock(totals)
    scale = 1e3 if unit == "ms" else 1.0
    with rc_context(drawing.RC):
        figure, axes = drawing.rows(len(shown), f"time of the complete call, {unit}")
        for place, (contender, row) in enumerate(shown):
            ratio = scope.speedups.get((contender, capture))
            value = f"{write(row['complete_us'])} {unit}" + (f"  {times(ratio.value)}" if ratio else "")
            value += ELSEWHERE if scope.elsewhere(contender, capture) else ""
            drawing.label(axes, place, scope.named(contender), value)
            left = 0.0
            for name in (*STAGES, "gap"):
                length = min(max(row[f"{name}_us"] or 0.0, 0.0), max(limit - left, 0.0))
                axes.barh(place, length / scale, 0.34, left=left / scale, color=TOKEN[name])
                left += length
            if row["complete_us"] > 1.001 * limit:
                axes.text(limit / scale, place, " »", va="center", fontsize=9, clip_on=False)
        axes.set_xlim(0, 1.02 * limit / scale)
        return drawing.svg(figure, f"Where the time goes on {capture}")


def accuracy(scope: Scope) -> str:
    """Speed-up against error: up is faster, left is more accurate. Empty where nothing can be drawn."""
    points = _errors_and_speeds(scope)
    if not points or scope.bounds:
        return ""
    speeds = [speed for _, speed, _ in points]
    log = max(speeds) > 6 * min(speeds)
    with rc_context(drawing.RC):
        figure = Figure(figsize=(drawing.WIDTH, max(2.6, 0.6 + 0.21 * len(points))), layout="constrained")
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.set_yscale("log" if log else "linear")
        axes.spines["left"].set_visible(True)
        axes.set_xlim(*_error_limits(points))
        axes.set_ylim(*((0.7 * min(speeds), 1.5 * max(speeds)) if log else (0, 1.12 * max(speeds))))
        drawing.plain_ticks(axes, log, vertical=True)
        # Not as powers: their exponents would be too small to read.
        axes.xaxis.set_major_formatter(lambda value, _place: _error_tick(value))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(True, axis="y")
        for name, at in accuracy_marks(scope).items():
            drawing.mark(axes, at, name)
        for error, speed, contender in points:
            axes.plot(error, speed, "o", color=TOKEN[_colour(scope, contender)], markersize=5, zorder=3)
        names = [c.label for _, _, c in points]
        labels = [
            (error, speed, scope.named(c) if names.count(c.label) > 1 else c.label)
            for error, speed, c in points
        ]
        drawing.annotate(axes, 0.8 * figure.get_figheight(), labels)
        axes.set_xlabel("worst rel-L2 error (left is better)")
        axes.set_ylabel(f"times as fast as {scope.baseline}" + (", logarithmic" if log else ""))
        return drawing.svg(figure, "Accuracy against speed")


LIMIT, CACHE = "limit of accurate", "FP8 cache"
"""Names of the lines that `accuracy` may draw."""


def accuracy_marks(scope: Scope) -> dict[str, float]:
    """The lines of `accuracy` that lie inside its axes, by name: what its caption may speak of."""
    points = _errors_and_speeds(scope)
    if not points:
        return {}
    left, right = _error_limits(points)
    cache = worst((row for c in scope.geomeans for row in scope.rows_of(c)), "fp8_cache_rel_l2")
    return {name: at for name, at in ((LIMIT, ACCURATE), (CACHE, cache)) if at and left < at < right}


def _errors_and_speeds(scope: Scope) -> list[tuple[float, float, Contender]]:
    shown = [c for c in scope.shown if c in scope.geomeans]
    shown = [c for c in shown if c not in scope.probes] or shown  # what nobody would choose is no choice here
    found = [(worst(scope.rows_of(c), "rel_l2"), scope.geomeans[c].value, c) for c in shown]
    # An error of nothing has no place on a logarithmic axis, nor has one that is not finite.
    return [(error, speed, c) for error, speed, c in found if error and math.isfinite(error)]


def _error_tick(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-") if value < 1 else f"{value:g}"


def _error_limits(points: Sequence[tuple[float, float, Contender]]) -> tuple[float, float]:
    """Ends of the axis of errors, with room for the names right of the points."""
    errors = [error for error, _, _ in points]
    left, right = min(errors) / 2, max(errors)
    return left, right * 1.2 * (right / left)


def regrouping(gains: Sequence[Gain]) -> str:
    """One kernel: what regrouping saves in attention, what search and metadata cost, and what is left."""
    unit, _ = clock(gain.original["complete_us"] for gain in gains)
    scale = 1e3 if unit == "ms" else 1.0
    with rc_context(drawing.RC):
        figure, axes = drawing.rows(len(gains), f"{unit} saved (right) or paid (left) per call")
        axes.axvline(0.0, color=TOKEN["ink"], linewidth=0.8)
        for place, gain in enumerate(gains):
            share = 100 * (1 - 1 / gain.online_ratio.value)
            drawing.label(axes, place, gain.capture, f"net {share:+.1f} %")
            axes.barh(place, gain.attention_saved_us / scale, 0.34, color=TOKEN["attention"])
            axes.barh(place, -gain.overhead_paid_us / scale, 0.34, color=TOKEN["search"])
            axes.plot(gain.net_us / scale, place, "D", color=TOKEN["ink"], markersize=4)
        axes.margins(x=0.05)
        return drawing.svg(figure, "What regrouping saves and costs")


def unions(title: str, before: np.ndarray, after: np.ndarray, group: int) -> str:
    """How large the unions of ``group`` queries are, before and after the search put them together."""
    top = int(max(before.max(initial=1), after.max(initial=1)))
    left = before.mean() + after.mean() > top  # where the bars are not
    bins = np.linspace(0, top + 1, min(top + 2, 48)).tolist()
    with rc_context(drawing.RC):
        figure = Figure(figsize=(drawing.WIDTH, 1.75), layout="constrained")
        axes = figure.subplots()
        for sizes, name, offset in ((before, "before", 0.82), (after, "after", 0.68)):
            axes.hist(sizes, bins=bins, histtype="stepfilled", color=TOKEN[name], alpha=0.35)
            axes.hist(sizes, bins=bins, histtype="step", color=TOKEN[name], linewidth=1.2)
            axes.axvline(sizes.mean(), color=TOKEN[name], linewidth=1, linestyle="--")
            place, side = (0.01, "left") if left else (0.99, "right")
            text = f"{name}: mean {sizes.mean():.1f}"
            axes.text(place, offset, text, color=TOKEN[name], ha=side, transform=axes.transAxes)
        saved = 1 - after.sum() / before.sum() if before.sum() else 0.0
        axes.set_title(f"{title}: {saved:.1%} fewer pages", loc="left", fontsize=drawing.SMALL)
        axes.set_xlabel(f"pages in a union of {group} queries")
        axes.set_yticks([])
        axes.set_xlim(0, top + 1)
        return drawing.svg(figure, f"Union sizes of {title}")


_ONE_LINE = 46
"""Characters of a name and its value that fit above a row with room between them."""


def ceilings(scope: Scope, reached: Mapping[Contender, Mapping[str, float]]) -> str:
    """Share of each ceiling that the attention stage reaches, and of the roofline the complete call.

    Args:
        reached: of each contender, shares by ``tensor``, ``L2``, ``exp`` and ``roofline``.
    """
    marks = {"tensor": ("s", "attention"), "L2": ("o", "metadata"), "exp": ("^", "reduction")}
    with rc_context(drawing.RC):
        figure, axes = drawing.rows(len(reached), "% of its own ceiling (geomean over the captures)")
        top = max(100.0, *(100 * v for shares in reached.values() for v in shares.values()))
        axes.set_xlim(0, top * 1.03)
        axes.axvline(100, color=TOKEN["ink"], linewidth=0.8)
        for place, (contender, shares) in enumerate(reached.items()):
            whole = shares.get("roofline")
            terms = binding_terms(scope.rows_of(contender))
            value = "" if whole is None else f"{whole:.0%}, bound by {', '.join(terms)}"
            if len(terms) > 1 and len(scope.named(contender)) + len(value) > _ONE_LINE:
                value = f"{whole:.0%}, bound by {terms[0]} …"
            drawing.label(axes, place, scope.named(contender), value)
            if whole is not None:
                axes.barh(place, 100 * whole, 0.3, color=TOKEN["base"], alpha=0.45)
            for name, (marker, colour) in marks.items():
                if name in shares:
                    axes.plot(100 * shares[name], place, marker, color=TOKEN[colour], markersize=4.5)
        return drawing.svg(figure, "Position against the ceilings")


# Parts --------------------------------------------------------------------------------------


def _colour(scope: Scope, contender: Contender, capture: str | None = None) -> str:
    """The colour of the verdict over the suite, or on one capture."""
    if contender.variant == scope.baseline:
        return "base"
    says = scope.says(contender)
    if capture is not None:
        rows = (scope.cells[contender, capture], scope.base_row(contender, capture))
        floor = scope.floor(row for row in rows if row is not None)
        says = stats.verdict(scope.speedups[contender, capture].inverse(), floor).lower()
    return {"faster": "good", "slower": "bad"}.get(says, "before")


def _plus_minus(ratio: stats.Ratio) -> str:
    if not ratio.known or ratio.low == ratio.high:
        return ""
    return f" ± {100 * (ratio.high - ratio.low) / 2 / ratio.value:.1f} %"
