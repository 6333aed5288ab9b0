"""The timer's logic, on a device whose clock the test holds in its hand."""

from __future__ import annotations

import random

import pytest
import torch

from pwbench.errors import MeasurementError
from pwbench.timing import CpuTimer, Sensors, measure, timer_for
from pwbench.variants._base import Prepared, Stage


class FakeTimer:
    """Counts calls, answers with the duration a part carries, and can break on demand."""

    device = "fake"
    nested = False

    def __init__(self, lost: bool = False):
        self.flushes: list[bool] = []
        self.bound: list[bool] = []
        self.lost = lost
        self.broke = False
        self.order: list[str] = []

    def bind(self, run, graph):
        self.bound.append(graph)
        if graph and getattr(run, "uncapturable", False):
            raise MeasurementError("operation not permitted when stream is capturing")
        return run

    def sample(self, parts, cold):
        self.flushes.append(cold)
        taken = []
        for part in parts:
            try:
                part()
            except RuntimeError:
                self.broke = True
                raise
            self.order.append(part.name)
            taken.append(part.microseconds)
        return taken

    def sensors(self):
        return Sensors(1500.0, ("power cap",))

    def synchronize(self):
        if self.lost and self.broke:
            raise RuntimeError("an illegal memory access was encountered\nstack")


class Work:
    """A callable that fills the output and claims a duration."""

    def __init__(self, name, out, microseconds, value=1.0, dies_at=None):
        self.name, self.out, self.microseconds, self.value = name, out, microseconds, value
        self.calls, self.dies_at, self.uncapturable = 0, dies_at, False

    def __call__(self):
        self.calls += 1
        if self.dies_at is not None and self.calls >= self.dies_at:
            raise RuntimeError("boom\nsecond line")
        self.out.fill_(self.value)


def candidate(name="a", microseconds=10.0, stages=(), **kwargs):
    out = torch.zeros(2, 16, 128)
    run = Work(name, out, microseconds, **kwargs)
    parts = [Stage(stage, Work(f"{name}.{stage}", out, us)) for stage, us in stages]
    return Prepared(run=run, stages=parts or [Stage("attention", run)], out=out)


def test_a_stage_that_runs_once_per_chunk_is_the_sum_of_its_runs():
    chunks = [("attention", 5.0), ("reduction", 2.0), ("attention", 4.0), ("reduction", 3.0)]
    stages = [("metadata", 1.0), *chunks]
    timing = measure({"a": candidate(stages=stages)}, 7, "graph", "cold", timer=FakeTimer(), warm_up_s=0)["a"]
    assert timing.stages_us == {"metadata": [1.0] * 7, "attention": [9.0] * 7, "reduction": [5.0] * 7}


def test_every_candidate_gets_every_sample_and_its_stages():
    stages = [("search", 2.0), ("metadata", 1.0), ("attention", 5.0)]
    timing = measure({"a": candidate(stages=stages)}, 7, "graph", "cold", timer=FakeTimer(), warm_up_s=0)["a"]
    assert timing.complete_us == [10.0] * 7
    assert timing.stages_us == {"search": [2.0] * 7, "metadata": [1.0] * 7, "attention": [5.0] * 7}
    assert timing.sm_clock_mhz == [1500.0] * 7
    assert timing.throttle == "power cap in 7 rounds"
    assert timing.failure is None


def test_a_candidate_that_cannot_be_cut_reports_its_complete_time_as_attention():
    timer = FakeTimer()
    timing = measure({"a": candidate()}, 3, "eager", "warm", timer=timer, warm_up_s=0)["a"]
    assert timing.stages_us == {"attention": timing.complete_us}
    assert len(timer.flushes) == 3, "no second run is needed for it"


def test_candidates_are_interleaved_in_a_seeded_random_order():
    def order(seed):
        timer = FakeTimer()
        measure(
            {name: candidate(name) for name in "abc"},
            20,
            "eager",
            "cold",
            timer=timer,
            warm_up_s=0,
            seed=seed,
        )
        return [tuple(timer.order[i : i + 3]) for i in range(0, 60, 3)]

    first = order(1)
    assert all(sorted(one) == ["a", "b", "c"] for one in first)
    assert len(set(first)) > 3
    assert first == order(1) != order(2)


