// V^T images for FP8 products: wgmma wants both 8-bit operands K-major, V is stored token by token.
//
// An image is 16 KiB for each (physical row, KV head), 128 image rows of 128 slots, swizzled as a
// 128-byte wgmma descriptor expects: slot k of image row n is byte n*128 + (((k>>4) ^ (n&7))<<4 | (k&15)).
//   slot 32s+16h+4t+2c+q      holds token   32s+16h+8c+2t+q   the order in which a score fragment packs
//   image row 32g+8j+2t+q     holds channel 32g+8t+2j+q       eight consecutive channels for each lane
// NaN bytes become 0 for every token: a probability of 0 would not silence a NaN past the request's end.
#pragma once

#include "metadata.cuh"

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

constexpr int IMAGE_BYTES = 128 * 128;

/// The two NaN of e4m3, 0x7F and 0xFF, replaced by zero in four bytes at once.
__device__ __forceinline__ unsigned without_nan(unsigned bytes) {
    const unsigned carry = (bytes & 0x7f7f7f7fu) + 0x01010101u;  // bit 7 of each byte: its low seven bits were all ones
    return bytes & ~__byte_perm(carry, 0, 0xba98);               // 0xba98 spreads those bits over their bytes
}

/// One page of one head. A warp takes 16 tokens, a lane four channels of them: loads are whole 128-byte
/// rows of V and all in flight together, the 16 x 4 bytes are transposed in registers, and the image
/// leaves through shared memory in 16-byte words.
__device__ __forceinline__ void pack_page(const uint8_t* page, int64_t token_stride, uint4* image, uint4* tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned token[16];
#pragma unroll
    for (int i = 0; i < 16; ++i)
        token[i] = __ldg(reinterpret_cast<const unsigned*>(page + (16 * warp + i) * token_stride) + lane);
#pragma unroll
    for (int i = 0; i < 16; ++i) token[i] = without_nan(token[i]);

    // NOTE: odd lanes take their channels in the order 1 0 3 2. Eight lanes that store together then
    // cover all eight residues of n mod 8, which are eight different bank groups.
    const unsigned first = lane % 2 ? 0x7632 : 0x5410, second = first ^ (0x7632 ^ 0x5410);
    unsigned slots[4][4];  // [channel][t]: four tokens
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const unsigned a = token[2 * t], b = token[2 * t + 1], c = token[2 * t + 8], d = token[2 * t + 9];
        const unsigned low_ab = __byte_perm(a, b, 0x5140), low_cd = __byte_perm(c, d, 0x5140);
        const unsigned high_ab = __byte_perm(a, b, 0x7362), high_cd = __byte_perm(c, d, 0x7362);
        slots[0][t] = __byte_perm(low_ab, low_cd, first);
        slots[1][t] = __byte_perm(low_ab, low_cd, second);
        slots[2][t] = __byte_perm(high_ab, high_cd, first);
        slots[3][t] = __byte_perm(high_ab, high_cd, second);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int channel = 4 * lane + (i ^ (lane & 1));
        const int n = (channel & ~31) | (channel >> 1 & 3) << 3 | (channel >> 3 & 3) << 1 | (channel & 1);
        tile[n * 8 + (warp ^ (n & 7))] = make_uint4(slots[i][0], slots[i][1], slots[i][2], slots[i][3]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < IMAGE_BYTES / 16 / BLOCK; ++i) image[threadIdx.x + i * BLOCK] = tile[threadIdx.x + i * BLOCK];
    __syncthreads();
}

/// Block `block` of `params.blocks`: its share of the pages that hold a token.
__device__ __forceinline__ void pack_block(const PackParams& params, int block, uint4* tile) {
    for (int item = block;; item += params.blocks) {
        const int head = item % params.kv_heads;
        const Place place = locate(params.requests, item / params.kv_heads, [&](int request) {
            return min(divide_up(params.seq_lens[request], PAGE_TOKENS), params.max_pages);
        });
        if (place.request < 0) return;
        const int64_t row = params.page_table[static_cast<int64_t>(place.request) * params.max_pages + place.ordinal];
        pack_page(params.v + row * params.page_stride + head * params.head_stride, params.token_stride,
                  reinterpret_cast<uint4*>(params.images + (row * params.kv_heads + head) * IMAGE_BYTES), tile);
    }
}
