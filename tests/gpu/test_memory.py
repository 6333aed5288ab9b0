"""Where the inputs lie: flush against the end of their memory, strided, and a workspace never written."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from pwbench import reference, variants
from pwbench.errors import PwbenchError
from pwbench.operator import SparsePrefillCall
from pwbench.variants import Options
from tests.gpu.cases import mild
from tests.gpu.harness import ACCURATE, DEVICE, FAST, check, every_run, gpu, needs_cuda, prepare, run

pytestmark = gpu

GRANULE = 2 << 20
"""Bytes that the driver maps at once: one byte past a multiple of it is not mapped, or not ours."""
_KEEP: list[object] = []


class Flush:
    """Device memory of its own, handed to torch through the CUDA array interface."""

    def __init__(self, tensor: torch.Tensor) -> None:
        cuda = ctypes.CDLL("libcuda.so.1")
        size = tensor.numel() * tensor.element_size()
        room = -(-max(size, 1) // GRANULE) * GRANULE
        pointer = ctypes.c_uint64()
        assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(room)) == 0
        assert cuda.cuMemsetD8_v2(pointer, ctypes.c_ubyte(0xFF), ctypes.c_size_t(room)) == 0
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer.value + room - size, False),
            "version": 2,
        }


def at_the_end(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is the last byte of its allocation."""
    if not tensor.numel():
        return tensor.to(DEVICE)
    memory = Flush(tensor)
    _KEEP.append(memory)
    flat = torch.as_tensor(memory, device=DEVICE)
    flat.copy_(tensor.contiguous().view(torch.uint8).flatten())
    return flat.view(tensor.dtype).view(tensor.shape)


@needs_cuda
@every_run
@pytest.mark.parametrize("separate", [False, True], ids=["side by side", "apart"])
def test_inputs_flush_against_the_end_of_memory_are_not_overrun(
    separate: bool, variant: str, precision: str
) -> None:
    call = mild(q_lens=(37, 5), kv_heads=2, separate=separate, spare_pages=0)
    names = ("q", "topk", "page_table", "cu_seqlens_q", "seq_lens", "positions")
    moved = {name: at_the_end(getattr(call, name)) for name in names}
    kv = tuple(map(at_the_end, call.kv)) if isinstance(call.kv, tuple) else at_the_end(call.kv)
    flush = SparsePrefillCall(**moved, kv=kv)
    out = run(prepare(variant, precision, flush))
    limit = FAST if precision == "fast" else ACCURATE
    check(out, reference.attend(flush), limit, "flush inputs")


@every_run
def test_strided_queries_are_refused_or_honoured(variant: str, precision: str) -> None:
    call = mild(q_lens=(40,)).to(DEVICE)
    wide = torch.full((40, 32, 128), torch.nan, dtype=call.q.dtype, device=DEVICE)
    wide[:, :16] = call.q
    strided = replace(call, q=wide[:, :16])
    if reason := variants.get(variant).unavailable(DEVICE):
        pytest.skip(reason)
    try:
        prepared = variants.get(variant).prepare(strided, Options(precision=precision))
    except PwbenchError as error:
        assert "contiguous" in str(error) or "stride" in str(error)
        return
    check(run(prepared), reference.attend(call), FAST if precision == "fast" else ACCURATE, "strided q")
