// Q tiles of pageweaver: bf16 rows from global memory, quantised into shared memory.
#pragma once

#include "half_scores.cuh"

/// Quantises rows [begin, end) of a warpgroup's Q tile of a task with one warp, and makes them visible
/// to wgmma. Fast: one e4m3 tile for f16 scores. Accurate: hi and lo tiles, which together are exact.
template <int IN_FLIGHT>
__device__ __forceinline__ void load_queries(const Shared& shared, const AttentionParams& params, const TaskRecord* task,
                                             int group, int buffer, int begin, int end) {
    uint8_t* tile = shared.q_tile(buffer, group);
    uint32_t* row_factor = shared.row_factor(buffer, group);
    load_tile_rows<IN_FLIGHT>(
        params.q, [&](int slot) { return task->slots[group * TILE_QUERIES + slot].query; }, params.query_bytes,
        task->kv_head * GROUP_HEADS * HEAD_DIM * 2, begin, end,
        [&](int row, int chunk, const uint32_t(&words)[4], uint32_t amax) {
            float scale, x[8];
            uint32_t factor;
#if ACCURATE
            float inverse;
            power_of_two_scale(amax, scale, inverse);
            factor = __float_as_uint(params.scale_log2 * inverse);
#else
            half_score_scale(amax, params.scale_log2, scale, factor);
#endif
            scale_channels(x, words, scale);
            const uint2 packed = pack_channels(x);
            const uint32_t at = swizzled(row, chunk * 8);
            *reinterpret_cast<uint2*>(tile + at) = packed;
#if ACCURATE
            subtract_channels(x, packed);
            *reinterpret_cast<uint2*>(tile + TILE_BYTES + at) = pack_channels(x);
#endif
            if (chunk == 0) row_factor[row] = factor;
        });
    fence_proxy_async_shared();
    __syncwarp();
}
