from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pwbench import variants
from pwbench.grouping import check_order, identity_order, match, prepare_unions, regroup
from pwbench.operator import SparsePrefillCall, supports
from pwbench.reference import attend, compare
from pwbench.variants import Options, Prepared
from pwbench.variants._pageweaver import PAYOFFS, Payoff
from pwbench.variants._union_cpu import UnionWalk
from tests.calls import SELECTIONS, make_call

STAGES = {
    "reference": ["attention"],
    "union8": ["metadata", "attention"],
    "union8-regroup": ["search", "metadata", "attention"],
    "union8-precomputed": ["metadata", "attention"],
    "pageweaver": ["metadata", "attention"],
    "pageweaver-original": ["metadata", "attention"],
    "pageweaver-regroup": ["search", "metadata", "attention"],
    "pageweaver-precomputed": ["metadata", "attention"],
}
"""Stages by variant; those of pageweaver where a call is too small for a search."""
UNION = [name for name in STAGES if name != "reference"]
SEARCHING = [name for name in UNION if name.endswith(("-regroup", "-precomputed"))]
LIMIT = 1e-5

CORNERS = {
    "one token": {"q_lens": (1,), "prefix_lens": (0,)},
    "one row without support": {"q_lens": (1,), "prefix_lens": (0,), "selection": "empty"},
    "no request": {"q_lens": (), "prefix_lens": ()},
    "no row": {"q_lens": (0, 0), "prefix_lens": (10, 0)},
    "k and v apart": {"q_lens": (20,), "prefix_lens": (0,), "separate": True},
    "fewer tokens than positions": {"q_lens": (33,), "prefix_lens": (300,), "seq_lens": (310,)},
    "any positions": {"q_lens": (4,), "positions": (603, 0, 127, 128)},
    "beyond 512 pages and 65536 tokens": {"q_lens": (3,), "prefix_lens": (70_000,)},
    "33 requests": {"q_lens": [1] * 33, "prefix_lens": [130] * 33, "shared_pages": 1},
    "sharp softmax": {"q_lens": (10,), "query_gain": 1e3},
}


def hostile(seed: int = 0, selection: str = "random", **more) -> SparsePrefillCall:
    """Four requests of odd lengths, one empty, sharing pages, two KV heads, scales that are not 1."""
    q_lens, prefixes = (9, 0, 135, 1), (0, 300, 700, 2100)
    return make_call(seed, q_lens, prefixes, 2, selection, shared_pages=4, k_scale=0.5, v_scale=3.0, **more)


@cache
def expected(seed: int, selection: str) -> torch.Tensor:
    return attend(hostile(seed, selection))


@cache
def corner_call(name: str) -> tuple[SparsePrefillCall, torch.Tensor]:
    call = make_call(3, **CORNERS[name])
    return call, attend(call)


@cache
def expected_after_changing_ids() -> torch.Tensor:
    return attend(replace(hostile(5, poison="none"), topk=hostile(6).topk))


def poisoned_run(call: SparsePrefillCall, name: str, options: Options | None = None) -> Prepared:
    prepared = variants.get(name).prepare(call, options or Options())
    prepared.out.fill_(torch.nan)
    prepared.run()
    return prepared


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_row_is_written_and_equals_the_reference(name, selection):
    call = hostile(1, selection)
    out = poisoned_run(call, name).out
    assert out.dtype == torch.float32 and out.shape == call.q.shape
    assert compare(out, expected(1, selection)).rel_l2 < LIMIT


@pytest.mark.parametrize("name", STAGES)
def test_rows_without_support_are_exactly_zero(name):
    call = hostile(2, "dirty")
    _, counts = supports(call)
    empty = torch.from_numpy(counts == 0).repeat_interleave(16, dim=0).T
    out = poisoned_run(call, name).out
    assert empty.any() and (out[empty] == 0).all() and (out[~empty] != 0).any()


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("corner", CORNERS)
def test_corner_calls_equal_the_reference(name, corner):
    call, wanted = corner_call(corner)
    assert compare(poisoned_run(call, name).out, wanted).rel_l2 < LIMIT


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    q_lens=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    group=st.integers(1, 32),
    selection=st.sampled_from(SELECTIONS),
)
def test_any_permutation_inside_the_requests_equals_the_reference(seed, q_lens, group, selection):
    call = make_call(seed, q_lens, [250] * len(q_lens), 2, selection)
    rng = np.random.default_rng(seed)
    walk = UnionWalk(call, group)
    bounds = call.cu_seqlens_q.tolist()
    for head in range(2):
        for begin, end in pairwise(bounds):
            walk.order[head, begin:end] = begin + rng.permutation(end - begin)
    walk.out.fill_(torch.nan)
    walk.metadata()
    walk.attention()
    assert compare(walk.out, attend(call)).rel_l2 < LIMIT


