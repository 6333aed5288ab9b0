// The arithmetic of one tile: 4 queries x 16 heads (64 rows, one warpgroup) against one page of 128
// keys. Warp w of the warpgroup owns rows 16w..16w+15, which are the 16 heads of one query, so that
// membership, causal limit and skipping are uniform within a warp.
//
// Accumulator fragment: lane l = 4r + t holds, at register 4j + 2i + q, row r + 8i, column 8j + 2t + q.
#pragma once

#include "ptx.cuh"

constexpr int PAGE = 128;                      // tokens in a page
constexpr int HEAD_DIM = 128;                  // channels of a head
constexpr int GROUP_HEADS = 16;                // query heads that share a KV head
constexpr int TILE_QUERIES = 4;                // one a warp
constexpr int TILE_ROWS = TILE_QUERIES * GROUP_HEADS;
constexpr int TILE_BYTES = TILE_ROWS * HEAD_DIM;  // Q tile in e4m3
constexpr int KEYS_BYTES = PAGE * HEAD_DIM;       // K page, and V page, in e4m3
constexpr int ONES_BYTES = 8 * PAGE;              // eight rows of ones below V^T: the denominator's columns
constexpr int SCORES = 64;                        // accumulator registers of a 64 x 128 product
constexpr int CHAINED = 68;                       // of a 64 x 136 product: output and denominator
constexpr uint32_t NAN_PAIR = 0x7fff7fff;         // in f16

/// Address inside a tile with 128-byte rows and the 128-byte swizzle.
__device__ __forceinline__ uint32_t swizzled(int row, int byte) {
    return row * 128 + ((((byte >> 4) ^ row) & 7) << 4) + (byte & 15);
}

/// Power-of-two scale that brings a row whose largest magnitude is `amax` (bf16 bits) into [128, 256),
/// and its inverse. A BF16 significand is then exactly a sum of two e4m3 numbers. A row with NaN or
/// infinity gets a NaN scale, so that it, and no other row, comes out as NaN.
__device__ __forceinline__ void power_of_two_scale(uint32_t amax, float& scale, float& inverse) {
    const uint32_t exponent = amax >> 7;
    const uint32_t clamped = exponent < 8 ? 8 : exponent;
    scale = __uint_as_float(exponent == 0xff ? 0x7fffffffu : (261 - clamped) << 23);
    inverse = __uint_as_float((clamped - 7) << 23);
}

/// Loads rows [begin, end) of a Q tile with one warp, 2 * IN_FLIGHT rows at a time, and hands each
/// lane's share to `store(row, chunk, words, amax)`: channels 8 * chunk .. + 7 as four bf16 pairs, and
/// the bf16 bits of the row's largest magnitude (NaN stays NaN).
/// `query_of(slot)` is the query row of a slot, or -1 if unused (its tile rows become zero).
template <int IN_FLIGHT, typename QueryOf, typename Store>
__device__ __forceinline__ void load_tile_rows(const uint8_t* q, QueryOf query_of, int64_t query_bytes,
                                               int head_offset_bytes, int begin, int end, Store store) {
    const int lane = threadIdx.x & 31;
    const int half = lane >> 4, chunk = lane & 15;
#pragma unroll 1
    for (int first = begin; first < end; first += 2 * IN_FLIGHT) {
        uint4 raw[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
            const int row = first + u * 2 + half;
            const int query = query_of(row / GROUP_HEADS);
            raw[u] = make_uint4(0, 0, 0, 0);
            if (query >= 0) {
                const uint8_t* source = q + query * query_bytes + head_offset_bytes + (row % GROUP_HEADS) * (HEAD_DIM * 2);
                raw[u] = __ldg(reinterpret_cast<const uint4*>(source) + chunk);
            }
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
            const uint32_t words[4] = {raw[u].x, raw[u].y, raw[u].z, raw[u].w};
            uint32_t largest = max_nan_bf16x2(max_nan_bf16x2(words[0] & 0x7fff7fff, words[1] & 0x7fff7fff),
                                              max_nan_bf16x2(words[2] & 0x7fff7fff, words[3] & 0x7fff7fff));
#pragma unroll
            for (int lanes = 1; lanes < 16; lanes *= 2)
                largest = max_nan_bf16x2(largest, __shfl_xor_sync(0xffffffff, largest, lanes));
            const uint32_t low = largest & 0x7fff, high = largest >> 16;
            store(first + u * 2 + half, chunk, words, low > high ? low : high);
        }
    }
}

/// Eight bf16 channels, times `scale`, as f32.
__device__ __forceinline__ void scale_channels(float (&x)[8], const uint32_t (&words)[4], float scale) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = __uint_as_float(words[i] << 16) * scale;
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u) * scale;
    }
}

