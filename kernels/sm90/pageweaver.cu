// PageWeaver attention: one persistent CTA per SM walks the page unions of tasks of 4 * WARPGROUPS
// queries. Every page is copied into shared memory once and shared by all the task's tiles; a
// warpgroup skips the pages that none of its four queries selected, and a warp the softmax of those
// that its query did not. Each query keeps its own pages, causal limit, softmax and output row.
//
// Roles: WARPGROUPS consumer warpgroups, one tile each, and a service warpgroup whose first warp
// fetches tasks and pages and whose others quantise the next task's Q while this one computes.
// Rings: `STAGES` pages (K | V^T | ones), four task records, two sets of Q tiles with row scales.
//
// Precision: the chained form (fast) lets the tensor core accumulate P V across pages and sums the
// probabilities on it too, as columns of ones in V^T, so that the accumulator's truncation cancels in
// the quotient. The promoted form (ACCURATE) carries Q and P as hi + lo pairs and adds each page's
// product in fp32.
#include "records.cuh"
#include "tile.cuh"

#ifndef ACCURATE
#define ACCURATE 0
#endif
#ifndef WARPGROUPS
#define WARPGROUPS (ACCURATE ? 2 : 3)
#endif
#ifndef STAGES
#define STAGES (ACCURATE ? 4 : 5)
#endif

constexpr int TASK_BUFFERS = 4;
constexpr int Q_BUFFERS = 2;
constexpr int CONSUMERS = WARPGROUPS * 128;
constexpr int THREADS = CONSUMERS + 128;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 3 ? 160 : 232;
constexpr int SERVICE_REGISTERS = WARPGROUPS == 3 ? 32 : 40;
constexpr int Q_PARTS = ACCURATE ? 2 : 1;
constexpr int STAGE_BYTES = 2 * KEYS_BYTES + (ACCURATE ? 0 : ONES_BYTES);
constexpr int TASK_WORDS = sizeof(TaskRecord) / 4;

// Shared memory, from a 1024-byte aligned base.
constexpr int Q_OFFSET = STAGES * STAGE_BYTES;
constexpr int SCALE_OFFSET = Q_OFFSET + Q_BUFFERS * WARPGROUPS * Q_PARTS * TILE_BYTES;
constexpr int TASK_OFFSET = SCALE_OFFSET + Q_BUFFERS * WARPGROUPS * TILE_ROWS * 4;
constexpr int RECORD_OFFSET = TASK_OFFSET + TASK_BUFFERS * sizeof(TaskRecord);
constexpr int BARRIER_OFFSET = RECORD_OFFSET + STAGES * sizeof(PageRecord);
constexpr int BARRIERS = 2 * STAGES + 2 * TASK_BUFFERS + 2 * Q_BUFFERS * WARPGROUPS;
constexpr int SHARED_BYTES = BARRIER_OFFSET + BARRIERS * 8;
static_assert(SHARED_BYTES + 1024 <= 232448, "one CTA's shared memory on sm_90");
static_assert(BARRIER_OFFSET % 8 == 0, "mbarriers are 8-byte aligned");

extern "C" __constant__ int shared_bytes = SHARED_BYTES + 1024;

struct Shared {
    uint8_t* base;
    __device__ uint8_t* stage(int s) const { return base + s * STAGE_BYTES; }
    __device__ uint8_t* q_tile(int buffer, int group) const {
        return base + Q_OFFSET + (buffer * WARPGROUPS + group) * Q_PARTS * TILE_BYTES;
    }
    __device__ float* row_scale(int buffer, int group) const {
        return reinterpret_cast<float*>(base + SCALE_OFFSET) + (buffer * WARPGROUPS + group) * TILE_ROWS;
    }
    __device__ TaskRecord* task(int buffer) const { return reinterpret_cast<TaskRecord*>(base + TASK_OFFSET) + buffer; }
    __device__ PageRecord* record(int s) const { return reinterpret_cast<PageRecord*>(base + RECORD_OFFSET) + s; }
    __device__ uint32_t barrier(int i) const { return smem_address(base + BARRIER_OFFSET) + 8 * i; }
    __device__ uint32_t page_full(int s) const { return barrier(s); }
    __device__ uint32_t page_free(int s) const { return barrier(STAGES + s); }
    __device__ uint32_t task_full(int b) const { return barrier(2 * STAGES + b); }
    __device__ uint32_t task_free(int b) const { return barrier(2 * STAGES + TASK_BUFFERS + b); }
    __device__ uint32_t q_full(int b, int group) const {
        return barrier(2 * STAGES + 2 * TASK_BUFFERS + b * WARPGROUPS + group);
    }
    __device__ uint32_t q_free(int b, int group) const { return q_full(Q_BUFFERS + b, group); }
};

