// Consumers at precision `fast`: Q and P in one e4m3 number each (see half_scores.cuh).
//
// The next page's Q K^T and this page's P V are issued together; the next page's probabilities are made
// while P V finishes. P V accumulates across pages in the tensor core; columns of ones in V^T sum the
// probabilities there too, so that the accumulator's truncation cancels in the quotient. A row's
// reference score moves only when P would saturate, so most pages neither exchange maxima between lanes
// nor touch the output registers.
//
// NOTE: every product begins and ends within one turn of the loop, and none stands in a branch: ptxas
// serialises all of them otherwise (C7514, C7520).
#pragma once

/// A warp's 16 rows so far.
struct Rows {
    float o[CHAINED];  // the last four registers are the denominators
    uint32_t factor[2], negative_reference[2];
};

__device__ __forceinline__ void clear(Rows& rows) {
#pragma unroll
    for (float& o : rows.o) o = 0;
}

/// Takes up a task's rows.
__device__ __forceinline__ void begin_rows(Rows& rows, const uint32_t* row_factor) {
    const int row = (threadIdx.x & 127) / 32 * GROUP_HEADS + (threadIdx.x & 31) / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        rows.factor[i] = row_factor[row + 8 * i];
        rows.negative_reference[i] = 0x7fff7fff;  // NaN: the first page always sets it
    }
}

__device__ __forceinline__ void make_codes(const Rows& rows, const uint32_t (&scores)[HALF_SCORES],
                                           uint32_t (&codes)[HALF_SCORES]) {
#pragma unroll
    for (int at = 0; at < HALF_SCORES; ++at)
        codes[at] = probability_codes(scores[at], rows.negative_reference[at % 2], rows.factor[at % 2]);
}

/// Scores to probability codes. Returns whether a reference moved; then `correction` is what the sums of
/// rows r and r + 8 must be scaled by before this page is added.
/// The codes are made before it is known whether they fit, so that the two chains overlap; a moved
/// reference makes them again.
__device__ __forceinline__ bool exponentiate(Rows& rows, uint32_t (&scores)[HALF_SCORES],
                                             uint32_t (&codes)[HALF_SCORES], int visible, float (&correction)[2]) {
    if (visible < PAGE) mask_scores(scores, visible);
    make_codes(rows, scores, codes);
    float maximum[2];
    bool within = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        maximum[i] = lane_maximum(scores, i);
        within &= (maximum[i] + low_half(rows.negative_reference[i])) * low_half(rows.factor[i]) <= HEADROOM;
    }
    const bool moved = !__all_sync(0xffffffff, within);
    if (moved) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float before = -low_half(rows.negative_reference[i]);
            const float reference = fmaxf(before, row_maximum(maximum[i]));  // a number wins over NaN
            rows.negative_reference[i] = cvt_f16x2(-reference, -reference);
            correction[i] =
                before == before ? ex2_approx((before - reference) * low_half(rows.factor[i]) * (1.f / CODES)) : 0.f;
        }
        make_codes(rows, scores, codes);
    }
    return moved;
}

__device__ __forceinline__ void rescale(Rows& rows, const float (&correction)[2]) {
#pragma unroll
    for (int at = 0; at < CHAINED; ++at) rows.o[at] *= correction[at / 2 % 2];
}

/// The A fragments of P V; zeros for a warp whose query did not select the page.
/// NOTE: by mask rather than by a second branch: ptxas would keep sixteen zeros in registers.
__device__ __forceinline__ void pack_page(uint32_t (&packed)[16], const uint32_t (&codes)[HALF_SCORES], bool live) {
    const uint32_t keep = live ? 0xffffffffu : 0u;
#pragma unroll
    for (int at = 0; at < 16; ++at) packed[at] = pack_codes(codes, at / 4, at % 2, at / 2 % 2) & keep;
}

__device__ __forceinline__ void multiply_values(Rows& rows, const uint32_t (&packed)[16], uint64_t values) {
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma_m64n136k32_rs(rows.o, packed + 4 * s, values + 2 * s, 1);
}

__device__ __forceinline__ uint64_t keys_of(const Shared& shared, const Page& page) {
    return swizzle128_descriptor(smem_address(shared.stage(page.stage)));
}

/// Pages of one task for one tile, from `page` to the first one of another task, or too far ahead to
/// hold `page` meanwhile, which is left in `page`.
__device__ __forceinline__ void attend_run(const Shared& shared, Rows& rows, Walk& walk, Page& page, uint32_t& issued,
                                           uint64_t tile, int warp, int seen) {
    uint32_t scores[HALF_SCORES], codes[HALF_SCORES], packed[16];
    float correction[2];

    wait_page(shared, issued, page);
    wgmma_fence();
    multiply_keys(scores, tile, keys_of(shared, page));
    wgmma_commit_group();
    Page after = walk.next();
    wgmma_wait_group<0>();
    pin(scores);
    bool live = (page.members >> warp) & 1, moved = false;
    if (live) moved = exponentiate(rows, scores, codes, seen - page.logical * PAGE, correction);
    if (moved) rescale(rows, correction);
    pack_page(packed, codes, live);

    while (may_hold(page, after)) {
        const uint64_t values = keys_of(shared, page) + KEYS_BYTES / 16;
        wait_page(shared, issued, after);
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
        if (live) moved = exponentiate(rows, scores, codes, seen - after.logical * PAGE, correction);

        wgmma_wait_group<0>();
        pin(rows.o);
        release_page(shared, page);
        if (moved) rescale(rows, correction);
        pack_page(packed, codes, live);
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
    const int warp = uniform((threadIdx.x & 127) / 32);
    uint32_t issued = 0;
    Walk walk{shared, params, group};
    Page page = walk.next();
    while (page.members != 0) {
        const int n = page.task, buffer = n % Q_BUFFERS;
        wait_queries(shared, params, n, group);
        const Owner owner = owner_of(shared, n, group);
        const uint64_t tile = swizzle128_descriptor(smem_address(shared.q_tile(buffer, group)));
        Rows rows;
        begin_rows(rows, shared.row_factor(buffer, group));
        clear(rows);
        while (page.task == n) attend_run(shared, rows, walk, page, issued, tile, warp, owner.seen);
        release_task(shared, n);
        store_query(params, rows.o, {rows.o[SCORES], rows.o[SCORES + 2]}, owner);
    }
}
