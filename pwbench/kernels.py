"""CUDA sources to loaded kernels: compile for sm_90a, cache on disk, load through CuPy.

    compiled = compile("attention.cu", {"ACCURATE": 1})     # anywhere, without a GPU
    module = load("attention.cu", {"ACCURATE": 1})          # a cupy.RawModule, on an sm_90 GPU

The cubin is made here rather than by CuPy, because CuPy asks NVRTC for ``sm_90`` where the kernels
need ``sm_90a``. A cache entry is a directory named by the hash of everything the cubin depends on;
it is built beside its final name, synced and renamed whole, so a killed build leaves nothing behind
that a later one could mistake for a cubin.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from pwbench import _compilers, launch
from pwbench._compilers import Entry
from pwbench.errors import MeasurementError
from pwbench.launch import Kernel, Launch, pack, struct_fields, tensor_map

__all__ = [
    "CompiledKernel",
    "Entry",
    "Kernel",
    "Launch",
    "Program",
    "build_all",
    "cache_dir",
    "compile",
    "get",
    "load",
    "pack",
    "params_dtype",
    "programs",
    "require_gpu",
    "source_dir",
    "source_path",
    "struct_fields",
    "tensor_map",
]

Defines = Mapping[str, int | str]
MAX_SHARED = 232_448
"""Bytes of shared memory that one block may opt in to on compute capability 9.0."""


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled source.

    Attributes:
        source: name below the kernel folder.
        defines: as given to `compile`.
        cubin: the sm_90a cubin in the cache.
        entries: resources of every entry function, in the order ptxas met them.
        warnings: lines of the log that cost speed or correctness, serialised wgmma above all.
        log: everything the compiler said.
        compiler: its name and version.
    """

    source: str
    defines: dict[str, int | str]
    cubin: Path
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...]
    log: str
    compiler: str


@dataclass(frozen=True)
class Program:
    """One line of ``programs.toml``: a source, its defines and what it may cost.

    Attributes:
        spill_bytes: spill stores that one entry may have; the build fails above it.
        shared: dynamic shared memory of its launch in bytes, for the report.
    """

    source: str
    defines: dict[str, int | str] = field(default_factory=dict)
    spill_bytes: int = 0
    shared: int = 0


# Sources --------------------------------------------------------------------------------------


def source_dir() -> Path:
    """The folder of the sm_90 sources: ``PWBENCH_KERNELS``, the checkout's or the installed wheel's.

    Raises:
        MeasurementError: none of them is there.
    """
    package = Path(__file__).resolve().parent
    override = os.environ.get("PWBENCH_KERNELS")
    usual = [package.parent / "kernels/sm90", package / "_kernels/sm90"]
    candidates = [Path(override)] if override else usual
    for folder in candidates:
        if folder.is_dir():
            return folder
    looked = " and ".join(map(str, candidates))
    raise MeasurementError(f"The CUDA sources are missing: looked in {looked}. Reinstall pwbench.")


def source_path(source: str) -> Path:
    """The file of one source, such as ``"attention.cu"``.

    Raises:
        MeasurementError: there is no such source; the message lists those there are.
    """
    path = source_dir() / source
    if not path.is_file():
        there = ", ".join(sorted(file.name for file in source_dir().glob("*.cu"))) or "none"
        raise MeasurementError(f"No CUDA source is called {source!r} in {source_dir()}; there are {there}.")
    return path


def params_dtype(source: str, name: str) -> np.dtype:
    """The params struct ``name`` of ``source`` as a numpy dtype laid out as the compiler does.

    Raises:
        MeasurementError: no such source or struct, or a field of no known size.
    """
    return launch.params_dtype(source_path(source), name)


def programs() -> list[Program]:
    """Every program that pwbench ships: the lines of ``programs.toml`` and, with no spill allowed,
    every ``.cu`` that it does not name."""
    folder = source_dir()
    listing = folder / "programs.toml"
    table = tomllib.loads(listing.read_text()) if listing.exists() else {}
    listed = [Program(**line) for line in table.get("program", [])]
    named = {program.source for program in listed}
    return listed + [Program(file.name) for file in sorted(folder.glob("*.cu")) if file.name not in named]


