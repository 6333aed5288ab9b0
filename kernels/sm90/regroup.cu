// The search on its own, and the whole of a call's metadata in one launch: a window's groups become tasks
// (by matching: when all are found; greedy: while one warp goes on searching), and blocks beside it make the
// V^T images.
#ifndef TASK_QUERIES
#define TASK_QUERIES GROUP
#endif
#include "tasks.cuh"

#ifndef MATCHING
#define MATCHING 0  // the search: by matching or greedy
#endif
#if MATCHING
#include "matching.cuh"
#else
#include "greedy.cuh"
#endif

constexpr int SEARCHERS = MATCHING ? 0 : 1;                 // warps still busy with the search while others emit
constexpr int BUSY = 32 * (SEARCHERS + EMITTERS) % BLOCK;  // threads that are not idle meanwhile

/// TASK_QUERIES neighbours of the order as a task, by one warp.
__device__ __forceinline__ void emit_task(const PrepareParams& params, const Window& window, WindowScratch& scratch,
                                          int emitter, int first_slot, int task) {
    const int lane = threadIdx.x % 32, queries = min(TASK_QUERIES, window.size - first_slot);
    const WindowScratch::Members members(scratch, emitter, first_slot, queries);
    const int work = members.work(scratch.pages);
    Listing listing = {};
    if (lane == 0 && params.queue) listing = take_place(params, scratch.turn, work);

    const int* page_table = params.page_table + static_cast<int64_t>(window.request) * params.max_pages;
    PageRecord* records = params.page_records + static_cast<int64_t>(task) * TASK_IDS;
    int pages = 0;
    for (int first = 0; first < scratch.pages; first += 32) {
        const int page = first + lane;
        const unsigned who = page < scratch.pages ? members.of(page) : 0;
        const unsigned found = __ballot_sync(ALL_LANES, who != 0);
        if (who)
            records[pages + __popc(found & ((1u << lane) - 1))] = {scratch.row_of(page, page_table), scratch.logical[page],
                                                                   static_cast<unsigned short>(who)};
        pages += __popc(found);
    }

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

/// Marks the tasks that a head has room for and no query needs, by the warps that a serial search leaves idle or,
/// after the one by matching, by all.
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
    const int* page_table = tasks ? tasks->page_table + static_cast<int64_t>(window.request) * params.max_pages : nullptr;
    list_pages(params, page_table, window, scratch, reinterpret_cast<unsigned*>(shared + sizeof(WindowScratch)));
    if (threadIdx.x == 0) scratch.turn = turn;  // both searches have a barrier
    // Broadcast, so that the compiler knows a warp to take one branch and keeps its collectives bare.
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
#if MATCHING
    search_by_matching(scratch, window.size, warp);
#else
    build_table(scratch);
    if (warp == 0) search(scratch, window.size);
#endif
    if (warp < SEARCHERS || warp >= SEARCHERS + EMITTERS) return;
    int* order = params.order + static_cast<int64_t>(window.head) * params.total_q + window.begin;
    for (int task = warp - SEARCHERS; task * TASK_QUERIES < window.size; task += EMITTERS) {
        const int first = task * TASK_QUERIES, count = min(TASK_QUERIES, window.size - first);
#if !MATCHING
        mbarrier_wait(smem_address(&scratch.decided[(first + count - 1) / GROUP]), 0);
#endif
        if (lane < count) order[first + lane] = window.begin + scratch.pick[first + lane];
        if (tasks) emit_task(*tasks, window, scratch, warp - SEARCHERS, first, first_task + task);
    }
}

extern __shared__ uint4 dynamic[];

__device__ __forceinline__ void regroup_block(const RegroupParams& params, int block) {
    const HeadWindow at(params, block);
    prefetch_window(params, at);
    const Window window = find_window(params, at);
    if (window.request >= 0)
        regroup_window(params, nullptr, window, 0, 0, reinterpret_cast<unsigned char*>(dynamic));
}

__device__ __forceinline__ void plan_block(const RegroupParams& params, const PrepareParams& tasks, int block) {
    const HeadWindow at(params, block);
    prefetch_window(params, at);
    const auto tasks_of = [&](int request) {
        return divide_up(params.cu_seqlens_q[request + 1] - params.cu_seqlens_q[request], TASK_QUERIES);
    };
    const bool queued = tasks.queue != nullptr && threadIdx.x == 0;
    const unsigned turn = queued ? take_turn(tasks, block, params.kv_heads * params.windows_per_head) : 0;
    const Window window = find_window(params, at);
    if (window.request >= 0) {
        const int first_task = window.head * tasks.tasks_per_head + sum_before(window.request, tasks_of) +
                               window.ordinal * (WINDOW / TASK_QUERIES);
        regroup_window(params, &tasks, window, first_task, turn, reinterpret_cast<unsigned char*>(dynamic));
    }
    if (at.index == 0 && static_cast<int>(threadIdx.x) >= BUSY)
        clear_unused_tasks(tasks, at.head, sum_before(params.requests, tasks_of));
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
