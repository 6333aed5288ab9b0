// How a consumer warpgroup of pageweaver walks a task: which pages are its own, where they lie in the
// ring, when they may be read and released.
#pragma once

/// One page of the walk, alike in all lanes.
struct Page {
    uint32_t fill;  // counts the pages copied by this CTA since the kernel began
    int logical;
    int members;  // this tile's four bits of the membership mask; 0 = the tile has no more pages in this task
    uint32_t keys;  // low word of K's descriptor: made a turn ahead, where its way through the uniform unit costs nothing
    uint32_t stage, full, phase;  // the `full` barriers complete their phase of this parity when K, and V^T, are there
};

__device__ __forceinline__ Page page_of(const Shared& shared, uint32_t fill, uint32_t place) {
    const uint32_t stage = place >> 20 & 7;
    return {fill, static_cast<int>(place & 0xffff), static_cast<int>(place >> 16 & 15),
            static_cast<uint32_t>(swizzle128_descriptor(shared.stage_address(stage))), stage, place >> 23 & 15,
            place >> 27};
}

/// What a warp needs of a task beside its pages, alike in all lanes.
struct Owner {
    int query, head, seen;
};

__device__ __forceinline__ Owner owner_of(const TaskRecord* task, int group) {
    const SlotRecord slot = task->slots[group * TILE_QUERIES + (threadIdx.x & 127) / 32];
    return {static_cast<int>(uniform(slot.query)), static_cast<int>(uniform(task->kv_head)),
            static_cast<int>(uniform(slot.visible))};
}

// NOTE: a barrier tells phases apart by parity alone, and this warpgroup skips some, so the phase before a page's must
// be known to be over. It belonged to the page FILLS = 2 * STAGES earlier. Copies begin in the order K, V^T, page by
// page, each when what lay in its place STAGES pages earlier has been read. A page whose K is there has therefore seen
// every K and, but for its own place, every V^T end that is STAGES or more pages older; and one that it may be held for
// (may_hold) is at most STAGES ahead of it.

/// Waits until K of a page may be read that V^T of the last one may be held for.
__device__ __forceinline__ void wait_keys(const Shared& shared, const Page& page) {
    mbarrier_wait(shared.keys_full(page.full), page.phase);
}

/// Waits until V^T of a page may be read whose K was.
__device__ __forceinline__ void wait_values(const Shared& shared, const Page& page) {
    mbarrier_wait(shared.values_full(page.full), page.phase);
}

/// Whether neither wait_values for `page` nor wait_keys for `after` would wait: one answer for the warp.
__device__ __forceinline__ bool both_ready(const Shared& shared, const Page& page, const Page& after) {
    const bool values = mbarrier_test_wait(shared.values_full(page.full), page.phase);
    const bool keys = mbarrier_test_wait(shared.keys_full(after.full), after.phase);
    return __all_sync(0xffffffff, values && keys);
}

/// Whether the copy of K of a page has begun, which proves the phase before of the page's barriers over. The count of
/// copies begun is the one word that is read while it may be written.
__device__ __forceinline__ bool copy_begun(const Shared& shared, const Page& page) {
    uint32_t issued = 0;
    if ((threadIdx.x & 31) == 0) issued = atom_or_shared(shared.issued(), 0);
    return static_cast<int>(uniform(issued) - page.fill) > 0;
}

/// Waits until K of a page may be read, whichever was the last one.
__device__ __forceinline__ void wait_first(const Shared& shared, const Page& page) {
    while (!copy_begun(shared, page)) continue;
    wait_keys(shared, page);
}

/// Whether V^T of `page` may be held while K of `after` is waited for.
/// NOTE: before a page more than STAGES ahead comes one whose V^T needs this one's place: holding it would wait forever.
__device__ __forceinline__ bool may_hold(const Page& page, const Page& after) {
    return after.members != 0 && after.fill - page.fill <= STAGES;
}

