from dataclasses import replace

import pytest
import torch

from pwbench.capture.logits import FEW_TOKENS, LATE_OCTAVES, late_maxima
from pwbench.operator import PAGE, SparsePrefillCall

PAGES = 4


def call_of(*logits: float, position: int = PAGES * PAGE - 1, token: int = 0) -> SparsePrefillCall:
    """One row that selected all four pages, whose first head sees ``logits[p]`` octaves on one token of page
    p. Its other heads see 0 everywhere."""
    q = torch.zeros(1, 16, 128, dtype=torch.bfloat16)
    q[0, 0, 0] = 1
    kv = torch.zeros(PAGES, 1, PAGE, 256)
    for page, octaves in enumerate(logits):
        kv[page, 0, token, 0] = octaves
    return SparsePrefillCall(
        q=q,
        kv=kv.to(torch.float8_e4m3fn),
        topk=torch.tensor([[[2, 0, 3, 1, *([-1] * 12)]]], dtype=torch.int32),
        page_table=torch.arange(PAGES, dtype=torch.int32)[None],
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([PAGES * PAGE], dtype=torch.int32),
        positions=torch.tensor([position], dtype=torch.int32),
        softmax_scale=0.6931471805599453,  # a product of 1 is one octave
    ).validate()


@pytest.mark.parametrize(
    ("logits", "late"),
    [
        ((0, 0, 0, 0), 0),
        ((0, 0, LATE_OCTAVES, 0), 0),  # as much is not more
        ((0, 0, 5, 0), 1),
        ((5, 0, 5, 0), 1),  # the second one is no longer above the reference
        ((10, 0, 5, 0), 2),
        ((10, 0, 5, 6), 0),
        ((9, 0, 0, 6), 0),
    ],
)
def test_a_late_maximum_is_what_outgrows_the_newest_page(logits, late):
    assert late_maxima(call_of(*logits)) == late


def test_the_newest_page_comes_second_where_few_of_its_tokens_are_seen():
    few, enough = (3 * PAGE + tokens - 1 for tokens in (FEW_TOKENS - 1, FEW_TOKENS))
    assert late_maxima(call_of(0, 0, 5, 0, position=few)) == 0
    assert late_maxima(call_of(0, 0, 0, 5, position=few)) == 1
    assert late_maxima(call_of(0, 0, 5, 0, position=enough)) == 1
    assert late_maxima(call_of(0, 0, 0, 5, position=enough)) == 0


def test_what_a_row_does_not_see_or_select_does_not_count():
    assert late_maxima(call_of(0, 0, 8, 8, position=2 * PAGE, token=1)) == 0
    assert late_maxima(call_of(0, 0, 8, 8, position=2 * PAGE + 1, token=1)) == 1
    one = call_of(8, 8, 8, 0)
    assert late_maxima(replace(one, topk=torch.where(one.topk == 3, one.topk, -1))) == 0
    assert late_maxima(replace(one, topk=torch.full_like(one.topk, -1))) == 0


def test_rows_of_a_request_without_tokens_do_not_count():
    """Nothing is read of its page table, which may hold anything or be empty."""
    one = call_of(10, 0, 5, 0)
    two = replace(
        one,
        q=one.q.repeat(2, 1, 1),
        topk=one.topk.repeat(1, 2, 1),
        page_table=torch.stack([one.page_table[0], torch.full((PAGES,), 1 << 30, dtype=torch.int32)]),
        cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32),
        seq_lens=torch.tensor([PAGES * PAGE, 0], dtype=torch.int32),
        positions=one.positions.repeat(2),
    ).validate()
    assert late_maxima(two) == 1  # two of the first row, none of the second
    nothing = replace(one, page_table=one.page_table[:, :0], seq_lens=torch.zeros(1, dtype=torch.int32))
    assert late_maxima(nothing.validate()) == 0


def test_a_call_without_values_says_nothing():
    one = call_of(0, 0, 5, 0)
    assert late_maxima(replace(one, q=torch.zeros_like(one.q))) is None


def test_scales_count():
    assert late_maxima(replace(call_of(0, 0, 4, 0), k_scale=2.0)) == 1
