"""Looking this machine over: what works, what is missing, and the command that mends it.

Every check stands alone and survives a missing package, so that the doctor can say so.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pwbench import __version__

STATES = ("ok", "note", "problem")
"""``note``: something optional is absent. ``problem``: something that should work does not."""

BASE = (
    "click", "filelock", "jinja2", "junitparser", "matplotlib", "numpy", "pandas", "pyarrow", "rich",
    "safetensors", "scipy", "torch",
)  # fmt: skip
TRANSFORMERS = "5.17."


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        section: what it is about.
        state: one of `STATES`.
        text: what was seen.
        mend: the command or step that mends it; empty when nothing needs mending.
    """

    section: str
    state: str
    text: str
    mend: str = ""


def examine(captures: Sequence[str | Path] = ("captures",), deep: bool = True) -> Iterator[Finding]:
    """Every finding, in the order of the sections.

    Args:
        captures: folders whose captures are looked after.
        deep: prove every capture rather than only reading its manifest.
    """
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _packages,
        _torch_and_gpu,
        _gpu_state,
        _cupy,
        _compiler,
        _variants,
        _model_libraries,
        _ceilings,
        _storage,
        lambda: _captures(captures, deep),
    ]
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # a check that breaks is itself a finding
            name = getattr(check, "__name__", "check").strip("_")
            yield Finding(name, "problem", f"The check broke: {type(error).__name__}: {error}")


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", "ok", f"Python {version}, pwbench {__version__} at {Path(__file__).parent}")


