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


PACKED = """
struct Pairs { const unsigned *a, *b, *c; unsigned *min, *max, *fma_relu; };
extern "C" __global__ void packed(const Pairs pairs) {
    const unsigned at = 32 * blockIdx.x + threadIdx.x;
    pairs.min[at] = min_nan_f16x2(pairs.a[at], pairs.b[at]);
    pairs.max[at] = max_s16x2(pairs.a[at], pairs.b[at]);
    pairs.fma_relu[at] = fma_relu_f16x2(pairs.a[at], pairs.b[at], pairs.c[at]);
}
"""


def test_packed_instructions_are_those_of_ptx(tmp_path: Path) -> None:
    count = 1 << 16
    a, b, c = np.random.default_rng(1).integers(0, 1 << 32, (3, count), np.uint32)
    smaller, larger, fused = (np.zeros(count, np.uint32) for _ in range(3))
    pointers = (a, b, c, smaller, larger, fused)
    params = np.array([tuple(x.ctypes.data for x in pointers)], [(f"f{i}", "u8") for i in range(6)])
    source = tmp_path / "packed.cu"
    source.write_text(PACKED)
    compile_program(tmp_path, str(source), {"packed": ["Pairs"]}).launch("packed", count // 32, 32, [params])

    least = np.minimum(a.view(np.float16), b.view(np.float16))
    seen = smaller.view(np.float16)
    np.testing.assert_array_equal(seen, least)
    assert (smaller.view(np.uint16)[np.isnan(least)] == 0x7FFF).all()

    np.testing.assert_array_equal(larger.view(np.int16), np.maximum(a.view(np.int16), b.view(np.int16)))

    with np.errstate(over="ignore", invalid="ignore"):
        x, y, z = (part.view(np.float16).astype(np.float64) for part in (a, b, c))
        exact = x * y + z
        expected = np.where(exact > 0, exact, 0).astype(np.float16).view(np.uint16)
    expected[np.isnan(exact)] = 0x7FFF
    assert np.isnan(exact).any()
    np.testing.assert_array_equal(fused.view(np.uint16), expected)


PRODUCT = """
struct Matrices { const unsigned* left; const unsigned char* right; float* out; };
/// left [64, 64] f16 times the transpose of right [128, 64] f16, swizzled: [64, 128] f32.
extern "C" __global__ void product(const Matrices matrices) {
    const uint32_t begin = smem_address(dynamic), tile = (begin + 1023) / 1024 * 1024;
    for (int at = threadIdx.x; at < 128 * 128; at += 128) dynamic[tile - begin + at] = matrices.right[at];
    __syncthreads();
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    uint32_t a[4][4];
    for (int step = 0; step < 4; ++step)
        for (int i = 0; i < 4; ++i)
            a[step][i] = matrices.left[(row + i % 2 * 8) * 32 + step * 8 + i / 2 * 4 + lane % 4];
    float d[64];
    for (float& sum : d) sum = NAN;
    wgmma_fence();
    for (int step = 0; step < 4; ++step)
        wgmma_m64n128k16_f16_rs(d, a[step], swizzle128_descriptor(tile) + 2 * step, step > 0);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    for (int i = 0; i < 64; ++i)
        matrices.out[(row + i / 2 % 2 * 8) * 128 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}
"""


def test_f16_products_are_those_of_the_matrices(tmp_path: Path) -> None:
    """Integers times powers of two, subnormal ones too, so that every order of summation is exact."""
    rng = np.random.default_rng(2)
    left = np.ldexp(rng.integers(-63, 64, (64, 64)), -(np.arange(64)[:, None] % 8)).astype(np.float16)
    right = np.ldexp(rng.integers(-63, 64, (128, 64)), -(np.arange(128)[:, None] % 25)).astype(np.float16)
    row, token = np.arange(128)[:, None], np.arange(64)[None]
    image = np.zeros(128 * 64, np.float16)
    image[row * 64 + ((token >> 3 ^ row & 7) << 3) + (token & 7)] = right
    out = np.zeros((64, 128), np.float32)
    pointers = tuple(x.ctypes.data for x in (left, image, out))
    params = np.array([pointers], [(f"f{i}", "u8") for i in range(3)])
    source = tmp_path / "product.cu"
    source.write_text(PRODUCT)
    compile_program(tmp_path, str(source), {"product": ["Matrices"]}).launch("product", 1, 128, [params])
    np.testing.assert_array_equal(out, left.astype(np.float32) @ right.T.astype(np.float32))
