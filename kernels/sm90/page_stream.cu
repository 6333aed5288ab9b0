// The direct KV-page union as a stream: partial outputs pass through a ring small enough for the L2
// cache and are reduced there, so none of them has to travel through HBM.
//
// One grid works a queue of tickets. Rows are cut into small chunks; a chunk of one KV head is a
// *segment*. The queue holds, in this order,
//
//     loads(0) .. loads(LAG - 1), loads(LAG) reduce(0), loads(LAG + 1) reduce(1), ...
//
// where loads(s) are the page loads of segment s and reduce(s) its rows, ROWS at a time. Partials of
// segment s lie in ring place s % RING. A load of s waits until s - RING has been reduced, a reduction
// until all loads of its segment are done; both wait for earlier tickets only. The holder of the
// earliest unfinished ticket is at work on it, so the queue always moves, however many blocks run.
//
// Which block does what does not matter: a partial has its slot, and a row's slots one order.
#include "page_union.cuh"
#include "progress.cuh"

constexpr int LAG = 2;   // segments between the loads and the reduction of a segment
constexpr int RING = 4;  // segments whose partials are kept
constexpr int ROWS = 2;  // of a reduction ticket
static_assert(RING >= LAG + 2, "a load never waits for a reduction just before it in the queue");

struct StreamParams {
    const uint8_t* values;    // [pages, kv_heads] packed V^T images
    const uint8_t* queries;   // [kv_heads, total_q] e4m3 fragments
    const float* row_factor;  // [kv_heads, total_q, 16]
    const int* visible;       // [total_q]
    const int* counts;        // [kv_heads, total_q]
    const uint32_t* entries;  // [tiles, 4]
    const int4* loads;
    const int* chunk_loads;   // [segments + 1] first page load of each segment
    uint8_t* partial;         // bf16 [RING, chunk_rows, 16 slots, 16 heads, 128]
    float2* statistics;       // [RING, chunk_rows, 16 slots, 16 heads]
    int* queue;               // next ticket; zero at the start
    int* loaded;              // [segments] page loads done; zero at the start
    int* reduced;             // [segments] reduction tickets done; zero at the start
    uint8_t* out;             // bf16, rows row_bytes apart
    int64_t row_bytes;
    float v_scale;
    int total_q;
    int kv_heads;
    int chunk_rows;
    int segments;
};

/// Where a block stands in the queue: tickets only grow, so the segment is found by walking on.
struct Place {
    int segment;     // whose loads, or the reduction after them, the ticket falls into
    int begin;       // first ticket of loads(segment)
    int first_load;  // index of loads(segment)
    int loads;       // how many
};

/// One ticket, decoded.
struct Work {
    int load;     // index of a page load, or -1
    int segment;  // of the load or of the reduction; -1 past the end of the queue
    int part;     // of the segment's rows, for a reduction
};

__device__ __forceinline__ int first_load_of(const StreamParams& params, int segment) {
    return __ldg(params.chunk_loads + min(segment, params.segments));
}

__device__ __forceinline__ int loads_of(const StreamParams& params, int segment) {
    return first_load_of(params, segment + 1) - first_load_of(params, segment);
}

__device__ __forceinline__ Work decode(const StreamParams& params, Place& place, int ticket, int parts) {
    while (true) {
        const int reductions = place.segment >= LAG ? parts : 0;
        if (ticket < place.begin + place.loads + reductions) break;
        if (place.segment + 1 >= params.segments + LAG) return {-1, -1, 0};
        place.begin += place.loads + reductions;
        ++place.segment;
        place.first_load += place.loads;
        place.loads = first_load_of(params, place.segment + 1) - place.first_load;
    }
    const int offset = ticket - place.begin;
    if (offset < place.loads) return {place.first_load + offset, place.segment, 0};
    return {-1, place.segment - LAG, offset - place.loads};
}

/// Rows of one reduction ticket: 8 lanes a head row, 16 channels a lane.
/// NOTE: the ring is written and read within this grid, so its loads bypass L1, which may be stale.
__device__ __forceinline__ void reduce_rows(const StreamParams& params, int segment, int part) {
    const int chunk = segment / params.kv_heads, head = segment % params.kv_heads;
    const int head_row = threadIdx.x >> 3, lane = threadIdx.x & 7;
#pragma unroll 1
    for (int i = 0; i < ROWS; ++i) {
        const int local = part * ROWS + i, row = chunk * params.chunk_rows + local;
        if (local >= params.chunk_rows || row >= params.total_q) return;
        const int count = __ldg(params.counts + static_cast<int64_t>(head) * params.total_q + row);
        const int64_t place = (static_cast<int64_t>(segment % RING) * params.chunk_rows + local) * TOPK;

        // Lane l holds the statistics of slots l and l + 8.
        float2 own[2];
        float share[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            own[h] = make_float2(__int_as_float(0xff800000), 0.0f);
            if (lane + 8 * h < count)
                own[h] = __ldcg(params.statistics + (place + lane + 8 * h) * GROUP_HEADS + head_row);
        }
        float highest = fmaxf(own[0].x, own[1].x);
#pragma unroll
        for (int step = 4; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
#pragma unroll
        for (int h = 0; h < 2; ++h)
            share[h] = lane + 8 * h < count ? own[h].y * ex2_approx(own[h].x - highest) : 0.0f;

        const uint8_t* source = params.partial + place * OUTPUT_BYTES + head_row * HEAD_DIM * 2 + lane * 16;
        float total[2][8], mass = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int c = 0; c < 8; ++c) total[half][c] = 0.0f;
        }
#pragma unroll
        for (int first = 0; first < TOPK; first += 4) {
            uint4 piece[4][2];
#pragma unroll
            for (int s = 0; s < 4; ++s) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    piece[s][half] = make_uint4(0, 0, 0, 0);
                    if (first + s < count)
                        piece[s][half] =
                            __ldcg(reinterpret_cast<const uint4*>(source + (first + s) * OUTPUT_BYTES + half * 128));
                }
            }
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                const float weight = __shfl_sync(0xffffffff, share[(first + s) >> 3], (first + s) & 7, 8);
                mass += weight;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t words[4] = {piece[s][half].x, piece[s][half].y, piece[s][half].z, piece[s][half].w};
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        total[half][2 * c] = fmaf(weight, __uint_as_float(words[c] << 16), total[half][2 * c]);
                        total[half][2 * c + 1] =
                            fmaf(weight, __uint_as_float(words[c] & 0xffff0000u), total[half][2 * c + 1]);
                    }
                }
            }
        }
        const float factor = count == 0 ? 0.0f : params.v_scale / mass;
        uint8_t* target = params.out + row * params.row_bytes + static_cast<int64_t>(head) * OUTPUT_BYTES +
                          head_row * HEAD_DIM * 2 + lane * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* o = total[half];
            *reinterpret_cast<uint4*>(target + half * 128) =
                make_uint4(cvt_bf16x2(o[0] * factor, o[1] * factor), cvt_bf16x2(o[2] * factor, o[3] * factor),
                           cvt_bf16x2(o[4] * factor, o[5] * factor), cvt_bf16x2(o[6] * factor, o[7] * factor));
        }
    }
}

