"""Page lists against the supports they turn around, and the sizes that keep them in bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pwbench.errors import InputError
from pwbench.operator import request_of_rows, supports
from pwbench.page_plan import (
    ROW_BYTES,
    TILE_QUERIES,
    chunk_rows_for,
    counters,
    list_queries,
    tiles,
    tiles_per_load_for,
)
from tests.calls import SELECTIONS, make_call


def hostile(seed, selection):
    return make_call(seed, (9, 0, 70, 1), (0, 300, 700, 2100), 2, selection)


def lists_of(call, chunk_rows=None):
    pages, _ = supports(call)
    return pages, list_queries(pages, call.cu_seqlens_q.numpy(), chunk_rows)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(SELECTIONS), st.sampled_from([None, 1, 7, 32, 64]))
def test_every_selected_page_of_every_row_is_listed_once_and_nothing_else(seed, selection, chunk_rows):
    call = hostile(seed, selection)
    pages, lists = lists_of(call, chunk_rows)
    owner = np.repeat(np.arange(len(lists.page)), lists.lengths)
    seen = set(zip(lists.kv_head[owner], lists.rows, lists.slots, lists.page[owner], strict=True))
    wanted = {(h, r, s, pages[h, r, s]) for h, r, s in zip(*np.nonzero(pages >= 0), strict=True)}
    assert seen == wanted and len(owner) == len(wanted)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(SELECTIONS), st.sampled_from([None, 1, 7, 32, 64]))
def test_lists_are_sorted_never_empty_and_never_cross_a_request_or_chunk(seed, selection, chunk_rows):
    call = hostile(seed, selection)
    _, lists = lists_of(call, chunk_rows)
    keys = list(zip(lists.chunk, lists.kv_head, lists.request, lists.page, strict=True))
    assert keys == sorted(set(keys))
    assert (lists.lengths > 0).all()
    request = request_of_rows(call.cu_seqlens_q.numpy())
    for i in range(len(keys)):
        rows = lists.rows[lists.offsets[i] : lists.offsets[i + 1]]
        assert (np.diff(rows) > 0).all()
        assert (request[rows] == lists.request[i]).all()
        assert (rows // (chunk_rows or call.total_q) == lists.chunk[i]).all()


def test_a_slot_is_the_rank_of_the_page_in_the_rows_own_support():
    rows = np.full((1, 3, 16), -1, dtype=np.int32)
    rows[0, 0, :3] = [2, 5, 9]
    rows[0, 2, :2] = [5, 9]
    lists = list_queries(rows, np.array([0, 3]))
    assert lists.page.tolist() == [2, 5, 9]
    assert lists.rows.tolist() == [0, 0, 2, 0, 2]
    assert lists.slots.tolist() == [0, 1, 0, 2, 1]


def test_tiles_cut_each_list_in_fours_and_pad_its_last():
    _, lists = lists_of(hostile(3, "local"))
    owner, entries = tiles(lists)
    assert len(owner) == lists.tile_counts.sum()
    used = entries[entries >= 0]
    assert (used == np.arange(len(lists.rows))).all()
    for tile, (list_, row) in enumerate(zip(owner, entries, strict=True)):
        inside = row[row >= 0]
        assert (inside >= lists.offsets[list_]).all() and (inside < lists.offsets[list_ + 1]).all()
        last = tile + 1 == len(owner) or owner[tile + 1] != list_
        assert last or len(inside) == TILE_QUERIES


def test_identical_selections_fill_every_tile_and_disjoint_ones_leave_three_places_of_four():
    call = make_call(0, (64,), (4000,), selection="identical")
    pages, lists = lists_of(call)
    assert counters(call, pages, lists, 8)["tile_occupancy"] == 1.0
    call = make_call(0, (2,), (8000,), selection="disjoint")
    pages, lists = lists_of(call)
    found = counters(call, pages, lists, 8)
    assert found["tile_occupancy"] == 0.25
    assert found["subgroup_pages"] == found["union_pages"] == found["selected_pages"] == 32


def test_counters_of_a_hand_counted_call():
    call = make_call(0, (40,), (2048,), selection="identical", seq_lens=(2176,), positions=[2175] * 40)
    pages, lists = lists_of(call)
    found = counters(call, pages, lists, 4)
    assert found["groups"] == 16
    assert found["selected_pages"] == 640
    assert found["subgroup_pages"] == 16 * 10  # 40 rows, four a tile
    assert found["union_pages"] == 16 * 3  # ten tiles, four a load
    assert found["kv_bytes"] == 48 * 32768
    assert found["partial_bytes"] == 2 * 640 * 16 * (256 + 8)
    assert found["mma_flops"] == 160 * 64 * 128 * 128 * 4
    assert found["useful_flops"] == found["mma_flops"]  # no tile place is empty and no token is hidden


def test_an_empty_call_has_counters():
    call = make_call(0, (3,), (100,), selection="empty")
    pages, lists = lists_of(call)
    found = counters(call, pages, lists, 1)
    assert found["groups"] == found["partial_bytes"] == 0
    assert found["tile_occupancy"] == 1.0


@given(st.integers(1, 40_000), st.integers(1, 8), st.integers(0, 1 << 32))
def test_a_chunk_fits_its_workspace_unless_it_is_the_smallest(total_q, kv_heads, limit):
    rows = chunk_rows_for(total_q, kv_heads, limit)
    assert 1 <= rows <= max(total_q, 32)
    assert rows * kv_heads * ROW_BYTES <= limit or rows <= 32
    if rows < total_q:
        assert rows % 32 == 0


@given(st.integers(1, 1 << 20), st.integers(1, 8))
def test_page_loads_hold_one_to_eight_tiles(chunk_rows, kv_heads):
    assert 1 <= tiles_per_load_for(chunk_rows, kv_heads) <= 8
    assert tiles_per_load_for(8192, 1) == 8
    assert tiles_per_load_for(64, 1) == 1


@pytest.mark.parametrize("chunk_rows", [0, -32])
def test_chunks_of_no_rows_are_refused(chunk_rows):
    with pytest.raises(InputError, match=f"chunk_rows is {chunk_rows}"):
        list_queries(np.full((1, 1, 16), -1, dtype=np.int32), np.array([0, 1]), chunk_rows)
