"""Compiling and caching CUDA sources, with real compilers where there are some and fakes for the rest."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pwbench import _compilers, kernels
from pwbench.errors import MeasurementError

SOURCE = """
#include "shape.cuh"
#ifndef GAIN
#define GAIN 1
#endif
extern "C" __global__ void __launch_bounds__(128) copy(const float* from, float* to) {
    __shared__ float tile[WIDTH];
    tile[threadIdx.x] = from[threadIdx.x] * GAIN;
    __syncthreads();
    to[threadIdx.x] = tile[WIDTH - 1 - threadIdx.x];
}
"""
LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attend' for 'sm_90a'
ptxas info    : Function properties for attend
    16 bytes stack frame, 24 bytes spill stores, 28 bytes spill loads
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x
ptxas info    : Used 168 registers, used 3 barriers, 16 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 1.3 ms
ptxas info    : Compiling entry function 'prepare' for 'sm_90a'
ptxas info    : Function properties for prepare
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers
"""


class FakeCompiler:
    """Writes its own input as the cubin and counts how often it ran."""

    def __init__(self, log: str = LOG, seconds: float = 0.0, fails: bool = False) -> None:
        self.runs, self.log, self.seconds, self.fails = 0, log, seconds, fails
        self.compiler = _compilers.Compiler("fake", "fake 1.0", self.run)

    def run(self, source: Path, options: list[str], cubin: Path) -> str:
        self.runs += 1
        time.sleep(self.seconds)
        cubin.write_text(source.read_text() + repr(options))
        if self.fails:
            raise KeyboardInterrupt
        return self.log


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel folder with one source and one header, and a cache of its own."""
    sources = tmp_path / "sm90"
    sources.mkdir()
    (sources / "copy.cu").write_text(SOURCE)
    (sources / "shape.cuh").write_text("#define WIDTH 128\n")
    monkeypatch.setenv("PWBENCH_KERNELS", str(sources))
    monkeypatch.setenv("PWBENCH_CACHE", str(tmp_path / "cache"))
    return sources


def use(monkeypatch: pytest.MonkeyPatch, fake: FakeCompiler) -> FakeCompiler:
    monkeypatch.setattr(_compilers, "find", lambda: fake.compiler)
    return fake


def cached(folder: Path) -> list[str]:
    place = folder.parent / "cache" / "kernels"
    return sorted(entry.name for entry in place.iterdir() if not entry.name.endswith(".lock"))


# Real compilers -------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
def test_a_source_compiles_to_a_cubin_with_its_resources(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("PWBENCH_COMPILER", compiler)
    try:
        _compilers.find()
    except MeasurementError as error:
        pytest.skip(str(error))
    compiled = kernels.compile("copy.cu", {"GAIN": 3})
    assert compiled.cubin.read_bytes()[:4] == b"\x7fELF"
    assert compiled.compiler.startswith(compiler)
    (entry,) = compiled.entries
    assert entry.name == "copy"
    assert 4 <= entry.registers <= 64
    assert (entry.shared, entry.spill_stores, entry.spill_loads) == (512, 0, 0)


@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
def test_a_compile_error_is_told_in_the_compilers_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("PWBENCH_COMPILER", compiler)
    try:
        _compilers.find()
    except MeasurementError as error:
        pytest.skip(str(error))
    (folder / "bad.cu").write_text('extern "C" __global__ void bad() { undeclared_thing(); }')
    with pytest.raises(MeasurementError, match=r"(?s)could not compile bad\.cu.*undeclared_thing"):
        kernels.compile("bad.cu")
    assert cached(folder) == []


def test_nvrtc_knows_the_fixed_width_integers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWBENCH_COMPILER", "nvrtc")
    try:
        _compilers.find()
    except MeasurementError as error:
        pytest.skip(str(error))
    (folder / "ints.cu").write_text(
        "#include <cstdint>\nstatic_assert(sizeof(uint64_t) == 8 && sizeof(int16_t) == 2);\n"
        'extern "C" __global__ void ints(uint32_t* p) { *p = 1; }'
    )
    assert kernels.compile("ints.cu").entries[0].name == "ints"


# Cache ----------------------------------------------------------------------------------------


def test_the_second_compile_comes_from_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, FakeCompiler())
    first, second = kernels.compile("copy.cu"), kernels.compile("copy.cu")
    assert fake.runs == 1
    assert first == second


@pytest.mark.parametrize("changed", ["source", "header", "define", "compiler", "flags"])
def test_everything_the_cubin_depends_on_is_in_the_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    use(monkeypatch, FakeCompiler())
    before = kernels.compile("copy.cu", {"GAIN": 1}).cubin
    gain = 1
    if changed == "source":
        (folder / "copy.cu").write_text(SOURCE + "\n// changed\n")
    elif changed == "header":
        (folder / "shape.cuh").write_text("#define WIDTH 64\n")
    elif changed == "define":
        gain = 2
    elif changed == "compiler":
        fake = FakeCompiler()
        monkeypatch.setattr(_compilers, "find", lambda: _compilers.Compiler("fake", "fake 1.1", fake.run))
    else:
        monkeypatch.setattr(_compilers, "FLAGS", (*_compilers.FLAGS, "-G"))
    assert kernels.compile("copy.cu", {"GAIN": gain}).cubin != before


def test_a_killed_build_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeCompiler(fails=True))
    with pytest.raises(KeyboardInterrupt):
        kernels.compile("copy.cu")
    assert cached(folder) == []
    fake = use(monkeypatch, FakeCompiler())
    kernels.compile("copy.cu")
    assert fake.runs == 1


def test_a_half_written_entry_is_built_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, FakeCompiler())
    whole = kernels.compile("copy.cu")
    (whole.cubin.parent / "build.json").unlink()
    assert kernels.compile("copy.cu") == whole
    assert fake.runs == 2


def test_builders_at_the_same_time_build_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, FakeCompiler(seconds=0.2))
    threads = [threading.Thread(target=kernels.compile, args=("copy.cu",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake.runs == 1
    assert len(cached(folder)) == 1


# Finding things -------------------------------------------------------------------------------


def test_no_compiler_is_one_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PWBENCH_COMPILER", raising=False)
    monkeypatch.setattr(_compilers, "nvcc_path", lambda: None)
    monkeypatch.setattr(_compilers, "_nvrtc", lambda: None)
    with pytest.raises(MeasurementError, match="pip install nvidia-cuda-nvrtc"):
        _compilers.find()


def test_nvrtc_is_taken_where_nvcc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PWBENCH_COMPILER", raising=False)
    monkeypatch.setattr(_compilers, "nvcc_path", lambda: None)
    monkeypatch.setattr(_compilers, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda a, b: 0))
    assert _compilers.find().name == "nvrtc"


def test_an_unknown_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWBENCH_COMPILER", "clang")
    with pytest.raises(MeasurementError, match="'clang', expected nvcc or nvrtc"):
        _compilers.find()


def test_an_unknown_source_is_answered_with_those_there(folder: Path) -> None:
    with pytest.raises(MeasurementError, match=r"'atend.cu'.*there are copy.cu"):
        kernels.compile("atend.cu")


def test_missing_sources_are_an_error_that_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PWBENCH_KERNELS", str(tmp_path / "nowhere"))
    with pytest.raises(MeasurementError, match="nowhere"):
        kernels.source_dir()


def test_the_checkouts_sources_are_found() -> None:
    assert (kernels.source_dir() / "programs.toml").exists()


# Resources ------------------------------------------------------------------------------------


def test_the_log_gives_every_entrys_resources() -> None:
    attend, prepare = _compilers.parse_log(LOG)
    assert attend == kernels.Entry("attend", 168, 16, 24, 28, 1024)
    assert prepare == kernels.Entry("prepare", 40, 0, 0, 0, 0)


def test_serialised_wgmma_is_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeCompiler())
    (warning,) = kernels.compile("copy.cu").warnings
    assert "C7512" in warning


def test_sources_without_a_line_are_built_with_no_spill_allowed(folder: Path) -> None:
    (folder / "programs.toml").write_text(
        '[[program]]\nsource = "copy.cu"\ndefines = { GAIN = 2 }\nspill_bytes = 8\n'
    )
    (folder / "other.cu").write_text("")
    assert kernels.programs() == [kernels.Program("copy.cu", {"GAIN": 2}, 8), kernels.Program("other.cu")]


def test_spills_above_the_budget_and_serialised_wgmma_fail_the_build(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, FakeCompiler())
    assert kernels.main() == 1
    said = capsys.readouterr()
    assert "attend spills 24 bytes per thread, its budget is 0" in said.err
    assert "serialized" in said.err
    assert [line.split()[:5] for line in said.out.splitlines() if "attend" in line] == [
        ["copy.cu", "attend", "168", "24", "16"]
    ]


def test_too_much_shared_memory_fails_the_build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = "Compiling entry function 'big' for 'sm_90a'\nUsed 10 registers"
    use(monkeypatch, FakeCompiler(log=log))
    (folder / "programs.toml").write_text('[[program]]\nsource = "copy.cu"\nshared = 300000\n')
    (complaint,) = kernels.build_all(lambda line: None)
    assert "300000 bytes of shared memory" in complaint


def test_a_build_within_its_budget_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeCompiler(log=re.sub(r".*C7512.*\n", "", LOG)))
    (folder / "programs.toml").write_text('[[program]]\nsource = "copy.cu"\nspill_bytes = 24\n')
    assert kernels.main() == 0


def test_the_build_script_fails_without_a_compiler(folder: Path) -> None:
    script = Path(__file__).parent.parent / "scripts" / "build_kernels.py"
    environment = {"PATH": "", "PWBENCH_COMPILER": "clang", "PWBENCH_KERNELS": str(folder)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 3
    assert "expected nvcc or nvrtc" in done.stderr
    assert "Traceback" not in done.stderr


# Loading --------------------------------------------------------------------------------------


def test_loading_without_a_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MeasurementError, match=r"No CUDA GPU.*--device cpu"):
        kernels.require_gpu()


def test_another_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    with pytest.raises(MeasurementError, match=r"A100 has compute capability 8\.0"):
        kernels.require_gpu()


def test_a_missing_cupy_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MeasurementError, match="pip install cupy-cuda13x"):
        kernels.require_gpu()


def test_too_much_dynamic_shared_memory_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "load", lambda source, defines: None)
    monkeypatch.setattr(kernels, "_shared_limit", lambda: 232_448)
    with pytest.raises(MeasurementError, match=r"240000 bytes .* gives a block 232448"):
        kernels.get("attention.cu", "attend", shared=240_000)


def test_an_entry_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise RuntimeError("CUDA_ERROR_NOT_FOUND: named symbol not found")

    monkeypatch.setattr(kernels, "load", lambda *args: SimpleNamespace(get_function=missing))
    with pytest.raises(MeasurementError, match=r"Entry atend of attention\.cu .*NOT_FOUND"):
        kernels.get("attention.cu", "atend")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_nvcc_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PWBENCH_COMPILER", raising=False)
    assert _compilers.find().name == "nvcc"
