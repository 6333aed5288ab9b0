import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pwbench.counters import count
from pwbench.errors import InputError
from pwbench.grouping import identity_order, regroup
from pwbench.operator import PAGE, SparsePrefillCall, supports
from tests.calls import SELECTIONS, make_call

KEYS = ["groups", "selected_pages", "union_pages", "subgroup_pages", "kv_bytes", "mma_flops", "useful_flops"]


def slowly(call: SparsePrefillCall, order: np.ndarray, group: int) -> dict[str, int]:
    """Every counter from raw ids and tokens, with Python sets."""
    bounds = call.cu_seqlens_q.tolist()
    groups = selected = union = quads = keys = 0
    for request, length in enumerate(call.seq_lens.tolist()):
        begin, end = bounds[request], bounds[request + 1]
        for head in range(call.kv_heads):
            sets = {}
            for row in range(begin, end):
                last = min(length, int(call.positions[row]) + 1)
                ids = set(call.topk[head, row].tolist())
                sets[row] = {t // PAGE for t in range(0, last, PAGE)} & ids
                keys += sum(1 for t in range(last) if t // PAGE in ids)
                selected += len(sets[row])
            for first in range(begin, end, group):
                members = order[head, first : min(first + group, end)].tolist()
                groups += 1
                union += len(set().union(*(sets[row] for row in members)))
                for quad in range(0, len(members), 4):
                    quads += len(set().union(*(sets[row] for row in members[quad : quad + 4])))
    return {
        "groups": groups,
        "selected_pages": selected,
        "union_pages": union,
        "subgroup_pages": quads,
        "kv_bytes": union * 128 * 256,
        "mma_flops": quads * (64 * 128 * 128 * 2) * 2,
        "useful_flops": keys * 16 * (128 * 2 + 128 * 2),
    }


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    q_lens=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    selection=st.sampled_from(SELECTIONS),
    group=st.integers(1, 32),
    regrouped=st.booleans(),
)
def test_counters_equal_a_count_by_hand(seed, q_lens, selection, group, regrouped):
    lens = [300 * i for i, _ in enumerate(q_lens)]
    call = make_call(seed, q_lens, lens, 2, selection, poison="none", spare_pages=1)
    pages, _ = supports(call)
    order = identity_order(2, call.total_q)
    if regrouped:
        order = regroup(pages, call.cu_seqlens_q.numpy(), 8, group)
    counted = count(call, pages, order, group)
    assert list(counted) == KEYS and all(type(value) is int for value in counted.values())
    assert counted == slowly(call, order, group)


def test_rows_of_16_whole_pages_do_the_work_of_2048_keys():
    # 8192 such rows are the 137 GFLOP that the useful work of a full chunk comes to.
    call = make_call(1, (64,), (20 * PAGE,), selection="identical", poison="none")
    call.topk[:] = torch.arange(16, dtype=torch.int32)
    assert count(call, supports(call)[0], identity_order(1, 64), 8) == {
        "groups": 8,
        "selected_pages": 64 * 16,
        "union_pages": 8 * 16,
        "subgroup_pages": 16 * 16,
        "kv_bytes": 8 * 16 * 32768,
        "mma_flops": 16 * 16 * 4_194_304,
        "useful_flops": 64 * 2048 * 8192,
    }


def test_a_page_reaching_past_the_length_counts_only_its_tokens():
    call = make_call(2, (2,), (300,), seq_lens=(301,), selection="identical")
    call.topk[:] = -1
    call.topk[..., 0] = 2
    counted = count(call, supports(call)[0], identity_order(1, 2), 8)
    assert counted["useful_flops"] == 4 * 128 * 16 * 2 * (301 - 256)


def test_sharing_nothing_visits_every_selected_page():
    call = make_call(3, (13,), selection="dirty")
    counted = count(call, supports(call)[0], identity_order(1, 13), 1)
    assert counted["union_pages"] == counted["subgroup_pages"] == counted["selected_pages"]


def test_an_order_that_repeats_a_row_is_refused():
    call = make_call(4, (5,))
    order = identity_order(1, 5)
    order[0, 0] = 1
    with pytest.raises(InputError, match="expected once"):
        count(call, supports(call)[0], order, 8)
