"""Reading captures: nothing in the directory is trusted until it has been checked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pwbench.capture import seeded
from pwbench.capture.format import KINDS, MANIFEST, SCHEMA_MAJOR, SCHEMA_NAME, TENSORS, Tables
from pwbench.errors import CaptureError, OperatorError
from pwbench.files import parse_json
from pwbench.operator import PAGE, SparsePrefillCall

CAPTURES = "captures"
"""Where commands look when no capture is named, below the working directory."""


class Capture:
    """A capture on disk. Make one with `load`.

    Attributes:
        path: its directory.
        name: the directory's name.
        suite: the parent directory's name.
        manifest: the manifest as stored, unknown entries included.
        kind: ``full`` or ``tables``.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.name = path.resolve().name
        self.suite = path.resolve().parent.name
        self.manifest = manifest
        self.kind: str = manifest["kind"]

    def __repr__(self) -> str:
        return f"Capture({str(self.path)!r}, kind={self.kind!r})"

    @property
    def synthetic(self) -> bool:
        """Whether the selections were invented; reports keep such captures out of every geomean."""
        return self.manifest.get("synthetic") is not None

    @property
    def generator(self) -> str:
        """Name of what makes its seeded tensors."""
        return str(self.manifest["tensors"].get("generator", seeded.GENERATOR))

    @property
    def replayable(self) -> bool:
        """Whether this version knows that generator."""
        return self.generator == seeded.GENERATOR

    @property
    def tables_sha256(self) -> str:
        """Hash over selections and geometry, as stored in the manifest; `verify` recomputes it."""
        return str(self.manifest["tables_sha256"])

    @cached_property
    def tables(self) -> Tables:
        """Selections and geometry.

        Raises:
            CaptureError: the tables are not those that the manifest names.
        """
        tables = Tables.read(self.path)
        seen = tables.sha256()
        if seen != self.tables_sha256:
            raise CaptureError(
                f"{self.path}: the tables hash to {seen[:12]}, the manifest says {self.tables_sha256[:12]}; "
                "the capture was edited."
            )
        return tables

    def call(self, device: str | torch.device = "cpu", tensors: str = "auto") -> SparsePrefillCall:
        """The recorded call.

        Args:
            device: where its tensors go.
            tensors: ``stored`` reads q and kv from the capture, ``seeded`` makes them from the
                manifest's seed (0 in a ``full`` capture), ``auto`` is stored where there are any.

        Raises:
            CaptureError: stored tensors asked of a ``tables`` capture, or they do not fit the tables.
        """
        if tensors not in ("auto", "stored", "seeded"):
            raise CaptureError(f"tensors is {tensors!r}, expected auto, stored or seeded.")
        if tensors == "stored" and self.kind != "full":
            raise CaptureError(
                f"{self.path} is a {self.kind} capture: it stores no tensors. Use seeded tensors, or make a "
                "full capture with `pwbench capture ... --kind full`."
            )
        use_stored = self.kind == "full" and tensors != "seeded"
        quant = self.manifest["quant"]
        q, kv = self._stored_tensors() if use_stored else self._seeded_tensors()
        try:
            call = self.tables.call(
                q,
                kv,
                softmax_scale=float(self.manifest["softmax_scale"]),
                k_scale=float(quant["k_scale"]) if use_stored else 1.0,
                v_scale=float(quant["v_scale"]) if use_stored else 1.0,
            )
        except OperatorError as error:
            raise CaptureError(f"{self.path} does not hold a valid call: {error}") from None
        return call.to(device)

    def out_model(self) -> torch.Tensor | None:
        """What the model itself computed, ``[total_q, Hq, D]`` bfloat16, where it was stored."""
        if self.kind != "full":
            return None
        return read_tensors(self.path / TENSORS, ("out_model",)).get("out_model")

    def _stored_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        found = read_tensors(self.path / TENSORS, ("q", "kv"))
        for name in ("q", "kv"):
            if name not in found:
                raise CaptureError(f"{self.path / TENSORS} holds no tensor {name}.")
        return found["q"], found["kv"]

    def _seeded_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        declared = self.manifest["tensors"]
        if not self.replayable:
            raise CaptureError(
                f"{self.path}: seeded tensors come from generator {self.generator!r}, this version "
                f"has {seeded.GENERATOR!r}; record the capture again, or use the pwbench that wrote it."
            )
        tables, seed = self.tables, int(declared.get("seed", 0))
        late = float(declared.get("late_maxima", seeded.LATE_MAXIMA))
        logical = seeded.logical_pages(tables.page_table, max(tables.cache_pages, 1))
        q = seeded.queries(seed, tables.positions, tables.kv_heads, late)
        return q, _without_tails(seeded.cache(seed, logical, tables.kv_heads), tables)


