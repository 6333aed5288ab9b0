// Consumers at precision `accurate`: Q and P as hi + lo pairs of e4m3, scores in f32, an exact running
// maximum, and each page's P V promoted to f32 before it is added.
//
// This page's P V and the next page's Q K^T are issued together: the sum is promoted while the scores
// are computed.
#pragma once

/// A warp's 16 rows so far.
struct Rows {
    float o[SCORES];
    float denominator[2];  // this lane's share of rows r and r + 8
    float reference[2];    // maximum base-2 logit
    float factor[2];       // score -> base-2 logit
};

__device__ __forceinline__ void reset(Rows& rows, const uint32_t* row_factor) {
    const int row = (threadIdx.x & 127) / 32 * GROUP_HEADS + (threadIdx.x & 31) / 4;
#pragma unroll
    for (float& o : rows.o) o = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        rows.factor[i] = __uint_as_float(row_factor[row + 8 * i]);
        rows.reference[i] = MASKED;
        rows.denominator[i] = 0;
    }
}

/// Scores to P as hi and lo fragments, p = 2^8 at the row's maximum; sums and maxima move along.
__device__ __forceinline__ void exponentiate(Rows& rows, float (&scores)[SCORES], int visible, float (&correction)[2],
                                             uint32_t (&high)[16], uint32_t (&low)[16]) {
    constexpr float BITS = 8;  // below e4m3's 448
    if (visible < PAGE) mask_scores(scores, visible);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float maximum = fmaxf(rows.reference[i], row_maximum(lane_maximum(scores, i)) * rows.factor[i]);
        correction[i] = ex2_approx(rows.reference[i] - maximum);
        rows.reference[i] = maximum;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                float& s = scores[4 * j + 2 * i + q];
                s = ex2_approx(fmaf(s, rows.factor[i], BITS - maximum));
                sum += s;
            }
        }
        rows.denominator[i] = fmaf(rows.denominator[i], correction[i], sum);
    }
#pragma unroll
    for (int at = 0; at < 16; ++at) {
        high[at] = pack_probabilities(scores, at / 4, at % 2, at / 2 % 2);
        subtract_packed(scores, high[at], at / 4, at % 2, at / 2 % 2);
        low[at] = pack_probabilities(scores, at / 4, at % 2, at / 2 % 2);
    }
}

/// P V of one page. The residual goes first: see multiply_keys.
__device__ __forceinline__ void multiply_values(float (&product)[SCORES], const uint32_t (&high)[16],
                                                const uint32_t (&low)[16], uint64_t values) {
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma_m64n128k32_rs(product, low + 4 * s, values + 2 * s, s != 0);
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma_m64n128k32_rs(product, high + 4 * s, values + 2 * s, 1);
}

__device__ __forceinline__ uint64_t keys_of(const Shared& shared, const Page& page) {
    return swizzle128_descriptor(smem_address(shared.stage(page.stage())));
}

/// Pages of one task for one tile, from `page` to the first one that lies too far ahead to hold
/// `page` meanwhile, which is left in `page`.
__device__ __forceinline__ void attend_run(const Shared& shared, Rows& rows, Walk& walk, Page& page, uint64_t tile,
                                           int seen) {
    const int warp = (threadIdx.x & 127) / 32;
    float scores[SCORES], product[SCORES], correction[2];
    uint32_t high[16], low[16];

    wait_page(shared, page);
    wgmma_fence();
    multiply_keys<true>(scores, tile, tile + TILE_BYTES / 16, keys_of(shared, page));
    wgmma_commit_group();
    Page after = walk.next();
    wgmma_wait_group<0>();
    pin(scores);
    bool more = true;
    while (more) {
        const bool live = (page.members >> warp) & 1;
        if (live) {
            exponentiate(rows, scores, seen - page.logical * PAGE, correction, high, low);
        } else {
#pragma unroll
            for (int at = 0; at < 16; ++at) high[at] = low[at] = 0;
        }
        // NOTE: no branch around a product: at the end of the run this multiplies the page's keys again.
        more = may_hold(page, after);
        if (more) wait_page(shared, after);
        const uint64_t ahead = keys_of(shared, more ? after : page);
        wgmma_fence();
        multiply_values(product, high, low, keys_of(shared, page) + KEYS_BYTES / 16);
        wgmma_commit_group();
        multiply_keys<true>(scores, tile, tile + TILE_BYTES / 16, ahead);
        wgmma_commit_group();
        const Page later = more ? walk.next() : after;
        wgmma_wait_group<1>();
        pin(product);
        if (live) {
#pragma unroll
            for (int at = 0; at < SCORES; ++at) rows.o[at] = fmaf(rows.o[at], correction[at / 2 % 2], product[at]);
        }
        wgmma_wait_group<0>();
        pin(scores);
        release_page(shared, page);
        page = after;
        after = later;
    }
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
            store_query(params, rows.o, {row_sum(rows.denominator[0]), row_sum(rows.denominator[1])}, slot.query, head);
    }
}
