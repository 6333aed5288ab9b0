"""Documents are filled from results, only between their marks, and the check notices a difference."""

from __future__ import annotations

import errno

import pytest

from pwbench import results
from pwbench.columns import column_dictionary
from pwbench.errors import InputError, PwbenchError
from pwbench.report import documents
from tests.rows import CAPTURES, row, suite_rows

PLACE = "Before.\n\n<!-- table:{} -->\nold\n<!-- end -->\n\nAfter.\n"


@pytest.fixture(scope="module")
def frame(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    rows = suite_rows(captures=CAPTURES[:2]) + suite_rows(captures=CAPTURES[:2], l2="warm")
    rows += suite_rows(captures=CAPTURES[:2], tensors="stored")
    rows += [row("union8-regroup", window=64, complete_us=120, search_us=4.0, union_pages=36000)]
    results.write(folder / "rows.parquet", rows)
    return results.load(folder)


@pytest.fixture(scope="module")
def everything(frame):
    """A document with every table, filled."""
    return documents.fill("".join(PLACE.format(name) for name in documents.names()), frame)


@pytest.mark.parametrize("index", range(len(documents.names())), ids=documents.names())
def test_every_table_can_be_asked_for(everything, index):
    part = everything.split("Before.\n")[index + 1]
    assert "| --- |" in part
    assert part.endswith("\nAfter.\n")


def test_only_what_is_between_the_marks_is_replaced_and_filling_again_changes_nothing(frame, everything):
    assert "\nold\n" not in everything
    assert everything.count("Before.") == everything.count("After.") == len(documents.names())
    assert documents.fill(everything, frame) == everything


def test_a_table_names_the_command_machine_and_date_that_made_it(frame):
    text = documents.fill(PLACE.format("geomean suite=six l2=cold"), frame)
    assert (
        "NVIDIA H200; driver 580.0; CUDA 13.0; torch 2.13.0; 2026-01-02. `pwbench report rows.parquet`"
        in text
    )


def test_filters_narrow_to_the_rows_asked_for(frame):
    assert "warm L2" in documents.fill(PLACE.format("geomean l2=warm"), frame)
    assert "cold L2" not in documents.fill(PLACE.format("geomean l2=warm"), frame)


def test_the_baseline_may_be_chosen_per_table(frame):
    assert "against union8" in documents.fill(PLACE.format("geomean baseline=union8"), frame)


@pytest.mark.parametrize(
    "asked", ["geomean suite=five-64k device=cuda", "regroup suite=five-64k device=cuda"]
)
def test_a_place_without_rows_says_which_command_makes_them(frame, asked):
    text = documents.fill(PLACE.format(asked), frame)
    assert "pwbench replay captures/five-64k/*" in text
    assert "`pwbench replay captures/five-64k/* --device cuda --out results/five-64k.parquet`" in text


def test_a_document_can_be_filled_before_anything_was_measured():
    text = documents.fill(PLACE.format("geomean suite=six") + PLACE.format("columns"), None)
    assert "No rows yet" in text
    assert column_dictionary().splitlines()[-1] in text


def test_the_loss_table_says_when_there_is_nothing_lost(tmp_path):
    results.write(tmp_path / "a.parquet", suite_rows(captures=CAPTURES[:2]))
    text = documents.fill(PLACE.format("losses suite=six"), results.load(tmp_path))
    assert "Nowhere: on no capture is the online path slower" in text


def test_the_loss_table_lists_the_worst_first(frame):
    text = documents.fill(PLACE.format("losses"), frame)
    (line,) = [line for line in text.splitlines() if line.startswith("| six/")]
    assert line.startswith("| six/code-8k | union8 | fast | 64 | 99.")
    assert "| -20." in line


def test_the_papers_numbers_stand_beside_those_of_the_same_kernel(tmp_path):
    results.write(
        tmp_path / "a.parquet", suite_rows(captures=CAPTURES[:2]) + suite_rows("five-64k", CAPTURES[:2])
    )
    lines = documents.fill(PLACE.format("paper"), results.load(tmp_path)).splitlines()
    over = [line.split(" | ") for line in lines if "geomean of suite six" in line]
    assert [cells[3] for cells in over if cells[1] == "1.70x"] == ["union8"]
    assert 1.6 < float(over[0][2].removesuffix("x")) < 1.8
    gains = [line.split(" | ") for line in lines if "online regrouping" in line]
    assert [cells[3] for cells in gains if cells[1] == "3.26 to 7.66 %"] == ["union8-regroup"]


def test_a_peer_that_no_graph_can_hold_is_compared_among_eager_launches(tmp_path):
    rows = suite_rows(captures=CAPTURES[:2])
    for capture in CAPTURES[:2]:
        rows += [row("union8", capture, mode="eager", complete_us=100.0),
                 row("flashinfer-paged", capture, mode="eager", complete_us=400.0)]  # fmt: skip
    results.write(tmp_path / "a.parquet", rows)
    lines = documents.fill(PLACE.format("paper"), results.load(tmp_path)).splitlines()
    (line,) = [line for line in lines if "flashinfer-paged" in line]
    assert "eager launches" in line and line.split(" | ")[2] in ("3.98x", "3.99x", "4.00x", "4.01x", "4.02x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PLACE.format("speed"), "asks for table 'speed'; there are "),
        (PLACE.format("geomean colour=red"), "narrowed by 'colour'"),
        ("<!-- table:geomean -->\nno end", "not closed"),
    ],
)
def test_a_wrong_place_is_refused(frame, text, message):
    with pytest.raises(InputError, match=message):
        documents.fill(text, frame)


def test_the_check_writes_nothing_and_names_what_differs(tmp_path, frame):
    stale, plain = tmp_path / "stale.md", tmp_path / "plain.md"
    stale.write_text(PLACE.format("geomean"))
    plain.write_text("No tables here.\n")
    assert documents.fill_files([stale, plain], frame, check=True) == [stale]
    assert stale.read_text() == PLACE.format("geomean")
    assert documents.fill_files([stale, plain], frame) == [stale]
    assert documents.fill_files([stale, plain], frame, check=True) == []


def test_a_document_that_cannot_be_read_is_refused(tmp_path, frame):
    with pytest.raises(InputError, match="not a readable text file"):
        documents.fill_files([tmp_path / "absent.md"], frame)


def test_the_repositorys_documents_are_what_its_results_give(repository, monkeypatch):
    monkeypatch.chdir(repository)
    pages = documents.with_tables(repository)
    assert repository / "docs" / "results.md" in pages
    assert (repository / "docs" / "columns.md").read_text() == column_dictionary()
    assert documents.fill_files(pages, results.stored(), check=True) == []


def test_a_place_may_be_narrowed_to_some_variants_and_keeps_the_baseline(frame):
    text = documents.fill(PLACE.format("geomean suite=six device=cuda variant=union8,union8-regroup"), frame)
    names = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")}
    assert {"union8", "union8-regroup", "flashinfer"} <= names
    assert not names & {"pageweaver", "triton"}


def test_a_full_disk_leaves_a_document_as_it_was(frame, tmp_path, monkeypatch):
    document = tmp_path / "README.md"
    document.write_text(PLACE.format(documents.names()[0]), encoding="utf-8")
    before = document.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pwbench.files.os.fsync", full)
        with pytest.raises((OSError, PwbenchError), match="space"):
            documents.fill_files([document], frame)
    assert document.read_bytes() == before
    assert documents.fill_files([document], frame) == [document], "and the next attempt fills it"
