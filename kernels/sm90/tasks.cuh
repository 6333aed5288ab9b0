// Task records, their order of work, and the parameters of the kernels that make them.
#pragma once

#include "pack_values.cuh"

#ifndef TASK_QUERIES
#define TASK_QUERIES 8
#endif
static_assert(TASK_QUERIES >= 1 && TASK_QUERIES <= SLOTS, "slots of a task record");

struct PrepareParams {
    const int* topk;          // [kv_heads, total_q, 16]
    const int* order;         // [kv_heads, total_q], or null: the original order
    const int* page_table;    // [requests, max_pages]
    const int* cu_seqlens_q;  // [requests + 1]
    const int* seq_lens;      // [requests]
    const int* positions;     // [total_q]
    TaskRecord* task_records;
    PageRecord* page_records; // [tasks, 16 * TASK_QUERIES]
    int* next_task;           // set to 0 for the attention kernel
    int* task_work;           // [tasks] scratch, or null: no task_order wanted
    int* task_order;          // [tasks] by descending work, then index
    int* finished;            // blocks so far; 0 between launches
    int total_q;
    int requests;
    int max_pages;            // at most 65536: logical ids are 16 bits wide in the records
    int kv_heads;
    int tasks_per_head;
};

// With PACK_SELECTED the fused launches make the images of selected pages alone.
#ifndef PACK_SELECTED
#define PACK_SELECTED 0
#endif

constexpr int TASK_IDS = TASK_QUERIES * TOPK;
constexpr int SUBGROUP = 4;             // slots of one tensor-core tile
constexpr int LARGEST_WORK = TASK_IDS;  // no selection costs a tile more than one page
constexpr int WARPS = BLOCK / 32;

/// Tiles that a page costs: subgroups of four slots with a member.
__device__ __forceinline__ int tiles_of(unsigned members) {
    int tiles = 0;
#pragma unroll
    for (int low = 0; low < TASK_QUERIES; low += SUBGROUP) tiles += (members >> low & ((1 << SUBGROUP) - 1)) != 0;
    return tiles;
}

struct SortScratch {
    int start[LARGEST_WORK + 1][WARPS];  // tasks of each work and warp, then where they go
    int warp_totals[WARPS];
    bool last;
};

constexpr int SORT_LOADS = 8;  // tasks a lane looks at together, so that their loads overlap

/// Ranks of tasks first, first + 32, ...: the more work, the lower; -1 from `end` on.
__device__ __forceinline__ void load_ranks(const PrepareParams& params, int first, int end, int (&ranks)[SORT_LOADS]) {
#pragma unroll
    for (int i = 0; i < SORT_LOADS; ++i)
        ranks[i] = first + 32 * i < end ? LARGEST_WORK - __ldcg(&params.task_work[first + 32 * i]) : -1;
}

/// Stable counting sort of all tasks by descending work, by one block: each warp owns a stretch of
/// tasks, so equal work keeps the tasks' order and every run gives the same permutation.
__device__ __forceinline__ void sort_tasks(const PrepareParams& params, int tasks, SortScratch& scratch) {
    auto& start = scratch.start;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int stretch = divide_up(divide_up(tasks, WARPS), 32) * 32;
    const int first = warp * stretch, end = min(first + stretch, tasks);
    for (int at = threadIdx.x; at < (LARGEST_WORK + 1) * WARPS; at += BLOCK) start[at / WARPS][at % WARPS] = 0;
    __syncthreads();
    int ranks[SORT_LOADS];
    for (int low = first; low < end; low += 32 * SORT_LOADS) {
        load_ranks(params, low + lane, end, ranks);
#pragma unroll
        for (int i = 0; i < SORT_LOADS; ++i)
            if (ranks[i] >= 0) atomicAdd(&start[ranks[i]][warp], 1);
    }
    __syncthreads();
    int begin = 0;
    for (int low = 0; low <= LARGEST_WORK; low += BLOCK) {
        const int rank = low + threadIdx.x;
        int own = 0, total = 0;
        if (rank <= LARGEST_WORK)
            for (int w = 0; w < WARPS; ++w) own += start[rank][w];
        int at = begin + block_prefix(own, scratch.warp_totals, total);
        if (rank <= LARGEST_WORK) {
            for (int w = 0; w < WARPS; ++w) {
                const int count = start[rank][w];
                start[rank][w] = at;
                at += count;
            }
        }
        begin += total;
        __syncthreads();
    }
    for (int low = first; low < end; low += 32 * SORT_LOADS) {
        // One stretch fits the registers for 1024 tasks: then they still hold its ranks.
        if (end - first > 32 * SORT_LOADS) load_ranks(params, low + lane, end, ranks);
#pragma unroll
        for (int i = 0; i < SORT_LOADS; ++i) {
            const int rank = ranks[i];
            const unsigned equal = __match_any_sync(ALL_LANES, rank);
            const int ahead = __popc(equal & ((1u << lane) - 1));
            int at = 0;
            if (rank >= 0) at = start[rank][warp];
            __syncwarp();
            if (rank >= 0) {
                params.task_order[at + ahead] = low + 32 * i + lane;
                if (ahead == 0) start[rank][warp] = at + __popc(equal);
            }
            __syncwarp();
        }
    }
}

/// Called by every block when its tasks are written: the one that comes last, of `blocks`, sorts them
/// all. `shared` is dynamic shared memory that nothing else is needed from any more.
__device__ __forceinline__ void finish_tasks(const PrepareParams& params, int blocks, void* shared) {
    if (params.task_work == nullptr) return;
    SortScratch& scratch = *static_cast<SortScratch*>(shared);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        scratch.last = atomicAdd(params.finished, 1) == blocks - 1;
    }
    __syncthreads();
    if (!scratch.last) return;
    __threadfence();
    if (threadIdx.x == 0) *params.finished = 0;
    sort_tasks(params, params.kv_heads * params.tasks_per_head, scratch);
}

/// The packing role of a fused launch.
__device__ __forceinline__ void pack_beside(const PrepareParams& tasks, const PackParams& values, int block,
                                            uint4* tile) {
#if PACK_SELECTED
    pack_selected_block(values, {tasks.topk, tasks.cu_seqlens_q, tasks.positions, tasks.total_q}, block, tile);
#else
    pack_block(values, block, tile);
#endif
}
