"""Results: one row per (session, capture, variant, window, device, precision, mode, L2 state).

A results file is Parquet. Its schema metadata says what it is and what every column means, so a
file explains itself years later. Files are replaced whole or not at all: a crash or a full disk
leaves the previous file as it was.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from pwbench import __version__
from pwbench.columns import COLUMNS, Column
from pwbench.errors import InputError, MeasurementError
from pwbench.files import parse_json, replacing

SCHEMA_NAME = "pwbench.results"
SCHEMA_MAJOR, SCHEMA_MINOR = 1, 0
_METADATA_KEY = b"pwbench"

__all__ = [
    "CHOICES",
    "COLUMNS",
    "CONFIG",
    "INPUTS",
    "STAGES",
    "Column",
    "Row",
    "append",
    "check_writable",
    "describe",
    "load",
    "load_rows",
    "rows_in_order",
    "schema",
    "stored",
    "write",
]

Row = dict[str, Any]
"""One result, keyed by the names in `COLUMNS`; a key that is absent is null."""


STAGES = ("search", "metadata", "attention", "reduction")
"""Stages whose medians have a ``<stage>_us`` column, in the order they run."""

CONFIG = ("device", "gpu", "precision", "mode", "l2")
"""Columns that must agree before two times may be compared (a baseline's precision excepted)."""

INPUTS = ("tables_sha256", "tensors", "generator")
"""Columns that say on which values a capture was run: with others its times may differ."""

CHOICES: dict[str, tuple[str, ...]] = {
    "kind": ("full", "tables"),
    "tensors": ("stored", "seeded"),
    "device": ("cpu", "cuda"),
    "precision": ("fast", "accurate"),
    "mode": ("graph", "eager"),
    "l2": ("cold", "warm"),
    "status": ("ok", "unavailable", "failed"),
}
"""Columns that hold one of a few words."""

_REQUIRED = ("session", "suite", "capture", "variant", "device", "precision", "mode", "l2", "status")
_JUDGED = [*_REQUIRED, *(n for n in CHOICES if n not in _REQUIRED), "reason", "complete_us", "samples"]
_ARROW = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "list<float64>": pa.list_(pa.float64()),
    "map<list<float64>>": pa.map_(pa.string(), pa.list_(pa.float64())),
}
_PANDAS = {"string": "object", "int64": "Int64", "float64": "float64"}


def schema(provenance: Mapping[str, Any] | None = None) -> pa.Schema:
    """The Arrow schema of a results file, with its own description in the metadata."""
    about = {
        "name": SCHEMA_NAME,
        "major": SCHEMA_MAJOR,
        "minor": SCHEMA_MINOR,
        "pwbench": __version__,
        "columns": [column._asdict() for column in COLUMNS],
        "provenance": dict(provenance or {}),
    }
    fields = [pa.field(column.name, _ARROW[column.dtype]) for column in COLUMNS]
    return pa.schema(fields, metadata={_METADATA_KEY: json.dumps(about).encode()})


# Writing ------------------------------------------------------------------------------------


def write(path: str | Path, rows: Iterable[Row], provenance: Mapping[str, Any] | None = None) -> None:
    """Write ``rows`` to ``path``, replacing the file whole.

    Args:
        path: the Parquet file; its folder is made if need be.
        rows: dicts keyed by `COLUMNS`; absent keys become null.
        provenance: facts about the run for the file's metadata (machine, command, versions).

    Raises:
        InputError: a row has an unknown key, lacks a required one or contradicts itself.
        MeasurementError: the file could not be written; an existing one is unchanged.
    """
    checked = [_checked(row) for row in rows]
    about = {"written_utc": datetime.now(UTC).isoformat(timespec="seconds"), **(provenance or {})}
    _replace(Path(path), _table(checked, about))


def append(path: str | Path, rows: Iterable[Row], provenance: Mapping[str, Any] | None = None) -> None:
    """Add ``rows`` to the file at ``path`` (made if absent), replacing it whole.

    Two processes may append to one file at a time; each waits for the other. Raises as `write`,
    and `InputError` when the existing file is not a results file.
    """
    path = Path(path)
    with FileLock(_lock_path(path)):
        if not path.exists():
            write(path, rows, provenance)
            return
        old, about = _read(path)
        new = _table([_checked(row) for row in rows], {**about.get("provenance", {}), **(provenance or {})})
        merged = pa.concat_tables([new.slice(0, 0), old, new], promote_options="default")
        _replace(path, merged)


