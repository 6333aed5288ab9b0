// Union preparation: one block gathers the Top-K rows of one task's slots through the execution order,
// drops ids that are no visible page, and emits the task's pages by ascending logical id with their
// membership masks. Pages are ranked by a bitmap over the page table's width: mark, count, rank.
#include "tasks.cuh"

/// Dynamic shared memory, `bitmap` and `before` sized by the page table's width.
struct UnionScratch {
    PageRecord pages[BLOCK];
    int members[BLOCK];
    int warp_totals[WARPS];
    int work;
};
static_assert(sizeof(UnionScratch) <= 12 * BLOCK + 64, "as the host reckons it");

/// One task, by the whole block; `turn` is thread 0's.
__device__ __forceinline__ void prepare_task(const PrepareParams& params, int task, unsigned turn, UnionScratch& scratch,
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

    const int pages = rank_pages(bitmap, before, words, scratch.warp_totals);
    __syncthreads();

    if (valid) {
        const int rank = before[id / 32] + __popc(bitmap[id / 32] & ((1u << id % 32) - 1));
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
        tiles = tiles_of(page.members);
    }
    if (params.queue == nullptr || queries == 0) return;
    tiles = __reduce_add_sync(ALL_LANES, tiles);
    if (threadIdx.x % 32 == 0 && tiles) atomicAdd(&scratch.work, tiles);
    __syncthreads();
    if (threadIdx.x == 0) {
        const Listing listing = take_place(params, turn, scratch.work);
        listing.bucket[listing.place] = task;
    }
}

/// Task `task` of a launch that has a block for each.
__device__ __forceinline__ void prepare_block(const PrepareParams& params, int task, unsigned char* shared) {
    UnionScratch& scratch = *reinterpret_cast<UnionScratch*>(shared);
    unsigned* bitmap = reinterpret_cast<unsigned*>(shared + sizeof(UnionScratch));
    unsigned short* before = reinterpret_cast<unsigned short*>(bitmap + divide_up(params.max_pages, 32));
    const bool queued = params.queue != nullptr && threadIdx.x == 0;
    const unsigned turn = queued ? take_turn(params, task, params.kv_heads * params.tasks_per_head) : 0;
    prepare_task(params, task, turn, scratch, bitmap, before);
    if (queued && task == 0) open_next_turn(params, turn);
}

extern __shared__ uint4 dynamic[];

extern "C" __global__ void __launch_bounds__(BLOCK) prepare(const __grid_constant__ PrepareParams params) {
    wait_for_previous_kernel();
    release_next_kernel();
    prepare_block(params, blockIdx.x, reinterpret_cast<unsigned char*>(dynamic));
}

// NOTE: left to itself ptxas squeezes the f16 form into 48 registers, for a fifth block an SM, and spills.
#if VALUE_BYTES == 1
#define BOUNDS __launch_bounds__(BLOCK)
#else
#define BOUNDS __launch_bounds__(BLOCK, 4)
#endif

/// Both in one launch, for the original order: the tasks first, the longer chain.
extern "C" __global__ void BOUNDS
    prepare_and_pack(const __grid_constant__ PrepareParams params, const __grid_constant__ PackParams values) {
    wait_for_previous_kernel();
    release_next_kernel();
    const int tasks = params.kv_heads * params.tasks_per_head;
    if (blockIdx.x < tasks)
        prepare_block(params, blockIdx.x, reinterpret_cast<unsigned char*>(dynamic));
    else
        pack_beside(params, values, blockIdx.x - tasks, dynamic);
}
