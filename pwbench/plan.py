"""What a replay will measure: its settings, the captures it may use and what is already done."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pwbench import capture as captures_
from pwbench import device, variants
from pwbench.errors import CaptureError, InputError
from pwbench.results import Row

BASELINE = "flashinfer"
"""Enters twice in every session (the A/A pair), when it runs; else the first variant that does."""
SAMPLES = {"cuda": 50, "cpu": 3}
CHECK_ROWS = 512


@dataclass(frozen=True)
class Settings:
    """What a replay measures and how.

    Attributes:
        device: where it runs.
        precision: ``fast`` or ``accurate``; a variant that has only one runs in that one.
        window: query positions of a regroup window, 64 or 128.
        samples: of the complete call; None = 50 on a GPU, 3 on the CPU.
        modes: of ``graph`` and ``eager``; empty = graph on a GPU, eager on the CPU.
        l2: of ``cold`` and ``warm``.
        tensors: ``auto``, ``stored``, ``seeded``, or ``both``: stored and seeded in one session,
            their samples taken in turn.
        baseline: the variant whose A/A pair gives the noise floor.
        check_rows: output rows compared with the reference; all where there are no more.
        seed: of the sampling order and of the rows that are checked.
        save_outputs: folder for the outputs and permutations, or None; two captures of one
            name go to a folder per suite in it.
    """

    device: torch.device
    precision: str = "fast"
    window: int = 128
    samples: int | None = None
    modes: tuple[str, ...] = ()
    l2: tuple[str, ...] = ("cold",)
    tensors: str = "auto"
    baseline: str = BASELINE
    check_rows: int = CHECK_ROWS
    seed: int = 0
    save_outputs: Path | None = None

    def __post_init__(self) -> None:
        kind = self.device.type
        object.__setattr__(self, "samples", SAMPLES[kind] if self.samples is None else self.samples)
        object.__setattr__(self, "modes", self.modes or (("graph",) if kind == "cuda" else ("eager",)))
        if kind == "cpu" and "graph" in self.modes:
            raise InputError("Mode graph needs a CUDA device; on the CPU use --mode eager.")
        for name, value, allowed in (
            ("precision", self.precision, ("fast", "accurate")),
            ("window", self.window, (64, 128)),
        ):
            if value not in allowed:
                raise InputError(f"{name} is {value!r}, expected {' or '.join(map(str, allowed))}.")
        for name, least in (("samples", 1), ("check_rows", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}, expected at least {least}.")

        if self.tensors == "both" and self.save_outputs:
            raise InputError("Outputs are saved for one kind of tensors: choose --tensors stored or seeded.")

    @property
    def one_by_one(self) -> list[Settings]:
        """These settings for each kind of tensors that is replayed."""
        if self.tensors != "both":
            return [self]
        return [replace(self, tensors=kind) for kind in ("stored", "seeded")]

    @property
    def rounds(self) -> int:
        """Rounds of one capture over all modes and L2 states."""
        return (self.samples or 0) * len(self.modes) * len(self.l2)

    def precision_of(self, name: str) -> str:
        offered = variants.get(name).precisions
        return self.precision if self.precision in offered or len(offered) != 1 else offered[0]


@dataclass(frozen=True)
class Plan:
    """What a replay will do.

    Attributes:
        settings: how.
        work: each capture and the variants it still needs.
        unavailable: variants that cannot run here and why.
        done: captures whose rows the results file already holds.
        outputs: capture's path -> folder for its outputs, or None.
    """

    settings: Settings
    work: list[tuple[captures_.Capture, list[str]]]
    unavailable: dict[str, str]
    done: list[str] = field(default_factory=list)
    outputs: dict[Path, Path | None] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Units of progress that `run` will report."""
        calls = sum(len(names) for _, names in self.work) * len(self.settings.one_by_one)
        return calls * (1 + self.settings.rounds)


