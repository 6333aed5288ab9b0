// PTX wrappers, each named after its instruction. Nothing here knows about attention.
// No CUDA header is included (NVRTC has no standard headers either), so that NVRTC compiles the kernels without a toolkit.
#pragma once

#ifdef __CUDACC_RTC__
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

/// Shared-memory address of a generic pointer, as PTX wants it.
__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// The same value, which the compiler now knows to be one for the warp: branches on it need no
/// reconvergence, and descriptors made of it live in uniform registers.
__device__ __forceinline__ uint32_t uniform(uint32_t value) { return __shfl_sync(0xffffffff, value, 0); }

/// The same value, which the compiler will not make again where it is used: it would ask for the CTA's place in
/// its cluster every time an address is needed.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

/// Zero, made where it is asked for: ptxas keeps no register for it meanwhile.
__device__ __forceinline__ uint32_t fresh_zero() {
    uint32_t value;
    asm volatile("mov.b32 %0, 0;" : "=r"(value));
    return value;
}

// Barriers ---------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_count(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

/// Arrives on the barrier at the same offset in CTA `rank` of the cluster.
/// NOTE: no `.release.cluster` here: it costs a MEMBAR.ALL.GPU, and what this releases was read by
/// wgmma, which has completed by then.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// Waits until the phase of `parity` has completed.
/// NOTE: parity only: a waiter that skips a phase can be fooled, so every phase must be waited for.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\nbra again;\nfinished:\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

/// Whether the phase of `parity` has completed, for a thread that has other work meanwhile.
__device__ __forceinline__ bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

/// Replaces a 32-bit word of shared memory; what it was.
__device__ __forceinline__ uint32_t atom_exch_shared(uint32_t address, uint32_t value) {
    uint32_t old;
    asm volatile("atom.relaxed.cta.shared::cta.exch.b32 %0, [%1], %2;" : "=r"(old) : "r"(address), "r"(value) : "memory");
    return old;
}

/// Sets bits of a 32-bit word of shared memory; what it was.
__device__ __forceinline__ uint32_t atom_or_shared(uint32_t address, uint32_t bits) {
    uint32_t old;
    asm volatile("atom.relaxed.cta.shared::cta.or.b32 %0, [%1], %2;" : "=r"(old) : "r"(address), "r"(bits) : "memory");
    return old;
}

template <int ID, int THREADS>
__device__ __forceinline__ void bar_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

// Clusters and launches --------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_ctarank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Programmatic dependent launch: wait until the grids this one depends on have finished and flushed.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// Programmatic dependent launch: let the dependent grid begin its prologue.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Copies -----------------------------------------------------------------------------------------

/// What cuTensorMapEncodeTiled writes; opaque here, passed by value as a __grid_constant__ member.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// One 4-D box into this CTA's shared memory; completes `bytes of the box` on `barrier`.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(uint32_t smem, const TensorMap* map, int c0, int c1, int c2,
                                                        int c3, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

/// The same box into every CTA of `ctas`, at the same offsets, completing on each one's barrier.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_multicast(uint32_t smem, const TensorMap* map, int c0, int c1,
                                                                  int c2, int c3, uint32_t barrier, uint16_t ctas) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(ctas)
        : "memory");
}

/// `bytes` contiguous bytes from global to this CTA's shared memory.
__device__ __forceinline__ void cp_async_bulk(uint32_t smem, const void* global, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
                 "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void cp_async_bulk_multicast(uint32_t smem, const void* global, uint32_t bytes,
                                                        uint32_t barrier, uint16_t ctas) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(smem),
        "l"(global), "r"(bytes), "r"(barrier), "h"(ctas)
        : "memory");
}

