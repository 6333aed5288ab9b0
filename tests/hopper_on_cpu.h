// Runs kernels for Hopper's copy engine and tensor cores on one CPU thread, for tests without a GPU. Included
// ahead of a CUDA source whose "ptx.cuh" and "progress.cuh" are empty: it takes their place.
//
// Barriers, bulk copies, clusters, the 128-byte swizzle and products of e4m3 and f16 follow the PTX manual. A
// bulk copy spoils its destination when it is issued and lands some time later; a product is made when it is
// committed or as late as its wait allows. What that proves is addresses, layouts, arithmetic and protocols,
// not the visibility of one proxy's writes to another.
#pragma once
#include "byte_perm.h"
#include "hopper_fibers.h"
#include "hopper_numbers.h"

#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static
// A block's dynamic shared memory; `tickets` is the one static array that blocks alive together must not share.
#define dynamic emulator::block->memory
#ifndef SHARED_BASE
#define SHARED_BASE 48  // address of the first byte: alignment has to be earned
#endif

using std::max;
using std::min;

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

// Collectives, loads and bits --------------------------------------------------------------------

inline void __syncthreads() { emulator::meet(emulator::block->all, "its block"); }
inline void __syncwarp(unsigned = ~0u) { emulator::meet(emulator::warp().all, "its warp"); }
template <int ID, int THREADS> void bar_sync() {
    emulator::Meeting& meeting = emulator::block->named[ID];
    meeting.alive = THREADS;
    emulator::meet(meeting, "a named barrier");
}
inline int __syncthreads_or(int own) {
    static int any;
    __syncthreads();
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
inline uint32_t opaque(uint32_t value) { return value; }
inline uint32_t fresh_zero() { return 0; }
inline uint32_t uniform(uint32_t value) { return __shfl_sync(0xffffffff, value, 0); }
inline unsigned __ballot_sync(unsigned, bool own) {
    return emulator::exchange(own, [](bool* all, int) {
        unsigned bits = 0;
        for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(all[lane]) << lane;
        return bits;
    });
}
inline bool __all_sync(unsigned mask, bool own) { return __ballot_sync(mask, own) == 0xffffffffu; }
inline int __reduce_min_sync(unsigned, int own) {
    return emulator::exchange(own, [](int* all, int) { return *std::min_element(all, all + 32); });
}
inline int __reduce_max_sync(unsigned, int own) {
    return -__reduce_min_sync(~0u, -own);
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
template <typename T> T atomicAdd(T* at, T more) {
    emulator::stumble();
    emulator::event();
    const T old = *at;
    *at += more;
    return old;
}
inline unsigned atomicInc(unsigned* at, unsigned limit) {
    emulator::stumble();
    emulator::event();
    const unsigned old = *at;
    *at = old >= limit ? 0 : old + 1;
    return old;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline void __trap() { emulator::fail("trap"); }

// Barriers and copies ----------------------------------------------------------------------------

inline uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - emulator::block->memory) + SHARED_BASE;
}
inline uint8_t& shared_byte(uint32_t address, emulator::Block& of = *emulator::block) {
    if (address < SHARED_BASE || address - SHARED_BASE >= emulator::SHARED_BYTES)
        emulator::fail("%#x is no address of shared memory", address);
    return of.memory[address - SHARED_BASE];
}
/// The 128-byte swizzle: address bits 4..6 are exchanged with bits 7..9.
inline uint32_t swizzle128(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

/// The block of this cluster with that rank.
inline emulator::Block& block_of(uint32_t rank) {
    emulator::Block& other = *emulator::block->cluster[rank];
    if (other.running == 0) emulator::fail("CTA %u of the cluster has left already", rank);
    return other;
}
inline emulator::Phase& phase_at(uint32_t barrier, emulator::Block& of = *emulator::block) {
    const auto found = of.phases.find(barrier);
    if (found == of.phases.end()) emulator::fail("there is no barrier at %#x", barrier);
    return found->second;
}
inline void close_phase(emulator::Phase& phase) {
    if (phase.pending || phase.bytes) return;
    phase.parity ^= 1;
    phase.pending = phase.arrivals;
}
inline void arrive_at(emulator::Phase& phase, int count, int bytes) {
    emulator::event();
    phase.bytes += bytes;
    phase.pending -= count;
    if (phase.pending < 0) emulator::fail("more arrivals at a barrier than its %d", phase.arrivals);
    close_phase(phase);
}
inline void mbarrier_init(uint32_t barrier, int arrivals) { emulator::block->phases[barrier] = {arrivals, arrivals, 0, 0}; }
inline void mbarrier_arrive_count(uint32_t barrier, uint32_t count) {
    emulator::stumble();
    arrive_at(phase_at(barrier), count, 0);
}
inline void mbarrier_arrive(uint32_t barrier) { mbarrier_arrive_count(barrier, 1); }
inline void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
    emulator::stumble();
    arrive_at(phase_at(barrier), 1, bytes);
}
inline void mbarrier_arrive_cluster(uint32_t barrier, uint32_t rank) {
    emulator::stumble();
    arrive_at(phase_at(barrier, block_of(rank)), 1, 0);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    emulator::stumble();
    const emulator::Phase& phase = phase_at(barrier);
    emulator::wait_until("barrier", barrier, [&, parity] { return phase.parity != static_cast<int>(parity); });
}
inline bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
    const bool over = phase_at(barrier).parity != static_cast<int>(parity);
    if (!over) emulator::poll();
    return over;
}
inline uint32_t& shared_word(uint32_t address) { return reinterpret_cast<uint32_t&>(shared_byte(address)); }
inline uint32_t atom_exch_shared(uint32_t address, uint32_t value) {
    emulator::stumble();
    emulator::event();
    return std::exchange(shared_word(address), value);
}
/// NOTE: no event, or a loop that asks for a word would never be found waiting.
inline uint32_t atom_or_shared(uint32_t address, uint32_t bits) {
    emulator::stumble();
    return std::exchange(shared_word(address), shared_word(address) | bits);
}
inline void fence_mbarrier_init() {}
inline void fence_proxy_async_shared() {}
inline void fence_proxy_async_global() {}
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
template <int REGISTERS> void setmaxnreg_inc() {}
template <int REGISTERS> void setmaxnreg_dec() {}

