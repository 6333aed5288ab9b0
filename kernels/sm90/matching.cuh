// The search by matching: pwbench.grouping.match, bit for bit. Rows are paired so that partners share many pages,
// then the pairs so, then the quads. Each time a warp improves STARTS arrangements of up to REACH items by exchange,
// side by side in registers, and keeps the one whose pairs share the most pages. There is no serial chain of picks,
// and a meeting of two pairs costs a shuffle and a table look-up.
//
// What an item selected is a row of bits, one a local page, so that the tensor core counts what any two share.
// NOTE: one code for the three levels: a launch comes with nothing in the instruction cache.
#pragma once

#include "window.cuh"

#ifndef SWEEPS
#define SWEEPS 1  // times that all pairs meet: MATCHING_SWEEPS of the oracle
#endif
static_assert(WINDOW <= 64, "two stretches of rows");

constexpr int LEVELS = 3;                // rows, pairs, quads
constexpr int REACH = 32;                // items that may become partners: rows of half a window, all pairs, all quads
constexpr int STARTS = 4;                // arrangements that are improved side by side: MATCHING_STARTS of the oracle
constexpr int EMITTERS = BLOCK / 32;     // warps that turn groups into tasks
constexpr int BITS_STRIDE = WINDOW_PAGES / 32 + 4;  // words; eight rows that are read together meet no bank twice
constexpr unsigned ABSENT_OVERLAP = 127; // of pairs past the window's last: more than any exchange offers
static_assert(COLUMNS == 2 * REACH && STARTS * REACH / 4 == 32, "a warp arranges a stretch");

/// Items of a level: rows, pairs of them, pairs of pairs.
__device__ __forceinline__ int items_of(int level) { return COLUMNS >> level; }

struct WindowScratch : WindowPages {
    alignas(16) unsigned bits[2 * COLUMNS - COLUMNS / 4][BITS_STRIDE];  // of rows, pairs and quads: what each selected
    unsigned char shared[COLUMNS][REACH + 16];          // pages that an item of the level in hand shares with those in reach
    uchar2 pairs[COLUMNS - COLUMNS / 8];                // of rows, of pairs, of quads: the lower item first
    int physical[WINDOW_PAGES];                         // by local page: its row of the cache

    __device__ __forceinline__ unsigned (*bits_of(int level))[BITS_STRIDE] { return bits + 2 * (COLUMNS - items_of(level)); }
    __device__ __forceinline__ uchar2* pairs_of(int level) { return pairs + (COLUMNS - items_of(level)); }

    __device__ __forceinline__ void clear() {
        for (int at = threadIdx.x; at < COLUMNS * BITS_STRIDE / 4; at += BLOCK)
            reinterpret_cast<uint4*>(bits)[at] = make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void select(int query, int, const int (&pages)[4]) {
#pragma unroll
        for (int page : pages)
            if (page >= 0) atomicOr(&bits[query][page / 32], 1u << page % 32);
    }

    __device__ __forceinline__ void fetch_row(int page, const int* entry) { cp_async_4(smem_address(&physical[page]), entry); }
    __device__ __forceinline__ int row_of(int page, const int*) const { return physical[page]; }

    /// Which of a task's slots selected each page, and what tiles that costs. Absent slots have no bits.
    struct Members {
        const unsigned* rows[TASK_QUERIES];

        __device__ __forceinline__ Members(const WindowScratch& scratch, int, int first_slot, int) {
#pragma unroll
            for (int slot = 0; slot < TASK_QUERIES; slot += 4) {
                const int4 picks = *reinterpret_cast<const int4*>(&scratch.pick[first_slot + slot]);
                rows[slot] = scratch.bits[picks.x], rows[slot + 1] = scratch.bits[picks.y];
                rows[slot + 2] = scratch.bits[picks.z], rows[slot + 3] = scratch.bits[picks.w];
            }
        }

        /// By one warp: a lane takes 32 pages.
        __device__ __forceinline__ int work(int pages) const {
            static_assert(WINDOW_PAGES <= 32 * 32, "a lane for every word of bits");
            const int lane = threadIdx.x % 32;
            int work = 0;
            if (32 * lane < pages) {
#pragma unroll
                for (int tile = 0; tile < TASK_QUERIES; tile += SUBGROUP) {
                    unsigned all = 0;
#pragma unroll
                    for (int slot = tile; slot < tile + SUBGROUP; ++slot) all |= rows[slot][lane];
                    work += __popc(all);
                }
            }
            return __reduce_add_sync(ALL_LANES, work);
        }

        __device__ __forceinline__ unsigned of(int page) const {
            unsigned members = 0;
#pragma unroll
            for (int slot = 0; slot < TASK_QUERIES; ++slot) members |= (rows[slot][page / 32] >> page % 32 & 1) << slot;
            return members;
        }
    };
};
static_assert(TASK_QUERIES % 4 == 0, "picks are read four at a time");
static_assert(sizeof(WindowScratch) <= COLUMNS * 448, "as the host reckons it");

/// What one warp pairs up: the items of a level that are in reach of each other.
struct Stretch {
    int level, begin, items;

