// The greedy search (Algorithm 1 of the paper, without its limit of 512 pages): one block searches one
// window of one KV head. All warps build a table, then one warp makes the serial chain of picks.
//
// table[i][j] is a 16-bit mask over the Top-K positions of query j: those whose page query i selected
// too. With left_j the positions of j whose page is not in U yet, |S_j \ U| is popc(left_j), and the
// pick of i is left_j &= ~table[i][j]: one row read, no union and no page ids inside the chain.
#include "pack_values.cuh"

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
    int windows_per_head;
    float gate;               // windows whose neighbours' mean union is at most this stay as they are
};

constexpr int LANE_QUERIES = WINDOW <= 64 ? 2 : 4;
constexpr int COLUMNS = 32 * LANE_QUERIES;  // queries of the window, padded
constexpr int WORDS = COLUMNS / 32;         // of a page's member mask
static_assert(WINDOW >= 1 && WINDOW <= 128 && GROUP >= 1, "one warp holds the window");

constexpr unsigned short NO_PAGE = 0xffff;

/// Dynamic shared memory; a bitmap and its prefix, sized by the page table's width, follow.
struct WindowScratch {
    union {
        unsigned members[COLUMNS * TOPK][WORDS];     // by local page: which queries of the window selected it
        unsigned short table[COLUMNS][COLUMNS];
    };
    alignas(16) unsigned short page[COLUMNS][TOPK];  // local page at each Top-K position; repeats are NO_PAGE
    int warp_totals[BLOCK / 32];
    int neighbour_pages;
};
static_assert(sizeof(WindowScratch::members) == sizeof(WindowScratch::table), "one place for both");

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

/// Ranks the window's pages, marks which queries selected each, and notes every query's local pages.
__device__ __forceinline__ void list_pages(const RegroupParams& params, int head, int begin, int size, int length,
                                           WindowScratch& scratch, unsigned* bitmap, unsigned short* before) {
    constexpr int ENTRIES = COLUMNS * TOPK / 4 / BLOCK + (COLUMNS * TOPK / 4 % BLOCK != 0);  // int4 a thread
    const int words = divide_up(params.max_pages, 32);
    for (int word = threadIdx.x; word < words; word += BLOCK) bitmap[word] = 0;
    for (int at = threadIdx.x; at < COLUMNS * TOPK * WORDS; at += BLOCK) scratch.members[at / WORDS][at % WORDS] = 0;
    if (threadIdx.x == 0) scratch.neighbour_pages = 0;

    int ids[ENTRIES][4];
    const int64_t head_row = static_cast<int64_t>(head) * params.total_q + begin;
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        const int query = (threadIdx.x + e * BLOCK) / 4;
        int4 four = make_int4(-1, -1, -1, -1);
        int visible = 0;
        if (query < size) {
            four = reinterpret_cast<const int4*>(params.topk + (head_row + query) * TOPK)[threadIdx.x % 4];
            visible = visible_tokens(length, params.positions[begin + query]);
        }
        ids[e][0] = four.x, ids[e][1] = four.y, ids[e][2] = four.z, ids[e][3] = four.w;
#pragma unroll
        for (int& id : ids[e]) id = page_visible(id, visible, params.max_pages) ? id : -1;
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e)
#pragma unroll
        for (int id : ids[e])
            if (id >= 0) atomicOr(&bitmap[id / 32], 1u << id % 32);
    __syncthreads();

    const int each = divide_up(words, BLOCK);
    const int first = threadIdx.x * each, end = min(first + each, words);
    int own = 0, pages = 0;
    for (int word = first; word < end; ++word) own += __popc(bitmap[word]);
    int rank = block_prefix(own, scratch.warp_totals, pages);
    for (int word = first; word < end; ++word) {
        before[word] = rank;
        rank += __popc(bitmap[word]);
    }
    __syncthreads();

#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        const int query = (threadIdx.x + e * BLOCK) / 4;
        if (query >= COLUMNS) break;
        unsigned short local[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int id = ids[e][i];
            local[i] = NO_PAGE;
            if (id < 0) continue;
            const int page = before[id / 32] + __popc(bitmap[id / 32] & ((1u << id % 32) - 1));
            const unsigned bit = 1u << query % 32;
            // The first to set the bit keeps the page: a repeated id counts once.
            if (!(atomicOr(&scratch.members[page][query / 32], bit) & bit)) local[i] = page;
        }
        *reinterpret_cast<ushort4*>(&scratch.page[query][threadIdx.x % 4 * 4]) =
            make_ushort4(local[0], local[1], local[2], local[3]);
    }
    __syncthreads();
}

/// Whether the window can gain enough to be searched: mean |S_j u S_(j+1)| above the gate.
__device__ __forceinline__ bool worth_searching(const RegroupParams& params, int size, WindowScratch& scratch) {
    const int query = threadIdx.x;
    if (query < size) {
        int own = 0, shared = 0;
        for (int position = 0; position < TOPK; ++position) {
            const unsigned short page = scratch.page[query][position];
            if (page == NO_PAGE) continue;
            ++own;
            if (query + 1 < size) shared += scratch.members[page][(query + 1) / 32] >> (query + 1) % 32 & 1;
        }
        atomicAdd(&scratch.neighbour_pages, own * ((query > 0) + (query + 1 < size)) - shared);
    }
    __syncthreads();
    return scratch.neighbour_pages > params.gate * (size - 1);
}

