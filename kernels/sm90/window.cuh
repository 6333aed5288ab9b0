// One search window of one KV head: which local pages its queries selected.
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
};

constexpr int COLUMNS = WINDOW <= 64 ? 64 : 128;  // queries of the window, padded
constexpr int WINDOW_PAGES = COLUMNS * TOPK;
constexpr int GROUPS = (WINDOW + GROUP - 1) / GROUP;
static_assert(WINDOW >= 1 && WINDOW <= 128 && GROUP >= 1, "one warp holds the window");

/// What either search notes of its window in dynamic shared memory, beside what is its own; a bitmap and its
/// prefix, sized by the page table's width, follow.
struct WindowPages {
    unsigned short logical[WINDOW_PAGES];  // by local page, ascending
    int visible[COLUMNS];
    alignas(16) int pick[COLUMNS];         // query at each slot
    int pages;
    unsigned turn;                         // of the launch, for the tasks emitted (tasks.cuh)
    int warp_totals[BLOCK / 32];
};

/// A window's place in the call. request < 0: there is no such window.
struct Window {
    int head, request, ordinal, begin, size;
};

/// A block's KV head and which of its windows it takes.
struct HeadWindow {
    int head, index;

    // NOTE: by subtraction; a division would come ahead of the first load, and there are few heads.
    __device__ __forceinline__ HeadWindow(const RegroupParams& params, int block) : head(0), index(block) {
        for (; index >= params.windows_per_head; index -= params.windows_per_head) ++head;
    }
};

__device__ __forceinline__ Window find_window(const RegroupParams& params, const HeadWindow& at) {
    Window window;
    window.head = at.head;
    const Place place = locate(params.requests, at.index, [&](int request) {
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

/// Asks for the ids and positions of a window before its request is known, as if the call were one request: whatever
/// the answer, the rows are near and a neighbour wants them.
__device__ __forceinline__ void prefetch_window(const RegroupParams& params, const HeadWindow& at) {
    const int row = at.index * WINDOW + 2 * static_cast<int>(threadIdx.x);
    if (threadIdx.x >= WINDOW / 2 || row >= params.total_q) return;
    // A line of 128 bytes: two rows of ids, or 32 positions.
    prefetch_global_l2(params.topk + (static_cast<int64_t>(at.head) * params.total_q + row) * TOPK);
    if (threadIdx.x % 16 == 0) prefetch_global_l2(params.positions + row);
}

/// Ranks the window's pages and tells `scratch` of them: clear() while the ids are on their way; then select(query,
/// quarter, pages) for every four ids of a query's Top-K, -1 where one is no visible page; and fetch_row(page, entry of
/// the page table) for every page, if there is a page table.
template <typename Scratch>
__device__ __forceinline__ void list_pages(const RegroupParams& params, const int* page_table, const Window& window,
                                           Scratch& scratch, unsigned* bitmap) {
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
    scratch.clear();
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
        int local[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) local[i] = ids[e][i] < 0 ? -1 : local_page(ids[e][i]);
        scratch.select(query, threadIdx.x % 4, local);
    }
    for (int id = threadIdx.x; id < params.max_pages; id += BLOCK) {
        if (!(bitmap[id / 32] >> id % 32 & 1)) continue;
        const int page = local_page(id);
        scratch.logical[page] = id;
        if (page_table) scratch.fetch_row(page, page_table + id);
    }
    __syncthreads();
}
