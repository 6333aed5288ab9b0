"""The launcher on a GPU: structs by value, clusters, programmatic edges, tensor maps, shared memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pwbench import kernels
from pwbench.errors import MeasurementError
from tests.gpu.harness import needs_cuda

pytestmark = [pytest.mark.gpu, needs_cuda]

SOURCE = r"""
struct alignas(64) TensorMap { unsigned long long opaque[16]; };
struct AddParams { const float* from; float* to; int count; float gain; };

extern "C" __global__ void add(const __grid_constant__ AddParams params) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < params.count) params.to[i] = params.from[i] + params.gain;
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) cluster(int* sizes) {
    unsigned size;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    if (threadIdx.x == 0) sizes[blockIdx.x] = size;
}

extern "C" __global__ void any_cluster(int* sizes) {
    unsigned size;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    if (threadIdx.x == 0) sizes[blockIdx.x] = size;
}

extern "C" __global__ void slow_add(const __grid_constant__ AddParams params) {
    asm volatile("griddepcontrol.launch_dependents;");
    for (int i = 0; i < 200; ++i) __nanosleep(1000);
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < params.count) params.to[i] = params.from[i] + params.gain;
}

extern "C" __global__ void late_add(const __grid_constant__ AddParams params) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < params.count) params.to[i] = params.from[i] + params.gain;
}

extern "C" __global__ void reverse(float* data) {
    extern __shared__ float room[];
    const int last = 50000;
    for (int i = threadIdx.x; i <= last; i += blockDim.x) room[i] = data[i];
    __syncthreads();
    for (int i = threadIdx.x; i <= last; i += blockDim.x) data[i] = room[last - i];
}

extern "C" __global__ void copy_box(const __grid_constant__ TensorMap map, unsigned char* to, int page) {
    __shared__ alignas(1024) unsigned char box[64 * 128];
    __shared__ alignas(8) unsigned long long barrier;
    const unsigned where = __cvta_generic_to_shared(box), bar = __cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar));
        asm volatile("fence.mbarrier_init.release.cluster;");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 8192;" ::"r"(bar));
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3, %4}], [%5];"
            ::"r"(where), "l"(&map), "r"(0), "r"(64), "r"(page), "r"(bar) : "memory");
    }
    __syncthreads();
    asm volatile(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra again; }"
        ::"r"(bar));
    for (int i = threadIdx.x; i < 64 * 128; i += blockDim.x) to[i] = box[i];
}
"""


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWBENCH_KERNELS", str(tmp_path))
    (tmp_path / "probe.cu").write_text(SOURCE)


def adder(name: str, source: torch.Tensor, to: torch.Tensor, gain: float, **launch: bool) -> kernels.Launch:
    params = kernels.pack(
        kernels.params_dtype("probe.cu", "AddParams"), gain=gain, to=to, count=len(source), **{"from": source}
    )
    return kernels.get("probe.cu", name).bind((-(-len(source) // 128),), 128, params, **launch)


def test_a_params_struct_arrives_by_value() -> None:
    source, to = torch.arange(1000.0, device="cuda"), torch.zeros(1000, device="cuda")
    adder("add", source, to, 2.5)()
    assert torch.equal(to, source + 2.5)


def test_a_launch_lands_on_the_current_stream_and_in_a_graph() -> None:
    source, to = torch.arange(300.0, device="cuda"), torch.zeros(300, device="cuda")
    launch = adder("add", source, to, 1.0)
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    to.zero_()
    source.add_(5)
    graph.replay()
    assert torch.equal(to, source + 1)


def test_clusters_of_the_source_and_of_the_launch() -> None:
    sizes = torch.zeros(8, dtype=torch.int32, device="cuda")
    pointer = np.uint64(sizes.data_ptr())
    kernels.get("probe.cu", "cluster").bind((8,), 32, pointer)()
    assert sizes.tolist() == [2] * 8
    kernels.get("probe.cu", "any_cluster").bind((8,), 32, pointer, cluster=4)()
    assert sizes.tolist() == [4] * 8
    kernels.get("probe.cu", "any_cluster").bind((8,), 32, pointer)()
    assert sizes.tolist() == [1] * 8


@pytest.mark.parametrize("captured", [False, True], ids=["stream", "graph"])
def test_a_programmatic_launch_keeps_its_order(captured: bool) -> None:
    source = torch.arange(1000.0, device="cuda")
    middle, to = torch.zeros_like(source), torch.zeros_like(source)
    first = adder("slow_add", source, middle, 1.0)
    second = adder("late_add", middle, to, 1.0, programmatic=True)

    def both() -> None:
        first()
        second()

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            both()
        graph.replay()
    else:
        both()
    assert torch.equal(to, source + 2)


def test_two_hundred_kilobytes_of_shared_memory() -> None:
    data = torch.arange(50001.0, device="cuda")
    want = data.flip(0)
    kernels.get("probe.cu", "reverse", shared=50001 * 4).bind((1,), 256, np.uint64(data.data_ptr()))()
    assert torch.equal(data, want)


def test_more_shared_memory_than_there_is_is_refused() -> None:
    with pytest.raises(MeasurementError, match="240000 bytes of dynamic shared memory"):
        kernels.get("probe.cu", "reverse", shared=240_000)


def test_a_tensor_map_moves_the_box_it_describes() -> None:
    cache = torch.randint(0, 256, (5, 128, 256), dtype=torch.uint8, device="cuda")
    made = kernels.tensor_map(
        cache.data_ptr() + 128, "uint8", (128, 128, 5), (256, 256 * 128), (128, 64, 1), swizzle=0
    )
    to = torch.zeros(64, 128, dtype=torch.uint8, device="cuda")
    kernels.get("probe.cu", "copy_box").bind((1,), 128, made, np.uint64(to.data_ptr()), np.int32(3))()
    assert torch.equal(to, cache[3, 64:, 128:])


def test_a_refused_launch_is_an_error() -> None:
    with pytest.raises(MeasurementError, match="Launching cluster on grid"):
        kernels.get("probe.cu", "cluster").bind((3,), 32, np.uint64(0))()


def test_both_compilers_make_cubins_that_load(monkeypatch: pytest.MonkeyPatch) -> None:
    source, to = torch.arange(100.0, device="cuda"), torch.zeros(100, device="cuda")
    for compiler in ("nvcc", "nvrtc"):
        monkeypatch.setenv("PWBENCH_COMPILER", compiler)
        to.zero_()
        adder("add", source, to, 3.0)()
        assert torch.equal(to, source + 3)
