"""What this machine is: the device that runs, its limits, its clocks and who else uses it."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pwbench import __version__
from pwbench.errors import InputError, MeasurementError

_NVML_CLOCK_SM = 1
# NVML's clock event reasons that slow a GPU down. Idle and application clocks are no disturbance.
_THROTTLE_BITS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True)
class DeviceInfo:
    """The device that runs. Sizes in bytes, clocks in MHz; None where nobody tells.

    Attributes:
        kind: ``cuda`` or ``cpu``.
        name: the GPU's name, or the processor's.
        driver: GPU driver version.
        cuda: CUDA runtime that torch was built for.
        capability: compute capability, such as ``9.0``.
        sm_count, l2_bytes, memory_bytes, max_sm_clock_mhz: the GPU's.
    """

    kind: str
    name: str
    driver: str | None = None
    cuda: str | None = None
    capability: str | None = None
    sm_count: int | None = None
    l2_bytes: int | None = None
    memory_bytes: int | None = None
    max_sm_clock_mhz: float | None = None


@dataclass(frozen=True)
class ForeignProcess:
    """Somebody else on our GPU."""

    pid: int
    name: str
    memory_bytes: int | None


def resolve(choice: str) -> torch.device:
    """The torch device for ``auto``, ``cuda`` or ``cpu``; auto takes the GPU when torch sees one.

    Raises:
        MeasurementError: cuda was asked for and there is none.
        InputError: another word.
    """
    if choice not in ("auto", "cuda", "cpu"):
        raise InputError(f"The device is {choice!r}, expected auto, cuda or cpu.")
    if choice == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if choice == "auto":
        return torch.device("cpu")
    built = torch.version.cuda
    why = f"torch {torch.__version__} is built for CUDA {built} but sees no GPU" if built else (
        f"torch {torch.__version__} is a build without CUDA"
    )  # fmt: skip
    raise MeasurementError(f"No CUDA device can be used: {why}; `pwbench doctor` says how to mend it.")


def info(device: torch.device) -> DeviceInfo:
    """Facts about ``device``."""
    if device.type != "cuda":
        return DeviceInfo("cpu", _cpu_name())
    properties = torch.cuda.get_device_properties(device)
    handle = _handle(device.index or 0)
    driver = _ask("nvmlSystemGetDriverVersion") if handle else None
    clock = _ask("nvmlDeviceGetMaxClockInfo", handle, _NVML_CLOCK_SM) if handle else None
    return DeviceInfo(
        "cuda",
        properties.name,
        driver,
        torch.version.cuda,
        f"{properties.major}.{properties.minor}",
        properties.multi_processor_count,
        getattr(properties, "L2_cache_size", None),
        properties.total_memory,
        float(clock) if clock else None,
    )


def read_sensors(index: int) -> tuple[float | None, tuple[str, ...]]:
    """SM clock in MHz and the reasons why it is not higher, right now, of torch's device ``index``."""
    handle = _handle(index)
    if handle is None:
        return None, ()
    clock = _ask("nvmlDeviceGetClockInfo", handle, _NVML_CLOCK_SM)
    bits = _ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:  # older drivers know it by its older name
        bits = _ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    reasons = tuple(text for bit, text in _THROTTLE_BITS.items() if (bits or 0) & bit)
    return (float(clock) if clock is not None else None), reasons


def foreign_processes(index: int) -> list[ForeignProcess]:
    """Other processes that hold a context on torch's device ``index``."""
    handle = _handle(index)
    running = (_ask("nvmlDeviceGetComputeRunningProcesses", handle) or []) if handle else []
    ours_listed = any(process.pid == os.getpid() for process in running)
    hidden = [process for process in running if not Path(f"/proc/{process.pid}").exists()]
    if not ours_listed and len(hidden) == 1 and torch.cuda.is_initialized():
        # In a container NVML names us by the host's process id, which nothing here can look up.
        running = [process for process in running if process.pid != hidden[0].pid]
    return [
        ForeignProcess(process.pid, _process_name(process.pid), process.usedGpuMemory)
        for process in running
        if process.pid != os.getpid()
    ]


def provenance(device: torch.device) -> dict[str, Any]:
    """Everything that says what measured: for a results file's metadata."""
    return {
        "pwbench": __version__,
        "commit": commit(),
        "device": asdict(info(device)),
        "versions": versions(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": os.cpu_count(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def versions() -> dict[str, str]:
    """Versions of the libraries that can change a measurement; absent ones are left out."""
    found = {}
    for package in ("torch", "numpy", "cupy-cuda13x", "cupy-cuda12x", "flashinfer-python", "triton"):
        version = version_of(package)
        if version:
            found[package] = version
    return found


def version_of(package: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cupy_version() -> str | None:
    """Installed version of CuPy under whichever name it came, without importing it."""
    names = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
    return next((version for version in map(version_of, names) if version), None)


@cache
def commit() -> str:
    """``PWBENCH_COMMIT`` where it is set: whoever copies the code to another machine knows better than a git
    there. Else the checkout's commit; where the code differs from it, ``-dirty-`` and a hash of the
    difference, so that two measurements of one name measured one program. Empty outside a checkout."""
    if given := os.environ.get("PWBENCH_COMMIT"):
        return given
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD").strip()
        changed = _git(root, "diff", "HEAD", "--no-ext-diff", "--", "pwbench", "kernels")
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{head}-dirty-{hashlib.sha256(changed.encode()).hexdigest()[:6]}" if changed else head


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout


# NVML -------------------------------------------------------------------------------------------


@cache
def _handle(index: int) -> Any:
    """The NVML handle of torch's device ``index``, or None where NVML cannot be used."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    # torch counts the visible devices, NVML all of them: only the UUID means the same to both.
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
    except Exception:
        alone = _ask("nvmlDeviceGetCount") == 1
        return _ask("nvmlDeviceGetHandleByIndex", 0) if alone else None


def _ask(function: str, *arguments: Any) -> Any:
    try:
        import pynvml

        answer = getattr(pynvml, function)(*arguments)
    except Exception:
        return None  # virtualised and older drivers do not answer every question
    return answer.decode() if isinstance(answer, bytes) else answer


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "unknown"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
