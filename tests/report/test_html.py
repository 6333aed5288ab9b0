"""The page stands alone, says the answer in words, and draws what it has."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from pwbench import report as library
from pwbench import results
from pwbench.report import drawing, figures
from pwbench.report.html import html
from tests.rows import CAPTURES, row, suite_rows, unavailable


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    rows = suite_rows(captures=CAPTURES[:2]) + suite_rows("batch", CAPTURES[2:4])
    rows += suite_rows("extremes", CAPTURES[:1]) + suite_rows(captures=CAPTURES[:1], l2="warm")
    rows += [row("page-union", CAPTURES[0], complete_us=700, reduction_us=30.0)]
    results.write(folder / "rows.parquet", rows)
    return html(library.build(results.load(folder)), captures=None)


class _Nesting(HTMLParser):
    """Every element that is opened is closed, in order."""

    EMPTY = ("meta", "br", "hr", "link", "img", "path", "use", "rect", "circle", "line")

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.seen = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in self.EMPTY:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


@pytest.fixture(scope="module")
def nesting(page):
    parser = _Nesting()
    parser.feed(page)
    return parser


def test_the_page_is_well_formed(nesting):
    assert nesting.wrong == []
    assert nesting.open == []


def test_the_page_needs_no_script_and_nothing_from_elsewhere(page, nesting):
    tags = {tag for tag, _ in nesting.seen}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    for _, attributes in nesting.seen:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href"):
                assert value.startswith("#"), value
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_element_ids_are_unique(page):
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_references_inside_figures_lead_somewhere(page):
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    for reference in re.findall(r'(?:href="#|url\(#)([^")]+)', page):
        assert reference in ids


def test_every_colour_of_a_figure_is_one_of_the_pages_variables(page):
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.S))
    assert not re.search(r"(?:fill|stroke): ?#", drawn)
    used = set(re.findall(r"var\(--([\w-]+)\)", page))
    light, dark = (
        set(re.findall(r"--([\w-]+):", block)) for block in re.findall(r":root \{(.*?)\}", page, flags=re.S)
    )
    assert used <= light
    assert light == dark | {"warn"} | light & dark


def test_the_answer_is_in_words(page):
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    assert re.search(r"pageweaver \(fast\) is fastest: 2\.[12]\dx as fast as flashinfer", text)
    for question in ("How sure?", "Why?", "At what accuracy?", "Does the search pay?"):
        assert question in text
    assert re.search(r"At like accuracy: pageweaver \(accurate\), 1\.[78]\dx with rel-L2 2\.0e-3", text)
    assert "Triton is not installed" in text
    assert "made up to probe the limits" in text


def test_the_overview_holds_real_suites_only(page):
    overview = page[page.index("At a glance") :]
    overview = overview[: overview.index("</table>")]
    assert ">six<" in overview
    assert ">batch<" in overview
    assert "extremes" not in overview


def test_text_from_results_cannot_become_markup(tmp_path):
    rows = [row("union8"), unavailable("triton", "<script>alert(1)</script>", capture="<b>x</b>")]
    results.write(tmp_path / "a.parquet", rows)
    page = html(library.build(results.load(tmp_path)), captures=None)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize(
    "rows",
    [
        [unavailable("union8", "no GPU")],
        [row("union8")],
        [row("flashinfer", precision="accurate")],
        [row("reference", device="cpu", gpu="Xeon", mode="eager", samples=2, complete_us=3e6, groups=None)],
        [row("flashinfer", rel_l2=None), row("union8", rel_l2=None, roofline_us=None, union_pages=None)],
        [
            row("flashinfer", gap_us=-5.0, stage_samples=None),
            row("union8", complete_samples=None),
        ],
    ],
    ids=["nothing ok", "no baseline", "baseline only", "cpu, two samples", "unchecked", "no samples kept"],
)
def test_a_page_is_made_of_whatever_there_is(tmp_path, rows):
    results.write(tmp_path / "a.parquet", rows)
    page = html(library.build(results.load(tmp_path)), captures=None)
    assert page.rstrip().endswith("</html>")
    assert "None" not in re.sub(r"<[^>]+>", " ", page[page.index("<body") :])
    assert "nan" not in re.sub(r"<[^>]+>", " ", page[page.index("<body") :]).split()


def test_union_sizes_are_drawn_when_the_capture_is_at_hand(tmp_path, small_captures):
    from pwbench.capture import load

    capture = load(small_captures / "small" / "one")
    where = {"suite": "small", "capture": "one", "tables_sha256": capture.tables_sha256}
    rows = [row("union8", **where), row("union8-regroup", complete_us=90, search_us=3.0, **where)]
    results.write(tmp_path / "a.parquet", rows)
    made = library.build(results.load(tmp_path))
    assert "Union sizes of one" in html(made, captures=small_captures)
    assert "Union sizes of one" not in html(made, captures=tmp_path / "absent")


def test_union_sizes_of_another_capture_of_that_name_are_not_drawn(tmp_path, small_captures):
    where = {"suite": "small", "capture": "one"}
    rows = [row("union8", **where), row("union8-regroup", complete_us=90, search_us=3.0, **where)]
    results.write(tmp_path / "a.parquet", rows)
    assert "Union sizes of one" not in html(library.build(results.load(tmp_path)), captures=small_captures)


def test_the_same_results_give_the_same_page(tmp_path):
    results.write(tmp_path / "a.parquet", suite_rows(captures=CAPTURES[:1]))
    first, second = (html(library.build(results.load(tmp_path)), captures=None) for _ in range(2))
    assert first == second


def test_a_figure_is_valid_xml():
    text = figures.unions("code-8k", np.array([16, 30, 40]), np.array([12, 20, 25]), 8)
    ElementTree.fromstring(text)
    assert text.startswith("<svg viewBox=")


def test_labels_are_pushed_apart_and_stay_inside():
    placed = drawing.apart([0.9, 0.91, 0.92, 0.95], 0.1)
    assert all(b - a > 0.0999 for a, b in pairwise(placed))
    assert placed[-1] <= 1.0


@pytest.mark.parametrize("error", [float("inf"), 0.0])
def test_an_error_that_has_no_place_on_a_logarithmic_axis_is_left_out_of_the_drawing(error, tmp_path):
    rows = suite_rows(captures=CAPTURES[:1])
    for one in rows:
        if one["variant"] == "union8":
            one["rel_l2"] = error
    results.write(tmp_path / "rows.parquet", rows)
    assert "<svg" in html(library.build(results.load(tmp_path)), captures=None)
