import pytest
import torch

from pwbench import reference
from pwbench.capture.combine import combine
from pwbench.capture.recorder import Recording
from pwbench.errors import InputError
from tests.calls import make_call


def recording(seed, rows, layer=1, **options):
    call = make_call(seed, (rows,), prefix_lens=(seed * 300,), poison="none", **options)
    return Recording(call, reference.attend(call).to(torch.bfloat16), {"layer": layer, "chunk": {"n": rows}})


@pytest.mark.parametrize("placement_seed", [None, 1])
def test_each_request_computes_what_it_did_alone(placement_seed):
    parts = [recording(1, 9), recording(3, 4), recording(2, 17)]
    whole = combine(parts, placement_seed)
    assert whole.call.cu_seqlens_q.tolist() == [0, 9, 13, 30]
    want = torch.cat([reference.attend(part.call) for part in parts])
    torch.testing.assert_close(reference.attend(whole.call), want)
    assert torch.equal(whole.out_model, torch.cat([part.out_model for part in parts]))
    assert whole.facts["chunk"] == [{"n": 9}, {"n": 4}, {"n": 17}]


def test_scattered_pages_are_scattered():
    whole = combine([recording(5, 9)], placement_seed=1)
    assert (whole.call.page_table[0].diff() != 1).any()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"layer": 2}, "differ in layer"),
        ({"k_scale": 2.0}, "differ in k_scale"),
        ({"softmax_scale": 1.0}, "differ in softmax_scale"),
        ({"kv_heads": 2}, "differ in number of KV heads"),
    ],
)
def test_recordings_of_different_calls_are_refused(other, message):
    with pytest.raises(InputError, match=message):
        combine([recording(1, 3), recording(1, 3, **other)])


def test_nothing_is_refused():
    with pytest.raises(InputError, match="no recording"):
        combine([])
