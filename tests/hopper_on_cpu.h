// Runs kernels for Hopper's copy engine and tensor cores on one CPU thread, for tests without a GPU. Included
// ahead of a CUDA source whose "ptx.cuh" and "progress.cuh" are empty: it takes their place.
//
// Every CUDA thread is a fiber; a collective suspends it until its partners have arrived. All blocks of a
// grid are alive together and advance at random speeds, so blocks may wait for each other and races between
// them show. Barriers, bulk copies, the 128-byte swizzle and FP8 products follow the PTX manual; copies are
// immediate. What that proves is addresses, layouts, arithmetic and protocols between blocks, not the order
// of asynchronous work inside one.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
// A block's dynamic shared memory; `tickets` is the one static array that blocks alive together must not share.
#define dynamic emulator::block->memory

using std::max;
using std::min;

struct Index { unsigned x = 0, y = 0, z = 0; };
inline Index threadIdx, blockIdx, gridDim, blockDim;
struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulator {

constexpr size_t STACK = 96 << 10, SHARED_BYTES = 200 << 10;

struct Meeting { int waiting = 0, alive = 0, generation = 0; };
struct Phase { int arrivals, pending, bytes, parity; };  // of an mbarrier
struct Operands { float left[64][32], right[136][32]; };
struct Block {
    unsigned index;
    int running;
    Meeting all, warps[32];
    uint64_t values[1024];  // what the threads put into a collective
    std::map<uint32_t, Phase> phases;
    Operands operands;
    alignas(1024) uint8_t memory[SHARED_BYTES];
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK);
    bool done;
};

inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<Block*> blocks;
inline Block* block;
inline Fiber* fiber;
inline std::function<void()> body;
inline std::mt19937 chance(1);

inline void pause() { swapcontext(&fiber->context, &scheduler); }

inline void release_if_complete(Meeting& meeting) {
    if (!meeting.waiting || meeting.waiting < meeting.alive) return;
    meeting.waiting = 0;
    ++meeting.generation;
}
inline void meet(Meeting& meeting) {
    const int generation = meeting.generation;
    ++meeting.waiting;
    release_if_complete(meeting);
    while (meeting.generation == generation) pause();
}
inline Meeting& warp() { return block->warps[threadIdx.x / 32]; }

/// Every lane hands in a value; `pick(lanes, own lane)` chooses from all of them.
template <typename T, typename Pick> auto exchange(T own, Pick pick) {
    uint64_t* lanes = block->values + threadIdx.x / 32 * 32;
    std::memcpy(lanes + threadIdx.x % 32, &own, sizeof(T));
    meet(warp());
    T all[32];
    for (int lane = 0; lane < 32; ++lane) std::memcpy(all + lane, lanes + lane, sizeof(T));
    meet(warp());
    return pick(all, static_cast<int>(threadIdx.x % 32));
}

inline void enter() {
    body();
    fiber->done = true;
    --warp().alive;
    --block->all.alive;
    --block->running;
    release_if_complete(warp());
    release_if_complete(block->all);
    pause();
}

inline void start(Block& fresh, unsigned index, unsigned threads, Fiber* its) {
    fresh.index = index;
    fresh.running = threads;
    fresh.all = {0, static_cast<int>(threads), 0};
    for (unsigned w = 0; w < 32; ++w) fresh.warps[w] = {0, std::clamp<int>(threads - 32 * w, 0, 32), 0};
    fresh.phases.clear();
    std::memset(fresh.memory, 0xff, sizeof(fresh.memory));
    for (unsigned t = 0; t < threads; ++t) {
        its[t].done = false;
        getcontext(&its[t].context);
        its[t].context.uc_stack.ss_sp = its[t].stack.data();
        its[t].context.uc_stack.ss_size = STACK;
        its[t].context.uc_link = &scheduler;
        makecontext(&its[t].context, enter, 0);
    }
}

/// Lets every thread of a block run until it has to wait.
inline void advance(Block& chosen, unsigned threads, Fiber* its) {
    block = &chosen;
    for (unsigned t = 0; t < threads; ++t) {
        if (its[t].done) continue;
        fiber = its + t;
        threadIdx.x = t;
        blockIdx.x = chosen.index;
        swapcontext(&scheduler, &fiber->context);
    }
}

/// Runs blocks [first, first + count) of a grid side by side.
inline void run_together(unsigned first, unsigned count, unsigned threads) {
    while (blocks.size() < count) blocks.push_back(new Block);
    if (fibers.size() < count * threads) fibers.resize(count * threads);
    for (unsigned b = 0; b < count; ++b) start(*blocks[b], first + b, threads, &fibers[b * threads]);
    std::vector<unsigned> order(count), wakes(count);
    for (unsigned b = 0; b < count; ++b) order[b] = b;
    for (unsigned left = count, rounds = 0; left; ++rounds) {
        if (rounds == 400000) {
            std::fprintf(stderr, "blocks %u to %u wait for each other for ever\n", first, first + count - 1);
            std::abort();
        }
        std::shuffle(order.begin(), order.end(), chance);
        left = 0;
        for (unsigned b : order) {
            left += blocks[b]->running > 0;
            if (count > 1 && chance() % 64 == 0) wakes[b] = rounds + chance() % 256;  // a block falls far behind
            if (rounds < wakes[b]) continue;
            for (unsigned speed = count == 1 ? 1 : chance() % 12; speed && blocks[b]->running; --speed)
                advance(*blocks[b], threads, &fibers[b * threads]);
        }
    }
}

