// Task records, their buckets by work, and the parameters of the kernels that make them.
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
    int* task_order;          // [BUCKETS, tasks]: tasks in use by descending work
    TaskQueue* queue;         // how many in each bucket, or null: no task_order wanted
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

/// A block's part in its launch's turn; each of the launch's `blocks` takes one, early and once. The top bit
/// of the result says which counts are this launch's: the parts add up to TURN, whatever `blocks` is, so that the
/// last one turns the bit over. Read ahead of the block's own part, it cannot have turned yet.
/// NOTE: not what atomicAdd returns: ptxas combines a warp's atomics and waits for the result on the spot.
__device__ __forceinline__ unsigned take_turn(const PrepareParams& params, int block, int blocks) {
    const unsigned turn = *static_cast<const volatile unsigned*>(&params.queue->turns);
    atomicAdd(&params.queue->turns, block == 0 ? TURN - (blocks - 1) : 1u);
    return turn;
}

/// A place in `task_order`.
struct Listing {
    int* bucket;
    unsigned place;
};

/// The place of one more task of this much work, 0 to LARGEST_WORK.
__device__ __forceinline__ Listing take_place(const PrepareParams& params, unsigned turn, int work) {
    const int bucket = (LARGEST_WORK - work) * BUCKETS / (LARGEST_WORK + 1);
    const int64_t room = static_cast<int64_t>(params.kv_heads) * params.tasks_per_head;
    return {params.task_order + bucket * room, take_one(&params.queue->count[bucket][turn / TURN])};
}

/// Leaves everything ready for the launches that follow: the attention kernel's counter, and the counts of the next
/// metadata launch, which whoever wanted the last one's has read by now. By one thread of a launch.
__device__ __forceinline__ void open_next_turn(const PrepareParams& params, unsigned turn) {
    params.queue->next = 0;
    for (auto& count : params.queue->count) count[1 - turn / TURN] = 0;
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
