"""The instructions that the emulations of the kernels stand in for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.emulator import compile_for_cpu
from tests.hopper import compile_program

PERMUTE = """
struct Words { unsigned a, b; unsigned* out; };
extern "C" __global__ void permute(const Words words) {
    const unsigned selector = 32 * blockIdx.x + threadIdx.x;
    words.out[selector] = __byte_perm(words.a, words.b, selector);
}
"""
"""The permutation for every selector of 16 bits, a thread each."""
WORDS = np.dtype([("a", "u4"), ("b", "u4"), ("out", "u8")])


def permute(folder: Path, emulation: str, words: np.ndarray) -> None:
    source = folder / "permute.cu"
    source.write_text(PERMUTE)
    entries = {"permute": ["Words"]}
    if emulation == "hopper":
        compile_program(folder, str(source), entries).launch("permute", 2048, 32, [words])
    else:
        compile_for_cpu(folder, str(source), entries, {}).launch("permute", 2048, 32, words)


@pytest.mark.parametrize("emulation", ["cuda", "hopper"])
def test_byte_perm_takes_bytes_and_never_signs_as_in_cuda(emulation: str, tmp_path: Path) -> None:
    """Bit 3 of a nibble means nothing to __byte_perm, where the PRMT instruction would spread a sign."""
    out = np.zeros(1 << 16, np.uint32)
    words = np.zeros(1, WORDS)
    words["a"], words["b"], words["out"] = 0x807F01FE, 0xFF00C35A, out.ctypes.data
    permute(tmp_path, emulation, words)
    octets = np.frombuffer(words[["a", "b"]].tobytes(), np.uint8)[:8]
    picks = np.arange(1 << 16)[:, None] >> 4 * np.arange(4) & 7
    np.testing.assert_array_equal(out.view(np.uint8).reshape(-1, 4), octets[picks])
