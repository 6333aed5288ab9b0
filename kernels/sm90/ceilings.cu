// What this GPU does at most: probes of one resource each, for the roofline. Nothing here computes attention.
// The host counts the work from the grid and `rounds`; a probe does exactly that much and nothing else of note.
#include "ptx.cuh"

constexpr int PAGE_BYTES = 32768;
constexpr int SLOTS = 6;            // pages in flight in each CTA; even, so that the turns of a cluster fit the slots
constexpr int STREAM_THREADS = 64;  // warp 0 issues copies, warp 1 consumes the pages

constexpr int MATRIX_THREADS = 256;  // two warpgroups keep the tensor cores fed
constexpr int MATRIX_A_BYTES = 64 * 128;
constexpr int MATRIX_B_BYTES = 128 * 128;
constexpr int MATRIX_STEPS = 4;  // m64n128k32 products over 128 bytes of K

constexpr int EXP_THREADS = 512;
constexpr int EXP_CHAINS = 8;  // independent chains per thread hide the latency of ex2

struct ProbeParams {
    const uint8_t* pages;  // `page_count` pages of 32 KiB, small enough to stay in L2
    float* sink;           // written only if the impossible happens, so that no work is dropped
    uint32_t page_count;   // a power of two
    uint32_t rounds;       // pages per CTA (or cluster), products or exponentials per thread
};

__device__ __forceinline__ const uint8_t* page_of(const ProbeParams& params, uint32_t stream, uint32_t round) {
    const uint32_t mixed = (stream * 2654435761u) ^ (round * 40503u + (round >> 3) * 2246822519u);
    return params.pages + static_cast<size_t>((mixed >> 7) & (params.page_count - 1)) * PAGE_BYTES;
}

/// 1024-byte aligned start of dynamic shared memory (its own alignment is not guaranteed).
__device__ __forceinline__ uint32_t aligned_shared() {
    extern __shared__ uint8_t dynamic[];
    return (smem_address(dynamic) + 1023u) & ~1023u;
}

/// Pages from L2 into one CTA's shared memory: `rounds` per CTA.
extern "C" __global__ void __launch_bounds__(STREAM_THREADS)
    l2_to_shared(const __grid_constant__ ProbeParams params) {
    __shared__ uint64_t full[SLOTS];
    const uint32_t slots = aligned_shared();
    if (threadIdx.x != 0) return;
    for (int slot = 0; slot < SLOTS; ++slot) mbarrier_init(smem_address(&full[slot]), 1);
    fence_mbarrier_init();
    // A slot is filled again as soon as its page has landed: nobody reads it.
    for (uint32_t round = 0; round < params.rounds + SLOTS; ++round) {
        const uint32_t slot = round % SLOTS;
        const uint32_t barrier = smem_address(&full[slot]);
        if (round >= SLOTS) mbarrier_wait(barrier, (round / SLOTS - 1) & 1);
        if (round < params.rounds) {
            mbarrier_arrive_expect_tx(barrier, PAGE_BYTES);
            cp_async_bulk(slots + slot * PAGE_BYTES, page_of(params, blockIdx.x, round), PAGE_BYTES, barrier);
        }
    }
}

