// The search on its own, and the whole of a call's metadata in one launch: a window's groups become tasks
// (by matching: when all are found; greedy: while one warp goes on searching), and blocks beside it make the
// V^T images.
#ifndef TASK_QUERIES
#define TASK_QUERIES GROUP
#endif
#include "window.cuh"
#if MATCHING
#include "matching.cuh"
#else
#include "greedy.cuh"
#endif

#include "tasks.cuh"

constexpr int BUSY = MATCHING ? 0 : 32 * (1 + EMITTERS);  // threads that are not idle while the chain goes on

/// TASK_QUERIES neighbours of the order as a task, by one warp. `slots` counts who selected each local page, two pages to a word.
__device__ __forceinline__ void emit_task(const PrepareParams& params, const Window& window, WindowScratch& scratch,
                                          unsigned* slots, int first_slot, int task) {
    const int lane = threadIdx.x % 32;
    const int queries = min(TASK_QUERIES, window.size - first_slot), pairs = (scratch.pages + 1) / 2;
    for (int pair = lane; pair < pairs; pair += 32) slots[pair] = 0;
    __syncwarp();
    for (int entry = lane; entry < queries * TOPK; entry += 32) {
        const int slot = entry / TOPK;
        const unsigned short page = scratch.page[scratch.pick[first_slot + slot]][entry % TOPK];
        if (page != NO_PAGE) atomicOr(&slots[page / 2], 1u << (slot + 16 * (page % 2)));
    }
    __syncwarp();

    const int* page_table = params.page_table + static_cast<int64_t>(window.request) * params.max_pages;
    PageRecord* records = params.page_records + static_cast<int64_t>(task) * TASK_IDS;
    const unsigned below = (1u << lane) - 1;
    int pages = 0, work = 0;
    for (int first = 0; first < pairs; first += 32) {
        const unsigned both = first + lane < pairs ? slots[first + lane] : 0;
        const unsigned members[2] = {both & 0xffff, both >> 16};
        const unsigned found[2] = {__ballot_sync(ALL_LANES, members[0] != 0), __ballot_sync(ALL_LANES, members[1] != 0)};
        int at = pages + __popc(found[0] & below) + __popc(found[1] & below);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (members[half] == 0) continue;
            const unsigned short logical = scratch.logical[2 * (first + lane) + half];
            records[at++] = {page_table[logical], logical, static_cast<unsigned short>(members[half])};
            work += tiles_of(members[half]);
        }
        pages += __popc(found[0]) + __popc(found[1]);
    }
    work = __reduce_add_sync(ALL_LANES, work);
    Listing listing = {};
    if (lane == 0 && params.queue) listing = take_place(params, scratch.turn, work);

    TaskRecord& record = params.task_records[task];
    if (lane < SLOTS) {
        const int query = lane < queries ? scratch.pick[first_slot + lane] : -1;
        record.slots[lane] = query < 0 ? SlotRecord{-1, 0} : SlotRecord{window.begin + query, scratch.visible[query]};
    }
    if (lane == 0) {
        record.pages = pages;
        record.queries = queries;
        record.kv_head = window.head;
        record.request = window.request;
        if (params.queue) listing.bucket[listing.place] = task;
    }
}

/// Marks the tasks that a head has room for and no query needs, by the warps that a serial search leaves idle.
__device__ __forceinline__ void clear_unused_tasks(const PrepareParams& params, int head, int used) {
    for (int task = used + threadIdx.x - BUSY; task < params.tasks_per_head; task += BLOCK - BUSY) {
        TaskRecord& record = params.task_records[head * params.tasks_per_head + task];
        record.pages = record.queries = record.request = 0;
        record.kv_head = head;
        for (SlotRecord& slot : record.slots) slot = {-1, 0};
    }
}

