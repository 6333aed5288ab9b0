"""What the device says, asked of a machine that may have none."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import pytest
import torch

from pwbench import device
from pwbench.errors import InputError, MeasurementError

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def test_auto_is_the_gpu_where_there_is_one_and_the_cpu_elsewhere():
    assert device.resolve("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device.resolve("cpu").type == "cpu"


@no_gpu
def test_cuda_without_a_gpu_says_why():
    with pytest.raises(MeasurementError, match=r"No CUDA device.*doctor"):
        device.resolve("cuda")


def test_another_word_is_refused():
    with pytest.raises(InputError, match="expected auto, cuda or cpu"):
        device.resolve("tpu")


def test_the_cpu_has_a_name_and_no_clocks():
    info = device.info(torch.device("cpu"))
    assert info.kind == "cpu" and info.name and info.driver is None and info.sm_count is None


def test_provenance_is_whole():
    found = device.provenance(torch.device("cpu"))
    assert {"pwbench", "commit", "device", "versions", "python", "system", "command"} <= set(found)
    assert found["versions"]["torch"] == torch.__version__


def _with_nvml(monkeypatch, answers):
    monkeypatch.setattr(device, "_handle", lambda index: object())
    monkeypatch.setattr(device, "_ask", lambda function, *arguments: answers.get(function))


def test_throttle_reasons_are_read_and_idleness_is_not_one(monkeypatch):
    answers = {"nvmlDeviceGetClockInfo": 1410, "nvmlDeviceGetCurrentClocksEventReasons": 0x01 | 0x04 | 0x40}
    _with_nvml(monkeypatch, answers)
    assert device.read_sensors(0) == (1410.0, ("power cap", "hardware thermal slowdown"))


def test_an_older_driver_is_asked_by_the_older_name(monkeypatch):
    _with_nvml(
        monkeypatch, {"nvmlDeviceGetClockInfo": 1000, "nvmlDeviceGetCurrentClocksThrottleReasons": 0x80}
    )
    assert device.read_sensors(0) == (1000.0, ("power brake",))


def test_without_nvml_the_clock_is_unknown_and_not_invented(monkeypatch):
    monkeypatch.setattr(device, "_handle", lambda index: None)
    assert device.read_sensors(0) == (None, ())
    assert device.foreign_processes(0) == []


def test_foreign_processes_are_named_and_our_own_is_not_among_them(monkeypatch):
    running = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=1),
        SimpleNamespace(pid=os.getppid(), usedGpuMemory=7),
    ]
    _with_nvml(monkeypatch, {"nvmlDeviceGetComputeRunningProcesses": running})
    (found,) = device.foreign_processes(0)
    assert found.pid == os.getppid() and found.name != "unknown" and found.memory_bytes == 7


def test_our_own_process_under_the_host_s_number_is_not_foreign(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    hidden = [SimpleNamespace(pid=2**22 + 5, usedGpuMemory=1)]
    _with_nvml(monkeypatch, {"nvmlDeviceGetComputeRunningProcesses": hidden})
    assert device.foreign_processes(0) == []
    hidden.append(SimpleNamespace(pid=2**22 + 6, usedGpuMemory=1))
    assert len(device.foreign_processes(0)) == 2, "one of two is somebody else"


def test_the_commit_is_that_of_the_checkout(repository, monkeypatch):
    if not (repository / ".git").exists():
        pytest.skip("not a checkout")
    monkeypatch.delenv("PWBENCH_COMMIT", raising=False)
    assert len(device.commit.__wrapped__().split("-")[0]) == 12


def test_changed_code_has_another_name_than_the_commit(tmp_path, monkeypatch):
    def git(*words):
        setup = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run([*setup, *words], check=True, capture_output=True)

    monkeypatch.delenv("PWBENCH_COMMIT", raising=False)
    package = tmp_path / "pwbench"
    package.mkdir()
    (package / "device.py").write_text("1\n")
    (tmp_path / "notes.md").write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setattr(device, "__file__", str(package / "device.py"))
    commit = device.commit.__wrapped__
    clean = commit()
    (tmp_path / "notes.md").write_text("2\n")
    assert commit() == clean, "notes do not change what is measured"
    (package / "device.py").write_text("2\n")
    second = commit()
    (package / "device.py").write_text("3\n")
    assert second.startswith(f"{clean}-dirty-") and second != commit()
    monkeypatch.setenv("PWBENCH_COMMIT", "abc")
    assert commit() == "abc", "whoever says it knows better than a git that happens to be there"


def test_outside_a_checkout_the_commit_is_what_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "__file__", str(tmp_path / "pwbench" / "device.py"))
    for said in ("abc", ""):
        monkeypatch.setenv("PWBENCH_COMMIT", said)
        assert device.commit.__wrapped__() == said


def test_versions_of_absent_packages_are_absent():
    assert device.version_of("no-such-package-anywhere") is None
    assert all(device.versions().values())


@pytest.mark.parametrize("count, expected", [(1, "handle 0"), (2, None)])
def test_without_a_uuid_only_a_single_gpu_can_be_meant(monkeypatch, count, expected):
    pynvml = pytest.importorskip("pynvml")

    def no_uuid(uuid):
        raise ValueError(uuid)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="u"))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", no_uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: count)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: f"handle {index}")
    assert device._handle.__wrapped__(0) == expected
