// Consumers at precision `accurate`: Q and P as hi + lo pairs of e4m3, scores in f32, an exact running
// maximum, and each page's P V promoted to f32 before it is added.
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
        split_probabilities(scores, at / 4, at % 2, at / 2 % 2, high[at], low[at]);
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

/// One page for one tile.
__device__ __forceinline__ void attend_page(const Shared& shared, Rows& rows, const Page& page, uint32_t& issued,
                                            uint64_t tile, int warp, int seen) {
    const uint64_t keys = swizzle128_descriptor(smem_address(shared.stage(page.stage)));
    float scores[SCORES], product[SCORES], correction[2];
    uint32_t high[16], low[16];
    wait_page(shared, issued, page);
    wgmma_fence();
    multiply_keys<true>(scores, tile, tile + TILE_BYTES / 16, keys);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(scores);
    const bool live = (page.members >> warp) & 1;
    if (live) {
        exponentiate(rows, scores, seen - page.logical * PAGE, correction, high, low);
    } else {
#pragma unroll
        for (int at = 0; at < 16; ++at) high[at] = low[at] = 0;
    }
    wgmma_fence();
    multiply_values(product, high, low, keys + KEYS_BYTES / 16);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(product);
    release_page(shared, page);
    if (live) {
#pragma unroll
        for (int at = 0; at < SCORES; ++at) rows.o[at] = fmaf(rows.o[at], correction[at / 2 % 2], product[at]);
    }
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
        reset(rows, shared.row_factor(buffer, group));
        for (; page.task == n; page = walk.next()) attend_page(shared, rows, page, issued, tile, warp, owner.seen);
        release_task(shared, n);
        store_query(params, rows.o, {row_sum(rows.denominator[0]), row_sum(rows.denominator[1])}, owner);
    }
}
