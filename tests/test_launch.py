"""Params structs, launch configurations and tensor maps, without a GPU."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pwbench import _compilers, kernels, launch
from pwbench.errors import MeasurementError

STRUCT = """
/* not this: struct WalkParams { int x; }; */
struct WalkParams {
    const uint8_t* __restrict__ kv;  // the cache; rows of it
    int total_q, kv_heads;
    float scale;
    unsigned long long* counter;
    const int *order, *pages;
    bool exact;
    uint16_t window;
    int64_t stride;
    unsigned int last;
};
"""
FIELDS = [
    ("kv", "u8"),
    ("total_q", "i4"),
    ("kv_heads", "i4"),
    ("scale", "f4"),
    ("counter", "u8"),
    ("order", "u8"),
    ("pages", "u8"),
    ("exact", "?"),
    ("window", "u2"),
    ("stride", "i8"),
    ("last", "u4"),
]


def offsets_as_assertions(text: str, name: str) -> str:
    """A translation unit that compiles only if numpy laid the struct out as the compiler does."""
    dtype = np.dtype(launch.struct_fields(text, name), align=True)
    assert dtype.names and dtype.fields
    checks = [f"static_assert(sizeof({name}) == {dtype.itemsize});"]
    for field in dtype.names:
        checks.append(f"static_assert(__builtin_offsetof({name}, {field}) == {dtype.fields[field][1]});")
    return "\n".join(checks)


def test_fields_are_read_in_order_from_the_source() -> None:
    assert launch.struct_fields(STRUCT, "WalkParams") == FIELDS


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("struct Other { int x; };", "No struct WalkParams"),
        ("struct WalkParams { dim3 grid; };", "has no known size"),
        ("struct WalkParams { int x[4]; };", "expected scalars and pointers only"),
    ],
)
def test_a_struct_that_cannot_be_sized_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(MeasurementError, match=complaint):
        launch.struct_fields(text, "WalkParams")


def compile_text(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWBENCH_KERNELS", str(tmp_path))
    monkeypatch.setenv("PWBENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "layout.cu").write_text(text)
    try:
        _compilers.find()
    except MeasurementError as error:
        pytest.skip(str(error))
    kernels.compile("layout.cu")


def test_the_compiler_agrees_with_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"#include <cstdint>\n{STRUCT}\n{offsets_as_assertions(STRUCT, 'WalkParams')}"
    compile_text(text, tmp_path, monkeypatch)
    with pytest.raises(MeasurementError, match="static assertion"):
        compile_text(text.replace("bool exact;", "bool exact; int more;"), tmp_path, monkeypatch)


def test_every_shipped_params_struct_is_laid_out_as_the_compiler_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = ["#include <cstdint>"]
    for file in sorted(kernels.source_dir().glob("*.cu*")):
        text = file.read_text()
        for name in re.findall(r"^struct (\w*Params)\b", text, re.M):
            body = re.search(rf"^struct {name}\b.*?^}};", text, re.M | re.S)
            assert body
            # What a pointer points at does not matter to the layout, and would drag in other headers.
            plain = re.sub(r"\b\w+(\s*\*)", r"void\1", body[0])
            parts.append(f"namespace {file.stem} {{\n{plain}\n{offsets_as_assertions(text, name)}\n}}")
    compile_text("\n".join(parts), tmp_path, monkeypatch)


def test_packing_fills_fields_by_name() -> None:
    dtype = np.dtype([("kv", "u8"), ("total_q", "i4"), ("scale", "f4")], align=True)
    tensor = torch.zeros(4)
    params = launch.pack(dtype, scale=0.5, kv=tensor, total_q=7)
    assert (params["kv"][0], params["total_q"][0], params["scale"][0]) == (tensor.data_ptr(), 7, 0.5)
    assert launch.pack(dtype, scale=0.5, kv=None, total_q=7)["kv"][0] == 0


def test_a_field_missing_or_unknown_is_refused() -> None:
    dtype = np.dtype([("kv", "u8"), ("total_q", "i4")])
    with pytest.raises(MeasurementError, match=r"missing fields \['total_q'\], unknown fields \['total'\]"):
        launch.pack(dtype, kv=None, total=7)


def test_a_value_that_does_not_fit_its_field_is_refused() -> None:
    with pytest.raises(OverflowError):
        launch.pack(np.dtype([("total_q", "i4")]), total_q=2**31)


# Launching ------------------------------------------------------------------------------------


class FakeDriver:
    """Reads the launch as the driver would."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.seen = status, []

    def cuLaunchKernelEx(self, config: int, function: int, arguments: int, extra: None) -> int:
        what = launch._Config.from_address(config)
        attributes = [(what.attributes[i].id, list(what.attributes[i].value)[:3]) for i in range(what.count)]
        first = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0]
        value = ctypes.c_int32.from_address(first).value if first else None
        self.seen.append(
            (list(what.grid), list(what.block), what.shared, what.stream, attributes, function, value)
        )
        return self.status

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"invalid argument"
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(launch, "_driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    return fake


def test_a_launch_says_everything_to_the_driver(driver: FakeDriver) -> None:
    kernel = launch.Kernel("attend", 1234, 100_000)
    kernel.bind((6, 2), 128, np.int32(41), programmatic=True, cluster=2)()
    (seen,) = driver.seen
    assert seen == ([6, 2, 1], [128, 1, 1], 100_000, 77, [(4, [2, 1, 1]), (6, [1, 0, 0])], 1234, 41)


def test_structures_have_the_drivers_sizes() -> None:
    assert ctypes.sizeof(launch._Attribute) == 72
    assert ctypes.sizeof(launch._Config) == 56


def test_an_empty_grid_launches_nothing(driver: FakeDriver) -> None:
    launch.Kernel("attend", 1, 0).bind((0,), 128)()
    assert driver.seen == []


def test_a_refused_launch_names_kernel_grid_and_reason(driver: FakeDriver) -> None:
    driver.status = 1
    with pytest.raises(MeasurementError, match=r"attend on grid \(3, 1, 1\) failed: invalid argument"):
        launch.Kernel("attend", 1, 0).bind((3,), 128)()


def test_an_argument_of_several_elements_is_refused() -> None:
    with pytest.raises(MeasurementError, match="has 2 elements"):
        launch.Kernel("attend", 1, 0).bind((3,), 128, np.zeros(2))


def test_without_a_driver_the_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    launch._driver.cache_clear()
    with pytest.raises(MeasurementError, match=r"libcuda\.so\.1"):
        launch._driver()


def test_a_tensor_map_of_inconsistent_rank_is_refused() -> None:
    with pytest.raises(MeasurementError, match="3 dimensions has 1 strides and a box of 3, expected 2 and 3"):
        launch.tensor_map(0, "uint8", (128, 128, 4), (256,), (128, 128, 1))


def test_a_tensor_map_is_aligned_as_the_hardware_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    fake = SimpleNamespace(cuTensorMapEncodeTiled=lambda *args: seen.append(args) or 0)
    monkeypatch.setattr(launch, "_driver", lambda: fake)
    for _ in range(20):
        made = launch.tensor_map(4096, "uint8", (128, 128, 4), (256, 32768), (128, 64, 1))
        assert made.ctypes.data % 64 == 0
        assert made.nbytes == 128
        assert launch._by_value(made).ctypes.data == made.ctypes.data
    assert list(seen[0][5]) == [256, 32768]
