import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pwbench.capture import Tables
from pwbench.capture.statistics import summary, union_sizes
from pwbench.errors import CaptureError
from pwbench.grouping import identity_order, prepare_unions, regroup
from tests.calls import SELECTIONS, make_call


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 999),
    q_lens=st.lists(st.integers(0, 30), min_size=1, max_size=3).filter(any),
    selection=st.sampled_from(SELECTIONS),
    group=st.sampled_from([1, 2, 4, 8, 16, 32]),
    regrouped=st.booleans(),
)
def test_union_sizes_are_those_of_the_union_lists(seed, q_lens, selection, group, regrouped):
    tables = Tables.of_call(make_call(seed, q_lens, kv_heads=2, selection=selection))
    order = identity_order(2, tables.total_q)
    if regrouped:
        order = regroup(tables.pages, tables.cu_seqlens_q, window=16, group=8)
    unions = prepare_unions(tables.pages, order, tables.cu_seqlens_q, group)
    np.testing.assert_array_equal(union_sizes(tables, group, order), np.diff(unions.offsets))
    if not regrouped:
        np.testing.assert_array_equal(union_sizes(tables, group), np.diff(unions.offsets))


def test_summary_of_nothing_is_zero():
    assert summary(np.zeros(0)) == {"groups": 0, "sum": 0, "mean": 0.0, "p10": 0.0, "p50": 0.0, "p90": 0.0}
    assert summary(np.array([1, 2, 3]))["mean"] == 2.0


@pytest.mark.parametrize("page", [-7, 2**31 - 1])
def test_pages_that_no_request_has_are_refused_and_not_counted(page):
    tables = Tables.of_call(make_call(1, [5]))
    tables.pages[0, 0, 0] = page
    with pytest.raises(CaptureError, match=r"the capture is damaged"):
        union_sizes(tables, 8)
