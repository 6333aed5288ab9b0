"""Launching: parameter structs shared with the device code, tensor maps, and bound kernel launches.

A kernel takes one params struct by value. The struct is written once, in the ``.cu``; the host
reads it from there (`params_dtype`), so a field cannot be added on one side alone.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from pwbench.errors import MeasurementError

# C types a params struct may be made of. Every pointer is eight bytes whatever it points at.
_SCALARS = {
    "int": "i4",
    "int32_t": "i4",
    "unsigned": "u4",
    "unsigned int": "u4",
    "uint32_t": "u4",
    "float": "f4",
    "double": "f8",
    "long long": "i8",
    "int64_t": "i8",
    "unsigned long long": "u8",
    "uint64_t": "u8",
    "size_t": "u8",
    "short": "i2",
    "int16_t": "i2",
    "unsigned short": "u2",
    "uint16_t": "u2",
    "char": "i1",
    "int8_t": "i1",
    "unsigned char": "u1",
    "uint8_t": "u1",
    "bool": "?",
}


_DECLARATION = re.compile(
    r"(?:const\s+)?([\w:]+(?:\s+[\w:]+)*?)\s*"  # type
    r"((?:\*\s*(?:const|__restrict__)?\s*)*)"  # pointers
    r"(\w+(?:\s*,\s*\*?\s*\w+)*)"  # names
)


# Params structs -------------------------------------------------------------------------------


def struct_fields(text: str, name: str) -> list[tuple[str, str]]:
    """Fields of ``struct name`` in CUDA source ``text``: ``[(field, numpy type code)]`` in order.

    Only scalars and pointers; a field that is something else is an error, not a guess.

    Raises:
        MeasurementError: no such struct, or a field this cannot size.
    """
    found = re.search(rf"\bstruct\s+(?:alignas\(\d+\)\s*)?{name}\s*\{{(.*?)\}}\s*;", _uncommented(text), re.S)
    if not found:
        raise MeasurementError(f"No struct {name} is defined in the CUDA source.")
    fields = []
    for statement in filter(None, (part.strip() for part in found[1].split(";"))):
        declared = _DECLARATION.fullmatch(statement)
        if not declared:
            raise MeasurementError(f"struct {name} holds {statement!r}, expected scalars and pointers only.")
        base = re.sub(r"\bconst\b", "", declared[1]).strip()
        for part in declared[3].split(","):
            pointer = "*" in declared[2] or "*" in part
            if not pointer and base not in _SCALARS:
                raise MeasurementError(
                    f"struct {name} holds {statement!r}, whose type {base!r} has no known size."
                )
            fields.append((part.replace("*", "").strip(), "u8" if pointer else _SCALARS[base]))
    return fields


def _uncommented(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)


@cache
def params_dtype(path: Path, name: str) -> np.dtype:
    """The params struct ``name`` of the source at ``path`` as a numpy dtype laid out as the compiler does."""
    return np.dtype(struct_fields(path.read_text(), name), align=True)


def pack(dtype: np.dtype, **fields: Any) -> np.ndarray:
    """One params struct, ``[1]`` of ``dtype``; tensors stand for their data pointers.

    Raises:
        MeasurementError: a field is missing or unknown.
    """
    known = set(dtype.names or ())
    if known != set(fields):
        missing, unknown = sorted(known - set(fields)), sorted(set(fields) - known)
        raise MeasurementError(f"Params struct: missing fields {missing}, unknown fields {unknown}.")
    params = np.zeros(1, dtype)
    for name, value in fields.items():
        if value is None:
            value = 0
        params[name][0] = value.data_ptr() if hasattr(value, "data_ptr") else value
    return params


# Driver ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MeasurementError(f"The NVIDIA driver library cannot be loaded: {error}.") from None
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return library


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise MeasurementError(f"{what} failed: {reason} (CUDA error {status}).")


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALIZATION = 4, 6


@dataclass(frozen=True)
class Kernel:
    """One loaded entry function.

    Attributes:
        name: its symbol.
        handle: the ``CUfunction``.
        shared: dynamic shared memory of its launches, bytes.
        keep: what must stay alive as long as the handle is used.
    """

    name: str
    handle: int
    shared: int
    keep: tuple[Any, ...] = ()

    def bind(
        self,
        grid: tuple[int, ...],
        block: int,
        *args: np.ndarray | np.generic,
        programmatic: bool = False,
        cluster: int = 0,
    ) -> Launch:
        """A launch with everything but the stream decided.

        Args:
            grid: blocks in x, y, z (missing ones are 1).
            block: threads of a block.
            args: kernel arguments by value: ``[1]`` arrays (params struct, tensor map) or numpy scalars.
            programmatic: may start before the kernel ahead of it in the stream has ended
                (the kernel must execute ``griddepcontrol.wait`` before it reads that one's results).
            cluster: blocks of a cluster in x, where ``__cluster_dims__`` does not say so already.
        """
        return Launch(self, grid, block, args, programmatic, cluster)


class Launch:
    """A bound kernel launch: calling it puts the kernel on the current torch stream.

    It allocates nothing and waits for nothing, so it can be captured into a CUDA graph. Argument
    bytes are copied by the driver at each launch (and frozen in a captured graph).
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        block: int,
        args: tuple[np.ndarray | np.generic, ...],
        programmatic: bool,
        cluster: int,
    ) -> None:
        self.kernel = kernel
        self.grid = (*grid, 1, 1)[:3]
        self._arrays = [_by_value(arg) for arg in args]
        self._pointers = (ctypes.c_void_p * max(1, len(args)))(*(array.ctypes.data for array in self._arrays))
        attributes = []
        if cluster:
            attributes.append(_Attribute(_CLUSTER_DIMENSION, b"", (ctypes.c_uint32 * 16)(cluster, 1, 1)))
        if programmatic:
            attributes.append(_Attribute(_PROGRAMMATIC_SERIALIZATION, b"", (ctypes.c_uint32 * 16)(1)))
        self._attributes = (_Attribute * max(1, len(attributes)))(*attributes)
        self._config = _Config(
            (ctypes.c_uint * 3)(*self.grid),
            (ctypes.c_uint * 3)(block, 1, 1),
            kernel.shared,
            None,
            self._attributes,
            len(attributes),
        )
        self._config_address = ctypes.addressof(self._config)
        self._pointers_address = ctypes.addressof(self._pointers)
        self._empty = 0 in self.grid

    def __call__(self) -> None:
        """Launch on the current torch stream; an empty grid does nothing.

        Raises:
            MeasurementError: the driver refused the launch.
        """
        import torch

        if self._empty:
            return
        self._config.stream = torch.cuda.current_stream().cuda_stream or None
        status = _driver().cuLaunchKernelEx(
            self._config_address, self.kernel.handle, self._pointers_address, None
        )
        if status:
            _check(status, f"Launching {self.kernel.name} on grid {self.grid}")