def plan(
    paths: Sequence[str | Path],
    names: Sequence[str],
    settings: Settings,
    existing: Sequence[Row] = (),
) -> Plan:
    """Decide what to run. Every capture is verified now, before anything is measured.

    Args:
        paths: captures, or folders of them; none = all under ``captures/``.
        names: variants; none = every one that can run on the device.
        existing: rows of the results file: what they cover is not measured again.

    Raises:
        CaptureError: a capture fails verification.
        InputError: an unknown variant.
    """
    unavailable = {}
    for name in names or variants.names():
        reason = variants.get(name).unavailable(settings.device)
        if reason:
            unavailable[name] = reason
    wanted = list(dict.fromkeys(names)) or [name for name in variants.names() if name not in unavailable]
    loaded = [verified(path) for path in captures_.discover([str(path) for path in paths])]
    for one in loaded:
        if settings.tensors == "both" and one.kind != "full":
            raise InputError(
                f"{one.path} stores tables only, so it has no tensors to compare seeded ones with."
            )
    outputs = _outputs(settings.save_outputs, loaded)
    stored = _Stored(existing, settings)
    work, done = [], []
    for one in loaded:
        missing = [n for n in wanted if not (stored.covers(one, n) and _saved(outputs[one.path], one, n))]
        if missing:
            work.append((one, missing))
        else:
            done.append(f"{one.suite}/{one.name}")
    return Plan(settings, work, {n: r for n, r in unavailable.items() if n in wanted}, done, outputs)


def verified(path: Path) -> captures_.Capture:
    """The capture at ``path``, once every invariant of the format has been proved.

    Raises:
        CaptureError: the first check that fails, with the value seen and the value expected.
    """
    loaded = captures_.load(path)
    for found in captures_.verify(path):
        if not found.ok:
            raise CaptureError(
                f"{path} fails the check {found.name!r}: {found.seen}, expected {found.expected}. "
                f"It is not replayed; `pwbench verify {path}` lists every check."
            )
    return loaded


# Resuming ---------------------------------------------------------------------------------------


class _Stored:
    """The rows a results file already holds, as far as they answer the same question."""

    _KEY = (
        "suite",
        "capture",
        "tables_sha256",
        "variant",
        "device",
        "gpu",
        "precision",
        "mode",
        "l2",
        "commit",
    )

    def __init__(self, rows: Sequence[Row], settings: Settings):
        self.settings = settings
        self.gpu = device.info(settings.device).name
        self.rows: dict[tuple[object, ...], list[Row]] = defaultdict(list)
        for row in rows:
            self.rows[self._key(row)].append(row)

    def covers(self, one: captures_.Capture, name: str) -> bool:
        """Whether every row that ``name`` would get on this capture is there."""
        settings = self.settings
        expected = {
            "suite": one.suite,
            "capture": one.name,
            "tables_sha256": one.tables_sha256,
            "variant": name,
            "device": settings.device.type,
            "gpu": self.gpu,
            "precision": settings.precision_of(name),
            "commit": device.commit(),
        }
        keys = [
            self._key({**expected, "mode": mode, "l2": l2}) for mode in settings.modes for l2 in settings.l2
        ]
        window = variants.get(name).search_window or settings.window
        return all(
            any(self._answers(row, window, asked.tensors) for row in self.rows.get(key, []))
            for key in keys
            for asked in settings.one_by_one
        )

    def _answers(self, row: Row, window: int, tensors: str) -> bool:
        if row.get("status") != "ok":
            return True  # it could not be measured; asking again would not change that
        same_window = row.get("window") in (None, window)
        same_tensors = tensors in ("auto", row.get("tensors"))
        return same_window and same_tensors and row.get("samples") == self.settings.samples

    @classmethod
    def _key(cls, row: Mapping[str, object]) -> tuple[object, ...]:
        return tuple(row.get(name) for name in cls._KEY)


def _outputs(folder: Path | None, loaded: Sequence[captures_.Capture]) -> dict[Path, Path | None]:
    """Where each capture's outputs go: ``folder``, or its suite's folder below when names repeat."""
    uses = Counter(one.name for one in loaded)
    return {one.path: folder / one.suite if folder and uses[one.name] > 1 else folder for one in loaded}


def output_path(folder: Path, capture: str, variant: str) -> Path:
    """The file that holds the output of one variant on one capture."""
    return folder / f"{capture}.{variant}.safetensors"


def _saved(folder: Path | None, one: captures_.Capture, name: str) -> bool:
    return folder is None or output_path(folder, one.name, name).exists()
