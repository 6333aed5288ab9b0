"""The roofline's arithmetic, and the file the measured rates are kept in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pwbench import ceilings, probes
from pwbench.ceilings import DESCRIPTIONS, H200, PEAK, Ceilings, Rates, roofline
from pwbench.errors import InputError, MeasurementError

COUNTERS = {
    "kv_bytes": 20_000 * 32768,
    "mma_flops": 50_000 * 4_194_304,
    "useful_flops": 8192 * 16 * 16 * 128 * 512,
}
USUAL = {
    "io_bytes": 8192 * 8192,
    "page_bytes": 512 * 32768,
    "group": 8,
    "precision": "fast",
    "l2": "cold",
    "mode": "graph",
}


def test_each_term_is_its_amount_over_its_rate():
    found = roofline(COUNTERS, **USUAL)
    assert found.terms["tensor"] == pytest.approx(50_000 * 4_194_304 / 1650e12 * 1e6)
    assert found.terms["exp"] == pytest.approx(8192 * 16 * 16 * 128 / H200.rates.exp2 * 1e6)
    assert found.terms["L2"] == pytest.approx(20_000 * 32768 / 9e12 * 1e6)
    assert found.terms["HBM"] == pytest.approx((8192 * 8192 + 512 * 32768) / 4.25e12 * 1e6)
    assert found.terms["launch"] == 0.6
    assert found.us == max(found.terms.values()) and found.term == "tensor (documented)"


def test_accurate_takes_twice_the_matrix_work():
    fast = roofline(COUNTERS, **USUAL)
    accurate = roofline(COUNTERS, **{**USUAL, "precision": "accurate"})
    assert accurate.terms["tensor"] == 2 * fast.terms["tensor"]
    assert accurate.floor_us == fast.floor_us, "the floor presumes nothing about the kernel"


def test_a_warm_cache_owes_hbm_nothing():
    assert roofline(COUNTERS, **{**USUAL, "l2": "warm"}).terms["HBM"] == 0


def test_a_peer_whose_sharing_is_unknown_is_held_to_useful_work_only():
    found = roofline(COUNTERS, **{**USUAL, "group": 1})
    assert found.terms["L2"] == 0
    assert found.terms["tensor"] == pytest.approx(COUNTERS["useful_flops"] / 1650e12 * 1e6)


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("l2", ["cold", "warm"])
@pytest.mark.parametrize("precision", ["fast", "accurate"])
def test_the_floor_is_never_above_the_roofline(group, l2, precision):
    found = roofline(COUNTERS, **{**USUAL, "group": group, "l2": l2, "precision": precision})
    assert 0 < found.floor_us <= found.us


def test_measured_rates_are_named_without_a_remark():
    measured = replace(H200, source="measured", rates=replace(H200.rates, l2=1e12))
    assert roofline(COUNTERS, **USUAL, ceilings=measured).term == "L2"


def test_a_rate_that_was_not_measured_binds_nothing():
    partial = Ceilings("GPU", Rates(fp8=1e15), "measured", {})
    found = roofline(COUNTERS, **USUAL, ceilings=partial)
    assert found.terms["L2"] == found.terms["HBM"] == found.terms["exp"] == 0


def test_stored_ceilings_read_back_as_they_were(tmp_path: Path):
    measured = Ceilings(
        "NVIDIA H200", replace(H200.rates, fp8=1.6e15), "measured", {"created_utc": "2026-01-01"}
    )
    path = ceilings.path_for(measured.gpu, tmp_path)
    assert path.name == "ceilings-nvidia-h200.json"
    ceilings.store(measured, path)
    assert ceilings.load(path) == measured
    assert ceilings.find("NVIDIA H200", tmp_path) == measured
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "nothing temporary stays"


def test_a_probe_that_could_not_run_leaves_its_rate_to_the_documented_one(tmp_path: Path):
    measured = Ceilings("NVIDIA H200", Rates(hbm=4e12), "measured", {})
    ceilings.store(measured, ceilings.path_for("NVIDIA H200", tmp_path))
    found = ceilings.find("NVIDIA H200", tmp_path)
    assert found.rates.hbm == 4e12 and found.rates.l2 == H200.rates.l2


def test_which_ceilings_are_used_where_none_are_stored(tmp_path: Path):
    assert ceilings.find(None, tmp_path) is H200, "CPU rows show the documented H200's"
    assert ceilings.find("NVIDIA H200", tmp_path) is H200
    assert ceilings.find("NVIDIA B200", tmp_path) is None


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not readable as JSON"),
        ("[]", "no ceilings file"),
        ('{"schema": {"name": "other", "major": 1}}', "no ceilings file"),
        ('{"schema": {"name": "pwbench.ceilings", "major": 9}}', "format 9"),
        ('{"schema": {"name": "pwbench.ceilings", "major": 1}, "rates": {"hbm": "fast"}}', "hbm is 'fast'"),
        ('{"schema": {"name": "pwbench.ceilings", "major": 1}, "rates": {"hbm": -1}}', "hbm is -1"),
    ],
)
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "ceilings.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        ceilings.load(path)


def test_a_rate_above_what_the_chip_can_do_is_found_out():
    assert ceilings.implausible(H200.rates) == []
    wrong = ceilings.implausible(replace(H200.rates, fp8=PEAK.fp8 * 1.01))
    assert len(wrong) == 1 and wrong[0].startswith("FP8 matrix rate")


def test_every_rate_has_a_probe_and_a_description():
    fields = set(Rates.__dataclass_fields__)
    assert set(DESCRIPTIONS) == fields == set(probes.PROBES)


def test_the_json_form_is_json():
    assert json.loads(json.dumps(ceilings.as_dict(H200)))["rates"]["l2"] == 9.0e12


def test_probes_refuse_the_cpu():
    with pytest.raises(MeasurementError, match="measured on a GPU"):
        probes.measure(torch.device("cpu"))


def test_the_probes_launch_with_the_sizes_their_source_has():
    from pwbench import kernels

    text = kernels.source_path(probes.SOURCE).read_text()
    for constant, value in (
        ("PAGE_BYTES", probes.PAGE_BYTES),
        ("STREAM_THREADS", probes.STREAM_THREADS),
        ("MATRIX_THREADS", probes.MATRIX_THREADS),
        ("EXP_THREADS", probes.EXP_THREADS),
        ("EXP_CHAINS", probes.EXP_CHAINS),
    ):
        assert f"constexpr int {constant} = {value};" in text
    assert f"constexpr int SLOTS = {(probes.STREAM_SHARED - 1024) // probes.PAGE_BYTES};" in text
    assert probes.PAGE_COUNT & (probes.PAGE_COUNT - 1) == 0, "the kernels mask with it"
    packed = kernels.pack(
        kernels.params_dtype(probes.SOURCE, "ProbeParams"), pages=1, sink=2, page_count=3, rounds=4
    )
    assert packed[0].tolist() == (1, 2, 3, 4)


@pytest.mark.gpu
def test_the_probes_measure_plausible_rates_on_a_gpu():
    found = probes.measure(torch.device("cuda", torch.cuda.current_device()))
    assert not found.missing
    rates = found.ceilings.rates
    assert rates.l2_multicast > rates.l2 > rates.hbm > 1e12
    assert rates.fp8 > rates.fp8_product > rates.bf16_product > 1e14
    assert 0.1 < rates.launch_us < 20
