// A warp's 16 rows of a tile at precision `fast`: Q and P in one e4m3 number each, scores in packed f16,
// probabilities as e4m3 codes.
//
// An f16 accumulator takes half the registers of an f32 one at the same rate. And an e4m3 number needs
// no exponential: its eight bits, exponent above mantissa, *are* 8 * (log2 p + 7), read as straight
// lines between powers of two. So one packed fma makes the codes of two probabilities, clamped at zero,
// and an addition rounds them into the low bytes of f16 numbers between 1024 and 2048, where one unit in
// the last place is one. The straight lines err by up to 6 % of p and 2 % rms once normalised, beside
// e4m3's own rounding of 2.6 %; the denominator sums the same codes.
//
// P V accumulates across pages in the tensor core; columns of ones in V^T sum the probabilities there
// too, so that the accumulator's truncation cancels in the quotient. A row's codes are shifted only when
// P would saturate, so most pages neither exchange maxima between lanes nor touch the output registers.
//
// Fragment: register 2j + i of lane 4r + t holds row r + 8i, columns 8j + 2t (low half) and 8j + 2t + 1.
#pragma once

#include "tile.cuh"

constexpr int Q_PARTS = 1;           // tiles that Q takes
constexpr int VALUES_BYTES = KEYS_BYTES;  // of a V^T image
constexpr int HALF_SCORES = 32;      // registers of a 64 x 128 f16 product
constexpr int SCORE_REGISTERS = HALF_SCORES;
constexpr int FRAGMENT_REGISTERS = 16;  // A fragments of P V
using Score = uint32_t;
constexpr int CODES = 8;             // e4m3 codes to a factor of two
// A row's reference is its first page's largest score, at p = 2^4. Lower loses small probabilities (they vanish
// 2^-11 below the reference), higher moves it more often: any of a warp's 16 rows that outgrows 448 costs all of
// them 130 instructions, which the other warps wait for.
constexpr float CODE_OF_REFERENCE = 56 + 4 * CODES;
constexpr uint32_t LARGEST_CODE = 0x57c8;            // 124.5 in f16: what rounds to less than 448 in e4m3
// In f16's range. Logits further than 7500 octaves above zero are equal to fast; a row of none but such below it comes
// out as if nothing were selected.
constexpr float LARGEST_OFFSET = 60000;
constexpr uint32_t PAIR_OF_1024 = 0x64006400;        // f16 counts in ones from here to 2048

/// Scale of a Q row for f16 scores, and codes per unit of score, twice.
/// The row, times the mantissa of `scale_log2`, is brought into [0.5, 1): |score| < 448 * 128, which
/// f16 holds whatever the keys are, and the factor that remains is an exact power of two.
/// A row with NaN or infinity gets a NaN scale, so that it, and no other row, comes out as NaN.
__device__ __forceinline__ void half_score_scale(uint32_t amax, float scale_log2, float& scale, uint32_t& factor) {
    const uint32_t bits = __float_as_uint(scale_log2);
    const float mantissa = __uint_as_float((bits & 0x007fffffu) | 0x3f800000u);
    const int scale_exponent = static_cast<int>(bits >> 23) - 127;
    const float largest = __uint_as_float(amax << 16) * mantissa;
    const int exponent = max(-100, static_cast<int>(__float_as_uint(largest) >> 23) - 126);  // in [2^(e-1), 2^e)
    scale = amax >= 0x7f80 ? __uint_as_float(0x7fffffffu) : mantissa * __uint_as_float((127 - exponent) << 23);
    const int power = min(15, exponent + scale_exponent + 3);
    // 2^power as f16: normal from 2^-14, subnormal to 2^-24. Below that the logits vanish; the factor must
    // not, or a masked score of -infinity would become NaN.
    const uint32_t half = power >= -14 ? (power + 15) << 10 : 1u << max(0, power + 24);
    factor = half | (half << 16);
}

__device__ __forceinline__ float low_half(uint32_t pair) { return cvt_f32_f16(static_cast<uint16_t>(pair)); }

/// S = Q K^T: four products of 32 channels.
__device__ __forceinline__ void multiply_keys(uint32_t (&scores)[HALF_SCORES], uint64_t tile, uint64_t keys) {
    wgmma_m64n128k32_f16_ss_first(scores, tile, keys);
#pragma unroll
    for (int k = 1; k < 4; ++k) wgmma_m64n128k32_f16_ss(scores, tile + 2 * k, keys + 2 * k, 1);
}

/// Replaces the scores of keys at or past `visible` with -infinity, by selection (they may be NaN).
__device__ __forceinline__ void mask_scores(uint32_t (&scores)[HALF_SCORES], int visible) {
    constexpr uint32_t HIDDEN = 0xfc00;
    const int limit = visible - 2 * static_cast<int>(threadIdx.x & 3);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t& s = scores[2 * j + i];
            if (8 * j >= limit)
                s = HIDDEN | (HIDDEN << 16);
            else if (8 * j + 1 >= limit)
                s = (s & 0xffff) | (HIDDEN << 16);
        }
    }
}

/// The largest pair of scores that this lane holds of row r + 8 * half; numbers win over NaN.
__device__ __forceinline__ uint32_t lane_top(const uint32_t (&scores)[HALF_SCORES], int half) {
    uint32_t chains[3];
#pragma unroll
    for (int c = 0; c < 3; ++c) chains[c] = scores[2 * c + half];
#pragma unroll
    for (int j = 3; j < 15; j += 6)
#pragma unroll
        for (int c = 0; c < 3; ++c)
            chains[c] = max_f16x2(max_f16x2(chains[c], scores[2 * (j + c) + half]), scores[2 * (j + 3 + c) + half]);
    return max_f16x2(max_f16x2(max_f16x2(chains[0], chains[1]), chains[2]), scores[30 + half]);
}

