// Union8, the design of the paper: a cluster of two CTAs walks the page union of eight queries. Each CTA
// is one warpgroup with a tile of four of them; every page is read from L2 once and multicast to both
// into double-buffered slots. A CTA skips the pages that none of its queries selected, and a warp the
// softmax of those that its query did not. Each query keeps its own pages, causal limit, softmax and
// output row.
//
// Products follow each other in order; the other CTAs of the multiprocessor fill the gaps.
//
// Pages are walked from the last to the first: a query attends most to what is near it, and the softmax is
// cheapest when its largest logits come first. The j-th of them goes into slot j % STAGES of both CTAs and
// is copied by one thread of CTA j % 2: they take turns.
//   full[slot]   in each CTA: that CTA's thread arms it, the copy completes it.
//   empty[slot]  in the CTA that fills the slot: every warp of the cluster has read the page.
// A warp waits for `full` and arrives on `empty` for every page, skipped ones too: parity tells only
// neighbouring phases apart.
#include "records.cuh"
#include "rows.cuh"

constexpr int STAGES = 2;
constexpr int CTAS = 2;
constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int CTAS_PER_SM = ACCURATE ? 2 : 3;
constexpr int SLOT_BYTES = KEYS_BYTES + VALUES_BYTES + (ACCURATE ? 0 : ONES_BYTES);
static_assert(STAGES % CTAS == 0, "a slot is filled by the same CTA every time");

// Shared memory, from a 1024-byte aligned base.
constexpr int Q_OFFSET = STAGES * SLOT_BYTES;
constexpr int FACTOR_OFFSET = Q_OFFSET + Q_PARTS * TILE_BYTES;
constexpr int BARRIER_OFFSET = FACTOR_OFFSET + TILE_ROWS * 4;
constexpr int SHARED_BYTES = BARRIER_OFFSET + 2 * STAGES * 8;
static_assert(CTAS_PER_SM * (SHARED_BYTES + 1024) <= 228 * 1024, "CTAs that a multiprocessor holds");

extern "C" __constant__ int shared_bytes = SHARED_BYTES;

struct Shared {
    uint32_t base;  // address
    __device__ uint32_t slot(int s) const { return base + s * SLOT_BYTES; }
    __device__ uint32_t full(int s) const { return base + BARRIER_OFFSET + 8 * s; }
    __device__ uint32_t empty(int s) const { return base + BARRIER_OFFSET + 8 * (STAGES + s); }
};

/// The copies of this CTA, every other page of the union, made by one of its threads beside its other work.
struct Copies {
    const PageRecord* list;
    int pages;
    int head;
    int page;  // the next to copy
    int row;   // and where it lies, fetched ahead

    __device__ __forceinline__ void fetch() {
        if (page < pages) row = __ldg(&list[pages - 1 - page].row);
    }

    /// Copies the next page if both CTAs are done with what its slot held; never waits.
    __device__ __forceinline__ void advance(const Shared& shared, const TensorMap& keys, const AttentionParams& params) {
        constexpr uint16_t BOTH = (1 << CTAS) - 1;
        if (page >= pages) return;
        const int s = page % STAGES, use = page / STAGES;
        if (use > 0 && !mbarrier_test_wait(shared.empty(s), (use - 1) & 1)) return;
        cp_async_bulk_tensor_4d_multicast(shared.slot(s), &keys, 0, 0, head, row, shared.full(s), BOTH);
        const int64_t image = (static_cast<int64_t>(row) * params.kv_heads + head) * VALUES_BYTES;
        cp_async_bulk_multicast(shared.slot(s) + KEYS_BYTES, params.values + image, VALUES_BYTES, shared.full(s), BOTH);
        page += CTAS;
        fetch();
    }
};

