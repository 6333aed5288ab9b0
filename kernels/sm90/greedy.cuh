// The greedy search (Algorithm 1 of the paper, without its limit of 512 pages) as a short serial chain over
// a table.
//
// table[i][j] is a 16-bit mask over the Top-K positions of query j: those whose page query i selected
// too. With left_j the positions of j whose page is not in U yet, |S_j \ U| is popc(left_j), and the
// pick of i is left_j &= ~table[i][j]: one row read, no union and no page ids inside the chain.
#pragma once

#include "window.cuh"

constexpr int LANE_QUERIES = COLUMNS / 32;
constexpr int WORDS = COLUMNS / 32;  // of a page's member mask
constexpr int ROW_BYTES = 256;       // of the table: a row and a lane's columns make one address by bytes
constexpr int EMITTERS = 3;          // warps that turn groups into tasks while the search goes on
constexpr unsigned short NO_PAGE = 0xffff;

struct WindowScratch : WindowPages {
    union {
        alignas(16) unsigned members[WINDOW_PAGES][WORDS];  // by local page: which queries of the window selected it
        unsigned short table[COLUMNS][ROW_BYTES / 2];
    };
    unsigned slots[EMITTERS][WINDOW_PAGES / 2];      // by pair of local pages: members among a task's slots
    unsigned short page[COLUMNS][TOPK];              // local page at each Top-K position; repeats are NO_PAGE
    uint64_t decided[GROUPS];                        // barrier of each group: its picks are made

    __device__ __forceinline__ void clear() {
        for (int at = threadIdx.x; at < WINDOW_PAGES * WORDS / 4; at += BLOCK)
            reinterpret_cast<uint4*>(members)[at] = make_uint4(0, 0, 0, 0);
        if (threadIdx.x < GROUPS) mbarrier_init(smem_address(&decided[threadIdx.x]), 1);
    }

    __device__ __forceinline__ void select(int query, int quarter, const int (&pages)[4]) {
        unsigned short local[4];
        const unsigned bit = 1u << query % 32;
#pragma unroll
        for (int i = 0; i < 4; ++i)  // the first to set the bit keeps the page: a repeated id counts once
            local[i] = pages[i] >= 0 && !(atomicOr(&members[pages[i]][query / 32], bit) & bit) ? pages[i] : NO_PAGE;
        *reinterpret_cast<ushort4*>(&page[query][4 * quarter]) = make_ushort4(local[0], local[1], local[2], local[3]);
    }

    // A task's page list is made while the search goes on: nobody waits for the page table.
    __device__ __forceinline__ void fetch_row(int, const int*) {}
    __device__ __forceinline__ int row_of(int local, const int* page_table) const { return page_table[logical[local]]; }

    /// Which of a task's slots selected each page, counted by one warp, and what tiles that costs.
    struct Members {
        const unsigned* slots;

        __device__ __forceinline__ Members(WindowScratch& scratch, int emitter, int first_slot, int queries)
            : slots(scratch.slots[emitter]) {
            const int lane = threadIdx.x % 32;
            unsigned* counted = scratch.slots[emitter];
            __syncwarp();  // the last task's members have been read
            for (int pair = lane; pair < (scratch.pages + 1) / 2; pair += 32) counted[pair] = 0;
            __syncwarp();
            for (int entry = lane; entry < queries * TOPK; entry += 32) {
                const int slot = entry / TOPK;
                const unsigned short page = scratch.page[scratch.pick[first_slot + slot]][entry % TOPK];
                if (page != NO_PAGE) atomicOr(&counted[page / 2], 1u << (slot + 16 * (page % 2)));
            }
            __syncwarp();
        }

        __device__ __forceinline__ int work(int pages) const {
            int work = 0;
            for (int page = threadIdx.x % 32; page < pages; page += 32) work += tiles_of(of(page));
            return __reduce_add_sync(ALL_LANES, work);
        }

        __device__ __forceinline__ unsigned of(int page) const { return slots[page / 2] >> 16 * (page % 2) & 0xffff; }
    };
};
static_assert(sizeof(WindowScratch::members) <= sizeof(WindowScratch::table), "one place for both");
static_assert(sizeof(WindowScratch) <= COLUMNS * (ROW_BYTES + 168) + 64 + 8 * GROUPS, "as the host reckons it");

/// Transposes the 16 x 16 bits in the low halves of 16 words, and those in the high halves.
__device__ __forceinline__ void transpose_bits(unsigned (&rows)[16]) {
    constexpr unsigned LOW[4] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu};
#pragma unroll
    for (int level = 0; level < 4; ++level) {
        const int step = 1 << level;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (i & step) continue;
            const unsigned swapped = (rows[i] >> step ^ rows[i + step]) & LOW[level];
            rows[i] ^= swapped << step;
            rows[i + step] ^= swapped;
        }
    }
}