    __device__ __forceinline__ Stretch(int level, int ordinal)
        : level(level), begin(ordinal * REACH), items(min(items_of(level), REACH)) {}
};

/// Pages that each two items of a stretch share: its bits times themselves.
__device__ __forceinline__ void count_shared(WindowScratch& scratch, const Stretch& stretch) {
    const int r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const unsigned (*bits)[BITS_STRIDE] = scratch.bits_of(stretch.level) + stretch.begin;
#pragma unroll 1
    for (int row = r; row < stretch.items; row += 16) {
        unsigned counts[REACH / 8][4] = {};
#pragma unroll 1
        for (int word = t; 32 * (word - t) < scratch.pages; word += 8) {
            const unsigned a[4] = {bits[row][word], bits[row + 8][word], bits[row][word + 4], bits[row + 8][word + 4]};
#pragma unroll
            for (int tile = 0; tile < REACH / 8; ++tile) {
                if (8 * tile >= stretch.items) break;
                const unsigned b[2] = {bits[8 * tile + r][word], bits[8 * tile + r][word + 4]};
                mma_and_popc(counts[tile], a, b);
            }
        }
#pragma unroll
        for (int tile = 0; tile < REACH / 8; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<uchar2*>(&scratch.shared[stretch.begin + row + 8 * half][8 * tile + 2 * t]) =
                    make_uchar2(counts[tile][2 * half], counts[tile][2 * half + 1]);
    }
    __syncwarp();
}

/// Two items, a byte each, and the pages that they share.
struct ItemPair {
    unsigned items, overlap;
};

using SharedPages = unsigned char[REACH + 16];

/// (a, b) meets (c, d): they become (a, c), (b, d) or (a, d), (c, b) if those share at least `gain` more pages.
/// The choice is the low two bits of the largest key: 3 = as before, 2 = straight, 1 = crossed. It picks bytes of
/// tables: selectors of the new pairs' items out of (x, y), where byte 2 is zero, and new overlaps.
__device__ __forceinline__ void meet(const SharedPages* shared, ItemPair& x, ItemPair& y, unsigned gain) {
    constexpr unsigned AB_AC_AD = 0x10405000, CD_BD_CB = 0x54511400, ZEROS = 0x22;
    const unsigned a = x.items & 0xff, b = x.items >> 8, c = y.items & 0xff, d = y.items >> 8;
    const unsigned ac = shared[a][c], bd = shared[b][d], ad = shared[a][d], cb = shared[c][b];
    const unsigned before = 4 * (x.overlap + y.overlap + gain) - 1, straight = 4 * (ac + bd) + 2, crossed = 4 * (ad + cb) + 1;
    const unsigned choice = max(max(straight, crossed), before) & 3 | 0x40;
    const unsigned items = prmt(x.items, y.items, prmt(AB_AC_AD, ZEROS, choice));
    y.items = prmt(x.items, y.items, prmt(CD_BD_CB, ZEROS, choice));
    x.items = items;
    x.overlap = prmt(x.overlap << 24 | ac << 16 | ad << 8, 0, choice);
    y.overlap = prmt(y.overlap << 24 | bd << 16 | cb << 8, 0, choice);
}

__device__ __forceinline__ ItemPair from_lane(const ItemPair& pair, int distance) {
    return {__shfl_xor_sync(ALL_LANES, pair.items, distance), __shfl_xor_sync(ALL_LANES, pair.overlap, distance)};
}

/// Puts a pair where it belongs: by its lower item, `lowers` has a bit for each of them.
__device__ __forceinline__ void settle(WindowScratch& scratch, const Stretch& stretch, const ItemPair& pair, unsigned lowers) {
    const int lower = min(pair.items & 0xff, pair.items >> 8), upper = max(pair.items & 0xff, pair.items >> 8);
    scratch.pairs_of(stretch.level)[stretch.begin / 2 + __popc(lowers & ((1u << lower) - 1))] =
        make_uchar2(stretch.begin + lower, stretch.begin + upper);
}

__device__ __forceinline__ unsigned lower_bit(const ItemPair& pair) {
    return 1u << min(pair.items & 0xff, pair.items >> 8);
}

/// Improves arrangements of a stretch of which the first `pairs` pairs exist, and keeps the one whose pairs share the
/// most pages, the earliest of several. Those past the last are never parted. A quarter of as many lanes as there
/// are items takes an arrangement, a lane two pairs, x and y. See _Arrangements in pwbench/grouping.py for who meets when.
/// NOTE: half as many items leave room for twice the arrangements; the second half repeats the first.
__device__ __forceinline__ void arrange(WindowScratch& scratch, const Stretch& stretch, int pairs) {
    const SharedPages* shared = scratch.shared + stretch.begin;
    const int places = stretch.items / 4, place = threadIdx.x & (places - 1);
    const int start = threadIdx.x % 32 >> (places == REACH / 4 ? 3 : 2);
    static_assert(REACH / 4 == 1 << 3, "places of either kind of stretch");
    const int factor = 2 * start + 1, inverse = factor * (2 - factor * factor);  // modulo 64
    auto first_pair = [&](int at) -> ItemPair {
        const int pair = at * inverse & (2 * places - 1);
        return {2 * pair | (2 * pair + 1u) << 8, pair < pairs ? shared[2 * pair][2 * pair + 1] : ABSENT_OVERLAP};
    };
    ItemPair x = first_pair(2 * place), y = first_pair(2 * place + 1);
#pragma unroll 1
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        const unsigned gain = sweep == SWEEPS - 1;  // equals are exchanged too, but for the last time around
#pragma unroll 1
        for (int reach = places; reach > 0; reach /= 2) {
#pragma unroll 1
            for (int meeting = 1; meeting <= reach; ++meeting) {
                meet(shared, x, y, gain);
                y = from_lane(y, meeting == reach ? reach / 2 : meeting & -meeting);
            }
            const bool upper = place & reach / 2;
            const ItemPair other = from_lane({upper ? x.items : y.items, upper ? x.overlap : y.overlap}, reach / 2);
            x = upper ? other : x;
            y = upper ? y : other;
        }
    }
    unsigned overlap = x.overlap + y.overlap;
#pragma unroll 1
    for (int step = places / 2; step > 0; step /= 2) overlap += __shfl_xor_sync(ALL_LANES, overlap, step);
    const unsigned earliest = 31 - start, best = __reduce_max_sync(ALL_LANES, overlap * 32 + earliest) % 32;
    const unsigned lowers = __reduce_or_sync(ALL_LANES, earliest == best ? lower_bit(x) | lower_bit(y) : 0);
    if (earliest == best) {
        settle(scratch, stretch, x, lowers);
        settle(scratch, stretch, y, lowers);
    }
    __syncwarp();
}

/// What the pairs of a stretch selected: the bits of the next level's items.
__device__ __forceinline__ void join(WindowScratch& scratch, const Stretch& stretch) {
    const int item = stretch.begin / 2 + threadIdx.x % 16;
    if (threadIdx.x % 16 >= stretch.items / 2) return;
    const uchar2 pair = scratch.pairs_of(stretch.level)[item];
    const unsigned (*bits)[BITS_STRIDE] = scratch.bits_of(stretch.level);
    unsigned (*joined)[BITS_STRIDE] = scratch.bits_of(stretch.level + 1);
#pragma unroll 4
    for (int word = threadIdx.x % 32 / 16; 32 * (word & ~7) < scratch.pages; word += 2)
        joined[item][word] = bits[pair.x][word] | bits[pair.y][word];
}

/// The whole search, by the block; `warp` is known to the compiler to be one for all lanes. Rows past the last
/// whole quad, and a last quad without a partner, keep their places.
__device__ __forceinline__ void search_by_matching(WindowScratch& scratch, int size, int warp) {
#pragma unroll 1
    for (int level = 0; level < LEVELS; ++level) {
        const Stretch stretch(level, warp);
        if (stretch.begin < items_of(level)) {
            count_shared(scratch, stretch);
            arrange(scratch, stretch, (size / 4 * 2 >> level) - stretch.begin / 2);
            if (level + 1 < LEVELS) join(scratch, stretch);
        }
        __syncthreads();
    }
    if (warp == 0) {
#pragma unroll
        for (int slot = threadIdx.x; slot < COLUMNS; slot += 32) {
            int item = slot >> LEVELS;
#pragma unroll
            for (int level = LEVELS - 1; level >= 0; --level) {
                const uchar2 pair = scratch.pairs_of(level)[item];
                item = slot >> level & 1 ? pair.y : pair.x;
            }
            scratch.pick[slot] = item;
        }
    }
    cp_async_wait_all();  // of fetch_row
    __syncthreads();
}
