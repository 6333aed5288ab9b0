// How a consumer warpgroup of pageweaver walks a task: which pages are its own, where they lie in the
// ring, when they may be read and released.
#pragma once

/// One page of the walk. `fill` counts the pages copied by this CTA since the kernel began.
struct Page {
    uint32_t fill;
    int task;     // counts the tasks of this CTA; -1 = the walk has ended
    int logical;
    int members;  // this tile's four bits of the membership mask; 0 = the task has no page of this tile
    uint32_t stage, phase;
};

/// What a warp needs of a task beside its pages.
struct Owner {
    int query, head, seen;
};

__device__ __forceinline__ Owner owner_of(const Shared& shared, int n, int group) {
    const TaskRecord* task = shared.task(n % TASK_BUFFERS);
    const SlotRecord slot = task->slots[group * TILE_QUERIES + (threadIdx.x & 127) / 32];
    return {slot.query, task->kv_head, slot.visible};
}

/// Waits until a page may be read. `issued` is how many copies this warp knows to have begun.
/// NOTE: a barrier tells phases apart by parity alone, and this warpgroup skips some. That the page's own
/// copy has begun proves the stage's earlier phase over: only then is the parity unambiguous.
__device__ __forceinline__ void wait_page(const Shared& shared, uint32_t& issued, const Page& page) {
    while (static_cast<int>(issued - page.fill) <= 0) issued = uniform(*shared.issued());
    mbarrier_wait(shared.page_full(page.stage), page.phase);
}

/// Whether `page` may be held while `after` is waited for.
/// NOTE: a page STAGES or more fills ahead needs a stage at or behind this one: holding it would wait forever.
__device__ __forceinline__ bool may_hold(const Page& page, const Page& after) {
    return after.members != 0 && after.task == page.task && after.fill - page.fill < STAGES;
}

/// This warp has read the page for the last time.
__device__ __forceinline__ void release_page(const Shared& shared, const Page& page) {
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(shared.page_free(page.stage));
}

/// Barrier of one consumer warpgroup. NOTE: constants, since a run-time id would reserve all barriers.
__device__ __forceinline__ void warpgroup_sync(int group) {
    if (group == 0)
        bar_sync<1, 128>();
    else
        bar_sync<2, 128>();
}

/// Waits for the Q tile of task n; loads the first one itself (see stream_queries).
__device__ __forceinline__ void wait_queries(const Shared& shared, const AttentionParams& params, int n, int group) {
    const int warp = (threadIdx.x & 127) / 32, buffer = n % Q_BUFFERS;
    if (n == 0) {
        load_queries<8>(shared, params, shared.task(0), group, buffer, warp * GROUP_HEADS, (warp + 1) * GROUP_HEADS);
        warpgroup_sync(group);
    } else {
        mbarrier_wait(shared.q_full(buffer), ((n - 1) / Q_BUFFERS) & 1);
    }
}

/// The warp is done with task n's Q tile, record and page list.
__device__ __forceinline__ void release_task(const Shared& shared, int n) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
        mbarrier_arrive(shared.q_free(n % Q_BUFFERS));
        mbarrier_arrive(shared.task_free(n % TASK_BUFFERS));
    }
}

/// Where the warp's 16 output rows lie.
__device__ __forceinline__ uint8_t* output_of(const AttentionParams& params, const Owner& owner) {
    return params.out + owner.query * params.query_bytes + owner.head * (GROUP_HEADS * HEAD_DIM * 2);
}

/// The warp is done with task n: lets its Q tile, record and page list go, and stores its query's output.
__device__ __forceinline__ void finish_task(const Shared& shared, const AttentionParams& params, const Rows& rows,
                                            const Owner& owner, int n) {
    release_task(shared, n);
    if (owner.query >= 0) store_rows(rows, output_of(params, owner), params.v_scale);
}

/// The pages that this warpgroup's queries selected, task after task. All lanes hold the same state.
/// NOTE: a task without any is handed out as a page without members, not finished on the way: that waits
/// for its Q tile, whose place the task still in hand may occupy.
struct Walk {
    const Shared& shared;
    int group;
    int task = -1;            // the task being walked
    int pages = 0;            // of it
    int batch = 0;            // first page of the 32 that `mine` holds, one a lane
    uint32_t first_fill = 0;  // of the task
    uint32_t mine = 0;        // logical id and membership mask
    uint32_t live = 0;        // lanes whose page is this tile's and still to come
    bool met = true;          // the task has been handed out at least once

    __device__ __forceinline__ void load() {
        const int at = batch + static_cast<int>(threadIdx.x & 31);
        mine = at < pages ? shared.page_list(task % TASK_BUFFERS)[at].y : 0;
        live = __ballot_sync(0xffffffff, ((mine >> (16 + group * TILE_QUERIES)) & 15) != 0);
    }

    __device__ __forceinline__ Page next() {
        uint32_t word = 0, fill = 0;
        int of = task;
        while (uniform(live) == 0) {
            batch += 32;
            if (batch < pages) {
                load();
            } else if (!met) {
                break;
            } else {
                first_fill += pages;
                const TaskRecord* record = wait_task(shared, ++task);
                const bool ended = record->queries < 0;
                of = ended ? -1 : task;
                pages = ended ? 0 : record->pages;
                batch = 0;
                met = ended;
                load();
                if (ended) break;
            }
        }
        met = true;
        if (live != 0) {
            const int lane = __ffs(live) - 1;
            live &= live - 1;
            word = __shfl_sync(0xffffffff, mine, lane);
            fill = first_fill + batch + lane;
        }
        // Broadcast here, behind every branch: what is made of a page is one for the warp to the compiler too.
        word = uniform(word), fill = uniform(fill), of = uniform(of);
        const int members = (word >> (16 + group * TILE_QUERIES)) & 15;
        return {fill, of, static_cast<int>(word & 0xffff), members, fill % STAGES, (fill / STAGES) & 1};
    }
};