def test_the_l2_state_reaches_every_sample():
    for l2 in ("cold", "warm"):
        timer = FakeTimer()
        measure({"a": candidate()}, 2, "eager", l2, timer=timer, warm_up_s=0)
        assert timer.flushes == [l2 == "cold"] * 2


def test_one_prepared_call_may_enter_twice_as_an_a_a_pair():
    prepared = candidate()
    timings = measure({"a": prepared, "a#A/A": prepared}, 4, "graph", "cold", timer=FakeTimer(), warm_up_s=0)
    assert [len(t.complete_us) for t in timings.values()] == [4, 4]


def test_a_failed_graph_capture_is_a_failure_and_never_an_eager_time():
    bad, good = candidate("bad"), candidate("good")
    bad.run.uncapturable = True
    timings = measure({"bad": bad, "good": good}, 3, "graph", "cold", timer=FakeTimer(), warm_up_s=0)
    assert timings["bad"].complete_us == [] and "capturing" in timings["bad"].failure
    assert len(timings["good"].complete_us) == 3


def test_a_graph_that_captured_nothing_is_a_failure():
    class Forgetful(FakeTimer):
        def bind(self, run, graph):
            return lambda: None

    timing = measure({"a": candidate()}, 3, "graph", "cold", timer=Forgetful(), warm_up_s=0)["a"]
    assert "does not write" in timing.failure


def test_a_candidate_that_breaks_half_way_leaves_no_samples_and_the_rest_goes_on():
    timings = measure(
        {"bad": candidate("bad", dies_at=3), "good": candidate("good")},
        5, "eager", "cold", timer=FakeTimer(), warm_up_s=0,
    )  # fmt: skip
    assert timings["bad"].failure == "boom"
    assert timings["bad"].complete_us == []
    assert len(timings["good"].complete_us) == 5


def test_a_lost_device_ends_the_measurement():
    with pytest.raises(MeasurementError, match=r"device was lost while timing bad.*illegal memory access"):
        measure(
            {"bad": candidate("bad", dies_at=2)}, 5, "eager", "cold", timer=FakeTimer(lost=True), warm_up_s=0
        )


@pytest.mark.parametrize(
    "samples, mode, l2", [(0, "graph", "cold"), (1, "lazy", "cold"), (1, "graph", "hot")]
)
def test_meaningless_arguments_are_refused(samples, mode, l2):
    with pytest.raises(MeasurementError, match="Cannot measure"):
        measure({"a": candidate()}, samples, mode, l2, timer=FakeTimer())


def test_progress_is_told_after_each_round():
    seen = []
    measure({"a": candidate()}, 3, "eager", "warm", timer=FakeTimer(), warm_up_s=0, on_round=seen.append)
    assert seen == [1, 2, 3]


def test_the_cpu_timer_measures_real_time_and_knows_no_graphs():
    timer = CpuTimer(flush_bytes=1 << 16)
    wait = random.Random(0).random() * 0.002 + 0.002
    import time

    (taken,) = timer.sample([lambda: time.sleep(wait)], cold=True)
    assert wait * 1e6 <= taken < wait * 1e6 + 50_000
    with pytest.raises(MeasurementError, match="no CUDA graphs on the CPU"):
        timer.bind(lambda: None, graph=True)


def test_graph_mode_on_the_cpu_fails_closed():
    timing = measure({"a": candidate()}, 2, "graph", "cold", timer=CpuTimer(1 << 16))["a"]
    assert "no CUDA graphs" in timing.failure and timing.complete_us == []


def test_an_unknown_device_is_refused():
    with pytest.raises(MeasurementError, match="expected cuda or cpu"):
        timer_for(torch.device("meta"))


def test_where_the_clock_is_free_one_run_yields_the_complete_call_and_its_stages():
    timer = FakeTimer()
    timer.nested = True
    prepared = candidate(stages=[("search", 2.0), ("attention", 5.0)])
    timings = measure({"a": prepared, "b": candidate("b")}, 3, "eager", "cold", timer=timer, warm_up_s=0)
    assert timings["a"].stages_us == {"search": [2.0] * 3, "attention": [5.0] * 3}
    assert timings["a"].complete_us == [7.0] * 3
    assert timings["b"].complete_us == [10.0] * 3
    assert prepared.run.calls == 0
