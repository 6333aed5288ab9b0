"""``pwbench ceilings`` where there is no GPU."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from pwbench.ceilings import H200
from pwbench.cli.main import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_measuring_without_a_gpu_is_exit_code_3() -> None:
    result = CliRunner().invoke(main, ["ceilings"])
    assert result.exit_code == 3 and "No CUDA device" in result.stderr
    assert CliRunner().invoke(main, ["ceilings", "--device", "cpu"]).exit_code == 3


def test_the_documented_ones_can_be_read_anywhere() -> None:
    result = CliRunner().invoke(main, ["ceilings", "--show", "--device", "cpu", "--json"])
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["source"] == "documented" and data["rates"]["hbm"] == H200.rates.hbm
    shown = CliRunner().invoke(main, ["ceilings", "--show", "--device", "cpu"]).stdout
    assert "NVIDIA H200 (documented)" in shown and "4.25 TB/s" in shown
