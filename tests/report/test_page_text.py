"""What the page says in words: errors, what was not measured, captions, cautions, and a list of words."""

from __future__ import annotations

import dataclasses
import re

import pytest

from pwbench import ceilings, results
from pwbench import report as library
from pwbench.report import glossary
from pwbench.report.glossary import visible
from pwbench.report.html import html
from tests.rows import CAPTURES, row, suite_rows

TWO = CAPTURES[:2]


def page_of(folder, rows):
    file = folder / "rows.parquet"
    file.unlink(missing_ok=True)
    results.write(file, rows)
    return html(library.build(results.load(folder)), captures=None)


def seen(part):
    """The text of a part of a page."""
    return visible("<body>" + part)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return page_of(tmp_path_factory.mktemp("results"), suite_rows(captures=TWO) + suite_rows("batch", TWO))


def test_what_a_suite_lacks_is_said_wherever_the_suite_is_shown(tmp_path):
    short = [r for r in suite_rows("six-2k", TWO) if r["variant"] == "flashinfer" or r["precision"] == "fast"]
    page = page_of(tmp_path, suite_rows(captures=TWO) + short)
    overview, six, short = re.split(r'<section id="six', page)
    assert "accurate: not measured in six-2k." in seen(overview)
    assert "– not measured." in seen(overview)
    assert not re.search(r"<td[^>]*></td>", overview[overview.index("At a glance") :])
    assert "not measured" not in seen(six.split("<details>")[0])
    assert "At like accuracy: not measured; this suite has no rows at accurate." in seen(short)
    assert "accurate: not measured. " in seen(short[short.index("</table>") :])


def test_nothing_is_said_to_be_missing_where_nothing_is(page):
    assert "not measured" not in seen(page[: page.index("Not measured, and why")])


def test_a_cause_for_caution_is_one_line_with_its_captures_folded_away(tmp_path):
    rows = suite_rows(throttle="power cap in 16 rounds") + suite_rows(
        "batch", throttle="power cap in 2 rounds"
    )
    page = page_of(tmp_path, rows)
    box = page[page.index('<ul class="warnings">') : page.index("At a glance")]
    line = r"<li>([^<]*)<details><summary>Where \(12\)</summary>(.*?)</details>"
    ((shown, folded),) = re.findall(line, box, flags=re.S)
    assert "all rows were sampled (power cap)" in shown
    assert not any(capture in shown for capture in CAPTURES)
    assert all(f"{suite}/{capture}" in folded for suite in ("six", "batch") for capture in CAPTURES)


def test_a_caption_speaks_of_the_lines_that_its_figure_draws_and_of_no_others(tmp_path):
    met = set()
    for cache in (None, 1.1e-2, 5e2, 1e-9):
        for errors in ({}, {"rel_l2": 2.9e-2}):
            page = page_of(tmp_path, suite_rows(captures=CAPTURES[:1], fp8_cache_rel_l2=cache, **errors))
            begin, end = (
                page.index(f"<h3>{title}</h3>") for title in ("Accuracy against speed", "Where the time goes")
            )
            caption, figure = page[begin:end].split("<figure>")
            for name in ("limit of accurate", "FP8 cache"):
                drawn = f">{name}</text>" in figure
                assert (f'dotted line "{name}"' in seen(caption)) == drawn, (name, cache, errors)
                met.add((name, drawn))
    assert len(met) == 4, "each line was drawn in one case and left out in another"


def test_a_baseline_with_one_precision_is_never_called_by_one_of_ours(page):
    text = visible(page)
    assert "flashinfer (own precision)" in text
    assert not re.search(r"flashinfer \((fast|accurate|either)\)", text)
    assert not re.search(r"<td[^>]*>flashinfer</td><td[^>]*>(fast|accurate|either)</td>", page)
    assert "Other libraries are not held to it: flashinfer has one precision, its own." in text


def test_a_baseline_with_a_choice_of_precision_keeps_its_word(tmp_path):
    rows = [row(v, c, precision=p, rel_l2=e) for v in ("union8", "pageweaver") for c in TWO
            for p, e in (("fast", 2.9e-2), ("accurate", 1.9e-3))]  # fmt: skip
    results.write(tmp_path / "rows.parquet", rows)
    text = visible(html(library.build(results.load(tmp_path), baseline="union8"), captures=None))
    assert "own precision" not in text and "one precision" not in text.split("Words")[0]
    assert "Other libraries are not held to it." in text


def test_tables_of_geomeans_put_speed_and_error_first(page):
    heads = re.findall(r"<thead>.*?</thead>", page, flags=re.S)
    columns = [re.findall(r"<th(?: [^>]*)?>(.*?)</th>", head) for head in heads]
    compared = [names for names in columns if "verdict" in names and names[0] == "variant"]
    assert len(compared) == 2, "one of each suite"
    assert all(names[1:4] == ["precision", "speed-up", "worst rel-L2"] for names in compared)