/// Any grid of blocks of 128.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    page_union_stream(const __grid_constant__ TensorMap keys, const StreamParams params) {
    __shared__ int tickets[4];
    if (threadIdx.x == 0) {
        for (int i = 0; i < 3; ++i) tickets[i] = take_ticket(params.queue);
    }
    const uint32_t base = prepare_stages(&keys);
    const auto stage_address = [&](int stage) { return base + stage * STAGE_BYTES; };
    const auto full = [&](int stage) { return base + BARRIER_OFFSET + 8 * stage; };

    const int parts = (params.chunk_rows + ROWS - 1) / ROWS;
    Place place = {0, 0, 0, loads_of(params, 0)};
    Work work = decode(params, place, tickets[0], parts);
    Work next_work = decode(params, place, tickets[1], parts);
    Load load, next;
    load.fetch_record(params, work.load);
    next.fetch_record(params, next_work.load);
    load.fetch_entries(params);
    if (threadIdx.x == 0 && work.load >= 0) copy_page(keys, params, load, stage_address(0), full(0));
    __syncwarp();
    Query query;
    query.load(params, __shfl_sync(0xffffffff, load.entries, 0), load.head());
    bool ready = work.load >= 0;  // the query of the load's first tile is in place
    int fill = 0;                 // page loads done by this block
    int freed = RING - 1;         // segments up to here have a ring place that nobody reads any more

    for (int n = 0; work.segment >= 0; ++n) {
        const int stage = fill & 1;
        // All warps are past the last product that read the other stage, and have read their tickets.
        __syncthreads();
        // The stage after this item's: the item itself takes one only if it is a load.
        const int ahead = (fill + (work.load >= 0)) & 1;
        int ticket = 0;
        if (threadIdx.x == 0) {
            if (next_work.load >= 0) copy_page(keys, params, next, stage_address(ahead), full(ahead));
            ticket = take_ticket(params.queue);  // stored when the item is done: its latency hides
        }
        __syncwarp();
        next.fetch_entries(params);
        const Work after_work = decode(params, place, tickets[(n + 2) & 3], parts);
        Load after;
        after.fetch_record(params, after_work.load);

        if (work.load >= 0) {
            if (work.segment > freed) {
                if (threadIdx.x == 0) wait_for_count(params.reduced + work.segment - RING, parts);
                __syncthreads();
                freed = work.segment;
            }
            const uint64_t key_tile = swizzle128_descriptor(stage_address(stage));
            const uint64_t value_tile = swizzle128_descriptor(stage_address(stage) + KEYS_BYTES);
            const int ring_row = work.segment % RING * params.chunk_rows -
                                 work.segment / params.kv_heads * params.chunk_rows;
            const auto place_of = [&](uint32_t entry) {
                return (static_cast<int64_t>(entry >> 4) + ring_row) * TOPK + (entry & (TOPK - 1));
            };
            if (!ready) query.load(params, __shfl_sync(0xffffffff, load.entries, 0), load.head());
            mbarrier_wait(full(stage), (fill >> 1) & 1);
            attend_load(query, load, next, key_tile, value_tile, place_of, params);
            ready = next_work.load >= 0;
            ++fill;
            if (threadIdx.x == 0) tickets[(n + 3) & 3] = ticket;
            __syncthreads();
            if (threadIdx.x == 0) red_release_gpu(params.loaded + work.segment);
        } else {
            if (threadIdx.x == 0) wait_for_count(params.loaded + work.segment, loads_of(params, work.segment));
            __syncthreads();
            reduce_rows(params, work.segment, work.part);
            ready = false;
            if (threadIdx.x == 0) tickets[(n + 3) & 3] = ticket;
            __syncthreads();
            if (threadIdx.x == 0) red_release_gpu(params.reduced + work.segment);
        }
        work = next_work;
        next_work = after_work;
        load = next;
        next = after;
    }
}