def _packages() -> Iterator[Finding]:
    missing = [name for name in BASE if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding(
            "packages", "problem", f"Missing: {', '.join(missing)}", "pip install --upgrade pwbench"
        )
    else:
        yield Finding("packages", "ok", f"All {len(BASE)} base packages are installed")


def _torch_and_gpu() -> Iterator[Finding]:
    import torch

    driver, gpus = _nvml_gpus()
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
    text = f"torch {torch.__version__}, built for {built}"
    if gpus and not torch.version.cuda:
        yield Finding(
            "torch", "problem", f"{text}; this machine has {gpus[0]}", "pip install --force-reinstall torch"
        )
    elif gpus and not torch.cuda.is_available():
        yield Finding(
            "torch", "problem", f"{text}, does not reach {gpus[0]} through driver {driver}",
            "install a driver for that CUDA, or a torch built for an older one; check CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    else:
        yield Finding("torch", "ok", text)
    if not torch.cuda.is_available():
        if not gpus:
            yield Finding(
                "gpu", "note", "No NVIDIA GPU: replay runs the CPU variants, real counters, CPU times"
            )
        return
    from pwbench.device import info

    seen = info(torch.device("cuda", torch.cuda.current_device()))
    text = (
        f"{seen.name}, compute capability {seen.capability}, {seen.sm_count} SMs, "
        f"{(seen.memory_bytes or 0) >> 30} GiB, driver {seen.driver}, "
        f"up to {seen.max_sm_clock_mhz or 0:.0f} MHz"
    )
    if seen.capability == "9.0":
        yield Finding("gpu", "ok", text)
    else:
        yield Finding("gpu", "note", f"{text}; the kernels are for 9.0 (H100, H200)", "run on a Hopper GPU")


def _gpu_state() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        return
    from pwbench.device import foreign_processes, read_sensors

    index = torch.cuda.current_device()
    clock, throttle = read_sensors(index)
    if clock is None:
        yield Finding(
            "clocks", "note", "NVML does not tell the SM clock; rows will lack it", "pip install nvidia-ml-py"
        )
    elif throttle:
        yield Finding(
            "clocks", "note", f"SM clock {clock:.0f} MHz, held down by: {', '.join(throttle)}",
            "let the GPU cool down, or look at: nvidia-smi -q -d PERFORMANCE,POWER",
        )  # fmt: skip
    else:
        yield Finding("clocks", "ok", f"SM clock {clock:.0f} MHz now, nothing holds it down")
    others = foreign_processes(index)
    for one in others:
        size = f", {one.memory_bytes >> 20} MiB" if one.memory_bytes else ""
        yield Finding(
            "processes", "problem", f"{one.name} (pid {one.pid}{size}) uses this GPU; times mean nothing",
            "wait for it, or choose another GPU: CUDA_VISIBLE_DEVICES=N pwbench ...",
        )  # fmt: skip
    if not others:
        yield Finding("processes", "ok", "Nobody else is on this GPU")


def _cupy() -> Iterator[Finding]:
    import torch

    from pwbench.device import cupy_version

    version, gpu = cupy_version(), torch.cuda.is_available()
    major = (torch.version.cuda or "13").split(".")[0]
    command = f"pip install 'pwbench[cuda{major if major in ('12', '13') else '13'}]'"
    if version is None:
        state = "problem" if gpu else "note"
        yield Finding("cupy", state, "CuPy is not installed; the CUDA variants cannot run", command)
        return
    try:
        importlib.import_module("cupy")
    except Exception as error:
        yield Finding("cupy", "problem", f"CuPy {version} does not import: {error}", command)
        return
    yield Finding("cupy", "ok", f"CuPy {version}")


def _compiler() -> Iterator[Finding]:
    from pwbench import _compilers, kernels
    from pwbench.errors import MeasurementError

    try:
        compiler = _compilers.find()
        yield Finding("compiler", "ok", f"{compiler.version}; cubins are kept in {kernels.cache_dir()}")
    except MeasurementError as error:
        state = "problem" if _has_gpu() else "note"
        yield Finding("compiler", state, str(error), "pip install nvidia-cuda-nvrtc")
    cache = kernels.cache_dir()
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        yield Finding(
            "compiler", "problem",
            f"Cubins cannot be kept in {cache}: {place} is no folder that can be written",
            "export PWBENCH_CACHE=<a folder that can be written>",
        )  # fmt: skip
    try:
        yield Finding("kernels", "ok", f"{len(kernels.programs())} CUDA programs in {kernels.source_dir()}")
    except MeasurementError as error:
        yield Finding("kernels", "problem", str(error), "pip install --force-reinstall pwbench")


def _variants() -> Iterator[Finding]:
    from pwbench import variants
    from pwbench.device import resolve

    device = resolve("auto")
    for name in variants.names():
        variant = variants.get(name)
        reason = variant.unavailable(device)
        if reason is None:
            yield Finding("variants", "ok", f"{name}: {variant.summary}")
        else:
            yield Finding("variants", "note", f"{name}: {reason}", _command_in(reason))
    if _has_gpu() and importlib.util.find_spec("flashinfer") and not importlib.util.find_spec("cutlass"):
        yield Finding(
            "variants", "note", "FlashInfer's CuTe kernels lack their compiler; its Cake kernels run",
            "pip install nvidia-cutlass-dsl==4.8.1",
        )  # fmt: skip


def _model_libraries() -> Iterator[Finding]:
    from pwbench.device import version_of

    version = version_of("transformers")
    command = "pip install 'pwbench[transformers]'"
    if version is None:
        yield Finding(
            "models", "note", "transformers is not installed; `capture transformers` needs it", command
        )
    elif not version.startswith(TRANSFORMERS):
        yield Finding(
            "models", "problem", f"transformers {version}; the hooks are made for {TRANSFORMERS}x", command
        )
    else:
        yield Finding("models", "ok", f"transformers {version}")


def _ceilings() -> Iterator[Finding]:
    import torch

    from pwbench import ceilings, device

    if not torch.cuda.is_available():
        return
    gpu = device.info(torch.device("cuda", torch.cuda.current_device())).name
    known = ceilings.find(gpu)
    if known is None:
        yield Finding(
            "ceilings", "note", f"None are stored for the {gpu}; rows lack a roofline", "pwbench ceilings"
        )
    elif known.source != "measured":
        yield Finding("ceilings", "note", f"The {gpu}'s are the documented ones", "pwbench ceilings")
    else:
        yield Finding(
            "ceilings", "ok", f"Measured on {known.provenance.get('created_utc', 'an unknown day')}"
        )


def _storage() -> Iterator[Finding]:
    for folder in dict.fromkeys([Path.cwd(), Path(tempfile.gettempdir())]):
        free = shutil.disk_usage(folder).free
        if not os.access(folder, os.W_OK):
            yield Finding(
                "storage", "problem", f"{folder} cannot be written", f"chmod u+w {folder}, or change there"
            )
        elif free < 1 << 30:
            yield Finding("storage", "problem", f"{folder} has {free >> 20} MiB left", "free some space")
        else:
            yield Finding("storage", "ok", f"{folder} has {free >> 30} GiB left")


def _captures(folders: Sequence[str | Path], deep: bool) -> Iterator[Finding]:
    from pwbench import capture
    from pwbench.errors import CaptureError

    try:
        paths = capture.discover([str(folder) for folder in folders])
    except CaptureError as error:
        yield Finding("captures", "note", str(error), "pwbench capture synthetic -h, or run in a checkout")
        return
    sick = 0
    for path in paths:
        try:
            capture.load(path)
            wrong = [check for check in capture.verify(path) if not check.ok] if deep else []
        except CaptureError as error:
            sick += 1
            yield Finding("captures", "problem", str(error), f"git checkout -- {path}, or record it again")
            continue
        if wrong:
            sick += 1
            first = wrong[0]
            yield Finding(
                "captures", "problem",
                f"{path} fails {first.name!r}: {first.seen}, expected {first.expected}",
                f"pwbench verify {path}, then restore it or record it again",
            )  # fmt: skip
    if not sick:
        yield Finding(
            "captures", "ok", f"{len(paths)} captures, {'every check holds' if deep else 'all readable'}"
        )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _nvml_gpus() -> tuple[str | None, list[str]]:
    """Driver and GPUs as the driver itself sees them, whatever torch was built for."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        driver = pynvml.nvmlSystemGetDriverVersion()
    except Exception:
        return None, []
    text = [name.decode() if isinstance(name, bytes) else name for name in names]
    return (driver.decode() if isinstance(driver, bytes) else driver), text


def _command_in(reason: str) -> str:
    """The pip command that a reason names, if it names one."""
    if "pip install" not in reason:
        return ""
    return "pip install" + reason.split("pip install", 1)[1].rstrip(" .")
