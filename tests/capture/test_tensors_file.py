import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pwbench.capture import Tables, failures, load, tensors_file, verify, write
from pwbench.errors import CaptureError, InputError
from pwbench.operator import OperatorError
from tests.calls import make_call


@pytest.fixture
def file(tmp_path):
    call = make_call(3, (21, 12), selection="dirty", poison="tails", spare_pages=40, k_scale=0.5)
    tensors_file.save(tmp_path / "call.safetensors", call, out_model=torch.zeros_like(call.q))
    return tmp_path / "call.safetensors"


def edited(file, drop=(), **changes):
    tensors = {name: t for name, t in load_file(file).items() if name not in drop} | changes
    save_file({name: t.contiguous() for name, t in tensors.items()}, file)
    return file


def test_a_dumped_call_becomes_the_same_call(file):
    call = make_call(3, (21, 12), selection="dirty", poison="tails", spare_pages=40, k_scale=0.5)
    recording, kind = tensors_file.read(file, layer=12)
    got, want = Tables.of_call(recording.call), Tables.of_call(call)
    assert kind == "full"
    np.testing.assert_array_equal(got.pages, want.pages)
    assert (recording.call.k_scale, recording.facts["layer"]) == (0.5, 12)
    page_got, page_want = (c.page_table[1, 2].item() for c in (recording.call, call))
    assert torch.equal(recording.call.kv.view(torch.uint8)[page_got], call.kv.view(torch.uint8)[page_want])


def test_pages_that_no_request_owns_are_left_out(file, tmp_path):
    recording, _ = tensors_file.read(file)
    owned = int((Tables.of_call(recording.call).page_table >= 0).sum())
    assert recording.call.kv.shape[0] == owned < load_file(file)["kv"].shape[0]
    path = write(tmp_path / "one", recording.call, facts=recording.facts)
    assert failures(verify(path)) is None


def test_dropped_and_ignored_things_are_counted(file):
    recording, _ = tensors_file.read(edited(file, colour=torch.zeros(1)))
    assert recording.facts["import"]["dropped_ids"] > 0
    assert recording.facts["import"]["ignored_tensors"] == ["colour"]


def test_without_q_and_kv_it_is_a_tables_capture(file, tmp_path):
    full, _ = tensors_file.read(file)
    recording, kind = tensors_file.read(edited(file, drop=("q", "kv", "page_table", "out_model")))
    assert kind == "tables"
    np.testing.assert_array_equal(Tables.of_call(recording.call).pages, Tables.of_call(full.call).pages)
    path = write(tmp_path / "one", recording.call, kind=kind, facts=recording.facts)
    assert failures(verify(path)) is None
    assert load(path).call().q.std() > 1


def test_one_request_and_right_aligned_positions_are_the_defaults(tmp_path):
    call = make_call(3, (21,), selection="random")
    tensors_file.save(tmp_path / "a.safetensors", call)
    edited(tmp_path / "a.safetensors", drop=("cu_seqlens_q", "positions", "softmax_scale"))
    recording, _ = tensors_file.read(tmp_path / "a.safetensors")
    assert torch.equal(recording.call.positions, call.positions)
    assert recording.call.softmax_scale == pytest.approx(128**-0.5)
    assert tensors_file.read(tmp_path / "a.safetensors", softmax_scale=0.25)[0].call.softmax_scale == 0.25


def test_separate_k_and_v_bytes_wide_integers_and_narrow_rows_are_understood(file):
    tensors = load_file(file)
    kv = tensors["kv"].view(torch.uint8)
    topk = tensors["topk"].to(torch.int64)[..., :9]
    k, v = kv[..., :128].clone(), kv[..., 128:].clone()
    recording, kind = tensors_file.read(edited(file, drop=("kv",), k=k, v=v, topk=topk))
    assert kind == "full"
    assert recording.call.kv.shape[-1] == 256


@pytest.mark.parametrize(
    ("drop", "changes", "message"),
    [
        (("topk",), {}, "no tensor topk"),
        (("seq_lens",), {}, "no tensor seq_lens"),
        (("q",), {}, "kv without q"),
        (("kv",), {}, "q without kv"),
        (("page_table",), {}, "kv but no page_table"),
        (("kv",), {"k": torch.zeros(3, 1, 128, 128, dtype=torch.uint8)}, "k without its other half"),
        ((), {"kv": torch.zeros(60, 1, 128, 256)}, "quantise first"),
        (
            ("kv",),
            {n: torch.zeros(s, 1, 128, 128, dtype=torch.uint8) for n, s in (("k", 3), ("v", 4))},
            "but v is",
        ),
        ((), {"topk": torch.zeros(1, 33, 17, dtype=torch.int32)}, "17 ids a row, expected at most 16"),
        ((), {"topk": torch.zeros(1, 33, 16)}, r"expected .* integers"),
        ((), {"seq_lens": torch.tensor([1 << 40, 5])}, "32 bits cannot"),
        ((), {"k_scale": torch.ones(4)}, "scales per head are not supported"),
        ((), {"topk": torch.zeros(1, 33, 16, dtype=torch.int32)}, "dummy call"),
        (("positions",), {"cu_seqlens_q": torch.tensor([0, 40, 33])}, "boundaries rising"),
        ((), {"kv": torch.zeros((), dtype=torch.uint8)}, r"kv is \[\], expected \[n_pages"),
        ((), {"k_scale": torch.tensor([1 + 1j])}, r"k_scale is torch\.complex64"),
        ((), {"q": torch.full((33, 16, 128), torch.nan, dtype=torch.bfloat16)}, "q holds NaN or infinity"),
        ((), {"out_model": torch.full((33, 16, 128), torch.inf)}, "out_model holds NaN or infinity"),
        ((), {"out_model": torch.zeros(33, 16, 64)}, r"out_model is .* \[33, 16, 64\]"),
        ((), {"out_model": torch.zeros(33, 16, 128, dtype=torch.int32)}, r"out_model is torch\.int32"),
        (("q", "kv"), {"page_table": torch.full((2, 8), 1 << 30)}, "would need 1073741825 pages"),
    ],
)
def test_what_is_missing_or_wrong_is_named(file, drop, changes, message):
    with pytest.raises(InputError, match=message):
        tensors_file.read(edited(file, drop, **changes))


def test_a_cache_row_that_a_request_names_twice_is_refused(file):
    table = load_file(file)["page_table"]
    table[:, 1] = table[:, 0]
    with pytest.raises(InputError, match=r"names cache page \d+ more than once in request"):
        tensors_file.read(edited(file, page_table=table))


def test_a_valid_token_with_a_nan_byte_is_refused(file):
    kv = torch.full_like(load_file(file)["kv"].view(torch.uint8), 0x7F)
    with pytest.raises(InputError, match=r"valid tokens of the cache hold a NaN byte"):
        tensors_file.read(edited(file, kv=kv))


def test_contract_violations_are_the_operators_message(file):
    with pytest.raises(OperatorError, match=r"q is torch\.float32, expected torch\.bfloat16"):
        tensors_file.read(edited(file, q=load_file(file)["q"].float()))


def test_a_file_that_is_not_safetensors_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)
    with pytest.raises(CaptureError, match="cannot be read as safetensors"):
        tensors_file.read(tmp_path / "a")
    with pytest.raises(CaptureError, match="cannot be read as safetensors"):
        tensors_file.read(tmp_path / "nowhere")