/// One window: lists its pages, decides its order, writes it out, and with `tasks` emits them too. `turn` is thread 0's.
__device__ __forceinline__ void regroup_window(const RegroupParams& params, const PrepareParams* tasks,
                                               const Window& window, int first_task, unsigned turn,
                                               unsigned char* shared) {
    WindowScratch& scratch = *reinterpret_cast<WindowScratch*>(shared);
    list_pages(params, window, scratch, reinterpret_cast<unsigned*>(shared + sizeof(WindowScratch)));
    if (threadIdx.x == 0) scratch.turn = turn;  // both ways on have a barrier
    const bool searched = params.gate <= 0 || worth_searching(params, window.size, scratch);
    if (!searched) {
        if (threadIdx.x < window.size) scratch.pick[threadIdx.x] = threadIdx.x;
        __syncthreads();
    }
    // Broadcast, so that the compiler knows a warp to take one branch and keeps its collectives bare.
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
#if MATCHING
    if (searched) search_by_matching(scratch, window.size, warp);
    constexpr int SEARCHERS = 0;  // warps still busy
#else
    if (searched) build_table(scratch);
    if (warp == 0 && searched) search(scratch, window.size);
    constexpr int SEARCHERS = 1;
#endif
    if (warp < SEARCHERS || warp >= SEARCHERS + EMITTERS) return;
    int* order = params.order + static_cast<int64_t>(window.head) * params.total_q + window.begin;
    for (int task = warp - SEARCHERS; task * TASK_QUERIES < window.size; task += EMITTERS) {
        const int first = task * TASK_QUERIES, count = min(TASK_QUERIES, window.size - first);
#if !MATCHING
        if (searched) mbarrier_wait(smem_address(&scratch.decided[(first + count - 1) / GROUP]), 0);
#endif
        if (lane < count) order[first + lane] = window.begin + scratch.pick[first + lane];
        if (tasks) emit_task(*tasks, window, scratch, scratch.slots[warp - SEARCHERS], first, first_task + task);
    }
}

extern __shared__ uint4 dynamic[];

__device__ __forceinline__ void regroup_block(const RegroupParams& params, int block) {
    const Window window = find_window(params, block);
    if (window.request >= 0)
        regroup_window(params, nullptr, window, 0, 0, reinterpret_cast<unsigned char*>(dynamic));
}

__device__ __forceinline__ void plan_block(const RegroupParams& params, const PrepareParams& tasks, int block) {
    const auto tasks_of = [&](int request) {
        return divide_up(params.cu_seqlens_q[request + 1] - params.cu_seqlens_q[request], TASK_QUERIES);
    };
    const bool queued = tasks.queue != nullptr && threadIdx.x == 0;
    const unsigned turn = queued ? take_turn(tasks, block, params.kv_heads * params.windows_per_head) : 0;
    const Window window = find_window(params, block);
    if (window.request >= 0) {
        const int first_task = window.head * tasks.tasks_per_head + sum_before(window.request, tasks_of) +
                               window.ordinal * (WINDOW / TASK_QUERIES);
        regroup_window(params, &tasks, window, first_task, turn, reinterpret_cast<unsigned char*>(dynamic));
    }
    if (block % params.windows_per_head == 0 && threadIdx.x >= BUSY)
        clear_unused_tasks(tasks, window.head, sum_before(params.requests, tasks_of));
    if (queued && block == 0) open_next_turn(tasks, turn);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 4) regroup(const __grid_constant__ RegroupParams params) {
    wait_for_previous_kernel();
    release_next_kernel();
    regroup_block(params, blockIdx.x);
}

#if WINDOW % TASK_QUERIES == 0 && TASK_QUERIES % GROUP == 0
/// Search, task records and V^T images: everything ahead of attention. Windows first, the longer chain.
extern "C" __global__ void __launch_bounds__(BLOCK, 4)
    plan_and_pack(const __grid_constant__ RegroupParams params, const __grid_constant__ PrepareParams tasks,
                  const __grid_constant__ PackParams values) {
    wait_for_previous_kernel();
    release_next_kernel();
    const int windows = params.kv_heads * params.windows_per_head;
    if (blockIdx.x < windows)
        plan_block(params, tasks, blockIdx.x);
    else
        pack_beside(tasks, values, blockIdx.x - windows, dynamic);
}
#endif
