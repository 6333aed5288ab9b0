// What both page-major kernels share: page loads, queries, one tile, partial outputs.
//
// Ownership: the partial of (row, page) lies in the slot that is the page's rank in the row's support.
// No two tiles write the same slot and no slot is read that was not written, so nothing is zeroed, no
// atomics are needed, and the sum has one order.
#pragma once

#include "tile.cuh"

constexpr int TOPK = 16;
constexpr int THREADS = 128;  // one warpgroup; three such blocks share an SM
constexpr int STAGES = 2;
constexpr int STAGE_BYTES = 2 * KEYS_BYTES + ONES_BYTES;
constexpr int BARRIER_OFFSET = STAGES * STAGE_BYTES;
constexpr int SHARED_BYTES = BARRIER_OFFSET + STAGES * 8;
constexpr int FRAGMENT_BYTES = GROUP_HEADS * HEAD_DIM;       // 16 head rows of a query in e4m3
constexpr int OUTPUT_BYTES = GROUP_HEADS * HEAD_DIM * 2;     // the same in bf16
constexpr uint32_t NO_ENTRY = 0xffffffffu;
constexpr uint32_t ONES = 0x38383838u;                       // four e4m3 ones
static_assert(STAGE_BYTES % 1024 == 0, "stages keep the swizzle's alignment");
static_assert(3 * (SHARED_BYTES + 1024 + 1024) <= 233472, "three blocks fit an SM");

/// A warp's query of one tile, in registers.
struct Query {
    uint32_t a[16];     // e4m3 A fragment: register 4k + i + 2h
    float factor[2];    // of head rows r and r + 8
    int visible;
    uint32_t entry;

    template <typename Params>
    __device__ __forceinline__ void load(const Params& params, uint32_t which, int head) {
        entry = which;
        if (which == NO_ENTRY) {
#pragma unroll
            for (int i = 0; i < 16; ++i) a[i] = 0;
            factor[0] = factor[1] = 0.0f;
            visible = 0;
            return;
        }
        const int lane = threadIdx.x & 31;
        const int row = static_cast<int>(which >> 4);
        const int64_t place = static_cast<int64_t>(head) * params.total_q + row;
        const uint4* fragment = reinterpret_cast<const uint4*>(params.queries + place * FRAGMENT_BYTES);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint4 four = __ldg(fragment + 32 * k + lane);
            a[4 * k] = four.x;
            a[4 * k + 1] = four.y;
            a[4 * k + 2] = four.z;
            a[4 * k + 3] = four.w;
        }
        factor[0] = __ldg(params.row_factor + place * GROUP_HEADS + (lane >> 2));
        factor[1] = __ldg(params.row_factor + place * GROUP_HEADS + (lane >> 2) + 8);
        visible = __ldg(params.visible + row);
    }
};

/// One page load as a block sees it: lane i of warp w holds the entry that warp w takes of tile i.
struct Load {
    int4 record;
    uint32_t entries;

    template <typename Params>
    __device__ __forceinline__ void fetch_record(const Params& params, int index) {
        record = index >= 0 ? __ldg(params.loads + index) : make_int4(0, 0, 0, 0);
    }
    template <typename Params>
    __device__ __forceinline__ void fetch_entries(const Params& params) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        entries = lane < tiles()
                      ? __ldg(params.entries + (static_cast<int64_t>(record.w) + lane) * TILE_QUERIES + warp)
                      : NO_ENTRY;
    }
    __device__ __forceinline__ int physical() const { return record.x; }
    __device__ __forceinline__ int head() const { return record.y >> 8; }
    __device__ __forceinline__ int tiles() const { return record.y & 0xff; }
    __device__ __forceinline__ int first_token() const { return record.z * PAGE; }
};

template <typename Params>
__device__ __forceinline__ void copy_page(const TensorMap& keys, const Params& params, const Load& load,
                                          uint32_t stage, uint32_t full) {
    mbarrier_arrive_expect_tx(full, 2 * KEYS_BYTES);
    cp_async_bulk_tensor_4d(stage, &keys, 0, 0, load.head(), load.physical(), full);
    const int64_t image = (static_cast<int64_t>(load.physical()) * params.kv_heads + load.head()) * KEYS_BYTES;
    cp_async_bulk(stage + KEYS_BYTES, params.values + image, KEYS_BYTES, full);
}

