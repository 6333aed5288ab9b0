"""Source: one safetensors file with the operator's inputs, which any engine can dump."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pwbench.capture.checks import nan_tokens
from pwbench.capture.format import Tables
from pwbench.capture.provenance import environment
from pwbench.capture.reader import read_tensors
from pwbench.capture.recorder import Recorder, Recording
from pwbench.capture.writer import file_sha256
from pwbench.errors import CaptureError, InputError
from pwbench.operator import (
    GROUP_HEADS,
    HEAD_DIM,
    INVALID,
    PAGE,
    TOPK,
    SparsePrefillCall,
    right_aligned_positions,
)

MOST_PAGES = 1 << 24
"""Of one cache, 2^31 tokens: more is a mistake in the dump."""

KEYS = {
    "topk": "[Hkv, total_q, up to 16] integers: logical page ids, -1 pads (required)",
    "seq_lens": "[B] integers: valid KV tokens, this chunk included (required)",
    "cu_seqlens_q": "[B + 1] integers (one request when absent)",
    "page_table": "[B, max_pages] integers (required with kv)",
    "positions": "[total_q] integers (right-aligned when absent)",
    "q": "[total_q, Hq, 128] bfloat16",
    "kv": "[n_pages, Hkv, 128, 256] float8_e4m3fn or its bytes as uint8; or `k` and `v`, 128 wide each",
    "out_model": "[total_q, Hq, 128] bfloat16: what the engine computed",
    "softmax_scale": "one float (1/sqrt(128) when absent)",
    "k_scale": "one float (1 when absent)",
    "v_scale": "one float (1 when absent)",
}


def read(
    path: str | Path, softmax_scale: float | None = None, layer: int | None = None
) -> tuple[Recording, str]:
    """Read a dumped call.

    Pages of the cache that no request owns are left out, so a dump of a whole KV pool becomes small.

    Args:
        path: a safetensors file with `KEYS`.
        softmax_scale: overrides the file's.
        layer: the model's layer, where known.

    Returns:
        the recording and the kind it can be stored as, ``full`` when the file has q and kv, else
        ``tables``.

    Raises:
        CaptureError: not a safetensors file.
        InputError: a tensor is missing or is not what `KEYS` says, or the call is a dummy.
    """
    path = Path(path)
    found = read_tensors(path)
    for name in ("topk", "seq_lens"):
        if name not in found:
            raise InputError(f"{path} holds no tensor {name}, expected {KEYS[name]}.")
    cache = _cache(path, found)
    if ("q" in found) != (cache is not None):
        raise InputError(
            f"{path} holds {'q without kv' if cache is None else 'kv without q'}; expected both for a full "
            "capture, or neither for a tables capture."
        )
    topk = _padded_topk(path, _ints(path, found, "topk", 3))
    seq_lens = _ints(path, found, "seq_lens", 1)
    heads, total_q = topk.shape[0], topk.shape[1]
    bounds = torch.tensor([0, total_q], dtype=torch.int32)
    if "cu_seqlens_q" in found:
        bounds = _ints(path, found, "cu_seqlens_q", 1)
    positions = _positions(path, found, bounds, seq_lens, total_q)
    if cache is None:
        page_table = _ints(path, found, "page_table", 2) if "page_table" in found else _in_order(seq_lens)
        pages = max(int(page_table.max()) + 1 if page_table.numel() else 1, 1)
        if pages > MOST_PAGES:
            raise InputError(
                f"{path}: the cache would need {pages} pages of {PAGE} tokens, expected at most {MOST_PAGES}."
            )
        q = torch.zeros(total_q, GROUP_HEADS * heads, HEAD_DIM, dtype=torch.bfloat16)
        # One page in memory, however many the tables name: a tables capture stores no values.
        page = torch.zeros(1, heads, PAGE, 2 * HEAD_DIM, dtype=torch.uint8).view(torch.float8_e4m3fn)
        cache = page.expand(pages, -1, -1, -1)
        kind = "tables"
    elif "page_table" not in found:
        raise InputError(f"{path} holds kv but no page_table, expected {KEYS['page_table']}.")
    else:
        q, page_table, kind = found["q"], _ints(path, found, "page_table", 2), "full"
    scale = (
        softmax_scale if softmax_scale is not None else _scalar(path, found, "softmax_scale", HEAD_DIM**-0.5)
    )
    call = SparsePrefillCall(
        q=q,
        kv=cache,
        topk=topk,
        page_table=page_table,
        cu_seqlens_q=bounds,
        seq_lens=seq_lens,
        positions=positions,
        softmax_scale=scale,
        k_scale=_scalar(path, found, "k_scale", 1.0),
        v_scale=_scalar(path, found, "v_scale", 1.0),
    ).validate()
    recorder = Recorder()
    facts = _facts(path, found, call)
    call = _compacted(call)
    if kind == "full":
        _check_values(path, call, found.get("out_model"))
    _check_page_table(path, call)
    if not recorder.record_call(call, layer, found.get("out_model"), **facts):
        raise InputError(
            f"{path} is a dummy call: every row selects page 0 in all {TOPK} places, as engines do when they "
            "profile or capture graphs. It is skipped; dump a later call."
        )
    return recorder.calls[0], kind


def _check_values(path: Path, call: SparsePrefillCall, out_model: torch.Tensor | None) -> None:
    """Refuse what `verify` would refuse in the finished capture."""
    if out_model is not None and (not out_model.is_floating_point() or out_model.shape != call.q.shape):
        raise InputError(
            f"{path}: out_model is {out_model.dtype} {list(out_model.shape)}, expected {KEYS['out_model']}."
        )
    for name, values in (("q", call.q), ("out_model", out_model)):
        if values is not None and not bool(torch.isfinite(values.float()).all()):
            raise InputError(f"{path}: {name} holds NaN or infinity, expected finite values; dump again.")
    assert isinstance(call.kv, torch.Tensor)
    bad = nan_tokens(call.kv, Tables.of_call(call))
    if bad:
        raise InputError(
            f"{path}: {bad} valid tokens of the cache hold a NaN byte (0x7F or 0xFF), expected none; was the "
            "call dumped before its pages were written?"
        )


def _check_page_table(path: Path, call: SparsePrefillCall) -> None:
    for request, row in enumerate(Tables.of_call(call).page_table):
        ids, uses = np.unique(row[row != INVALID], return_counts=True)
        if (uses > 1).any():
            raise InputError(
                f"{path}: page_table names cache page {ids[uses > 1][0]} more than once in request "
                f"{request}, expected each once."
            )


def _facts(path: Path, found: Mapping[str, torch.Tensor], call: SparsePrefillCall) -> dict[str, Any]:
    ids = int((call.topk != INVALID).sum())
    kept = int(Tables.of_call(call).counts.sum())
    return {
        "source": {"engine": "unknown", "hook": "safetensors file"},
        "import": {
            "file": path.name,
            "sha256": file_sha256(path),
            "dropped_ids": ids - kept,
            "ignored_tensors": sorted(set(found) - set(KEYS) - {"k", "v"}),
        },
        "env": environment(),
    }


def _cache(path: Path, found: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The cache as one interleaved FP8 tensor, or None when the file has none."""
    names = ["kv"] if "kv" in found else [name for name in ("k", "v") if name in found]
    if not names:
        return None
    if names in (["k"], ["v"]):
        raise InputError(f"{path} holds {names[0]} without its other half, expected k and v, or kv.")
    parts = []
    for name in names:
        part = found[name]
        if part.dtype not in (torch.float8_e4m3fn, torch.uint8):
            raise InputError(
                f"{path}: {name} is {part.dtype}, expected float8_e4m3fn (or its bytes as uint8); "
                "quantise first, stored = value / scale."
            )
        if part.dim() != 4:
            raise InputError(f"{path}: {name} is {list(part.shape)}, expected {KEYS['kv']}.")
        parts.append(part.view(torch.uint8))
    if len(parts) == 2 and parts[0].shape != parts[1].shape:
        raise InputError(f"{path}: k is {list(parts[0].shape)} but v is {list(parts[1].shape)}.")
    return torch.cat(parts, dim=-1).view(torch.float8_e4m3fn)


