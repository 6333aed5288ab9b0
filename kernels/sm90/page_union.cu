// The direct KV-page union: K|V of a page enter shared memory once and meet every row of the page's
// list, four rows (64 tile rows) at a time. Each entry of a list leaves a partial output that is
// normalised by its own sum, with its reference maximum and sum; a reduction merges a row's partials.
//
//   quantise_queries     Q -> e4m3 in the order of the A fragment, one power-of-two scale a head row
//   page_union_partials  page loads, tiles, partial outputs
//   reduce_partials      slots of a row, in ascending order -> bf16 output
#include "page_union.cuh"

struct QueryParams {
    const uint8_t* q;       // bf16, rows query_bytes apart, heads and channels dense
    uint8_t* queries;       // [kv_heads, total_q] fragments of 2048 bytes
    float* row_factor;      // [kv_heads, total_q, 16] raw score -> base-2 logit
    int64_t query_bytes;
    float scale_log2;       // softmax_scale * k_scale * log2(e)
    int total_q;
    int kv_heads;
};

struct PartialParams {
    const uint8_t* values;      // [pages, kv_heads] packed V^T images
    const uint8_t* queries;
    const float* row_factor;
    const int* visible;         // [total_q]
    const uint32_t* entries;    // [tiles, 4] row << 4 | slot, or NO_ENTRY
    const int4* loads;          // physical page, kv_head << 8 | tiles, logical page, first tile
    const int* chunk_loads;     // [chunks * kv_heads + 1] first page load of each chunk and KV head
    uint8_t* partial;           // bf16 [kv_heads, chunk_rows, 16 slots, 16 heads, 128]
    float2* statistics;         // [kv_heads, chunk_rows, 16 slots, 16 heads] reference, sum
    int total_q;
    int kv_heads;
    int chunk;
    int chunk_rows;
};

struct ReduceParams {
    const uint8_t* partial;
    const float2* statistics;
    const int* counts;  // [kv_heads, total_q] slots in use
    uint8_t* out;       // bf16, rows row_bytes apart
    int64_t row_bytes;
    float v_scale;
    int total_q;
    int kv_heads;
    int chunk;
    int chunk_rows;
};

// Queries ----------------------------------------------------------------------------------------

/// One warp per (KV head, row). Lane 4r + t holds, of head rows r and r + 8, channels 32k + 16h + 4t
/// to + 3: what it will hand to wgmma. Grid: ceil(kv_heads * total_q / 8) blocks of 256.
extern "C" __global__ void __launch_bounds__(256) quantise_queries(const QueryParams params) {
    const int64_t place = static_cast<int64_t>(blockIdx.x) * 8 + (threadIdx.x >> 5);
    if (place >= static_cast<int64_t>(params.total_q) * params.kv_heads) return;
    const int lane = threadIdx.x & 31, r = lane >> 2, t = lane & 3;
    const int head = static_cast<int>(place / params.total_q), row = static_cast<int>(place % params.total_q);
    const uint8_t* source = params.q + row * params.query_bytes + static_cast<int64_t>(head) * OUTPUT_BYTES;

    uint2 raw[2][8];  // [head row r or r + 8][2k + h]
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int part = 0; part < 8; ++part)
            raw[i][part] = __ldg(
                reinterpret_cast<const uint2*>(source + ((r + 8 * i) * HEAD_DIM + 16 * part + 4 * t) * 2));
    }
    uint32_t packed[2][8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint32_t largest = 0;
#pragma unroll
        for (int part = 0; part < 8; ++part)
            largest = max_nan_bf16x2(
                largest, max_nan_bf16x2(raw[i][part].x & 0x7fff7fff, raw[i][part].y & 0x7fff7fff));
        largest = max_nan_bf16x2(largest, __shfl_xor_sync(0xffffffff, largest, 1));
        largest = max_nan_bf16x2(largest, __shfl_xor_sync(0xffffffff, largest, 2));
        const uint32_t low = largest & 0x7fff, high = (largest >> 16) & 0x7fff;
        float scale, inverse;
        power_of_two_scale(low > high ? low : high, scale, inverse);
#pragma unroll
        for (int part = 0; part < 8; ++part) {
            const uint32_t x = raw[i][part].x, y = raw[i][part].y;
            packed[i][part] = cvt_e4m3x4(__uint_as_float(x << 16) * scale, __uint_as_float(x & 0xffff0000u) * scale,
                                         __uint_as_float(y << 16) * scale, __uint_as_float(y & 0xffff0000u) * scale);
        }
        if (t == 0) params.row_factor[place * GROUP_HEADS + r + 8 * i] = params.scale_log2 * inverse;
    }
    uint4* fragment = reinterpret_cast<uint4*>(params.queries + place * FRAGMENT_BYTES);
#pragma unroll
    for (int k = 0; k < 4; ++k)
        fragment[32 * k + lane] =
            make_uint4(packed[0][2 * k], packed[1][2 * k], packed[0][2 * k + 1], packed[1][2 * k + 1]);
}

