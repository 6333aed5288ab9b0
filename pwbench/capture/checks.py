"""`verify`: prove every rule of the capture format on one capture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pwbench.capture.format import MANIFEST, QUERIES, REQUESTS, TENSORS, Tables, read_table
from pwbench.capture.reader import Capture, load, read_tensors
from pwbench.capture.writer import file_sha256
from pwbench.errors import CaptureError, OperatorError
from pwbench.operator import GROUP_HEADS, HEAD_DIM, INVALID, PAGE, TOPK

OUT_MODEL_ROWS = 64
OUT_MODEL_REL_L2 = 0.10
"""The model attended to unquantised keys and values. On a trained model FP8 costs about 0.05; a wrong
scale, page or position costs more than 0.5."""


@dataclass(frozen=True)
class Check:
    """One rule and how the capture fares.

    Attributes:
        name: the rule.
        ok: whether it holds.
        seen: what the capture has.
        expected: what the rule asks for.
    """

    name: str
    ok: bool
    seen: str
    expected: str


def verify(path: str | Path) -> list[Check]:
    """Check everything that can be checked without the model; never raises for a bad capture.

    The checks build on each other: after a manifest, file or table that cannot be read at all, the
    list ends with that failure.
    """
    checks: list[Check] = []
    try:
        capture = load(path)
        checks.append(Check("manifest", True, "complete, version known", "complete, version known"))
        for stage in (_files, _tables, _tensors):
            checks.extend(stage(capture))
            if stage is _files and not all(check.ok for check in checks):
                break
    except CaptureError as error:
        checks.append(Check("readable", False, str(error), "a capture that can be read"))
    return checks


def failures(checks: list[Check]) -> str | None:
    """The failed checks as one sentence, or None when all hold."""
    failed = [f"{c.name}: {c.seen}, expected {c.expected}" for c in checks if not c.ok]
    return "; ".join(failed) if failed else None


# Files --------------------------------------------------------------------------------------------


def _files(capture: Capture) -> Iterator[Check]:
    listed: set[str] = set()
    for entry in capture.manifest["files"]:
        name = entry.get("path") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name != Path(name).name or name.startswith("."):
            yield Check("file name", False, repr(name), "a plain file name inside the capture")
            continue
        listed.add(name)
        path = capture.path / name
        if not path.is_file():
            yield Check(f"{name} exists", False, "no such file", "the file the manifest lists")
            continue
        size = path.stat().st_size
        yield _equal(f"{name} size", size, entry.get("bytes"))
        if size == entry.get("bytes"):
            yield _equal(f"{name} SHA-256", file_sha256(path), entry.get("sha256"))
    needed = {QUERIES, REQUESTS} | ({TENSORS} if capture.kind == "full" else set())
    missing = sorted(needed - listed)
    yield Check(
        "files listed", not missing, f"without {missing}" if missing else "all", "all that the kind needs"
    )
    present = {p.name for p in capture.path.iterdir() if not p.name.startswith(".")}
    foreign = sorted(present - listed - {MANIFEST})
    yield Check("no other file", not foreign, ", ".join(foreign) or "none", "only what the manifest lists")


# Tables -------------------------------------------------------------------------------------------


def _tables(capture: Capture) -> Iterator[Check]:
    tables = Tables.read(capture.path)
    yield _equal("tables hash", tables.sha256(), capture.tables_sha256)
    yield from _geometry(capture.manifest, tables)
    yield from _queries(capture, tables)
    yield from _requests(capture, tables)


def _geometry(manifest: dict[str, Any], tables: Tables) -> Iterator[Check]:
    for name, value in tables.geometry().items():
        seen = manifest["geometry"].get(name)
        # The cache may have pages that no request owns.
        if name == "cache_pages" and manifest["kind"] == "full":
            enough = isinstance(seen, int) and seen >= value
            yield Check("geometry cache_pages", enough, str(seen), f"at least {value}")
        else:
            yield _equal(f"geometry {name}", seen, value)
    for name, value in (
        ("softmax_scale", manifest["softmax_scale"]),
        ("k_scale", manifest["quant"]["k_scale"]),
        ("v_scale", manifest["quant"]["v_scale"]),
    ):
        yield Check(name, math.isfinite(value) and value > 0, str(value), "positive and finite")


def _queries(capture: Capture, tables: Tables) -> Iterator[Check]:
    stored = read_table(capture.path / QUERIES)
    derived = tables.queries_table()
    for column in ("request", "position", "causal_len"):
        # Columns that repeat per KV head or follow from others must say the same everywhere.
        yield _column(f"queries {column}", stored, derived, column)
    lowest = int(tables.positions.min())
    yield Check("positions", lowest >= 0, f"lowest is {lowest}", "at least 0")
    if capture.manifest.get("positions", "right-aligned") != "stored":
        yield Check(
            "positions right-aligned",
            tables.right_aligned,
            "otherwise" if not tables.right_aligned else "yes",
            "yes",
        )
    pages, counts = tables.pages, tables.counts
    used = np.arange(TOPK) < counts[..., None]
    visible = -(-tables.causal_lens.astype(np.int64) // PAGE)
    inside = (pages >= 0) & (pages < visible[None, :, None])
    yield _rows("page ids visible", (inside | ~used).all(axis=-1), "0 to ceil(causal_len / 128) - 1")
    yield _rows("n_sel", (pages != INVALID).sum(axis=-1) == counts, "the number of ids in the row")
    yield _rows("-1 last", ((pages == INVALID) | used).all(axis=-1), "ids first, then -1")
    rising = (pages[..., 1:] > pages[..., :-1]) | ~used[..., 1:]
    yield _rows("page ids ascending", rising.all(axis=-1), "strictly ascending ids")


def _requests(capture: Capture, tables: Tables) -> Iterator[Check]:
    stored = read_table(capture.path / REQUESTS)
    yield _column("requests request", stored, pa.table({"request": np.arange(tables.requests)}), "request")
    q_len = np.diff(tables.cu_seqlens_q)
    yield Check("q_len", bool((q_len >= 0).all()), f"lowest is {q_len.min()}", "at least 0")
    lowest = int(tables.seq_lens.min())
    yield Check("seq_len", lowest >= 0, f"lowest is {lowest}", "at least 0")
    prefix = pa.table({"prefix_len": tables.seq_lens - q_len})
    yield _column("requests prefix_len", stored, prefix, "prefix_len")
    for request, row in enumerate(stored["page_table"].to_pylist()):
        needed = -(-int(tables.seq_lens[request]) // PAGE)
        if len(row) != needed:
            yield Check(
                "page_table length",
                False,
                f"{len(row)} in request {request}",
                f"ceil(seq_len / 128) = {needed}",
            )
        if len(set(row)) != len(row):
            yield Check(
                "page_table unique", False, f"a repeated row in request {request}", "each cache row once"
            )
        if row and min(row) < 0:
            yield Check("page_table rows", False, f"{min(row)} in request {request}", "at least 0")
    yield Check("page tables", True, f"{tables.requests} read", "one per request")


# Tensors ------------------------------------------------------------------------------------------


def _tensors(capture: Capture) -> Iterator[Check]:
    if capture.kind != "full":
        return
    found = read_tensors(capture.path / TENSORS)
    tables, geometry = capture.tables, capture.manifest["geometry"]
    shape_q = [tables.total_q, GROUP_HEADS * tables.kv_heads, HEAD_DIM]
    shape_kv = [geometry.get("cache_pages"), tables.kv_heads, PAGE, 2 * HEAD_DIM]
    wanted = {
        "q": (torch.bfloat16, shape_q),
        "kv": (torch.float8_e4m3fn, shape_kv),
        "out_model": (torch.bfloat16, shape_q),
    }
    fits = True
    for name, (dtype, shape) in wanted.items():
        if name not in found:
            if name != "out_model":
                fits = False
                yield Check(f"tensor {name}", False, "absent", f"{dtype} {shape}")
            continue
        tensor = found[name]
        good = tensor.dtype == dtype and list(tensor.shape) == shape
        fits &= good
        yield Check(f"tensor {name}", good, f"{tensor.dtype} {list(tensor.shape)}", f"{dtype} {shape}")
    for name in ("k_scale", "v_scale"):
        if name in found:
            stored = found[name].flatten().tolist()
            declared = np.float32(capture.manifest["quant"][name])
            yield Check(f"tensor {name}", stored == [declared], str(stored), f"[{declared}] as the manifest")
    if fits:
        yield from _values(capture, found)


def _values(capture: Capture, found: dict[str, torch.Tensor]) -> Iterator[Check]:
    finite = bool(torch.isfinite(found["q"].float()).all())
    yield Check("q finite", finite, "yes" if finite else "NaN or infinity", "yes")
    bad = nan_tokens(found["kv"], capture.tables)
    yield Check("kv without NaN", bad == 0, f"{bad} valid tokens with a NaN byte", "none")
    try:
        call = capture.call(tensors="stored")
    except (CaptureError, OperatorError) as error:
        yield Check("call", False, str(error), "a call that keeps the operator's contract")
        return
    if "out_model" not in found or bad or not finite:
        return
    # Late, because only this one rule needs the oracle.
    from pwbench import reference

    rows = np.unique(np.linspace(0, call.total_q - 1, OUT_MODEL_ROWS).astype(np.int64))
    out = found["out_model"].float()[torch.from_numpy(rows)]
    distance = reference.compare(out, reference.attend(call, rows, dtype=torch.float32)).rel_l2
    yield Check(
        "out_model near the reference",
        bool(distance <= OUT_MODEL_REL_L2),
        f"rel-L2 {distance:.4f} on {len(rows)} rows",
        f"at most {OUT_MODEL_REL_L2}",
    )


def nan_tokens(kv: torch.Tensor, tables: Tables) -> int:
    """Valid tokens, counted per request and KV head, that hold an E4M3 NaN (0x7F or 0xFF)."""
    bad_token = ((kv.view(torch.uint8) & 0x7F) == 0x7F).any(dim=-1).numpy()
    count = 0
    for request, length in enumerate(tables.seq_lens.tolist()):
        needed = -(-length // PAGE)
        rows = tables.page_table[request, :needed]
        rows = rows[(rows >= 0) & (rows < len(bad_token))]
        tokens = np.moveaxis(bad_token[rows], 1, 0).reshape(tables.kv_heads, -1)
        count += int(tokens[:, :length].sum())
    return count


# Helpers ------------------------------------------------------------------------------------------


def _equal(name: str, seen: Any, expected: Any) -> Check:
    return Check(name, seen == expected, str(seen), str(expected))


def _rows(name: str, good: Any, expected: str) -> Check:
    """A rule that holds row by row; ``good`` is ``[Hkv, total_q]``."""
    bad = np.argwhere(~good)
    if not len(bad):
        return Check(name, True, "all rows", expected)
    head, row = bad[0]
    return Check(name, False, f"{len(bad)} rows without, first KV head {head} row {row}", expected)


def _column(name: str, stored: pa.Table, derived: pa.Table, column: str) -> Check:
    values = stored[column].to_numpy(zero_copy_only=False)
    wanted = derived[column].to_numpy()
    if values.dtype == object or len(values) != len(wanted):
        return Check(name, False, f"{len(values)} values of {stored[column].type}", f"{len(wanted)} integers")
    bad = np.flatnonzero(values != wanted)
    if not len(bad):
        return Check(name, True, "as derived", "as derived")
    first = int(bad[0])
    return Check(name, False, f"{values[first]} in row {first}", str(wanted[first]))