def check_writable(path: str | Path) -> None:
    """Find out before hours of measuring whether their rows can be stored at ``path``.

    Raises:
        MeasurementError: they cannot.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise MeasurementError(
            f"Nothing can be written beside {path}: {error.strerror or error}. Nothing was measured; name "
            "another file."
        ) from None


def _lock_path(path: Path) -> str:
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    return str(Path(tempfile.gettempdir()) / f"pwbench-results-{digest}.lock")


def _table(rows: Sequence[Row], provenance: Mapping[str, Any]) -> pa.Table:
    try:
        return pa.Table.from_pylist(
            [{**row, "stage_samples": _map_items(row.get("stage_samples"))} for row in rows],
            schema=schema(provenance),
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InputError(f"A result row does not fit its columns: {error}.") from error


def _map_items(samples: Mapping[str, Sequence[float]] | None) -> list[tuple[str, list[float]]] | None:
    return None if samples is None else [(name, list(values)) for name, values in samples.items()]


def _replace(path: Path, table: pa.Table) -> None:
    try:
        with replacing(path) as file:
            pq.write_table(table, file, compression="zstd")
    except OSError as error:
        raise MeasurementError(
            f"Could not write {path}: {error.strerror or error}; what was there before is unchanged. "
            "Make room or name another file, then run the same command again."
        ) from error


def _checked(row: Row) -> Row:
    known = {column.name for column in COLUMNS}
    label = f"The result row of {row.get('variant')!r} on {row.get('capture')!r}"
    unknown = sorted(set(row) - known)
    if unknown:
        raise InputError(
            f"{label} has the unknown column {unknown[0]!r}; docs/columns.md lists the known ones."
        )
    complaint = _complaint(row)
    if complaint:
        raise InputError(f"{label} {complaint}")
    return row


def _complaint(row: Row) -> str | None:
    """How a row contradicts the format or itself, or None."""
    for name in _REQUIRED:
        if not row.get(name):
            return f"lacks {name}, expected a value."
    for name, allowed in CHOICES.items():
        value = row.get(name)
        if value is not None and value not in allowed:
            return f"has {name} {value!r}, expected {' or '.join(allowed)}."
    if row["status"] != "ok":
        return None if row.get("reason") else f"is {row['status']} without a reason, expected one."
    if row.get("complete_us") is None or not 0 < row["complete_us"] < math.inf:
        return f"is ok with complete_us {row.get('complete_us')}, expected a positive time."
    values = row.get("complete_samples")
    if values is not None and len(values) != row.get("samples"):
        return f"holds {len(values)} samples but says {row.get('samples')}."
    return None


# Reading ------------------------------------------------------------------------------------


def load(paths: str | Path | Sequence[str | Path] = "results") -> pd.DataFrame:
    """Results files as one tidy DataFrame, one row per result.

    Args:
        paths: files, or folders whose ``*.parquet`` files (at any depth) are read.

    Returns:
        The columns of `COLUMNS` in order (then any that a newer minor version added), and ``file``,
        the path a row was read from. Integers are nullable ``Int64``; ``stage_samples`` holds dicts.

    Raises:
        InputError: nothing is there, or a file is foreign, truncated, or of an unknown major version.
    """
    frames = [_frame(path) for path in _files(paths)]
    return pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]


def stored(folder: str | Path = "results") -> pd.DataFrame | None:
    """The results under ``folder``, None when nothing has been measured yet. Raises as `load`."""
    return load(folder) if any(_parquet_below(Path(folder))) else None


def load_rows(path: str | Path) -> list[Row]:
    """The rows of one results file as plain dicts, as they were given to `write`."""
    table, _ = _read(Path(path))
    rows: list[Row] = table.to_pylist()
    for row in rows:
        row["stage_samples"] = None if row["stage_samples"] is None else dict(row["stage_samples"])
    return rows


def rows_in_order(frame: pd.DataFrame) -> list[Row]:
    """The rows of a frame that `load` made as plain dicts, oldest first, nulls as None."""
    clean = frame.astype(object).where(frame.notna(), None)
    rows: list[Row] = clean.to_dict("records")  # type: ignore[assignment]
    return sorted(rows, key=lambda row: row["created_utc"] or "")


def describe(path: str | Path) -> dict[str, Any]:
    """What a results file says about itself: name, versions, columns and provenance."""
    return _read(Path(path))[1]


def _files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    named = [paths] if isinstance(paths, str | Path) else list(paths)
    found: list[Path] = []
    for path in map(Path, named):
        if path.is_dir():
            found += _parquet_below(path)
        elif path.exists():
            found.append(path)
        else:
            wanted = path if path.suffix == ".parquet" else path / "mine.parquet"
            raise InputError(
                f"There are no results at {path}; `pwbench replay --out {wanted}` would make some."
            )
    if not found:
        where = ", ".join(map(str, named)) or "the paths given"
        raise InputError(f"No results file (*.parquet) lies under {where}; `pwbench replay` makes one.")
    return list(dict.fromkeys(found))


def _parquet_below(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*.parquet") if not p.name.startswith("."))


def _frame(path: Path) -> pd.DataFrame:
    table, _ = _read(path)
    frame = table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    frame["stage_samples"] = [None if value is None else dict(value) for value in frame["stage_samples"]]
    for column in COLUMNS:
        if column.dtype in _PANDAS:
            frame[column.name] = frame[column.name].astype(_PANDAS[column.dtype])
    return frame.assign(file=str(path))


def _read(path: Path) -> tuple[pa.Table, dict[str, Any]]:
    try:
        with path.open("rb") as file:
            # NOTE: A reading thread of Arrow that is still there when the interpreter ends aborts it.
            table = pq.read_table(file, use_threads=False, pre_buffer=False)
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{path} is not a readable Parquet file ({reason.rstrip('.')}); it may be truncated or something "
            "else: restore it or leave it out."
        ) from error
    about = _about(path, table.schema.metadata or {})
    conforming = _conform(path, table)
    # A row may come from another tool's hands, or from a newer minor version with words we do not know.
    for number, row in enumerate(conforming.select(_JUDGED).to_pylist()):
        complaint = _complaint(row)
        if complaint:
            raise InputError(
                f"{path}, row {number} ({row['variant']} on {row['capture']}) {complaint} The file was "
                "edited or written by something else: restore it or leave it out."
            )
    return conforming, about


def _about(path: Path, metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    try:
        about = parse_json(metadata[_METADATA_KEY])
        name, major = about["name"], about["major"]
    except (KeyError, TypeError, ValueError):
        name, major, about = None, None, {}
    if name != SCHEMA_NAME:
        raise InputError(
            f"{path} is a Parquet file but not one of pwbench's results (its metadata does not say so)."
        )
    if major != SCHEMA_MAJOR:
        raise InputError(
            f"{path} has results format {major}.{about.get('minor')}, this pwbench reads {SCHEMA_MAJOR}.x: "
            "use the version that wrote it, or replay again."
        )
    provenance = about.get("provenance")
    return {**about, "provenance": provenance if isinstance(provenance, dict) else {}}


def _conform(path: Path, table: pa.Table) -> pa.Table:
    """The table with every known column in order; one that an older minor version lacks is null."""
    expected = schema()
    twice = [name for name, times in Counter(table.column_names).items() if times > 1]
    if twice:
        raise InputError(f"{path} has column {twice[0]} more than once, expected once: restore it.")
    arrays, fields = [], []
    for field in expected:
        if field.name in table.column_names:
            column = table.column(field.name)
            if column.type != field.type and not pa.types.is_null(column.type):
                raise InputError(f"{path} has column {field.name} as {column.type}, expected {field.type}.")
            arrays.append(column.cast(field.type) if column.type != field.type else column)
        else:
            arrays.append(pa.nulls(table.num_rows, field.type))
        fields.append(field)
    for field in table.schema:
        if field.name not in expected.names:
            arrays.append(table.column(field.name))
            fields.append(field)
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=table.schema.metadata))
