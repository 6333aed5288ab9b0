// What the kernels ahead of attention share: the operator's tables, what a query sees, and how a
// flat block index finds its request. Lengths may change in place between launches, so grids are
// bounds that depend on shapes alone and surplus blocks leave at once.
#pragma once

#include "records.cuh"

constexpr int PAGE_TOKENS = 128;
constexpr int TOPK = 16;
constexpr int BLOCK = 256;             // threads of every metadata block
constexpr unsigned ALL_LANES = 0xffffffffu;

#ifndef PROGRAMMATIC
#define PROGRAMMATIC 0
#endif

/// Under programmatic dependent launch: what came before this kernel is complete from here on.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if PROGRAMMATIC
    griddepcontrol_wait();
#endif
}

/// Under programmatic dependent launch: the next kernel may begin its prologue.
__device__ __forceinline__ void release_next_kernel() {
#if PROGRAMMATIC
    griddepcontrol_launch_dependents();
#endif
}

/// Tokens that the query at `position` of a request of `length` tokens may see.
__device__ __forceinline__ int visible_tokens(int length, int position) { return min(length - 1, position) + 1; }

/// Whether a selected id is a page with a visible token. Ids may be any 32-bit number.
__device__ __forceinline__ bool page_visible(int id, int visible, int max_pages) {
    return static_cast<unsigned>(id) < static_cast<unsigned>(max_pages) &&
           static_cast<int64_t>(id) * PAGE_TOKENS < visible;
}

/// A place in the list that every request extends by some number of items, in request order.
struct Place {
    int request;  // -1: past the last item
    int ordinal;  // item inside the request
};

/// The place of item `index`; `items(r)` of them belong to request r. Called by whole warps.
template <typename Items>
__device__ __forceinline__ Place locate(int requests, int index, Items items) {
    const int lane = threadIdx.x % 32;
    for (int first = 0; first < requests; first += 32) {
        const int own = first + lane < requests ? items(first + lane) : 0;
        int end = own;
        for (int step = 1; step < min(32, requests - first); step *= 2) {
            const int before = __shfl_up_sync(ALL_LANES, end, step);
            if (lane >= step) end += before;
        }
        const unsigned past = __ballot_sync(ALL_LANES, end > index);
        if (past) {
            const int hit = __ffs(past) - 1;
            return {first + hit, index - __shfl_sync(ALL_LANES, end - own, hit)};
        }
        index -= __shfl_sync(ALL_LANES, end, 31);
    }
    return {-1, 0};
}

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

/// Items of the requests ahead of `requests`. Called by whole warps.
template <typename Items>
__device__ __forceinline__ int sum_before(int requests, Items items) {
    int sum = 0;
    for (int request = threadIdx.x % 32; request < requests; request += 32) sum += items(request);
    return __reduce_add_sync(ALL_LANES, sum);
}

/// Exclusive prefix of `own` over the block's threads, and the block's total. One barrier; `scratch`
/// holds a word for each warp.
__device__ __forceinline__ int block_prefix(int own, int* scratch, int& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int end = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(ALL_LANES, end, step);
        if (lane >= step) end += before;
    }
    if (lane == 31) scratch[warp] = end;
    __syncthreads();
    int begin = end - own;
    total = 0;
#pragma unroll
    for (int w = 0; w < BLOCK / 32; ++w) {
        const int sum = scratch[w];
        if (w < warp) begin += sum;
        total += sum;
    }
    return begin;
}

/// Ranks the pages of a bitmap of `words` words: how many lie before each word, and how many there are.
/// By the whole block; the caller's barrier makes `before` readable.
__device__ __forceinline__ int rank_pages(const unsigned* bitmap, unsigned short* before, int words, int* scratch) {
    const int each = divide_up(words, BLOCK);
    const int first = threadIdx.x * each, end = min(first + each, words);
    int own = 0, pages = 0;
    for (int word = first; word < end; ++word) own += __popc(bitmap[word]);
    int rank = block_prefix(own, scratch, pages);
    for (int word = first; word < end; ++word) {
        before[word] = rank;
        rank += __popc(bitmap[word]);
    }
    return pages;
}
