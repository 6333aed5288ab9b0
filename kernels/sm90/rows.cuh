// A warp's 16 rows of a tile, one query's heads, in either precision: Q in, softmax and sums along the
// pages, output out. Nothing here knows where tiles and pages lie or how they got there.
//
// Fast: Q and P in one e4m3 number each, scores in f16, P as codes (see half_scores.cuh). P V accumulates
// across pages in the tensor core; columns of ones in V^T sum the probabilities there too, so that the
// accumulator's truncation cancels in the quotient. A row's reference score moves only when P would
// saturate, so most pages neither exchange maxima between lanes nor touch the output registers.
//
// Accurate: Q and P as hi + lo pairs of e4m3, scores in f32, an exact running maximum, and each page's
// P V promoted to f32 before it is added.
#pragma once

#include "half_scores.cuh"

#ifndef ACCURATE
#define ACCURATE 0
#endif

constexpr int Q_PARTS = ACCURATE ? 2 : 1;  // tiles that Q takes: hi and, if accurate, lo behind it

/// Quantises eight channels of a tile row (see load_tile_rows) into `tile`. `row_factor[row]` is the factor
/// from score to base-2 logit in f32 (accurate), or to codes in f16 twice (fast).
__device__ __forceinline__ void quantise_channels(uint8_t* tile, uint32_t* row_factor, int row, int chunk,
                                                  const uint32_t (&words)[4], uint32_t amax, float scale_log2) {
    float scale, x[8];
    uint32_t factor;
#if ACCURATE
    float inverse;
    power_of_two_scale(amax, scale, inverse);
    factor = __float_as_uint(scale_log2 * inverse);
#else
    half_score_scale(amax, scale_log2, scale, factor);
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
}

/// Quantises the 16 rows of tile slot `slot` with one warp, all of them in flight together: zeros for
/// query -1. The caller makes the tile visible to wgmma.
__device__ __forceinline__ void load_query(uint8_t* tile, uint32_t* row_factor, const uint8_t* q, int64_t query_bytes,
                                           int query, int head, int slot, float scale_log2) {
    load_tile_rows<GROUP_HEADS / 2>(
        q, [&](int) { return query; }, query_bytes, head * GROUP_HEADS * HEAD_DIM * 2, slot * GROUP_HEADS,
        (slot + 1) * GROUP_HEADS, [&](int row, int chunk, const uint32_t(&words)[4], uint32_t amax) {
            quantise_channels(tile, row_factor, row, chunk, words, amax, scale_log2);
        });
}

#if ACCURATE

struct Rows {
    float o[SCORES];
    float denominator[2];  // this lane's share of rows r and r + 8
    float reference[2];    // maximum base-2 logit
    float factor[2];       // score -> base-2 logit
};

__device__ __forceinline__ void clear(Rows& rows) {
#pragma unroll
    for (float& o : rows.o) o = 0;
    rows.denominator[0] = rows.denominator[1] = 0;
}

__device__ __forceinline__ void begin_rows(Rows& rows, const uint32_t* row_factor) {
    const int row = (threadIdx.x & 127) / 32 * GROUP_HEADS + (threadIdx.x & 31) / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        rows.factor[i] = __uint_as_float(row_factor[row + 8 * i]);
        rows.reference[i] = MASKED;
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
    for (int at = 0; at < 16; ++at) split_probabilities(scores, at / 4, at % 2, at / 2 % 2, high[at], low[at]);
}

/// P V of one page. The residual goes first: see multiply_keys.
__device__ __forceinline__ void multiply_values(float (&product)[SCORES], const uint32_t (&high)[16],
                                                const uint32_t (&low)[16], uint64_t values) {
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma_m64n128k32_rs(product, low + 4 * s, values + 2 * s, s != 0);
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma_m64n128k32_rs(product, high + 4 * s, values + 2 * s, 1);
}

/// Adds a page's P V to what came before it, scaled by `correction`.
__device__ __forceinline__ void accumulate(Rows& rows, const float (&product)[SCORES], const float (&correction)[2]) {
#pragma unroll
    for (int at = 0; at < SCORES; ++at) rows.o[at] = fmaf(rows.o[at], correction[at / 2 % 2], product[at]);
}

__device__ __forceinline__ float denominator(const Rows& rows, int i) { return row_sum(rows.denominator[i]); }

#else

struct Rows {
    float o[CHAINED];  // the last four registers are the denominators
    uint32_t factor[2], negative_reference[2];
};

__device__ __forceinline__ void clear(Rows& rows) {
#pragma unroll
    for (float& o : rows.o) o = 0;
}

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
            // Only a row that would saturate moves: what a head computes does not depend on its neighbours.
            const float factor = low_half(rows.factor[i]), top = row_maximum(maximum[i]);
            const float before = -low_half(rows.negative_reference[i]);
            const bool stays = (top - before) * factor <= HEADROOM;
            const float reference = stays ? before : fmaxf(before, top);  // a number wins over NaN
            rows.negative_reference[i] = cvt_f16x2(-reference, -reference);
            correction[i] = before == before ? ex2_approx((before - reference) * factor * (1.f / CODES)) : 0.f;
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

__device__ __forceinline__ float denominator(const Rows& rows, int i) { return rows.o[SCORES + 2 * i]; }

#endif

/// Normalises and stores the 16 rows to `out`, which is the query's output at its first head of these.
/// An empty support gives exactly zero.
__device__ __forceinline__ void store_rows(const Rows& rows, uint8_t* out, float v_scale) {
    const int row = (threadIdx.x & 31) / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float total = denominator(rows, i);
        store_row(out + (row + 8 * i) * (HEAD_DIM * 2), rows.o, i, total == 0 ? 0 : v_scale / total);
    }
}