// Partials ---------------------------------------------------------------------------------------

/// Any grid: blocks take the chunk's page loads in turn. While a page is worked on, the next one is in
/// flight, and while a tile is multiplied, the next tile's queries are.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    page_union_partials(const __grid_constant__ TensorMap keys, const PartialParams params) {
    const uint32_t base = prepare_stages(&keys);
    const auto stage_address = [&](int stage) { return base + stage * STAGE_BYTES; };
    const auto full = [&](int stage) { return base + BARRIER_OFFSET + 8 * stage; };

    const int step = gridDim.x, end = __ldg(params.chunk_loads + (params.chunk + 1) * params.kv_heads);
    int index = __ldg(params.chunk_loads + params.chunk * params.kv_heads) + blockIdx.x;
    if (index >= end) return;

    Load load, next;
    load.fetch_record(params, index);
    next.fetch_record(params, index + step < end ? index + step : -1);
    load.fetch_entries(params);
    if (threadIdx.x == 0) copy_page(keys, params, load, stage_address(0), full(0));
    __syncwarp();
    Query query;
    query.load(params, __shfl_sync(0xffffffff, load.entries, 0), load.head());

    for (int n = 0; index < end; ++n, index += step) {
        const int stage = n & 1;
        // All warps are past the last product that read the other stage.
        __syncthreads();
        if (threadIdx.x == 0 && index + step < end)
            copy_page(keys, params, next, stage_address(stage ^ 1), full(stage ^ 1));
        __syncwarp();
        next.fetch_entries(params);
        Load after;
        after.fetch_record(params, index + 2 * step < end ? index + 2 * step : -1);

        const uint64_t key_tile = swizzle128_descriptor(stage_address(stage));
        const uint64_t value_tile = swizzle128_descriptor(stage_address(stage) + KEYS_BYTES);
        const auto place_of = [&](uint32_t entry) {
            const int row = static_cast<int>(entry >> 4) - params.chunk * params.chunk_rows;
            return (static_cast<int64_t>(load.head()) * params.chunk_rows + row) * TOPK + (entry & (TOPK - 1));
        };
        mbarrier_wait(full(stage), (n >> 1) & 1);
        attend_load(query, load, next, key_tile, value_tile, place_of, params);
        load = next;
        next = after;
    }
}

// Reduction --------------------------------------------------------------------------------------

/// One block per (row of the chunk, KV head): 16 lanes a query head, 8 channels a lane.
/// Grid: kv_heads * rows of the chunk, blocks of 256.
extern "C" __global__ void __launch_bounds__(256) reduce_partials(const ReduceParams params) {
    const int local = blockIdx.x / params.kv_heads, head = blockIdx.x % params.kv_heads;
    const int row = params.chunk * params.chunk_rows + local;
    if (row >= params.total_q) return;
    const int head_row = threadIdx.x >> 4, lane = threadIdx.x & 15;
    const int count = __ldg(params.counts + static_cast<int64_t>(head) * params.total_q + row);
    const int64_t place = (static_cast<int64_t>(head) * params.chunk_rows + local) * TOPK;

    float2 own = make_float2(__int_as_float(0xff800000), 0.0f);
    if (lane < count) own = __ldg(params.statistics + (place + lane) * GROUP_HEADS + head_row);
    float highest = own.x;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
    const float share = lane < count ? own.y * ex2_approx(own.x - highest) : 0.0f;

    const uint8_t* source = params.partial + place * OUTPUT_BYTES + (head_row * HEAD_DIM + lane * 8) * 2;
    float total[8] = {0, 0, 0, 0, 0, 0, 0, 0}, mass = 0.0f;
#pragma unroll
    for (int first = 0; first < TOPK; first += 8) {
        uint4 part[8];
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            part[s] = make_uint4(0, 0, 0, 0);
            if (first + s < count) part[s] = __ldcs(reinterpret_cast<const uint4*>(source + (first + s) * OUTPUT_BYTES));
        }
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            const float weight = __shfl_sync(0xffffffff, share, first + s, 16);
            const uint32_t words[4] = {part[s].x, part[s].y, part[s].z, part[s].w};
            mass += weight;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                total[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), total[2 * i]);
                total[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xffff0000u), total[2 * i + 1]);
            }
        }
    }
    const float factor = count == 0 ? 0.0f : params.v_scale / mass;
    uint8_t* target = params.out + row * params.row_bytes + static_cast<int64_t>(head) * OUTPUT_BYTES +
                      (head_row * HEAD_DIM + lane * 8) * 2;
    *reinterpret_cast<uint4*>(target) =
        make_uint4(cvt_bf16x2(total[0] * factor, total[1] * factor), cvt_bf16x2(total[2] * factor, total[3] * factor),
                   cvt_bf16x2(total[4] * factor, total[5] * factor), cvt_bf16x2(total[6] * factor, total[7] * factor));
}