__device__ __forceinline__ uint2 pack_channels(const float (&x)[8]) {
    return make_uint2(cvt_e4m3x4(x[0], x[1], x[2], x[3]), cvt_e4m3x4(x[4], x[5], x[6], x[7]));
}

/// What packing lost: subtracts the packed channels from the numbers they came from.
__device__ __forceinline__ void subtract_channels(float (&x)[8], uint2 packed) {
    const uint32_t taken[2] = {packed.x, packed.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t halves = cvt_f16x2_e4m3x2(static_cast<uint16_t>(taken[i / 2] >> (16 * (i % 2))));
        x[2 * i] -= cvt_f32_f16(static_cast<uint16_t>(halves));
        x[2 * i + 1] -= cvt_f32_f16(static_cast<uint16_t>(halves >> 16));
    }
}

/// Replaces the scores of keys at or past `visible` (counted from the page's first token).
/// NOTE: by selection, never by adding: the bytes behind a masked score may be NaN.
__device__ __forceinline__ void mask_scores(float (&scores)[SCORES], int visible) {
    const int limit = visible - 2 * static_cast<int>(threadIdx.x & 3);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const bool hidden = 8 * j + q >= limit;
            scores[4 * j + q] = hidden ? -__int_as_float(0x7f800000) : scores[4 * j + q];
            scores[4 * j + 2 + q] = hidden ? -__int_as_float(0x7f800000) : scores[4 * j + 2 + q];
        }
    }
}

/// Largest raw score this lane holds of row r + 8 * half. Two chains, so that latency overlaps.
__device__ __forceinline__ float lane_maximum(const float (&scores)[SCORES], int half) {
    float even = fmaxf(scores[2 * half], scores[2 * half + 1]);
    float odd = fmaxf(scores[4 + 2 * half], scores[4 + 2 * half + 1]);
#pragma unroll
    for (int j = 2; j < 16; j += 2) {
        even = fmaxf(even, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
        odd = fmaxf(odd, fmaxf(scores[4 * j + 4 + 2 * half], scores[4 * j + 4 + 2 * half + 1]));
    }
    return fmaxf(even, odd);
}

/// Maximum over the four lanes that share a row.
__device__ __forceinline__ float row_maximum(float lane_value) {
    lane_value = fmaxf(lane_value, __shfl_xor_sync(0xffffffff, lane_value, 1));
    return fmaxf(lane_value, __shfl_xor_sync(0xffffffff, lane_value, 2));
}

__device__ __forceinline__ float row_sum(float lane_value) {
    lane_value += __shfl_xor_sync(0xffffffff, lane_value, 1);
    return lane_value + __shfl_xor_sync(0xffffffff, lane_value, 2);
}

/// Row of a tile that this lane's registers begin with; the others are 8 rows on.
__device__ __forceinline__ int first_row() { return (threadIdx.x & 127) / 32 * GROUP_HEADS + (threadIdx.x & 31) / 4; }

/// Whether both f16 of a pair are at most `limit`, by their bits: they are never negative, and NaN is above all.
__device__ __forceinline__ bool both_at_most(uint32_t pair, uint32_t limit) {
    return (pair & 0xffff) <= limit && pair >> 16 <= limit;
}

/// Scales accumulators: rows r by `factors[0]`, rows r + 8 by `factors[1]`.
template <int REGISTERS>
__device__ __forceinline__ void scale_rows(float (&o)[REGISTERS], const float (&factors)[2]) {
#pragma unroll
    for (int at = 0; at < REGISTERS; ++at) o[at] *= factors[at / 2 % 2];
}

/// Probabilities as the e4m3 A fragment of P V: register 4s + i + 2h of the fragment holds rows r + 8i
/// and the keys that the packed V^T image keeps at slots 32s + 16h + 4t .. +3, straight from the
/// accumulator registers, with no exchange between lanes.
__device__ __forceinline__ uint32_t pack_probabilities(const float (&p)[SCORES], int s, int i, int h) {
    const int j = 4 * s + 2 * h;
    return cvt_e4m3x4(p[4 * j + 2 * i], p[4 * j + 2 * i + 1], p[4 * (j + 1) + 2 * i], p[4 * (j + 1) + 2 * i + 1]);
}

/// Stores one tile row's output: the dim order of the V^T image gives every lane eight consecutive
/// channels in each group of 32, so two rows cost eight 16-byte stores and no shared memory.
__device__ __forceinline__ void store_row(uint8_t* row_out, const float* o, int half, float factor) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int at = 4 * (4 * g + j) + 2 * half;
            words[j] = cvt_bf16x2(o[at] * factor, o[at + 1] * factor);
        }
        *reinterpret_cast<uint4*>(row_out + (32 * g + 8 * t) * 2) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}
