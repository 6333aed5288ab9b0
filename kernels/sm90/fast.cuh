// Consumers at precision `fast`: Q and P in one e4m3 number each.
//
// The next page's Q K^T and this page's P V are issued together; the softmax of the next page runs
// while P V finishes. P V accumulates across pages in the tensor core; columns of ones in V^T sum the
// probabilities there too, so that the accumulator's truncation cancels in the quotient. A row's
// reference maximum moves only when P would saturate, so most pages neither exchange maxima between
// lanes nor touch the output registers.
//
// NOTE: every product begins and ends within one turn of the loop, and none stands in a branch: ptxas
// serialises all of them otherwise (C7514, C7520).
#pragma once

/// A warp's 16 rows so far. Base-2 logit plus headroom = score * factor + offset, in f16 pairs.
struct Rows {
    float o[CHAINED];  // the last four registers are the denominators
    uint32_t factor[2], offset[2];
};

__device__ __forceinline__ void reset(Rows& rows, const uint32_t* row_factor) {
    const int row = (threadIdx.x & 127) / 32 * GROUP_HEADS + (threadIdx.x & 31) / 4;
#pragma unroll
    for (float& o : rows.o) o = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        rows.factor[i] = row_factor[row + 8 * i];
        rows.offset[i] = cvt_f16_twice(UNSEEN_OFFSET);
    }
}

__device__ __forceinline__ float low_half(uint32_t pair) { return cvt_f32_f16(static_cast<uint16_t>(pair)); }

/// Scores to probabilities, in place. Returns whether a reference moved; then `correction` is what the
/// sums of rows r and r + 8 must be scaled by before this page is added.
__device__ __forceinline__ bool exponentiate(Rows& rows, uint32_t (&scores)[HALF_SCORES], int visible,
                                             float (&correction)[2]) {
    if (visible < PAGE) mask_scores(scores, visible);
    float maximum[2];
    bool overflow = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        maximum[i] = lane_maximum(scores, i) * low_half(rows.factor[i]);
        overflow |= maximum[i] + low_half(rows.offset[i]) > OVERFLOW_BITS;
    }
    const bool moved = __any_sync(0xffffffff, overflow);
    if (moved) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float offset = low_half(rows.offset[i]);
            rows.offset[i] = cvt_f16_twice(fminf(offset, PROBABILITY_BITS - row_maximum(maximum[i])));
            correction[i] = ex2_approx(low_half(rows.offset[i]) - offset);
        }
    }
#pragma unroll
    for (int at = 0; at < HALF_SCORES; ++at)
        scores[at] = ex2_approx_f16x2(fma_f16x2(scores[at], rows.factor[at % 2], rows.offset[at % 2]));
    return moved;
}

__device__ __forceinline__ void rescale(Rows& rows, const float (&correction)[2]) {
#pragma unroll
    for (int at = 0; at < CHAINED; ++at) rows.o[at] *= correction[at / 2 % 2];
}

/// The A fragments of P V; zeros for a warp whose query did not select the page.
/// NOTE: by mask rather than by a second branch: ptxas would keep sixteen zeros in registers.
__device__ __forceinline__ void pack_page(uint32_t (&packed)[16], const uint32_t (&p)[HALF_SCORES], bool live) {
    const uint32_t keep = live ? 0xffffffffu : 0u;
#pragma unroll
    for (int at = 0; at < 16; ++at) packed[at] = pack_probabilities(p, at / 4, at % 2, at / 2 % 2) & keep;
}

__device__ __forceinline__ void multiply_values(Rows& rows, const uint32_t (&packed)[16], uint64_t values) {
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma_m64n136k32_rs(rows.o, packed + 4 * s, values + 2 * s, 1);
}

__device__ __forceinline__ uint64_t keys_of(const Shared& shared, const Page& page) {
    return swizzle128_descriptor(smem_address(shared.stage(page.stage())));
}

/// Pages of one task for one tile, from `page` to the first one that lies too far ahead to hold
/// `page` meanwhile, which is left in `page`.
__device__ __forceinline__ void attend_run(const Shared& shared, Rows& rows, Walk& walk, Page& page, uint64_t tile,
                                           int seen) {
    const int warp = (threadIdx.x & 127) / 32;
    uint32_t scores[HALF_SCORES], packed[16];
    float correction[2];

    wait_page(shared, page);
    wgmma_fence();
    multiply_keys(scores, tile, keys_of(shared, page));
    wgmma_commit_group();
    Page after = walk.next();
    wgmma_wait_group<0>();
    pin(scores);
    bool live = (page.members >> warp) & 1, moved = false;
    if (live) moved = exponentiate(rows, scores, seen - page.logical * PAGE, correction);
    if (moved) rescale(rows, correction);
    pack_page(packed, scores, live);

    while (may_hold(page, after)) {
        const uint64_t values = keys_of(shared, page) + KEYS_BYTES / 16;
        wait_page(shared, after);
        wgmma_fence();
        multiply_keys(scores, tile, keys_of(shared, after));
        wgmma_commit_group();
        multiply_values(rows, packed, values);
        wgmma_commit_group();
        const Page later = walk.next();
        wgmma_wait_group<1>();
        pin(scores);

        live = (after.members >> warp) & 1;
        moved = false;
        if (live) moved = exponentiate(rows, scores, seen - after.logical * PAGE, correction);

        wgmma_wait_group<0>();
        pin(rows.o);
        release_page(shared, page);
        if (moved) rescale(rows, correction);
        pack_page(packed, scores, live);
        page = after;
        after = later;
    }
    wgmma_fence();
    multiply_values(rows, packed, keys_of(shared, page) + KEYS_BYTES / 16);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(rows.o);
    release_page(shared, page);
    page = after;
}

/// One consumer warpgroup: its tile of every task.
__device__ __forceinline__ void consume(const Shared& shared, const AttentionParams& params, int group) {
    const int warp = (threadIdx.x & 127) / 32;
    uint32_t fill = 0;
    for (int n = 0;; ++n) {
        const TaskRecord* task = wait_task(shared, n);
        if (task->queries < 0) return;
        const int pages = task->pages, head = task->kv_head;
        const SlotRecord slot = task->slots[group * TILE_QUERIES + warp];
        Walk walk = begin_walk(shared, n, pages, group, fill);
        fill += pages;
        wait_queries(shared, params, task, n, group);
        Rows rows;
        reset(rows, shared.row_factor(n % Q_BUFFERS, group));
        const uint64_t tile = swizzle128_descriptor(smem_address(shared.q_tile(n % Q_BUFFERS, group)));
        for (Page page = walk.next(); page.members != 0;) attend_run(shared, rows, walk, page, tile, slot.visible);
        release_task(shared, n);
        if (slot.query >= 0)
            store_query(params, rows.o, {rows.o[SCORES], rows.o[SCORES + 2]}, slot.query, head);
    }
}
