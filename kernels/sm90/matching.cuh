// The search by matching: pwbench.grouping.match, bit for bit. Rows are paired so that partners share many pages,
// then the pairs so, then the quads. Each time STARTS arrangements of pairs are improved by exchange side by side,
// each by a part of a warp that keeps it in registers, and the one that shares the most pages is kept. There is no
// serial chain of picks and no barrier among the meetings: one costs a shuffle of a pair and four table look-ups.
//
// What an item selected is a row of bits, one a local page, so that the tensor core counts what any two share.
// NOTE: one code for the three levels: a launch comes with nothing in the instruction cache.
#pragma once

#include "window.cuh"

static_assert(WINDOW <= 64, "rows of a window that one block pairs up");

// SWEEPS, STARTS and REACH are the oracle's.
constexpr int SWEEPS = 1;                  // times that all pairs meet
constexpr int STARTS_SHIFT = 3;
constexpr int STARTS = 1 << STARTS_SHIFT;  // arrangements that are improved side by side
constexpr int REACH = 32;                  // items that may become partners: rows of half a window, all pairs, all quads
constexpr int LEVELS = 3;                  // rows, pairs, quads
constexpr int EMITTERS = BLOCK / 32;       // warps that turn groups into tasks
constexpr int BITS_STRIDE = WINDOW_PAGES / 32 + 4;  // words; eight rows that are read together meet no bank twice
// Of pairs past the window's last. Their second item is no whole quad, so that an exchange with a pair that exists offers
// at most 64 + 48 pages.
constexpr unsigned ABSENT_OVERLAP = 127;
static_assert(COLUMNS == 2 * REACH, "two stretches of rows");
static_assert(STARTS * REACH / 8 % 32 == 0, "whole warps arrange quads");

/// Items of a level: rows, pairs of them, pairs of pairs.
__device__ __forceinline__ int items_of(int level) { return COLUMNS >> level; }

struct WindowScratch : WindowPages {
    alignas(16) unsigned bits[2 * COLUMNS - COLUMNS / 4][BITS_STRIDE];  // of rows, pairs and quads: what each selected
    unsigned char shared[2][REACH][REACH + 16];         // by stretch: pages that two items of the level in hand share
    unsigned short found[2][STARTS][REACH / 2];         // arrangements of a stretch: two items in a byte each
    int overlap[2][STARTS];                             // pages that the pairs of each share
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