struct Rows {
    float o[CHAINED];  // the last four registers are the denominators
    uint32_t factor[2], offset[2];  // code = max(0, factor * score + offset), of rows r and r + 8, in f16 twice
};

__device__ __forceinline__ void clear(Rows& rows) {
#pragma unroll
    for (float& o : rows.o) o = 0;
}

__device__ __forceinline__ void begin_rows(Rows& rows, const uint32_t* row_factor) {
    const int row = first_row();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        rows.factor[i] = row_factor[row + 8 * i];
        rows.offset[i] = NAN_PAIR;  // the first page always sets it
    }
}

/// Codes of a pair of scores before they are rounded; NaN stays NaN.
__device__ __forceinline__ uint32_t codes_of(const Rows& rows, uint32_t scores, int i) {
    return fma_relu_f16x2(scores, rows.factor[i], rows.offset[i]);
}

/// Whether both codes of a pair stay below e4m3's largest number; NaN does not.
__device__ __forceinline__ bool fit(uint32_t codes) { return both_at_most(codes, LARGEST_CODE); }

/// Lowers scores that are too far above zero for an offset in f16 to bring them below 448; NaN stays.
__device__ __forceinline__ void bound_scores(const Rows& rows, uint32_t (&scores)[HALF_SCORES],
                                             const uint32_t (&largest)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (fit(codes_of(rows, largest[i], i))) continue;
        const float limit = (CODE_OF_REFERENCE - low_half(rows.offset[i])) / low_half(rows.factor[i]);
        const uint32_t limits = cvt_f16x2(limit, limit);
#pragma unroll
        for (int j = 0; j < 16; ++j) scores[2 * j + i] = min_nan_f16x2(scores[2 * j + i], limits);
    }
}

/// Scores to probability codes, f16 between 1024 and 2048. Returns whether a row's offset moved; then
/// `correction` is what the sums of rows r and r + 8 must be scaled by before this page is added.
/// NaN becomes a code whose low byte is NaN in e4m3 too. That a page is the rows' first need not be said: codes are made
/// once, after the check.
__device__ __forceinline__ bool exponentiate(Rows& rows, uint32_t (&scores)[HALF_SCORES], uint32_t (&codes)[32],
                                             int visible, float (&correction)[2], bool = false) {
    if (visible < PAGE) mask_scores(scores, visible);
    const uint32_t top[2] = {lane_top(scores, 0), lane_top(scores, 1)};
    const bool moved = !__all_sync(0xffffffff, fit(max_s16x2(codes_of(rows, top[0], 0), codes_of(rows, top[1], 1))));
    if (moved) {
        // Both rows' largest scores in one register, so that they are exchanged together.
        uint32_t both = __byte_perm(max_f16x2(top[0], top[0] >> 16), max_f16x2(top[1], top[1] >> 16), 0x5410);
        both = max_f16x2(both, __shfl_xor_sync(0xffffffff, both, 1));
        both = max_f16x2(both, __shfl_xor_sync(0xffffffff, both, 2));
        const uint32_t largest[2] = {__byte_perm(both, 0, 0x1010), __byte_perm(both, 0, 0x3232)};
        bool bounded = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float before = low_half(rows.offset[i]), factor = low_half(rows.factor[i]);
            float offset = CODE_OF_REFERENCE - low_half(largest[i]) * factor;
            offset = offset < -LARGEST_OFFSET ? -LARGEST_OFFSET : offset > LARGEST_OFFSET ? LARGEST_OFFSET : offset;
            // Only a row that would saturate moves: what a head computes does not depend on its neighbours.
            rows.offset[i] = fit(codes_of(rows, largest[i], i)) ? rows.offset[i] : cvt_f16x2(offset, offset);
            correction[i] = before == before ? ex2_approx((low_half(rows.offset[i]) - before) * (1.f / CODES)) : 0.f;
            bounded |= !fit(codes_of(rows, largest[i], i));
        }
        if (bounded) bound_scores(rows, scores, largest);
    }
#pragma unroll
    for (int at = 0; at < HALF_SCORES; ++at) codes[at] = add_f16x2(codes_of(rows, scores[at], at % 2), PAIR_OF_1024);
    return moved;
}

/// The A fragments of P V (see pack_probabilities in tile.cuh); zeros for a warp whose query did not select
/// the page.
/// NOTE: no mask, which would take as many instructions as packing itself; nor plain zeros, see fresh_zero.
__device__ __forceinline__ void pack_page(uint32_t (&packed)[FRAGMENT_REGISTERS], const uint32_t (&codes)[32], bool live) {
    if (live) {
#pragma unroll
        for (int at = 0; at < FRAGMENT_REGISTERS; ++at) {
            const int step = at / 4, i = at % 2, half = at / 2 % 2, j = 4 * step + 2 * half;
            packed[at] = __byte_perm(codes[2 * j + i], codes[2 * (j + 1) + i], 0x6420);
        }
    } else {
#pragma unroll
        for (uint32_t& word : packed) word = fresh_zero();
    }
}

/// P V: four products of 32 keys, with the denominators.
__device__ __forceinline__ void multiply_values(Rows& rows, const uint32_t (&packed)[FRAGMENT_REGISTERS], uint64_t values) {
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_m64n136k32_rs(rows.o, packed + 4 * step, values + 2 * step, 1);
}

__device__ __forceinline__ float denominator(const Rows& rows, int i) { return rows.o[SCORES + 2 * i]; }
