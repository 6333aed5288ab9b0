"""The rows that are compared, and the bytes a call cannot avoid."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pwbench import capture
from pwbench._checked_run import Subject, sample_rows
from pwbench.operator import supports
from pwbench.plan import Settings
from tests.calls import make_call

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(lambda lengths: sum(lengths) > 0)


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, wanted=st.integers(1, 60), seed=st.integers(0, 3))
def test_checked_rows_are_distinct_ascending_and_as_many_as_wanted(lengths, wanted, seed):
    call = make_call(0, q_lens=lengths)
    rows = sample_rows(call, wanted, seed)
    assert len(rows) == min(wanted, call.total_q)
    assert (np.diff(rows) > 0).all() and rows[0] >= 0 and rows[-1] < call.total_q
    assert (rows == sample_rows(call, wanted, seed)).all()


def test_the_first_and_last_row_of_every_request_are_always_checked():
    call = make_call(0, q_lens=(100, 0, 1, 50))
    rows = sample_rows(call, 12, seed=3)
    assert {0, 99, 100, 101, 150} <= set(rows.tolist())


def test_distinct_pages_count_once_however_many_rows_select_them(small_captures):
    import torch

    loaded = capture.load(small_captures / "small" / "one")
    subject = Subject.load(loaded, Settings(device=torch.device("cpu")))
    call = subject.call
    pages, seen = supports(call)[0], set()
    table, bounds = call.page_table.tolist(), call.cu_seqlens_q.tolist()
    for request in range(call.requests):
        for head in range(call.kv_heads):
            for row in range(bounds[request], bounds[request + 1]):
                seen |= {(head, table[request][page]) for page in pages[head, row].tolist() if page >= 0}
    assert subject.page_bytes == 32768 * len(seen)
