// The service warps of pageweaver: tasks, pages and queries flow into shared memory ahead of the
// consumers, each through a ring of its own.
#pragma once

/// Lists the pages of a task for each tile that has a member.
__device__ __forceinline__ void list_steps(const Shared& shared, int buffer, int pages, uint32_t first_fill) {
    const int lane = threadIdx.x & 31;
    const uint2* list = shared.page_list(buffer);
    int steps[WARPGROUPS] = {};
    for (int first = 0; first < pages; first += 32) {
        const int at = first + lane;
        const uint32_t word = at < pages ? list[at].y : 0, fill = first_fill + at;
#pragma unroll
        for (int group = 0; group < WARPGROUPS; ++group) {
            const uint32_t members = word >> (16 + group * TILE_QUERIES) & ((1 << TILE_QUERIES) - 1);
            const uint32_t found = __ballot_sync(0xffffffff, members != 0);
            if (members)
                shared.steps(buffer, group)[steps[group] + __popc(found & ((1u << lane) - 1))] = {
                    fill, place_of(word & 0xffff, members, fill)};
            steps[group] += __popc(found);
        }
    }
#pragma unroll
    for (int group = 0; group < WARPGROUPS; ++group)
        if (lane == group) shared.steps(buffer, group)[steps[group]] = {0, 0};
}

/// Sends the Q rows of a task's slots on their way to L2. A lane holds word `lane` of the task's record.
__device__ __forceinline__ void prefetch_queries(const AttentionParams& params, uint32_t word) {
    constexpr int BYTES = GROUP_HEADS * HEAD_DIM * 2;
    const int lane = threadIdx.x & 31;
    const int head = __shfl_sync(0xffffffff, word, 2);
    const int query = __shfl_sync(0xffffffff, word, (FIRST_SLOT_WORD + 2 * lane) & 31);
    if (lane < WARPGROUPS * TILE_QUERIES && query >= 0)
        cp_async_bulk_prefetch_l2(params.q + query * params.query_bytes + head * BYTES, BYTES);
}

// A task's walk begins with its last page, unless its first query sees fewer tokens than this of the page where the query
// that sees most stands, as a rule the last: the largest of few logits says too little of those to come.
constexpr int TOKENS_TO_BEGIN_WITH = 32;

/// Where in its walk a task's page stands, by ascending logical id: from the last page to the first, since a query attends
/// most to what is near it, and the softmax is cheapest when its largest logits come first (see exponentiate).
struct WalkOrder {
    int last;
    bool swapped;  // the last but one goes first

    /// A lane holds word `lane` of the task's record.
    __device__ __forceinline__ explicit WalkOrder(uint32_t record_word) {
        const int lane = threadIdx.x & 31, word = static_cast<int>(record_word);
        constexpr int PAST_SLOTS = FIRST_SLOT_WORD + 2 * WARPGROUPS * TILE_QUERIES;
        const bool visible = lane % 2 == 1 && lane >= FIRST_SLOT_WORD && lane < PAST_SLOTS;
        const int most = __reduce_max_sync(0xffffffff, visible ? word : 0);
        const int first = __shfl_sync(0xffffffff, word, FIRST_SLOT_WORD + 1);
        last = __shfl_sync(0xffffffff, word, 0) - 1;
        swapped = last > 0 && first - (most - 1) / PAGE * PAGE < TOKENS_TO_BEGIN_WITH;
    }

    __device__ __forceinline__ int place_of(int page) const {
        return last - page < 2 ? (last - page) ^ swapped : last - page;
    }
};

