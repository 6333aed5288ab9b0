"""The report's figures as inline SVG. Colours are CSS variables: one drawing serves light and dark.

Every figure is drawn about 400 pixels wide, the width of a phone; wide pages set several side by
side. Labels stand above their bars instead of left of them, because names are long and phones narrow.
"""

from __future__ import annotations

import io
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from pwbench import stats
from pwbench.report.cells import ACCURATE, clock, times, worst
from pwbench.report.contenders import Contender, Gain
from pwbench.report.model import Scope
from pwbench.results import STAGES, Row

_WIDTH, _PITCH = 4.2, 0.33
_NAMES = ("ink", "muted", "grid", "good", "bad", "base", "before", "after", "gap", "bg", *STAGES)
# A colour nobody uses stands for each CSS variable until the drawing is text.
_TOKEN = {name: f"#0102{index:02x}" for index, name in enumerate(_NAMES, 16)}
_RC = {
    "svg.fonttype": "none", "svg.hashsalt": "pwbench", "font.size": 8, "axes.linewidth": 0.6,
    "text.color": _TOKEN["ink"], "axes.labelcolor": _TOKEN["muted"], "axes.edgecolor": _TOKEN["grid"],
    "xtick.color": _TOKEN["muted"], "ytick.color": _TOKEN["muted"], "xtick.major.size": 2.5,
    "xtick.major.width": 0.6, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "grid.color": _TOKEN["grid"], "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": 7.5,
}  # fmt: skip
_HEAD = (
    r'<svg viewBox="\1" role="img" xmlns="http://www.w3.org/2000/svg" '
    r'xmlns:xlink="http://www.w3.org/1999/xlink">'
)
_UNDER = {"facecolor": _TOKEN["bg"], "edgecolor": "none", "pad": 0.4}  # lines do not strike through a label
_LABELS: dict[str, Any] = {"ha": "left", "va": "bottom", "fontsize": 7.5, "zorder": 2.5, "bbox": _UNDER}


def speedups(scope: Scope) -> str:
    """Speed-up of each contender: its geomean (diamond) and every capture (dots), with their intervals."""
    shown = [c for c in scope.shown if c in scope.geomeans]
    values = [ratio.value for ratio in scope.speedups.values()]
    log = max(values) > 6 * min(values)
    with rc_context(_RC):
        figure, axes = _rows(len(shown), "times as fast as " + str(scope.baseline))
        axes.set_xscale("log" if log else "linear")
        low = 0.8 * min(min(values), 1.0) if log else 0.0
        axes.set_xlim(low, (1.25 if log else 1.08) * max(max(values), 1.0))
        axes.axvline(1.0, color=_TOKEN["ink"], linewidth=0.8)
        _plain_ticks(axes, log)
        for place, contender in enumerate(shown):
            colour = _TOKEN[_colour(scope, contender)]
            mean = scope.geomeans[contender]
            _label(axes, place, scope.named(contender), f"{times(mean.value)}{_plus_minus(mean)}")
            captures = [c for c in scope.captures if (contender, c) in scope.speedups]
            spread = np.linspace(-0.12, 0.12, len(captures)) if len(captures) > 1 else [0.0]
            for offset, capture in zip(spread, captures, strict=True):
                own = _TOKEN[_colour(scope, contender, capture)]
                _point(axes, scope.speedups[contender, capture], place + offset, own, "o", 2.2, 0.55)
            _point(axes, mean, place, colour, "D", 4.5, 1.0)
        return _svg(figure, f"Speed-ups over {scope.baseline}: geomean and every capture")


def capture_speedups(scope: Scope, capture: str) -> str:
    """Speed-up of each contender on one capture, bars with intervals."""
    shown = [c for c in scope.shown if (c, capture) in scope.speedups]
    with rc_context(_RC):
        figure, axes = _rows(len(shown), "times as fast as " + str(scope.baseline))
        axes.axvline(1.0, color=_TOKEN["ink"], linewidth=0.8)
        for place, contender in enumerate(shown):
            ratio = scope.speedups[contender, capture]
            _label(axes, place, scope.named(contender), f"{times(ratio.value)}{_plus_minus(ratio)}")
            axes.barh(place, ratio.value, 0.34, color=_TOKEN[_colour(scope, contender, capture)])
            if ratio.known:
                ends = [[max(ratio.value - ratio.low, 0.0)], [max(ratio.high - ratio.value, 0.0)]]
                axes.errorbar(ratio.value, place, xerr=ends, color=_TOKEN["ink"], capsize=2.5, linewidth=0.9)
        axes.set_xlim(0, 1.06 * max(1.0, *(scope.speedups[c, capture].value for c in shown)))
        return _svg(figure, f"Speed-ups on {capture}")