inline void launch(unsigned grid, unsigned threads, bool together, std::function<void()> kernel) {
    body = std::move(kernel);
    gridDim.x = grid;
    blockDim.x = threads;
    if (together) return run_together(0, grid, threads);
    for (unsigned b = 0; b < grid; ++b) run_together(b, 1, threads);
}

}  // namespace emulator

// Collectives, loads and bits --------------------------------------------------------------------

inline void __syncthreads() { emulator::meet(emulator::block->all); }
inline void __syncwarp(unsigned = ~0u) { emulator::meet(emulator::warp()); }
inline int __syncthreads_or(int own) {
    __syncthreads();
    int& any = *reinterpret_cast<int*>(&emulator::block->operands);
    any = 0;
    __syncthreads();
    any |= own != 0;
    __syncthreads();
    const int all = any;
    __syncthreads();
    return all;
}
template <typename T> T __shfl_sync(unsigned, T own, int lane, int width = 32) {
    return emulator::exchange(own, [=](T* all, int me) { return all[(me & ~(width - 1)) + (lane & (width - 1))]; });
}
template <typename T> T __shfl_xor_sync(unsigned, T own, int mask) {
    return emulator::exchange(own, [=](T* all, int me) { return all[me ^ mask]; });
}
template <typename T> T __shfl_up_sync(unsigned, T own, int by) {
    return emulator::exchange(own, [=](T* all, int me) { return all[me >= by ? me - by : me]; });
}
inline unsigned __ballot_sync(unsigned, bool own) {
    return emulator::exchange(own, [](bool* all, int) {
        unsigned bits = 0;
        for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(all[lane]) << lane;
        return bits;
    });
}
inline int __reduce_min_sync(unsigned, int own) {
    return emulator::exchange(own, [](int* all, int) { return *std::min_element(all, all + 32); });
}
inline int __reduce_add_sync(unsigned, int own) {
    return emulator::exchange(own, [](int* all, int) {
        int sum = 0;
        for (int lane = 0; lane < 32; ++lane) sum += all[lane];
        return sum;
    });
}
template <typename T> T __ldg(const T* at) { return *at; }
template <typename T> T __ldcg(const T* at) { return *at; }
template <typename T> T __ldcs(const T* at) { return *at; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned pick = selector >> 4 * i & 15, byte = bytes >> 8 * (pick & 7) & 0xff;
        out |= (pick & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    return out;
}
template <typename To, typename From> To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}
inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
inline float __int_as_float(int bits) { return bits_as<float>(bits); }
inline float __fdividef(float a, float b) { return a / b; }

// Barriers and copies ----------------------------------------------------------------------------

/// Shared-memory addresses count from the block's memory, 48 bytes in, so that alignment has to be earned.
inline uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - emulator::block->memory) + 48;
}
inline uint8_t& shared_byte(uint32_t address) {
    if (address < 48 || address >= emulator::SHARED_BYTES) std::abort();
    return emulator::block->memory[address - 48];
}
/// The 128-byte swizzle: address bits 4..6 are exchanged with bits 7..9.
inline uint32_t swizzle128(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline void close_phase(emulator::Phase& phase) {
    if (phase.pending || phase.bytes) return;
    phase.parity ^= 1;
    phase.pending = phase.arrivals;
}
inline void mbarrier_init(uint32_t barrier, int arrivals) { emulator::block->phases[barrier] = {arrivals, arrivals, 0, 0}; }
inline void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
    emulator::Phase& phase = emulator::block->phases.at(barrier);
    phase.bytes += bytes;
    --phase.pending;
    close_phase(phase);
}
inline void complete_tx(uint32_t barrier, int bytes) {
    emulator::Phase& phase = emulator::block->phases.at(barrier);
    phase.bytes -= bytes;
    close_phase(phase);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    while (emulator::block->phases.at(barrier).parity == static_cast<int>(parity)) emulator::pause();
}
inline void fence_mbarrier_init() {}
inline void fence_proxy_async_shared() {}
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

