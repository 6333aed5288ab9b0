"""Writing a capture: all of it or nothing, whatever interrupts.

Files go to ``.<name>.partial-<pid>`` beside the destination, each is synced, the manifest is written
last, and one rename makes the capture appear. A partial directory whose process is gone is removed by
the next writer in the same place.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pwbench.capture import seeded
from pwbench.capture.format import (
    KINDS,
    MANIFEST,
    SCHEMA_MAJOR,
    SCHEMA_MINOR,
    SCHEMA_NAME,
    TENSORS,
    Tables,
)
from pwbench.capture.logits import late_maxima
from pwbench.capture.provenance import environment, utc_now
from pwbench.capture.statistics import union_sizes
from pwbench.errors import CaptureError
from pwbench.files import alive
from pwbench.operator import PAGE, SparsePrefillCall

_PARTIAL = re.compile(r"^\..+\.(?:partial|old)-(\d+)$")


def write(
    directory: str | Path,
    call: SparsePrefillCall,
    *,
    kind: str = "full",
    out_model: torch.Tensor | None = None,
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``call`` as a capture.

    Args:
        directory: the capture's directory; its name is the capture's, its parent's the suite's.
        call: the inputs. Selections are stored as supports: invalid, future and repeated ids go.
        kind: ``full`` stores q, kv and ``out_model``; ``tables`` stores selections and geometry, and
            replay makes the tensors from ``seed``.
        out_model: what the model computed, ``[total_q, Hq, D]``; stored in ``full`` captures.
        seed: for seeded tensors, which get as many late maxima as the call has (`pwbench.capture.logits`).
        facts: further manifest entries (source, model, prompt, layer, chunk, selector, env, ...).
        overwrite: replace a capture that is already there.

    Returns:
        the directory.

    Raises:
        CaptureError: the destination exists, or is no capture and so is not overwritten.
        OperatorError: the call breaks the operator's contract.
    """
    if kind not in KINDS:
        raise CaptureError(f"Kind of a capture is {kind!r}, expected one of {', '.join(KINDS)}.")
    call = call.validate().to("cpu")
    tables = Tables.of_call(call)
    if tables.total_q == 0:
        raise CaptureError("The call has no query, expected at least one; nothing was written.")
    if kind == "full" and not _is_utf8(Path(directory)):
        raise CaptureError(
            f"The path {os.fsencode(Path(directory).resolve())!r} is no UTF-8, which safetensors asks for; "
            "choose another --out or keep tables only (--kind tables)."
        )
    manifest = _manifest(tables, call, kind, seed, dict(facts or {}))
    with _whole_directory(Path(directory), overwrite) as partial:
        tables.write(partial)
        if kind == "full":
            write_tensors(partial / TENSORS, call, out_model)
        manifest["files"] = [_file_entry(path) for path in sorted(partial.iterdir())]
        text = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False)
        (partial / MANIFEST).write_text(text + "\n", encoding="utf-8")
    return Path(directory)


def _is_utf8(path: Path) -> bool:
    try:
        str(path.resolve()).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def write_tensors(path: Path, call: SparsePrefillCall, out_model: torch.Tensor | None) -> None:
    """Write q, kv (interleaved), scales and ``out_model`` as one safetensors file."""
    from safetensors.torch import save_file

    kv = call.kv if isinstance(call.kv, torch.Tensor) else _interleaved(*call.kv)
    tensors = {
        "q": call.q.contiguous(),
        "kv": _zero_tails(kv, call),
        "k_scale": torch.tensor([call.k_scale], dtype=torch.float32),
        "v_scale": torch.tensor([call.v_scale], dtype=torch.float32),
    }
    if out_model is not None:
        if out_model.shape != call.q.shape:
            raise CaptureError(f"out_model is {list(out_model.shape)}, expected {list(call.q.shape)} as q.")
        tensors["out_model"] = out_model.to(torch.bfloat16).contiguous()
    save_file(tensors, path)


def clean_stale_partials(parent: Path) -> list[Path]:
    """Remove what writers left in ``parent`` whose processes no longer run; returns what went."""
    removed = []
    for entry in parent.iterdir() if parent.is_dir() else ():
        match = _PARTIAL.match(entry.name)
        if match and entry.is_dir() and not alive(int(match[1])):
            shutil.rmtree(entry, ignore_errors=True)
            removed.append(entry)
    return removed