/// This warp has read K of the page for the last time.
__device__ __forceinline__ void release_keys(const Shared& shared, const Page& page) {
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(shared.keys_free(page.stage));
}

/// This warp has read V^T of the page for the last time.
__device__ __forceinline__ void release_values(const Shared& shared, const Page& page) {
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(shared.values_free(page.stage));
}

/// Barrier of one consumer warpgroup. NOTE: constants, since a run-time id would reserve all barriers.
__device__ __forceinline__ void warpgroup_sync(int group) {
    if (group == 0)
        bar_sync<1, 128>();
    else
        bar_sync<2, 128>();
}

/// Loads the Q tile of task 0, as stream_queries leaves it to the consumers.
__device__ __forceinline__ void load_first_queries(const Shared& shared, const AttentionParams& params, int group) {
    const int warp = (threadIdx.x & 127) / 32;
    load_queries<8>(shared, params, shared.task(0), group, 0, warp * GROUP_HEADS, (warp + 1) * GROUP_HEADS);
    warpgroup_sync(group);
}

/// Waits for the Q tile of task n, which is not the first.
__device__ __forceinline__ void wait_queries(const Shared& shared, int n) {
    mbarrier_wait(shared.q_full(n % Q_BUFFERS), ((n - 1) / Q_BUFFERS) & 1);
}

/// Whether neither wait_queries for task n nor wait_first for a page of it would wait: one answer for the warp.
__device__ __forceinline__ bool first_ready(const Shared& shared, int n, const Page& page) {
    const bool begun = copy_begun(shared, page);
    const bool queries = mbarrier_test_wait(shared.q_full(n % Q_BUFFERS), ((n - 1) / Q_BUFFERS) & 1);
    const bool keys = mbarrier_test_wait(shared.keys_full(page.full), page.phase);
    return __all_sync(0xffffffff, begun && queries && keys);
}

/// The thread is done with task n's Q tile, record and page list.
__device__ __forceinline__ void release_task(const Shared& shared, int n) {
    mbarrier_arrive(shared.q_free(n % Q_BUFFERS));
    mbarrier_arrive(shared.task_free(n % TASK_BUFFERS));
}

/// Where the warp's 16 output rows lie.
__device__ __forceinline__ uint8_t* output_of(const AttentionParams& params, const Owner& owner) {
    return params.out + owner.query * params.query_bytes + owner.head * (GROUP_HEADS * HEAD_DIM * 2);
}

/// Stores the output of the warp's query, if it has one.
__device__ __forceinline__ void store_output(const AttentionParams& params, const Rows& rows, const Owner& owner) {
    if (owner.query >= 0) store_rows(rows, output_of(params, owner), params.v_scale);
}

/// The pages of one task that this warpgroup's queries selected, from the list that stream_tasks made.
/// A step is read a page ahead of its use, so that its way from shared memory costs no time.
struct Walk {
    const Step* list;
    Step upcoming;

    __device__ __forceinline__ Walk(const Shared& shared, int n, int group)
        : list(shared.steps(n % TASK_BUFFERS, group)), upcoming(*list) {}

    __device__ __forceinline__ Page next(const Shared& shared) {
        // Broadcast, so that what is made of a page is one for the warp to the compiler too: branches need no
        // reconvergence, and descriptors live in uniform registers.
        const Page page = page_of(shared, uniform(upcoming.fill), uniform(upcoming.place));
        if (page.members != 0) ++list;  // the end is read again and again
        upcoming = *list;
        return page;
    }
};

/// A task for one tile.
struct TileTask {
    bool none;  // it follows the last one: nothing else of it is valid, but that its walk has no pages
    Owner owner;
    Walk walk;
};

/// Waits for task n.
__device__ __forceinline__ TileTask tile_task(const Shared& shared, int n, int group) {
    const TaskRecord* task = wait_task(shared, n);
    const bool none = static_cast<int>(uniform(task->queries)) == NO_MORE_TASKS;
    return {none, owner_of(task, group), Walk(shared, n, group)};
}
