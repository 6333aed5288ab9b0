"""Counters are counted from stored captures without replay, and a baseline changes only by blessing."""

from __future__ import annotations

import errno
import json

import pytest

from pwbench import counter_baseline, counters, files, variants
from pwbench.capture import load, synthetic
from pwbench.errors import CaptureError, InputError, MeasurementError
from pwbench.grouping import identity_order, match, regroup
from pwbench.operator import supports
from pwbench.variants import Options


def test_every_capture_is_counted_in_every_order(small_captures):
    seen = []
    counted = counter_baseline.count_captures([small_captures], seen.append)
    assert list(counted) == seen == ["small/one", "small/two"]
    for entry in counted.values():
        assert set(entry["groupings"]) == {
            "per-query",
            "original",
            *counter_baseline.SEARCHES,
            "match-w64",
            *counter_baseline.PAGE_MAJOR,
        }


@pytest.mark.parametrize("name", list(counter_baseline.PAGE_MAJOR))
def test_page_major_counters_are_those_that_the_variant_reports(name, small_captures):
    """At a size where a load holds several tiles, and the workspace does not hold every row."""
    for call in (
        synthetic.generate(20_000, 9_000, seed=1).call,
        load(small_captures / "small" / "one").call(),
    ):
        reported = variants.get(name).prepare(call, Options("fast", 128)).counters()
        pages, _ = supports(call)
        counted = counter_baseline.count_page_major(name, call, pages)
        assert counted == {key: value for key, value in reported.items() if key != "tile_occupancy"}


def test_the_counters_are_those_of_the_whole_call(small_captures):
    capture = load(small_captures / "small" / "one")
    call = capture.call()
    pages, _ = supports(call)
    order = regroup(pages, call.cu_seqlens_q.numpy(), window=64, group=8)
    counted = counter_baseline.count_capture(capture)
    assert counted["regroup-w64"] == counters.count(call, pages, order, 8)
    matched = match(pages, call.cu_seqlens_q.numpy())
    assert counted["match-w64"] == counters.count(call, pages, matched, 8)
    assert counted["original"] == counters.count(call, pages, identity_order(call.kv_heads, call.total_q), 8)
    assert counted["per-query"]["union_pages"] == counted["per-query"]["selected_pages"]


def test_a_folder_without_captures_is_refused(tmp_path):
    with pytest.raises(CaptureError, match="no capture in or below it"):
        counter_baseline.count_captures([tmp_path])


def test_blessing_records_who_when_and_why_and_keeps_the_history(tmp_path):
    path = tmp_path / "results" / "counters.json"
    entry = {"tables_sha256": "00", "groupings": {}}
    counter_baseline.bless(path, {"a/b": entry}, "first", who="Ada")
    counter_baseline.bless(path, {"a/c": entry}, " second ", who="Grace")
    stored = counter_baseline.read(path)
    assert list(stored["captures"]) == ["a/c"]
    assert [(e["who"], e["why"]) for e in stored["blessed"]] == [("Ada", "first"), ("Grace", "second")]
    assert all(e["when"].endswith("+00:00") for e in stored["blessed"])


def test_whoever_blesses_is_named_without_being_asked():
    assert counter_baseline.blessing("a reason")["who"]


@pytest.mark.parametrize("why", ["", "  "])
def test_blessing_without_a_reason_is_refused(tmp_path, why):
    with pytest.raises(InputError, match="needs a reason"):
        counter_baseline.bless(tmp_path / "c.json", {}, why)
    assert not (tmp_path / "c.json").exists()


def test_a_full_disk_leaves_the_old_baseline(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    counter_baseline.bless(path, {"a/b": {"tables_sha256": "00", "groupings": {}}}, "first")
    before = path.read_text()

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(MeasurementError, match="the old baseline is unchanged"):
        counter_baseline.bless(path, {}, "second")
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no counter baseline at"),
        ("{", "no readable baseline"),
        ("[]", "not a counter baseline"),
        ('{"schema": {"name": "else"}, "captures": {}}', "not a counter baseline"),
        (json.dumps({"schema": {"name": "pwbench.counters", "major": 9}, "captures": {}}), "has format 9"),
    ],
)
def test_what_is_not_a_baseline_is_refused(tmp_path, content, message):
    path = tmp_path / "c.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        counter_baseline.read(path)