# Compiling ------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Where cubins are kept: ``PWBENCH_CACHE``, else ``pwbench`` in the XDG cache folder."""
    if os.environ.get("PWBENCH_CACHE"):
        return Path(os.environ["PWBENCH_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pwbench"


def compile(source: str, defines: Defines | None = None) -> CompiledKernel:
    """Compile one source for sm_90a, or take it from the cache. Needs no GPU.

    Args:
        source: file name below `source_dir`.
        defines: macros, ``{"WINDOW": 64}`` becomes ``-DWINDOW=64``.

    Raises:
        MeasurementError: no such source, no compiler, or the compiler's own complaint.
    """
    path, macros = source_path(source), dict(defines or {})
    compiler = _compilers.find()
    options = [f"-D{name}={value}" for name, value in sorted(macros.items())]
    place = cache_dir() / "kernels" / f"{path.stem}-{_key(path, options, compiler.version)}"
    if not (place / "build.json").exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{place}.lock"):
            if not (place / "build.json").exists():
                _build(compiler, path, options, place)
    built = json.loads((place / "build.json").read_text())
    return CompiledKernel(
        source=source,
        defines=macros,
        cubin=place / "kernel.cubin",
        entries=tuple(Entry(**entry) for entry in built["entries"]),
        warnings=tuple(built["warnings"]),
        log=built["log"],
        compiler=compiler.version,
    )


def _key(path: Path, options: list[str], compiler: str) -> str:
    digest = hashlib.sha256()
    for file in _with_headers(path):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update(json.dumps([options, _compilers.FLAGS, _compilers.ARCH, compiler]).encode())
    return digest.hexdigest()[:24]


def _with_headers(path: Path) -> list[Path]:
    """The source and every header of ours it includes, each once.

    The compiler's own headers come with its version, which the key holds too.
    """
    found, waiting = [], [path]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.append(file)
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(), re.M):
            header = (file.parent / name).resolve()
            if header.is_file():
                waiting.append(header)
    return found


def _build(compiler: _compilers.Compiler, path: Path, options: list[str], place: Path) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        log = compiler.run(path, options, partial / "kernel.cubin")
        entries = [asdict(entry) for entry in _compilers.parse_log(log)]
        built = {"entries": entries, "warnings": _compilers.warnings(log), "log": log}
        (partial / "build.json").write_text(json.dumps(built))
        for name in ("kernel.cubin", "build.json", "."):
            _sync(partial / name)
        shutil.rmtree(place, ignore_errors=True)
        os.replace(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Loading --------------------------------------------------------------------------------------


def require_gpu(device: Any = None) -> None:
    """Check that the kernels can run on ``device`` (default: the current one).

    Raises:
        MeasurementError: no CUDA in torch, no GPU, no CuPy, or a GPU that is not compute capability 9.0.
    """
    import torch

    if not torch.cuda.is_available():
        raise MeasurementError(
            "No CUDA GPU is visible to torch; the kernels need one of compute capability 9.0 (H100, H200). "
            "Use --device cpu for the reference paths."
        )
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        name = torch.cuda.get_device_name(device)
        raise MeasurementError(
            f"{name} has compute capability {major}.{minor}; the kernels run on 9.0 (H100, H200) alone."
        )
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        raise MeasurementError(
            f"CuPy cannot be imported ({error}); it loads the kernels. Install it: pip install cupy-cuda13x."
        ) from None


def load(source: str, defines: Defines | None = None) -> Any:
    """The compiled source as a ``cupy.RawModule`` on the current torch device.

    Loaded once per process: a source edited afterwards is not looked at again.

    Raises:
        MeasurementError: as `require_gpu` and `compile`.
    """
    import torch

    require_gpu()
    macros = tuple(sorted((defines or {}).items()))
    compiler = os.environ.get("PWBENCH_COMPILER", "")
    return _load(source_path(source), macros, compiler, torch.cuda.current_device())


@cache
def _load(path: Path, macros: tuple[tuple[str, int | str], ...], compiler: str, device: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        return cupy.RawModule(path=str(compile(path.name, dict(macros)).cubin))


def get(source: str, name: str, defines: Defines | None = None, *, shared: int = 0) -> Kernel:
    """One entry function, ready to be bound to a grid and arguments (see `pwbench.launch.Kernel`).

    Args:
        name: the ``extern "C"`` symbol.
        shared: dynamic shared memory of its launches, bytes.

    Raises:
        MeasurementError: as `load`; no such entry; more shared memory than the GPU gives one block.
    """
    module = load(source, defines)
    if shared:
        limit = _shared_limit()
        if shared > limit:
            raise MeasurementError(
                f"{name} of {source} needs {shared} bytes of dynamic shared memory, "
                f"this GPU gives a block {limit}."
            )
    try:
        function = module.get_function(name)
        if shared > 48 * 1024:
            function.max_dynamic_shared_size_bytes = shared
        handle = int(function.kernel.ptr)
    except Exception as error:
        raise MeasurementError(f"Entry {name} of {source} cannot be loaded: {error}.") from error
    return Kernel(name, handle, shared, keep=(module, function))


def _shared_limit() -> int:
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(getattr(properties, "shared_memory_per_block_optin", MAX_SHARED))


# Building everything --------------------------------------------------------------------------


def build_all(echo: Callable[[str], Any] = print) -> list[str]:
    """Compile every program, one aligned line per entry function, and check it against its budget.

    Returns:
        one sentence per complaint: spills above the budget, serialised wgmma, too much shared memory,
        or a source that does not compile. Empty when all is well.
    """
    shipped = programs()
    compiler, complaints = _compilers.find(), []
    echo(f"{len(shipped)} programs of {source_dir()} for {_compilers.ARCH}, {compiler.version}")
    echo(f"{'program':<44} {'entry':<32} {'registers':>9} {'spills':>7} {'stack':>6} {'shared':>7}")
    for program in shipped:
        defines = " ".join(f"{name}={value}" for name, value in program.defines.items())
        title = f"{program.source} {defines}".strip()
        try:
            compiled = compile(program.source, program.defines)
        except MeasurementError as error:
            complaints.append(f"{title}: {error}")
            echo(f"{title:<44} does not compile")
            continue
        for entry in compiled.entries:
            shared = entry.shared + program.shared
            echo(
                f"{title:<44} {entry.name:<32} {entry.registers:>9} {entry.spill_stores:>7} "
                f"{entry.stack:>6} {shared:>7}"
            )
            if entry.spill_stores > program.spill_bytes:
                complaints.append(
                    f"{title}: {entry.name} spills {entry.spill_stores} bytes per thread, "
                    f"its budget is {program.spill_bytes}."
                )
            if shared > MAX_SHARED:
                complaints.append(
                    f"{title}: {entry.name} needs {shared} bytes of shared memory, a block has {MAX_SHARED}."
                )
        complaints += [f"{title}: {line}" for line in compiled.warnings if "wgmma" in line]
    return complaints


def main() -> int:
    """``make kernels``: compile everything; exit code 1 on any complaint, 3 without a compiler."""
    try:
        complaints = build_all()
    except MeasurementError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for complaint in complaints:
        print(f"error: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
