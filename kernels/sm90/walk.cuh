// How a consumer warpgroup of pageweaver walks a task: which pages are its own, where they lie in the
// ring, when they may be read and released.
#pragma once

/// One page of the walk. `fill` counts the pages copied by this CTA since the kernel began.
struct Page {
    uint32_t fill;
    int logical;
    int members;  // this tile's four bits of the membership mask; 0 = there is no such page
    __device__ int stage() const { return fill % STAGES; }
};

/// The pages of a task that this warpgroup's queries selected, in order. All lanes hold the same state.
struct Walk {
    const uint2* list;
    uint32_t first_fill;
    int pages, group;
    int batch;       // first page of the 32 that `mine` holds, one a lane
    uint32_t mine;   // logical id and membership mask
    uint32_t live;   // lanes whose page is this tile's and still to come

    __device__ __forceinline__ void load() {
        const int at = batch + static_cast<int>(threadIdx.x & 31);
        mine = at < pages ? list[at].y : 0;
        live = __ballot_sync(0xffffffff, ((mine >> (16 + group * TILE_QUERIES)) & 15) != 0);
    }

    __device__ __forceinline__ Page next() {
        while (live == 0) {
            batch += 32;
            if (batch >= pages) return {0, 0, 0};
            load();
        }
        const int lane = __ffs(live) - 1;
        live &= live - 1;
        const uint32_t word = __shfl_sync(0xffffffff, mine, lane);
        return {first_fill + batch + lane, static_cast<int>(word & 0xffff),
                static_cast<int>((word >> (16 + group * TILE_QUERIES)) & 15)};
    }
};

__device__ __forceinline__ Walk begin_walk(const Shared& shared, int n, int pages, int group, uint32_t first_fill) {
    Walk walk{shared.page_list(n % TASK_BUFFERS), first_fill, pages, group, 0, 0, 0};
    walk.load();
    return walk;
}

/// Waits until a page may be read.
/// NOTE: a barrier tells phases apart by parity alone, and this warpgroup skips some. The count of
/// copies begun proves that the stage's earlier phase is over: only then is the parity unambiguous.
__device__ __forceinline__ void wait_page(const Shared& shared, const Page& page) {
    while (static_cast<int>(*shared.issued() - page.fill) <= 0) {
    }
    mbarrier_wait(shared.page_full(page.stage()), (page.fill / STAGES) & 1);
}

/// Whether `page` may be held while `after` is waited for.
/// NOTE: a page STAGES or more fills ahead needs a stage at or behind this one: holding it would wait forever.
__device__ __forceinline__ bool may_hold(const Page& page, const Page& after) {
    return after.members != 0 && after.fill - page.fill < STAGES;
}

/// This warp has read the page for the last time.
__device__ __forceinline__ void release_page(const Shared& shared, const Page& page) {
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(shared.page_free(page.stage()));
}

/// Barrier of one consumer warpgroup. NOTE: constants, since a run-time id would reserve all barriers.
__device__ __forceinline__ void warpgroup_sync(int group) {
    if (group == 0)
        bar_sync<1, 128>();
    else if (group == 1)
        bar_sync<2, 128>();
    else
        bar_sync<3, 128>();
}

/// Waits for the Q tile of task n; loads the first one itself (see stream_queries).
__device__ __forceinline__ void wait_queries(const Shared& shared, const AttentionParams& params,
                                             const TaskRecord* task, int n, int group) {
    const int warp = (threadIdx.x & 127) / 32, buffer = n % Q_BUFFERS;
    if (n == 0) {
        load_queries<8>(shared, params, task, group, buffer, warp * GROUP_HEADS, (warp + 1) * GROUP_HEADS);
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

/// Normalises and stores the 16 rows of the warp's query; `total[i]` is the denominator of row r + 8i.
/// An empty support gives exactly zero.
__device__ __forceinline__ void store_query(const AttentionParams& params, const float* o, const float (&total)[2],
                                            int query, int head) {
    const int row = (threadIdx.x & 31) / 4;
    uint8_t* out = params.out + query * params.query_bytes + head * (GROUP_HEADS * HEAD_DIM * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i)
        store_row(out + (row + 8 * i) * (HEAD_DIM * 2), o, i, total[i] == 0 ? 0 : params.v_scale / total[i]);
}