/// Scores -> probabilities times 2^8, packed; returns the two rows' reference maxima (base-2 logits).
__device__ __forceinline__ void softmax(float (&scores)[SCORES], const float (&factor)[2], uint32_t (&p)[16],
                                        float (&reference)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        reference[i] = row_maximum(lane_maximum(scores, i)) * factor[i];
        const float offset = 8.0f - reference[i];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            scores[4 * j + 2 * i] = ex2_approx(fmaf(scores[4 * j + 2 * i], factor[i], offset));
            scores[4 * j + 2 * i + 1] = ex2_approx(fmaf(scores[4 * j + 2 * i + 1], factor[i], offset));
        }
    }
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < 2; ++i) p[4 * s + i + 2 * h] = pack_probabilities(scores, s, i, h);
        }
    }
}

/// Stores one entry's partial output and statistics at `place`, a slot of the workspace.
__device__ __forceinline__ void store_partial(uint8_t* partial, float2* statistics, int64_t place,
                                              const float (&out)[CHAINED], const float (&reference)[2]) {
    const int lane = threadIdx.x & 31, r = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float sum = out[SCORES + 2 * i];  // every column of ones holds it
        store_row(partial + place * OUTPUT_BYTES + (r + 8 * i) * (HEAD_DIM * 2), out, i, __fdividef(1.0f, sum));
        if (t == 0) statistics[place * GROUP_HEADS + r + 8 * i] = make_float2(reference[i], sum);
    }
}

/// Settles A fragments in their registers, so that no instruction defines them inside a wgmma group.
__device__ __forceinline__ void settle(uint32_t (&a)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

/// One tile: the warp's query against the page at the two descriptors. `reload` puts the next tile's
/// query in place as soon as the fragment has been read, so its loads run under this tile's softmax and
/// output; `place_of(entry)` says where the partial output goes.
template <typename Reload, typename PlaceOf>
__device__ __forceinline__ void attend_tile(Query& query, uint64_t key_tile, uint64_t value_tile, int first_token,
                                            Reload reload, PlaceOf place_of, uint8_t* partial, float2* statistics) {
    float scores[SCORES];
    settle(query.a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_m64n128k32_rs(scores, query.a + 4 * k, key_tile + 2 * k, k != 0);
    wgmma_commit_group();
    const uint32_t entry = query.entry;
    const int seen = query.visible - first_token;
    const float factor[2] = {query.factor[0], query.factor[1]};
    const bool live = entry != NO_ENTRY;
    wgmma_wait_group<0>();
    pin(scores);
    reload();

    uint32_t p[16];
    float reference[2] = {0.0f, 0.0f};
    if (live) {
        if (seen < PAGE) mask_scores(scores, seen);
        softmax(scores, factor, p, reference);
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) p[i] = 0;
    }

    float out[CHAINED];
    settle(p);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma_m64n136k32_rs(out, p + 4 * s, value_tile + 2 * s, s != 0);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(out);
    if (live) store_partial(partial, statistics, place_of(entry), out, reference);
}

extern __shared__ uint4 dynamic[];

/// Once a block: barriers, and the rows of ones below each stage's V^T. Returns the 1024-byte aligned
/// address of stage 0; ends with a barrier of the block.
__device__ __forceinline__ uint32_t prepare_stages(const TensorMap* keys) {
    const uint32_t base = (smem_address(dynamic) + 1023) & ~1023u;
    uint8_t* shared = reinterpret_cast<uint8_t*>(dynamic) + (base - smem_address(dynamic));
    if (threadIdx.x == 0) {
        prefetch_tensormap(keys);
        for (int stage = 0; stage < STAGES; ++stage) mbarrier_init(base + BARRIER_OFFSET + 8 * stage, 1);
        fence_mbarrier_init();
    }
    for (int i = threadIdx.x; i < STAGES * ONES_BYTES / 4; i += THREADS) {
        const int stage = i / (ONES_BYTES / 4), word = i % (ONES_BYTES / 4);
        reinterpret_cast<uint32_t*>(shared + stage * STAGE_BYTES + 2 * KEYS_BYTES)[word] = ONES;
    }
    fence_proxy_async_shared();
    __syncthreads();
    return base;
}

/// All tiles of one load. The last one fetches the first query of `next`, whose entries are already here.
template <typename PlaceOf, typename Params>
__device__ __forceinline__ void attend_load(Query& query, const Load& load, const Load& next, uint64_t key_tile,
                                            uint64_t value_tile, PlaceOf place_of, const Params& params) {
    const int tiles = load.tiles();
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        const bool last = tile + 1 == tiles;
        const uint32_t following = __shfl_sync(0xffffffff, last ? next.entries : load.entries, last ? 0 : tile + 1);
        const auto reload = [&] { query.load(params, following, last ? next.head() : load.head()); };
        attend_tile(query, key_tile, value_tile, load.first_token(), reload, place_of, params.partial,
                    params.statistics);
    }
}
