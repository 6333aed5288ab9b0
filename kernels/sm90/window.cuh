// One search window of one KV head: which local pages its queries selected, and the table that makes
// the greedy search (Algorithm 1 of the paper, without its limit of 512 pages) a short serial chain.
//
// table[i][j] is a 16-bit mask over the Top-K positions of query j: those whose page query i selected
// too. With left_j the positions of j whose page is not in U yet, |S_j \ U| is popc(left_j), and the
// pick of i is left_j &= ~table[i][j]: one row read, no union and no page ids inside the chain.
#pragma once

#include "metadata.cuh"

#ifndef WINDOW
#define WINDOW 128
#endif
#ifndef GROUP
#define GROUP 8
#endif

struct RegroupParams {
    const int* topk;          // [kv_heads, total_q, 16]
    const int* cu_seqlens_q;  // [requests + 1]
    const int* seq_lens;      // [requests]
    const int* positions;     // [total_q]
    int* order;               // [kv_heads, total_q]: the row that each slot executes
    int total_q;
    int requests;
    int max_pages;
    int kv_heads;
    int windows_per_head;
    float gate;               // windows whose neighbours' mean union is at most this stay as they are
};

constexpr int LANE_QUERIES = WINDOW <= 64 ? 2 : 4;
constexpr int COLUMNS = 32 * LANE_QUERIES;  // queries of the window, padded
constexpr int WORDS = COLUMNS / 32;         // of a page's member mask
constexpr int WINDOW_PAGES = COLUMNS * TOPK;
constexpr int GROUPS = (WINDOW + GROUP - 1) / GROUP;
constexpr int ROW_BYTES = 256;              // of the table: a row and a lane's columns make one address by bytes
static_assert(WINDOW >= 1 && WINDOW <= 128 && GROUP >= 1, "one warp holds the window");

constexpr unsigned short NO_PAGE = 0xffff;
constexpr int EMITTERS = 3;  // warps that turn finished groups into tasks while the search goes on

/// Dynamic shared memory; a bitmap and its prefix, sized by the page table's width, follow.
struct WindowScratch {
    union {
        unsigned members[WINDOW_PAGES][WORDS];       // by local page: which queries of the window selected it
        unsigned short table[COLUMNS][ROW_BYTES / 2];
    };
    unsigned short page[COLUMNS][TOPK];              // local page at each Top-K position; repeats are NO_PAGE
    unsigned short logical[WINDOW_PAGES];            // by local page, ascending
    unsigned slots[EMITTERS][WINDOW_PAGES / 2];      // by pair of local pages: members among a task's slots
    int visible[COLUMNS];
    int pick[COLUMNS];                               // query at each slot
    uint64_t decided[GROUPS];                        // barrier of each group: its picks are made
    int pages;
    int neighbour_pages;
    unsigned turn;                                   // of the launch, for the tasks emitted (tasks.cuh)
    int warp_totals[BLOCK / 32];
};
static_assert(sizeof(WindowScratch::members) <= sizeof(WindowScratch::table), "one place for both");
static_assert(sizeof(WindowScratch) <= COLUMNS * (ROW_BYTES + 168) + 64 + 8 * GROUPS, "as the host reckons it");

/// A window's place in the call. request < 0: there is no such window.
struct Window {
    int head, request, ordinal, begin, size;
};

__device__ __forceinline__ Window find_window(const RegroupParams& params, int block) {
    Window window;
    window.head = block / params.windows_per_head;
    const Place place = locate(params.requests, block % params.windows_per_head, [&](int request) {
        return divide_up(params.cu_seqlens_q[request + 1] - params.cu_seqlens_q[request], WINDOW);
    });
    window.request = place.request;
    window.ordinal = place.ordinal;
    if (place.request >= 0) {
        window.begin = params.cu_seqlens_q[place.request] + place.ordinal * WINDOW;
        window.size = min(WINDOW, params.cu_seqlens_q[place.request + 1] - window.begin);
    }
    return window;
}