/// Brings a cache line of global memory into L2, ahead of its use.
__device__ __forceinline__ void prefetch_global_l2(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

/// Copies four bytes to shared memory behind the thread's back, until it waits for them.
__device__ __forceinline__ void cp_async_4(uint32_t smem, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem), "l"(global) : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Brings `bytes` contiguous bytes of global memory into L2, ahead of their use.
__device__ __forceinline__ void cp_async_bulk_prefetch_l2(const void* global, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

/// Orders this thread's generic shared-memory writes before later reads by wgmma or the copy engine.
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Orders generic global writes made visible to this thread before its later bulk copies.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Arithmetic -------------------------------------------------------------------------------------

__device__ __forceinline__ float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// Two floats to packed e4m3, `low` in the low byte, saturating to +-448; NaN stays NaN.
__device__ __forceinline__ uint16_t cvt_e4m3x2(float low, float high) {
    uint16_t packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

/// Four floats to one register of e4m3, `x0` in the lowest byte.
__device__ __forceinline__ uint32_t cvt_e4m3x4(float x0, float x1, float x2, float x3) {
    return static_cast<uint32_t>(cvt_e4m3x2(x0, x1)) | (static_cast<uint32_t>(cvt_e4m3x2(x2, x3)) << 16);
}

/// Two packed e4m3 to packed f16 (exact).
__device__ __forceinline__ uint32_t cvt_f16x2_e4m3x2(uint16_t packed) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(packed));
    return halves;
}

__device__ __forceinline__ float cvt_f32_f16(uint16_t half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
}

/// a * b + c of packed f16, with 0 for what is negative; NaN comes out as 0x7fff.
__device__ __forceinline__ uint32_t fma_relu_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/// The larger of two packed f16; a NaN gives way to a number.
__device__ __forceinline__ uint32_t max_f16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ uint32_t add_f16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

/// The smaller of two packed f16; NaN wins.
__device__ __forceinline__ uint32_t min_nan_f16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

/// Two floats to packed f16, `low` in the low half.
__device__ __forceinline__ uint32_t cvt_f16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/// Two floats to packed bf16, `low` in the low half.
__device__ __forceinline__ uint32_t cvt_bf16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/// Lane-wise maximum of packed bf16 that keeps NaN.
__device__ __forceinline__ uint32_t max_nan_bf16x2(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

/// The larger of two packed signed 16-bit integers.
__device__ __forceinline__ uint32_t max_s16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("max.s16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

/// c += A B of bits, counting: 16 x 256 bits times 8 columns of 256. Lane 4r + t holds word t of rows r and r + 8 of A
/// in a[0] and a[1], word t + 4 in a[2] and a[3]; words t and t + 4 of column r of B; and of c, rows r (c[0], c[1])
/// and r + 8, columns 2t and 2t + 1.
__device__ __forceinline__ void mma_and_popc(unsigned (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Warpgroup matrix products ----------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/// Keeps the compiler from moving uses of an accumulator across a wait.
template <int N>
__device__ __forceinline__ void pin(float (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int N>
__device__ __forceinline__ void pin(uint32_t (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

/// Descriptor of a K-major tile with 128-byte rows and the 128-byte swizzle; 8-row groups 1024 bytes
/// apart. `address` is 1024-byte aligned; add 2 for each 32-byte step along K.
__device__ __forceinline__ uint64_t swizzle128_descriptor(uint32_t address) {
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// One function a form of the instruction. What they share is how an accumulator of 32, 64 or 68 registers is
// named in the text and bound to it.
#define NAMES_32                                                                                        \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                            \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                        \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "       \
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define BIND_4(how, d, i) how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3])
#define BIND_16(how, d, i) BIND_4(how, d, i), BIND_4(how, d, i + 4), BIND_4(how, d, i + 8), BIND_4(how, d, i + 12)
#define BIND_32(how, d) BIND_16(how, d, 0), BIND_16(how, d, 16)
#define BIND_64(how, d) BIND_32(how, d), BIND_16(how, d, 32), BIND_16(how, d, 48)

/// d = (accumulate ? d : 0) + A * B, both operands in shared memory: e4m3 to f32, 64 x 128 x 32.
__device__ __forceinline__ void wgmma_m64n128k32_ss(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" NAMES_64 "}, %64, %65, p, 1, 1;\n}\n"
        : BIND_64("+f", d)
        : "l"(a), "l"(b), "r"(accumulate));
}

/// The same with d = A * B: the first step of a sum. d is an output only, so what its registers held before
/// is free to be read or written while other products run.
__device__ __forceinline__ void wgmma_m64n128k32_ss_first(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" NAMES_64 "}, %64, %65, p, 1, 1;\n}\n"
        : BIND_64("=f", d)
        : "l"(a), "l"(b));
}

/// The same sum with A in registers, B at descriptor `b`.
__device__ __forceinline__ void wgmma_m64n128k32_rs(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" NAMES_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1;\n}\n"
        : BIND_64("+f", d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

/// f16 to f32, 64 x 128 x 16: A in registers, B K-major at descriptor `b`.
__device__ __forceinline__ void wgmma_m64n128k16_f16_rs(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" NAMES_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}\n"
        : BIND_64("+f", d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

/// e4m3 to f32, 64 x 136 x 32: A in registers, B at descriptor `b`.
__device__ __forceinline__ void wgmma_m64n136k32_rs(float (&d)[68], const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %73, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {" NAMES_64 ", %64, %65, %66, %67}, "
        "{%68, %69, %70, %71}, %72, p, 1, 1;\n}\n"
        : BIND_64("+f", d), BIND_4("+f", d, 64)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

/// e4m3 to f16, both operands in shared memory, 64 x 128 x 32: half the accumulator registers of the f32 form
/// at the same rate; register 2j + i holds columns 8j + 2t, +1.
__device__ __forceinline__ void wgmma_m64n128k32_f16_ss(uint32_t (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f16.e4m3.e4m3 {" NAMES_32 "}, %32, %33, p, 1, 1;\n}\n"
        : BIND_32("+r", d)
        : "l"(a), "l"(b), "r"(accumulate));
}

/// The same with d = A * B, see wgmma_m64n128k32_ss_first.
__device__ __forceinline__ void wgmma_m64n128k32_f16_ss_first(uint32_t (&d)[32], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f16.e4m3.e4m3 {" NAMES_32 "}, %32, %33, p, 1, 1;\n}\n"
        : BIND_32("=r", d)
        : "l"(a), "l"(b));
}

#undef NAMES_32
#undef NAMES_64
#undef BIND_4
#undef BIND_16
#undef BIND_32
#undef BIND_64
