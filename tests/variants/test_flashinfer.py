"""What the FlashInfer baselines take and say, without FlashInfer and without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pwbench import variants
from pwbench.errors import VariantUnavailable
from pwbench.operator import TOPK, SparsePrefillCall, supports
from pwbench.variants import Options, _flashinfer
from tests.calls import make_call

NAMES = ("flashinfer", "flashinfer-cake", "flashinfer-paged")


def served(**more: Any) -> SparsePrefillCall:
    """A call of the form that serving engines make: sorted ids, right-aligned positions."""
    call = make_call(**{"selection": "local", **more})
    return replace(call, topk=torch.from_numpy(supports(call)[0]))


def junk(call: SparsePrefillCall) -> SparsePrefillCall:
    ids = call.topk.clone()
    ids[0, 7] = torch.arange(TOPK, 0, -1, dtype=torch.int32)
    return replace(call, topk=ids)


def future(call: SparsePrefillCall) -> SparsePrefillCall:
    ids = torch.full_like(call.topk, -1)
    ids[..., 0] = 0
    ids[0, 3, 1] = 1000
    return replace(call, topk=ids)


def interrupted(call: SparsePrefillCall) -> SparsePrefillCall:
    ids = torch.full_like(call.topk, -1)
    ids[0, 11, 2] = 1
    return replace(call, topk=ids)


def gap(call: SparsePrefillCall) -> SparsePrefillCall:
    return replace(call, positions=torch.where(call.positions > 620, call.positions - 1, call.positions))


def cut(call: SparsePrefillCall) -> SparsePrefillCall:
    return replace(call, seq_lens=call.seq_lens - 5, topk=torch.full_like(call.topk, -1))


def apart(call: SparsePrefillCall) -> SparsePrefillCall:
    return replace(call, kv=(call.k.contiguous(), call.v.contiguous()))


def strided(call: SparsePrefillCall) -> SparsePrefillCall:
    return replace(call, q=torch.cat([call.q, call.q], 1)[:, :16])


REFUSED: dict[str, tuple[Callable[[SparsePrefillCall], SparsePrefillCall], str]] = {
    "descending ids": (junk, "KV head 0, row 7 is"),
    "ids out of sight": (future, "KV head 0, row 3 is"),
    "padding before ids": (interrupted, "KV head 0, row 11 is"),
    "a gap in the positions": (gap, "consecutive positions; those of request 0"),
    "positions past the tokens": (cut, "request 0 has 635 tokens and a query at 639"),
    "separate K and V": (apart, "side by side"),
    "strided queries": (strided, "contiguous q"),
}


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prepare come as far as its checks of the call."""
    for name in NAMES:
        monkeypatch.setattr(type(variants.get(name)), "unavailable", lambda self, device: None)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("name", NAMES[:2])
def test_a_call_of_another_form_is_refused_with_the_reason(name: str, why: str) -> None:
    change, reason = REFUSED[why]
    call = change(served(q_lens=(40,)))
    with pytest.raises(VariantUnavailable, match=reason):
        variants.get(name).prepare(call, Options())


def test_the_form_that_engines_make_is_taken() -> None:
    call = served(q_lens=(40, 0, 7), kv_heads=2)
    _flashinfer.check_selections("flashinfer", call)
    _flashinfer.check_layout("flashinfer", call)
    assert _flashinfer.query_offset("flashinfer", call) is None


def test_positions_that_end_early_become_an_offset() -> None:
    call = served(q_lens=(4, 3), positions=[50, 51, 52, 53, 600, 601, 602], seq_lens=(90, 603))
    offset = _flashinfer.query_offset("flashinfer", call)
    assert offset is not None
    assert offset.tolist() == [50, 600]


@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_the_row_says_so(name: str) -> None:
    assert "needs a CUDA GPU" in str(variants.get(name).unavailable(torch.device("cpu")))
    with pytest.raises(VariantUnavailable, match="needs a CUDA GPU"):
        variants.get(name).prepare(served(), Options())


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", NAMES)
def test_a_missing_flashinfer_is_told_with_its_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [])
    reason = str(variants.get(name).unavailable(torch.device("cuda")))
    assert "pip install flashinfer-python==0.7.4" in reason


@pytest.mark.usefixtures("hopper")
def test_an_older_flashinfer_is_told_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("flashinfer")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.version", SimpleNamespace(__version__="0.5.0"))
    reason = str(variants.get("flashinfer").unavailable(torch.device("cuda")))
    assert "FlashInfer 0.5.0 cannot import flashinfer.msa_ops" in reason


