// A warp's 16 rows of a tile, one query's heads, in either precision: Q in, softmax and sums along the
// pages, output out. Nothing here knows where tiles and pages lie or how they got there. fast_rows.cuh and
// accurate_rows.cuh have the arithmetic, and alike names for it:
//
//   multiply_keys    Q K^T of a page to scores
//   exponentiate     scores to probabilities; whether what was summed before must be rescaled
//   pack_page        probabilities to the A fragments of P V, zeros for a query that did not select the page
//   multiply_values  adds P V to the rows
#pragma once

#ifndef ACCURATE
#define ACCURATE 0
#endif
#if ACCURATE
#include "accurate_rows.cuh"
#else
#include "fast_rows.cuh"
#endif

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

/// Stores 16 rows of zeros: the output of a query in a tile without a page.
__device__ __forceinline__ void store_zeros(uint8_t* out) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int at = 0; at < GROUP_HEADS / 2; ++at)
        reinterpret_cast<uint4*>(out)[32 * at + lane] = make_uint4(0, 0, 0, 0);
}