inline uint32_t cluster_ctarank() { return emulator::block->rank; }
inline void barrier_cluster_arrive() {
    emulator::Meeting& all = emulator::block->cluster[0]->together;
    emulator::fiber->cluster_generation = all.generation;
    ++all.waiting;
    emulator::complete(all);
}
inline void barrier_cluster_wait() {
    const emulator::Meeting& all = emulator::block->cluster[0]->together;
    const int generation = emulator::fiber->cluster_generation;
    emulator::wait_until("its cluster", 0, [&, generation] { return all.generation != generation; });
}

/// The test fills in the address, the strides of rows, heads and pages, in bytes, and the number of pages.
struct alignas(64) TensorMap { uint64_t opaque[16]; };
inline void prefetch_tensormap(const TensorMap*) {}

/// Spoils the destination in each of `ctas` (0 = this one) now and writes it later; `read(at)` gives the bytes.
template <typename Read>
void copy_later(uint32_t to, uint32_t bytes, uint32_t barrier, uint16_t ctas, bool swizzled, Read read) {
    const bool multicast = ctas != 0;
    if (!multicast) ctas = 1;
    for (uint32_t rank = 0; ctas >> rank; ++rank) {
        if (!(ctas >> rank & 1)) continue;
        emulator::Block& target = multicast ? block_of(rank) : *emulator::block;
        phase_at(barrier, target);
        for (uint32_t at = 0; at < bytes; ++at) shared_byte(to + at, target) = 0xff;
        emulator::copies.push_back({emulator::rounds + emulator::chance() % 24, [=, &target] {
            for (uint32_t at = 0; at < bytes; ++at)
                target.memory[(swizzled ? swizzle128(to + at) : to + at) - SHARED_BASE] = read(at);
            emulator::Phase& phase = target.phases.at(barrier);
            phase.bytes -= bytes;
            close_phase(phase);
        }});
    }
}
inline void cp_async_bulk_tensor_4d_to(uint32_t to, const TensorMap* map, int c0, int c1, int c2, int c3,
                                       uint32_t barrier, uint16_t ctas) {
    const auto [address, row, head, page, pages] = [&] {
        struct { uint64_t address, row, head, page, pages; } all;
        std::memcpy(&all, map->opaque, sizeof(all));
        return all;
    }();
    if (to % 1024) emulator::fail("a box of 128-byte swizzle at %#x", to);
    if (pages && (c3 < 0 || static_cast<uint64_t>(c3) >= pages)) emulator::fail("page %d of %d", c3, int(pages));
    const uint8_t* from = reinterpret_cast<const uint8_t*>(address) + c0 + c1 * row + c2 * head + c3 * page;
    copy_later(to, 128 * 128, barrier, ctas, true, [=, row = row](uint32_t at) { return from[at / 128 * row + at % 128]; });
}
inline void cp_async_bulk_to(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint16_t ctas) {
    if (to % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("a bulk copy of no 16-byte words");
    copy_later(to, bytes, barrier, ctas, false, [=](uint32_t at) { return static_cast<const uint8_t*>(from)[at]; });
}
inline void cp_async_bulk_tensor_4d(uint32_t to, const TensorMap* map, int c0, int c1, int c2, int c3, uint32_t barrier) {
    cp_async_bulk_tensor_4d_to(to, map, c0, c1, c2, c3, barrier, 0);
}
inline void cp_async_bulk_tensor_4d_multicast(uint32_t to, const TensorMap* map, int c0, int c1, int c2, int c3,
                                              uint32_t barrier, uint16_t ctas) {
    cp_async_bulk_tensor_4d_to(to, map, c0, c1, c2, c3, barrier, ctas);
}
inline void cp_async_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    cp_async_bulk_to(to, from, bytes, barrier, 0);
}
inline void cp_async_bulk_multicast(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint16_t ctas) {
    cp_async_bulk_to(to, from, bytes, barrier, ctas);
}