// Service warps ----------------------------------------------------------------------------------

/// A task record as one warp holds it: word `lane`, and for the first lanes word 32 + `lane`.
struct Fetched {
    int task;
    uint32_t word, tail;
    __device__ int field(int at) const { return __shfl_sync(0xffffffff, word, at); }
};

/// Takes the next task with queries from the counter; past the last one, a record with queries = -1.
__device__ __forceinline__ Fetched fetch_task(const AttentionParams& params) {
    const int lane = threadIdx.x & 31;
    while (true) {
        int next = 0;
        if (lane == 0) next = atomicAdd(params.next_task, 1);
        next = __shfl_sync(0xffffffff, next, 0);
        if (next >= params.tasks) return {-1, lane == 1 ? 0xffffffffu : 0u, 0};
        const int task = params.task_order ? __ldg(params.task_order + next) : next;
        const uint32_t* words = reinterpret_cast<const uint32_t*>(params.task_records + task);
        const Fetched fetched{task, __ldg(words + lane), lane < TASK_WORDS - 32 ? __ldg(words + 32 + lane) : 0};
        if (fetched.field(1) > 0) return fetched;
    }
}

__device__ __forceinline__ void publish_task(const Shared& shared, int n, const Fetched& fetched) {
    const int lane = threadIdx.x & 31, buffer = n % TASK_BUFFERS;
    mbarrier_wait(shared.task_free(buffer), ((n / TASK_BUFFERS) & 1) ^ 1);
    uint32_t* record = reinterpret_cast<uint32_t*>(shared.task(buffer));
    record[lane] = fetched.word;
    if (lane < TASK_WORDS - 32) record[32 + lane] = fetched.tail;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.task_full(buffer));
}

/// Streams the pages of every task into the ring. A task is published before the pages of the one
/// ahead of it are copied, so that its Q tiles are ready when it starts.
__device__ __forceinline__ void stream_pages(const Shared& shared, const TensorMap& keys, const AttentionParams& params) {
    const int lane = threadIdx.x & 31;
    uint32_t fill = 0;
    Fetched current = fetch_task(params);
    publish_task(shared, 0, current);
    for (int n = 1; current.task >= 0; ++n) {
        const Fetched next = fetch_task(params);
        publish_task(shared, n, next);
        const int pages = current.field(0), head = current.field(2);
        const uint2* records = reinterpret_cast<const uint2*>(params.page_records) +
                               static_cast<int64_t>(current.task) * params.record_stride;
        for (int first = 0; first < pages; first += 32) {
            const uint2 mine = first + lane < pages ? __ldg(records + first + lane) : make_uint2(0, 0);
            const int count = min(32, pages - first);
#pragma unroll 1
            for (int i = 0; i < count; ++i, ++fill) {
                const uint2 record = make_uint2(__shfl_sync(0xffffffff, mine.x, i), __shfl_sync(0xffffffff, mine.y, i));
                if (lane == 0) {
                    const int s = fill % STAGES;
                    mbarrier_wait(shared.page_free(s), ((fill / STAGES) & 1) ^ 1);
                    *reinterpret_cast<uint2*>(shared.record(s)) = record;
                    mbarrier_arrive_expect_tx(shared.page_full(s), 2 * KEYS_BYTES);
                    const uint32_t stage = smem_address(shared.stage(s));
                    cp_async_bulk_tensor_4d(stage, &keys, 0, 0, head, record.x, shared.page_full(s));
                    const int64_t image = (static_cast<int64_t>(record.x) * params.kv_heads + head) * KEYS_BYTES;
                    cp_async_bulk(stage + KEYS_BYTES, params.values + image, KEYS_BYTES, shared.page_full(s));
                }
            }
        }
        __syncwarp();
        current = next;
    }
}

