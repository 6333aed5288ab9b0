"""Compiles Hopper kernels for the CPU over ``hopper_on_cpu.h``, with the host's C++ compiler."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from pwbench.kernels import source_dir

HEADER = Path(__file__).with_name("hopper_on_cpu.h")
REPLACED = ("ptx.cuh", "progress.cuh")
"""Headers of instructions: ``hopper_on_cpu.h`` stands in for them."""


class Program:
    """The entries of one source, compiled for the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def launch(
        self,
        entry: str,
        grid: int,
        block: int,
        arguments: Sequence[np.ndarray],
        together: bool = False,
        cluster: int = 1,
    ) -> None:
        """Run ``entry`` on ``grid`` blocks, one cluster after the other or all side by side.

        Raises:
            AssertionError: the threads wait for each other, or broke a rule of the hardware.
        """
        pointers = (ctypes.c_void_p * len(arguments))(*(one.ctypes.data for one in arguments))
        function = getattr(self._library, f"launch_{entry}")
        function.restype = ctypes.c_char_p
        failure = function(grid, block, int(together), cluster, pointers)
        assert failure is None, failure.decode()

    def shuffle(self, seed: int, laggard: int = -1) -> None:
        """Draw the speeds of later launches from ``seed``; warp ``laggard`` of each block is the slowest."""
        self._library.shuffle(seed, laggard)

    def constant(self, name: str) -> int:
        """A 32-bit ``extern "C"`` constant of the source."""
        return ctypes.c_int.in_dll(self._library, name).value


def compile_program(
    folder: Path, source: str, entries: Mapping[str, Sequence[str]], defines: Mapping[str, int] | None = None
) -> Program:
    """Compile ``source`` in ``folder``; ``entries`` maps each entry to the struct types of its arguments.

    Skips the test where there is no host compiler.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ for the kernel emulation")
    for file in source_dir().glob("*.cu*"):
        (folder / file.name).write_text("" if file.name in REPLACED else _rewritten(file.read_text()))
    # A kernel that asks for alignment gets it; the others find a base that is not aligned.
    aligned = "__align__(1024) uint8_t dynamic[]" in (source_dir() / source).read_text()
    unit = f"#define SHARED_BASE {1024 if aligned else 48}\n"
    unit += f'#include "{HEADER}"\n#include "{source}"\n#define EXPORT '
    unit += 'extern "C" __attribute__((visibility("default")))\n'
    unit += "EXPORT void shuffle(unsigned seed, int laggard) {\n"
    unit += "    emulator::chance.seed(seed);\n    emulator::laggard = laggard;\n}\n"
    for entry, structs in entries.items():
        values = ", ".join(f"*static_cast<const {s}*>(arguments[{i}])" for i, s in enumerate(structs))
        unit += (
            f"EXPORT const char* launch_{entry}"
            "(unsigned grid, unsigned block, int together, unsigned cluster, void** arguments) {\n"
            f"    const auto kernel = [=] {{ {entry}({values}); }};\n"
            "    return emulator::launch(grid, block, together, cluster, kernel);\n}\n"
        )
    macros = [f"-D{name}={value}" for name, value in sorted((defines or {}).items())]
    path = folder / f"{'-'.join([Path(source).stem, *macros])}.cpp"
    path.write_text(unit)
    flags = ["-std=c++20", "-O2", "-w", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{folder}"]
    library = path.with_suffix(".so")
    done = subprocess.run(
        [compiler, *flags, *macros, str(path), "-o", str(library)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Program(ctypes.CDLL(str(library)))


def _rewritten(text: str) -> str:
    """A source with what the preprocessor cannot replace replaced."""
    text = re.sub(r"extern __shared__ (__align__\(\d+\) )?\w+ dynamic\[\];", "", text)
    # Static shared arrays become part of each block's own memory, behind the dynamic part.
    tickets = "int* tickets = (int*)(dynamic + emulator::SHARED_BYTES);"
    text = re.sub(r"__shared__ int tickets\[4\];", tickets, text)
    # A loop without a body waits for memory to change, and no other thread could change it meanwhile.
    text = re.sub(r"(while \(.*\)) \{\s*\}", r"\1 emulator::poll();", text)
    return re.sub(r'extern "C" __constant__', 'extern "C" __attribute__((visibility("default")))', text)
