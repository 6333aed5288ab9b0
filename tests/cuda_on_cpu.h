// Runs a CUDA block on one CPU thread, so that kernels without tensor-core instructions can be tested
// where there is no GPU. Every CUDA thread is a fiber; a warp or block collective suspends it until its
// partners have arrived. Fibers are resumed in a shuffled order, which exposes missing barriers.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "byte_perm.h"
#include "fiber_context.h"
#include "number_formats.h"

#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ thread_local  // one OS thread: a block's shared memory, whatever its scope

using std::max;
using std::min;

struct uint3_ { unsigned x, y, z; };
inline uint3_ threadIdx, blockIdx, gridDim, blockDim;

template <typename T> struct alignas(2 * sizeof(T)) Pair { T x, y; };
template <typename T> struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) Four { T x, y, z, w; };
using uint2 = Pair<unsigned>;
using uchar2 = Pair<unsigned char>;
using int4 = Four<int>;
using uint4 = Four<unsigned>;
using ushort4 = Four<unsigned short>;
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uchar2 make_uchar2(unsigned char x, unsigned char y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) { return {x, y, z, w}; }

// Shared addresses are offsets in the dynamic shared memory, which the test defines.
extern thread_local uint4 dynamic[];
inline size_t __cvta_generic_to_shared(const void* pointer) {
    return static_cast<const char*>(pointer) - reinterpret_cast<const char*>(dynamic);
}

namespace emulator {

constexpr size_t STACK = 64 << 10;

struct Meeting {  // of the fibers of a warp or of the block
    int waiting = 0, alive = 0, generation = 0;
    unsigned value[32];
};

struct Fiber {
    Context context;
    std::vector<char> stack = std::vector<char>(STACK);
    bool done = false;
    const Meeting* awaits = nullptr;  // until its generation has passed
    int generation = 0;
    std::vector<std::function<void()>> copies;  // asked for, and not waited for yet
    bool ready() const { return !done && !(awaits && awaits->generation == generation); }
};

inline Context scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<Meeting> warps;
inline Meeting block;
inline unsigned current;
inline bool progress;
inline std::function<void()> body;
inline std::mt19937 shuffle(1);

inline void release_if_complete(Meeting& meeting) {
    if (meeting.waiting && meeting.waiting == meeting.alive) {
        meeting.waiting = 0;
        ++meeting.generation;
        progress = true;
    }
}

inline void meet(Meeting& meeting) {
    Fiber& fiber = fibers[current];
    fiber.awaits = &meeting;
    fiber.generation = meeting.generation;
    ++meeting.waiting;
    release_if_complete(meeting);
    if (!fiber.ready()) fiber.context.leave_for(scheduler);
    fiber.awaits = nullptr;
}

inline Meeting& warp() { return warps[threadIdx.x / 32]; }

/// Every lane's value, as every lane sees them.
inline std::vector<unsigned> exchange(unsigned own) {
    Meeting& mine = warp();
    mine.value[threadIdx.x % 32] = own;
    meet(mine);
    std::vector<unsigned> all(mine.value, mine.value + 32);
    meet(mine);
    return all;
}

inline void enter() {
    body();
    fibers[current].done = true;
    progress = true;
    --warp().alive;
    --block.alive;
    release_if_complete(warp());
    release_if_complete(block);
    fibers[current].context.leave_for(scheduler);
}

inline void run_block(unsigned threads) {
    fibers.resize(threads);
    warps.assign(threads / 32, Meeting{0, 32, 0, {}});
    block = {0, static_cast<int>(threads), 0, {}};
    std::vector<unsigned> order(threads);
    for (unsigned t = 0; t < threads; ++t) {
        order[t] = t;
        fibers[t].done = false;
        fibers[t].awaits = nullptr;
        fibers[t].copies.clear();
        fibers[t].context.make(fibers[t].stack.data(), STACK, enter);
    }
    while (block.alive) {
        progress = false;
        std::shuffle(order.begin(), order.end(), shuffle);
        for (unsigned t : order) {
            if (!fibers[t].ready()) continue;
            current = threadIdx.x = t;
            scheduler.leave_for(fibers[t].context);
        }
        if (!progress) {
            std::fprintf(stderr, "block %u: every thread waits for another\n", blockIdx.x);
            std::abort();
        }
    }
}

/// Runs `kernel` for every block of a grid, in a shuffled order.
inline void launch(unsigned grid, unsigned threads, std::function<void()> kernel) {
    body = std::move(kernel);
    gridDim = {grid, 1, 1};
    blockDim = {threads, 1, 1};
    std::vector<unsigned> blocks(grid);
    for (unsigned b = 0; b < grid; ++b) blocks[b] = b;
    std::shuffle(blocks.begin(), blocks.end(), shuffle);
    for (unsigned b : blocks) {
        blockIdx.x = b;
        run_block(threads);
    }
}

}  // namespace emulator

inline void __syncthreads() { emulator::meet(emulator::block); }
inline int __syncthreads_and(int own) {
    static int all;
    __syncthreads();
    all = 1;
    __syncthreads();
    all &= own != 0;
    __syncthreads();
    return all;
}
inline int __syncthreads_or(int own) { return !__syncthreads_and(!own); }
inline void __syncwarp(unsigned = ~0u) { emulator::meet(emulator::warp()); }