def stages(scope: Scope, capture: str) -> str:
    """Where each contender's time goes on one capture: a stacked bar of its stages."""
    shown = [(c, scope.cells[c, capture]) for c in scope.shown if (c, capture) in scope.cells]
    totals = [row["complete_us"] for _, row in shown]
    limit = min(max(totals), 4 * float(np.median(totals)))
    unit, write = clock(totals)
    scale = 1e3 if unit == "ms" else 1.0
    with rc_context(_RC):
        figure, axes = _rows(len(shown), f"time of the complete call, {unit}")
        for place, (contender, row) in enumerate(shown):
            ratio = scope.speedups.get((contender, capture))
            value = f"{write(row['complete_us'])} {unit}" + (f"  {times(ratio.value)}" if ratio else "")
            _label(axes, place, scope.named(contender), value)
            left = 0.0
            for name in (*STAGES, "gap"):
                length = min(max(row[f"{name}_us"] or 0.0, 0.0), max(limit - left, 0.0))
                axes.barh(place, length / scale, 0.34, left=left / scale, color=_TOKEN[name])
                left += length
            if row["complete_us"] > 1.001 * limit:
                axes.text(limit / scale, place, " »", va="center", fontsize=9, clip_on=False)
        axes.set_xlim(0, 1.02 * limit / scale)
        return _svg(figure, f"Where the time goes on {capture}")


def accuracy(scope: Scope) -> str:
    """Speed-up against error: up is faster, left is more accurate."""
    shown = [c for c in scope.shown if c in scope.geomeans]
    found = [(worst(scope.rows_of(c), "rel_l2"), scope.geomeans[c].value, c) for c in shown]
    # An error of nothing has no place on a logarithmic axis, nor has one that is not finite.
    points = [(error, speed, c) for error, speed, c in found if error and math.isfinite(error)]
    if not points:
        return ""
    errors = [error for error, _, _ in points]
    speeds = [speed for _, speed, _ in points]
    log = max(speeds) > 6 * min(speeds)
    with rc_context(_RC):
        figure = Figure(figsize=(_WIDTH, max(2.6, 0.6 + 0.19 * len(points))), layout="constrained")
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.set_yscale("log" if log else "linear")
        axes.spines["left"].set_visible(True)
        left, right = min(errors) / 2, max(errors)
        axes.set_xlim(left, right * 1.2 * (right / left) ** 0.75)
        axes.set_ylim(*((0.7 * min(speeds), 1.5 * max(speeds)) if log else (0, 1.12 * max(speeds))))
        _plain_ticks(axes, log, vertical=True)
        axes.grid(True, axis="y")
        if left < ACCURATE < axes.get_xlim()[1]:
            _mark(axes, ACCURATE, "accurate")
        cache = worst((row for c in scope.geomeans for row in scope.rows_of(c)), "fp8_cache_rel_l2")
        if cache and left < cache < axes.get_xlim()[1]:
            _mark(axes, cache, "FP8 cache")
        for error, speed, contender in points:
            colour = _TOKEN[_colour(scope, contender)]
            axes.plot(error, speed, "o", color=colour, markersize=5, zorder=3)
        _annotate(axes, 0.8 * figure.get_figheight(), [(error, speed, c.label) for error, speed, c in points])
        axes.set_xlabel("worst rel-L2 error (left is better)")
        axes.set_ylabel(f"times as fast as {scope.baseline}")
        return _svg(figure, "Accuracy against speed")


