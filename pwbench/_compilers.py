"""The two compilers that turn a CUDA source into an sm_90a cubin: nvcc, and NVRTC through ctypes."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pwbench.errors import MeasurementError

ARCH = "sm_90a"
FLAGS = ("-std=c++17", "-lineinfo")
"""What both compilers are given, defines and include folders apart."""

# NVRTC knows no host headers; kernels that want fixed-width integers get them from here.
_INTEGERS = b"""#pragma once
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t; typedef unsigned long uintptr_t;
"""
_BUILT_IN_HEADERS = {b"cstdint": _INTEGERS, b"stdint.h": _INTEGERS, b"cstddef": b"#pragma once\n"}


@dataclass(frozen=True)
class Entry:
    """What ptxas gave one entry function.

    Attributes:
        name: the symbol, as `load` finds it.
        registers: per thread.
        stack, spill_stores, spill_loads: bytes per thread.
        shared: bytes of static shared memory (dynamic shared memory is the launch's).
    """

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


@dataclass(frozen=True)
class Compiler:
    """A compiler that can be run here.

    Attributes:
        name: ``nvcc`` or ``nvrtc``.
        version: what it says it is; part of the cache key.
        run: ``run(source, options, cubin)`` writes the cubin and returns the compiler's log.
    """

    name: str
    version: str
    run: Callable[[Path, Sequence[str], Path], str]


def find() -> Compiler:
    """nvcc when present, else NVRTC; ``PWBENCH_COMPILER=nvcc|nvrtc`` insists on one.

    Raises:
        MeasurementError: there is none, or not the one asked for.
    """
    wanted = os.environ.get("PWBENCH_COMPILER", "")
    if wanted not in ("", "nvcc", "nvrtc"):
        raise MeasurementError(f"PWBENCH_COMPILER is {wanted!r}, expected nvcc or nvrtc.")
    nvcc = nvcc_path() if wanted != "nvrtc" else None
    if nvcc:
        return Compiler("nvcc", _nvcc_version(nvcc), _run_nvcc)
    library = _nvrtc() if wanted != "nvcc" else None
    if library:
        return Compiler("nvrtc", _nvrtc_version(library), _run_nvrtc)
    raise MeasurementError(
        f"No CUDA compiler was found{f' as PWBENCH_COMPILER={wanted} asks' if wanted else ''}: no nvcc on "
        "PATH or under CUDA_HOME, and libnvrtc cannot be loaded. Install one: pip install nvidia-cuda-nvrtc."
    )


def include_folders() -> list[Path]:
    """The CUDA header folders that exist here: the toolkit's and those of NVIDIA's wheels."""
    roots = [Path(nvcc).resolve().parent.parent for nvcc in [nvcc_path()] if nvcc]
    roots += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [root / "include" for root in [*roots, Path("/usr/local/cuda")]]
    folders += [folder / "include" for folder in _wheel_folders()]
    found = [folder for folder in folders if (folder / "cuda_runtime.h").exists()]
    return list(dict.fromkeys(found))[:1]


# nvcc -----------------------------------------------------------------------------------------


def nvcc_path() -> str | None:
    """The nvcc that would be run, or None."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    beside = [str(Path(home, "bin", "nvcc")) for home in homes if home]
    return shutil.which("nvcc") or next((path for path in beside if os.access(path, os.X_OK)), None)


@lru_cache
def _nvcc_version(nvcc: str) -> str:
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release [\d.]+, V([\d.]+)", said)
    return f"nvcc {found[1] if found else 'unknown'}"


def _run_nvcc(source: Path, options: Sequence[str], cubin: Path) -> str:
    target = f"-gencode=arch=compute_90a,code={ARCH}"
    command = [
        str(nvcc_path()),
        target,
        "-cubin",
        "-Xptxas",
        "-v",
        *FLAGS,
        *options,
        str(source),
        "-o",
        str(cubin),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    if done.returncode:
        raise MeasurementError(
            f"nvcc could not compile {source.name} (exit {done.returncode}):\n{log.strip()}"
        )
    return log


# NVRTC ----------------------------------------------------------------------------------------


def _wheel_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return [
        folder for root in roots for folder in (root / "cu13", root / "cuda_nvrtc", root / "cuda_runtime")
    ]


@lru_cache(maxsize=1)
def _nvrtc() -> ctypes.CDLL | None:
    wheels = [file for folder in _wheel_folders() for file in sorted((folder / "lib").glob("libnvrtc.so.*"))]
    for name in [*map(str, wheels), "libnvrtc.so.13", "libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _nvrtc_version(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"nvrtc {major.value}.{minor.value}"


def _run_nvrtc(source: Path, options: Sequence[str], cubin: Path) -> str:
    library = _nvrtc()
    assert library is not None
    names, texts = _BUILT_IN_HEADERS.keys(), _BUILT_IN_HEADERS.values()
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program),
            source.read_bytes(),
            source.name.encode(),
            len(names),
            (ctypes.c_char_p * len(names))(*texts),
            (ctypes.c_char_p * len(names))(*names),
        ),
    )
    try:
        folders = [f"-I{folder}" for folder in (source.parent, *include_folders())]
        flags = [f"-arch={ARCH}", "--ptxas-options=-v", *FLAGS, *folders, *options]
        failed = library.nvrtcCompileProgram(
            program, len(flags), (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        )
        log = _text(library, program, "ProgramLog").decode(errors="replace").rstrip("\0")
        if failed:
            raise MeasurementError(f"NVRTC could not compile {source.name} (error {failed}):\n{log.strip()}")
        cubin.write_bytes(_text(library, program, "CUBIN"))
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return log


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise MeasurementError(f"NVRTC failed: {library.nvrtcGetErrorString(status).decode()}.")


# Logs -----------------------------------------------------------------------------------------


def parse_log(log: str) -> list[Entry]:
    """The resources that ``ptxas -v`` reports, one `Entry` per entry function."""
    entries = []
    for part in re.split(r"(?=Compiling entry function ')", log)[1:]:
        name = re.match(r"Compiling entry function '([^']+)'", part)
        used = re.search(r"Used (\d+) registers", part)
        if not name or not used:
            continue
        properties = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
        )
        stack, stores, loads = map(int, properties.groups()) if properties else (0, 0, 0)
        shared = re.search(r"Used \d+ registers.*?(\d+) bytes smem", part)
        entries.append(Entry(name[1], int(used[1]), stack, stores, loads, int(shared[1]) if shared else 0))
    return entries


def warnings(log: str) -> list[str]:
    telling = re.compile(r"wgmma.*serializ|Performance Loss|\bwarning\b|C75\d\d", re.I)
    return list(dict.fromkeys(line.strip() for line in log.splitlines() if telling.search(line)))
