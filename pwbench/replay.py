"""Replay: captures through variants, checked and timed, one results row each.

For every capture: all variants are prepared, their outputs poisoned and compared with the reference,
then all of them are timed together, interleaved. A capture's rows are handed on when the capture is
finished, so that an interruption loses the capture in progress and nothing else.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from pwbench import capture as captures_
from pwbench import ceilings as roofs
from pwbench import device, results, timing, variants
from pwbench._checked_run import Checked, Subject, check
from pwbench.columns import COLUMNS
from pwbench.plan import Plan, Settings, plan, verified
from pwbench.results import Row
from pwbench.stats import FEWEST, noise_floor
from pwbench.variants import Options

TWIN = "#A/A"
"""Ends the name under which the baseline enters a second time."""

__all__ = ["Observer", "Plan", "Settings", "Silent", "plan", "replay", "run", "verified"]


class Observer(Protocol):
    """Is told how far a replay is."""

    def advance(self, steps: float = 1) -> None: ...

    def note(self, text: str) -> None: ...


class Silent:
    """An observer that does not care."""

    def advance(self, steps: float = 1) -> None:
        pass

    def note(self, text: str) -> None:
        pass


def run(chosen: Plan, observer: Observer | None = None) -> Iterator[list[Row]]:
    """Carry out a plan; yields the rows of one capture when that capture is finished.

    Raises:
        MeasurementError: the device was lost.
    """
    session = str(uuid.uuid4())
    for loaded, names in chosen.work:
        yield _Bench(chosen, loaded, session, observer or Silent()).rows(names)


def replay(
    captures: Sequence[str | Path] = (),
    variants: Sequence[str] = (),
    *,
    device: str = "auto",
    out: str | Path | None = None,
    observer: Observer | None = None,
    **settings: object,
) -> list[Row]:
    """Replay captures through variants and return the rows.

    Example:
        >>> rows = pwbench.replay.replay(["captures/real-8k"], ["union8", "union8-regroup"], samples=5)

    Args:
        captures: captures or folders of them; none = all under ``captures/``.
        variants: names; none = every one that can run on the device.
        device: ``auto``, ``cuda`` or ``cpu``.
        out: results file that each capture's rows are added to as it is finished.
        settings: the other attributes of `Settings`.

    Raises:
        PwbenchError: as `plan` and `run`.
    """
    from pwbench.device import provenance, resolve

    chosen = plan(captures, variants, Settings(device=resolve(device), **settings))  # type: ignore[arg-type]
    rows: list[Row] = []
    for finished in run(chosen, observer):
        if out is not None:
            results.append(out, finished, provenance(chosen.settings.device))
        rows += finished
    return rows


@dataclass(frozen=True)
class _Entry:
    """One variant on one kind of tensors, checked."""

    name: str
    subject: Subject
    checked: Checked


class _Bench:
    """One capture on the bench: its call, what is prepared for it, and the rows that come of it."""

    def __init__(self, chosen: Plan, loaded: captures_.Capture, session: str, observer: Observer):
        self.plan, self.settings, self.observer = chosen, chosen.settings, observer
        self.capture = loaded
        outputs = chosen.outputs.get(loaded.path)
        self.subjects = [Subject.load(loaded, one, outputs) for one in self.settings.one_by_one]
        self.info = device.info(self.settings.device)
        self.ceilings = roofs.find(self.info.name if self.info.kind == "cuda" else None)
        call = self.subjects[0].call
        self.common: Row = {
            "session": session,
            "suite": loaded.suite,
            "capture": loaded.name,
            "tables_sha256": loaded.tables_sha256,
            "kind": loaded.kind,
            "commit": device.commit(),
            "device": self.info.kind,
            "gpu": self.info.name,
            "driver": self.info.driver,
            "cuda": self.info.cuda,
            "torch": torch.__version__,
            "cupy": device.cupy_version(),
            "total_q": call.total_q,
            "context": int(call.seq_lens.max()) if call.requests else 0,
            "kv_heads": call.kv_heads,
        }

    def rows(self, names: Sequence[str]) -> list[Row]:
        """Check and time ``names``; one row per variant, kind of tensors, mode and L2 state."""
        entries: dict[str, _Entry] = {}
        for name in names:
            self.observer.note(f"{self.capture.name}: checking {name}")
            for subject in self.subjects:
                label = name if subject is self.subjects[0] else f"{name}#{subject.tensors}"
                entries[label] = self._check(name, subject)
                self.observer.advance()
        found = []
        for mode in self.settings.modes:
            for l2 in self.settings.l2:
                found += self._time(entries, mode, l2)
        if self.settings.device.type == "cuda":
            entries.clear()
            torch.cuda.empty_cache()
        return found

    def _check(self, name: str, subject: Subject) -> _Entry:
        if name in self.plan.unavailable:
            return _Entry(name, subject, Checked.without("unavailable", self.plan.unavailable[name]))
        options = Options(self.settings.precision_of(name), self.settings.window)
        return _Entry(name, subject, check(variants.get(name), options, subject))

    def _time(self, entries: Mapping[str, _Entry], mode: str, l2: str) -> list[Row]:
        ready = {
            label: one.checked.prepared
            for label, one in entries.items()
            if one.checked.prepared is not None and (mode == "eager" or one.checked.prepared.graphable)
        }
        baseline = self.settings.baseline if self.settings.baseline in ready else next(iter(ready), None)
        samples = self.settings.samples or 0
        if baseline and samples >= FEWEST:
            ready[baseline + TWIN] = ready[baseline]
        self.observer.note(f"{self.capture.name}: timing {mode}, L2 {l2}")
        timings = timing.measure(
            ready,
            samples,
            mode,
            l2,
            seed=self.settings.seed,
            on_round=lambda _done: self.observer.advance(len(entries)),
        )
        if not ready:
            self.observer.advance(len(entries) * samples)
        floor = _floor(timings, baseline)
        disturbances = self._disturbances()
        for timed in timings.values():
            timed.throttle = "; ".join(filter(None, [timed.throttle, *disturbances]))
        return [self._row(one, timings.get(label), mode, l2, floor) for label, one in entries.items()]

    def _row(
        self, entry: _Entry, timed: timing.Timing | None, mode: str, l2: str, floor: float | None
    ) -> Row:
        name, one = entry.name, entry.checked
        precision = self.settings.precision_of(name)
        row: Row = {
            **dict.fromkeys(column.name for column in COLUMNS),
            **self.common,
            **one.facts,
            "tensors": entry.subject.tensors,
            "generator": self.capture.generator if entry.subject.tensors == "seeded" else None,
            "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "variant": name,
            "precision": precision,
            "mode": mode,
            "l2": l2,
            "status": one.status,
            "reason": one.reason,
            "noise_floor": floor,
        }
        least = self._roofline(entry, precision, mode, l2)
        if least is not None:
            row |= {"roofline_us": least.us, "roofline_term": least.term}
        if one.status != "ok":
            return row
        if timed is None:
            reason = "It cannot be captured into a CUDA graph; measure it with --mode eager."
            return row | {"status": "unavailable", "reason": reason}
        if timed.failure:
            return row | {"status": "failed", "reason": timed.failure}
        times = _times(timed)
        if least is not None and self.info.kind == "cuda" and times["complete_us"] < least.floor_us:
            reason = (
                f"The complete call reads {times['complete_us']:.2f} us, the chip needs at least "
                f"{least.floor_us:.2f} us for it: the measurement is wrong and not recorded."
            )
            return row | {"status": "failed", "reason": reason}
        return row | times

    def _roofline(self, entry: _Entry, precision: str, mode: str, l2: str) -> roofs.Roofline | None:
        one, subject = entry.checked, entry.subject
        if self.ceilings is None or not one.facts.get("groups"):
            return None
        return roofs.roofline(
            one.facts,
            io_bytes=2 * subject.call.q.numel() * subject.call.q.element_size(),
            page_bytes=subject.page_bytes,
            group=one.prepared.group if one.prepared else 1,
            precision=precision,
            l2=l2,
            mode=mode,
            ceilings=self.ceilings,
        )

    def _disturbances(self) -> list[str]:
        if self.info.kind != "cuda":
            return []
        others = device.foreign_processes(self.settings.device.index or 0)
        return [f"{one.name} (pid {one.pid}) on the same GPU" for one in others]


def _times(timed: timing.Timing) -> Row:
    complete = float(np.median(timed.complete_us))
    stages = {name: float(np.median(values)) for name, values in timed.stages_us.items()}
    return {
        "samples": len(timed.complete_us),
        "complete_us": complete,
        **{f"{name}_us": value for name, value in stages.items()},
        "gap_us": complete - sum(stages.values()),
        "complete_samples": list(timed.complete_us),
        "stage_samples": timed.stages_us,
        "sm_clock_mhz": float(np.median(timed.sm_clock_mhz)) if timed.sm_clock_mhz else None,
        "throttle": timed.throttle,
    }


def _floor(timings: Mapping[str, timing.Timing], baseline: str | None) -> float | None:
    pair = [timings.get(f"{baseline}{end}") for end in ("", TWIN)]
    if any(one is None or one.failure for one in pair):
        return None
    first, second = (one.complete_us for one in pair if one is not None)
    return noise_floor(first, second)