/// One page for the CTA's tile, in order. `beside()` is called while the tensor core works.
template <typename Beside>
__device__ __forceinline__ void attend_page(Rows& rows, uint64_t tile, uint64_t keys, bool live, int visible,
                                            Beside beside) {
    Score scores[SCORE_REGISTERS];
    uint32_t probabilities[32], packed[FRAGMENT_REGISTERS];
    float correction[2];
    wgmma_fence();
    multiply_keys(scores, tile, keys);
    wgmma_commit_group();
    beside();
    wgmma_wait_group<0>();
    pin(scores);
    bool moved = false;
    if (live) moved = exponentiate(rows, scores, probabilities, visible, correction);
    if (moved) scale_rows(rows.o, correction);
    pack_page(packed, probabilities, live);
    wgmma_fence();
    multiply_values(rows, packed, keys + KEYS_BYTES / 16);
    wgmma_commit_group();
    beside();
    wgmma_wait_group<0>();
    pin(rows.o);
}

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, CTAS_PER_SM)
    attention(const __grid_constant__ TensorMap keys, const __grid_constant__ AttentionParams params) {
    // NOTE: no room to round the base up: three CTAs fill the multiprocessor. It is checked instead.
    extern __shared__ __align__(1024) uint8_t dynamic[];
    const Shared shared{smem_address(dynamic)};
    const int rank = cluster_ctarank(), warp = uniform(threadIdx.x / 32);
    if (threadIdx.x == 0) {
        if (shared.base % 1024 != 0) __trap();
        prefetch_tensormap(&keys);
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(shared.full(s), 1);
            mbarrier_init(shared.empty(s), CTAS * WARPS);
        }
        fence_mbarrier_init();
    }
    __syncwarp();
    barrier_cluster_arrive();

    // An unused task has no pages and no queries: it passes through.
    const int task = blockIdx.x / CTAS;
    const TaskRecord* record = params.task_records + task;
    const int pages = uniform(__ldg(&record->pages)), head = __ldg(&record->kv_head);
    const int query = __ldg(&record->slots[rank * TILE_QUERIES + warp].query);
    const int seen = __ldg(&record->slots[rank * TILE_QUERIES + warp].visible);
    const PageRecord* list = params.page_records + static_cast<int64_t>(task) * params.record_stride;
    Copies copies{list, pages, head, rank, 0};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES && s < pages; ++s) mbarrier_arrive_expect_tx(shared.full(s), KEYS_BYTES + VALUES_BYTES);
        copies.fetch();
    }
    __syncwarp();
    barrier_cluster_wait();  // both CTAs' barriers exist
    if (threadIdx.x == 0) {
        for (int first = 0; first < STAGES / CTAS; ++first) copies.advance(shared, keys, params);
    }
    __syncwarp();

    uint8_t* q_tile = dynamic + Q_OFFSET;
    uint32_t* row_factor = reinterpret_cast<uint32_t*>(dynamic + FACTOR_OFFSET);
    load_query(q_tile, row_factor, params.q, params.query_bytes, query, head, warp, params.scale_log2);
#if !ACCURATE
    for (int at = threadIdx.x * 4; at < STAGES * ONES_BYTES; at += THREADS * 4) {
        uint8_t* ones = dynamic + at / ONES_BYTES * SLOT_BYTES + KEYS_BYTES + VALUES_BYTES;
        *reinterpret_cast<uint32_t*>(ones + at % ONES_BYTES) = 0x38383838;
    }
#endif
    fence_proxy_async_shared();
    __syncthreads();

    Rows rows;
    clear(rows);
    begin_rows(rows, row_factor);
    const uint64_t tile = swizzle128_descriptor(smem_address(q_tile));
    // Logical page and membership, one page ahead of use.
    const uint32_t* words = reinterpret_cast<const uint32_t*>(list) + 1;
    uint32_t upcoming = pages > 0 ? __ldg(words + 2 * (pages - 1)) : 0;
    const auto beside = [&] {
        if (threadIdx.x == 0) copies.advance(shared, keys, params);
    };
    for (int page = 0; page < pages; ++page) {
        const uint32_t word = uniform(upcoming), parity = (page / STAGES) & 1;
        const int s = page % STAGES;
        if (page + 1 < pages) upcoming = __ldg(words + 2 * (pages - 2 - page));
        if (threadIdx.x == 0) {
            // NOTE: this page may still be this thread's to copy, so it must not just wait.
            while (!mbarrier_test_wait(shared.full(s), parity)) copies.advance(shared, keys, params);
            // The phase is over, so this arms the next; its copy waits for every warp's release below.
            if (page + STAGES < pages) mbarrier_arrive_expect_tx(shared.full(s), KEYS_BYTES + VALUES_BYTES);
        }
        __syncwarp();
        mbarrier_wait(shared.full(s), parity);

        const uint32_t members = (word >> (16 + rank * TILE_QUERIES)) & ((1 << TILE_QUERIES) - 1);
        if (members != 0) {
            const bool live = (members >> warp) & 1;
            const int visible = seen - static_cast<int>(word & 0xffff) * PAGE;
            attend_page(rows, tile, swizzle128_descriptor(shared.slot(s)), live, visible, beside);
        }
        __syncwarp();  // NOTE: a lane still waiting for the page could be overtaken by the next phase
        if ((threadIdx.x & 31) == 0) mbarrier_arrive_cluster(shared.empty(s), page % CTAS);
        beside();
    }
    __syncwarp();
    barrier_cluster_arrive();
    if (query >= 0)
        store_rows(rows, params.out + query * params.query_bytes + head * (GROUP_HEADS * HEAD_DIM * 2), params.v_scale);
    barrier_cluster_wait();  // the other CTA copies nothing more into this one and frees none of its slots
}
