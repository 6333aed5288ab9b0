"""The CUDA timer on a real device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pwbench import device
from pwbench.timing import CudaTimer, measure
from pwbench.variants._base import Prepared, Stage

pytestmark = pytest.mark.gpu


def _prepared(cycles=(200_000,), name="attention", body=None) -> Prepared:
    """Spins for so many clock cycles per stage, then writes its output."""
    out = torch.zeros(4, 16, 128, device="cuda")

    def stage(count):
        def run():
            torch.cuda._sleep(count)
            out.fill_(2.0)
            if body:
                body(out)

        return run

    stages = [Stage(f"{name}{i}" if i else name, stage(count)) for i, count in enumerate(cycles)]

    def whole():
        for part in stages:
            part.run()

    return Prepared(whole, stages, out)


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("l2", ["cold", "warm"])
def test_a_known_duration_is_measured(mode, l2):
    timings = measure({"one": _prepared((400_000,)), "two": _prepared((800_000,))}, 20, mode, l2)
    one, two = (np.median(timings[name].complete_us) for name in ("one", "two"))
    assert 150 < one < 500, "400 000 cycles at 1 to 2 GHz"
    assert two / one == pytest.approx(2, rel=0.1)
    assert all(timing.failure is None for timing in timings.values())


def test_stages_add_up_to_the_complete_call():
    timing = measure({"a": _prepared((200_000, 400_000))}, 20, "graph", "cold")["a"]
    parts = [np.median(values) for values in timing.stages_us.values()]
    assert parts[1] / parts[0] == pytest.approx(2, rel=0.15)
    assert sum(parts) == pytest.approx(np.median(timing.complete_us), rel=0.1)


def test_a_call_that_waits_for_the_host_fails_the_capture_and_the_next_one_still_runs():
    waits = _prepared(body=lambda out: float(out[0, 0, 0]))
    timings = measure({"waits": waits, "good": _prepared()}, 5, "graph", "cold")
    assert "cannot be captured" in timings["waits"].failure
    assert len(timings["good"].complete_us) == 5
    eager = measure({"waits": waits}, 5, "eager", "cold")["waits"]
    assert eager.failure is None


def test_work_on_another_stream_is_not_taken_for_captured_work():
    other = torch.cuda.Stream()
    out = torch.zeros(4, 16, 128, device="cuda")

    def run():
        with torch.cuda.stream(other):
            out.fill_(3.0)
        other.synchronize() if not torch.cuda.is_current_stream_capturing() else None

    timing = measure({"a": Prepared(run, [Stage("attention", run)], out)}, 3, "graph", "warm")["a"]
    assert timing.failure and not timing.complete_us


def test_a_cold_sample_reads_from_memory_and_a_warm_one_from_l2():
    data = torch.ones(8 << 20, dtype=torch.int32, device="cuda")  # 32 MiB, fits the L2
    out = torch.zeros(1, 16, 128, device="cuda")
    total = torch.empty((), dtype=torch.int32, device="cuda")

    def run():
        torch.amax(data, dim=0, out=total)
        out.copy_(total.expand_as(out))

    prepared = Prepared(run, [Stage("attention", run)], out)
    cold = np.median(measure({"a": prepared}, 20, "graph", "cold")["a"].complete_us)
    warm = np.median(measure({"a": prepared}, 20, "graph", "warm")["a"].complete_us)
    assert warm < cold


def test_the_clock_is_known_or_honestly_unknown():
    clock, reasons = device.read_sensors(torch.cuda.current_device())
    assert clock is None or 200 < clock < 2200
    assert isinstance(reasons, tuple)
    assert device.info(torch.device("cuda", 0)).sm_count


def test_the_timer_leaves_the_garbage_collector_as_it_was():
    import gc

    timer = CudaTimer(torch.device("cuda", torch.cuda.current_device()))
    timer.bind(lambda: None, graph=True)
    assert gc.isenabled()
