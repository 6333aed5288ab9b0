// What the metadata kernels hand to the attention kernels. A *task* is TASK_QUERIES consecutive
// execution slots of one request in one KV head: the queries that walk one list of pages together.
#pragma once

#include "ptx.cuh"

constexpr int SLOTS = 16;  // slots a task record has room for, and bits in a membership mask

/// One page of a task's union. Bit s of `members` says that slot s selected the page and sees a token of it.
struct PageRecord {
    int row;  // physical row of the paged cache
    unsigned short logical;
    unsigned short members;
};

/// One slot of a task. An unused slot has query -1 and sees nothing.
struct SlotRecord {
    int query;    // original query row: where Q is read and the output written
    int visible;  // tokens it may see: min(seq_len, position + 1)
};

/// One task. Its pages are the first `pages` entries of its stretch of page records, by ascending logical page.
/// Tasks past a head's last are unused: no pages, no queries.
struct alignas(16) TaskRecord {
    int pages;
    int queries;
    int kv_head;
    int request;
    SlotRecord slots[SLOTS];
};

static_assert(sizeof(PageRecord) == 8, "fetched as one 8-byte word");
static_assert(sizeof(TaskRecord) == 144, "fetched as nine 16-byte words");

constexpr int BUCKETS = 32;         // of tasks by their work: a lane of a warp holds one
constexpr unsigned TURN = 1u << 31; // what the blocks of one metadata launch add to `turns` together

/// The tasks in use, most work first, as persistent blocks take them: `task_order` has room for all tasks in each
/// bucket, and here is how many it holds. Launches take turns with two sets of counts, so that a launch
/// finds its own empty and no block has to wait for the last one. All zero before the first launch.
struct alignas(8) TaskQueue {
    unsigned count[BUCKETS][2];
    unsigned next;   // tasks handed out; 0 between launches
    unsigned turns;  // its top bit is the set of the launch that runs, or comes next
};

/// One more of a count that other blocks take from too; what it was.
/// NOTE: not atomicAdd: ptxas makes one of a warp's and waits for the result on the spot, where other loads could go
/// out. Nor atomicInc up to 2^32, which it takes for the same.
__device__ __forceinline__ unsigned take_one(unsigned* count) { return atomicInc(count, 0x7fffffffu); }

/// What an attention kernel takes beside the tensor map of the keys, which is 8-bit and 4-D:
/// {channel, token, KV head, physical row}, box {128, 128, 1, 1}, 128-byte swizzle.
struct AttentionParams {
    const uint8_t* q;        // [total_q, Hq, 128] bf16
    uint8_t* out;            // [total_q, Hq, 128] bf16
    const uint8_t* values;   // V^T images, one for each (physical row, KV head): see pack_values.cuh
    const TaskRecord* task_records;
    const PageRecord* page_records;
    const int* task_order;   // [BUCKETS, tasks], for persistent blocks alone
    TaskQueue* queue;        // likewise
    int64_t query_bytes;     // from one query row of q and out to the next
    int tasks;               // task records, unused ones included
    int kv_heads;
    int record_stride;       // page records from one task to the next
    float scale_log2;        // softmax_scale * k_scale * log2(e)
    float v_scale;
};
