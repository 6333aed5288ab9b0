// Union preparation: one block gathers the Top-K rows of one task's slots through the execution order,
// drops ids that are no visible page, and emits the task's pages by ascending logical id with their
// membership masks. Pages are ranked by a bitmap over the page table's width: mark, count, rank.
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
    int* finished_tasks;      // one counter, 0 between launches
    int total_q;
    int requests;
    int max_pages;            // at most 65536: logical ids are 16 bits wide in the records
    int kv_heads;
    int tasks_per_head;
};

constexpr int TASK_IDS = TASK_QUERIES * TOPK;
constexpr int SUBGROUP = 4;                                // slots of one tensor-core tile
constexpr int LARGEST_WORK = TASK_IDS;                     // no page costs a tile more than once
constexpr int WARPS = BLOCK / 32;

/// Dynamic shared memory, `bitmap` and `before` sized by the page table's width.
struct UnionScratch {
    PageRecord pages[BLOCK];
    int members[BLOCK];
    int warp_totals[WARPS];
    int work;
    bool last;
};

__device__ __forceinline__ void prepare_task(const PrepareParams& params, int task, UnionScratch& scratch,
                                             unsigned* bitmap, unsigned short* before) {
    const int words = divide_up(params.max_pages, 32);
    for (int word = threadIdx.x; word < words; word += BLOCK) bitmap[word] = 0;
    scratch.members[threadIdx.x] = 0;
    if (threadIdx.x == 0) scratch.work = 0;

    const int head = task / params.tasks_per_head;
    const Place place = locate(params.requests, task % params.tasks_per_head, [&](int request) {
        return divide_up(params.cu_seqlens_q[request + 1] - params.cu_seqlens_q[request], TASK_QUERIES);
    });
    const int slot = threadIdx.x / TOPK;
    int query = -1, visible = 0, id = -1, row = 0;
    int queries = 0;
    if (place.request >= 0) {
        const int begin = params.cu_seqlens_q[place.request] + place.ordinal * TASK_QUERIES;
        queries = min(TASK_QUERIES, params.cu_seqlens_q[place.request + 1] - begin);
        if (slot < queries) {
            const int64_t head_row = static_cast<int64_t>(head) * params.total_q;
            query = params.order ? params.order[head_row + begin + slot] : begin + slot;
            id = params.topk[(head_row + query) * TOPK + threadIdx.x % TOPK];
            visible = visible_tokens(params.seq_lens[place.request], params.positions[query]);
        }
    }
    const bool valid = page_visible(id, visible, params.max_pages);
    if (valid) row = params.page_table[static_cast<int64_t>(place.request) * params.max_pages + id];
    __syncthreads();

    if (valid) atomicOr(&bitmap[id / 32], 1u << id % 32);
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

    if (valid) {
        rank = before[id / 32] + __popc(bitmap[id / 32] & ((1u << id % 32) - 1));
        if (atomicOr(&scratch.members[rank], 1 << slot) == 0)
            scratch.pages[rank] = {row, static_cast<unsigned short>(id), 0};
    }
    __syncthreads();

    TaskRecord& record = params.task_records[task];
    if (threadIdx.x == 0) {
        record.pages = pages;
        record.queries = queries;
        record.kv_head = head;
        record.request = max(place.request, 0);
    }
    if (threadIdx.x % TOPK == 0 && slot < SLOTS) record.slots[slot] = {query, visible};
    int tiles = 0;
    if (threadIdx.x < pages) {
        PageRecord page = scratch.pages[threadIdx.x];
        page.members = scratch.members[threadIdx.x];
        params.page_records[static_cast<int64_t>(task) * TASK_IDS + threadIdx.x] = page;
        for (int low = 0; low < TASK_QUERIES; low += SUBGROUP) tiles += (page.members >> low & ((1 << SUBGROUP) - 1)) != 0;
    }
    if (params.task_work == nullptr) return;
    tiles = __reduce_add_sync(ALL_LANES, tiles);
    if (threadIdx.x % 32 == 0 && tiles) atomicAdd(&scratch.work, tiles);
    __syncthreads();
    if (threadIdx.x == 0) params.task_work[task] = scratch.work;
}

