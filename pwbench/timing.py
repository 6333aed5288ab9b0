"""Timing: interleaved samples of complete calls and of their stages, on a CUDA device or the CPU.

One *round* takes one sample of every candidate in a random order, so that drift of the clock, of
temperature or of a noisy neighbour falls on all of them alike; the i-th samples of two candidates
form a pair. A sample is: flush (or warm) the L2, queue a short spin so that the host is ahead of
the device, then the work between two events.

Nothing falls back silently: a candidate that cannot be timed as asked is reported as failed.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch

from pwbench.errors import MeasurementError
from pwbench.variants._base import Prepared

Run = Callable[[], None]

MODES = ("graph", "eager")
L2_STATES = ("cold", "warm")
FLUSH_BYTES = 256 << 20
"""Written, and as much again read, before a cold sample; several times the L2 of any Hopper GPU."""
GRAPH_TOLERANCE = 1e-2
"""rel-L2 that the output of a graph replay may differ from the eager run's: far above what a changed
order of additions does, far below what missing work does."""


@dataclass(frozen=True)
class Sensors:
    """What the device says about itself right after a round."""

    sm_clock_mhz: float | None = None
    throttle: tuple[str, ...] = ()


@dataclass
class Timing:
    """The samples of one candidate. Index i belongs to round i in every list.

    Attributes:
        complete_us: complete calls, microseconds.
        stages_us: stage name -> microseconds; one that cannot be cut holds its complete call.
        sm_clock_mhz: SM clock after each round, where the device tells.
        throttle: throttle reasons with how many rounds showed them, empty when none did.
        failure: why there are no samples, or None.
    """

    complete_us: list[float] = field(default_factory=list)
    stages_us: dict[str, list[float]] = field(default_factory=dict)
    sm_clock_mhz: list[float] = field(default_factory=list)
    throttle: str = ""
    failure: str | None = None


class Timer(Protocol):
    """A device that can be timed. Tests put a fake in its place."""

    device: str
    nested: bool
    """Whether reading the clock between stages costs nothing, so that one run yields both times."""

    def bind(self, run: Run, graph: bool) -> Run:
        """What to call for a sample: ``run`` itself, or the replay of a CUDA graph made of it.

        Raises:
            MeasurementError: the graph cannot be made; the message says why.
        """
        ...

    def sample(self, parts: Sequence[Run], cold: bool) -> list[float]:
        """Run the parts in order; microseconds of each."""
        ...

    def sensors(self) -> Sensors: ...

    def synchronize(self) -> None:
        """Wait for the device; raises whatever error it still holds."""
        ...


def measure(
    candidates: Mapping[str, Prepared],
    samples: int,
    mode: str,
    l2: str,
    *,
    timer: Timer | None = None,
    warm_up_s: float | None = None,
    seed: int = 0,
    on_round: Callable[[int], None] = lambda done: None,
) -> dict[str, Timing]:
    """Time every candidate, interleaved.

    Args:
        candidates: name -> prepared variant, all on one device. The same object may enter under two
            names: that is the A/A pair.
        samples: rounds, so samples of each candidate.
        mode: ``graph`` (CUDA-graph replay) or ``eager``.
        l2: ``cold`` (flushed before each sample) or ``warm``.
        timer: the device; by default the one the first candidate's output lives on.
        warm_up_s: how long all candidates run before the first sample, so that clocks have risen;
            0.3 s on a GPU, nothing on the CPU.
        seed: of the random order.
        on_round: called with the number of finished rounds.

    Returns:
        name -> `Timing`, in the order of ``candidates``; ``failure`` is set where timing failed.

    Raises:
        MeasurementError: the device itself is lost, or an argument has no meaning.
    """
    if mode not in MODES or l2 not in L2_STATES or samples < 1:
        raise MeasurementError(
            f"Cannot measure {samples} samples in mode {mode!r} with L2 {l2!r}; expected at least 1 sample, "
            f"a mode of {', '.join(MODES)} and an L2 state of {', '.join(L2_STATES)}."
        )
    timings = {name: Timing() for name in candidates}
    if not candidates:
        return timings
    timer = timer or timer_for(next(iter(candidates.values())).out.device)
    session = _Session(timer, timings, cold=l2 == "cold", random=np.random.default_rng(seed))
    for name, prepared in candidates.items():
        session.bind(name, prepared, graph=mode == "graph")
    session.warm_up(warm_up_s if warm_up_s is not None else (0.3 if timer.device == "cuda" else 0.0))
    for done in range(samples):
        session.round()
        on_round(done + 1)
    session.finish()
    return timings


class _Session:
    """The state of one `measure`: what is still running and where its samples go."""

    def __init__(self, timer: Timer, timings: dict[str, Timing], cold: bool, random: np.random.Generator):
        self.timer, self.timings, self.cold, self.random = timer, timings, cold, random
        self.complete: dict[str, Run] = {}
        self.stages: dict[str, list[tuple[str, Run]]] = {}
        self.throttle: Counter[str] = Counter()

    def bind(self, name: str, prepared: Prepared, graph: bool) -> None:
        def attempt() -> None:
            complete = self.timer.bind(prepared.run, graph)
            if graph:
                _prove_graph(prepared, complete, self.timer)
            stages = [(stage.name, self.timer.bind(stage.run, graph)) for stage in prepared.stages]
            self.complete[name] = complete
            self.stages[name] = stages if len(stages) > 1 else []

        self._guard(name, attempt)

    def warm_up(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.complete and time.monotonic() < end:
            for name in list(self.complete):
                self._guard(name, self.complete[name])
            self.timer.synchronize()

    def round(self) -> None:
        samplers = [self._sample_both] if self.timer.nested else [self._sample_complete, self._sample_stages]
        for sampler in samplers:
            for name in self._shuffled():
                self._guard(name, partial(sampler, name))
        seen = self.timer.sensors()
        self.throttle.update(seen.throttle)
        if seen.sm_clock_mhz is not None:
            for name in self.complete:
                self.timings[name].sm_clock_mhz.append(seen.sm_clock_mhz)

    def finish(self) -> None:
        text = ", ".join(f"{reason} in {count} rounds" for reason, count in sorted(self.throttle.items()))
        for name in self.complete:
            timing = self.timings[name]
            timing.throttle = text
            if not timing.stages_us:
                timing.stages_us = {"attention": list(timing.complete_us)}

    def _shuffled(self) -> list[str]:
        names = list(self.complete)
        return [names[i] for i in self.random.permutation(len(names))]

    def _sample_complete(self, name: str) -> None:
        self.timings[name].complete_us += self.timer.sample([self.complete[name]], self.cold)

    def _sample_both(self, name: str) -> None:
        if self.stages[name]:
            self._sample_stages(name)
            taken = sum(values[-1] for values in self.timings[name].stages_us.values())
            self.timings[name].complete_us.append(taken)
        else:
            self._sample_complete(name)

    def _sample_stages(self, name: str) -> None:
        stages = self.stages[name]
        if not stages:
            return
        taken = self.timer.sample([run for _, run in stages], self.cold)
        # A variant that works in chunks runs a stage once per chunk: its sample is their sum.
        whole: dict[str, float] = {}
        for (stage, _), microseconds in zip(stages, taken, strict=True):
            whole[stage] = whole.get(stage, 0.0) + microseconds
        for stage, microseconds in whole.items():
            self.timings[name].stages_us.setdefault(stage, []).append(microseconds)

    def _guard(self, name: str, action: Run) -> None:
        """Run ``action``; when it fails, drop the candidate and remember why."""
        try:
            action()
        except Exception as error:
            self.complete.pop(name, None)
            self.stages.pop(name, None)
            self.timings[name] = failed = self.timings[name]
            failed.complete_us, failed.stages_us, failed.sm_clock_mhz = [], {}, []
            failed.failure = one_line(error)
            try:
                self.timer.synchronize()
            except Exception as lost:
                raise MeasurementError(
                    f"The device was lost while timing {name} ({one_line(lost)}); finished captures are "
                    "kept. Run again without that variant, or run it alone under compute-sanitizer."
                ) from error


def _prove_graph(prepared: Prepared, replay: Run, timer: Timer) -> None:
    """A graph that captured nothing is fast. Prove that a replay writes what the eager call wrote."""
    prepared.run()
    timer.synchronize()
    expected = prepared.out.clone()
    prepared.out.fill_(float("nan"))
    replay()
    timer.synchronize()
    difference = (prepared.out.float() - expected.float()).norm()
    scale = expected.float().norm()
    if not bool(difference <= GRAPH_TOLERANCE * scale):
        raise MeasurementError(
            "the replay of the CUDA graph does not write what the eager call writes (they differ by "
            f"{float(difference):.3g} at a norm of {float(scale):.3g}): some of its work was not captured"
        )


def one_line(error: BaseException) -> str:
    """The first line of an error's message, or its type when it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def timer_for(device: torch.device) -> Timer:
    """The timer of a torch device.

    Raises:
        MeasurementError: the device is neither a CUDA device nor the CPU.
    """
    if device.type == "cuda":
        return CudaTimer(device)
    if device.type == "cpu":
        return CpuTimer()
    raise MeasurementError(f"Cannot time on device {device}; expected cuda or cpu.")


