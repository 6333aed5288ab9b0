// A warp's 16 rows of a tile at precision `accurate`: Q as hi + lo e4m3, which is exact, scores in f32,
// probabilities and V^T in f16, P V summed across pages in f32.
//
// An f16 product of 16 keys takes the time of an e4m3 one of 32, so that f16 costs what P as hi + lo e4m3
// would; but it keeps eleven bits of P instead of eight, and its sums need no promotion.
//
// A row's probabilities are shifted only when one would exceed 2^15, where its first page's largest is 1: f16 holds
// them down to 2^-24, so most pages neither exchange maxima between lanes nor touch the output registers.
#pragma once

#include "tile.cuh"

constexpr int Q_PARTS = 2;                    // tiles that Q takes: hi, and lo behind it
constexpr int VALUES_BYTES = 2 * KEYS_BYTES;  // of a V^T image
constexpr int SCORE_REGISTERS = SCORES;
constexpr int FRAGMENT_REGISTERS = 32;  // A fragments of P V
using Score = float;
constexpr uint32_t LARGEST_PROBABILITY = 0x7800;  // 2^15 in f16
constexpr uint32_t F32_NAN = 0x7fffffff;

struct Rows {
    float o[SCORES];
    float denominator[2];        // this lane's share of rows r and r + 8
    float factor[2], offset[2];  // p = 2^(factor * score + offset)
};

__device__ __forceinline__ void clear(Rows& rows) {
#pragma unroll
    for (float& o : rows.o) o = 0;
    rows.denominator[0] = rows.denominator[1] = 0;
}

__device__ __forceinline__ void begin_rows(Rows& rows, const uint32_t* row_factor) {
    const int row = first_row();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        rows.factor[i] = __uint_as_float(row_factor[row + 8 * i]);
        rows.offset[i] = __uint_as_float(F32_NAN);  // the first page always sets it
    }
}

/// S = Q K^T: the residual's four products of 32 channels, then four more.
/// NOTE: the tensor core's accumulator truncates at every step, relative to its size: the small residual
/// products go first, while the sum is small.
__device__ __forceinline__ void multiply_keys(float (&scores)[SCORES], uint64_t tile, uint64_t keys) {
    const uint64_t residual = tile + TILE_BYTES / 16;
    wgmma_m64n128k32_ss_first(scores, residual, keys);
#pragma unroll
    for (int k = 1; k < 4; ++k) wgmma_m64n128k32_ss(scores, residual + 2 * k, keys + 2 * k, 1);
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_m64n128k32_ss(scores, tile + 2 * k, keys + 2 * k, 1);
}

/// Probabilities in f16 pairs and what they add up to in this lane. Register 2j + i of lane 4r + t holds
/// row r + 8i, columns 8j + 2t (low half) and 8j + 2t + 1: four of them are an A fragment of 16 keys.
__device__ __forceinline__ void make_probabilities(const Rows& rows, const float (&scores)[SCORES],
                                                   uint32_t (&pairs)[32], float (&sum)[2]) {
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int at = 0; at < 32; ++at) {
        const int i = at % 2;
        const float p = ex2_approx(fmaf(scores[2 * at], rows.factor[i], rows.offset[i]));
        const float q = ex2_approx(fmaf(scores[2 * at + 1], rows.factor[i], rows.offset[i]));
        sum[i] += p;
        sum[i] += q;
        pairs[at] = cvt_f16x2(p, q);
    }
}

/// Whether both probabilities of a pair are small enough; NaN is not.
__device__ __forceinline__ bool fit(uint32_t pair) { return both_at_most(pair, LARGEST_PROBABILITY); }

/// Scores to probabilities, whose sums are taken over too. Returns whether a row's offset moved; then
/// `correction` is what the products of rows r and r + 8 must be scaled by before this page is added.
/// The probabilities are made before it is known whether they fit, so that the two chains overlap; a moved
/// offset makes them again. Not so where the caller knows that the page is the rows' first, which always sets it.
__device__ __forceinline__ bool exponentiate(Rows& rows, float (&scores)[SCORES], uint32_t (&pairs)[32], int visible,
                                             float (&correction)[2], bool first = false) {
    if (visible < PAGE) mask_scores(scores, visible);
    float sum[2];
    uint32_t largest[2] = {NAN_PAIR, NAN_PAIR};
    if (!first) {
        make_probabilities(rows, scores, pairs, sum);
#pragma unroll
        for (int i = 0; i < 2; ++i) largest[i] = pairs[i];
#pragma unroll
        for (int at = 2; at < 32; ++at) largest[at % 2] = max_s16x2(largest[at % 2], pairs[at]);
    }
    const bool moved = first || !__all_sync(0xffffffff, fit(max_s16x2(largest[0], largest[1])));
    if (moved) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // Only a row that would exceed the limit moves: what a head computes does not depend on its neighbours.
            largest[i] = max_s16x2(largest[i], __shfl_xor_sync(0xffffffff, largest[i], 1));
            largest[i] = max_s16x2(largest[i], __shfl_xor_sync(0xffffffff, largest[i], 2));
            const float before = rows.offset[i], top = row_maximum(lane_maximum(scores, i));
            rows.offset[i] = fit(largest[i]) ? before : -top * rows.factor[i];
            correction[i] = before == before ? ex2_approx(rows.offset[i] - before) : 0.f;
            rows.denominator[i] *= correction[i];
        }
        make_probabilities(rows, scores, pairs, sum);
    }
    rows.denominator[0] += sum[0];
    rows.denominator[1] += sum[1];
    return moved;
}

__device__ __forceinline__ void pack_page(uint32_t (&packed)[FRAGMENT_REGISTERS], const uint32_t (&pairs)[32], bool live) {
    const uint32_t keep = live ? 0xffffffffu : 0u;
#pragma unroll
    for (int at = 0; at < FRAGMENT_REGISTERS; ++at) packed[at] = pairs[at] & keep;
}

/// P V: eight products of 16 keys. The image's halves of 64 keys lie 16 KiB apart.
__device__ __forceinline__ void multiply_values(Rows& rows, const uint32_t (&packed)[FRAGMENT_REGISTERS], uint64_t values) {
#pragma unroll
    for (int step = 0; step < 8; ++step)
        wgmma_m64n128k16_f16_rs(rows.o, packed + 4 * step, values + 2 * (step % 4) + step / 4 * (KEYS_BYTES / 16), 1);
}

__device__ __forceinline__ float denominator(const Rows& rows, int i) { return row_sum(rows.denominator[i]); }
