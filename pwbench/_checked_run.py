"""The run before the timing: is the output right, is every row of it written, what does it cost?"""

from __future__ import annotations

import errno
import os
import re
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pwbench import capture as captures_
from pwbench.columns import COLUMNS
from pwbench.counters import PAGE_BYTES, count
from pwbench.errors import MeasurementError, PwbenchError, VariantUnavailable
from pwbench.grouping import identity_order
from pwbench.operator import SparsePrefillCall, request_of_rows, supports
from pwbench.plan import Settings, output_path
from pwbench.reference import Accuracy, attend, compare
from pwbench.results import Row
from pwbench.timing import one_line
from pwbench.variants import Options, Prepared, Variant

LIMITS = {"fast": 0.08, "accurate": 6e-3}
"""rel-L2 above which an output is wrong rather than rounded: 8-bit Q and P reach 0.06 at worst,
accurate kernels and FlashInfer 4.2e-3 on tensors of a trained model."""


@dataclass
class Subject:
    """One capture, ready to be run: the call on the device and the truth about some of its rows.

    Attributes:
        capture: where it came from.
        call: on the device that runs.
        tensors: ``stored`` or ``seeded``.
        rows: query rows that are compared, ascending, ``[n]``.
        outputs: folder that the output is saved in, or None.
    """

    capture: captures_.Capture
    call: SparsePrefillCall
    tensors: str
    rows: np.ndarray
    outputs: Path | None = None
    _counted: dict[tuple[int, bytes], dict[str, int]] = field(default_factory=dict)

    @classmethod
    def load(cls, loaded: captures_.Capture, settings: Settings, outputs: Path | None = None) -> Subject:
        """Read the capture's call onto the device."""
        stored = loaded.kind == "full" and settings.tensors != "seeded"
        call = loaded.call(device=settings.device, tensors=settings.tensors).validate()
        rows = sample_rows(call, settings.check_rows, settings.seed)
        return cls(loaded, call, "stored" if stored else "seeded", rows, outputs)

    @cached_property
    def expected(self) -> torch.Tensor:
        """The reference of ``rows``, ``[n, Hq, D]`` float64."""
        return attend(self.call, self.rows)

    @cached_property
    def supports(self) -> np.ndarray:
        return supports(self.call)[0]

    @cached_property
    def fp8_cache_rel_l2(self) -> float | None:
        """What storing the cache in FP8 costs: the reference against the model's own output."""
        if self.tensors != "stored":
            return None
        model = self.capture.out_model()
        if model is None:
            return None
        index = torch.from_numpy(self.rows)
        return compare(self.expected.cpu(), model[index].double()).rel_l2

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of the distinct cache pages that any row selected."""
        table = self.call.page_table.cpu().numpy()
        request = request_of_rows(self.call.cu_seqlens_q.cpu().numpy())
        distinct = 0
        for selected in self.supports:
            row, slot = np.nonzero(selected >= 0)
            distinct += len(np.unique(table[request[row], selected[row, slot]]))
        return distinct * PAGE_BYTES

    def counters(self, order: np.ndarray, group: int) -> dict[str, int]:
        """Counters of an execution order; variants that share one are counted once."""
        key = (group, order.tobytes() if group > 1 else b"")
        if key not in self._counted:
            self._counted[key] = count(self.call, self.supports, order, group)
        return self._counted[key]


@dataclass
class Checked:
    """What the checked run found.

    Attributes:
        status: ``ok``, ``unavailable`` or ``failed``.
        reason: why not ok.
        prepared: to be timed; None unless ok.
        facts: columns known so far: accuracy, counters, prepare_ms, peer.
    """

    status: str
    reason: str | None = None
    prepared: Prepared | None = None
    facts: Row = field(default_factory=dict)

    @classmethod
    def without(cls, status: str, reason: str, facts: Row | None = None) -> Checked:
        return cls(status, reason, None, facts or {})


def check(variant: Variant, options: Options, subject: Subject) -> Checked:
    """Prepare a variant, run it once on poisoned output and compare with the reference.

    Raises:
        MeasurementError: the device was lost.
        OSError: the output could not be saved. Everything else becomes a status and a reason.
    """
    if options.precision not in variant.precisions:
        return Checked.without("unavailable", f"It has no precision {options.precision!r}.")
    facts: Row = {}
    try:
        begin = time.perf_counter()
        prepared = variant.prepare(subject.call, options)
        facts["prepare_ms"] = (time.perf_counter() - begin) * 1e3
        facts |= _details(prepared)
        out, order = _poisoned_run(prepared, subject)
        if prepared.query_ids() is not None:
            facts.setdefault("window", options.window)
        facts |= prepared.counters() if prepared.counters else subject.counters(order, prepared.group)
        facts |= _accuracy(out, subject)
        _save(variant.name, out, order, subject)
    except VariantUnavailable as error:
        return Checked.without("unavailable", str(error), facts)
    except OSError:
        raise
    except Exception as error:
        _device_is_alive(subject.call.device, variant.name, error)
        reason = (
            str(error) if isinstance(error, PwbenchError) else f"{type(error).__name__}: {one_line(error)}"
        )
        return Checked.without("failed", reason, facts)
    limit = LIMITS[options.precision]
    if not facts["rel_l2"] <= limit:
        reason = f"rel-L2 against the reference is {facts['rel_l2']:.3g}, expected at most {limit:g}."
        return Checked.without("failed", reason, facts)
    return Checked("ok", None, prepared, facts)


def sample_rows(call: SparsePrefillCall, wanted: int, seed: int) -> np.ndarray:
    """Rows to compare, ascending: all when there are no more than wanted, else a seeded choice that
    holds the first and last row of every request (as far as ``wanted`` allows)."""
    if call.total_q <= wanted:
        return np.arange(call.total_q)
    bounds = call.cu_seqlens_q.cpu().numpy().astype(np.int64)
    begin, end = bounds[:-1], bounds[1:]
    edges = np.unique(np.concatenate([begin[end > begin], end[end > begin] - 1]))[:wanted]
    others = np.setdiff1d(np.arange(call.total_q), edges)
    chosen = np.random.default_rng(seed).choice(others, wanted - len(edges), replace=False)
    return np.sort(np.concatenate([edges, chosen]))


def _poisoned_run(prepared: Prepared, subject: Subject) -> tuple[torch.Tensor, np.ndarray]:
    prepared.out.fill_(float("nan"))
    prepared.run()
    if prepared.out.is_cuda:
        torch.cuda.synchronize(prepared.out.device)
    bad = torch.nonzero(~torch.isfinite(prepared.out).flatten(1).all(dim=1)).flatten()
    if len(bad):
        raise MeasurementError(
            f"{len(bad)} of {len(prepared.out)} output rows were not written or are not finite, "
            f"the first is row {int(bad[0])}."
        )
    ids = prepared.query_ids()
    if ids is None:
        return prepared.out, identity_order(subject.call.kv_heads, subject.call.total_q)
    return prepared.out, ids.to(torch.int32).cpu().numpy()


def _accuracy(out: torch.Tensor, subject: Subject) -> Row:
    index = torch.from_numpy(subject.rows).to(out.device)
    found: Accuracy = compare(out[index], subject.expected)
    return {
        **found._asdict(),
        "checked_rows": len(subject.rows),
        "fp8_cache_rel_l2": subject.fp8_cache_rel_l2,
    }


def _details(prepared: Prepared) -> Row:
    kinds: dict[str, Any] = {"int64": int, "float64": float, "string": str}
    known = {column.name: kinds.get(column.dtype, str) for column in COLUMNS}
    return {name: known[name](value) for name, value in prepared.details.items() if name in known}


def _save(name: str, out: torch.Tensor, order: np.ndarray, subject: Subject) -> None:
    folder = subject.outputs
    if folder is None:
        return
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    path = output_path(folder, subject.capture.name, name)
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        tensors = {
            "out": out.to(torch.bfloat16).cpu().contiguous(),
            "query_ids": torch.from_numpy(order.copy()),
        }
        save_file(tensors, temporary, metadata={"capture": subject.capture.name, "variant": name})
        os.replace(temporary, path)
    except SafetensorError as error:
        # It hides the system's error in its text; a full disk is no fault of the variant.
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _device_is_alive(device: torch.device, name: str, error: Exception) -> None:
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as lost:
        raise MeasurementError(
            f"The device was lost while checking {name} ({one_line(lost)}); finished captures are kept. "
            "Run again without that variant, or run it alone under compute-sanitizer."
        ) from error