def test_numbers_with_an_exponent_stay_whole_at_the_end_of_a_line(page):
    assert page.count('<span class="whole">') > 10
    prose = re.sub(r"<svg.*?</svg>|<table>.*?</table>", "", page, flags=re.S)
    assert not re.findall(r".{20}\de-\d", seen(re.sub(r'<span class="whole">[^<]*</span>', "", prose)))


def test_captions_say_that_stages_overlap_and_what_a_mark_is_relative_to(page):
    text = visible(page)
    assert "because stages overlap" in text and "the stages add to more than the complete call" in text
    for words in (
        "relative to the FP8 rate of the tensor cores",
        "relative to the bandwidth from L2",
        "relative to the exp2 rate",
        "relative to the time it took",
        "the term that binds",
    ):
        assert words in text
    assert re.search(r"\d+%, bound by bytes", text)


@pytest.mark.parametrize("source", ["measured", "documented"])
def test_the_ceilings_are_called_measured_only_where_they_were(source, tmp_path, monkeypatch):
    known = dataclasses.replace(ceilings.H200, source=source)
    monkeypatch.setattr(ceilings, "find", lambda gpu: known)
    text = visible(page_of(tmp_path, suite_rows(captures=CAPTURES[:1])))
    assert ("rates measured on this GPU by pwbench ceilings" in text) == (source == "measured")
    assert ("documented rates, not measured on this GPU" in text) == (source == "documented")


def test_every_word_of_the_list_is_explained_where_it_is_used_and_nowhere_else():
    uses = {
        "-l1, -l2 ... in a name": "code-a-64k-l3",
        "cold L2, warm L2": "graph, cold L2",
        "Cake, CuTe union": "Cake v1",
        "noise floor, A/A": "(A/A)",
        "fast, accurate, its own": "pageweaver (fast)",
    }
    for word, _, _ in glossary._WORDS:
        use = uses.get(word, word)
        assert word in dict(glossary.explained(f"<body><p>It says {use} here.</p></body>")), word
        assert word not in dict(glossary.explained(f'<body><p class="{use}">It does not.</p></body>')), word
    assert glossary.explained("<head><title>page</title></head><body>Nothing.</body>") == []


def test_the_words_at_the_end_are_those_of_the_page(page, tmp_path):
    def words(text):
        listed = text[text.index('<h2 id="words">') : text.index("<details><summary>All columns")]
        return re.findall(r"<dt>(.*?)</dt>", listed)

    assert {"capture", "union", "page", "gap", "stage", "cold L2, warm L2", "tile"} <= set(words(page))
    assert not {"Cake, CuTe union", "-l1, -l2 ... in a name"} & set(words(page))
    rows = suite_rows("real", ("code-a-8k-l1",))
    peer = "flashinfer 0.7.4: Cake v1"
    rows = [{**r, "peer": peer} if r["variant"] == "flashinfer" else r for r in rows]
    assert {"Cake, CuTe union", "-l1, -l2 ... in a name"} <= set(words(page_of(tmp_path, rows)))
    cpu = {"device": "cpu", "gpu": "Xeon", "mode": "eager"}
    bare = words(page_of(tmp_path, [row("reference", **cpu), row("union8", **cpu)]))
    assert not {"Cake, CuTe union", "cold L2, warm L2", "CUDA graph", "regrouping", "affinity"} & set(bare)


def test_the_caption_of_regrouping_says_why_a_diamond_may_lie_beyond_the_bar(page):
    assert "even beyond the bar of attention, because stages overlap: they are timed apart from the" in seen(
        page
    )


def test_the_answer_stands_above_the_cautions_and_the_overview_is_grouped_by_precision(tmp_path):
    rows = [
        {**r, "throttle": "power cap in 3 rounds"} for name in ("six", "batch") for r in suite_rows(name, TWO)
    ]
    page = page_of(tmp_path, rows)
    first = page[page.index("<main>") : page.index('<ul class="warnings">')]
    assert "six: pageweaver (fast) is fastest" in seen(first) and "At like accuracy:" in seen(first)
    overview = page[page.index("At a glance") :]
    overview = overview[: overview.index("</table>")]
    cells = [re.findall(r"<td[^>]*>([^<]*)</td>", line) for line in overview.split("<tr")[2:]]
    assert re.findall(r"<th[^>]*>([^<]*)</th>", overview)[:3] == ["variant", "precision", "worst rel-L2"]
    assert all(re.fullmatch(r"[\d.]+e-\d+", line[2]) for line in cells)
    kinds = [line[1] for line in cells if "-" not in line[0]]
    assert kinds == sorted(kinds, key=["fast", "accurate", "its own"].index) and len(set(kinds)) == 3


def test_the_page_says_when_pageweaver_searches_by_the_numbers_it_goes_by(page):
    from pwbench.variants._pageweaver import PAYOFFS, SHORT_IMAGES

    text = seen(page[page.index("What each variant is") : page.index('<section id="six')])
    assert f"at most {SHORT_IMAGES}: from" in text
    for payoff in PAYOFFS.values():
        assert f"{round(payoff.cost / payoff.saved, -2):,.0f}" in text
    assert text.count("It searches where") == 1, "fixed paths have no choice"
