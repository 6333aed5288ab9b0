"""What the doctor says about machines that are not well, each lack put there by the test."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from pwbench import _compilers, doctor
from pwbench.doctor import STATES, Finding, examine
from pwbench.errors import MeasurementError


def _states(findings) -> dict[str, Finding]:
    return {finding.section: finding for finding in findings}


def test_every_finding_has_a_known_state_and_every_problem_a_cure(small_captures: Path) -> None:
    for finding in examine([small_captures]):
        assert finding.state in STATES and finding.text
        assert finding.state != "problem" or finding.mend


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BASE", ("numpy", "no_such_package_anywhere"))
    (finding,) = doctor._packages()
    assert finding.state == "problem" and "no_such_package_anywhere" in finding.text and finding.mend


def test_a_gpu_that_a_cpu_build_of_torch_cannot_use_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_nvml_gpus", lambda: ("580.1", ["NVIDIA H200"]))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = _states(doctor._torch_and_gpu())["torch"]
    assert found.state == "problem" and "NVIDIA H200" in found.text and "install" in found.mend


def test_a_driver_too_old_for_torch_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_nvml_gpus", lambda: ("470.1", ["NVIDIA H200"]))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = _states(doctor._torch_and_gpu())["torch"]
    assert found.state == "problem" and "driver 470.1" in found.text


def test_no_gpu_at_all_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_nvml_gpus", lambda: (None, []))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _states(doctor._torch_and_gpu())["gpu"].state == "note"


@pytest.mark.parametrize("gpu, state", [(False, "note"), (True, "problem")])
def test_a_missing_compiler_matters_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, state: str
) -> None:
    def none() -> None:
        raise MeasurementError("No CUDA compiler was found.")

    monkeypatch.setattr(_compilers, "find", none)
    monkeypatch.setattr(doctor, "_has_gpu", lambda: gpu)
    found = _states(doctor._compiler())["compiler"]
    assert found.state == state and found.mend == "pip install nvidia-cuda-nvrtc"


@pytest.mark.parametrize("gpu, state", [(False, "note"), (True, "problem")])
def test_missing_cupy_matters_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, state: str
) -> None:
    monkeypatch.setattr("pwbench.device.cupy_version", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    (found,) = doctor._cupy()
    assert found.state == state and "pwbench[cuda1" in found.mend


@pytest.mark.parametrize("version, state", [(None, "note"), ("5.18.0", "problem"), ("5.17.2", "ok")])
def test_another_transformers_is_a_problem(monkeypatch: pytest.MonkeyPatch, version, state: str) -> None:
    monkeypatch.setattr("pwbench.device.version_of", lambda package: version)
    (found,) = doctor._model_libraries()
    assert found.state == state


def test_no_captures_is_a_note(tmp_path: Path) -> None:
    (found,) = doctor._captures([tmp_path], deep=True)
    assert found.state == "note" and found.mend


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, small_captures: Path
) -> None:
    def broken() -> None:
        raise RuntimeError("driver gone")

    monkeypatch.setattr(doctor, "_storage", broken)
    findings = list(examine([small_captures]))
    assert any("driver gone" in finding.text for finding in findings)
    assert findings[-1].section == "captures" and findings[-1].state == "ok"


def test_the_command_inside_a_reason_is_found() -> None:
    assert doctor._command_in("FlashInfer is not installed: pip install flashinfer-python==0.7.4.") == (
        "pip install flashinfer-python==0.7.4"
    )
    assert doctor._command_in("needs a CUDA GPU.") == ""


def test_the_base_packages_are_those_the_project_declares(repository: Path) -> None:
    import tomllib

    declared = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {line.split(">")[0].split("=")[0].strip() for line in declared} - {"nvidia-ml-py"}
    assert names == set(doctor.BASE)
    assert all(importlib.util.find_spec(name) for name in doctor.BASE)
