"""Replay: what becomes a row, what is refused, what survives an interruption."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from pwbench import capture, results, variants
from pwbench.capture.seeded import GENERATOR
from pwbench.cli.main import main
from pwbench.columns import COLUMNS
from pwbench.counters import count
from pwbench.device import DeviceInfo
from pwbench.errors import CaptureError, InputError, MeasurementError
from pwbench.grouping import identity_order
from pwbench.operator import SparsePrefillCall, supports
from pwbench.plan import Settings, plan
from pwbench.reference import attend, compare
from pwbench.replay import TWIN, Silent, _Bench, replay, run
from pwbench.timing import Timing
from pwbench.variants import Options, Prepared, Stage, Variant

CPU = torch.device("cpu")


class Fake(Variant):
    """A variant whose result is the truth, changed by ``spoil``."""

    summary = "for tests"

    def __init__(
        self,
        name: str = "fake",
        spoil: Callable[[torch.Tensor], None] = lambda out: None,
        precisions: tuple[str, ...] = ("fast",),
        reason: str | None = None,
        graphable: bool = False,
    ) -> None:
        self.name, self.spoil, self.precisions, self.reason = name, spoil, precisions, reason
        self.graphable = graphable

    def unavailable(self, device: torch.device) -> str | None:
        return self.reason

    def prepare(self, call: SparsePrefillCall, options: Options) -> Prepared:
        out = torch.empty((call.total_q, call.q_heads, 128))
        truth = attend(call).float()

        def attention() -> None:
            out.copy_(truth)
            self.spoil(out)

        return Prepared(attention, [Stage("attention", attention)], out, graphable=self.graphable)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the registry of variants."""

    def put(*some: Variant) -> None:
        monkeypatch.setattr(variants, "_registry", lambda: {one.name: one for one in some})

    return put


# Rows -------------------------------------------------------------------------------------------


def test_a_row_has_every_column_and_times_add_up(small_captures: Path) -> None:
    rows = replay([small_captures / "small" / "one"], ["union8-regroup"], samples=5)
    (row,) = rows
    assert list(row) == [column.name for column in COLUMNS]
    assert row["status"] == "ok" and row["device"] == "cpu" and row["mode"] == "eager"
    assert row["samples"] == len(row["complete_samples"]) == 5
    stages = row["search_us"] + row["metadata_us"] + row["attention_us"]
    assert row["gap_us"] == pytest.approx(row["complete_us"] - stages)
    assert row["complete_us"] == np.median(row["complete_samples"])
    assert set(row["stage_samples"]) == {"search", "metadata", "attention"}
    assert row["rel_l2"] < 1e-5 and row["checked_rows"] == row["total_q"] == 33
    assert row["noise_floor"] is not None, "five samples are enough for an A/A pair"
    assert row["window"] == 128 and row["peer"]


def test_counters_are_those_of_the_order_that_ran(small_captures: Path) -> None:
    path = small_captures / "small" / "one"
    rows = {row["variant"]: row for row in replay([path], ["union8", "reference"], samples=1)}
    call = capture.load(path).call()
    pages = supports(call)[0]
    order = identity_order(call.kv_heads, call.total_q)
    for name, group in (("union8", 8), ("reference", 1)):
        expected = count(call, pages, order, group)
        assert {key: rows[name][key] for key in expected} == expected
    assert rows["union8"]["window"] is None, "it does not search"
    assert rows["union8"]["roofline_term"].endswith("(documented)")
    assert rows["union8"]["noise_floor"] is None, "one sample says nothing about noise"


def test_stored_and_seeded_tensors_are_told_apart(small_captures: Path) -> None:
    by_capture = {row["capture"]: row for row in replay([small_captures], ["union8"], samples=1)}
    assert by_capture["one"]["tensors"] == "stored" and by_capture["one"]["kind"] == "full"
    assert by_capture["two"]["tensors"] == "seeded" and by_capture["two"]["kind"] == "tables"
    seeded = replay([small_captures / "small" / "one"], ["union8"], samples=1, tensors="seeded")
    assert seeded[0]["tensors"] == "seeded"
    names = [by_capture["one"]["generator"], by_capture["two"]["generator"], seeded[0]["generator"]]
    assert names == [None, GENERATOR, GENERATOR]


