"""Damaged, edited and foreign files, strange surroundings: one sentence and the right exit code, always.

Every case here runs whole commands. A traceback, an exit code outside 0 to 3, data on stdout that is no
JSON under ``--json``, or a failure without a word fails the test.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pwbench import counter_baseline, results
from pwbench.capture import write
from pwbench.capture.format import MANIFEST, QUERIES, REQUESTS, TENSORS, Tables
from pwbench.cli.main import main
from pwbench.errors import CaptureError
from tests.calls import make_call
from tests.rows import row

Edit = Callable[[Path], object]


def run(*words: object, codes: tuple[int, ...]) -> Result:
    """Run a command; it must end as a command ends."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in codes, (result.exit_code, result.stderr)
    assert "Traceback" not in result.stderr
    if "--json" in words and result.stdout:
        json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    if result.exit_code and "doctor" not in words:
        assert result.stderr.startswith(("pwbench: ", "Usage: ")), result.stderr
    return result


def every_reader(capture: Path, codes: tuple[int, ...]) -> None:
    """Run all that reads a capture."""
    run("verify", capture, "--json", codes=(*codes, 1))
    run("inspect", capture, "--json", codes=(0, *codes))
    run("inspect", capture, codes=(0, *codes))
    run("replay", capture, "-v", "reference", "--samples", 1, "--json", codes=codes)
    run("gate", "--captures", capture, "--baseline", capture.parent / "b.json", "--bless",
        "--why", "x", "--json", codes=(0, *codes))  # fmt: skip
    run("doctor", capture, "--json", codes=(0, 1))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sound") / "suite"
    return {kind: write(folder / kind, make_call(2, (19, 8)), kind=kind) for kind in ("full", "tables")}


@pytest.fixture
def copy(sound: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(sound[kind], tmp_path / "s" / "one"))


def rehash(capture: Path) -> None:
    """Make the manifest agree with the files, as a careful forger would."""
    manifest = json.loads((capture / MANIFEST).read_text())
    for entry in manifest["files"]:
        data = (capture / entry["path"]).read_bytes()
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    with contextlib.suppress(CaptureError):
        manifest["tables_sha256"] = Tables.read(capture).sha256()
    (capture / MANIFEST).write_text(json.dumps(manifest))


# Captures -----------------------------------------------------------------------------------------


def _made_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _made_a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


DAMAGE: dict[str, Edit] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-50]),
    "foreign": lambda path: path.write_bytes(bytes(range(256)) * 20),
    "a folder": _made_a_folder,
    "a loop of links": _made_a_loop,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", [MANIFEST, QUERIES, TENSORS])
def test_a_damaged_capture_is_refused_by_all_that_read_it(copy, name: str, damage: str) -> None:
    capture = copy("full")
    DAMAGE[damage](capture / name)
    every_reader(capture, codes=(2,))


@pytest.mark.parametrize("name", [QUERIES, REQUESTS])
@pytest.mark.parametrize("damage", ["empty", "truncated", "foreign"])
def test_damage_that_the_manifest_agrees_with_is_found_all_the_same(copy, name: str, damage: str) -> None:
    capture = copy("tables")
    DAMAGE[damage](capture / name)
    rehash(capture)
    every_reader(capture, codes=(2,))


def _with(column: str, values: Callable[[list[Any]], list[Any]], kind: pa.DataType) -> Edit:
    def edit(path: Path) -> None:
        table = pq.read_table(path)
        changed = pa.array(values(table[column].to_pylist()), kind)
        pq.write_table(table.set_column(table.column_names.index(column), column, changed), path)

    return edit


