"""The figures can be read on a phone: sizes, room, nothing over a label; and a colour is a verdict."""

from __future__ import annotations

import re
from importlib import resources
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.textpath import TextPath

from pwbench import report as library
from pwbench import results, variants
from pwbench.report import figures, reach
from pwbench.results import STAGES
from tests.rows import CAPTURES, row, suite_rows

SVG = "{http://www.w3.org/2000/svg}"
PHONE = 390 - 2 * 12
"""Pixels that a figure has on a phone 390 wide: the page's padding off."""
LEGIBLE = 11.0
"""Pixels of a letter's body below which a label is too small."""


def scope_of(folder, rows, **options):
    file = folder / "rows.parquet"
    file.unlink(missing_ok=True)
    results.write(file, rows)
    return library.build(results.load(folder), **options).scopes[0]


def everyone():
    """Every registered variant at every precision it has, our searches at both windows, in milliseconds."""
    rows = []
    for number, name in enumerate(variants.names()):
        for precision in variants.get(name).precisions:
            us = 1e6 + 3e4 * number + (5e5 if precision == "accurate" else 0)
            changes = {"search_us": 3e4, "metadata_us": 2e4, "precision": precision, "complete_us": us}
            changes |= {"rel_l2": 1.9e-3 if precision == "accurate" else 5.7e-2, "gap_us": 10.0}
            changes |= {"roofline_term": "launch"}
            rows.append(row(name, CAPTURES[0], **changes))
            if name.startswith("union8-"):
                rows.append(row(name, CAPTURES[0], **{**changes, "window": 64}))
    return rows


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Every kind of figure by name: of all variants at once, and of a usual suite."""
    folder = tmp_path_factory.mktemp("results")
    found = {}
    for kind, rows in (("all", everyone()), ("suite", suite_rows())):
        scope = scope_of(folder, rows)
        found[f"speed-ups, {kind}"] = figures.speedups(scope)
        found[f"capture, {kind}"] = figures.capture_speedups(scope, CAPTURES[0])
        found[f"stages, {kind}"] = figures.stages(scope, CAPTURES[0])
        found[f"accuracy, {kind}"] = figures.accuracy(scope)
        found[f"regrouping, {kind}"] = figures.regrouping(scope.gains)
        found[f"ceilings, {kind}"] = figures.ceilings(scope, reach.reached(scope))
    sizes = np.arange(20, 40), np.arange(16, 36)
    found["unions"] = figures.unions("docs-a-128k-l1, pageweaver", *sizes, 4)
    return found


def kinds(*beginnings):
    return [f"{name}, {kind}" for name in beginnings for kind in ("all", "suite")]


ROWS = kinds("speed-ups", "capture", "stages", "regrouping", "ceilings")
ALL = [*ROWS, *kinds("accuracy"), "unions"]


def width_of(svg):
    return float(re.search(r'viewBox="0 0 ([\d.]+) ', svg)[1])


def texts(svg):
    """(text, size, box) of everything written; box = left, top, right, bottom, in DejaVu Sans."""
    found = []
    for node in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        style = node.get("style", "")
        size = float(re.search(r"font-size: ([\d.]+)px", style)[1])
        turned = re.search(r"rotate\((-?[\d.]+)", node.get("transform", ""))
        if turned and float(turned[1]):
            continue
        text = "".join(node.itertext())
        moved = re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", node.get("transform", ""))
        x, y = (float(v) for v in (moved.groups() if moved else (node.get("x"), node.get("y"))))
        long = TextPath((0, 0), text, size=size).get_extents().width
        anchor = re.search(r"text-anchor: (\w+)", style)
        left = x - long * {"end": 1.0, "middle": 0.5}.get(anchor[1] if anchor else "", 0.0)
        found.append((text, size, (left, y - 0.75 * size, left + long, y)))
    return found


def test_the_page_gives_figures_the_room_that_they_are_judged_by():
    page = resources.files("pwbench.report").joinpath("page.html.j2").read_text("utf-8")
    phone = page[page.index("@media (max-width:480px)") :]
    assert phone[: phone.index("}")].endswith("main, header, footer { padding:0 12px; ")
    assert "figure { overflow-x:auto; } figure svg { width:100%; min-width:320px;" in page


@pytest.mark.parametrize("name", ALL)
def test_everything_written_is_legible_on_a_phone(drawn, name):
    scale = PHONE / width_of(drawn[name])
    small = [(text, size * scale) for text, size, _ in texts(drawn[name]) if size * scale < LEGIBLE]
    assert texts(drawn[name])
    assert not small


@pytest.mark.parametrize("name", ALL)
def test_nothing_written_overlaps_or_leaves_the_figure(drawn, name):
    written = texts(drawn[name])
    for (one, _, a), (other, _, b) in combinations(written, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, (one, other)
    right = width_of(drawn[name])
    assert not [text for text, _, box in written if box[0] < -0.5 or box[2] > right + 0.5]


def test_errors_are_written_as_everywhere_else():
    found = [figures._error_tick(value) for value in (1e-11, 1e-3, 0.1, 1.0, 10.0)]
    assert found == ["1e-11", "1e-3", "1e-1", "1", "10"]


def strokes(node):
    """Boxes of the lines and markers in a group of an SVG, without its patches of background."""
    for path in node.iter(f"{SVG}path"):
        if "fill: none" in path.get("style", ""):
            xs, ys = zip(*re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path.get("d")), strict=True)
            yield min(map(float, xs)), min(map(float, ys)), max(map(float, xs)), max(map(float, ys))
    for use in node.iter(f"{SVG}use"):
        if use.get("x") is not None:
            x, y = float(use.get("x")), float(use.get("y"))
            yield x - 1, y - 1, x + 1, y + 1


@pytest.mark.parametrize("name", ROWS)
def test_no_line_strikes_through_a_label(drawn, name):
    """A label lies on a patch of background above the lines that cross it; nothing is drawn on it later."""
    axes = next(n for n in ElementTree.fromstring(drawn[name]).iter() if "axes_" in n.get("id", ""))
    parts = list(axes)
    labels = [n for n in parts if "-text_" in n.get("id", "") and n.find(f".//{SVG}path") is not None]
    assert len(labels) >= 2 * 3
    for label in labels:
        patch = label.find(f".//{SVG}path")
        assert "var(--bg)" in patch.get("style", ""), "lines show through"
        order = list(label.iter())
        assert order.index(patch) < order.index(label.find(f".//{SVG}text"))
        xs, ys = zip(*re.findall(r"[MLC] ([-\d.]+) ([-\d.]+)", patch.get("d")), strict=True)
        box = min(map(float, xs)), min(map(float, ys)), max(map(float, xs)), max(map(float, ys))
        for later in parts[parts.index(label) + 1 :]:
            if "axis_" in later.get("id", ""):
                continue
            for stroke in strokes(later):
                meets = (
                    stroke[0] < box[2] and stroke[2] > box[0] and stroke[1] < box[3] and stroke[3] > box[1]
                )
                assert not meets, (later.get("id"), stroke, box)


COLOUR = r"fill: var\(--(good|bad|before|base)\)"


@pytest.fixture
def mixed(tmp_path):
    """A variant faster over the suite that is slower on one capture and the same on another."""
    times = {"a": 50.0, "b": 130.0, "c": 100.0}
    rows = [row("flashinfer", c, precision="accurate", noise=0.001) for c in times]
    rows += [row("union8", c, complete_us=us, noise=0.001) for c, us in times.items()]
    return scope_of(tmp_path, rows)


@pytest.mark.parametrize(("capture", "colour"), [("a", "good"), ("b", "bad"), ("c", "before")])
def test_a_bar_of_a_capture_has_the_colour_of_that_captures_verdict(mixed, capture, colour):
    (contender,) = [c for c in mixed.contenders if c.variant == "union8"]
    assert mixed.says(contender) == "faster"
    bars = re.findall(rf'<path d=[^>]*style="{COLOUR}', figures.capture_speedups(mixed, capture))
    assert sorted(bars) == sorted([colour, "base"])


def test_a_dot_of_a_capture_has_that_captures_colour_and_the_diamond_the_suites(mixed):
    svg = figures.speedups(mixed)
    dots = re.findall(rf'<use [^>]*style="{COLOUR}; fill-opacity', svg)
    assert [c for c in dots if c != "base"] == ["good", "bad", "before"]
    diamonds = re.findall(rf'<use [^>]*style="{COLOUR}[^"]*miter', svg)
    assert diamonds == ["good", "base"]


def test_the_binding_term_is_named_without_where_its_rate_is_from():
    rows = [row(roofline_term=t) for t in ("tensor", "L2 (documented)", "L2", None)]
    assert reach.binding_terms(rows) == ["L2", "tensor"]


def test_every_ceiling_row_names_its_share_and_the_term_that_binds(drawn):
    written = [text for text, _, _ in texts(drawn["ceilings, all"])]
    assert sum(bool(re.fullmatch(r"\d+%, bound by launch", text)) for text in written) >= 10


def test_paths_that_nobody_chooses_are_left_out_of_accuracy_against_speed(drawn):
    written = {text for text, _, _ in texts(drawn["accuracy, suite"])}
    assert {"pageweaver (fast)", "pageweaver (accurate)", "union8-regroup", "flashinfer"} <= written
    assert "pageweaver" not in written, "twice the same name tells nothing apart"
    assert not {"pageweaver-regroup", "union8-precomputed"} & written


def test_all_stages_have_a_colour_of_the_page(drawn):
    assert set(re.findall(r"var\(--(\w+)\)", drawn["stages, all"])) & set(STAGES)


@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_speedups_are_always_drawn_on_a_logarithmic_axis_that_says_so(spread, tmp_path):
    rows = [row("flashinfer", complete_us=200), row("union8", complete_us=190 / spread)]
    written = {text for text, _, _ in texts(figures.speedups(scope_of(tmp_path, rows)))}
    assert "times as fast as flashinfer, logarithmic" in written
    assert "0" not in written


def test_the_terms_of_a_ceiling_never_run_into_the_name_beside_them(tmp_path):
    terms = ("tensor", "exp", "launch")
    names = ("union8", "union8-precomputed", "pageweaver-original")
    rows = [
        row(v, c, roofline_term=t, window=w)
        for v in names
        for w in (64, 128)
        for c, t in zip(CAPTURES, terms, strict=False)
    ]
    scope = scope_of(tmp_path, rows + [row("flashinfer", c, complete_us=200) for c in CAPTURES[:3]])
    found = texts(figures.ceilings(scope, reach.reached(scope)))
    boxes = [(text, box) for text, _, box in found]
    bound = [item for item in boxes if "bound by" in item[0]]
    assert any("…" in text for text, _ in bound) and any(", exp" in text for text, _ in bound)
    for text, (left, top, _, bottom) in bound:
        beside = [b for t, b in boxes if t != text and b[1] < bottom and b[3] > top and b[0] < left]
        assert all(right + 2 < left for _, _, right, _ in beside), text