/// Stable counting sort of all tasks by descending work, by one block: each warp owns a stretch of
/// tasks, so equal work keeps the tasks' order and every run gives the same permutation.
__device__ __forceinline__ void sort_tasks(const PrepareParams& params, int tasks, int* warp_totals,
                                           int (*start)[WARPS]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int stretch = divide_up(divide_up(tasks, WARPS), 32) * 32;
    const int first = warp * stretch, end = min(first + stretch, tasks);
    for (int at = threadIdx.x; at < (LARGEST_WORK + 1) * WARPS; at += BLOCK) start[at / WARPS][at % WARPS] = 0;
    __syncthreads();
    for (int task = first + lane; task < end; task += 32)
        atomicAdd(&start[LARGEST_WORK - __ldcg(&params.task_work[task])][warp], 1);
    __syncthreads();
    int begin = 0;
    for (int low = 0; low <= LARGEST_WORK; low += BLOCK) {
        const int rank = low + threadIdx.x;
        int own = 0, total = 0;
        if (rank <= LARGEST_WORK)
            for (int w = 0; w < WARPS; ++w) own += start[rank][w];
        int at = begin + block_prefix(own, warp_totals, total);
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
    for (int task = first + lane; task - lane < end; task += 32) {
        const int rank = task < end ? LARGEST_WORK - __ldcg(&params.task_work[task]) : -1;
        const unsigned equal = __match_any_sync(ALL_LANES, rank);
        const int ahead = __popc(equal & ((1u << lane) - 1));
        int at = 0;
        if (rank >= 0) at = start[rank][warp];
        __syncwarp();
        if (rank >= 0) {
            params.task_order[at + ahead] = task;
            if (ahead == 0) start[rank][warp] = at + __popc(equal);
        }
        __syncwarp();
    }
}

/// Task `task`, and in the block that finishes last the order of all of them.
__device__ __forceinline__ void prepare_block(const PrepareParams& params, int task, unsigned char* shared) {
    UnionScratch& scratch = *reinterpret_cast<UnionScratch*>(shared);
    unsigned* bitmap = reinterpret_cast<unsigned*>(shared + sizeof(UnionScratch));
    unsigned short* before = reinterpret_cast<unsigned short*>(bitmap + divide_up(params.max_pages, 32));
    if (task == 0 && threadIdx.x == 0) *params.next_task = 0;
    prepare_task(params, task, scratch, bitmap, before);
    if (params.task_work == nullptr) return;

    const int tasks = params.kv_heads * params.tasks_per_head;
    if (threadIdx.x == 0) {
        __threadfence();
        scratch.last = atomicAdd(params.finished_tasks, 1) == tasks - 1;
    }
    __syncthreads();
    if (!scratch.last) return;
    __threadfence();
    if (threadIdx.x == 0) *params.finished_tasks = 0;
    __shared__ int start[LARGEST_WORK + 1][WARPS];
    sort_tasks(params, tasks, scratch.warp_totals, start);
}

extern __shared__ uint4 dynamic[];

extern "C" __global__ void __launch_bounds__(BLOCK) prepare(const __grid_constant__ PrepareParams params) {
    wait_for_previous_kernel();
    release_next_kernel();
    prepare_block(params, blockIdx.x, reinterpret_cast<unsigned char*>(dynamic));
}

/// Both in one launch, for the original order: the tasks first, since the order of tasks waits for the last.
extern "C" __global__ void __launch_bounds__(BLOCK)
    prepare_and_pack(const __grid_constant__ PrepareParams params, const __grid_constant__ PackParams values) {
    wait_for_previous_kernel();
    release_next_kernel();
    const int tasks = params.kv_heads * params.tasks_per_head;
    if (blockIdx.x < tasks)
        prepare_block(params, blockIdx.x, reinterpret_cast<unsigned char*>(dynamic));
    else
        pack_block(values, blockIdx.x - tasks, dynamic);
}
