"""Files that are replaced whole or not at all, and JSON that nobody vouches for."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_PARTIAL = re.compile(r"^\.(?P<name>.+)\.partial-(?P<pid>\d+)$")


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` when the block ends well, and vanishes otherwise.

    The folder is made if need be. What killed writers of the same file left beside it is removed.

    Raises:
        OSError: it could not be written; what was at ``path`` before is unchanged.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for entry in path.parent.glob(".*.partial-*"):
        left = _PARTIAL.match(entry.name)
        if left and left["name"] == path.name and entry.is_file() and not alive(int(left["pid"])):
            entry.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def replace_text(path: str | Path, text: str) -> None:
    """Make ``text`` (as UTF-8) the content of ``path``; raises as `replacing`."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def parse_json(text: str | bytes) -> Any:
    """What ``text`` says.

    Raises:
        ValueError: it is no JSON, no UTF-8, or nested so deeply that no file of ours can be meant.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def alive(pid: int) -> bool:
    """Whether a process of this id runs here."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
