import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pwbench import grouping
from pwbench.errors import InputError
from pwbench.grouping import Unions, check_order, identity_order, match, prepare_unions, regroup

EXAMPLE = [{1, 2}, {8, 9}, {2, 3}, {3, 4}, {8, 10}, {9, 10}]
"""The worked example of the paper's Algorithm 1, for groups of three."""


def table(rows: list[set[int]] | list[list[set[int]]], width: int = 16) -> np.ndarray:
    """Supports of one KV head, or of several, as `operator.supports` lays them out."""
    heads = rows if rows and isinstance(rows[0], list) else [rows]
    out = np.full((len(heads), len(heads[0]), width), -1, dtype=np.int32)
    for head, sets in enumerate(heads):
        for row, pages in enumerate(sets):
            out[head, row, : len(pages)] = sorted(pages)
    return out


def greedy(rows: list[set[int]], bounds: list[int], window: int, group: int) -> list[int]:
    """Algorithm 1 word for word, one row at a time."""
    order = []
    for begin, end in pairwise(bounds):
        for first in range(begin, end, window):
            left = list(range(first, min(first + window, end)))
            while left:
                members = [left.pop(0)]
                union = set(rows[members[0]])
                while left and len(members) < group:
                    best = min(left, key=lambda j: (len(rows[j] - union), j))
                    left.remove(best)
                    members.append(best)
                    union |= rows[best]
                order += members
    return order


def slow_unions(
    rows: list[set[int]], order: list[int], bounds: list[int], group: int
) -> list[dict[int, int]]:
    """Page -> mask of every group of one KV head."""
    out = []
    for begin, end in pairwise(bounds):
        for first in range(begin, end, group):
            masks: dict[int, int] = {}
            for slot, row in enumerate(order[first : min(first + group, end)]):
                for page in rows[row]:
                    masks[page] = masks.get(page, 0) | 1 << slot
            out.append(dict(sorted(masks.items())))
    return out


def listed(unions: Unions) -> list[dict[int, int]]:
    spans = zip(unions.offsets[:-1], unions.offsets[1:], strict=True)
    return [dict(zip(unions.pages[a:b].tolist(), unions.masks[a:b].tolist(), strict=True)) for a, b in spans]


page_ids = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 40, 511, 512, 5000, 2**31 - 2])
row_sets = st.sets(page_ids, max_size=6)


@st.composite
def problems(draw):
    """Requests of any length with few enough pages that ties are the rule."""
    lengths = draw(st.lists(st.integers(0, 13), min_size=1, max_size=4))
    bounds = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    heads = draw(st.integers(1, 2))
    rows = [draw(st.lists(row_sets, min_size=bounds[-1], max_size=bounds[-1])) for _ in range(heads)]
    return rows, bounds


def test_worked_example_finds_the_papers_order():
    assert regroup(table(EXAMPLE), np.array([0, 6]), group=3).tolist() == [[0, 2, 3, 1, 4, 5]]


def test_worked_example_saves_three_of_ten_page_visits():
    supports, bounds = table(EXAMPLE), np.array([0, 6])
    original = prepare_unions(supports, identity_order(1, 6), bounds, 3)
    regrouped = prepare_unions(supports, regroup(supports, bounds, group=3), bounds, 3)
    assert original.lengths.tolist() == [5, 5]
    assert regrouped.lengths.tolist() == [4, 3]
    assert listed(regrouped) == [{1: 1, 2: 3, 3: 6, 4: 4}, {8: 3, 9: 5, 10: 6}]


@settings(max_examples=150, deadline=None)
@given(problems(), st.integers(1, 15), st.integers(1, 9))
def test_search_equals_the_greedy_of_the_paper(problem, window, group):
    rows, bounds = problem
    # Six wide, so that some rows have no padding and others have: padding must never count as a page.
    order = regroup(table(rows, width=6), np.array(bounds), window, group)
    assert order.dtype == np.int32
    assert order.tolist() == [greedy(sets, bounds, window, group) for sets in rows]


@pytest.mark.parametrize("group", [4, 8, 16, 32])
def test_search_equals_the_greedy_on_full_windows(group):
    rng = np.random.default_rng(group)
    rows = [set(rng.choice(40, rng.integers(0, 17), replace=False).tolist()) for _ in range(300)]
    bounds = [0, 129, 300]
    assert regroup(table(rows), np.array(bounds), 128, group).tolist() == [greedy(rows, bounds, 128, group)]


