"""Kernels on the CPU: compiles a CUDA source with the host compiler over ``cuda_on_cpu.h``.

For kernels of plain loads, shared memory and warp collectives. What it proves is logic, not speed, and
not memory ordering beyond what a shuffled order of threads exposes.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from pwbench.kernels import source_dir

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
SHARED_BYTES = 1 << 18
UNTOUCHED = 0x5A


class Emulated:
    """The entries of one source, compiled for the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def launch(
        self, entry: str, grid: int, block: int, *params: np.ndarray, shared: int = SHARED_BYTES
    ) -> None:
        """Run ``entry`` on ``grid`` blocks; ``params``: one packed struct an argument, of host pointers.
        No block may write past ``shared`` bytes of dynamic shared memory."""
        self._library.shared_memory.restype = ctypes.c_void_p
        memory = (ctypes.c_ubyte * SHARED_BYTES).from_address(self._library.shared_memory())
        rest = np.frombuffer(memory, np.uint8)[shared:]
        rest[:] = UNTOUCHED
        arguments = (ctypes.c_void_p * len(params))(*(p.ctypes.data for p in params))
        getattr(self._library, f"launch_{entry}")(ctypes.c_uint(grid), ctypes.c_uint(block), arguments)
        assert (rest == UNTOUCHED).all(), f"{entry} wrote past its {shared} bytes of shared memory"


def compile_for_cpu(
    folder: Path, source: str, entries: Mapping[str, Sequence[str]], defines: Mapping[str, int]
) -> Emulated:
    """Compile ``source``; ``entries`` maps each entry to the struct types of its arguments.

    Skips the test where there is no host compiler.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler for the kernel emulation")
    text = f'#include "{HEADER}"\n#include "{source_dir() / source}"\n'
    text += f"thread_local uint4 dynamic[{SHARED_BYTES // 16}];\n#define EXPORT "
    text += 'extern "C" __attribute__((visibility("default")))\n'
    text += "EXPORT void* shared_memory() { return dynamic; }\n"
    for entry, structs in entries.items():
        arguments = ", ".join(f"*static_cast<const {s}*>(arguments[{i}])" for i, s in enumerate(structs))
        text += (
            f"EXPORT void launch_{entry}(unsigned grid, unsigned block, const void* const* arguments) {{\n"
            f"    emulator::launch(grid, block, [=] {{ {entry}({arguments}); }});\n}}\n"
        )
    macros = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    name = hashlib.sha256((text + " ".join(macros)).encode()).hexdigest()[:16]
    library = folder / f"{Path(source).stem}-{name}.so"
    if not library.exists():
        unit = library.with_suffix(".cpp")
        unit.write_text(text)
        # Hidden: an inline function's shared memory must not be merged with another program's of that name.
        flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{source_dir()}"]
        command = [compiler, *flags, *macros, str(unit), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
    return Emulated(ctypes.CDLL(str(library)))
