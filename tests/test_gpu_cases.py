"""The GPU tests' calls are valid and do what their names say; this much needs no GPU."""

from __future__ import annotations

import numpy as np
import pytest

from pwbench import grouping, reference, variants
from pwbench.operator import supports
from pwbench.variants import Options
from tests.gpu.cases import CASES, TITLES
from tests.gpu.harness import Case

LARGE = ("GiB", "8192", "4200", "800 pages", "1408 pages", "4096 pages")
SMALL = [case for case in CASES if not any(word in case.name for word in LARGE)]


def test_every_family_has_cases_of_their_own_name() -> None:
    assert {case.family for case in CASES} == set(TITLES)
    assert len({str(case) for case in CASES}) == len(CASES)


def test_every_case_is_a_valid_call() -> None:
    for case in SMALL:
        case.build().validate()


@pytest.mark.parametrize("case", [case for case in SMALL if case.family == 23], ids=str)
def test_union_cases_have_the_size_they_name(case: Case) -> None:
    call = case.build()
    group = 16 if "16 rows" in case.name else 8
    bounds = call.cu_seqlens_q.numpy()
    order = grouping.identity_order(1, call.total_q)
    unions = grouping.prepare_unions(supports(call)[0], order, bounds, group)
    assert set(np.diff(unions.offsets)) == {int(case.name.split()[0])}


@pytest.mark.parametrize("family", [1, 5, 7, 14])
def test_cases_agree_with_the_cpu_walk(family: int) -> None:
    for case in SMALL:
        if case.family == family and case.build().total_q < 80:
            call = case.build()
            prepared = variants.get("union8").prepare(call, Options())
            prepared.run()
            assert reference.compare(prepared.out, reference.attend(call)).rel_l2 <= 1e-5
