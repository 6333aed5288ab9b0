// V^T images: wgmma wants 8-bit operands K-major, V is stored token by token.
//
// An image for each (physical row, KV head): 128 rows, tokens along K, in parts of 128 bytes a row, each part
// swizzled as a 128-byte wgmma descriptor expects: byte b of image row n at n*128 + (((b>>4) ^ (n&7))<<4 | (b&15)).
//   image row 32g+8j+2t+q     holds channel 32g+8t+2j+q       eight consecutive channels for each lane
// VALUE_BYTES = 1, e4m3 as stored, one part of 16 KiB:
//   byte 32s+16h+4t+2c+q      holds token   32s+16h+8c+2t+q   the order in which a score fragment packs
// VALUE_BYTES = 2, f16 (exact), two parts of 16 KiB, tokens 0..63 and 64..127:
//   bytes 2k and 2k+1         hold  token   k of the part
// NaN bytes become 0 for every token: a probability of 0 would not silence a NaN past the request's end.
#pragma once

#include "metadata.cuh"

#ifndef VALUE_BYTES
#define VALUE_BYTES 1
#endif

struct PackParams {
    const uint8_t* v;           // byte 0 of V of physical row 0
    uint8_t* images;
    const int* page_table;      // [requests, max_pages]
    const int* seq_lens;
    int64_t page_stride, head_stride, token_stride;  // bytes
    int requests;
    int max_pages;
    int kv_heads;
    int blocks;                 // thread blocks that share the pages
};

/// What the queries selected, to pack no other pages.
struct Selection {
    const int* topk;            // [kv_heads, total_q, 16]
    const int* cu_seqlens_q;    // [requests + 1]
    const int* positions;       // [total_q]
    int total_q;
};

constexpr int IMAGE_BYTES = 128 * 128 * VALUE_BYTES;
constexpr int SELECTION_BLOCKS = TOPK / 4;  // of pack_selected_block, for each query row and head

/// The two NaN of e4m3, 0x7F and 0xFF, replaced by zero in four bytes at once.
__device__ __forceinline__ unsigned without_nan(unsigned bytes) {
    const unsigned carry = (bytes & 0x7f7f7f7fu) + 0x01010101u;  // bit 7 of each byte: its low seven bits were all ones
    return bytes & ~((carry >> 7 & 0x01010101u) * 0xffu);        // NOTE: __byte_perm does not spread sign bits, PRMT does
}

constexpr int CHANNELS = 4 * VALUE_BYTES, TOKENS = 16 / VALUE_BYTES;  // that a lane transposes: 64 bytes
constexpr int LANES = 128 / CHANNELS;                                // that share a token

/// Bytes of a lane, as loaded token by token, into one 16-byte word of the image for each channel.
/// Where `odd`, the channels come in the order 1 0 3 2 ...
__device__ __forceinline__ void transpose(const unsigned (&loaded)[16], int odd, unsigned (&words)[CHANNELS][4]) {
#if VALUE_BYTES == 1
    const unsigned first = odd ? 0x7632 : 0x5410, second = first ^ (0x7632 ^ 0x5410);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const unsigned a = loaded[2 * t], b = loaded[2 * t + 1], c = loaded[2 * t + 8], d = loaded[2 * t + 9];
        const unsigned low_ab = __byte_perm(a, b, 0x5140), low_cd = __byte_perm(c, d, 0x5140);
        const unsigned high_ab = __byte_perm(a, b, 0x7362), high_cd = __byte_perm(c, d, 0x7362);
        words[0][t] = __byte_perm(low_ab, low_cd, first);
        words[1][t] = __byte_perm(low_ab, low_cd, second);
        words[2][t] = __byte_perm(high_ab, high_cd, first);
        words[3][t] = __byte_perm(high_ab, high_cd, second);
    }
#else
    const unsigned low = odd ? 0x4051 : 0x5140, high = odd ? 0x6273 : 0x7362;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int t = i / 2, channel = i % 2 * 4;
        const unsigned a = loaded[4 * t + i % 2], b = loaded[4 * t + 2 + i % 2];
        const unsigned low_ab = __byte_perm(a, b, low), high_ab = __byte_perm(a, b, high);
        words[channel][t] = cvt_f16x2_e4m3x2(static_cast<uint16_t>(low_ab));
        words[channel + 1][t] = cvt_f16x2_e4m3x2(static_cast<uint16_t>(low_ab >> 16));
        words[channel + 2][t] = cvt_f16x2_e4m3x2(static_cast<uint16_t>(high_ab));
        words[channel + 3][t] = cvt_f16x2_e4m3x2(static_cast<uint16_t>(high_ab >> 16));
    }
#endif
}