/// Quantises rows [begin, end) of a warpgroup's Q tile of a task, and makes them visible to wgmma.
template <int IN_FLIGHT>
__device__ __forceinline__ void load_queries(const Shared& shared, const AttentionParams& params, const TaskRecord* task,
                                             int group, int buffer, int begin, int end) {
    uint8_t* tile = shared.q_tile(buffer, group);
    quantise_rows<IN_FLIGHT, ACCURATE != 0>(
        params.q, [&](int slot) { return task->slots[group * TILE_QUERIES + slot].query; }, params.query_bytes,
        task->kv_head * GROUP_HEADS * HEAD_DIM * 2, params.scale_log2, tile, tile + TILE_BYTES,
        shared.row_scale(buffer, group), begin, end);
    fence_proxy_async_shared();
    __syncwarp();
}

/// Quantises the Q tiles of one consumer warpgroup, a task ahead of it. The first task is not its
/// business: nothing can hide that one, so the consumers load it with more warps.
__device__ __forceinline__ void stream_queries(const Shared& shared, const AttentionParams& params, int group) {
    for (int n = 1;; ++n) {
        const int record = n % TASK_BUFFERS, buffer = n % Q_BUFFERS;
        mbarrier_wait(shared.task_full(record), (n / TASK_BUFFERS) & 1);
        const TaskRecord* task = shared.task(record);
        if (task->queries < 0) return;
        if (n >= Q_BUFFERS) mbarrier_wait(shared.q_free(buffer, group), (n / Q_BUFFERS + 1) & 1);
        load_queries<2>(shared, params, task, group, buffer, 0, TILE_ROWS);
        if ((threadIdx.x & 31) == 0) mbarrier_arrive(shared.q_full(buffer, group));
    }
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

// Consumers --------------------------------------------------------------------------------------

/// One row half's running state: reference maximum (base-2 logit) and score-to-logit factor.
struct Row {
    float reference;
    float factor;
};

/// A warp's 16 output rows so far, in base-2 logits relative to each row's reference.
struct Accumulator {
#if ACCURATE
    float o[SCORES];
    float denominator[2];  // this lane's share of rows r and r + 8
#else
    float o[CHAINED];  // the last four registers are the denominator, the product with the ones
#endif
    Row rows[2];
};

__device__ __forceinline__ void reset(Accumulator& sum, const float* row_scale) {
    const int row = (threadIdx.x & 127) / 32 * GROUP_HEADS + (threadIdx.x & 31) / 4;
#pragma unroll
    for (float& o : sum.o) o = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        sum.rows[i] = {MASKED, row_scale[row + 8 * i]};
#if ACCURATE
        sum.denominator[i] = 0;
#endif
    }
}

/// Scores to probabilities, in place: 2^(score * factor + offset). Returns this lane's sum of the row.
__device__ __forceinline__ float exponentiate(float (&scores)[SCORES], int half, float factor, float offset) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            float& s = scores[4 * j + 2 * half + q];
            s = ex2_approx(fmaf(s, factor, offset));
            if constexpr (ACCURATE) sum += s;
        }
    }
    return sum;
}

#if ACCURATE

/// One page: exact running maximum, P as hi + lo, the product promoted to fp32.
__device__ __forceinline__ void attend_page(Accumulator& sum, float (&scores)[SCORES], bool live, uint64_t values) {
    constexpr float BITS = 8;  // p = 2^8 at the maximum, below e4m3's 448
    uint32_t high[16], low[16];
    float correction[2];
    if (live) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Row& row = sum.rows[i];
            const float maximum = fmaxf(row.reference, row_maximum(lane_maximum(scores, i)) * row.factor);
            correction[i] = ex2_approx(row.reference - maximum);
            row.reference = maximum;
            sum.denominator[i] =
                fmaf(sum.denominator[i], correction[i], exponentiate(scores, i, row.factor, BITS - maximum));
        }
