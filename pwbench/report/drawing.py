"""What every figure is drawn with: sizes, colours, rows, labels, and the way into a page.

A colour of a drawing is a CSS variable of the page, so that one drawing serves light and dark. A unit of
a drawing is a point; a phone shows `WIDTH` in about 360 pixels, so that a point is at least a pixel there.
"""

from __future__ import annotations

import io
import math
import re
import zlib
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from pwbench import stats
from pwbench.results import STAGES

WIDTH, PITCH = 4.0, 0.36
LABEL, SMALL = 9.2, 8.8
"""Sizes of labels and of everything else that is written, points."""
_NAMES = ("ink", "muted", "grid", "good", "bad", "base", "before", "after", "gap", "bg", *STAGES)
# A colour nobody uses stands for each CSS variable until the drawing is text.
TOKEN = {name: f"#0102{index:02x}" for index, name in enumerate(_NAMES, 16)}
RC = {
    "svg.fonttype": "none", "svg.hashsalt": "pwbench", "font.size": SMALL, "axes.linewidth": 0.6,
    "text.color": TOKEN["ink"], "axes.labelcolor": TOKEN["muted"], "axes.edgecolor": TOKEN["grid"],
    "xtick.color": TOKEN["muted"], "ytick.color": TOKEN["muted"], "xtick.major.size": 2.5,
    "xtick.major.width": 0.6, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "grid.color": TOKEN["grid"], "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": SMALL,
}  # fmt: skip
_HEAD = (
    r'<svg viewBox="\1" role="img" xmlns="http://www.w3.org/2000/svg" '
    r'xmlns:xlink="http://www.w3.org/1999/xlink">'
)
_UNDER = {"facecolor": TOKEN["bg"], "edgecolor": "none", "pad": 0.4}  # lines do not strike through a label
LABELS: dict[str, Any] = {"ha": "left", "va": "bottom", "fontsize": LABEL, "zorder": 2.5, "bbox": _UNDER}


def rows(count: int, xlabel: str) -> tuple[Figure, Axes]:
    """A figure of ``count`` rows, first on top, a label line above each."""
    height = 0.56 + PITCH * max(count, 1)
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0.025, 0.46 / height, 0.95, 1 - 0.51 / height))
    axes.set_ylim(count - 0.65, -0.85)
    axes.set_yticks([])
    axes.set_axisbelow(True)
    axes.grid(True, axis="x")
    axes.set_xlabel(xlabel)
    return figure, axes


def label(axes: Axes, place: int, name: str, value: str) -> None:
    """Above row ``place``: its name on the left, its value on the right."""
    across = axes.get_yaxis_transform()
    axes.text(0, place - 0.28, name, transform=across, **LABELS)
    axes.text(1, place - 0.28, value, transform=across, **{**LABELS, "ha": "right"})


def point(
    axes: Axes, ratio: stats.Ratio, y: float, colour: str, marker: str, size: float, alpha: float
) -> None:
    """A ratio at height ``y`` with its interval, where it has one."""
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


def mark(axes: Axes, x: float, text: str) -> None:
    """A dotted line across the axes, named above them."""
    axes.axvline(x, color=TOKEN["muted"], linewidth=0.8, linestyle=":")
    over = axes.get_xaxis_transform()
    axes.text(x, 1.01, text, ha="center", va="bottom", fontsize=SMALL, color=TOKEN["muted"], transform=over)


def annotate(axes: Axes, height: float, points: list[tuple[float, float, str]]) -> None:
    """Names right of their points, pushed apart where they would overlap.

    Args:
        height: of the axes, inches.
    """
    to_axes = axes.transAxes.inverted().transform
    ordered = sorted(points, key=lambda point: point[1])
    at = [to_axes(axes.transData.transform((x, y))) for x, y, _ in ordered]
    places = apart([float(place) for _, place in at], 1.2 * SMALL / (72 * height))
    for (x, y, text), (across, _), place in zip(ordered, at, places, strict=True):
        axes.annotate(
            text,
            (x, y),
            xytext=(float(across) + 0.06, place),
            textcoords="axes fraction",
            fontsize=SMALL,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "relpos": (0, 0.5),
                "color": TOKEN["muted"],
                "linewidth": 0.5,
                "shrinkB": 3,
                "shrinkA": 0,
            },
        )


def apart(wanted: list[float], step: float) -> list[float]:
    """Ascending places in [0, 1] as near to the ``wanted`` (ascending) as gaps of ``step`` allow."""
    places = list(wanted)
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + step)
    if places and places[-1] > 1.0:
        places[-1] = 1.0
    for index in range(len(places) - 2, -1, -1):
        places[index] = min(places[index], places[index + 1] - step)
    return places


def plain_ticks(axes: Axes, log: bool, vertical: bool = False) -> None:
    """Ticks at 1, 2 and 5 in every decade of a logarithmic axis."""
    if not log:
        return
    axis, ends = (axes.yaxis, axes.get_ylim()) if vertical else (axes.xaxis, axes.get_xlim())
    decades = range(math.floor(math.log10(ends[0])), math.ceil(math.log10(ends[1])) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if ends[0] <= tick <= ends[1]]))
    axis.set_major_formatter(lambda value, _place: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def svg(figure: Figure, title: str) -> str:
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
    for name, token in TOKEN.items():
        text = text.replace(token, f"var(--{name})")
    prefix = f"f{abs(hash_of(text)):x}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = text.replace('xlink:href="#', f'xlink:href="#{prefix}').replace("url(#", f"url(#{prefix}")
    return text.strip()


def hash_of(text: str) -> int:
    """A short stable hash: figures of one page must not share element ids."""
    return zlib.crc32(text.encode())
