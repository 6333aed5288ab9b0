from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pwbench.errors import InputError, OperatorError
from pwbench.operator import (
    PAGE,
    TOPK,
    SparsePrefillCall,
    request_of_rows,
    right_aligned_positions,
    supports,
    visible_supports,
    visible_tokens,
)
from tests.calls import INT_MAX, INT_MIN, SELECTIONS, make_call

CALL = make_call(q_lens=(5, 0, 9), prefix_lens=(300, 10, 0), kv_heads=2)
"""Requests of 305, 10 and 9 tokens: 3, 1 and 1 pages."""


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("separate", [False, True])
def test_generated_calls_keep_the_contract(selection, separate):
    call = make_call(7, (3, 0, 130), (0, 700, 200), 2, selection, separate, shared_pages=1)
    assert call.validate() is call
    assert (call.q_heads, call.kv_heads, call.requests, call.total_q) == (32, 2, 3, 133)
    assert call.k.shape == call.v.shape == (call.k.shape[0], 2, PAGE, 128)


BROKEN = {
    "q is a list": ({"q": [1.0]}, "q is a list, expected a torch tensor"),
    "q dtype": ({"q": CALL.q.float()}, "q is torch.float32, expected torch.bfloat16"),
    "q rank": ({"q": CALL.q[0]}, "q has 2 dimensions, expected 3"),
    "head dim": ({"q": CALL.q[..., :64]}, "q has head dim 64, expected 128"),
    "query heads": ({"q": CALL.q[:, :16]}, "q has 16 heads, expected 16 per KV head = 32"),
    "no KV head": ({"topk": CALL.topk[:0]}, "no KV head"),
    "topk dtype": ({"topk": CALL.topk.long()}, "topk is torch.int64, expected torch.int32"),
    "topk rows": ({"topk": CALL.topk[:, 1:]}, r"topk is \[2, 13, 16\], expected \[2, 14, 16\]"),
    "topk width": ({"topk": CALL.topk[..., :8]}, r"topk is \[2, 14, 8\], expected \[2, 14, 16\]"),
    "positions short": (
        {"positions": CALL.positions[1:]},
        "positions has 13 rows, expected .* = 14",
    ),
    "position below 0": ({"positions": CALL.positions - 1}, "positions holds -1, expected at least 0"),
    "kv dtype": ({"kv": CALL.kv.float()}, "kv is torch.float32, expected torch.float8_e4m3fn"),
    "kv rank": ({"kv": CALL.kv[0]}, "kv has 3 dimensions, expected 4"),
    "kv heads": ({"kv": CALL.kv[:, :1]}, r"kv is \[10, 1, 128, 256\], expected \[n_pages, 2, 128, 256\]"),
    "kv page": ({"kv": CALL.kv[:, :, :64]}, r"expected \[n_pages, 2, 128, 256\]"),
    "kv is one of two": ({"kv": (CALL.k,)}, r"kv is a tuple, expected one tensor or a pair \(k, v\)"),
    "kv is a list": ({"kv": [CALL.k, CALL.v]}, "kv is a list"),
    "kv is nothing": ({"kv": ()}, "kv is a tuple"),
    "k beside a wide v": (
        {"kv": (CALL.k, CALL.kv)},
        r"v is \[10, 2, 128, 256\], expected \[n_pages, 2, 128, 128",
    ),
    "pools differ": ({"kv": (CALL.k, CALL.v[1:])}, r"k is \[10, 2, 128, 128\] but v is \[9, 2, 128, 128\]"),
    "boundaries short": ({"cu_seqlens_q": i32(0, 5, 14)}, "cu_seqlens_q has 3 entries, expected .* = 4"),
    "boundaries late": ({"cu_seqlens_q": i32(1, 5, 5, 14)}, "runs from 1 to 14, expected 0 to total_q = 14"),
    "boundaries end": ({"cu_seqlens_q": i32(0, 5, 5, 13)}, "runs from 0 to 13, expected 0 to total_q = 14"),
    "boundaries fall": (
        {"cu_seqlens_q": i32(0, 5, 4, 14)},
        "falls from 5 to 4 at request 1",
    ),
    "length below 0": ({"seq_lens": i32(305, -1, 9)}, r"seq_lens\[1\] is -1, expected at least 0"),
    "table rows": (
        {"page_table": CALL.page_table[:2]},
        "page_table has 2 rows, expected .* = 3",
    ),
    "table narrow": (
        {"page_table": CALL.page_table[:, :2].contiguous()},
        "request 0 needs 3 pages for 305 tokens, page_table has room for 2",
    ),
    "table low": ({"page_table": CALL.page_table.clamp(max=-1)}, r"of request 0 names pages \[-1, -1, -1\]"),
    "table high": ({"kv": CALL.kv[:1]}, "of request 0 names pages .*, expected 0 to 0"),
    "softmax scale": ({"softmax_scale": 0.0}, "softmax_scale is 0.0, expected a positive finite number"),
    "k scale": ({"k_scale": float("nan")}, "k_scale is nan"),
    "v scale": ({"v_scale": float("inf")}, "v_scale is inf"),
    "no scale": ({"v_scale": None}, "v_scale is None, expected a positive finite number"),
    "two devices": ({"topk": CALL.topk.to("meta")}, "topk is on meta, expected cpu as q"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_broken_rule_is_refused_by_name(case):
    change, message = BROKEN[case]
    with pytest.raises(OperatorError, match=message) as refused:
        replace(CALL, **change).validate()
    assert isinstance(refused.value, InputError) and refused.value.exit_code == 2
    assert str(refused.value).endswith(".")


def test_a_call_without_queries_or_requests_is_valid():
    empty = make_call(q_lens=(), prefix_lens=())
    assert empty.validate().total_q == 0
    pages, counts = supports(empty)
    assert pages.shape == (1, 0, TOPK) and counts.shape == (1, 0)


def test_garbage_past_the_last_page_of_the_table_is_allowed():
    outside = (CALL.page_table < 0) | (CALL.page_table >= CALL.k.shape[0])
    assert outside.any()
    CALL.validate()


def test_side_by_side_and_separate_caches_name_the_same_bytes():
    both, pair = make_call(3), make_call(3, separate=True)
    assert isinstance(pair.kv, tuple)
    for one, other in ((both.k, pair.k), (both.v, pair.v)):
        assert torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("separate", [False, True])
def test_moving_a_call_moves_every_tensor(separate):
    moved = make_call(separate=separate).to("meta")
    tensors = (moved.q, moved.k, moved.v, moved.topk, moved.page_table, moved.seq_lens, moved.positions)
    assert {t.device.type for t in tensors} == {moved.device.type} == {"meta"}


def test_default_positions_end_at_each_requests_last_token():
    got = right_aligned_positions(np.array([0, 2, 2, 5]), np.array([300, 9, 3]))
    assert got.tolist() == [298, 299, 0, 1, 2] and got.dtype == np.int32


def test_default_positions_never_fall_below_zero():
    assert right_aligned_positions(np.array([0, 4]), np.array([2])).tolist() == [0, 0, 0, 1]


def test_rows_know_their_request_across_empty_ones():
    assert request_of_rows(np.array([0, 2, 2, 3])).tolist() == [0, 0, 2]


def test_a_row_sees_the_shorter_of_length_and_position():
    call = make_call(q_lens=(3,), prefix_lens=(300,), seq_lens=(302,))
    assert call.positions.tolist() == [300, 301, 302]
    assert visible_tokens(call).tolist() == [301, 302, 302]


def one_row(*ids: int, visible: int) -> list[int]:
    topk = np.full((1, 1, TOPK), -1, dtype=np.int32)
    topk[0, 0, : len(ids)] = ids
    pages, counts = visible_supports(topk, np.array([visible]))
    kept = pages[0, 0, : counts[0, 0]].tolist()
    assert pages[0, 0].tolist() == kept + [-1] * (TOPK - len(kept))
    return kept


def test_supports_are_sorted_and_distinct():
    assert one_row(3, 1, 3, 0, 1, 3, visible=1000) == [0, 1, 3]


def test_ids_that_name_no_page_add_nothing():
    # 1000 tokens are pages 0 to 7; 8 is the number of pages.
    assert one_row(8, INT_MAX, -2, INT_MIN, 7, visible=1000) == [7]


def test_a_page_counts_from_its_first_visible_token_on():
    assert one_row(0, 1, 2, visible=256) == [0, 1]
    assert one_row(0, 1, 2, visible=257) == [0, 1, 2]


def test_a_row_that_sees_no_token_has_no_support():
    assert one_row(0, 1, visible=0) == []


def test_sixteen_times_one_page_is_one_page():
    assert one_row(*[5] * TOPK, visible=6 * PAGE) == [5]


@settings(deadline=None)
@given(
    ids=st.lists(st.sampled_from([-1, -2, INT_MIN, INT_MAX, *range(12)]), min_size=TOPK, max_size=TOPK),
    visible=st.integers(0, 12 * PAGE),
)
def test_supports_are_the_set_of_the_definition(ids, visible):
    assert one_row(*ids, visible=visible) == sorted({p for p in ids if p >= 0 and p * PAGE < visible})


def test_supports_leave_the_call_as_it_was():
    call = make_call(selection="dirty")
    before = call.topk.clone()
    supports(call)
    assert torch.equal(call.topk, before)


def test_the_same_seed_makes_the_same_call():
    one, two = make_call(11, selection="dirty"), make_call(11, selection="dirty")
    assert torch.equal(one.topk, two.topk) and torch.equal(one.q, two.q)
    assert not torch.equal(one.q, make_call(12, selection="dirty").q)


def test_generated_caches_hold_nan_exactly_where_no_row_may_read():
    call: SparsePrefillCall = make_call(q_lens=(9,), prefix_lens=(500,), poison="tails")
    nan = call.k.float().isnan().all(dim=-1)[:, 0]
    table = call.page_table[0, :4].long()
    assert not nan[table[:3]].any()
    assert nan[table[3]].tolist() == [False] * (509 - 3 * PAGE) + [True] * (4 * PAGE - 509)
    assert int(nan.all(dim=-1).sum()) == call.k.shape[0] - 4
    assert not make_call(poison="none").kv.float().isnan().any()
