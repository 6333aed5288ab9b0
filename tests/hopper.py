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
        self, entry: str, grid: int, block: int, arguments: Sequence[np.ndarray], together: bool = False
    ) -> None:
        """Run ``entry`` on ``grid`` blocks, one after the other or all side by side."""
        pointers = (ctypes.c_void_p * len(arguments))(*(one.ctypes.data for one in arguments))
        getattr(self._library, f"launch_{entry}")(grid, block, int(together), pointers)


def compile_program(folder: Path, source: str, entries: Mapping[str, Sequence[str]]) -> Program:
    """Compile ``source`` in ``folder``; ``entries`` maps each entry to the struct types of its arguments.

    Skips the test where there is no host compiler.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ for the kernel emulation")
    for file in source_dir().glob("*.cu*"):
        text = "" if file.name in REPLACED else file.read_text()
        # Static shared arrays become part of each block's own memory, behind the dynamic part.
        text = text.replace("extern __shared__ uint4 dynamic[];", "")
        text = re.sub(r"__shared__ int tickets\[4\];", "int* tickets = (int*)(dynamic + (190 << 10));", text)
        (folder / file.name).write_text(text)
    unit = f'#include "{HEADER}"\n#include "{source}"\n'
    for entry, structs in entries.items():
        values = ", ".join(f"*static_cast<const {s}*>(arguments[{i}])" for i, s in enumerate(structs))
        unit += (
            f'extern "C" __attribute__((visibility("default")))\n'
            f"void launch_{entry}(unsigned grid, unsigned block, int together, void** arguments) {{\n"
            f"    emulator::launch(grid, block, together, [=] {{ {entry}({values}); }});\n}}\n"
        )
    path = folder / f"{Path(source).stem}.cpp"
    path.write_text(unit)
    flags = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{folder}"]
    library = path.with_suffix(".so")
    done = subprocess.run([compiler, *flags, str(path), "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return Program(ctypes.CDLL(str(library)))
