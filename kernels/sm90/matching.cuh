// The search by matching: pwbench.grouping.match, bit for bit. Rows are paired so that partners share many
// pages, then the pairs so. Either time STARTS arrangements of pairs are improved by exchange side by side,
// each by a part of a warp that keeps it in registers, and the one that shares the most pages is kept. There
// is no serial chain of picks and no barrier among the meetings: one costs a shuffle and a table look-up.
#pragma once

#include "window.cuh"

#ifndef SWEEPS
#define SWEEPS 1  // times that all pairs meet: MATCHING_SWEEPS of the oracle
#endif
static_assert(WINDOW <= 64 && GROUP == 4, "quads of a window of 64 rows");

// A pair in a register: its items and the pages that they share.
constexpr int SECOND = 8, OVERLAP = 16;  // bit where the second item begins, and the overlap
constexpr unsigned ABSENT_OVERLAP = 127; // of pairs past the window's last: more than any exchange offers

__device__ __forceinline__ unsigned make_pair(unsigned first, unsigned second, unsigned overlap) {
    return first | second << SECOND | overlap << OVERLAP;
}

__device__ __forceinline__ unsigned first_of(unsigned pair) { return __byte_perm(pair, 0, 0x4440); }
__device__ __forceinline__ unsigned second_of(unsigned pair) { return __byte_perm(pair, 0, 0x4441); }

/// Adds 2^LEVEL numbers of one bit in each of 32 columns, by a tree of full adders. Bits 0 to LEVEL - 1 of
/// the sums go to `planes`, bit LEVEL is returned.
template <int LEVEL>
__device__ __forceinline__ unsigned add_bits(unsigned* planes, const unsigned* masks) {
    if constexpr (LEVEL == 0) {
        return masks[0];
    } else if constexpr (LEVEL == 1) {
        planes[0] = masks[0] ^ masks[1];
        return masks[0] & masks[1];
    } else {
        unsigned others[LEVEL - 1];
        const unsigned left = add_bits<LEVEL - 1>(planes, masks);
        const unsigned right = add_bits<LEVEL - 1>(others, masks + (1 << (LEVEL - 1)));
        unsigned carry = 0;
#pragma unroll
        for (int bit = 0; bit < LEVEL - 1; ++bit) {
            const unsigned own = planes[bit], other = others[bit];
            planes[bit] = own ^ other ^ carry;
            carry = (own & other) | (carry & (own | other));
        }
        planes[LEVEL - 1] = left ^ right ^ carry;
        return (left & right) | (carry & (left | right));
    }
}

/// How many of 2^(LEVEL + 1) masks, half of them in this lane and half in its neighbour, have each bit: a
/// byte for each of bits 0 to 15 in the even lane, 16 to 31 in the odd one.
template <int LEVEL>
__device__ __forceinline__ uint4 count_bits(const unsigned (&masks)[1 << LEVEL]) {
    unsigned planes[LEVEL + 2], carry = 0;
    planes[LEVEL] = add_bits<LEVEL>(planes, masks);
#pragma unroll
    for (int bit = 0; bit <= LEVEL; ++bit) {
        const unsigned own = planes[bit], other = __shfl_xor_sync(ALL_LANES, own, 1);
        planes[bit] = own ^ other ^ carry;
        carry = (own & other) | (carry & (own | other));
    }
    planes[LEVEL + 1] = carry;
    unsigned counts[4] = {};
#pragma unroll
    for (int bit = 0; bit < LEVEL + 2; ++bit) {
        const unsigned columns = planes[bit] >> threadIdx.x % 2 * 16;
#pragma unroll
        for (int four = 0; four < 4; ++four)  // four bits to four bytes
            counts[four] += ((columns >> 4 * four & 15) * 0x00204081 & 0x01010101) << bit;
    }
    return make_uint4(counts[0], counts[1], counts[2], counts[3]);
}