#pragma unroll
        for (int at = 0; at < 16; ++at) {
            high[at] = pack_probabilities(scores, at / 4, at % 2, at / 2 % 2);
            subtract_packed(scores, high[at], at / 4, at % 2, at / 2 % 2);
            low[at] = pack_probabilities(scores, at / 4, at % 2, at / 2 % 2);
        }
    } else {
#pragma unroll
        for (int at = 0; at < 16; ++at) high[at] = low[at] = 0;
    }
    float product[SCORES];
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma_m64n128k32_rs(product, low + 4 * s, values + 2 * s, s != 0);
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma_m64n128k32_rs(product, high + 4 * s, values + 2 * s, 1);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(product);
    if (live) {
#pragma unroll
        for (int at = 0; at < SCORES; ++at) sum.o[at] = fmaf(sum.o[at], correction[at / 2 % 2], product[at]);
    }
}

__device__ __forceinline__ float denominator(const Accumulator& sum, int half) { return row_sum(sum.denominator[half]); }

#else

constexpr float PROBABILITY_BITS = 6;  // p = 2^6 at a row's reference maximum, so that e4m3 keeps small ones
constexpr float OVERFLOW_BITS = 8.5f;  // above it e4m3 would saturate at 448: raise the reference first

/// One page: P in e4m3 against a reference maximum that only moves when a row would saturate, so that
/// most pages neither exchange maxima between lanes nor touch the output registers.
__device__ __forceinline__ void attend_page(Accumulator& sum, float (&scores)[SCORES], bool live, uint64_t values) {
    uint32_t packed[16];
    if (live) {
        float maximum[2];
        bool overflow = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            maximum[i] = lane_maximum(scores, i) * sum.rows[i].factor;
            overflow |= maximum[i] > sum.rows[i].reference + (OVERFLOW_BITS - PROBABILITY_BITS);
        }
        if (__any_sync(0xffffffff, overflow)) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float raised = fmaxf(sum.rows[i].reference, row_maximum(maximum[i]));
                const float correction = ex2_approx(sum.rows[i].reference - raised);
                sum.rows[i].reference = raised;
#pragma unroll
                for (int at = 0; at < CHAINED / 4; ++at) {
                    sum.o[4 * at + 2 * i] *= correction;
                    sum.o[4 * at + 2 * i + 1] *= correction;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
            exponentiate(scores, i, sum.rows[i].factor, PROBABILITY_BITS - sum.rows[i].reference);
    }
    // Zeros by mask rather than by a second branch: ptxas would keep sixteen of them in registers.
    const uint32_t keep = live ? 0xffffffffu : 0u;
#pragma unroll
    for (int at = 0; at < 16; ++at) packed[at] = pack_probabilities(scores, at / 4, at % 2, at / 2 % 2) & keep;
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) wgmma_m64n136k32_rs(sum.o, packed + 4 * s, values + 2 * s, 1);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(sum.o);
}

__device__ __forceinline__ float denominator(const Accumulator& sum, int half) { return sum.o[SCORES + 2 * half]; }

#endif

/// Normalises and stores the 16 rows of the warp's query. An empty support gives exactly zero.
__device__ __forceinline__ void store_query(const Accumulator& sum, const AttentionParams& params, int query, int head) {
    const int row = (threadIdx.x & 31) / 4;
    uint8_t* out = params.out + query * params.query_bytes + head * (GROUP_HEADS * HEAD_DIM * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float total = denominator(sum, i);
        store_row(out + (row + 8 * i) * (HEAD_DIM * 2), sum.o, i, total == 0 ? 0 : params.v_scale / total);
    }
}

