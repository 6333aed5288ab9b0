import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from pwbench.errors import InputError
from pwbench.operator import PAGE, SparsePrefillCall, supports
from pwbench.reference import attend, compare
from tests.calls import NAN_BYTES, SELECTIONS, make_call


def from_the_definition(call: SparsePrefillCall) -> torch.Tensor:
    """o_i from the sentence in the operator's docstring, one token at a time, raw ids and all."""
    out = torch.zeros(call.q.shape, dtype=torch.float64)
    bounds, k, v = call.cu_seqlens_q.tolist(), call.k.double(), call.v.double()
    for request, length in enumerate(call.seq_lens.tolist()):
        for row in range(bounds[request], bounds[request + 1]):
            for head in range(call.kv_heads):
                selected = set(call.topk[head, row].tolist())
                last = min(length, int(call.positions[row]) + 1)
                tokens = [t for t in range(last) if t // PAGE in selected]
                if not tokens:
                    continue
                page = call.page_table[request, [t // PAGE for t in tokens]].long()
                at = torch.tensor([t % PAGE for t in tokens])
                heads = slice(16 * head, 16 * head + 16)
                logits = call.q[row, heads].double() @ k[page, head, at].T * call.softmax_scale * call.k_scale
                out[row, heads] = torch.softmax(logits, -1) @ v[page, head, at] * call.v_scale
    return out


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("separate", [False, True])
def test_reference_equals_the_definition(selection, separate):
    call = make_call(
        5,
        (3, 0, 41, 1),
        (0, 200, 700, 2100),
        2,
        selection,
        separate,
        shared_pages=3,
        k_scale=0.5,
        v_scale=3.0,
    )
    accuracy = compare(attend(call), from_the_definition(call))
    assert accuracy.rel_l2 < 1e-14 and accuracy.max_abs < 1e-13


def test_rows_are_returned_as_asked_for():
    call = make_call(1, (9, 14), kv_heads=2, selection="dirty")
    whole = attend(call)
    rows = [22, 0, 7, 7]
    for asked in (rows, np.array(rows), torch.tensor(rows)):
        assert torch.allclose(attend(call, asked), whole[rows], rtol=1e-12, atol=0)
    assert attend(call, []).shape == (0, 32, 128)


def test_float32_is_near_float64():
    call = make_call(2, (20,))
    single = attend(call, dtype=torch.float32)
    assert single.dtype == torch.float32 and compare(single, attend(call)).rel_l2 < 1e-6


def test_rows_without_support_are_exactly_zero():
    call = make_call(3, (12,), selection="dirty")
    _, counts = supports(call)
    empty = torch.from_numpy(counts[0] == 0)
    out = attend(call)
    assert empty.any() and not empty.all()
    assert (out[empty] == 0).all() and (out[~empty] != 0).any()


def test_duplicate_ids_do_not_add_probability_mass():
    call = make_call(4, (6,), selection="random")
    once = call.topk.clone()
    once[:, :, 3:] = -1
    thrice = once.clone()
    thrice[:, :, 3:6] = thrice[:, :, 6:9] = once[:, :, :3]
    assert torch.equal(attend(replace(call, topk=once)), attend(replace(call, topk=thrice)))


def test_order_of_the_ids_changes_nothing():
    call = make_call(6, (6,))
    assert torch.equal(attend(call), attend(replace(call, topk=call.topk.flip(-1))))


def test_future_pages_add_nothing():
    call = make_call(7, (4,), (100,), poison="none")
    first = torch.full_like(call.topk, -1)
    first[..., 0] = 0
    with_future = first.clone()
    with_future[..., 1:4] = torch.tensor([1, 2, 7], dtype=torch.int32)
    assert torch.equal(attend(replace(call, topk=first)), attend(replace(call, topk=with_future)))


@pytest.mark.parametrize("byte", NAN_BYTES)
def test_nan_past_the_length_and_in_unselected_pages_does_not_leak(byte):
    clean = make_call(8, (7,), (500,), selection="identical", poison="none")
    # Only the first and the last page are selected, the last is 123 tokens long.
    clean.topk[:] = -1
    clean.topk[..., :2] = torch.tensor([0, 3], dtype=torch.int32)
    table = clean.page_table[0].long()
    dirty = replace(clean, kv=clean.kv.clone())
    bytes_ = dirty.kv.view(torch.uint8)
    used = bytes_[table[[0, 3]]].clone()
    bytes_[:] = byte
    bytes_[table[[0, 3]]] = used
    bytes_[table[3], :, 507 - 3 * PAGE :] = byte
    assert torch.equal(attend(dirty), attend(clean))


def test_length_shorter_than_the_position_bounds_the_tokens():
    call = make_call(9, (5,), (300,), seq_lens=(302,))
    out = attend(call)
    assert out.isfinite().all()
    assert compare(out, from_the_definition(call)).rel_l2 < 1e-14


def test_stored_positions_need_not_be_right_aligned():
    call = make_call(10, (4,), (600,), positions=(0, 127, 128, 255))
    assert compare(attend(call), from_the_definition(call)).rel_l2 < 1e-14


def test_the_mean_of_visible_tokens_comes_out_when_all_keys_are_equal():
    call = make_call(11, (3,), (126,), poison="none")
    kv = torch.zeros(call.kv.shape)
    kv[call.page_table[0, :2].long(), 0, :, 128] = torch.arange(2.0)[:, None]
    call.topk[:] = -1
    call.topk[..., :2] = torch.tensor([0, 1], dtype=torch.int32)
    out = attend(replace(call, kv=kv.to(torch.float8_e4m3fn), v_scale=2.0))
    # Positions 126, 127 and 128: only the last row sees a token of the second page, where V is 1.
    assert out[:, :, 0].tolist() == [[0.0] * 16, [0.0] * 16, [pytest.approx(2 / 129)] * 16]


def test_large_logits_do_not_overflow():
    call = make_call(12, (5,), query_gain=1e4)
    assert attend(call).isfinite().all()


def test_contexts_beyond_512_pages_and_65536_tokens():
    call = make_call(13, (3,), (70_000,))
    assert call.topk.max() > 512
    assert compare(attend(call), from_the_definition(call)).rel_l2 < 1e-14


def test_sampled_rows_of_a_long_context_take_seconds():
    call = make_call(14, (1024,), (31 * 1024,), selection="local")
    begin = time.perf_counter()
    assert attend(call, np.arange(0, 1024, 4)).isfinite().all()
    assert time.perf_counter() - begin < 10


@pytest.mark.parametrize("row", [-1, 37])
def test_a_row_out_of_range_is_refused(row):
    with pytest.raises(InputError, match=f"Row {row} was asked for, expected rows 0 to 36"):
        attend(make_call(), [0, row])


def test_accuracy_of_a_known_difference():
    ref = torch.tensor([3.0, 0.0, 4.0])
    got = compare(torch.tensor([3.0, 1.0, 4.0]), ref)
    assert got.rel_l2 == pytest.approx(0.2) and got.max_abs == 1.0
    assert got.cosine == pytest.approx(25 / (5 * math.sqrt(26)))


def test_accuracy_of_opposite_outputs_is_cosine_minus_one():
    assert compare(torch.tensor([1.0, -2.0]), torch.tensor([-1.0, 2.0])) == (2.0, 4.0, pytest.approx(-1.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rest", [0.0, 1.0])
def test_accuracy_with_a_non_finite_element_fails_every_limit(bad, rest):
    ref = torch.full((4,), rest)
    out = ref.clone()
    out[1] = bad
    got = compare(out, ref)
    assert not got.rel_l2 <= 1e9 and not got.max_abs <= 1e9 and not got.cosine >= -1


def test_accuracy_against_nothing():
    zero, one = torch.zeros(3), torch.ones(3)
    assert compare(zero, zero) == (0.0, 0.0, 1.0)
    assert compare(one, zero) == (math.inf, 1.0, 0.0)
    assert compare(zero, one) == (1.0, 1.0, 0.0)
    assert compare(zero[:0], zero[:0]) == (0.0, 0.0, 1.0)


def test_accuracy_refuses_another_shape():
    with pytest.raises(InputError, match=r"output is \[3\], expected \[4\]"):
        compare(torch.zeros(3), torch.zeros(4))
