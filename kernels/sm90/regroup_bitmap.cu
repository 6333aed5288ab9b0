// The greedy search in the paper's form: a page bitmap of 16 words for each query, one thread a query,
// every cost counted anew at every pick. Kept as the reference that regroup.cu is measured against.
// A window that selects a page at or past CAPACITY stays as it is.
#include "window.cuh"

constexpr int CAPACITY = 512;
constexpr int BITMAP = CAPACITY / 32;
constexpr int THREADS = COLUMNS;

extern "C" __global__ void __launch_bounds__(THREADS)
    regroup_bitmap(const __grid_constant__ RegroupParams params) {
    __shared__ unsigned bitmap[BITMAP][THREADS];
    __shared__ unsigned covered[BITMAP];
    __shared__ unsigned best[THREADS / 32];
    wait_for_previous_kernel();
    release_next_kernel();
    const Window window = find_window(params, HeadWindow(params, blockIdx.x));
    if (window.request < 0) return;

    const int query = threadIdx.x;
    bool fits = true;
    for (unsigned(&word)[THREADS] : bitmap) word[query] = 0;
    if (query < window.size) {
        const int64_t row = static_cast<int64_t>(window.head) * params.total_q + window.begin + query;
        const int visible = visible_tokens(params.seq_lens[window.request], params.positions[window.begin + query]);
        for (int position = 0; position < TOPK; ++position) {
            const int id = params.topk[row * TOPK + position];
            if (!page_visible(id, visible, params.max_pages)) continue;
            fits &= id < CAPACITY;
            if (id < CAPACITY) bitmap[id / 32][query] |= 1u << id % 32;
        }
    }
    unsigned own[BITMAP];
#pragma unroll
    for (int word = 0; word < BITMAP; ++word) own[word] = bitmap[word][query];

    int* order = params.order + static_cast<int64_t>(window.head) * params.total_q + window.begin;
    if (!__syncthreads_and(fits)) {
        if (query < window.size) order[query] = window.begin + query;
        return;
    }
    constexpr unsigned TAKEN = 1u << 16;
    unsigned candidate = query < window.size ? query : TAKEN;  // key: cost above, query below
    for (int slot = 0; slot < window.size; ++slot) {
        const bool seed = slot % GROUP == 0;
        unsigned cost = 0;
        if (!seed) {
#pragma unroll
            for (int word = 0; word < BITMAP; ++word) cost += __popc(own[word] & ~covered[word]);
        }
        const unsigned lowest = __reduce_min_sync(ALL_LANES, (cost << 8) + candidate);
        if (query % 32 == 0) best[query / 32] = lowest;
        __syncthreads();
        unsigned key = best[0];
#pragma unroll
        for (int warp = 1; warp < THREADS / 32; ++warp) key = min(key, best[warp]);
        if (query == (key & 0xff)) {
            candidate = TAKEN;
            order[slot] = window.begin + query;
#pragma unroll
            for (int word = 0; word < BITMAP; ++word) covered[word] = seed ? own[word] : covered[word] | own[word];
        }
        __syncthreads();
    }
}
