"""Replay on a real device: graph rows, stage times, the A/A pair, and accuracy, all in one row."""

from __future__ import annotations

from pathlib import Path

import pytest

from pwbench.replay import replay

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fast", "accurate"])
def test_gpu_rows_are_whole(small_captures: Path, precision: str) -> None:
    rows = replay(
        [small_captures], ["union8", "union8-regroup"], device="cuda", precision=precision, samples=10
    )
    assert len(rows) == 4
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        assert (row["device"], row["mode"], row["l2"]) == ("cuda", "graph", "cold")
        assert row["precision"] == precision and row["samples"] == 10
        assert row["attention_us"] > 0 and row["metadata_us"] > 0
        assert row["complete_us"] > row["roofline_us"] * 0.5
        assert row["noise_floor"] is not None and row["noise_floor"] < 0.5
        assert row["gpu"] and row["driver"] and row["cuda"] and row["cupy"]


def test_both_modes_and_both_cache_states_make_four_rows(small_captures: Path) -> None:
    rows = replay(
        [small_captures / "small" / "one"], ["union8"], device="cuda", samples=5,
        modes=("graph", "eager"), l2=("cold", "warm"),
    )  # fmt: skip
    assert {(row["mode"], row["l2"]) for row in rows} == {
        ("graph", "cold"), ("graph", "warm"), ("eager", "cold"), ("eager", "warm"),
    }  # fmt: skip
    assert all(row["status"] == "ok" for row in rows), [row["reason"] for row in rows]