def load(path: str | Path) -> Capture:
    """Open a capture.

    Raises:
        CaptureError: there is none, or its manifest is damaged, incomplete, foreign or too new.
    """
    path = Path(path)
    manifest_path = path / MANIFEST
    if not manifest_path.is_file():
        hint = "" if path.is_dir() else " (no such directory)"
        raise CaptureError(f"{path} is not a capture: it holds no {MANIFEST}{hint}.")
    try:
        manifest = parse_json(manifest_path.read_bytes())
    except (OSError, ValueError) as error:
        raise CaptureError(f"{manifest_path} is not JSON: {error}.") from None
    _check_manifest(path, manifest)
    return Capture(path, manifest)


def discover(paths: Sequence[str | Path] = ()) -> list[Path]:
    """Directories of captures at or below ``paths``, sorted, each once; none named = below `CAPTURES`.

    Directories whose names begin with a dot are never looked into: they are unfinished captures.

    Raises:
        CaptureError: a path holds no capture.
    """
    found: dict[Path, Path] = {}
    for root in [Path(p) for p in paths] or [Path(CAPTURES)]:
        here = list(_below(root, set()))
        if not here:
            reason = "no capture in or below it" if root.is_dir() else (
                "a file, not a directory" if root.exists() else "no such directory"
            )  # fmt: skip
            raise CaptureError(f"{root}: {reason}; a capture is a directory with a {MANIFEST}.")
        for path in here:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _below(root: Path, seen: set[Path]) -> Sequence[Path]:
    if (root / MANIFEST).is_file():
        return [root]
    place = root.resolve()
    # NOTE: a link back up would lead round for ever.
    if not root.is_dir() or place in seen:
        return []
    seen.add(place)
    children = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    return [capture for child in children for capture in _below(child, seen)]


def read_tensors(path: Path, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file, those named or all; absent names are left out.

    Raises:
        CaptureError: the file is missing, truncated or not safetensors.
    """
    # FP8 and BF16 have no NumPy type, so they must be read through torch.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as stream:
            keys = set(stream.keys())
            return {name: stream.get_tensor(name) for name in (names or sorted(keys)) if name in keys}
    except (OSError, SafetensorError) as error:
        raise CaptureError(f"{path} cannot be read as safetensors: {error}.") from None


def _check_manifest(path: Path, manifest: Any) -> None:
    where = path / MANIFEST
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if not isinstance(schema, dict) or schema.get("name") != SCHEMA_NAME:
        raise CaptureError(
            f"{where} does not say that it is a {SCHEMA_NAME}; the directory belongs to something else."
        )
    if schema.get("major") != SCHEMA_MAJOR:
        raise CaptureError(
            f"{where} has format version {schema.get('major')}.{schema.get('minor')}, this pwbench reads "
            f"{SCHEMA_MAJOR}.x; use a pwbench that matches."
        )
    if manifest.get("complete") is not True:
        raise CaptureError(f"{where} does not say complete: true; the capture was not finished.")
    if manifest.get("kind") not in KINDS:
        raise CaptureError(f"{where}: kind is {manifest.get('kind')!r}, expected one of {', '.join(KINDS)}.")
    shapes = {"geometry": dict, "quant": dict, "tensors": dict, "files": list, "tables_sha256": str}
    for key, kind in shapes.items():
        if not isinstance(manifest.get(key), kind):
            raise CaptureError(f"{where}: {key} is {manifest.get(key)!r}, expected a JSON {kind.__name__}.")
    numbers = {
        "softmax_scale": manifest.get("softmax_scale"),
        "quant.k_scale": manifest["quant"].get("k_scale"),
        "quant.v_scale": manifest["quant"].get("v_scale"),
        "tensors.late_maxima": manifest["tensors"].get("late_maxima", seeded.LATE_MAXIMA),
    }
    for key, value in numbers.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not _fits_a_float(value):
            raise CaptureError(f"{where}: {key} is {_short(value)}, expected a number.")
    for key in _GEOMETRY:
        if not _is_count(manifest["geometry"].get(key)):
            seen = _short(manifest["geometry"].get(key))
            raise CaptureError(f"{where}: geometry.{key} is {seen}, expected a whole number.")
    if not _is_count(manifest["tensors"].get("seed", 0)):
        seen = _short(manifest["tensors"]["seed"])
        raise CaptureError(f"{where}: tensors.seed is {seen}, expected a whole number.")
    for key in _FACTS:
        if not isinstance(manifest.get(key), dict | None):
            raise CaptureError(f"{where}: {key} is {_short(manifest[key])}, expected a JSON object or null.")


_GEOMETRY = ("q_heads", "kv_heads", "requests", "total_q", "context", "cache_pages")
_FACTS = ("source", "model", "synthetic", "env", "stats")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _fits_a_float(value: int | float) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _without_tails(kv: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Zero the bytes past each request's last token, as stored captures have them."""
    for request, length in enumerate(tables.seq_lens.tolist()):
        valid = length % PAGE
        if valid:
            last = int(tables.page_table[request, length // PAGE])
            shared = (tables.page_table == last).sum() > 1
            if not shared:
                kv.view(torch.uint8)[last, :, valid:] = 0
    return kv