/// Turns member masks into the table, in place. A thread takes 32 rows of one column.
__device__ __forceinline__ void build_table(WindowScratch& scratch) {
    constexpr int ITEMS = COLUMNS * WORDS / BLOCK + (COLUMNS * WORDS % BLOCK != 0);
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

/// LANE_QUERIES 16-bit masks, two to a word.
struct Masks {
    unsigned pair[LANE_QUERIES / 2];
};

__device__ __forceinline__ Masks read_row(const WindowScratch& scratch, int row) {
    Masks masks;
    const unsigned short* at = &scratch.table[row][threadIdx.x * LANE_QUERIES];
    if constexpr (LANE_QUERIES == 4) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(at);
        masks.pair[0] = pairs.x, masks.pair[1] = pairs.y;
    } else {
        masks.pair[0] = *reinterpret_cast<const unsigned*>(at);
    }
    return masks;
}

/// The serial chain, by one warp: lane l holds queries LANE_QUERIES * l and the ones after it.
__device__ __forceinline__ void search(const WindowScratch& scratch, int begin, int size, int* order) {
    constexpr unsigned TAKEN = 1u << 24;  // above every cost
    constexpr int COST = 16;              // key: cost above, query below, so that the lowest query wins a tie
    const int first = threadIdx.x * LANE_QUERIES;
    unsigned candidate[LANE_QUERIES];
    Masks all;
#pragma unroll
    for (int q = 0; q < LANE_QUERIES; ++q) {
        candidate[q] = first + q < size ? first + q : TAKEN;
        const unsigned own = scratch.table[first + q][first + q];
        all.pair[q / 2] = q % 2 ? all.pair[q / 2] | own << 16 : own;
    }
    for (int slot = 0; slot < size;) {
        const int stop = min(slot + GROUP, size);
        unsigned lowest = candidate[0];
#pragma unroll
        for (int q = 1; q < LANE_QUERIES; ++q) lowest = min(lowest, candidate[q]);
        unsigned key = __reduce_min_sync(ALL_LANES, lowest) | 1u << COST;  // the seed; its own pages are all new
        Masks left = all;
        while (true) {
            const int pick = key & ((1u << COST) - 1);
            if (threadIdx.x == 0) order[begin + slot] = begin + pick;
#pragma unroll
            for (int q = 0; q < LANE_QUERIES; ++q)
                if (first + q == pick) candidate[q] = TAKEN;
            if (++slot == stop) break;
            if (key >> COST) {  // a pick that costs nothing adds no page
                const Masks row = read_row(scratch, pick);
#pragma unroll
                for (int i = 0; i < LANE_QUERIES / 2; ++i) left.pair[i] &= ~row.pair[i];
            }
            unsigned best = TAKEN;
#pragma unroll
            for (int q = 0; q < LANE_QUERIES; ++q) {
                const unsigned mask = q % 2 ? left.pair[q / 2] >> 16 : left.pair[q / 2] & 0xffff;
                best = min(best, (static_cast<unsigned>(__popc(mask)) << COST) + candidate[q]);
            }
            key = __reduce_min_sync(ALL_LANES, best);
        }
    }
}

__device__ __forceinline__ void regroup_block(const RegroupParams& params, int block, unsigned char* shared) {
    WindowScratch& scratch = *reinterpret_cast<WindowScratch*>(shared);
    unsigned* bitmap = reinterpret_cast<unsigned*>(shared + sizeof(WindowScratch));
    unsigned short* before = reinterpret_cast<unsigned short*>(bitmap + divide_up(params.max_pages, 32));
    const int head = block / params.windows_per_head;
    const Place place = locate(params.requests, block % params.windows_per_head, [&](int request) {
        return divide_up(params.cu_seqlens_q[request + 1] - params.cu_seqlens_q[request], WINDOW);
    });
    if (place.request < 0) return;
    const int begin = params.cu_seqlens_q[place.request] + place.ordinal * WINDOW;
    const int size = min(WINDOW, params.cu_seqlens_q[place.request + 1] - begin);
    int* order = params.order + static_cast<int64_t>(head) * params.total_q;

    list_pages(params, head, begin, size, params.seq_lens[place.request], scratch, bitmap, before);
    if (params.gate > 0 && !worth_searching(params, size, scratch)) {
        if (threadIdx.x < size) order[begin + threadIdx.x] = begin + threadIdx.x;
        return;
    }
    build_table(scratch);
    if (threadIdx.x < 32) search(scratch, begin, size, order);
}

extern __shared__ uint4 dynamic[];

extern "C" __global__ void __launch_bounds__(BLOCK) regroup(const __grid_constant__ RegroupParams params) {
    wait_for_previous_kernel();
    release_next_kernel();
    regroup_block(params, blockIdx.x, reinterpret_cast<unsigned char*>(dynamic));
}

/// The search hides the V^T images behind it, or they it: windows first, since a window is the longer chain.
extern "C" __global__ void __launch_bounds__(BLOCK)
    regroup_and_pack(const __grid_constant__ RegroupParams params, const __grid_constant__ PackParams values) {
    wait_for_previous_kernel();
    release_next_kernel();
    const int windows = values.kv_heads * params.windows_per_head;
    if (blockIdx.x < windows)
        regroup_block(params, blockIdx.x, reinterpret_cast<unsigned char*>(dynamic));
    else
        pack_block(values, blockIdx.x - windows, dynamic);
}