/// The test fills in the address and the strides of rows, heads and pages, in bytes.
struct alignas(64) TensorMap { uint64_t opaque[16]; };
inline void prefetch_tensormap(const TensorMap*) {}
inline void cp_async_bulk_tensor_4d(uint32_t to, const TensorMap* map, int c0, int c1, int c2, int c3, uint32_t barrier) {
    if (to % 1024) std::abort();
    const uint64_t* strides = map->opaque + 1;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(map->opaque[0]) + c0 + c1 * strides[0] + c2 * strides[1] +
                          c3 * strides[2];
    for (int row = 0; row < 128; ++row)
        for (int byte = 0; byte < 128; ++byte) shared_byte(swizzle128(to + row * 128 + byte)) = from[row * strides[0] + byte];
    complete_tx(barrier, 128 * 128);
}
inline void cp_async_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    std::memcpy(&shared_byte(to), from, bytes);
    complete_tx(barrier, bytes);
}

// Numbers ----------------------------------------------------------------------------------------

inline float from_e4m3(uint8_t bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    if ((bits & 0x7f) == 0x7f) return NAN;
    const float size = exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp(float(fraction), -9);
    return bits & 0x80 ? -size : size;
}
inline uint8_t to_e4m3(float x) {
    if (std::isnan(x)) return 0x7f;
    const uint8_t sign = std::signbit(x) ? 0x80 : 0;
    const float size = std::min(std::fabs(x), 448.0f);
    int exponent = size ? std::max(std::ilogb(size), -6) : -6;
    const float units = std::nearbyint(std::ldexp(size, 3 - exponent));  // ties to even
    const int code = units >= 8 ? (exponent + 7) * 8 + static_cast<int>(units) - 8 : static_cast<int>(units);
    return sign | std::min(code, 0x7e);
}
inline uint16_t cvt_e4m3x2(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }
inline uint32_t cvt_e4m3x4(float x0, float x1, float x2, float x3) {
    return cvt_e4m3x2(x0, x1) | static_cast<uint32_t>(cvt_e4m3x2(x2, x3)) << 16;
}
inline uint32_t to_bf16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t cvt_bf16x2(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline uint32_t max_nan_bf16(uint32_t a, uint32_t b) {
    const float x = __uint_as_float(a << 16), y = __uint_as_float(b << 16);
    return std::isnan(x) || std::isnan(y) ? 0x7fff : x > y ? a : b;
}
inline uint32_t max_nan_bf16x2(uint32_t a, uint32_t b) {
    return max_nan_bf16(a & 0xffff, b & 0xffff) | max_nan_bf16(a >> 16, b >> 16) << 16;
}
inline float ex2_approx(float x) { return std::exp2(x); }

// What other kernels' templates name but these kernels do not call.
inline uint32_t cvt_f16x2_e4m3x2(uint16_t) { std::abort(); }
inline float cvt_f32_f16(uint16_t) { std::abort(); }
template <typename... T> void wgmma_m64n128k32_ss(T&&...) { std::abort(); }

// Matrix products --------------------------------------------------------------------------------

inline void wgmma_fence() {}
inline void wgmma_commit_group() {}
template <int PENDING> void wgmma_wait_group() {}
template <typename T, int N> void pin(T (&)[N]) {}
inline uint64_t swizzle128_descriptor(uint32_t address) {
    return static_cast<uint64_t>(address >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

/// d = (accumulate ? d : 0) + A * B for one warpgroup; A from registers, B K-major at the descriptor.
template <int N, int REGISTERS> void multiply(float (&d)[REGISTERS], const uint32_t* a, uint64_t b, int accumulate) {
    auto& [left, right] = emulator::block->operands;
    const int lane = threadIdx.x % 32, r = lane / 4, t = lane % 4, first = threadIdx.x / 32 * 16 + r;
    __syncthreads();
    for (int i = 0; i < 2; ++i)
        for (int h = 0; h < 2; ++h)
            for (int byte = 0; byte < 4; ++byte)
                left[first + 8 * i][16 * h + 4 * t + byte] = from_e4m3(a[i + 2 * h] >> 8 * byte & 0xff);
    const uint32_t start = (b & 0x3fff) << 4;
    for (int n = threadIdx.x; n < N; n += 128)
        for (int k = 0; k < 32; ++k)
            right[n][k] = from_e4m3(shared_byte(swizzle128(start + n / 8 * 1024 + n % 8 * 128 + k)));
    __syncthreads();
    for (int register_ = 0; register_ < N / 2; ++register_) {
        const int row = first + 8 * (register_ >> 1 & 1), column = register_ / 4 * 8 + 2 * t + (register_ & 1);
        float sum = 0.0f;
        for (int k = 0; k < 32; ++k) sum += left[row][k] * right[column][k];
        d[register_] = accumulate ? d[register_] + sum : sum;
    }
    __syncthreads();
}
inline void wgmma_m64n128k32_rs(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) { multiply<128>(d, a, b, accumulate); }
inline void wgmma_m64n136k32_rs(float (&d)[68], const uint32_t* a, uint64_t b, int accumulate) { multiply<136>(d, a, b, accumulate); }

// progress.cuh -----------------------------------------------------------------------------------

inline void red_release_gpu(int* counter) { ++*counter; }
inline void wait_for_count(const int* counter, int target) {
    while (*counter < target) emulator::pause();
}
inline int take_ticket(int* queue) { return (*queue)++; }