template <typename T> T __shfl_sync(unsigned, T value, int lane) {
    return static_cast<T>(emulator::exchange(static_cast<unsigned>(value))[lane & 31]);
}
template <typename T> T __shfl_up_sync(unsigned, T value, unsigned delta) {
    const unsigned lane = threadIdx.x % 32;
    return static_cast<T>(emulator::exchange(static_cast<unsigned>(value))[lane >= delta ? lane - delta : lane]);
}
template <typename T> T __shfl_xor_sync(unsigned, T value, int mask) {
    return static_cast<T>(emulator::exchange(static_cast<unsigned>(value))[threadIdx.x % 32 ^ mask]);
}
inline unsigned __ballot_sync(unsigned, bool own) {
    unsigned all = 0, lane = 0;
    for (unsigned bit : emulator::exchange(own)) all |= bit << lane++;
    return all;
}
inline unsigned __reduce_min_sync(unsigned, unsigned own) {
    const auto all = emulator::exchange(own);
    return *std::min_element(all.begin(), all.end());
}
inline unsigned __reduce_max_sync(unsigned, unsigned own) {
    const auto all = emulator::exchange(own);
    return *std::max_element(all.begin(), all.end());
}
inline int __reduce_add_sync(unsigned, int own) {
    int sum = 0;
    for (unsigned other : emulator::exchange(own)) sum += static_cast<int>(other);
    return sum;
}

inline unsigned __reduce_or_sync(unsigned, unsigned own) {
    unsigned all = 0;
    for (unsigned other : emulator::exchange(own)) all |= other;
    return all;
}

template <typename T> T __ldg(const T* at) { return *at; }
template <typename T> T __ldcg(const T* at) { return *at; }
template <typename T, typename U> T atomicOr(T* at, U bits) { const T old = *at; *at |= bits; return old; }
template <typename T, typename U> T atomicAdd(T* at, U more) { const T old = *at; *at += more; return old; }
inline unsigned atomicInc(unsigned* at, unsigned limit) {
    const unsigned old = *at;
    *at = old >= limit ? 0 : old + 1;
    return old;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    for (int i = 0; i < 32; i += 8) sum += (a >> i & 0xff) * (b >> i & 0xff);
    return sum;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }

// PTX ------------------------------------------------------------------------------------------------
// Its wrappers are assembler; the ones a kernel may use here are named anew and written out.

#define prefetch_global_l2 ptx_prefetch_global_l2
#define cp_async_4 ptx_cp_async_4
#define cp_async_wait_all ptx_cp_async_wait_all
#define mma_and_popc ptx_mma_and_popc
#define mbarrier_init ptx_mbarrier_init
#define mbarrier_arrive ptx_mbarrier_arrive
#define mbarrier_wait ptx_mbarrier_wait
#define cvt_f16x2_e4m3x2 ptx_cvt_f16x2_e4m3x2
#include "ptx.cuh"
#undef prefetch_global_l2
#undef cp_async_4
#undef cp_async_wait_all
#undef mma_and_popc
#undef mbarrier_init
#undef mbarrier_arrive
#undef mbarrier_wait
#undef cvt_f16x2_e4m3x2

inline uint32_t cvt_f16x2_e4m3x2(uint16_t packed) {
    return to_f16(from_e4m3(packed & 0xff)) | static_cast<uint32_t>(to_f16(from_e4m3(packed >> 8))) << 16;
}

inline void prefetch_global_l2(const void*) {}
/// Copies land as late as they may: when they are waited for.
inline void cp_async_4(uint32_t smem, const void* global) {
    emulator::fibers[emulator::current].copies.push_back(
        [=] { std::memcpy(reinterpret_cast<char*>(dynamic) + smem, global, 4); });
}
inline void cp_async_wait_all() {
    auto& copies = emulator::fibers[emulator::current].copies;
    for (const auto& copy : copies) copy();
    copies.clear();
}

inline void mma_and_popc(unsigned (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    std::vector<unsigned> rows[4], columns[2];
    for (int i = 0; i < 4; ++i) rows[i] = emulator::exchange(a[i]);
    for (int i = 0; i < 2; ++i) columns[i] = emulator::exchange(b[i]);
    const int r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int word = 0; word < 8; ++word)
        for (int i = 0; i < 4; ++i)
            c[i] += __builtin_popcount(rows[word / 4 * 2 + i / 2][4 * r + word % 4] &
                                       columns[word / 4][4 * (2 * t + i % 2) + word % 4]);
}

struct Mbarrier {
    uint16_t arrivals, missing;
    uint32_t phase;
};
inline Mbarrier& mbarrier_at(uint32_t address) {
    return *reinterpret_cast<Mbarrier*>(reinterpret_cast<char*>(dynamic) + address);
}
inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    mbarrier_at(barrier) = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0};
}
inline void mbarrier_arrive(uint32_t barrier) {
    Mbarrier& at = mbarrier_at(barrier);
    if (--at.missing == 0) {
        at.missing = at.arrivals;
        ++at.phase;
        emulator::progress = true;
    }
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    while ((mbarrier_at(barrier).phase & 1) == parity)
        emulator::fibers[emulator::current].context.leave_for(emulator::scheduler);
}