/// Turns member masks into the table, in place. A thread takes 32 rows of one column.
__device__ __forceinline__ void build_table(WindowScratch& scratch) {
    constexpr int ITEMS = (COLUMNS * WORDS + BLOCK - 1) / BLOCK;
    unsigned rows[ITEMS][16];
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int at = threadIdx.x + item * BLOCK, column = at % COLUMNS, word = at / COLUMNS;
        if (word >= WORDS) continue;
#pragma unroll
        for (int position = 0; position < TOPK; ++position) {
            const unsigned short page = scratch.page[column][position];
            rows[item][position] = page == NO_PAGE ? 0 : scratch.members[page][word];
        }
    }
    __syncthreads();
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int at = threadIdx.x + item * BLOCK, column = at % COLUMNS, word = at / COLUMNS;
        if (word >= WORDS) continue;
        transpose_bits(rows[item]);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            scratch.table[32 * word + i][column] = rows[item][i];
            scratch.table[32 * word + 16 + i][column] = rows[item][i] >> 16;
        }
    }
    __syncthreads();
}

constexpr int COST = 8;  // a key's bits from here on are the cost, those below the query: the lowest query wins a tie

/// candidate + (popc(mask) << COST) for a 16-bit mask without POPC, of which an SM sub-partition starts one every eight
/// clocks: three bits of each nibble look up twice their count, the fourth looks up itself, times 128.
__device__ __forceinline__ unsigned add_cost(unsigned mask, unsigned candidate) {
    const unsigned three = __byte_perm(0x04020200, 0x06040402, mask & 0x7777);
    const unsigned fourth = __byte_perm(0x00000200, 0, mask >> 3 & 0x1111);
    return __dp4a(three, 0x80808080u, __dp4a(fourth, 0x80808080u, candidate));
}

/// The serial chain, by one warp: lane l holds queries LANE_QUERIES * l and the ones after it.
__device__ __forceinline__ void search(WindowScratch& scratch, int size) {
    constexpr unsigned TAKEN = 1u << 31;  // above every cost
    const int first = threadIdx.x * LANE_QUERIES;
    const unsigned columns = first * sizeof(scratch.table[0][0]);  // byte offset in a row, below 256
    const unsigned char* table = reinterpret_cast<const unsigned char*>(scratch.table);
    unsigned candidate[LANE_QUERIES], all[LANE_QUERIES / 2];
#pragma unroll
    for (int q = 0; q < LANE_QUERIES; ++q) {
        candidate[q] = first + q < size ? first + q : TAKEN;
        const unsigned own = scratch.table[first + q][first + q];
        all[q / 2] = q % 2 ? all[q / 2] | own << 16 : own;
    }
    for (int slot = 0, group = 0; slot < size; ++group) {
        const int stop = min(slot + GROUP, size);
        unsigned left[LANE_QUERIES / 2];
#pragma unroll
        for (int i = 0; i < LANE_QUERIES / 2; ++i) left[i] = all[i];
        unsigned lowest = candidate[0];
#pragma unroll
        for (int q = 1; q < LANE_QUERIES; ++q) lowest = min(lowest, candidate[q]);
        unsigned key = __reduce_min_sync(ALL_LANES, lowest);  // the seed
        while (true) {
            const unsigned char* row = table + __byte_perm(columns, key, 0x1140);  // key % 256 * ROW_BYTES + columns
            unsigned taken[LANE_QUERIES / 2];
            if constexpr (LANE_QUERIES == 4) {
                const uint2 pairs = *reinterpret_cast<const uint2*>(row);
                taken[0] = pairs.x, taken[1] = pairs.y;
            } else {
                taken[0] = *reinterpret_cast<const unsigned*>(row);
            }
            const int pick = key % (1u << COST);
            if (threadIdx.x == 0) scratch.pick[slot] = pick;
#pragma unroll
            for (int q = 0; q < LANE_QUERIES; ++q)
                if (first + q == pick) candidate[q] = TAKEN;
            if (++slot == stop) break;
            unsigned best = TAKEN;
#pragma unroll
            for (int i = 0; i < LANE_QUERIES / 2; ++i) {
                left[i] &= ~taken[i];
                const unsigned high = (static_cast<unsigned>(__popc(left[i] >> 16)) << COST) + candidate[2 * i + 1];
                best = min(best, min(add_cost(left[i] & 0xffff, candidate[2 * i]), high));
            }
            key = __reduce_min_sync(ALL_LANES, best);
        }
        if (threadIdx.x == 0) mbarrier_arrive(smem_address(&scratch.decided[group]));
    }
}