    __device__ __forceinline__ void fetch_row(int page, const int* entry) {
        cp_async_4(smem_address(&physical[page]), entry);
    }
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

/// Pages that each two items of a level share that are in reach of each other: its bits times themselves.
__device__ __forceinline__ void count_shared(WindowScratch& scratch, int level, int warp) {
    // Tiles are 16 items by 8: two rows of four tiles a stretch, or of the quads one row of two.
    const int tiles = level == LEVELS - 1 ? 2 : 16 >> level;
    const int r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const unsigned (*bits)[BITS_STRIDE] = scratch.bits_of(level);
#pragma unroll 1
    for (int tile = warp; tile < tiles; tile += BLOCK / 32) {
        const int stretch = tile / 8, begin = stretch * REACH, row = tile / 4 % 2 * 16 + r, column = tile % 4 * 8;
        unsigned counts[4] = {};
        for (int word = t; 32 * (word - t) < scratch.pages; word += 8) {
            const unsigned (*rows)[BITS_STRIDE] = bits + begin + row, *columns = bits[begin + column + r];
            const unsigned a[4] = {rows[0][word], rows[8][word], rows[0][word + 4], rows[8][word + 4]};
            const unsigned b[2] = {columns[word], columns[word + 4]};
            mma_and_popc(counts, a, b);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<uchar2*>(&scratch.shared[stretch][row + 8 * half][column + 2 * t]) =
                make_uchar2(counts[2 * half], counts[2 * half + 1]);
    }
}

/// Two items, a byte each, and the pages that they share.
struct ItemPair {
    unsigned items, overlap;
};

using SharedPages = unsigned char[REACH + 16];

/// (a, b) meets (c, d): they become (a, c), (b, d) or (a, d), (c, b) if those share at least `gain` more pages.
__device__ __forceinline__ void meet(const SharedPages* shared, ItemPair& x, ItemPair& y, unsigned gain) {
    // Bytes of x's items, then of y's, for __byte_perm; byte 2 is zero.
    constexpr unsigned AB = 0x2210, CD = 0x2254, AC = 0x2240, BD = 0x2251, AD = 0x2250, CB = 0x2214;
    const unsigned a = x.items & 0xff, b = x.items >> 8, c = y.items & 0xff, d = y.items >> 8;
    const unsigned ac = shared[a][c], bd = shared[b][d], ad = shared[a][d], cb = shared[c][b];
    const unsigned straight = ac + bd, crossed = ad + cb;
    const bool direct = straight >= crossed, change = max(straight, crossed) >= x.overlap + y.overlap + gain;
    const unsigned into_x = !change ? AB : direct ? AC : AD, into_y = !change ? CD : direct ? BD : CB;
    x.overlap = !change ? x.overlap : direct ? ac : ad;
    y.overlap = !change ? y.overlap : direct ? bd : cb;
    const unsigned items = __byte_perm(x.items, y.items, into_x);
    y.items = __byte_perm(x.items, y.items, into_y);
    x.items = items;
}

__device__ __forceinline__ ItemPair from_lane(const ItemPair& pair, int distance) {
    return {__shfl_xor_sync(ALL_LANES, pair.items, distance), __shfl_xor_sync(ALL_LANES, pair.overlap, distance)};
}

/// Where a thread stands among those that arrange a level: a stretch of items in reach of each other takes STARTS groups of
/// as many threads as it has places, a quarter of its items.
struct Seat {
    int stretch, start, place, places;

    __device__ __forceinline__ explicit Seat(int level) {
        const int shift = level == LEVELS - 1 ? 2 : 3;  // of REACH / 4 places, or half as many
        static_assert(REACH / 4 == 1 << 3 && COLUMNS >> (LEVELS - 1) == REACH / 2, "places of the levels");
        places = 1 << shift;
        place = threadIdx.x & (places - 1);
        start = threadIdx.x >> shift & (STARTS - 1);
        stretch = threadIdx.x >> shift >> STARTS_SHIFT;
    }
};

/// Pairs of one stretch, of a level's first `pairs`.
__device__ __forceinline__ int pairs_in(int stretch, int pairs) {
    return min(max(pairs - stretch * (REACH / 2), 0), REACH / 2);
}

/// Improves STARTS arrangements of every stretch of a level, of which the first `pairs` pairs exist. A thread holds two
/// pairs, x and y. See _Arrangements in pwbench/grouping.py for who meets when.
__device__ __forceinline__ void arrange(WindowScratch& scratch, const Seat& seat, int pairs) {
    const SharedPages* shared = scratch.shared[seat.stretch];
    const int factor = 2 * seat.start + 1, inverse = factor * (2 - factor * factor);  // modulo 64
    const unsigned items = 2 * pairs_in(seat.stretch, pairs);
    auto first_pair = [&](int at) -> ItemPair {
        const unsigned first = 2 * (at * inverse & (2 * seat.places - 1));
        return {first | (first + 1) << 8, first < items ? shared[first][first + 1] : ABSENT_OVERLAP};
    };
    ItemPair x = first_pair(2 * seat.place), y = first_pair(2 * seat.place + 1);
#pragma unroll 1
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        const unsigned gain = sweep == SWEEPS - 1;  // equals are exchanged too, but for the last time around
#pragma unroll 1
        for (int reach = seat.places; reach > 0; reach /= 2) {
#pragma unroll 1
            for (int meeting = 1; meeting <= reach; ++meeting) {
                meet(shared, x, y, gain);
                y = from_lane(y, meeting == reach ? reach / 2 : meeting & -meeting);
            }
            const bool upper = seat.place & reach / 2;
            const ItemPair other = from_lane({upper ? x.items : y.items, upper ? x.overlap : y.overlap}, reach / 2);
            x = upper ? other : x;
            y = upper ? y : other;
        }
    }
    unsigned overlap = x.overlap + y.overlap;
    for (int step = seat.places / 2; step > 0; step /= 2) overlap += __shfl_xor_sync(ALL_LANES, overlap, step);
    if (seat.place == 0) scratch.overlap[seat.stretch][seat.start] = overlap;
    unsigned short* found = scratch.found[seat.stretch][seat.start];
    found[2 * seat.place] = x.items;
    found[2 * seat.place + 1] = y.items;
}

/// Keeps the arrangement of a stretch whose pairs share the most pages, the earliest of several, in the order of the
/// pairs' lower items, by one warp. Pairs past the last were never parted, and stay.
__device__ __forceinline__ void settle(WindowScratch& scratch, int level, int stretch) {
    const int lane = threadIdx.x % 32;
    const unsigned key = lane < STARTS ? scratch.overlap[stretch][lane] * STARTS + STARTS - 1 - lane : 0;
    const int best = STARTS - 1 - __reduce_max_sync(ALL_LANES, key) % STARTS;
    const bool listed = lane < min(REACH, items_of(level)) / 2;
    const unsigned found = listed ? scratch.found[stretch][best][lane] : 0;
    const int lower = min(found & 0xff, found >> 8), upper = max(found & 0xff, found >> 8);
    const unsigned bit = listed ? 1u << lower : 0, all = __reduce_or_sync(ALL_LANES, bit);
    const int begin = stretch * REACH;
    if (listed) scratch.pairs_of(level)[begin / 2 + __popc(all & (bit - 1))] = make_uchar2(begin + lower, begin + upper);
}

/// What the pairs of a level selected: the bits of the next level's items.
__device__ __forceinline__ void join(WindowScratch& scratch, int level) {
    const int item = threadIdx.x / 8;
    if (item >= items_of(level) / 2) return;
    static_assert(BLOCK / 8 >= COLUMNS / 2, "eight threads a pair");
    const uchar2 pair = scratch.pairs_of(level)[item];
    const unsigned (*bits)[BITS_STRIDE] = scratch.bits_of(level);
    for (int word = threadIdx.x % 8; 32 * (word & ~7) < scratch.pages; word += 8)
        scratch.bits_of(level + 1)[item][word] = bits[pair.x][word] | bits[pair.y][word];
}

/// The whole search, by the block; `warp` is known to the compiler to be one for all lanes. Rows past the last
/// whole quad, and a last quad without a partner, keep their places.
__device__ __forceinline__ void search_by_matching(WindowScratch& scratch, int size, int warp) {
#pragma unroll 1
    for (int level = 0; level < LEVELS; ++level) {
        const int stretches = level == 0 ? 2 : 1;
        count_shared(scratch, level, warp);
        __syncthreads();
        if (warp < STARTS * items_of(level) / 4 / 32) arrange(scratch, Seat(level), size / 4 * 2 >> level);
        __syncthreads();
        if (warp < stretches) settle(scratch, level, warp);
        __syncthreads();
        if (level == LEVELS - 1) break;
        join(scratch, level);
        __syncthreads();
    }
    if (threadIdx.x < COLUMNS) {
        int item = threadIdx.x >> LEVELS;
#pragma unroll
        for (int level = LEVELS - 1; level >= 0; --level) {
            const uchar2 pair = scratch.pairs_of(level)[item];
            item = threadIdx.x >> level & 1 ? pair.y : pair.x;
        }
        scratch.pick[threadIdx.x] = item;
    }
    cp_async_wait_all();  // of fetch_row
    __syncthreads();
}
