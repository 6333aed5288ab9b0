import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pwbench.capture import Tables
from pwbench.capture.statistics import union_sizes
from pwbench.capture.synthetic import PATTERNS, generate, generate_batch
from pwbench.errors import InputError


def union8(**options):
    return union_sizes(Tables.of_call(generate(**options).call), 8).mean()


@settings(max_examples=20, deadline=None)
@given(
    context=st.integers(1, 5000),
    queries=st.integers(1, 60),
    pattern=st.sampled_from(PATTERNS),
    affinity=st.floats(0, 1),
    kv_heads=st.integers(1, 2),
)
def test_selections_are_distinct_and_visible(context, queries, pattern, affinity, kv_heads):
    queries = min(queries, context)
    call = generate(context, queries, pattern=pattern, affinity=affinity, kv_heads=kv_heads).call
    selected = (call.topk >= 0).sum(-1).numpy()
    counts = Tables.of_call(call).counts
    if pattern != "disjoint":
        np.testing.assert_array_equal(counts, selected)
    if pattern in ("persistent", "random", "identical"):
        assert (call.topk == call.positions[None, :, None] // 128).any(-1).all()
        np.testing.assert_array_equal(counts[0], np.minimum(call.positions.numpy() // 128 + 1, 16))


def test_affinity_makes_unions_smaller():
    sizes = [union8(context=32768, queries=256, affinity=a, seed=1) for a in (0.0, 0.5, 0.9, 1.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 17 < 60 < sizes[0]


def test_extremes_are_extreme():
    options = {"context": 65536, "queries": 64}
    assert union8(pattern="identical", **options) == 16
    assert union8(pattern="disjoint", **options) == 128
    assert union8(pattern="empty", **options) == 0
    assert 80 < union8(pattern="random", **options) < 128


def test_one_seed_gives_one_capture():
    first, again, other = (generate(4096, 32, seed=s).call for s in (5, 5, 6))
    assert torch.equal(first.topk, again.topk)
    assert not torch.equal(first.topk, other.topk)


def test_it_says_that_it_is_synthetic():
    assert generate(512, 4, affinity=0.7).facts["synthetic"] == {
        "pattern": "persistent",
        "affinity": 0.7,
        "seed": 0,
    }


@pytest.mark.parametrize(
    "options",
    [
        {"queries": 0},
        {"queries": 513},
        {"pattern": "odd"},
        {"affinity": 1.5},
        {"affinity": float("nan")},
        {"kv_heads": 0},
        {"seed": -1},
    ],
)
def test_values_out_of_range_are_refused(options):
    with pytest.raises(InputError, match="expected"):
        generate(**({"context": 512, "queries": 4} | options))


def test_a_batch_shares_its_rows_out_and_scatters_its_pages():
    recording = generate_batch(8192, 300, requests=12, seed=3)
    call = recording.call.validate()
    rows = call.cu_seqlens_q.diff()
    assert call.total_q == 300 and len(rows) == 12 and rows.min() >= 1
    assert int(call.seq_lens.max()) == 8192 and len(set(call.seq_lens.tolist())) > 6
    used = call.page_table[call.page_table >= 0]
    assert len(used) == len(set(used.tolist())) and not torch.equal(used, used.sort().values)
    assert recording.facts["synthetic"]["requests"] == 12
    again = generate_batch(8192, 300, requests=12, seed=3).call
    assert torch.equal(again.topk, call.topk) and torch.equal(again.page_table, call.page_table)


@pytest.mark.parametrize(("requests", "queries"), [(0, 5), (6, 5), (1, 300)])
def test_a_batch_that_does_not_fit_is_refused(requests, queries):
    with pytest.raises(InputError, match="requests"):
        generate_batch(200, queries, requests=requests)
