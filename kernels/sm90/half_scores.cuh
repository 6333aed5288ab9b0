// Scores as packed f16 and probabilities as e4m3 codes: the tile arithmetic of the `fast` precision.
//
// An f16 accumulator takes half the registers of an f32 one at the same rate. And an e4m3 number needs
// no exponential: its eight bits, exponent above mantissa, *are* 8 * (log2 p + 7), read as straight
// lines between powers of two. So one packed fma makes two probabilities, rounded to a code in the low
// byte of an f16 between 1024 and 2048, where one unit in the last place is one. The straight lines err
// by up to 6 % of p and 2 % rms once normalised, beside e4m3's own rounding of 2.6 %; the denominator
// sums the same codes.
//
// Fragment: register 2j + i of lane 4r + t holds row r + 8i, columns 8j + 2t (low half) and 8j + 2t + 1.
#pragma once

#include "tile.cuh"

constexpr int HALF_SCORES = 32;      // registers of a 64 x 128 f16 product
constexpr int CODES = 8;             // e4m3 codes to a factor of two
constexpr int CODE_OF_ONE = 56;
constexpr int REFERENCE_BITS = 6;    // p = 2^6 at a row's reference: small ones down to 2^-13 of it survive
constexpr float HEADROOM = 20.5f;    // codes above the reference before 448 is near and the reference must move
constexpr float CODE_BASE = 1024;    // f16 counts in ones from here to 2048
constexpr float CODE_OF_REFERENCE = CODE_BASE + CODE_OF_ONE + CODES * REFERENCE_BITS;
constexpr uint32_t F16_CODE_BASE = 0x64006400;       // 1024, twice
constexpr uint32_t F16_CODE_OF_REFERENCE = 0x64686468;  // 1128, twice
static_assert(CODE_OF_REFERENCE == 1128, "the packed constant says the same");

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
__device__ __forceinline__ float high_half(uint32_t pair) { return cvt_f32_f16(static_cast<uint16_t>(pair >> 16)); }

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

/// Largest score this lane holds of row r + 8 * half, as f32.
__device__ __forceinline__ float lane_maximum(const uint32_t (&scores)[HALF_SCORES], int half) {
    uint32_t chains[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) chains[c] = scores[2 * c + half];
#pragma unroll
    for (int j = 4; j < 16; ++j) chains[j % 4] = max_f16x2(chains[j % 4], scores[2 * j + half]);
    const uint32_t pair = max_f16x2(max_f16x2(chains[0], chains[1]), max_f16x2(chains[2], chains[3]));
    return fmaxf(low_half(pair), high_half(pair));
}

/// Two scores to two probability codes in the low bytes of the halves. `negative_reference` is minus the
/// row's reference score, twice. NaN becomes 0x7fff, whose low byte is NaN in e4m3 too.
__device__ __forceinline__ uint32_t probability_codes(uint32_t scores, uint32_t negative_reference, uint32_t factor) {
    const uint32_t codes = fma_f16x2(add_f16x2(scores, negative_reference), factor, F16_CODE_OF_REFERENCE);
    return max_nan_f16x2(codes, F16_CODE_BASE);
}

/// The e4m3 A fragment register of step s: rows r + 8i, key half h (see pack_probabilities in tile.cuh).
__device__ __forceinline__ uint32_t pack_codes(const uint32_t (&codes)[HALF_SCORES], int s, int i, int h) {
    const int j = 4 * s + 2 * h;
    return __byte_perm(codes[2 * j + i], codes[2 * (j + 1) + i], 0x6420);
}