/// One page of one head. A warp takes 16 tokens, a lane 64 bytes of them: loads are whole 128-byte rows of V
/// and all in flight together, a lane's bytes are transposed in registers, and the image leaves through
/// shared memory in 16-byte words.
__device__ __forceinline__ void pack_page(const uint8_t* page, int64_t token_stride, uint4* image, uint4* tile) {
    const int column = threadIdx.x % LANES, word = threadIdx.x / LANES, part = VALUE_BYTES == 1 ? 0 : word / 8;
    unsigned loaded[16];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const uint8_t* token = page + (TOKENS * word + i) * token_stride;
#if VALUE_BYTES == 1
        loaded[i] = __ldg(reinterpret_cast<const unsigned*>(token) + column);
#else
        const uint2 both = __ldg(reinterpret_cast<const uint2*>(token) + column);
        loaded[2 * i] = both.x;
        loaded[2 * i + 1] = both.y;
#endif
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) loaded[i] = without_nan(loaded[i]);

    // NOTE: `odd` is the bit of the lane that n mod 8 leaves out. Eight lanes that store together then
    // cover all eight residues of n mod 8, which are eight different bank groups.
    const int odd = VALUE_BYTES == 1 ? column & 1 : column >> 2 & 1;
    unsigned words[CHANNELS][4];
    transpose(loaded, odd, words);
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) {
        const int channel = CHANNELS * column + (i ^ odd);
        const int n = (channel & ~31) | (channel >> 1 & 3) << 3 | (channel >> 3 & 3) << 1 | (channel & 1);
        tile[(128 * part + n) * 8 + (word - part * 8 ^ (n & 7))] =
            make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < IMAGE_BYTES / 16 / BLOCK; ++i) image[threadIdx.x + i * BLOCK] = tile[threadIdx.x + i * BLOCK];
    __syncthreads();
}

/// The image of one logical page.
__device__ __forceinline__ void pack_logical_page(const PackParams& params, int request, int logical, int head,
                                                  uint4* tile) {
    const int64_t row = params.page_table[static_cast<int64_t>(request) * params.max_pages + logical];
    pack_page(params.v + row * params.page_stride + head * params.head_stride, params.token_stride,
              reinterpret_cast<uint4*>(params.images + (row * params.kv_heads + head) * IMAGE_BYTES), tile);
}

/// Block `block` of `params.blocks`: its share of the pages that hold a token.
__device__ __forceinline__ void pack_block(const PackParams& params, int block, uint4* tile) {
    for (int item = block;; item += params.blocks) {
        const Place place = locate(params.requests, item / params.kv_heads, [&](int request) {
            return min(divide_up(params.seq_lens[request], PAGE_TOKENS), params.max_pages);
        });
        if (place.request < 0) return;
        pack_logical_page(params, place.request, place.ordinal, item % params.kv_heads, tile);
    }
}

/// Block `block` of kv_heads * total_q * SELECTION_BLOCKS, for few queries in long contexts: the pages at
/// four Top-K positions of one query row, save those that the rows just ahead of it already ask for.
/// A repeat from farther back is packed again: the same bytes.
__device__ __forceinline__ void pack_selected_block(const PackParams& params, const Selection& selection, int block,
                                                    uint4* tile) {
    constexpr int PARTS = TOPK / 4, ROWS = BLOCK / PARTS;  // a thread compares four ids, a block those of ROWS rows
    const int part = block % SELECTION_BLOCKS, row = block / SELECTION_BLOCKS % selection.total_q;
    const int head = block / SELECTION_BLOCKS / selection.total_q;
    const Place place = locate(params.requests, row, [&](int request) {
        return selection.cu_seqlens_q[request + 1] - selection.cu_seqlens_q[request];
    });
    if (place.request < 0) return;
    const int length = params.seq_lens[place.request];
    const int4* ids = reinterpret_cast<const int4*>(selection.topk) + static_cast<int64_t>(head) * selection.total_q * PARTS;
    const int4 own = ids[static_cast<int64_t>(row) * PARTS + part];
    const int visible = visible_tokens(length, selection.positions[row]);

    const int other = max(row - place.ordinal, row - (ROWS - 1)) + static_cast<int>(threadIdx.x) / PARTS;
    const int other_part = threadIdx.x % PARTS;
    int4 seen = make_int4(-1, -1, -1, -1);
    int seen_visible = 0;
    if (other < row || (other == row && other_part <= part)) {
        seen = ids[static_cast<int64_t>(other) * PARTS + other_part];
        seen_visible = visible_tokens(length, selection.positions[other]);
    }
    const int wanted[4] = {own.x, own.y, own.z, own.w}, met[4] = {seen.x, seen.y, seen.z, seen.w};
    const bool same = other == row && other_part == part;
    for (int i = 0; i < 4; ++i) {
        if (!page_visible(wanted[i], visible, params.max_pages)) continue;
        bool repeated = false;
        for (int k = 0; k < (same ? i : 4); ++k)
            repeated |= met[k] == wanted[i] && page_visible(met[k], seen_visible, params.max_pages);
        if (!__syncthreads_or(repeated)) pack_logical_page(params, place.request, wanted[i], head, tile);
    }
}
