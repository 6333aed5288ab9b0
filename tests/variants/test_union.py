import importlib

import pytest
import torch

from pwbench import variants
from pwbench.errors import InputError
from pwbench.variants import _union

UNION = [
    *(f"pageweaver{path}" for path in ("", "-original", "-precomputed", "-regroup")),
    *(f"union8{path}" for path in ("", "-precomputed", "-regroup")),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch):
    """A machine that looks like a Hopper GPU with CuPy, as far as availability is asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(_union, "find_spec", lambda name: object())
    return monkeypatch


def test_the_cpu_variants_are_registered_under_their_module_names():
    assert {*UNION, "reference"} <= set(variants.names())
    for name in (*UNION, "reference"):
        module = importlib.import_module(f"pwbench.variants.{name.replace('-', '_')}")
        assert variants.get(name) is module.VARIANT and module.VARIANT.summary


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"No variant is called 'union9'; there are .*union8-regroup"):
        variants.get("union9")


@pytest.mark.parametrize("name", [*UNION, "reference"])
def test_the_cpu_is_always_available(name):
    assert variants.get(name).unavailable(CPU) is None


@pytest.mark.parametrize("name", [*UNION, "reference"])
def test_a_missing_gpu_is_named(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no CUDA device" in variants.get(name).unavailable(CUDA)


@pytest.mark.parametrize("name", [*UNION, "reference"])
def test_other_devices_are_named(name):
    assert "not on meta" in variants.get(name).unavailable(torch.device("meta"))


@pytest.mark.parametrize("name", UNION)
def test_a_hopper_gpu_with_cupy_is_available(name, hopper):
    assert variants.get(name).unavailable(CUDA) is None


@pytest.mark.parametrize("name", UNION)
def test_missing_cupy_is_named_with_the_command_that_mends_it(name, hopper):
    hopper.setattr(_union, "find_spec", lambda name: None)
    assert "pip install 'pwbench[cuda13]'" in variants.get(name).unavailable(CUDA)


def test_another_architecture_is_named(hopper):
    hopper.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "compute capability 8.0, the kernels need 9.0" in variants.get("union8").unavailable(CUDA)