def _ints(path: Path, found: Mapping[str, torch.Tensor], name: str, rank: int) -> torch.Tensor:
    tensor = found[name]
    if tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.dim() != rank or not tensor.numel():
        raise InputError(f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {KEYS[name]}.")
    wide = tensor.to(torch.int64)
    if int(wide.max()) >= 1 << 31 or int(wide.min()) < -(1 << 31):
        raise InputError(f"{path}: {name} holds values that 32 bits cannot, expected {KEYS[name]}.")
    return wide.to(torch.int32)


def _padded_topk(path: Path, topk: torch.Tensor) -> torch.Tensor:
    if topk.shape[2] > TOPK:
        raise InputError(f"{path}: topk has {topk.shape[2]} ids a row, expected at most {TOPK}.")
    padded = torch.full((*topk.shape[:2], TOPK), INVALID, dtype=torch.int32)
    padded[..., : topk.shape[2]] = topk
    return padded


def _positions(
    path: Path,
    found: Mapping[str, torch.Tensor],
    bounds: torch.Tensor,
    seq_lens: torch.Tensor,
    total_q: int,
) -> torch.Tensor:
    if "positions" in found:
        return _ints(path, found, "positions", 1)
    edges = bounds.numpy()
    if len(edges) != len(seq_lens) + 1 or edges[0] != 0 or edges[-1] != total_q or (np.diff(edges) < 0).any():
        raise InputError(
            f"{path}: cu_seqlens_q is {edges.tolist()}, expected {len(seq_lens) + 1} boundaries rising from "
            f"0 to {total_q}."
        )
    return torch.from_numpy(right_aligned_positions(edges, seq_lens.numpy()))


def _in_order(seq_lens: torch.Tensor) -> torch.Tensor:
    """A page table that gives every request its own consecutive pages."""
    needed = (-(-seq_lens.to(torch.int64) // PAGE)).clamp(min=0)
    first = torch.cumsum(needed, 0) - needed
    logical = torch.arange(int(needed.max()))
    table = torch.where(logical < needed[:, None], logical + first[:, None], INVALID)
    return table.to(torch.int32)


def _scalar(path: Path, found: Mapping[str, torch.Tensor], name: str, default: float) -> float:
    if name not in found:
        return default
    if found[name].numel() != 1:
        raise InputError(
            f"{path}: {name} has {found[name].numel()} values, expected {KEYS[name]}; scales per head are "
            "not supported."
        )
    if found[name].is_complex():
        raise InputError(f"{path}: {name} is {found[name].dtype}, expected {KEYS[name]}.")
    return float(found[name].flatten()[0])


def _compacted(call: SparsePrefillCall) -> SparsePrefillCall:
    """The same call with only the cache rows that a request owns, in their order."""
    from dataclasses import replace

    tables = Tables.of_call(call)
    owned = np.unique(tables.page_table[tables.page_table >= 0])
    if not len(owned):
        owned = np.zeros(1, dtype=np.int64)
    moved = np.where(tables.page_table >= 0, np.searchsorted(owned, tables.page_table), INVALID)
    kv = call.kv if isinstance(call.kv, torch.Tensor) else call.kv[0]
    if len(owned) == kv.shape[0]:
        return call
    rows = kv.view(torch.uint8)[torch.from_numpy(owned.astype(np.int64))].view(torch.float8_e4m3fn)
    return replace(call, kv=rows, page_table=torch.from_numpy(moved.astype(np.int32)))


def save(path: str | Path, call: SparsePrefillCall, out_model: torch.Tensor | None = None) -> None:
    """Write a call as such a file, from an engine's own process.

    Example:
        >>> tensors_file.save("call.safetensors", call)  # then: pwbench capture tensors call.safetensors
    """
    from safetensors.torch import save_file

    kv = call.kv if isinstance(call.kv, torch.Tensor) else None
    parts = {"kv": kv} if kv is not None else {"k": call.k, "v": call.v}
    tensors = {
        name: getattr(call, name)
        for name in ("q", "topk", "page_table", "cu_seqlens_q", "seq_lens", "positions")
    } | parts
    if out_model is not None:
        tensors["out_model"] = out_model
    for name in ("softmax_scale", "k_scale", "v_scale"):
        tensors[name] = torch.tensor([getattr(call, name)], dtype=torch.float64)
    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)
    except OSError as error:
        raise CaptureError(f"{path} cannot be written: {error}.") from None