@pytest.mark.parametrize("name", STAGES)
def test_stages_in_order_equal_one_complete_call(name):
    call = hostile(4)
    whole = poisoned_run(call, name)
    cut = variants.get(name).prepare(call, Options())
    assert [stage.name for stage in cut.stages] == STAGES[name]
    cut.out.fill_(torch.nan)
    for stage in cut.stages:
        stage.run()
    assert torch.equal(cut.out, whole.out)
    # A stage can be timed alone, over and over, once those before it have run.
    for stage in cut.stages:
        stage.run()
        stage.run()
    assert torch.equal(cut.out, whole.out)


@pytest.mark.parametrize("name", STAGES)
def test_a_second_run_follows_ids_changed_in_place(name):
    call = hostile(5, poison="none")
    prepared = poisoned_run(call, name)
    call.topk.copy_(hostile(6).topk)
    prepared.run()
    assert compare(prepared.out, expected_after_changing_ids()).rel_l2 < LIMIT


@pytest.mark.parametrize("name", [name for name in STAGES if name not in SEARCHING])
def test_original_order_reports_no_permutation_and_no_window(name):
    prepared = poisoned_run(hostile(), name)
    assert prepared.query_ids() is None
    assert not {"window", "search_group"} & set(prepared.details)


@pytest.mark.parametrize("window", [64, 128])
@pytest.mark.parametrize("name", SEARCHING)
def test_the_permutation_reported_is_that_of_the_search(name, window):
    call = hostile(7)
    prepared = poisoned_run(call, name, Options(window=window))
    group, matching = 8, name.startswith("pageweaver")
    if matching:
        window, group = 64, 4  # whatever the options ask
    assert prepared.details["window"] == str(window) and prepared.details["search_group"] == str(group)
    ids = prepared.query_ids()
    assert ids.dtype == torch.int32
    bounds = call.cu_seqlens_q.numpy()
    check_order(ids.numpy(), bounds)
    pages, _ = supports(call)
    expected = match(pages, bounds, window) if matching else regroup(pages, bounds, window, group)
    assert (ids.numpy() == expected).all()
    assert (ids.numpy() != identity_order(2, call.total_q)).any()


@pytest.mark.parametrize("kernels", ["union8", "pageweaver"])
def test_the_precomputed_permutation_is_known_before_the_call(kernels):
    call = hostile(8)
    prepared = variants.get(f"{kernels}-precomputed").prepare(call, Options())
    before = prepared.query_ids()
    prepared.run()
    assert torch.equal(before, prepared.query_ids())
    assert torch.equal(before, poisoned_run(call, f"{kernels}-regroup").query_ids())


def test_eight_rows_share_a_page_list():
    groups = {name: variants.get(name).prepare(hostile(), Options()).group for name in STAGES}
    assert groups == {"reference": 1} | dict.fromkeys(UNION, 8)


def test_groups_of_four_pair_up_to_unions_of_eight():
    call = hostile(14)
    walk = UnionWalk(call, 8)
    walk.search(64, 4)
    walk.metadata()
    assert walk.unions.size.max() == 8
    halves = prepare_unions(supports(call)[0], walk.order, call.cu_seqlens_q.numpy(), 4)
    given = prepare_unions(supports(call)[0], identity_order(2, 145), call.cu_seqlens_q.numpy(), 4)
    assert halves.lengths.sum() < given.lengths.sum(), "the search is there to shrink the unions of four"