/// Pages that each two rows share.
__device__ __forceinline__ void count_shared_of_rows(WindowScratch& scratch) {
    static_assert(BLOCK == 4 * COLUMNS, "four threads a row: two words of columns, two halves of the Top-K");
    const int row = threadIdx.x / 4, word = threadIdx.x / 2 % 2, half = threadIdx.x % 2;
    unsigned masks[TOPK / 2];
#pragma unroll
    for (int i = 0; i < TOPK / 2; ++i) {
        const unsigned short page = scratch.page[row][TOPK / 2 * half + i];
        masks[i] = page == NO_PAGE ? 0 : scratch.members[page][word];
    }
    *reinterpret_cast<uint4*>(&scratch.matching.shared_of_rows[row][32 * word + 16 * half]) = count_bits<3>(masks);
}

/// Pages that the unions of each two pairs of rows share, by the first two warps.
__device__ __forceinline__ void count_shared_of_pairs(WindowScratch& scratch) {
    MatchingScratch& matching = scratch.matching;
    const int pair = threadIdx.x / 2, second = threadIdx.x % 2;
    const int lower = matching.pairs[pair].x, row = second ? matching.pairs[pair].y : lower;
    unsigned masks[TOPK];
#pragma unroll
    for (int position = 0; position < TOPK; ++position) {
        const unsigned short page = scratch.page[row][position];
        masks[position] = 0;
        if (page == NO_PAGE) continue;
        const bool repeated = second && scratch.members[page][lower / 32] >> lower % 32 & 1;
        if (!repeated) masks[position] = matching.members_of_pairs[page];
    }
    *reinterpret_cast<uint4*>(&matching.shared_of_pairs[pair][16 * second]) = count_bits<4>(masks);
}

/// (a, b) meets (c, d): they become (a, c), (b, d) or (a, d), (c, b) if those share at least `gain` more pages.
template <int STRIDE>
__device__ __forceinline__ void meet(const unsigned char (*shared)[STRIDE], unsigned& x, unsigned& y, unsigned gain) {
    const unsigned a = first_of(x), b = second_of(x), c = first_of(y), d = second_of(y);
    const unsigned ac = shared[a][c], bd = shared[b][d], ad = shared[a][d], cb = shared[b][c];
    const unsigned enough = (x >> OVERLAP) + gain + (y >> OVERLAP), straight = ac + bd, crossed = ad + cb;
    const bool change = max(straight, crossed) >= enough, direct = straight >= crossed;
    const unsigned new_x = direct ? make_pair(a, c, ac) : make_pair(a, d, ad);
    const unsigned new_y = direct ? make_pair(b, d, bd) : make_pair(c, b, cb);
    if (change) x = new_x, y = new_y;
}

/// Improves STARTS arrangements of the first 2 * pairs of 4 * PLACES items, by as many groups of PLACES
/// threads. A thread holds two pairs, x and y. See _Arrangements in pwbench/grouping.py for who meets when.
template <int PLACES, int STRIDE>
__device__ __forceinline__ void arrange(const unsigned char (*shared)[STRIDE], int pairs, MatchingScratch& matching) {
    const int start = threadIdx.x / PLACES, place = threadIdx.x % PLACES;
    const int factor = 2 * start + 1, inverse = factor * (2 - factor * factor);  // modulo 64
    static_assert(2 * PLACES <= 64, "as exact as the inverse is");
    auto first_pair = [&](int at) {
        const int pair = at * inverse & (2 * PLACES - 1);
        return make_pair(2 * pair, 2 * pair + 1, pair < pairs ? shared[2 * pair][2 * pair + 1] : ABSENT_OVERLAP);
    };
    unsigned x = first_pair(2 * place), y = first_pair(2 * place + 1);
#pragma unroll 1
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        const unsigned gain = sweep == SWEEPS - 1;  // equals are exchanged too, but for the last time around
#pragma unroll 1
        for (int reach = PLACES; reach > 1; reach /= 2) {
#pragma unroll 1
            for (int meeting = 1; meeting <= reach; ++meeting) {
                meet(shared, x, y, gain);
                y = __shfl_xor_sync(ALL_LANES, y, meeting == reach ? reach / 2 : meeting & -meeting);
            }
            const bool upper = place & reach / 2;
            const unsigned other = __shfl_xor_sync(ALL_LANES, upper ? x : y, reach / 2);
            (upper ? x : y) = other;
        }
        meet(shared, x, y, gain);
    }
    int overlap = (x >> OVERLAP) + (y >> OVERLAP);