def regrouping(gains: Sequence[Gain]) -> str:
    """One kernel: what regrouping saves in attention, what search and metadata cost, and what is left."""
    unit, _ = clock(gain.original["complete_us"] for gain in gains)
    scale = 1e3 if unit == "ms" else 1.0
    with rc_context(_RC):
        figure, axes = _rows(len(gains), f"{unit} saved (right) or paid (left) per call")
        axes.axvline(0.0, color=_TOKEN["ink"], linewidth=0.8)
        for place, gain in enumerate(gains):
            share = 100 * (1 - 1 / gain.online_ratio.value)
            axes.text(0, place - 0.28, gain.capture, transform=axes.get_yaxis_transform(), **_LABELS)
            axes.text(1, place - 0.28, f"net {share:+.1f} %", transform=axes.get_yaxis_transform(),
                      **{**_LABELS, "ha": "right"})  # fmt: skip
            axes.barh(place, gain.attention_saved_us / scale, 0.34, color=_TOKEN["attention"])
            axes.barh(place, -gain.overhead_paid_us / scale, 0.34, color=_TOKEN["search"])
            axes.plot(gain.net_us / scale, place, "D", color=_TOKEN["ink"], markersize=4)
        axes.margins(x=0.05)
        return _svg(figure, "What regrouping saves and costs")


def unions(title: str, before: np.ndarray, after: np.ndarray, group: int) -> str:
    """How large the unions of ``group`` queries are, before and after the search put them together."""
    top = int(max(before.max(initial=1), after.max(initial=1)))
    left = before.mean() + after.mean() > top  # where the bars are not
    bins = np.linspace(0, top + 1, min(top + 2, 48)).tolist()
    with rc_context(_RC):
        figure = Figure(figsize=(_WIDTH, 1.75), layout="constrained")
        axes = figure.subplots()
        for sizes, name, offset in ((before, "before", 0.82), (after, "after", 0.68)):
            axes.hist(sizes, bins=bins, histtype="stepfilled", color=_TOKEN[name], alpha=0.35)
            axes.hist(sizes, bins=bins, histtype="step", color=_TOKEN[name], linewidth=1.2)
            axes.axvline(sizes.mean(), color=_TOKEN[name], linewidth=1, linestyle="--")
            place, side = (0.01, "left") if left else (0.99, "right")
            text = f"{name}: mean {sizes.mean():.1f}"
            axes.text(
                place, offset, text, color=_TOKEN[name], ha=side, transform=axes.transAxes, fontsize=7.5
            )
        saved = 1 - after.sum() / before.sum() if before.sum() else 0.0
        axes.set_title(f"{title}: {saved:.1%} fewer pages", loc="left", fontsize=8)
        axes.set_xlabel(f"pages in a union of {group} queries")
        axes.set_yticks([])
        axes.set_xlim(0, top + 1)
        return _svg(figure, f"Union sizes of {title}")


def ceilings(scope: Scope, reached: dict[Contender, dict[str, float]]) -> str:
    """Share of each ceiling that the attention stage reaches, and of the roofline the complete call."""
    marks = {"tensor": ("s", "attention"), "L2": ("o", "metadata"), "exp": ("^", "reduction")}
    with rc_context(_RC):
        figure, axes = _rows(len(reached), "% of the ceiling (geomean over the captures)")
        top = max(100.0, *(100 * v for shares in reached.values() for v in shares.values()))
        axes.set_xlim(0, top * 1.03)
        axes.axvline(100, color=_TOKEN["ink"], linewidth=0.8)
        for place, (contender, shares) in enumerate(reached.items()):
            whole = shares.get("roofline")
            _label(axes, place, scope.named(contender), "" if whole is None else f"roofline {whole:.0%}")
            if whole is not None:
                axes.barh(place, 100 * whole, 0.3, color=_TOKEN["base"], alpha=0.45)
            for name, (marker, colour) in marks.items():
                if name in shares:
                    axes.plot(100 * shares[name], place, marker, color=_TOKEN[colour], markersize=4.5)
        return _svg(figure, "Position against the ceilings")


# Parts --------------------------------------------------------------------------------------


def _rows(count: int, xlabel: str) -> tuple[Figure, Axes]:
    """A figure of ``count`` rows, first on top, a label line above each."""
    height = 0.5 + _PITCH * max(count, 1)
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_axes((0.025, 0.40 / height, 0.95, 1 - 0.45 / height))
    axes.set_ylim(count - 0.65, -0.85)
    axes.set_yticks([])
    axes.set_axisbelow(True)
    axes.grid(True, axis="x")
    axes.set_xlabel(xlabel)
    return figure, axes


def _label(axes: Axes, place: int, name: str, value: str) -> None:
    across = axes.get_yaxis_transform()
    axes.text(0, place - 0.28, name, transform=across, **_LABELS)
    axes.text(1, place - 0.28, value, transform=across, **{**_LABELS, "ha": "right"})