def test_search_in_batches_of_windows_changes_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    rows = [set(rng.choice(30, 5, replace=False).tolist()) for _ in range(50)]
    supports, bounds = table([rows, rows[::-1]]), np.array([0, 7, 50])
    whole = regroup(supports, bounds, 8, 4)
    monkeypatch.setattr(grouping, "_WINDOWS_AT_ONCE", 3)
    assert (regroup(supports, bounds, 8, 4) == whole).all()


@pytest.mark.parametrize("rows", [[set()] * 20, [{7}] * 20, [{i} for i in range(20)]])
def test_ties_go_to_the_lowest_row(rows):
    assert regroup(table(rows), np.array([0, 20]), 16, 8).tolist() == [list(range(20))]


def test_windows_start_at_each_request_and_stay_inside_it():
    # Equal rows on both sides of every border: only the border can keep them apart.
    rows = [{i % 2} for i in range(11)]
    order = regroup(table(rows), np.array([0, 5, 5, 11]), window=4, group=2)[0]
    assert [sorted(order[a:b]) for a, b in ((0, 4), (4, 5), (5, 9), (9, 11))] == [
        [0, 1, 2, 3],
        [4],
        [5, 6, 7, 8],
        [9, 10],
    ]
    assert order.tolist() == [0, 2, 1, 3, 4, 5, 7, 6, 8, 9, 10]


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(1, 15), st.integers(1, 9))
def test_order_is_a_bijection_inside_every_window(problem, window, group):
    rows, bounds = problem
    order = regroup(table(rows), np.array(bounds), window, group)
    check_order(order, np.array(bounds))
    for begin, end in pairwise(bounds):
        for first in range(begin, end, window):
            last = min(first + window, end)
            assert (np.sort(order[:, first:last]) == np.arange(first, last)).all()


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(1, 32), st.randoms(use_true_random=False))
def test_unions_equal_the_sets_of_their_slots_for_any_order(problem, group, random):
    rows, bounds = problem
    order = np.empty((len(rows), bounds[-1]), dtype=np.int32)
    for head in range(len(rows)):
        for begin, end in pairwise(bounds):
            order[head, begin:end] = random.sample(range(begin, end), end - begin)
    unions = prepare_unions(table(rows), order, np.array(bounds), group)
    expected = [slow_unions(sets, order[h].tolist(), bounds, group) for h, sets in enumerate(rows)]
    assert listed(unions) == [masks for head in expected for masks in head]
    assert all(list(masks) == sorted(masks) for masks in listed(unions))
    assert unions.groups == len(rows) * sum(-(-n // group) for n in np.diff(bounds))
    assert unions.kv_head.tolist() == sorted(unions.kv_head.tolist())
    for head, begin, size, length in zip(
        unions.kv_head, unions.begin, unions.size, unions.lengths, strict=True
    ):
        assert length >= max(len(rows[head][row]) for row in order[head, begin : begin + size])
    assert (unions.masks > 0).all() and (unions.subgroup_pages() >= len(unions.pages))


@settings(max_examples=50, deadline=None)
@given(problems(), st.integers(1, 32))
def test_subgroup_pages_count_the_union_of_every_four_slots(problem, group):
    rows, bounds = problem
    unions = prepare_unions(table(rows), identity_order(len(rows), bounds[-1]), np.array(bounds), group)
    count = 0
    for sets in rows:
        for begin, end in pairwise(bounds):
            for first in range(begin, end, group):
                last = min(first + group, end)
                count += sum(len(set().union(*sets[a : min(a + 4, last)])) for a in range(first, last, 4))
    assert unions.subgroup_pages() == count


def test_unions_have_the_promised_types():
    unions = prepare_unions(table(EXAMPLE), identity_order(1, 6), np.array([0, 6]), 8)
    assert [a.dtype.name for a in (unions.kv_head, unions.begin, unions.size, unions.pages)] == ["int32"] * 4
    assert unions.offsets.dtype == np.int64 and unions.masks.dtype == np.uint32
    assert unions.size.tolist() == [6] and unions.begin.tolist() == [0]


def test_last_of_thirty_two_slots_has_its_bit():
    rows = [{0}] * 31 + [{1}]
    unions = prepare_unions(table(rows), identity_order(1, 32), np.array([0, 32]), 32)
    assert unions.masks.tolist() == [2**31 - 1, 2**31]


def test_repeated_pages_add_nothing_to_a_union():
    supports = np.full((1, 2, 16), 3, dtype=np.int32)
    assert listed(prepare_unions(supports, identity_order(1, 2), np.array([0, 2]), 8)) == [{3: 3}]


@pytest.mark.parametrize("rows", [[], [set()], [set()] * 9])
def test_nothing_selected_makes_empty_unions(rows):
    supports = table(rows) if rows else np.empty((1, 0, 16), dtype=np.int32)
    bounds = np.array([0, len(rows)])
    order = regroup(supports, bounds)
    assert order.tolist() == [list(range(len(rows)))]
    unions = prepare_unions(supports, order, bounds, 8)
    assert unions.groups == -(-len(rows) // 8) and not unions.lengths.any() and not len(unions.pages)


def test_disjoint_rows_fill_the_longest_possible_union():
    rows = [set(range(16 * i, 16 * i + 16)) for i in range(32)]
    supports, bounds = table(rows), np.array([0, 32])
    unions = prepare_unions(supports, regroup(supports, bounds, group=32), bounds, 32)
    assert unions.lengths.tolist() == [512]


def local_rows(seed: int, rows: int) -> np.ndarray:
    """Supports whose neighbours share some pages, and rows further off others, ``[1, rows, 16]``."""
    rng = np.random.default_rng(seed)
    topics = np.stack([rng.choice(300, 40, replace=False) for _ in range(12)])
    own = [rng.choice(topics[t], 16, replace=False) for t in rng.integers(0, 12, rows)]
    return np.sort(np.array(own), axis=-1)[None].astype(np.int32)


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(1, 15))
def test_matching_permutes_whole_quads_of_every_window_and_leaves_the_rest(problem, window):
    rows, bounds = problem
    order = match(table(rows, width=6), np.array(bounds), window)
    assert order.dtype == np.int32
    check_order(order, np.array(bounds))
    for begin, end in pairwise(bounds):
        for first in range(begin, end, window):
            last = min(first + window, end)
            whole = first + (last - first) // 4 * 4
            assert (np.sort(order[:, first:whole]) == np.arange(first, whole)).all()
            assert (order[:, whole:last] == np.arange(whole, last)).all()


def test_matching_brings_equal_rows_together_wherever_in_their_reach_they_are():
    """Nearly all of them: one sweep of exchanges is no exact matching."""
    rng = np.random.default_rng(4)
    halves = [rng.permutation(np.repeat(range(first, first + 8), 4)) for first in (0, 8)]
    rows = [{100 * kind + page for page in range(16)} for kind in np.concatenate(halves)]
    supports, bounds = table(rows), np.array([0, 64])
    unions, apart = (
        prepare_unions(supports, order, bounds, 4).lengths.sum()
        for order in (match(supports, bounds), identity_order(1, 64))
    )
    assert unions <= 16 * (16 + 4) < apart / 2


def test_matching_costs_less_than_the_greedy_search():
    """Page visits of the tiles and copies of the pages together."""
    supports, bounds = local_rows(0, 1024), np.array([0, 1024])
    unions = {
        name: prepare_unions(supports, order, bounds, 8)
        for name, order in (
            ("original", identity_order(1, 1024)),
            ("greedy", regroup(supports, bounds, 64, 4)),
            ("matching", match(supports, bounds)),
        )
    }
    cost = {name: made.subgroup_pages() + made.lengths.sum() for name, made in unions.items()}
    assert cost["matching"] < 0.95 * cost["greedy"] < cost["original"]


def test_what_was_paired_goes_by_its_lowest_row_and_so_do_the_partners():
    rows = match(local_rows(1, 64), np.array([0, 64]))[0]
    for size in (2, 4, 8):
        halves = rows.reshape(-1, 2, size // 2)
        assert (halves[:, 0, 0] < halves[:, 1, 0]).all()
    assert (np.diff(rows[::8]) > 0).all()


def test_neighbouring_quads_share_more_pages_than_they_would_by_their_lowest_rows():
    supports, bounds = local_rows(8, 1024), np.array([0, 1024])
    order = match(supports, bounds)
    quads = order.reshape(16, 16, 4)
    by_row = np.take_along_axis(quads, np.argsort(quads[:, :, :1], axis=1), axis=1).reshape(1, -1)
    found, plain = (prepare_unions(supports, slots, bounds) for slots in (order, by_row))
    assert found.subgroup_pages() == plain.subgroup_pages()
    assert found.lengths.sum() < 0.98 * plain.lengths.sum()


@pytest.mark.parametrize("rows", [[set()] * 64, [{7}] * 64, [{i} for i in range(64)]])
def test_matching_of_rows_all_alike_is_some_order(rows):
    check_order(match(table(rows), np.array([0, 64])), np.array([0, 64]))


def test_matching_in_batches_of_windows_changes_nothing(monkeypatch):
    supports, bounds = local_rows(2, 300), np.array([0, 7, 300])
    whole = match(supports, bounds)
    monkeypatch.setattr(grouping, "_WINDOWS_AT_ONCE", 2)
    assert (match(supports, bounds) == whole).all()


@pytest.mark.parametrize("window", [0, 65])
def test_matching_refuses_windows_it_cannot_hold(window):
    with pytest.raises(InputError, match=f"window is {window}, expected 1 to 64"):
        match(table(EXAMPLE), np.array([0, 6]), window)


def test_a_chunk_of_8192_rows_over_512_pages_is_searched_in_two_seconds():
    rng = np.random.default_rng(0)
    supports = np.sort(np.argsort(rng.random((1, 8192, 512)), axis=-1)[..., :16], axis=-1).astype(np.int32)
    begin = time.perf_counter()
    order = regroup(supports, np.array([0, 8192]), 128, 8)
    unions = prepare_unions(supports, order, np.array([0, 8192]), 8)
    assert time.perf_counter() - begin < 2
    assert unions.groups == 1024
    begin = time.perf_counter()
    match(supports, np.array([0, 8192]))
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize(("window", "group"), [(0, 8), (128, 0), (-1, 8)])
def test_search_refuses_sizes_below_one(window, group):
    with pytest.raises(InputError, match=f"window is {window} and group is {group}"):
        regroup(table(EXAMPLE), np.array([0, 6]), window, group)


@pytest.mark.parametrize("group", [0, 33])
def test_unions_refuse_groups_that_no_mask_can_hold(group):
    with pytest.raises(InputError, match=f"group is {group}, expected 1 to 32"):
        prepare_unions(table(EXAMPLE), identity_order(1, 6), np.array([0, 6]), group)


@pytest.mark.parametrize("bounds", [[], [0, 5], [1, 6], [0, 4, 3, 6], [[0, 6]]])
def test_boundaries_that_do_not_cover_the_rows_are_refused(bounds):
    for refuse in (
        lambda: regroup(table(EXAMPLE), np.array(bounds)),
        lambda: match(table(EXAMPLE), np.array(bounds)),
        lambda: prepare_unions(table(EXAMPLE), identity_order(1, 6), np.array(bounds)),
        lambda: check_order(identity_order(1, 6), np.array(bounds)),
    ):
        with pytest.raises(InputError, match="expected boundaries rising from 0 to 6"):
            refuse()


def test_unions_refuse_an_order_of_another_shape():
    with pytest.raises(InputError, match=r"order is \[1, 5\], expected \[1, 6\]"):
        prepare_unions(table(EXAMPLE), identity_order(1, 5), np.array([0, 6]))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 0, 2, 3], "KV head 0 runs row 0 2 times, expected once"),
        ([2, 1, 0, 3], "runs row 2 at slot 0, expected a row of that slot's request, 0 to 1"),
        ([0, 1, 2, 4], "runs row 4 at slot 3, expected a row of that slot's request, 2 to 3"),
        ([-1, 1, 2, 3], "runs row -1 at slot 0"),
    ],
)
def test_an_order_that_is_no_bijection_inside_its_requests_is_refused(order, message):
    with pytest.raises(InputError, match=message):
        check_order(np.array([order], dtype=np.int32), np.array([0, 2, 4]))
