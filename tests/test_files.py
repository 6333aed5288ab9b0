"""A file is replaced whole or stays as it was, whoever dies at it."""

import errno
import multiprocessing
import os
import signal

import pytest

from pwbench import files


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_the_folder_is_made_and_the_text_is_there(tmp_path):
    files.replace_text(tmp_path / "a" / "b.txt", "ü 日本\n")
    assert (tmp_path / "a" / "b.txt").read_bytes() == "ü 日本\n".encode()
    assert names(tmp_path / "a") == ["b.txt"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    files.replace_text(tmp_path / "a", "old")

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, failing, full)
    with pytest.raises(OSError, match="No space"):
        files.replace_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def test_an_interrupt_leaves_the_old_file_and_nothing_else(tmp_path):
    files.replace_text(tmp_path / "a", "old")
    with pytest.raises(KeyboardInterrupt), files.replacing(tmp_path / "a") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def _killed_while_writing(path):
    with files.replacing(path) as file:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path):
    files.replace_text(tmp_path / "a", "old")
    writer = multiprocessing.get_context("spawn").Process(
        target=_killed_while_writing, args=(tmp_path / "a",)
    )
    writer.start()
    writer.join()
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == [f".a.partial-{writer.pid}", "a"]
    living = tmp_path / f".a.partial-{os.getppid()}"
    living.write_text("another writer's, who is still at it")
    files.replace_text(tmp_path / "a", "new")
    assert names(tmp_path) == [living.name, "a"]


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe{}", b"[" * 100_000, '{"a":' * 100_000])
def test_what_is_no_json_is_a_value_error_of_one_kind(text):
    with pytest.raises(ValueError, match=r"."):
        files.parse_json(text)