def _first(value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [value, *values[1:]]


IDS = pa.list_(pa.int64(), 16)
FORGED: list[tuple[str, Edit]] = [
    *((QUERIES, _with("pages", _first([value] * 16), IDS)) for value in (None, 2**31 - 1, 2**40, -7)),
    *((QUERIES, _with("position", _first(value), pa.int64())) for value in (None, -1, 2**31 - 1, 2**40)),
    *((QUERIES, _with("n_sel", _first(value), pa.int64())) for value in (-1, 99, 2**62)),
    *((REQUESTS, _with("seq_len", _first(value), pa.int64())) for value in (None, -1, 2**31, 2**62)),
    *((REQUESTS, _with("q_len", _first(value), pa.int64())) for value in (-1, 2**31, 2**62)),
    *(
        (REQUESTS, _with("page_table", _first(value), pa.list_(pa.int64())))
        for value in (None, [], [None], [-1], [2**31 - 1], [2**31], [2**40])
    ),
    (QUERIES, lambda path: pq.write_table(pq.read_table(path).slice(0, 0), path)),
    (REQUESTS, lambda path: pq.write_table(pq.read_table(path).slice(0, 0), path)),
    (REQUESTS, lambda p: pq.write_table(pa.concat_tables([pq.read_table(p)] * 2), p)),
    (REQUESTS, lambda p: pq.write_table((t := pq.read_table(p)).append_column("seq_len", t["seq_len"]), p)),
]


@pytest.mark.parametrize("number", range(len(FORGED)))
def test_forged_tables_are_refused_before_anything_is_measured(copy, number: int) -> None:
    name, edit = FORGED[number]
    capture = copy("tables")
    edit(capture / name)
    rehash(capture)
    run("verify", capture, "--json", codes=(1, 2))
    run("inspect", capture, codes=(0, 2, 3))
    run("replay", capture, "-v", "reference", "--samples", 1, "--json", codes=(2,))
    run("gate", "--captures", capture, "--baseline", capture.parent / "b.json", "--bless", "--why", "x",
        "--json", codes=(0, 2, 3))  # fmt: skip


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


def _places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
    return [here, *(place for key in keys for place in _places(value[key], (*here, key)))]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_entry_of_a_manifest_may_be_anything(sound, tmp_path_factory, data) -> None:
    kind = data.draw(st.sampled_from(["full", "tables"]))
    manifest = json.loads((sound[kind] / MANIFEST).read_text())
    place = data.draw(st.sampled_from(_places(manifest)))
    value = data.draw(JSON)
    if place:
        inner = manifest
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
    else:
        manifest = value
    capture = Path(shutil.copytree(sound[kind], tmp_path_factory.mktemp("edited") / "one"))
    (capture / MANIFEST).write_text(json.dumps(manifest))
    run("verify", capture, "--json", codes=(0, 1))
    run("inspect", capture, codes=(0, 2))
    run("inspect", capture, "--json", codes=(0, 2))
    run("replay", capture, "-v", "reference", "--samples", 1, "--json", codes=(0, 2))


def test_links_that_lead_round_do_not_lead_round_for_ever(copy) -> None:
    capture = copy("tables")
    for number in range(4):
        (capture.parent / f"up{number}").symlink_to("..")
    (capture.parent / "again").symlink_to("one")
    found = json.loads(run("verify", capture.parent.parent, "--json", codes=(0,)).stdout)
    assert len(found["captures"]) == 1


def test_a_path_that_is_no_utf8_holds_a_capture_too(sound, tmp_path: Path) -> None:
    capture = tmp_path / os.fsdecode(b"s\xff \xc3\xbc") / "one"
    with pytest.raises(CaptureError, match=r"no UTF-8, which safetensors asks for"):
        write(capture, make_call(1, (5,)), kind="full")
    write(capture, make_call(1, (5,)), kind="tables")
    run("verify", capture, "--json", codes=(0,))
    run("replay", capture, "-v", "reference", "--samples", 1, "--json", codes=(0,))


# Results and baselines ----------------------------------------------------------------------------


def every_reader_of_results(path: Path, sound: Path, codes: tuple[int, ...]) -> None:
    for words in ((), ("--json",), ("--format", "csv"), ("--format", "markdown")):
        run("report", path, *words, codes=codes)
    run("gate", "--baseline", sound, "--current", path, "--json", codes=(*codes, 1))
    run("gate", "--baseline", path, "--current", sound, "--json", codes=(*codes, 1))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "sound.parquet"
    results.write(path, [row("flashinfer"), row("union8-regroup", complete_us=80.0)])
    return path


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name not in ("missing", "a folder")])
def test_damaged_results_are_refused_by_all_that_read_them(rows: Path, tmp_path: Path, damage: str) -> None:
    other = Path(shutil.copy(rows, tmp_path / "other.parquet"))
    DAMAGE[damage](other)
    every_reader_of_results(other, rows, codes=(2,))