@contextmanager
def _whole_directory(final: Path, overwrite: bool) -> Iterator[Path]:
    """Yield an empty directory that becomes ``final`` when the block ends well, or vanishes."""
    if final.exists():
        if not overwrite:
            raise CaptureError(f"{final} already exists; choose another --out or remove it first.")
        if not (final / MANIFEST).is_file():
            raise CaptureError(f"{final} exists and holds no {MANIFEST}, so it is not overwritten.")
    parent = final.resolve().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise CaptureError(f"{parent} is or lies in a file, expected a directory for {final.name}.") from None
    clean_stale_partials(parent)
    partial = parent / f".{final.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for path in partial.iterdir():
            _sync(path)
        _sync(partial)
        _replace(partial, parent / final.name, overwrite)
        _sync(parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _replace(partial: Path, final: Path, overwrite: bool) -> None:
    if not final.exists() or not overwrite:
        try:
            os.replace(partial, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise CaptureError(
                f"{final} was made by another process meanwhile and stays; choose another --out."
            ) from None
        return
    # A directory cannot be renamed over a full one: move the old one aside first.
    old = final.parent / f".{final.name}.old-{os.getpid()}"
    os.replace(final, old)
    try:
        os.replace(partial, final)
    except BaseException:
        os.replace(old, final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest(
    tables: Tables, call: SparsePrefillCall, kind: str, seed: int, facts: dict[str, Any]
) -> dict[str, Any]:
    unions = {str(group): float(np.mean(union_sizes(tables, group))) for group in (2, 4, 8, 16, 32)}
    selected = int(tables.counts.sum())
    manifest: dict[str, Any] = {
        "source": {"engine": "unknown"},
        "model": None,
        "prompt": None,
        "layer": None,
        "tp": {"rank": 0, "size": 1},
        "chunk": None,
        "selector": None,
        "synthetic": None,
        "env": environment(),
        **facts,
    }
    late = None if manifest["synthetic"] else late_maxima(call)  # values invented by the same generator
    quant: dict[str, Any] = {
        "kv_dtype": "float8_e4m3fn",
        "convention": "stored = value / scale",
        "who": "unknown",
    }
    quant |= manifest.get("quant") or {}
    quant |= {"k_scale": call.k_scale, "v_scale": call.v_scale}
    manifest |= {
        "schema": {"name": SCHEMA_NAME, "major": SCHEMA_MAJOR, "minor": SCHEMA_MINOR},
        "complete": True,
        "created_utc": utc_now(),
        "kind": kind,
        "geometry": tables.geometry() | ({"cache_pages": call.k.shape[0]} if kind == "full" else {}),
        "quant": quant,
        "softmax_scale": call.softmax_scale,
        "positions": "right-aligned" if tables.right_aligned else "stored",
        "tables_sha256": tables.sha256(),
        "tensors": {"stored": kind == "full", **seeded.declaration(seed, late)},
        "stats": {
            "selected_pages": selected,
            "selected_mean": selected / tables.counts.size,
            "union_mean": unions,
        },
    }
    return manifest


def _file_entry(path: Path) -> dict[str, Any]:
    return {"path": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _interleaved(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([k.view(torch.uint8), v.view(torch.uint8)], dim=-1).view(torch.float8_e4m3fn)


def _zero_tails(kv: torch.Tensor, call: SparsePrefillCall) -> torch.Tensor:
    """A copy of the cache without the garbage past each request's last token and in unused pages.

    A page that several requests share keeps as many tokens as its longest owner uses.
    """
    valid = np.zeros(kv.shape[0], dtype=np.int64)
    for length, row in zip(call.seq_lens.tolist(), call.page_table.numpy(), strict=True):
        needed = -(-length // PAGE)
        tokens = np.minimum(PAGE, length - np.arange(needed) * PAGE)
        np.maximum.at(valid, row[:needed], tokens)
    keep = torch.from_numpy(np.arange(PAGE)[None, :] < valid[:, None])
    stored = kv.contiguous().view(torch.uint8) * keep[:, None, :, None]
    return stored.view(torch.float8_e4m3fn)