def test_a_missing_kernel_library_is_told_with_its_command() -> None:
    def run() -> None:
        raise ModuleNotFoundError("No module named 'cutlass'", name="cutlass")

    with pytest.raises(VariantUnavailable, match=r"cutlass: pip install nvidia-cutlass-dsl==4\.8\.1"):
        _flashinfer.warm("flashinfer", run, torch.device("cpu"))


def test_a_peers_own_refusal_is_passed_on() -> None:
    def run() -> None:
        raise NotImplementedError("SM90 MSA union prefill indexes 16 sequences\nmore")

    with pytest.raises(
        VariantUnavailable, match=r"refused this call: SM90 MSA union prefill indexes 16 sequences$"
    ):
        _flashinfer.warm("flashinfer", run, torch.device("cpu"))


@pytest.mark.usefixtures("anywhere")
def test_the_api_is_given_the_operators_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def api(q: Any, k: Any, v: Any, ids: Any, bounds: Any, **more: Any) -> None:
        seen.update(more, q=q, k=k, v=v, ids=ids, bounds=bounds)
        more["out"].zero_()

    monkeypatch.setitem(sys.modules, "flashinfer.msa_ops", SimpleNamespace(msa_sparse_attention=api))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(_flashinfer, "route", lambda call: "Cake v2")
    monkeypatch.setattr(_flashinfer, "version", lambda: "0.7.4")
    call = served(q_lens=(40,), softmax_scale=0.1, k_scale=2.0, v_scale=3.0)
    prepared = variants.get("flashinfer").prepare(call, Options())
    prepared.run()
    assert seen["softmax_scale"] == pytest.approx(0.2)
    assert (seen["v_global_scale"], seen["causal"], seen["q_offset"]) == (3.0, True, None)
    assert seen["v"].data_ptr() - seen["k"].data_ptr() == 128
    assert seen["seqused_k"] is call.seq_lens
    assert seen["page_table"] is call.page_table
    assert seen["out"] is prepared.out
    assert prepared.details == {"peer": "flashinfer 0.7.4: Cake v2"}
    assert [stage.name for stage in prepared.stages] == ["attention"]


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("separate", [False, True])
def test_the_paged_wrapper_is_given_each_rows_pages(monkeypatch: pytest.MonkeyPatch, separate: bool) -> None:
    """A stand-in wrapper computes attention from what plan and run were given alone."""

    class Wrapper:
        def __init__(self, workspace: torch.Tensor, **how: Any) -> None:
            assert how == {"kv_layout": "HND", "use_tensor_cores": True, "backend": "fa2"}

        def plan(
            self, indptr: Any, indices: Any, last: Any, heads: int, kv_heads: int, *more: Any, **how: Any
        ) -> None:
            assert (heads, kv_heads, more) == (16, 1, (128, 128))
            self.indptr, self.indices, self.last, self.scale = indptr, indices, last, how["sm_scale"]

        def run(self, q: Any, kv: Any, v_scale: float, out: torch.Tensor) -> None:
            for row in range(len(q)):
                pages = self.indices[self.indptr[row] : self.indptr[row + 1]].long()
                if not len(pages):
                    out[row] = 0
                    continue
                tokens = (len(pages) - 1) * 128 + int(self.last[row])
                k, v = (part.float()[pages, 0].flatten(0, 1)[:tokens] for part in kv)
                weights = torch.softmax(q[row].float() @ k.T * self.scale, -1)
                out[row] = (weights @ v * v_scale).to(out.dtype)

    monkeypatch.setitem(
        sys.modules, "flashinfer.decode", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    from pwbench import reference

    call = make_call(
        5, q_lens=(9, 0, 4), kv_heads=2, selection="dirty", separate=separate, k_scale=1.3, v_scale=0.7
    )
    with pytest.raises(VariantUnavailable, match="rows of this call select nothing"):
        variants.get("flashinfer-paged").prepare(call, Options())
    call.topk[..., 5] = 0  # page 0 is visible to every row
    prepared = variants.get("flashinfer-paged").prepare(call, Options())
    for stage in prepared.stages:
        stage.run()
    assert not prepared.graphable
    assert [stage.name for stage in prepared.stages] == ["metadata", "attention"]
    assert reference.compare(prepared.out, reference.attend(call)).rel_l2 <= 3e-3