inline void cp_async_bulk_prefetch_l2(const void* from, uint32_t bytes) {
    if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("a prefetch of no 16-byte words");
}

// Matrix products --------------------------------------------------------------------------------

inline void wgmma_fence() {}
template <typename T, int N> void pin(T (&)[N]) {}
inline uint64_t swizzle128_descriptor(uint32_t address) {
    return static_cast<uint64_t>(address >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

inline float number_of(uint32_t bits, int bytes) {
    return bytes == 1 ? from_e4m3(bits & 0xff) : from_f16(bits & 0xffff);
}
/// 32 bytes of row `row` of the K-major tile at a descriptor, as numbers of that many bytes.
inline void read_row(uint64_t descriptor, int row, int bytes, float* numbers, int stride) {
    const uint32_t start = (descriptor & 0x3fff) << 4;
    for (int at = 0; at < 32; at += bytes) {
        uint32_t bits = 0;
        for (int i = 0; i < bytes; ++i)
            bits |= shared_byte(swizzle128(start + row / 8 * 1024 + row % 8 * 128 + at + i)) << 8 * i;
        numbers[at / bytes * stride] = number_of(bits, bytes);
    }
}

/// d = (accumulate ? d : 0) + A * B for the 16 rows of this warp.
template <int N> void make_product(const emulator::Product& product) {
    float left[16][32], right[32][N], sums[N];
    const int first_row = threadIdx.x / 32 % 4 * 16, bytes = product.element_bytes, depth = 32 / bytes;
    for (int row = 0; row < 16; ++row) {
        if (product.from_shared) read_row(product.left, first_row + row, bytes, left[row], 1);
        else
            for (int at = 0; at < 32; at += bytes)
                left[row][at / bytes] = number_of(
                    product.a[row % 8 * 4 + at % 16 / 4][row / 8 + at / 16 * 2] >> at % 4 * 8, bytes);
    }
    for (int n = 0; n < N; ++n) read_row(product.right, n, bytes, &right[0][n], N);
    for (int row = 0; row < 16; ++row) {
        std::fill(sums, sums + N, 0.0f);
        for (int k = 0; k < depth; ++k)
            for (int n = 0; n < N; ++n) sums[n] += left[row][k] * right[k][n];
        for (int n = 0; n < N; ++n) {
            void* own = product.sums[row % 8 * 4 + n % 8 / 2];
            if (product.half) {
                uint16_t& sum = static_cast<uint16_t*>(own)[n / 8 * 4 + row / 8 * 2 + n % 2];
                sum = to_f16((product.accumulate ? from_f16(sum) : 0.0f) + sums[n]);
            } else {
                float& sum = static_cast<float*>(own)[n / 8 * 4 + row / 8 * 2 + n % 2];
                sum = (product.accumulate ? sum : 0.0f) + sums[n];
            }
        }
    }
}
/// Makes the warp's oldest products until `end` are done.
inline void make_products(emulator::Warp& warp, size_t end) {
    emulator::event();
    for (; warp.done < end; ++warp.done, warp.products.pop_front()) {
        const emulator::Product& next = warp.products.front();
        next.columns == 128 ? make_product<128>(next) : make_product<136>(next);
    }
}
inline void issue(void* sums, const uint32_t* a, emulator::Product of) {
    emulator::Warp& warp = emulator::warp();
    const unsigned lane = threadIdx.x % 32;
    const size_t at = warp.issued[lane]++ - warp.done;
    if (at == warp.products.size()) warp.products.push_back(of);
    warp.products[at].sums[lane] = sums;
    warp.products[at].a[lane] = a;
}
inline void wgmma_commit_group() {
    emulator::Warp& warp = emulator::warp();
    emulator::meet(warp.all, "its warp", [&] {
        warp.groups.push_back(warp.done + warp.products.size());
        if (emulator::chance() % 2) make_products(warp, warp.groups.back());
    });
}
template <int PENDING> void wgmma_wait_group() {
    emulator::Warp& warp = emulator::warp();
    emulator::meet(warp.all, "its warp", [&] {
        for (; warp.groups.size() > PENDING; warp.groups.pop_front()) make_products(warp, warp.groups.front());
    });
}
inline void wgmma_m64n128k32_rs(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {
    issue(d, a, {128, false, accumulate != 0, false, 0, b, 1});
}
inline void wgmma_m64n128k16_f16_rs(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {
    issue(d, a, {128, false, accumulate != 0, false, 0, b, 2});
}
inline void wgmma_m64n136k32_rs(float (&d)[68], const uint32_t* a, uint64_t b, int accumulate) {
    issue(d, a, {136, false, accumulate != 0, false, 0, b, 1});
}
inline void wgmma_m64n128k32_ss(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    issue(d, nullptr, {128, false, accumulate != 0, true, a, b, 1});
}
inline void wgmma_m64n128k32_ss_first(float (&d)[64], uint64_t a, uint64_t b) {
    issue(d, nullptr, {128, false, false, true, a, b, 1});
}
inline void wgmma_m64n128k32_f16_ss(uint32_t (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    issue(d, nullptr, {128, true, accumulate != 0, true, a, b, 1});
}
inline void wgmma_m64n128k32_f16_ss_first(uint32_t (&d)[32], uint64_t a, uint64_t b) {
    issue(d, nullptr, {128, true, false, true, a, b, 1});
}

// progress.cuh -----------------------------------------------------------------------------------

inline void red_release_gpu(int* counter) {
    emulator::event();
    ++*counter;
}
inline void wait_for_count(const int* counter, int target) {
    while (*counter < target) emulator::poll();
}
inline int take_ticket(int* queue) { return (*queue)++; }