def _point(
    axes: Axes, ratio: stats.Ratio, y: float, colour: str, marker: str, size: float, alpha: float
) -> None:
    ends = None
    if ratio.known:
        ends = [[max(ratio.value - ratio.low, 0.0)], [max(ratio.high - ratio.value, 0.0)]]
    axes.errorbar(
        ratio.value,
        y,
        xerr=ends,
        fmt=marker,
        color=colour,
        markersize=size,
        linewidth=0.8,
        alpha=alpha,
        capsize=2 if size > 3 else 0,
        zorder=3,
    )


def _mark(axes: Axes, x: float, text: str) -> None:
    axes.axvline(x, color=_TOKEN["muted"], linewidth=0.8, linestyle=":")
    over = axes.get_xaxis_transform()
    axes.text(x, 1.01, text, ha="center", va="bottom", fontsize=7, color=_TOKEN["muted"], transform=over)


def _annotate(axes: Axes, height: float, points: list[tuple[float, float, str]]) -> None:
    """Names right of their points, pushed apart where they would overlap.

    Args:
        height: of the axes, inches.
    """
    to_axes = axes.transAxes.inverted().transform
    ordered = sorted(points, key=lambda point: point[1])
    at = [to_axes(axes.transData.transform((x, y))) for x, y, _ in ordered]
    places = _apart([float(place) for _, place in at], 8.8 / (72 * height))
    for (x, y, text), (across, _), place in zip(ordered, at, places, strict=True):
        axes.annotate(
            text,
            (x, y),
            xytext=(float(across) + 0.06, place),
            textcoords="axes fraction",
            fontsize=7,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "relpos": (0, 0.5),
                "color": _TOKEN["muted"],
                "linewidth": 0.5,
                "shrinkB": 3,
                "shrinkA": 0,
            },
        )


def _apart(wanted: list[float], step: float) -> list[float]:
    """Ascending places in [0, 1] as near to the ``wanted`` (ascending) as gaps of ``step`` allow."""
    places = list(wanted)
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + step)
    if places and places[-1] > 1.0:
        places[-1] = 1.0
    for index in range(len(places) - 2, -1, -1):
        places[index] = min(places[index], places[index + 1] - step)
    return places


def _plain_ticks(axes: Axes, log: bool, vertical: bool = False) -> None:
    """Ticks at 1, 2 and 5 in every decade of a logarithmic axis."""
    if not log:
        return
    axis, ends = (axes.yaxis, axes.get_ylim()) if vertical else (axes.xaxis, axes.get_xlim())
    decades = range(math.floor(math.log10(ends[0])), math.ceil(math.log10(ends[1])) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if ends[0] <= tick <= ends[1]]))
    axis.set_major_formatter(lambda value, _place: f"{value:g}")
    axis.set_minor_locator(NullLocator())


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


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def _svg(figure: Figure, title: str) -> str:
    """The figure as one ``<svg>`` element in the width, font and colours of its page."""
    target = io.StringIO()
    FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None, "Creator": None, "Title": title})
    text = target.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', _HEAD, text, count=1)
    text = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", text)
    # The page's background shows through.
    text = re.sub(r'<g id="patch_1">.*?</g>', "", text, count=1, flags=re.S)
    text = re.sub(r'<g id="patch_2">\s*<path [^>]*style="fill: #ffffff"/>\s*</g>', "", text, count=1)
    for name, token in _TOKEN.items():
        text = text.replace(token, f"var(--{name})")
    prefix = f"f{abs(hash_of(text)):x}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = text.replace('xlink:href="#', f'xlink:href="#{prefix}').replace("url(#", f"url(#{prefix}")
    return text.strip()


def hash_of(text: str) -> int:
    """A short stable hash: figures of one page must not share element ids."""
    return zlib.crc32(text.encode())


def row_rates(row: Row) -> dict[str, float]:
    """Rates the attention stage achieves, per second: ``tensor`` flops, ``L2`` bytes, ``exp`` operations.

    A variant whose page lists are not shared reports only useful work; its bytes are not known.
    """
    seconds = (row["attention_us"] or row["complete_us"]) * 1e-6
    shared = row["groups"] and row["groups"] < row["total_q"] * row["kv_heads"]
    passes = 2 if row["precision"] == "accurate" else 1
    flops = row["mma_flops"] if shared else row["useful_flops"]
    rates = {"tensor": passes * flops / seconds, "exp": row["useful_flops"] / 512 / seconds}
    if shared:
        rates["L2"] = row["kv_bytes"] / seconds
    return rates