/// Pages from L2 into both CTAs of a cluster by multicast: `rounds` per cluster, the CTAs take turns to issue.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(STREAM_THREADS)
    l2_to_shared_multicast(const __grid_constant__ ProbeParams params) {
    __shared__ uint64_t full[SLOTS];   // a page has landed here
    __shared__ uint64_t empty[SLOTS];  // both CTAs are done with a slot that this CTA fills
    const uint32_t slots = aligned_shared();
    const uint32_t rank = cluster_ctarank();
    const uint32_t cluster = blockIdx.x / 2;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; ++slot) {
            mbarrier_init(smem_address(&full[slot]), 1);
            mbarrier_init(smem_address(&empty[slot]), 2);
        }
        fence_mbarrier_init();
        // Armed before the cluster meets: a page may land before its own CTA expects it otherwise.
        for (uint32_t slot = 0; slot < SLOTS && slot < params.rounds; ++slot)
            mbarrier_arrive_expect_tx(smem_address(&full[slot]), PAGE_BYTES);
    }
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    if (threadIdx.x == 0) {
        for (uint32_t round = rank; round < params.rounds; round += 2) {
            const uint32_t slot = round % SLOTS;
            if (round >= SLOTS) mbarrier_wait(smem_address(&empty[slot]), (round / SLOTS - 1) & 1);
            cp_async_bulk_multicast(slots + slot * PAGE_BYTES, page_of(params, cluster, round), PAGE_BYTES,
                                    smem_address(&full[slot]), 0b11);
        }
    } else if (threadIdx.x == 32) {
        for (uint32_t round = 0; round < params.rounds; ++round) {
            const uint32_t slot = round % SLOTS;
            mbarrier_wait(smem_address(&full[slot]), (round / SLOTS) & 1);
            if (round + SLOTS < params.rounds) {
                mbarrier_arrive_expect_tx(smem_address(&full[slot]), PAGE_BYTES);
                mbarrier_arrive_cluster(smem_address(&empty[slot]), slot % 2);
            }
        }
    }
    __syncwarp();
    // No CTA may leave while the other can still write into it or arrive on its barriers.
    barrier_cluster_arrive();
    barrier_cluster_wait();
}

/// FP8 products from shared memory: `rounds` times 64 x 128 x 128 in every warpgroup.
extern "C" __global__ void __launch_bounds__(MATRIX_THREADS)
    fp8_matrix_rate(const __grid_constant__ ProbeParams params) {
    const uint32_t tiles = aligned_shared();
    const uint32_t warpgroup = threadIdx.x / 128;
    constexpr uint32_t tile_bytes = 2 * MATRIX_A_BYTES + MATRIX_B_BYTES;
    for (uint32_t word = threadIdx.x; word < tile_bytes / 4; word += MATRIX_THREADS) {
        // Dense finite values: zeros would draw less power than real operands and so clock higher.
        const uint32_t value = (word * 2654435761u) & 0xb7b7b7b7u;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(tiles + word * 4), "r"(value) : "memory");
    }
    fence_proxy_async_shared();
    __syncthreads();
    const uint64_t a = swizzle128_descriptor(tiles + warpgroup * MATRIX_A_BYTES);
    const uint64_t b = swizzle128_descriptor(tiles + 2 * MATRIX_A_BYTES);
    float sum[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = 0.0f;
    for (uint32_t round = 0; round < params.rounds; ++round) {
        pin(sum);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < MATRIX_STEPS; ++step) wgmma_m64n128k32_ss(sum, a + 2 * step, b + 2 * step, 1);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        pin(sum);
    }
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 64; ++i) total += sum[i];
    if (total == 12345.678f) params.sink[blockIdx.x] = total;
}

/// Base-2 exponentials: `rounds` times EXP_CHAINS in every thread.
extern "C" __global__ void __launch_bounds__(EXP_THREADS) exp2_rate(const __grid_constant__ ProbeParams params) {
    float chain[EXP_CHAINS];
#pragma unroll
    for (int i = 0; i < EXP_CHAINS; ++i) chain[i] = -1.0f - 0.01f * static_cast<float>(threadIdx.x + i);
#pragma unroll 8
    for (uint32_t round = 0; round < params.rounds; ++round) {
#pragma unroll
        for (int i = 0; i < EXP_CHAINS; ++i) chain[i] = ex2_approx(chain[i]);
    }
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < EXP_CHAINS; ++i) total += chain[i];
    if (total == 12345.678f) params.sink[blockIdx.x] = total;
}

/// Nothing at all: what a launch costs.
extern "C" __global__ void empty_kernel(const __grid_constant__ ProbeParams params) {
    if (params.rounds == 0xffffffffu) params.sink[0] = 0.0f;
}