def _by_value(arg: np.ndarray | np.generic) -> np.ndarray:
    array = np.asarray(arg)
    if array.size != 1:
        raise MeasurementError(f"A kernel argument has {array.size} elements, expected one value or struct.")
    # reshape keeps the address of a tensor map, which has to stay 64-byte aligned
    return np.ascontiguousarray(array.reshape(1))


# Tensor maps ----------------------------------------------------------------------------------

_ELEMENT = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "float16": 6, "float32": 7, "bfloat16": 9}
_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTION = {0: 0, 64: 1, 128: 2, 256: 3}


def tensor_map(
    address: int,
    element: str,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzle: int = 128,
    promotion: int = 256,
) -> np.ndarray:
    """A ``CUtensorMap`` to pass by value as ``const __grid_constant__ CUtensorMap``.

    Args:
        address: device address of element 0, 16-byte aligned.
        element: ``uint8``, ``bfloat16``, ...
        sizes: elements of each dimension, innermost first.
        strides: bytes between elements of every dimension but the innermost.
        box: elements of each dimension that one copy moves.
        swizzle: 0, 32, 64 or 128 bytes.
        promotion: bytes fetched into L2 at least: 0, 64, 128 or 256.

    Returns:
        ``[1]`` array of 128 opaque bytes, 64-byte aligned.

    Raises:
        MeasurementError: the driver refuses the description.
    """
    rank = len(sizes)
    if len(strides) != rank - 1 or len(box) != rank:
        raise MeasurementError(
            f"A tensor map of {rank} dimensions has {len(strides)} strides and a box of {len(box)}, "
            f"expected {rank - 1} and {rank}."
        )
    room = np.zeros(128 + 64, np.uint8)
    start = -room.ctypes.data % 64
    descriptor = room[start : start + 128].view("V128")
    _check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(descriptor.ctypes.data),
            ctypes.c_int(_ELEMENT[element]),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * max(1, rank - 1))(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            ctypes.c_int(0),  # not interleaved
            ctypes.c_int(_SWIZZLE[swizzle]),
            ctypes.c_int(_PROMOTION[promotion]),
            ctypes.c_int(0),  # out of bounds reads zero
        ),
        f"Encoding a tensor map of sizes {sizes}, strides {strides}, box {box}",
    )
    return descriptor