@pytest.mark.parametrize("column", results._REQUIRED)
def test_results_without_what_names_a_row_are_refused(rows: Path, tmp_path: Path, column: str) -> None:
    other = tmp_path / "other.parquet"
    table = pq.read_table(rows)
    nothing = pa.nulls(table.num_rows, table.schema.field(column).type)
    pq.write_table(table.set_column(table.column_names.index(column), column, nothing), other)
    every_reader_of_results(other, rows, codes=(2,))
    pq.write_table(table.drop_columns([column]), other)
    every_reader_of_results(other, rows, codes=(2,))


@pytest.mark.parametrize("time", [None, 0.0, -1.0, float("nan"), float("inf")])
def test_results_with_times_that_cannot_be_are_refused(rows: Path, tmp_path: Path, time: float) -> None:
    other = Path(shutil.copy(rows, tmp_path / "other.parquet"))
    _with("complete_us", _first(time), pa.float64())(other)
    every_reader_of_results(other, rows, codes=(2,))


@pytest.mark.parametrize(
    "about, code",
    [("[1]", 2), ("null", 2), ("[" * 100_000, 2), ('{"provenance": 5}', 0), ('{"minor": 99}', 0)],
)
def test_what_a_results_file_says_of_itself_may_be_anything(rows: Path, about: str, code: int) -> None:
    table = pq.read_table(rows)
    said = json.loads(table.schema.metadata[b"pwbench"])
    if about.startswith("{"):
        about = json.dumps(said | json.loads(about))
    pq.write_table(table.replace_schema_metadata({b"pwbench": about.encode()}), rows)
    run("report", rows, "--json", codes=(code,))
    run("gate", "--baseline", rows, "--current", rows, "--bless", "--why", "x", "--json", codes=(code,))


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"schema": []}', b'{"schema": null, "captures": {}}'],
)
def test_what_is_no_baseline_is_refused_and_kept(copy, tmp_path: Path, content: bytes) -> None:
    baseline = tmp_path / "b.json"
    baseline.write_bytes(content)
    for words in ((), ("--bless", "--why", "x")):
        run("gate", "--baseline", baseline, "--captures", copy("tables"), *words, "--json", codes=(2,))
        shutil.rmtree(tmp_path / "s")
    assert baseline.read_bytes() == content


@pytest.mark.parametrize("value", [None, 5, "x", [], {}])
@pytest.mark.parametrize("place", [(), ("groupings",), ("groupings", "original"), ("tables_sha256",)])
def test_an_edited_baseline_is_no_reason_to_fall_over(copy, rows, tmp_path: Path, place, value) -> None:
    capture, baseline = copy("tables"), tmp_path / "b.json"
    counted = counter_baseline.count_captures([capture])
    counter_baseline.bless(baseline, counted, "x")
    stored = json.loads(baseline.read_text())
    inner, keys = stored["captures"], ("s/one", *place)
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    baseline.write_text(json.dumps(stored))
    run("gate", "--baseline", baseline, "--captures", capture, "--json", codes=(0, 1, 2))
    run("gate", "--baseline", baseline, "--current", rows, "--json", codes=(0, 1, 2))


