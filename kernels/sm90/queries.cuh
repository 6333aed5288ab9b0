// Q tiles of pageweaver: bf16 rows from global memory, quantised into shared memory.
#pragma once

#include "rows.cuh"

/// Quantises rows [begin, end) of a warpgroup's Q tile of a task with one warp, and makes each lane's part visible
/// to wgmma of whoever waits for the lane.
template <int IN_FLIGHT>
__device__ __forceinline__ void load_queries(const Shared& shared, const AttentionParams& params, const TaskRecord* task,
                                             int group, int buffer, int begin, int end) {
    uint8_t* tile = shared.q_tile(buffer, group);
    uint32_t* row_factor = shared.row_factor(buffer, group);
    load_tile_rows<IN_FLIGHT>(
        params.q, [&](int slot) { return task->slots[group * TILE_QUERIES + slot].query; }, params.query_bytes,
        task->kv_head * GROUP_HEADS * HEAD_DIM * 2, begin, end,
        [&](int row, int chunk, const uint32_t(&words)[4], uint32_t amax) {
            quantise_channels(tile, row_factor, row, chunk, words, amax, params.scale_log2);
        });
    fence_proxy_async_shared();
}