def test_both_kinds_of_tensors_are_timed_in_turn_in_one_session(small_captures: Path, tmp_path: Path) -> None:
    path, out = small_captures / "small" / "one", tmp_path / "rows.parquet"
    settings = {"samples": 5, "tensors": "both", "out": out}
    rows = replay([path], ["union8", "reference"], **settings)
    assert [(row["variant"], row["tensors"]) for row in rows] == [
        ("union8", "stored"), ("union8", "seeded"), ("reference", "stored"), ("reference", "seeded"),
    ]  # fmt: skip
    assert len({row["session"] for row in rows}) == 1
    assert all(len(row["complete_samples"]) == 5 and row["noise_floor"] is not None for row in rows)
    stored, seeded = rows[:2]
    assert stored["union_pages"] == seeded["union_pages"] and stored["rel_l2"] != seeded["rel_l2"]
    existing = results.load_rows(out)
    assert plan([path], ["union8"], Settings(CPU, samples=5, tensors="both"), existing).work == []
    half = [row for row in existing if row["tensors"] == "stored"]
    assert plan([path], ["union8"], Settings(CPU, samples=5, tensors="both"), half).work != []


def test_both_kinds_of_tensors_need_stored_ones(small_captures: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="stores tables only"):
        replay([small_captures / "small" / "two"], ["union8"], samples=1, tensors="both")
    with pytest.raises(InputError, match="one kind of tensors"):
        Settings(CPU, tensors="both", save_outputs=tmp_path)


def test_the_cost_of_the_fp8_cache_is_reported_where_the_model_s_output_is_stored(tmp_path: Path) -> None:
    from tests.calls import make_call

    call = make_call(5, q_lens=(9,), poison="none", spare_pages=0)
    out_model = (attend(call) * 1.01).to(torch.bfloat16)
    capture.write(tmp_path / "suite" / "a", call, kind="full", out_model=out_model)
    row = replay([tmp_path], ["union8"], samples=1)[0]
    expected = compare(attend(call), out_model.double()).rel_l2
    assert row["fp8_cache_rel_l2"] == pytest.approx(expected) and expected > 5e-3


