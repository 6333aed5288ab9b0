"""Results files: what goes in comes out, and what is not whole or not ours is refused."""

from __future__ import annotations

import errno
import json
import multiprocessing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pwbench
from pwbench import files, results
from pwbench.columns import column_dictionary
from pwbench.errors import InputError, MeasurementError
from tests.rows import row, suite_rows, unavailable


def test_rows_come_back_as_they_were_written(tmp_path):
    rows = suite_rows(captures=("code-8k",))
    results.write(tmp_path / "a.parquet", rows)
    for given, read in zip(rows, results.load_rows(tmp_path / "a.parquet"), strict=True):
        assert {k: v for k, v in read.items() if v is not None} == {
            k: v for k, v in given.items() if v is not None
        }


def test_a_frame_has_every_column_in_order_with_its_type(tmp_path):
    results.write(tmp_path / "a.parquet", [row(), unavailable("triton", "not installed")])
    frame = pwbench.load_results(tmp_path)
    assert list(frame.columns) == [*(c.name for c in results.COLUMNS), "file"]
    assert str(frame.dtypes["union_pages"]) == "Int64"
    assert str(frame.dtypes["complete_us"]) == "float64"
    assert len(frame.complete_samples[0]) == 100
    assert set(frame.stage_samples[0]) == {"attention"}


def test_appending_keeps_what_was_there(tmp_path):
    path = tmp_path / "deep" / "a.parquet"
    results.append(path, [row()], {"command": "first"})
    results.append(path, [row("triton"), row("flashinfer")], {"host": "here"})
    assert list(results.load(path).variant) == ["union8", "triton", "flashinfer"]
    provenance = results.describe(path)["provenance"]
    assert provenance["command"] == "first"
    assert provenance["host"] == "here"


def _append_one(path, index):
    results.append(path, [row(f"variant-{index}", samples=3)])


def test_processes_that_append_at_once_lose_nothing(tmp_path):
    path = tmp_path / "a.parquet"
    workers = [
        multiprocessing.get_context("fork").Process(target=_append_one, args=(path, i)) for i in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(results.load(path).variant) == [f"variant-{i}" for i in range(4)]


def test_a_file_explains_its_own_columns(tmp_path):
    results.write(tmp_path / "a.parquet", [row()])
    about = results.describe(tmp_path / "a.parquet")
    assert [c["name"] for c in about["columns"]] == [c.name for c in results.COLUMNS]
    assert all(c["description"].endswith(".") for c in about["columns"])


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_whole(tmp_path, monkeypatch, failing):
    path = tmp_path / "a.parquet"
    results.write(path, [row()])
    before = path.read_bytes()

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, failing, full)
    with pytest.raises(MeasurementError, match="No space left on device; what was there before is unchanged"):
        results.append(path, [row("triton")])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def test_an_interrupt_while_writing_leaves_no_half_file(tmp_path, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(results.pq, "write_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        results.write(tmp_path / "a.parquet", [row()])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 3}, "unknown column 'speed'"),
        ({"session": None}, "lacks session"),
        ({"l2": "tepid"}, "l2 'tepid', expected cold or warm"),
        ({"status": "unavailable"}, "unavailable without a reason"),
        ({"complete_us": None}, "ok with complete_us None"),
        ({"complete_us": float("nan")}, "expected a positive time"),
        ({"complete_samples": [1.0]}, "holds 1 samples but says 100"),
        ({"total_q": "many"}, "does not fit its columns"),
    ],
)
def test_a_row_that_contradicts_the_format_is_refused(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        results.write(tmp_path / "a.parquet", [{**row(), **change}])
    assert not (tmp_path / "a.parquet").exists()


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    results.write(path, [row()])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"a\.parquet is not a readable Parquet file"):
        results.load(path)


def test_appending_to_a_broken_file_is_refused_and_leaves_it(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"something else")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        results.append(path, [row()])
    assert path.read_bytes() == b"something else"


def test_a_foreign_parquet_file_is_refused(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="not one of pwbench's results"):
        results.load(tmp_path)


def _rewrite(path, change_about=None, change_table=None):
    table = pq.read_table(path)
    about = json.loads(table.schema.metadata[b"pwbench"])
    about.update(change_about or {})
    if change_table:
        table = change_table(table)
    pq.write_table(table.replace_schema_metadata({b"pwbench": json.dumps(about)}), path)


def test_an_unknown_major_version_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    results.write(path, [row()])
    _rewrite(path, {"major": 2})
    with pytest.raises(InputError, match=r"results format 2\.0, this pwbench reads 1\.x"):
        results.load(path)


def test_columns_of_a_newer_minor_version_are_kept_and_those_of_an_older_one_are_null(tmp_path):
    path = tmp_path / "a.parquet"
    results.write(path, [row()])
    _rewrite(path, {"minor": 7}, lambda t: t.append_column("extra", pa.array([5])).drop_columns(["cosine"]))
    results.append(path, [row("triton")])
    frame = results.load(path)
    assert frame.extra.iloc[0] == 5
    assert frame.cosine.isna().tolist() == [True, False]


def test_a_column_of_another_type_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    results.write(path, [row()])
    _rewrite(path, None, lambda t: t.drop_columns(["samples"]).append_column("samples", pa.array(["100"])))
    with pytest.raises(InputError, match="column samples as string, expected int64"):
        results.load(path)


def test_paths_without_results_are_refused_with_the_command_that_makes_them(tmp_path):
    with pytest.raises(InputError, match=r"No results file .* `pwbench replay` makes one"):
        results.load(tmp_path)
    with pytest.raises(InputError, match=r"no results at .*b\.parquet; `pwbench replay --out .*b\.parquet`"):
        results.load(tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"`pwbench replay --out .*absent/mine\.parquet`"):
        results.load(tmp_path / "absent")


def test_a_file_named_twice_is_read_once_and_unfinished_files_are_ignored(tmp_path):
    path = tmp_path / "a.parquet"
    results.write(path, [row()])
    (tmp_path / ".b.parquet").write_bytes(b"half")
    assert len(results.load([path, tmp_path])) == 1


def test_the_column_dictionary_names_every_column():
    text = column_dictionary()
    assert all(f"| `{c.name}` |" in text for c in results.COLUMNS)
