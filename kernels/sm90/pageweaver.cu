// PageWeaver attention: one persistent CTA per SM walks the page unions of tasks of eight queries.
// Every page is copied into shared memory once and shared by the task's two tiles; a warpgroup skips the
// pages that none of its four queries selected, and a warp the softmax of those that its query did not.
// Each query keeps its own pages, causal limit, softmax and output row.
//
// Roles: two consumer warpgroups, one tile each, and four service warps: one streams pages, two
// quantise the next task's Q while this one computes, one fetches tasks.
// Rings: `STAGES` pages, where K and V^T come and go each by itself, since K is read a page ahead of V^T; four task
// records with their page lists; two sets of Q tiles.
//
// rows.cuh holds the arithmetic of either precision, attend.cuh what a consumer does.
#include "records.cuh"
#include "rows.cuh"

constexpr int WARPGROUPS = 2;
constexpr int STAGES = ACCURATE ? 3 : 5;
constexpr int FILLS = 2 * STAGES;  // fills that have a `full` barrier of their own, see walk.cuh
constexpr int TASK_BUFFERS = 4;
constexpr int Q_BUFFERS = 2;
constexpr int CONSUMERS = WARPGROUPS * 128;
constexpr int THREADS = CONSUMERS + 128;
// The service warpgroup gives registers up and the consumers take them: together no more than the launch had.
constexpr int CONSUMER_REGISTERS = ACCURATE ? 232 : 224;
constexpr int SERVICE_REGISTERS = ACCURATE ? 40 : 56;
constexpr int QUERY_LOADS = 4;  // row pairs a query warp has in flight
constexpr int QUERY_WARPS = 2;
constexpr int STAGE_BYTES = KEYS_BYTES + VALUES_BYTES + (ACCURATE ? 0 : ONES_BYTES);
constexpr int TASK_WORDS = sizeof(TaskRecord) / 4;
constexpr int FIRST_SLOT_WORD = 4;  // of a record: its slots' queries, and behind each what it sees
constexpr int TASK_PAGES = WARPGROUPS * TILE_QUERIES * 16;  // a task's union at most: every query's 16 its own
constexpr int TILE_STEPS = TILE_QUERIES * 16 + 1;  // the pages of one tile at most, and the end
constexpr int TILE_WARPS = 4;
constexpr int NO_MORE_TASKS = -1;                  // queries of the record that follows the last task

// Shared memory, from a 1024-byte aligned base.
constexpr int Q_OFFSET = STAGES * STAGE_BYTES;
constexpr int SCALE_OFFSET = Q_OFFSET + Q_BUFFERS * WARPGROUPS * Q_PARTS * TILE_BYTES;
constexpr int LIST_OFFSET = SCALE_OFFSET + Q_BUFFERS * WARPGROUPS * TILE_ROWS * 4;
constexpr int STEPS_OFFSET = LIST_OFFSET + TASK_BUFFERS * TASK_PAGES * sizeof(PageRecord);
constexpr int TASK_OFFSET = STEPS_OFFSET + TASK_BUFFERS * WARPGROUPS * TILE_STEPS * 8;
constexpr int BARRIER_OFFSET = TASK_OFFSET + TASK_BUFFERS * sizeof(TaskRecord);
constexpr int BARRIERS = 2 * (FILLS + STAGES) + 2 * TASK_BUFFERS + 2 * Q_BUFFERS;
constexpr int ISSUED_OFFSET = BARRIER_OFFSET + BARRIERS * 8;
constexpr int SHARED_BYTES = ISSUED_OFFSET + 8;
static_assert(SHARED_BYTES + 1024 <= 232448, "one CTA's shared memory on sm_90");
static_assert(BARRIER_OFFSET % 8 == 0, "mbarriers are 8-byte aligned");

extern "C" __constant__ int shared_bytes = SHARED_BYTES + 1024;

/// One page that a tile walks: `fill` counts the pages copied by the CTA since the kernel began.
struct Step {
    uint32_t fill, place;  // see place_of; zeros mark the end
};

/// A page's logical id, the members of one tile (never none), where it lies in the ring, and which barriers and
/// parity say that it is there.
__device__ __forceinline__ uint32_t place_of(uint32_t logical, uint32_t members, uint32_t fill) {
    return logical | members << 16 | fill % STAGES << 20 | fill % FILLS << 23 | (fill / FILLS & 1) << 27;
}

