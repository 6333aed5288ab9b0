"""The cost model: what must hold whatever its constants are."""

import numpy as np
import pytest

from pwbench import counters, page_cost, page_plan
from pwbench.capture import synthetic
from pwbench.grouping import identity_order
from pwbench.operator import supports

MACHINE = page_cost.Machine()


def both(call):
    """Counters of groups of 8, counters of page lists, page shares and rows x heads of one call."""
    pages, _ = supports(call)
    bounds = call.cu_seqlens_q.numpy()
    order = identity_order(call.kv_heads, call.total_q)
    lists = page_plan.list_queries(pages, bounds)
    group = counters.count(call, pages, order, 8)
    page = page_plan.counters(call, pages, lists, 4)
    shares = page_cost.page_shares(pages, order, bounds, lists, 4)
    return group, page, shares, call.total_q * call.kv_heads


@pytest.fixture(params=["persistent", "random", "identical", "disjoint"])
def study(request):
    return both(synthetic.generate(30_000, 600, pattern=request.param, seed=3, kv_heads=2).call)


def test_shares_of_the_pages_add_up_to_the_counters(study):
    group, page, shares, _ = study
    assert shares.entries.sum() == group["selected_pages"] == page["selected_pages"]
    assert shares.rounds.sum() == group["subgroup_pages"]
    assert shares.visits.sum() == group["union_pages"]
    assert shares.tiles.sum() == page["subgroup_pages"]
    assert shares.loads.sum() == page["union_pages"]


def test_shares_respect_request_boundaries():
    from tests.calls import make_call

    group, _, shares, _ = both(make_call(1, (5, 0, 41, 3), (0, 300, 700, 2100), 2, "dirty"))
    assert shares.rounds.sum() == group["subgroup_pages"]
    assert shares.visits.sum() == group["union_pages"]
    assert (shares.rounds >= shares.entries / 4).all()


@pytest.mark.parametrize("folded", [False, True])
def test_a_hybrid_is_never_predicted_slower_than_both_pure_designs(study, folded):
    group, _, shares, rows = study
    hybrid = page_cost.best_hybrid(shares, rows, MACHINE, folded)
    assert hybrid.us <= hybrid.pure_us and 0 <= hybrid.gain < 1
    assert hybrid.pure_us <= page_cost.group_major(group, rows, MACHINE).us + 1e-9


def test_folding_is_a_bound_on_the_hybrid_with_a_reduction(study):
    _, _, shares, rows = study
    serial = page_cost.best_hybrid(shares, rows, MACHINE)
    assert page_cost.best_hybrid(shares, rows, MACHINE, folded=True).us <= serial.us + 1e-9


def test_a_page_that_all_rows_select_stays_in_the_groups():
    _, _, shares, rows = both(synthetic.generate(30_000, 600, pattern="identical", seed=3).call)
    hybrid = page_cost.best_hybrid(shares, rows, MACHINE, folded=True)
    assert not hybrid.most_popular_moved


def test_disjoint_neighbours_favour_pages_and_identical_ones_favour_groups():
    times = {}
    for pattern in ("disjoint", "identical"):
        group, page, _, rows = both(synthetic.generate(60_000, 2000, pattern=pattern, seed=3).call)
        times[pattern] = (
            page_cost.group_major(group, rows, MACHINE).us,
            page_cost.page_major(page, rows, MACHINE).us,
        )
    assert times["disjoint"][1] < times["disjoint"][0]
    assert times["identical"][0] < times["identical"][1]


def test_the_loop_of_a_full_round_is_the_measured_one():
    assert MACHINE.loop_us(132, 4 * 132) == pytest.approx(846 / 1.4e3)
    assert MACHINE.loop_us(132, 0) == pytest.approx(512 / 1.4e3)


def test_nothing_selected_costs_no_partials():
    _, page, shares, rows = both(synthetic.generate(3000, 50, pattern="empty", seed=0).call)
    assert page["partial_bytes"] == 0
    assert page_cost.best_hybrid(shares, rows, MACHINE).gain == 0
    assert np.isfinite(page_cost.page_major(page, rows, MACHINE).us)
