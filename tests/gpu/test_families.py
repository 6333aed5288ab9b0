"""Every variant against the float64 reference over the named families of hostile calls."""

from __future__ import annotations

import pytest

from tests.gpu.cases import CASES, TITLES
from tests.gpu.harness import Case, built, check, every_run, gpu, prepare, run, same

pytestmark = gpu


@every_run
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_output_is_the_references(case: Case, variant: str, precision: str) -> None:
    call, ref = built(case)
    prepared = prepare(variant, precision, call)
    first = run(prepared)
    check(first, ref, case.limit(variant, precision), f"{TITLES[case.family]}: {case.name}")
    assert same(run(prepared), first), "a second run differs"
