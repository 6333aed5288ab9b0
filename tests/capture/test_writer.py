import errno
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pwbench import reference
from pwbench.capture import discover, failures, load, verify, write, writer
from pwbench.capture.format import MANIFEST
from pwbench.errors import CaptureError, OperatorError
from pwbench.operator import supports
from tests.calls import SELECTIONS, make_call


def small(seed=1, **changes):
    return make_call(seed, (21, 12), selection="local", poison="none", **changes)


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["full", "tables"])
def test_a_written_capture_verifies_and_reads_back(tmp_path, kind):
    call = small()
    path = write(tmp_path / "suite" / "one", call, kind=kind, facts={"layer": 3})
    assert failures(verify(path)) is None
    loaded = load(path)
    assert (loaded.name, loaded.suite, loaded.kind, loaded.manifest["layer"]) == ("one", "suite", kind, 3)
    if kind == "full":
        again = loaded.call()
        assert torch.equal(again.q.view(torch.int16), call.q.view(torch.int16))
        assert torch.equal(
            again.kv.view(torch.uint8)[again.page_table[0, 0].item()].flatten(), stored_page(call)
        )


def stored_page(call):
    return call.kv.view(torch.uint8)[call.page_table[0, 0].item()].flatten()


def test_both_kinds_of_one_call_have_one_tables_hash(tmp_path):
    full, tables = (load(write(tmp_path / kind, small(), kind=kind)) for kind in ("full", "tables"))
    assert full.tables_sha256 == tables.tables_sha256


def test_garbage_past_the_last_token_is_not_stored(tmp_path):
    poisoned = make_call(1, (21, 12), selection="local", poison="tails")
    path = write(tmp_path / "one", poisoned)
    assert failures(verify(path)) is None
    assert torch.isfinite(load(path).call().kv.float()).all()


def test_separate_k_and_v_are_stored_side_by_side(tmp_path):
    pair = make_call(1, (21,), selection="local", poison="none", separate=True)
    again = load(write(tmp_path / "one", pair)).call()
    owned = pair.page_table[0, :4].long()
    assert torch.equal(again.k.view(torch.uint8)[owned], pair.k.view(torch.uint8)[owned])
    assert torch.equal(again.v.view(torch.uint8)[owned], pair.v.view(torch.uint8)[owned])


def test_an_existing_capture_is_kept_unless_overwrite_is_asked_for(tmp_path):
    write(tmp_path / "one", small(1), kind="tables")
    with pytest.raises(CaptureError, match="already exists"):
        write(tmp_path / "one", small(2), kind="tables")
    before = load(tmp_path / "one").tables_sha256
    write(tmp_path / "one", small(2), kind="tables", overwrite=True)
    assert load(tmp_path / "one").tables_sha256 != before
    assert entries(tmp_path) == ["one"]


def test_a_directory_that_is_no_capture_is_never_overwritten(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(CaptureError, match="not overwritten"):
        write(tmp_path / "home", small(), overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").is_file()


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CaptureError, match="Kind of a capture is 'partial'"):
        write(tmp_path / "one", small(), kind="partial")
    with pytest.raises(CaptureError, match="no query"):
        write(tmp_path / "one", make_call(1, (0,)), kind="tables")
    with pytest.raises(OperatorError, match="softmax_scale"):
        write(tmp_path / "one", small(softmax_scale=-1.0))
    with pytest.raises(CaptureError, match="out_model is"):
        write(tmp_path / "one", small(), out_model=torch.zeros(1, 16, 128))
    assert entries(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_and_ctrl_c_leave_nothing(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(writer, "write_tensors", fail)
    with pytest.raises(type(error)):
        write(tmp_path / "one", small())
    assert entries(tmp_path) == []


def test_failure_while_replacing_keeps_the_old_capture(tmp_path, monkeypatch):
    write(tmp_path / "one", small(1), kind="tables")
    before = load(tmp_path / "one").tables_sha256
    real = os.replace

    def fail_for_partials(source, target):
        if ".partial-" in str(source):
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(writer.os, "replace", fail_for_partials)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path / "one", small(2), kind="tables", overwrite=True)
    assert load(tmp_path / "one").tables_sha256 == before
    assert entries(tmp_path) == ["one"]


def test_the_manifest_is_written_last(tmp_path, monkeypatch):
    seen = []
    real = writer.Tables.write

    def spy(self, directory):
        real(self, directory)
        seen.append((directory / MANIFEST).exists())

    monkeypatch.setattr(writer.Tables, "write", spy)
    write(tmp_path / "one", small(), kind="tables")
    assert seen == [False]


KILLED_WRITER = """
import sys, time
from pwbench.capture import write, writer
from tests.calls import make_call
real = writer.write_tensors
def slow(*arguments):
    real(*arguments)
    print("half", flush=True)
    time.sleep(60)
writer.write_tensors = slow
write(sys.argv[1], make_call(1, (21,), selection="local", poison="none"))
"""


def test_kill_9_during_a_write_leaves_no_capture_and_the_next_writer_cleans_up(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_WRITER, str(tmp_path / "one")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    partial = f".one.partial-{process.pid}"
    assert entries(tmp_path) == [partial]
    with pytest.raises(CaptureError, match="no capture"):
        discover([tmp_path])
    write(tmp_path / "two", small(), kind="tables")
    assert entries(tmp_path) == ["two"]


def test_partials_of_living_writers_are_left_alone(tmp_path):
    mine = tmp_path / f".other.partial-{os.getppid()}"
    mine.mkdir()
    write(tmp_path / "one", small(), kind="tables")
    assert mine.is_dir()


def test_only_partials_are_cleaned(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale = tmp_path / f".x.partial-{dead.pid}"
    stale.mkdir()
    kept = [tmp_path / ".git", tmp_path / f"x.partial-{dead.pid}"]
    for path in kept:
        path.mkdir()
    assert writer.clean_stale_partials(tmp_path) == [stale]
    assert all(path.is_dir() for path in kept)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    q_lens=st.lists(st.integers(0, 12), min_size=1, max_size=3).filter(any),
    kv_heads=st.integers(1, 2),
    selection=st.sampled_from(SELECTIONS),
    missing_tokens=st.integers(0, 300),
    shared_pages=st.integers(0, 2),
    kind=st.sampled_from(["full", "tables"]),
)
def test_any_call_without_nan_verifies_once_written(
    tmp_path_factory, seed, q_lens, kv_heads, selection, missing_tokens, shared_pages, kind
):
    call = make_call(
        seed,
        q_lens,
        kv_heads=kv_heads,
        selection=selection,
        seq_lens=[max(600 + n - missing_tokens, 0) for n in q_lens],
        shared_pages=shared_pages,
        poison="tails",
    )
    path = write(tmp_path_factory.mktemp("any") / "one", call, kind=kind)
    assert failures(verify(path)) is None
    again = load(path).call()
    for got, want in zip(supports(again), supports(call), strict=True):
        np.testing.assert_array_equal(got, want)
    if kind == "full":
        rows = [0, call.total_q - 1]
        assert torch.equal(reference.attend(again, rows), reference.attend(call, rows))