def test_outputs_are_saved_with_the_permutation_that_was_used(small_captures: Path, tmp_path: Path) -> None:
    replay([small_captures], ["union8", "union8-regroup"], samples=1, save_outputs=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    call = capture.load(small_captures / "small" / "one").call()
    saved = load_file(tmp_path / "one.union8-regroup.safetensors")
    assert saved["out"].dtype == torch.bfloat16 and saved["out"].shape == (33, 16, 128)
    assert compare(saved["out"], attend(call)).rel_l2 < 4e-3
    assert saved["query_ids"].dtype == torch.int32
    assert sorted(saved["query_ids"][0].tolist()) == list(range(33))
    plain = load_file(tmp_path / "one.union8.safetensors")["query_ids"]
    assert plain.tolist() == [list(range(33))]


def test_outputs_of_captures_of_one_name_go_to_a_folder_per_suite(
    small_captures: Path, tmp_path: Path
) -> None:
    root = tmp_path / "captures"
    for suite in ("a", "b"):
        shutil.copytree(small_captures / "small" / "two", root / suite / "two")
    replay([root], ["union8"], samples=1, save_outputs=tmp_path / "out")
    found = sorted(
        str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.safetensors")
    )
    assert found == ["a/two.union8.safetensors", "b/two.union8.safetensors"]


def test_every_variant_that_runs_here_is_the_default(small_captures: Path) -> None:
    rows = replay([small_captures / "small" / "two"], samples=1)
    names = {row["variant"] for row in rows}
    assert {"reference", "union8", "union8-regroup", "union8-precomputed"} <= names
    assert all(row["status"] == "ok" for row in rows), [row["reason"] for row in rows]


# What is not a measurement ----------------------------------------------------------------------


def test_a_wrong_output_fails_the_row_and_keeps_its_error(
    small_captures: Path, only: Callable[..., None]
) -> None:
    only(Fake("good"), Fake("bad", spoil=lambda out: out.mul_(1.2)))
    rows = {row["variant"]: row for row in replay([small_captures / "small" / "one"], samples=1)}
    assert rows["good"]["status"] == "ok"
    assert rows["bad"]["status"] == "failed" and "rel-L2" in rows["bad"]["reason"]
    assert rows["bad"]["rel_l2"] == pytest.approx(0.2, rel=1e-3)
    assert rows["bad"]["complete_us"] is None


def test_a_row_that_was_not_written_is_found_by_the_poison(
    small_captures: Path, only: Callable[..., None]
) -> None:
    class Lazy(Fake):
        def prepare(self, call: SparsePrefillCall, options: Options) -> Prepared:
            prepared = super().prepare(call, options)
            whole = prepared.run

            def run() -> None:
                before = prepared.out[7].clone()
                whole()
                prepared.out[7] = before

            return Prepared(run, [Stage("attention", run)], prepared.out)

    only(Lazy("lazy"))
    (row,) = replay([small_captures / "small" / "one"], samples=1)
    assert row["status"] == "failed" and "1 of 33 output rows" in row["reason"] and "row 7" in row["reason"]


def test_a_variant_that_breaks_fails_its_row_alone(small_captures: Path, only: Callable[..., None]) -> None:
    def explode(out: torch.Tensor) -> None:
        raise ValueError("no such page")

    only(Fake("good"), Fake("bad", spoil=explode))
    rows = {row["variant"]: row for row in replay([small_captures / "small" / "one"], samples=1)}
    assert rows["bad"]["reason"] == "ValueError: no such page"
    assert rows["good"]["status"] == "ok"


def test_an_unavailable_variant_has_a_row_with_its_reason(small_captures: Path) -> None:
    rows = {
        row["variant"]: row for row in replay([small_captures / "small" / "one"], ["flashinfer", "union8"])
    }
    assert rows["flashinfer"]["status"] == "unavailable" and "GPU" in rows["flashinfer"]["reason"]
    assert rows["union8"]["status"] == "ok"


def test_a_variant_of_one_precision_runs_in_that_one_and_says_so(
    small_captures: Path, only: Callable[..., None]
) -> None:
    only(Fake("exact", precisions=("accurate",)), Fake("both", precisions=("fast", "accurate")))
    rows = {row["variant"]: row for row in replay([small_captures / "small" / "one"], samples=1)}
    assert rows["exact"]["precision"] == "accurate" and rows["both"]["precision"] == "fast"


def test_the_a_a_twin_never_becomes_a_row(small_captures: Path, only: Callable[..., None]) -> None:
    only(Fake("flashinfer"), Fake("other"))
    rows = replay([small_captures / "small" / "one"], samples=6)
    assert [row["variant"] for row in rows] == ["flashinfer", "other"]
    assert not any(TWIN in row["variant"] for row in rows)
    assert len({row["noise_floor"] for row in rows}) == 1 and rows[0]["noise_floor"] is not None


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"samples": 0}, "samples is 0"),
        ({"window": 96}, "window is 96, expected 64 or 128"),
        ({"precision": "exact"}, "precision is 'exact'"),
        ({"modes": ("graph",)}, "needs a CUDA device"),
        ({"check_rows": 0}, "check_rows is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(bad: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings(device=CPU, **bad)


def test_an_unknown_variant_is_refused_with_the_known_ones(small_captures: Path) -> None:
    with pytest.raises(InputError, match=r"No variant is called 'union9'.*union8"):
        plan([small_captures], ["union9"], Settings(device=CPU))


def test_a_capture_that_was_edited_is_refused_before_anything_runs(
    small_captures: Path, tmp_path: Path
) -> None:
    root = tmp_path / "captures"
    shutil.copytree(small_captures, root)
    manifest = json.loads((root / "small" / "two" / "manifest.json").read_text())
    manifest["tables_sha256"] = "0" * 64
    (root / "small" / "two" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CaptureError, match="two"):
        replay([root], ["union8"], samples=1, out=tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_cuda_that_is_not_there_is_a_measurement_error(small_captures: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(MeasurementError, match="No CUDA device can be used"):
        replay([small_captures], ["union8"], device="cuda")


# Resuming ---------------------------------------------------------------------------------------


def test_rows_that_are_stored_already_are_not_measured_again(small_captures: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    settings = Settings(device=CPU, samples=1)
    replay([small_captures / "small" / "one"], ["union8"], samples=1, out=out)
    stored = results.load_rows(out)
    again = plan([small_captures], ["union8"], settings, stored)
    assert again.done == ["small/one"]
    assert [(one.name, names) for one, names in again.work] == [("two", ["union8"])]
    more = plan([small_captures], ["union8", "reference"], settings, stored)
    assert [(one.name, names) for one, names in more.work] == [
        ("one", ["reference"]), ("two", ["union8", "reference"]),
    ]  # fmt: skip


@pytest.mark.parametrize("change", [{"samples": 2}, {"precision": "accurate"}, {"l2": ("cold", "warm")}])
def test_other_settings_are_other_rows(small_captures: Path, tmp_path: Path, change: dict) -> None:
    out = tmp_path / "rows.parquet"
    replay([small_captures / "small" / "one"], ["union8"], samples=1, out=out)
    settings = Settings(device=CPU, **{"samples": 1, **change})
    assert not plan([small_captures / "small" / "one"], ["union8"], settings, results.load_rows(out)).done


def test_a_window_that_is_the_variants_own_is_not_asked_for_again(small_captures: Path) -> None:
    one, names = [small_captures / "small" / "one"], ["pageweaver-regroup", "union8-regroup"]
    stored = replay(one, names, samples=1)
    assert [row["window"] for row in stored] == [64, 128]
    assert plan(one, names, Settings(device=CPU, samples=1), stored).done == ["small/one"]
    [(_, more)] = plan(one, names, Settings(device=CPU, samples=1, window=64), stored).work
    assert more == ["union8-regroup"]


def test_a_missing_saved_output_is_made_though_the_row_is_there(small_captures: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    replay([small_captures / "small" / "one"], ["union8"], samples=1, out=out)
    settings = Settings(device=CPU, samples=1, save_outputs=tmp_path / "saved")
    assert not plan([small_captures / "small" / "one"], ["union8"], settings, results.load_rows(out)).done


def test_a_capture_s_rows_are_handed_on_when_it_is_finished(small_captures: Path) -> None:
    chosen = plan([small_captures], ["union8"], Settings(device=CPU, samples=1))
    rows = run(chosen)
    assert {row["capture"] for row in next(rows)} == {"one"}
    assert {row["capture"] for row in next(rows)} == {"two"}


def test_progress_counts_up_to_the_plan_s_steps(small_captures: Path) -> None:
    class Counter:
        steps = 0.0

        def advance(self, steps: float = 1) -> None:
            self.steps += steps

        def note(self, text: str) -> None:
            pass

    settings = Settings(device=CPU, samples=3, l2=("cold", "warm"))
    chosen, counter = plan([small_captures], ["union8", "flashinfer"], settings), Counter()
    list(run(chosen, counter))
    assert counter.steps == chosen.steps == 2 * 2 * (1 + 6)


def test_kill_9_in_the_middle_leaves_whole_results_and_the_rest_is_resumed(
    small_captures: Path, tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, out = tmp_path / "captures", tmp_path / "rows.parquet"
    for index in range(12):
        shutil.copytree(small_captures / "small" / "two", root / "many" / f"c{index:02}")
    command = [
        sys.executable, "-m", "pwbench.cli.main", "replay", str(root), "-v", "union8", "-v", "reference",
        "--samples", "4", "--l2", "warm", "--out", str(out),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)}
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not out.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    rows = results.load_rows(out)
    done = {row["capture"] for row in rows}
    assert 0 < len(done) < 12, "the kill has to fall into the middle for this test to mean anything"
    assert len(rows) == 2 * len(done), "a capture's rows come together or not at all"
    # Rows of another commit are not resumed, and somebody may work on the checkout while its tests run.
    monkeypatch.setattr("pwbench.device.commit", lambda: rows[0]["commit"])
    finished = CliRunner().invoke(main, command[3:])
    assert finished.exit_code == 0, finished.stderr
    rows = results.load_rows(out)
    assert sorted({row["capture"] for row in rows}) == [f"c{index:02}" for index in range(12)]
    assert len(rows) == 24


# On a GPU, as far as it can be shown without one ------------------------------------------------


def _bench(small_captures: Path) -> _Bench:
    chosen = plan([small_captures / "small" / "one"], (), Settings(device=CPU, samples=5))
    bench = _Bench(chosen, chosen.work[0][0], "session", Silent())
    bench.info = DeviceInfo("cuda", "NVIDIA H200")
    return bench


def test_a_time_below_what_the_chip_needs_is_an_error_and_not_a_record(
    small_captures: Path, only: Callable[..., None]
) -> None:
    only(Fake("fake"))
    bench = _bench(small_captures)
    checked = bench._check("fake", bench.subjects[0])
    floor = bench._roofline(checked, "fast", "graph", "cold").floor_us
    for time_us, status in ((floor * 0.9, "failed"), (floor * 1.1, "ok")):
        timed = Timing([time_us] * 5, {"attention": [time_us] * 5})
        row = bench._row(checked, timed, "graph", "cold", None)
        assert row["status"] == status
    row = bench._row(checked, Timing([floor / 2] * 5, {}), "graph", "cold", None)
    assert "the chip needs at least" in row["reason"] and row["complete_us"] is None


def test_what_cannot_be_captured_into_a_graph_is_unavailable_in_graph_mode_and_never_timed_eagerly(
    small_captures: Path, only: Callable[..., None]
) -> None:
    only(Fake("hostbound"), Fake("capturable", graphable=True))
    bench = _bench(small_captures)
    checked = {name: bench._check(name, bench.subjects[0]) for name in ("hostbound", "capturable")}
    rows = {row["variant"]: row for row in bench._time(checked, "graph", "cold")}
    assert rows["hostbound"]["status"] == "unavailable" and "--mode eager" in rows["hostbound"]["reason"]
    assert rows["capturable"]["status"] == "failed", (
        "there are no graphs on the CPU, and no fall-back to eager"
    )
    assert rows["capturable"]["complete_us"] is None
