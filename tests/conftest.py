"""Fixtures that more than one test file needs."""

from __future__ import annotations

import os
from pathlib import Path

# The suite is small tensors: threads cost more than they bring, and reproduce less.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def small_captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder ``captures`` with the suite ``small``: two captures, ``one`` (full) and ``two`` (tables)."""
    from pwbench.capture import write
    from tests.calls import make_call

    root = tmp_path_factory.mktemp("data") / "captures"
    one = make_call(1, q_lens=(21, 12), selection="local", poison="none", spare_pages=0)
    write(root / "small" / "one", one, kind="full")
    write(
        root / "small" / "two",
        make_call(2, q_lens=(19,), selection="random", poison="none", spare_pages=0),
        kind="tables",
    )
    return root


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped where there is no Hopper GPU, and say so."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return
    skip = pytest.mark.skip(reason="needs a GPU of compute capability 9.0")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
