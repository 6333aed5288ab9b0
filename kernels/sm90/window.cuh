// One search window of one KV head: which local pages its queries selected.
#pragma once

#include "metadata.cuh"

#ifndef WINDOW
#define WINDOW 128
#endif
#ifndef GROUP
#define GROUP 8
#endif
#ifndef MATCHING
#define MATCHING 0  // the search: by matching (matching.cuh) or greedy (greedy.cuh)
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
// Warps that turn groups into tasks: while the greedy search goes on, or all of them after the matching.
constexpr int EMITTERS = MATCHING ? BLOCK / 32 : 3;
#ifndef MATCHING_STARTS
#define MATCHING_STARTS 8
#endif
constexpr int STARTS = MATCHING_STARTS;  // arrangements that the matching improves side by side, as many as its oracle

/// What the search by matching notes. Rows of the tables of shared pages are padded, so that those of
/// neighbouring items begin in different banks.
struct MatchingScratch {
    alignas(16) unsigned char shared_of_rows[COLUMNS][COLUMNS + 16];
    alignas(16) unsigned char shared_of_pairs[COLUMNS / 2][COLUMNS / 2 + 16];
    unsigned members_of_pairs[WINDOW_PAGES];  // by local page: which pairs have a row that selected it
    unsigned found[STARTS][COLUMNS / 2];      // arrangements: pairs in the format of matching.cuh
    int overlap[STARTS];                      // pages shared by the pairs of each
    uchar2 pairs[COLUMNS / 2];                // rows of each pair, the lower first
    unsigned char pair_of[COLUMNS];
};

/// Dynamic shared memory; a bitmap and its prefix, sized by the page table's width, follow.
struct WindowScratch {
#if MATCHING
    union {
        struct {
            unsigned members[WINDOW_PAGES][WORDS];
            MatchingScratch matching;
        };
        unsigned slots[EMITTERS][WINDOW_PAGES / 2];
    };
#else
    union {
        unsigned members[WINDOW_PAGES][WORDS];       // by local page: which queries of the window selected it
        unsigned short table[COLUMNS][ROW_BYTES / 2];
    };
    unsigned slots[EMITTERS][WINDOW_PAGES / 2];      // by pair of local pages: members among a task's slots
#endif
    unsigned short page[COLUMNS][TOPK];              // local page at each Top-K position; repeats are NO_PAGE
    unsigned short logical[WINDOW_PAGES];            // by local page, ascending
    int visible[COLUMNS];
    alignas(16) int pick[COLUMNS];                             // query at each slot
    uint64_t decided[GROUPS];                        // barrier of each group: its picks are made
    int pages;
    int neighbour_pages;
    unsigned turn;                                   // of the launch, for the tasks emitted (tasks.cuh)
    int warp_totals[BLOCK / 32];
};
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