class CpuTimer:
    """Wall-clock time of a call. A cold sample follows a sweep over a buffer larger than the caches.
    Nothing overlaps here, so a complete call is its stages one after the other."""

    device = "cpu"
    nested = True

    def __init__(self, flush_bytes: int = 64 << 20):
        self._flush = np.zeros(flush_bytes // 8)

    def bind(self, run: Run, graph: bool) -> Run:
        if graph:
            raise MeasurementError("There are no CUDA graphs on the CPU; use --mode eager.")
        return run

    def sample(self, parts: Sequence[Run], cold: bool) -> list[float]:
        if cold:
            self._flush += 1.0
        taken = []
        for part in parts:
            begin = time.perf_counter_ns()
            part()
            taken.append((time.perf_counter_ns() - begin) / 1e3)
        return taken

    def sensors(self) -> Sensors:
        return Sensors()

    def synchronize(self) -> None:
        pass


# Clock cycles per part, and one part more: about 20 us for a replay, 0.5 ms for launches from Python.
_SPIN_GRAPH, _SPIN_EAGER = 40_000, 1_000_000


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection inside a capture may free device memory, which ends the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _not_capturable(error: Exception) -> MeasurementError:
    return MeasurementError(f"it cannot be captured into a CUDA graph: {one_line(error)}")


class CudaTimer:
    """CUDA events around a graph replay or an eager call, on torch's current stream."""

    device = "cuda"
    nested = False

    def __init__(self, device: torch.device):
        from pwbench.device import read_sensors

        self._read_sensors = read_sensors
        self._device = device
        self._written = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        self._read = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        self._sink = torch.empty((), dtype=torch.int32, device=device)
        self._side = torch.cuda.Stream(device)
        self._spin = _SPIN_EAGER

    def bind(self, run: Run, graph: bool) -> Run:
        # Eager runs first in either mode: lazily loaded modules and cuBLAS handles must not be
        # created inside a capture.
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            for _ in range(3):
                run()
        self.synchronize()
        self._spin = _SPIN_GRAPH if graph else _SPIN_EAGER
        return self._capture(run) if graph else run

    def _capture(self, run: Run) -> Run:
        # Not `torch.cuda.graph`: it collects garbage each time, which takes longer than the timing.
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._side), _no_garbage_collection():
            captured.capture_begin()
            try:
                run()
            except Exception as error:
                with suppress(Exception):
                    captured.capture_end()
                raise _not_capturable(error) from error
            try:
                captured.capture_end()
            except Exception as error:
                raise _not_capturable(error) from error
        self.synchronize()
        return captured.replay

    def sample(self, parts: Sequence[Run], cold: bool) -> list[float]:
        if cold:
            # Writing evicts; reading other memory then leaves no dirty lines whose write-back would
            # be charged to the sample.
            self._written.zero_()
            torch.amax(self._read, dim=0, out=self._sink)
        else:
            for part in parts:
                part()
        # Keep the device busy until the host has queued everything, as the previous layer's work would.
        # What waits for the device inside the call (a plan made on the host) is still charged to it.
        torch.cuda._sleep(self._spin * (1 + len(parts)))
        events = []
        for part in parts:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            part()
            end.record()
            events.append((begin, end))
        self.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in events]

    def sensors(self) -> Sensors:
        clock, reasons = self._read_sensors(self._device.index or 0)
        return Sensors(clock, reasons)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)