#pragma unroll
    for (int step = PLACES / 2; step > 0; step /= 2) overlap += __shfl_xor_sync(ALL_LANES, overlap, step);
    if (start >= STARTS) return;  // lanes that only make the warp whole
    if (place == 0) matching.overlap[start] = overlap;
    matching.found[start][2 * place] = x;
    matching.found[start][2 * place + 1] = y;
}

/// The start whose arrangement shares the most pages, the earliest of several.
__device__ __forceinline__ int best_start(const MatchingScratch& matching) {
    int best = 0, most = matching.overlap[0];
#pragma unroll
    for (int start = 1; start < STARTS; ++start) {
        if (matching.overlap[start] > most) most = matching.overlap[start], best = start;
    }
    return best;
}

/// Puts the best pairs of rows in the order of their lower rows, by one warp.
__device__ __forceinline__ void settle_pairs(MatchingScratch& matching, int rows) {
    const unsigned found = matching.found[best_start(matching)][threadIdx.x];
    const int a = first_of(found), b = second_of(found), lower = min(a, b), upper = max(a, b);
    const bool exists = lower < rows;
    const unsigned bit = exists ? 1u << lower % 32 : 0;
    const unsigned low = __reduce_or_sync(ALL_LANES, lower < 32 ? bit : 0);
    const unsigned high = __reduce_or_sync(ALL_LANES, lower < 32 ? 0 : bit);
    const int before = lower < 32 ? __popc(low & (bit - 1)) : __popc(low) + __popc(high & (bit - 1));
    const int pair = exists ? before : lower / 2;  // those past the last were never parted
    matching.pairs[pair] = make_uchar2(lower, upper);
    matching.pair_of[lower] = matching.pair_of[upper] = pair;
}

/// Puts the best quads in the order of their lowest rows, by one warp.
__device__ __forceinline__ void settle_quads(WindowScratch& scratch, int quads) {
    const MatchingScratch& matching = scratch.matching;
    const unsigned found = matching.found[best_start(matching)][threadIdx.x % (COLUMNS / 4)];
    const int a = first_of(found), b = second_of(found), lower = min(a, b), upper = max(a, b);
    const bool exists = lower < 2 * quads && threadIdx.x < COLUMNS / 4;
    const unsigned bit = exists ? 1u << lower : 0;
    const unsigned all = __reduce_or_sync(ALL_LANES, bit);
    if (!exists) return;
    const uchar2 first = matching.pairs[lower], second = matching.pairs[upper];
    *reinterpret_cast<int4*>(&scratch.pick[4 * __popc(all & (bit - 1))]) = make_int4(first.x, first.y, second.x, second.y);
}

/// The whole search, by the block; `warp` is known to the compiler to be one for all lanes. Rows past the last whole quad keep their places.
__device__ __forceinline__ void search_by_matching(WindowScratch& scratch, int size, int warp) {
    MatchingScratch& matching = scratch.matching;
    const int quads = size / 4, rows = 4 * quads;
    count_shared_of_rows(scratch);
    for (int page = threadIdx.x; page < scratch.pages; page += BLOCK) matching.members_of_pairs[page] = 0;
    if (threadIdx.x >= rows && threadIdx.x < size) scratch.pick[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (warp < divide_up(STARTS * COLUMNS / 4, 32)) arrange<COLUMNS / 4>(matching.shared_of_rows, 2 * quads, matching);
    __syncthreads();
    if (warp == 0) settle_pairs(matching, rows);
    __syncthreads();
    const int row = threadIdx.x / 4;
    if (row < rows) {
        const ushort4 four = *reinterpret_cast<const ushort4*>(&scratch.page[row][threadIdx.x % 4 * 4]);
        const unsigned bit = 1u << matching.pair_of[row];
        for (const unsigned short page : {four.x, four.y, four.z, four.w})
            if (page != NO_PAGE) atomicOr(&matching.members_of_pairs[page], bit);
    }
    __syncthreads();
    if (warp < COLUMNS / 32) count_shared_of_pairs(scratch);
    __syncthreads();
    if (warp < divide_up(STARTS * COLUMNS / 8, 32)) arrange<COLUMNS / 8>(matching.shared_of_pairs, quads, matching);
    __syncthreads();
    if (warp == 0) settle_quads(scratch, quads);
    __syncthreads();
}
