"""When the Triton baseline runs and what it says when it cannot; its results are tested on a GPU."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from pwbench import variants
from pwbench.errors import VariantUnavailable
from pwbench.variants import Options
from tests.calls import make_call

TRITON = variants.get("triton")


def test_without_a_gpu_the_row_says_so() -> None:
    assert TRITON.unavailable(torch.device("cpu")) == "triton needs a CUDA GPU."
    with pytest.raises(VariantUnavailable, match="needs a CUDA GPU"):
        TRITON.prepare(make_call(), Options())


def test_a_missing_triton_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in str(TRITON.unavailable(torch.device("cuda")))


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "compute capability 8.9" in str(TRITON.unavailable(torch.device("cuda")))


@pytest.mark.parametrize(
    ("name", "sentence"), [("q", "their strides are"), ("topk", "needs topk contiguous")]
)
def test_strides_it_cannot_follow_are_refused_with_them(
    monkeypatch: pytest.MonkeyPatch, name: str, sentence: str
) -> None:
    monkeypatch.setattr(type(TRITON), "unavailable", lambda self, device: None)
    call = make_call()
    apart = getattr(call, name).transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(VariantUnavailable, match=sentence):
        TRITON.prepare(replace(call, **{name: apart}), Options())