/// One consumer warpgroup: its tile of every task, page by page.
__device__ __forceinline__ void consume(const Shared& shared, const AttentionParams& params, int group) {
    const int warp = (threadIdx.x & 127) / 32;
    const bool elected = (threadIdx.x & 31) == 0;
    uint32_t fill = 0;
    for (int n = 0;; ++n) {
        const int buffer = n % Q_BUFFERS;
        mbarrier_wait(shared.task_full(n % TASK_BUFFERS), (n / TASK_BUFFERS) & 1);
        const TaskRecord* task = shared.task(n % TASK_BUFFERS);
        if (task->queries < 0) return;
        const int pages = task->pages, head = task->kv_head;
        const SlotRecord slot = task->slots[group * TILE_QUERIES + warp];
        if (n == 0) {
            load_queries<4>(shared, params, task, group, buffer, warp * GROUP_HEADS, (warp + 1) * GROUP_HEADS);
            warpgroup_sync(group);
        } else {
            mbarrier_wait(shared.q_full(buffer, group), ((n - 1) / Q_BUFFERS) & 1);
        }
        const uint64_t tile = swizzle128_descriptor(smem_address(shared.q_tile(buffer, group)));

        Accumulator sum;
        reset(sum, shared.row_scale(buffer, group));
        for (int page = 0; page < pages; ++page, ++fill) {
            const int s = fill % STAGES;
            mbarrier_wait(shared.page_full(s), (fill / STAGES) & 1);
            const PageRecord record = *shared.record(s);
            const int members = (record.members >> (group * TILE_QUERIES)) & 15;
            if (members != 0) {
                const uint64_t keys = swizzle128_descriptor(smem_address(shared.stage(s)));
                float scores[SCORES];
                wgmma_fence();
                multiply_keys<ACCURATE != 0>(scores, tile, tile + TILE_BYTES / 16, keys);
                wgmma_commit_group();
                wgmma_wait_group<0>();
                pin(scores);
                const int visible = slot.visible - record.logical * PAGE;
                if (visible < PAGE) mask_scores(scores, visible);
                attend_page(sum, scores, (members >> warp) & 1, keys + KEYS_BYTES / 16);
            }
            if (elected) mbarrier_arrive(shared.page_free(s));
        }
        __syncwarp();
        if (elected) {
            mbarrier_arrive(shared.q_free(buffer, group));
            mbarrier_arrive(shared.task_free(n % TASK_BUFFERS));
        }
        if (slot.query >= 0) store_query(sum, params, slot.query, head);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention(const __grid_constant__ TensorMap keys, const __grid_constant__ AttentionParams params) {
    extern __shared__ uint8_t dynamic[];
    const Shared shared{dynamic + ((1024 - (smem_address(dynamic) & 1023)) & 1023)};
    if (threadIdx.x == 0) {
        prefetch_tensormap(&keys);
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(shared.page_full(s), 1);
            mbarrier_init(shared.page_free(s), WARPGROUPS * 4);
        }
        for (int b = 0; b < TASK_BUFFERS; ++b) {
            mbarrier_init(shared.task_full(b), 1);
            mbarrier_init(shared.task_free(b), WARPGROUPS * 4);
        }
        for (int b = 0; b < Q_BUFFERS; ++b) {
            for (int group = 0; group < WARPGROUPS; ++group) {
                mbarrier_init(shared.q_full(b, group), 1);
                mbarrier_init(shared.q_free(b, group), 4);
            }
        }
        fence_mbarrier_init();
    }
#if !ACCURATE
    for (int at = threadIdx.x * 4; at < STAGES * ONES_BYTES; at += THREADS * 4)
        *reinterpret_cast<uint32_t*>(shared.stage(at / ONES_BYTES) + 2 * KEYS_BYTES + at % ONES_BYTES) = 0x38383838;
    fence_proxy_async_shared();
#endif
    __syncthreads();

    const int group = threadIdx.x / 128;
    if (group < WARPGROUPS) {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(shared, params, group);
    } else {
        setmaxnreg_dec<SERVICE_REGISTERS>();
        const int warp = (threadIdx.x - CONSUMERS) / 32;
        if (warp == 0)
            stream_pages(shared, keys, params);
        else if (warp <= WARPGROUPS)
            stream_queries(shared, params, warp - 1);
    }
}