# What pageweaver chooses ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "heads", "pages", "precision", "order"),
    [
        (4770, 1, 129, "fast", "online"),
        (4769, 1, 129, "fast", "original"),
        (10374, 1, 128, "fast", "original"),
        (10376, 1, 128, "fast", "online"),
        (4643, 1, 64, "accurate", "online"),
        (4642, 1, 64, "accurate", "original"),
        (2001, 1, 500, "accurate", "online"),
        (2000, 1, 500, "accurate", "original"),
        (1301, 4, 33, "fast", "online"),
        (1301, 4, 32, "fast", "original"),
        (0, 4, 1000, "fast", "original"),
    ],
)
def test_pageweaver_searches_where_it_pays(rows, heads, pages, precision, order):
    call = make_call(15, (1,), (0,))
    call = replace(
        call,
        q=torch.empty((rows, 16 * heads, 128), dtype=torch.bfloat16),
        kv=torch.empty((1, heads, 128, 256), dtype=torch.uint8).view(torch.float8_e4m3fn),
        topk=torch.empty((heads, rows, 16), dtype=torch.int32),
        page_table=torch.zeros((1, pages), dtype=torch.int32),
    )
    options = Options(precision=precision)
    assert (call.total_q, call.kv_heads) == (rows, heads)
    assert variants.get("pageweaver").order_for(call, options) == order
    for name, fixed in (("original", "original"), ("regroup", "online"), ("precomputed", "precomputed")):
        assert variants.get(f"pageweaver-{name}").order_for(call, options) == fixed


def test_where_pageweaver_searches_it_does_what_pageweaver_regroup_does(monkeypatch):
    for regime in PAYOFFS:
        monkeypatch.setitem(PAYOFFS, regime, Payoff(saved=0.001, cost=0.1))
    call = hostile(16)
    assert call.total_q * call.kv_heads == 290
    chosen, fixed = (poisoned_run(call, name) for name in ("pageweaver", "pageweaver-regroup"))
    assert [stage.name for stage in chosen.stages] == STAGES["pageweaver-regroup"]
    assert chosen.details == fixed.details
    assert torch.equal(chosen.query_ids(), fixed.query_ids())
    assert torch.equal(chosen.out, fixed.out)


@pytest.mark.parametrize("name", STAGES)
def test_both_precisions_are_float32_on_the_cpu(name):
    assert set(variants.get(name).precisions) == {"fast", "accurate"}
    outs = [poisoned_run(hostile(9), name, Options(precision=p)).out for p in ("fast", "accurate")]
    assert torch.equal(*outs)


@pytest.mark.parametrize("name", UNION)
def test_nan_that_only_a_neighbour_selected_does_not_leak(name):
    call = make_call(10, (8,), (500,), selection="identical", poison="none")
    call.topk[:] = -1
    call.topk[..., 0] = 0
    clean = attend(call)
    call.topk[0, 3, 1] = 2
    call.kv.view(torch.uint8)[call.page_table[0, 2].long()] = 0x7F
    out = poisoned_run(call, name).out
    others = [0, 1, 2, 4, 5, 6, 7]
    assert compare(out[others], clean[others]).rel_l2 < LIMIT
    assert out[3].isnan().all()


@pytest.mark.parametrize("name", STAGES)
def test_nan_queries_stay_in_their_own_row(name):
    call = make_call(11, (16,))
    call.q[5] = torch.nan
    out = poisoned_run(call, name).out
    assert out[5].isnan().all()
    rest = [row for row in range(16) if row != 5]
    assert compare(out[rest], attend(call, rest)).rel_l2 < LIMIT


def test_permuting_the_heads_permutes_the_output():
    call = hostile(12)
    swapped = replace(
        call,
        q=call.q.view(-1, 2, 16, 128).flip(1).reshape(call.q.shape),
        kv=call.kv.view(torch.uint8).flip(1).view(torch.float8_e4m3fn),
        topk=call.topk.flip(0),
    )
    one, two = (poisoned_run(c, "union8-regroup").out.view(-1, 2, 16, 128) for c in (call, swapped))
    assert torch.equal(one, two.flip(1))


def test_attention_before_metadata_is_refused():
    with pytest.raises(RuntimeError, match="metadata"):
        UnionWalk(hostile(), 8).attention()


def test_many_groups_walk_in_several_batches(monkeypatch):
    call = hostile(13)
    whole = poisoned_run(call, "union8").out
    monkeypatch.setattr("pwbench.variants._union_cpu._ROWS_AT_ONCE", 1)
    assert compare(poisoned_run(call, "union8").out, whole).rel_l2 < LIMIT