def test_fresh_does_not_replace_what_is_no_results_file(copy, tmp_path: Path) -> None:
    mine = tmp_path / "thesis.parquet"
    mine.write_text("years of work")
    run("replay", copy("tables"), "-v", "reference", "--samples", 1, "--fresh", "--out", mine, codes=(2,))
    assert mine.read_text() == "years of work"


def test_where_nothing_can_be_stored_nothing_is_measured(copy, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("pwbench.replay.run", lambda *_: pytest.fail("it measured"))
    out = tmp_path / "file" / "rows.parquet"
    seen = run("replay", copy("tables"), "-v", "reference", "--out", out, "--json", codes=(2, 3))
    assert "Nothing was measured" in seen.stderr


# Arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("--samples", "0"),
        ("--samples", "-1"),
        ("--seed", "-1"),
        ("-v", "nope"),
        ("--baseline", "nope"),
        ("--out", "."),
    ],
)
def test_a_replay_of_what_cannot_be_is_bad_usage(copy, words) -> None:
    run("replay", copy("tables"), "-v", "reference", "--samples", 1, *words, "--json", codes=(2,))


@pytest.mark.parametrize("tokens", ["0", "-1", "x", "²", "²k", "1.5k", "2097152K", "9" * 5000, "٣"])
def test_what_is_no_number_of_tokens_is_bad_usage(tmp_path: Path, tokens: str) -> None:
    run("capture", "synthetic", "--context", tokens, "--out", tmp_path / "a", "--json", codes=(2,))
    assert not list(tmp_path.iterdir())


def test_more_memory_than_there_is_is_a_sentence(monkeypatch, tmp_path: Path) -> None:
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")):

        def exhausted(*_args, error=error, **_options):
            raise error

        monkeypatch.setattr("pwbench.capture.synthetic.generate", exhausted)
        seen = run("capture", "synthetic", "--context", "1K", "--out", tmp_path / "a", codes=(3,))
        assert "more memory than there is" in seen.stderr


# Surroundings -------------------------------------------------------------------------------------


def shell(command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a shell line in which ``$PW`` is pwbench."""
    there = {**os.environ, "PW": f"{sys.executable} -m pwbench.cli.main", **environment}
    there["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], cwd=cwd, env=there, capture_output=True
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_locale_without_our_characters_gets_question_marks(
    copy, rows: Path, tmp_path: Path, encoding: str
) -> None:
    copy("tables")
    for words in ("inspect s/one", "report sound.parquet"):
        done = shell(f"$PW {words}", tmp_path, PYTHONIOENCODING=encoding)
        assert done.returncode == 0, done.stderr.decode()
        # click writes UTF-8 where it is told ASCII, so only the former can be asked for.
        assert done.stdout.decode("utf-8" if encoding == "ascii" else encoding)


@pytest.mark.parametrize("words", ["report sound.parquet", "inspect s/one"])
@pytest.mark.parametrize("end", ["| true", ">&-"])
def test_a_reader_who_goes_away_is_no_failure(copy, rows: Path, tmp_path: Path, words: str, end: str) -> None:
    copy("tables")
    done = shell(f"$PW {words} {end}", tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_directory_with_nothing_in_it_is_explained_by_every_command(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ("replay", "verify", "report", "gate", "suites"):
        seen = run(words, "--json", codes=(2,))
        assert not seen.stdout and ("pwbench " in seen.stderr or "captures" in seen.stderr)


@pytest.mark.parametrize("made", ["file", "missing below a file"])
def test_the_doctor_sees_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch, made: str) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("PWBENCH_CACHE", str(tmp_path / "cache" / ("" if made == "file" else "below")))
    monkeypatch.chdir(tmp_path)
    found = json.loads(run("doctor", "--json", codes=(1,)).stdout)["findings"]
    assert any("Cubins cannot be kept" in one["text"] and "PWBENCH_CACHE" in one["mend"] for one in found)