struct Shared {
    uint8_t* base;
    uint32_t address;  // of base
    __device__ uint8_t* stage(int s) const { return base + s * STAGE_BYTES; }
    __device__ uint32_t stage_address(int s) const { return address + s * STAGE_BYTES; }
    __device__ uint32_t tile_address(int buffer, int group) const {
        return address + Q_OFFSET + (buffer * WARPGROUPS + group) * Q_PARTS * TILE_BYTES;
    }
    __device__ uint8_t* q_tile(int buffer, int group) const {
        return base + Q_OFFSET + (buffer * WARPGROUPS + group) * Q_PARTS * TILE_BYTES;
    }
    /// 32 bits a row: the factor from score to base-2 logit in f32 (accurate), or to codes in f16 twice (fast).
    __device__ uint32_t* row_factor(int buffer, int group) const {
        return reinterpret_cast<uint32_t*>(base + SCALE_OFFSET) + (buffer * WARPGROUPS + group) * TILE_ROWS;
    }
    __device__ TaskRecord* task(int buffer) const { return reinterpret_cast<TaskRecord*>(base + TASK_OFFSET) + buffer; }
    __device__ uint2* page_list(int buffer) const {
        return reinterpret_cast<uint2*>(base + LIST_OFFSET) + buffer * TASK_PAGES;
    }
    __device__ Step* steps(int buffer, int group) const {
        return reinterpret_cast<Step*>(base + STEPS_OFFSET) + (buffer * WARPGROUPS + group) * TILE_STEPS;
    }
    __device__ uint32_t issued() const { return address + ISSUED_OFFSET; }  // see wait_first
    __device__ uint32_t barrier(int i) const { return address + BARRIER_OFFSET + 8 * i; }
    __device__ uint32_t keys_full(int f) const { return barrier(f); }
    __device__ uint32_t values_full(int f) const { return keys_full(FILLS + f); }
    __device__ uint32_t keys_free(int s) const { return values_full(FILLS + s); }
    __device__ uint32_t values_free(int s) const { return keys_free(STAGES + s); }
    __device__ uint32_t task_full(int b) const { return values_free(STAGES + b); }
    __device__ uint32_t task_free(int b) const { return task_full(TASK_BUFFERS + b); }
    __device__ uint32_t q_full(int b) const { return task_free(TASK_BUFFERS + b); }
    __device__ uint32_t q_free(int b) const { return q_full(Q_BUFFERS + b); }
};

/// Waits for task n of this CTA; its record is valid until the thread arrives on `task_free`.
__device__ __forceinline__ const TaskRecord* wait_task(const Shared& shared, int n) {
    mbarrier_wait(shared.task_full(n % TASK_BUFFERS), (n / TASK_BUFFERS) & 1);
    return shared.task(n % TASK_BUFFERS);
}

#include "queries.cuh"
#include "service.cuh"
#include "walk.cuh"
#include "attend.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention(const __grid_constant__ TensorMap keys, const __grid_constant__ AttentionParams params) {
    extern __shared__ uint8_t dynamic[];
    uint8_t* base = dynamic + ((1024 - (smem_address(dynamic) & 1023)) & 1023);
    const Shared shared{base, opaque(uniform(smem_address(base)))};
    if (threadIdx.x == 0) {
        prefetch_tensormap(&keys);
        for (int f = 0; f < FILLS; ++f) {
            mbarrier_init(shared.keys_full(f), 1);
            mbarrier_init(shared.values_full(f), 1);
        }
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(shared.keys_free(s), WARPGROUPS * TILE_WARPS);
            mbarrier_init(shared.values_free(s), WARPGROUPS * TILE_WARPS);
        }
        // Tasks and Q tiles are touched by ordinary loads and stores, so each thread arrives for itself: on `full`
        // if it wrote, on `free` if it read. One lane could for its warp, after a __syncwarp, as it does for pages; but
        // a race checker follows no order through a third thread, and once a task the other 31 arrivals cost little.
        for (int b = 0; b < TASK_BUFFERS; ++b) {
            mbarrier_init(shared.task_full(b), 32);
            mbarrier_init(shared.task_free(b), CONSUMERS + QUERY_WARPS * 32 + 1);  // and the thread that copies pages
        }
        for (int b = 0; b < Q_BUFFERS; ++b) {
            mbarrier_init(shared.q_full(b), QUERY_WARPS * 32);
            mbarrier_init(shared.q_free(b), CONSUMERS);
        }
        atom_exch_shared(shared.issued(), 0);
        fence_mbarrier_init();
    }
#if !ACCURATE
    for (int at = threadIdx.x * 4; at < STAGES * ONES_BYTES; at += THREADS * 4) {
        uint8_t* ones = shared.stage(at / ONES_BYTES) + KEYS_BYTES + VALUES_BYTES;
        *reinterpret_cast<uint32_t*>(ones + at % ONES_BYTES) = 0x38383838;
    }
    fence_proxy_async_shared();
#endif
    __syncthreads();
#ifdef PROGRAMMATIC
    griddepcontrol_wait();  // the metadata kernels may still run: nothing of theirs was read so far
#endif

    const int group = uniform(threadIdx.x / 128);
    if (group < WARPGROUPS) {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(shared, params, group);
    } else {
        setmaxnreg_dec<SERVICE_REGISTERS>();
        const int warp = uniform((threadIdx.x - CONSUMERS) / 32);
        if (warp == 0)
            stream_pages(shared, keys, params);
        else if (warp == 1)
            stream_tasks(shared, params);
        else
            stream_queries(shared, params, warp - 2);
    }
}