/// Takes tasks from the queue, those with most work first, and publishes each with its page lists, as far
/// ahead as the ring allows. After the last one comes a record with queries = NO_MORE_TASKS.
__device__ __forceinline__ void stream_tasks(const Shared& shared, const AttentionParams& params) {
    const int lane = threadIdx.x & 31;
    TaskQueue& queue = *params.queue;
    unsigned next = 0;
    if (lane == 0) next = take_one(&queue.next);
    // Both sets at once, so as not to wait for the turn first.
    const uint2 counts = __ldcg(reinterpret_cast<const uint2*>(queue.count) + lane);
    const unsigned own = __ldcg(&queue.turns) / TURN ? counts.x : counts.y;  // the last turn's, not the next one's
    unsigned end = own;
#pragma unroll
    for (int step = 1; step < BUCKETS; step *= 2) {
        const unsigned before = __shfl_up_sync(0xffffffff, end, step);
        if (lane >= step) end += before;
    }
    const unsigned begin = end - own, total = __shfl_sync(0xffffffff, end, BUCKETS - 1);

    uint32_t first_fill = 0;
    for (int n = 0;; ++n) {
        next = __shfl_sync(0xffffffff, next, 0);
        const bool last = next >= total;
        // Every CTA asks once too often; the last to do so leaves the counter ready for the next launch.
        if (lane == 0 && next == total + gridDim.x - 1) queue.next = 0;
        uint32_t word = lane == 1 ? static_cast<uint32_t>(NO_MORE_TASKS) : 0u, tail = 0;
        uint2 list[TASK_PAGES / 32] = {};
        // Of buckets that begin alike all but the last are empty.
        const int bucket = __popc(__ballot_sync(0xffffffff, begin <= next)) - 1;
        const unsigned place = next - __shfl_sync(0xffffffff, begin, bucket);
        if (!last) {
            const int task = __ldcg(params.task_order + static_cast<int64_t>(bucket) * params.tasks + place);
            const uint32_t* words = reinterpret_cast<const uint32_t*>(params.task_records + task);
            const uint2* source =
                reinterpret_cast<const uint2*>(params.page_records) + static_cast<int64_t>(task) * params.record_stride;
            word = __ldg(words + lane);
            if (lane < TASK_WORDS - 32) tail = __ldg(words + 32 + lane);
            // The whole stretch, so as not to wait for the record first; nobody looks past the list's end.
#pragma unroll
            for (int i = 0; i < TASK_PAGES / 32; ++i) list[i] = __ldg(source + 32 * i + lane);
        }

        const int buffer = n % TASK_BUFFERS;
        mbarrier_wait(shared.task_free(buffer), ((n / TASK_BUFFERS) & 1) ^ 1);
        uint32_t* record = reinterpret_cast<uint32_t*>(shared.task(buffer));
        record[lane] = word;
        if (lane < TASK_WORDS - 32) record[32 + lane] = tail;
        const int pages = __shfl_sync(0xffffffff, word, 0);
        const WalkOrder order(word);
#pragma unroll
        for (int i = 0; i < TASK_PAGES / 32; ++i)
            if (32 * i + lane < pages) shared.page_list(buffer)[order.place_of(32 * i + lane)] = list[i];
        __syncwarp();
        list_steps(shared, buffer, pages, first_fill);
        first_fill += pages;
        mbarrier_arrive(shared.task_full(buffer));
        if (last) return;
        prefetch_queries(params, word);
        if (lane == 0) next = take_one(&queue.next);
    }
}

/// Copies the pages of every task into the ring, one thread. A warpgroup that skips a page never sees
/// its barriers: the thread arrives for it. `issued` counts the copies of K begun, see wait_first.
__device__ __forceinline__ void stream_pages(const Shared& shared, const TensorMap& keys, const AttentionParams& params) {
    if ((threadIdx.x & 31) != 0) return;
    fence_proxy_async_global();  // the images were written by ordinary stores, of a kernel that may just have ended
    uint32_t fill = 0;
    for (int n = 0;; ++n) {
        const TaskRecord* task = wait_task(shared, n);
        if (task->queries == NO_MORE_TASKS) return;
        const int pages = task->pages, head = task->kv_head;
        const uint2* list = shared.page_list(n % TASK_BUFFERS);
        for (int page = 0; page < pages; ++page, ++fill) {
            const uint2 record = list[page];
            const int s = fill % STAGES, f = fill % FILLS, free = fill / STAGES & 1 ^ 1;
            int absent = 0;
#pragma unroll
            for (int group = 0; group < WARPGROUPS; ++group)
                absent += ((record.y >> (16 + group * TILE_QUERIES)) & 15) == 0 ? TILE_WARPS : 0;
            const uint32_t stage = shared.stage_address(s);

            mbarrier_wait(shared.keys_free(s), free);
            if (absent) mbarrier_arrive_count(shared.keys_free(s), absent);
            mbarrier_arrive_expect_tx(shared.keys_full(f), KEYS_BYTES);
            cp_async_bulk_tensor_4d(stage, &keys, 0, 0, head, record.x, shared.keys_full(f));
            atom_exch_shared(shared.issued(), fill + 1);

            mbarrier_wait(shared.values_free(s), free);
            if (absent) mbarrier_arrive_count(shared.values_free(s), absent);
            mbarrier_arrive_expect_tx(shared.values_full(f), VALUES_BYTES);
            const int64_t image = (static_cast<int64_t>(record.x) * params.kv_heads + head) * VALUES_BYTES;
            cp_async_bulk(stage + KEYS_BYTES, params.values + image, VALUES_BYTES, shared.values_full(f));
        }
        mbarrier_arrive(shared.task_free(n % TASK_BUFFERS));
    }
}

/// Quantises the Q tiles of every task but the first, a task ahead of the consumers, with QUERY_WARPS
/// warps. The first one nothing can hide: the consumers load it themselves, with more warps.
__device__ __forceinline__ void stream_queries(const Shared& shared, const AttentionParams& params, int warp) {
    for (int n = 0;; ++n) {
        const TaskRecord* task = wait_task(shared, n);
        if (task->queries == NO_MORE_TASKS) return;
        const int buffer = n % Q_BUFFERS;
        if (n >= Q_BUFFERS) mbarrier_wait(shared.q_free(buffer), (n / Q_BUFFERS + 1) & 1);
#pragma unroll 1
        for (int part = n == 0 ? 2 * WARPGROUPS : warp; part < 2 * WARPGROUPS; part += QUERY_WARPS)
            load_queries<QUERY_LOADS>(shared, params, task, part / 2, buffer, part % 2 * 32, part % 2 * 32 + 32);
        if (n > 0) mbarrier_arrive(shared.q_full(buffer));
        mbarrier_arrive(shared.task_free(n % TASK_BUFFERS));
    }
}
