import pytest
import torch

from pwbench.capture import Recorder, Target
from pwbench.errors import InputError, OperatorError
from tests.calls import make_call


def chunk(begin, rows, heads=1):
    generator = torch.Generator().manual_seed(begin)
    q = torch.randn(rows, 16 * heads, 128, generator=generator)
    k, v = torch.randn(2, begin + rows, heads, 128, generator=generator)
    topk = torch.zeros(heads, rows, 3, dtype=torch.int64)
    topk[..., 1:] = -1
    return {"q": q, "k": k, "v": v, "topk": topk, "softmax_scale": 0.1}


def test_narrow_selections_of_any_integer_type_are_padded():
    recorder = Recorder([Target(0, 5, 20)])
    recorder.record(0, 0, **chunk(0, 20))
    call = recorder.take()[Target(0, 5, 20)].call
    assert call.topk.shape == (1, 5, 16)
    assert call.topk[0, 0].tolist() == [0] + [-1] * 15


def test_chunks_that_no_target_needs_are_not_kept():
    recorder = Recorder([Target(0, 5, 20)])
    assert not recorder.wants(0, 0, 15)
    assert recorder.wants(0, 0, 16)
    assert not recorder.wants(1, 0, 20)
    recorder.record(0, 0, **chunk(0, 8))
    recorder.record(1, 0, **chunk(0, 20))
    with pytest.raises(
        InputError, match="1 of 1 targets are incomplete; layer 0 of context 20 ends at position 15"
    ):
        recorder.take()


def test_a_buffer_that_the_engine_reuses_does_not_change_the_recording():
    recorder = Recorder([Target(0, 20, 20)])
    inputs = chunk(0, 20)
    want = inputs["q"].to(torch.bfloat16)
    recorder.record(0, 0, **inputs)
    inputs["q"].zero_()
    assert torch.equal(recorder.take()[Target(0, 20, 20)].call.q, want)
    call = make_call(1, (5,))
    kept = call.q.clone()
    recorder.record_call(call)
    call.q.zero_()
    assert torch.equal(recorder.calls[0].call.q, kept)


def test_a_missing_chunk_and_a_repeated_one_are_refused():
    recorder = Recorder([Target(0, 20, 20)])
    with pytest.raises(InputError, match="positions from 10, expected 0 next"):
        recorder.record(0, 10, **chunk(10, 10))
    recorder.record(0, 0, **chunk(0, 10))
    with pytest.raises(InputError, match="positions from 0, expected 10 next"):
        recorder.record(0, 0, **chunk(0, 10))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(20, 8, 128)}, "q is"),
        ({"topk": torch.zeros(1, 19, 3, dtype=torch.int64)}, "topk is"),
        ({"topk": torch.zeros(1, 20, 17, dtype=torch.int64)}, "topk is"),
        ({"k": torch.zeros(19, 1, 128)}, "k is"),
        ({"v": torch.zeros(20, 2, 128)}, "v is"),
    ],
)
def test_shapes_that_are_not_the_operators_are_refused(change, message):
    recorder = Recorder([Target(0, 20, 20)])
    with pytest.raises(InputError, match=message):
        recorder.record(0, 0, **(chunk(0, 20) | change))


def test_values_beyond_e4m3_saturate_and_are_counted():
    recorder = Recorder([Target(0, 4, 20)])
    inputs = chunk(0, 20)
    inputs["k"][3, 0, :2] = torch.tensor([1e4, -1e4])
    recorder.record(0, 0, **inputs)
    recording = recorder.take()[Target(0, 4, 20)]
    assert recording.call.k[0, 0, 3, :2].float().tolist() == [448.0, -448.0]
    assert recording.facts["quant"]["saturated_values"] == 2


def test_scales_divide_what_is_stored():
    recorder = Recorder([Target(0, 4, 20)], k_scale=2.0, v_scale=0.5)
    inputs = chunk(0, 20)
    inputs["k"][0, 0, 0], inputs["v"][0, 0, 0] = 3.0, 3.0
    recorder.record(0, 0, **inputs)
    call = recorder.take()[Target(0, 4, 20)].call
    assert (call.k[0, 0, 0, 0].item(), call.v[0, 0, 0, 0].item()) == (1.5, 6.0)
    assert (call.k_scale, call.v_scale) == (2.0, 0.5)


def test_dummy_calls_are_skipped_and_counted():
    recorder = Recorder()
    call = make_call(1, (5,))
    dummy = type(call)(**{**vars(call), "topk": torch.zeros_like(call.topk)})
    assert not recorder.record_call(dummy)
    assert recorder.record_call(call, layer=2, rank=1)
    assert (len(recorder.calls), recorder.skipped_dummies) == (1, 1)
    assert recorder.calls[0].facts["layer"] == 2
    assert recorder.calls[0].facts["rank"] == 1


def test_a_one_page_context_is_no_dummy():
    call = make_call(1, (5,), prefix_lens=(0,))
    assert call.topk.max() == 0
    assert Recorder().record_call(call)


def test_calls_of_other_layers_and_beyond_the_limit_are_skipped():
    recorder = Recorder(layers=[3], max_calls=1)
    call = make_call(1, (5,))
    assert [recorder.record_call(call, layer=n) for n in (2, 3, 3)] == [False, True, False]
    assert recorder.skipped_calls == 2


def test_calls_that_break_the_contract_are_refused():
    call = make_call(1, (5,))
    with pytest.raises(OperatorError):
        Recorder().record_call(type(call)(**{**vars(call), "softmax_scale": 0.0}))
