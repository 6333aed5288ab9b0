"""Measuring the ceilings: one probe per resource, CUDA events around each, the median of a few runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from pwbench import device as machine
from pwbench.ceilings import Ceilings, Rates, implausible
from pwbench.errors import MeasurementError
from pwbench.timing import one_line

SOURCE = "ceilings.cu"
PAGE_BYTES, PAGE_COUNT = 32768, 512  # 16 MiB: stays in L2
STREAM_SHARED = 6 * PAGE_BYTES + 1024
STREAM_THREADS, MATRIX_THREADS, EXP_THREADS, EXP_CHAINS = 64, 256, 512, 8
MATRIX_SHARED = 2 * 64 * 128 + 128 * 128 + 1024
MATRIX_FLOPS = 2 * 64 * 128 * 128
"""Of one warpgroup in one round."""
RUNS = 5

Probe = Callable[["_Bench"], float]


@dataclass
class Found:
    """What `measure` found.

    Attributes:
        ceilings: the rates; one whose probe could not run is None.
        missing: rate -> why its probe could not run.
        clocks: rate -> SM clock in MHz right after its probe.
    """

    ceilings: Ceilings
    missing: dict[str, str]
    clocks: dict[str, float | None]


def measure(device: torch.device, on_probe: Callable[[str], None] = lambda name: None) -> Found:
    """Run every probe on a CUDA device; takes a few seconds and half a gigabyte of its memory.

    Args:
        device: a CUDA device, best with nobody else on it.
        on_probe: called with the name of each probe before it runs.

    Raises:
        MeasurementError: not a CUDA device, or a probe reads more than the chip can do.
    """
    if device.type != "cuda":
        raise MeasurementError(
            f"Ceilings are measured on a GPU, not on {device.type}; run this on the GPU's host."
        )
    bench = _Bench(device)
    values: dict[str, float] = {}
    missing: dict[str, str] = {}
    clocks: dict[str, float | None] = {}
    for name, probe in PROBES.items():
        on_probe(name)
        try:
            values[name] = probe(bench)
        except MeasurementError as error:
            missing[name] = str(error)
        except Exception as error:  # a build of torch without FP8 products, too little memory
            missing[name] = f"{type(error).__name__}: {one_line(error)}"
        clocks[name] = machine.read_sensors(device.index or 0)[0]
        torch.cuda.empty_cache()
    rates = Rates(**values)
    wrong = implausible(rates)
    if wrong:
        raise MeasurementError(f"The probes cannot be right: {'; '.join(wrong)}. Nothing was stored.")
    others = machine.foreign_processes(device.index or 0)
    provenance = {
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "sm_clock_mhz": clocks,
        "missing": missing,
        "foreign_processes": [f"{one.name} (pid {one.pid})" for one in others],
        **machine.provenance(device),
    }
    return Found(Ceilings(machine.info(device).name, rates, "measured", provenance), missing, clocks)


class _Bench:
    """The device, its page pool and a stopwatch."""

    def __init__(self, device: torch.device):
        self.device = device
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        # Random bytes: copies of zeros draw less power.
        self.pages = torch.randint(256, (PAGE_COUNT * PAGE_BYTES,), dtype=torch.uint8, device=device)
        self.sink = torch.zeros(4096, device=device)

    def seconds(self, run: Callable[[], Any], spin_cycles: int = 100_000) -> float:
        """Median duration of ``run`` on the device, after one run that does not count.

        Args:
            spin_cycles: how long the device is kept busy first, so that the host is ahead of it and what
                launching costs the host stays outside.
        """
        run()
        taken = []
        for _ in range(RUNS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(spin_cycles)
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize(self.device)
            taken.append(begin.elapsed_time(end) * 1e-3)
        return statistics.median(taken)

    def launch(self, name: str, grid: int, block: int, rounds: int, shared: int = 0) -> Callable[[], None]:
        """A bound launch of one of our probe kernels."""
        from pwbench import kernels

        params = kernels.pack(
            kernels.params_dtype(SOURCE, "ProbeParams"),
            pages=self.pages,
            sink=self.sink,
            page_count=PAGE_COUNT,
            rounds=rounds,
        )
        launch: Callable[[], None] = kernels.get(SOURCE, name, shared=shared).bind((grid,), block, params)
        return launch


def _copy_bandwidth(bench: _Bench) -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device=bench.device).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / bench.seconds(lambda: target.copy_(source))


def _l2_to_shared(bench: _Bench) -> float:
    rounds = 2000
    run = bench.launch("l2_to_shared", bench.sms, STREAM_THREADS, rounds, STREAM_SHARED)
    return bench.sms * rounds * PAGE_BYTES / bench.seconds(run)


def _l2_to_shared_multicast(bench: _Bench) -> float:
    rounds, blocks = 4000, bench.sms // 2 * 2
    run = bench.launch("l2_to_shared_multicast", blocks, STREAM_THREADS, rounds, STREAM_SHARED)
    return blocks * rounds * PAGE_BYTES / bench.seconds(run)


def _fp8_matrix_rate(bench: _Bench) -> float:
    # Long enough (tens of milliseconds) that the power limit is felt, as it is in a real chunk.
    rounds, blocks = 50_000, 2 * bench.sms
    run = bench.launch("fp8_matrix_rate", blocks, MATRIX_THREADS, rounds, MATRIX_SHARED)
    return blocks * (MATRIX_THREADS // 128) * rounds * MATRIX_FLOPS / bench.seconds(run)


def _fp8_product(bench: _Bench) -> float:
    a = torch.randn(8192, 8192, device=bench.device).to(torch.float8_e4m3fn)
    b = torch.randn(8192, 8192, device=bench.device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=bench.device)

    def run() -> None:
        for _ in range(10):
            torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return 10 * 2 * 8192**3 / bench.seconds(run)


def _bf16_product(bench: _Bench) -> float:
    a, b = (torch.randn(8192, 8192, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def run() -> None:
        for _ in range(10):
            torch.mm(a, b, out=out)

    return 10 * 2 * 8192**3 / bench.seconds(run)


def _exp2_rate(bench: _Bench) -> float:
    rounds, blocks = 20_000, 4 * bench.sms
    run = bench.launch("exp2_rate", blocks, EXP_THREADS, rounds)
    return blocks * EXP_THREADS * EXP_CHAINS * rounds / bench.seconds(run)


def _launch_gap(bench: _Bench, graph: bool) -> float:
    """Microseconds that one more small kernel costs: many against few."""
    run = bench.launch("empty_kernel", bench.sms, 128, 1)

    def repeated(count: int) -> Callable[[], None]:
        def launches() -> None:
            for _ in range(count):
                run()

        if not graph:
            return launches
        launches()
        torch.cuda.synchronize(bench.device)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            launches()
        return captured.replay

    few, many, spin = 10, 210, 8_000_000
    return (bench.seconds(repeated(many), spin) - bench.seconds(repeated(few), spin)) / (many - few) * 1e6


PROBES: dict[str, Probe] = {
    "hbm": _copy_bandwidth,
    "l2": _l2_to_shared,
    "l2_multicast": _l2_to_shared_multicast,
    "fp8": _fp8_matrix_rate,
    "fp8_product": _fp8_product,
    "bf16_product": _bf16_product,
    "exp2": _exp2_rate,
    "launch_us": lambda bench: _launch_gap(bench, graph=True),
    "launch_eager_us": lambda bench: _launch_gap(bench, graph=False),
}
"""Field of `pwbench.ceilings.Rates` -> its probe."""