/// Ranks the window's pages, marks which queries selected each, and notes every query's local pages.
__device__ __forceinline__ void list_pages(const RegroupParams& params, const Window& window, WindowScratch& scratch,
                                           unsigned* bitmap) {
    constexpr int ENTRIES = (WINDOW_PAGES / 4 + BLOCK - 1) / BLOCK;  // int4 of ids a thread takes
    const int words = divide_up(params.max_pages, 32);
    unsigned short* before = reinterpret_cast<unsigned short*>(bitmap + words);
    int ids[ENTRIES][4];
    const int64_t first_row = static_cast<int64_t>(window.head) * params.total_q + window.begin;
    const int length = params.seq_lens[window.request];
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        const int query = (threadIdx.x + e * BLOCK) / 4;
        int4 four = make_int4(-1, -1, -1, -1);
        int visible = 0;
        if (query < window.size) {
            four = __ldg(reinterpret_cast<const int4*>(params.topk + (first_row + query) * TOPK) + threadIdx.x % 4);
            visible = visible_tokens(length, params.positions[window.begin + query]);
            if (threadIdx.x % 4 == 0) scratch.visible[query] = visible;
        }
        ids[e][0] = four.x, ids[e][1] = four.y, ids[e][2] = four.z, ids[e][3] = four.w;
#pragma unroll
        for (int& id : ids[e]) id = page_visible(id, visible, params.max_pages) ? id : -1;
    }
    for (int word = threadIdx.x; word < words; word += BLOCK) bitmap[word] = 0;
    for (int at = threadIdx.x; at < WINDOW_PAGES * WORDS / 4; at += BLOCK)
        reinterpret_cast<uint4*>(scratch.members)[at] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < GROUPS) mbarrier_init(smem_address(&scratch.decided[threadIdx.x]), 1);
    if (threadIdx.x == 0) scratch.neighbour_pages = 0;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e)
#pragma unroll
        for (int id : ids[e])
            if (id >= 0) atomicOr(&bitmap[id / 32], 1u << id % 32);
    __syncthreads();

    const int pages = rank_pages(bitmap, before, words, scratch.warp_totals);
    if (threadIdx.x == 0) scratch.pages = pages;
    __syncthreads();

    auto local_page = [&](int id) { return before[id / 32] + __popc(bitmap[id / 32] & ((1u << id % 32) - 1)); };
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        const int query = (threadIdx.x + e * BLOCK) / 4;
        if (query >= COLUMNS) break;
        unsigned short local[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            local[i] = NO_PAGE;
            if (ids[e][i] < 0) continue;
            const int page = local_page(ids[e][i]);
            const unsigned bit = 1u << query % 32;
            // The first to set the bit keeps the page: a repeated id counts once.
            if (!(atomicOr(&scratch.members[page][query / 32], bit) & bit)) local[i] = page;
        }
        *reinterpret_cast<ushort4*>(&scratch.page[query][threadIdx.x % 4 * 4]) =
            make_ushort4(local[0], local[1], local[2], local[3]);
    }
    for (int id = threadIdx.x; id < params.max_pages; id += BLOCK)
        if (bitmap[id / 32] >> id % 32 & 1) scratch.logical[local_page(id)] = id;
    __syncthreads();
}

/// Whether the window can gain enough to be searched: mean |S_j u S_(j+1)| above the gate.
__device__ __forceinline__ bool worth_searching(const RegroupParams& params, int size, WindowScratch& scratch) {
    const int query = threadIdx.x;
    int sum = 0;
    if (query < size) {
        int own = 0, shared = 0;
        for (int position = 0; position < TOPK; ++position) {
            const unsigned short page = scratch.page[query][position];
            if (page == NO_PAGE) continue;
            ++own;
            if (query + 1 < size) shared += scratch.members[page][(query + 1) / 32] >> (query + 1) % 32 & 1;
        }
        sum = own * ((query > 0) + (query + 1 < size)) - shared;
    }
    sum = __reduce_add_sync(ALL_LANES, sum);
    if (query % 32 == 0) atomicAdd(&scratch.neighbour_pages, sum);
    __syncthreads();
    return scratch.neighbour_pages > params.gate * (size - 1);
}

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
