import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pwbench.capture.format import QUERIES, REQUESTS, Tables
from pwbench.errors import CaptureError
from pwbench.operator import TOPK, supports
from tests.calls import SELECTIONS, make_call

FIELDS = ("pages", "counts", "positions", "cu_seqlens_q", "seq_lens", "page_table")


def assert_equal(left: Tables, right: Tables) -> None:
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
        assert getattr(left, name).dtype == getattr(right, name).dtype, name


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    q_lens=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any),
    kv_heads=st.integers(1, 3),
    selection=st.sampled_from(SELECTIONS),
    shared_pages=st.integers(0, 3),
)
def test_tables_survive_parquet(tmp_path_factory, seed, q_lens, kv_heads, selection, shared_pages):
    call = make_call(seed, q_lens, kv_heads=kv_heads, selection=selection, shared_pages=shared_pages)
    tables = Tables.of_call(call)
    folder = tmp_path_factory.mktemp("tables")
    tables.write(folder)
    again = Tables.read(folder)
    assert_equal(tables, again)
    assert again.sha256() == tables.sha256()


def test_tables_hold_the_supports_and_not_the_raw_selections():
    call = make_call(3, (30,), selection="dirty")
    tables = Tables.of_call(call)
    pages, counts = supports(call)
    np.testing.assert_array_equal(tables.pages, pages)
    np.testing.assert_array_equal(tables.counts, counts)


def test_page_table_entries_past_a_request_are_not_part_of_the_tables():
    call = make_call(1, (20, 9), prefix_lens=(700, 100))
    noisy = call.page_table.clone()
    noisy[1, 1:] = 123
    assert (
        Tables.of_call(call).sha256()
        == Tables.of_call(type(call)(**{**vars(call), "page_table": noisy})).sha256()
    )


def test_pages_beyond_int16_survive(tmp_path):
    call = make_call(1, (4,), prefix_lens=(0,))
    tables = Tables.of_call(call)
    far = tables.pages.copy()
    far[0, 0, :2] = (40_000, 2**31 - 1)
    wide = Tables(far, *(getattr(tables, name) for name in FIELDS[1:]))
    wide.write(tmp_path)
    np.testing.assert_array_equal(Tables.read(tmp_path).pages, far)


@pytest.mark.parametrize("field", ["pages", "positions", "seq_lens", "page_table"])
def test_hash_sees_every_array(field):
    tables = Tables.of_call(make_call(1, (20,)))
    changed = getattr(tables, field).copy()
    changed.flat[0] += 1
    other = Tables(**{name: changed if name == field else getattr(tables, name) for name in FIELDS})
    assert other.sha256() != tables.sha256()


def test_hash_is_pinned():
    """Stored captures are compared by this hash for good: a change here needs a new format version."""
    pages = np.full((1, 2, TOPK), -1, dtype=np.int32)
    pages[0, :, 0] = (0, 1)
    tables = Tables(
        pages,
        np.array([[1, 1]], np.int32),
        np.array([127, 128], np.int32),
        np.array([0, 2], np.int32),
        np.array([129], np.int32),
        np.array([[1, 0]], np.int32),
    )
    assert tables.sha256() == "6230c86cd0488cd6f47a2017ed43d7cab7f7435e08ba59d72ba4f654f123e2d3"


def test_a_query_costs_few_bytes(tmp_path):
    call = make_call(1, (4096,), prefix_lens=(4096,), selection="local", spare_pages=0)
    Tables.of_call(call).write(tmp_path)
    assert (tmp_path / QUERIES).stat().st_size < 8 * 4096


def _rewrite(path, column, values) -> None:
    table = pq.read_table(path)
    index = table.column_names.index(column)
    pq.write_table(table.set_column(index, column, values), path)


@pytest.mark.parametrize(
    ("file", "column", "values", "message"),
    [
        (QUERIES, "row", pa.array([1, 0, *range(2, 29)]), "not sorted by kv_head and row"),
        (QUERIES, "kv_head", pa.array([1] * 29), "not sorted by kv_head and row"),
        (QUERIES, "n_sel", pa.array([1.5] * 29), "expected integers"),
        (QUERIES, "position", pa.array([None, *range(28)], pa.int32()), "1 nulls"),
        (QUERIES, "pages", pa.array([[1, 2]] * 29, pa.list_(pa.int32())), "lists of exactly 16"),
        (QUERIES, "pages", pa.array([None] + [[0] * 16] * 28, pa.list_(pa.int32(), 16)), "nulls"),
        (REQUESTS, "q_start", pa.array([0, 5]), "q_start begins"),
        (REQUESTS, "q_len", pa.array([20, 10]), "29 rows"),
        (REQUESTS, "q_len", pa.array([30, -1]), "expected"),
        (REQUESTS, "page_table", pa.array([1, 2]), "lists of integers"),
        (REQUESTS, "page_table", pa.array([[1, None], [2]]), "nulls"),
    ],
)
def test_tables_that_form_no_arrays_are_refused(tmp_path, file, column, values, message):
    Tables.of_call(make_call(1, (20, 9))).write(tmp_path)
    _rewrite(tmp_path / file, column, values)
    with pytest.raises(CaptureError, match=message):
        Tables.read(tmp_path)


def test_a_missing_column_and_a_file_that_is_not_parquet_are_refused(tmp_path):
    Tables.of_call(make_call(1, (20,))).write(tmp_path)
    table = pq.read_table(tmp_path / QUERIES)
    pq.write_table(table.drop_columns(["position"]), tmp_path / QUERIES)
    with pytest.raises(CaptureError, match="no column position"):
        Tables.read(tmp_path)
    (tmp_path / QUERIES).write_bytes(b"not parquet")
    with pytest.raises(CaptureError, match="cannot be read as Parquet"):
        Tables.read(tmp_path)


def test_unknown_columns_are_passed_over(tmp_path):
    tables = Tables.of_call(make_call(1, (20,)))
    tables.write(tmp_path)
    table = pq.read_table(tmp_path / QUERIES)
    pq.write_table(table.append_column("score", pa.array([0.5] * 20)), tmp_path / QUERIES)
    assert_equal(Tables.read(tmp_path), tables)


def test_call_of_tables_is_the_call_again():
    call = make_call(4, (20, 9), selection="dirty", k_scale=0.5)
    again = Tables.of_call(call).call(call.q, call.kv, call.softmax_scale, call.k_scale, call.v_scale)
    for got, want in zip(supports(again), supports(call), strict=True):
        np.testing.assert_array_equal(got, want)
    assert torch.equal(again.positions, call.positions)
    assert again.k_scale == 0.5
