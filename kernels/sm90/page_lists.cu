// Page lists: for every KV page the query rows that selected it, ascending, cut into tiles of four.
//
//   clean_supports   row -> its support (distinct visible pages, ascending), and membership bits
//   count_lists      tiles and page loads of each block of 32 page lists
//   scan_lists       exclusive sums of those, and where those of each chunk and KV head begin
//   write_lists      tile entries and page loads
//
// Everything is placed by counting, nothing by the order in which atomics happen to arrive: the same
// selections give the same lists, bit for bit.
//
// Lists are sorted by chunk, KV head, request, page. `members` holds, for each KV head and word of 32
// rows, one 32-bit mask per logical page: a list's rows are the set bits down one page's column.
#include "ptx.cuh"

constexpr int TOPK = 16;
constexpr int LISTS = 32;         // page lists of a block, one a lane
constexpr int MOST_WARPS = 32;    // of a block of count_lists and write_lists, which share its words of rows
constexpr int TILE_QUERIES = 4;   // entries of a tile
constexpr int CLEAN_WARPS = 4;    // of a block of clean_supports
constexpr int ABSENT = 0x7fffffff;
constexpr uint32_t NO_ENTRY = 0xffffffffu;
constexpr uint32_t ALL = 0xffffffffu;

struct ListParams {
    const int* topk;          // [kv_heads, total_q, 16]
    const int* page_table;    // [requests, table_width]
    const int* cu_seqlens_q;  // [requests + 1]
    const int* seq_lens;      // [requests]
    const int* positions;     // [total_q]
    int* supports;            // [kv_heads, total_q, 16], -1 last
    int* counts;              // [kv_heads, total_q] pages in a support
    int* visible;             // [total_q] tokens a row may see
    uint32_t* members;        // [kv_heads, words, page_columns]
    int2* totals;             // [blocks] tiles, page loads; after the scan: of all blocks before
    int* chunk_loads;         // [chunks * kv_heads + 1] first page load of each chunk and KV head
    uint32_t* entries;        // [tiles, 4] row << 4 | slot, or NO_ENTRY
    int* progress;            // counters of a later kernel that begin at zero
    int4* loads;              // physical page, kv_head << 8 | tiles, logical page, first tile
    int total_q;
    int kv_heads;
    int requests;
    int table_width;
    int words;           // ceil(total_q / 32)
    int page_columns;    // table_width rounded up to 32
    int chunk_rows;
    int chunks;
    int tiles_per_load;
    int progress_words;
};

/// Request of a row: the first whose end lies behind it (requests may be empty).
__device__ __forceinline__ int request_of(const ListParams& params, int row) {
    int low = 0, high = params.requests - 1;
    while (low < high) {
        const int middle = (low + high) >> 1;
        if (__ldg(params.cu_seqlens_q + middle + 1) <= row)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/// Ascending, by a bitonic network: every index is a compile-time constant.
__device__ __forceinline__ void sort16(int (&id)[TOPK]) {
#pragma unroll
    for (int size = 2; size <= TOPK; size *= 2) {
#pragma unroll
        for (int stride = size / 2; stride > 0; stride /= 2) {
#pragma unroll
            for (int i = 0; i < TOPK; ++i) {
                const int j = i ^ stride;
                if (j > i) {
                    const int low = min(id[i], id[j]), high = max(id[i], id[j]);
                    const bool ascending = (i & size) == 0;
                    id[i] = ascending ? low : high;
                    id[j] = ascending ? high : low;
                }
            }
        }
    }
}

/// One warp for 32 rows of one KV head, one row a lane. Grid: kv_heads * ceil(words / 4).
extern "C" __global__ void __launch_bounds__(CLEAN_WARPS * 32) clean_supports(const ListParams params) {
    __shared__ int sorted[CLEAN_WARPS][TOPK + 1][32];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int blocks = (params.words + CLEAN_WARPS - 1) / CLEAN_WARPS;
    const int word = blockIdx.x % blocks * CLEAN_WARPS + warp, head = blockIdx.x / blocks;
    if (word >= params.words) return;
    const int row = word * 32 + lane;

    int id[TOPK];
#pragma unroll
    for (int i = 0; i < TOPK; ++i) id[i] = ABSENT;
    if (row < params.total_q) {
        const int request = request_of(params, row);
        const int length = __ldg(params.seq_lens + request), position = __ldg(params.positions + row);
        const int visible = position < length ? position + 1 : length;
        const int last_page = min((visible - 1) >> 7, params.table_width - 1);
        const int64_t place = static_cast<int64_t>(head) * params.total_q + row;
        const int4* chosen = reinterpret_cast<const int4*>(params.topk + place * TOPK);
#pragma unroll
        for (int i = 0; i < TOPK / 4; ++i) {
            const int4 four = __ldg(chosen + i);
            const int each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) id[4 * i + j] = each[j] >= 0 && each[j] <= last_page ? each[j] : ABSENT;
        }
        sort16(id);
#pragma unroll
        for (int i = TOPK - 1; i > 0; --i) id[i] = id[i] == id[i - 1] ? ABSENT : id[i];
        sort16(id);
        int count = 0;
#pragma unroll
        for (int i = 0; i < TOPK; ++i) count += id[i] != ABSENT;
        int4* support = reinterpret_cast<int4*>(params.supports + place * TOPK);
#pragma unroll
        for (int i = 0; i < TOPK / 4; ++i) {
            support[i] = make_int4(id[4 * i] == ABSENT ? -1 : id[4 * i], id[4 * i + 1] == ABSENT ? -1 : id[4 * i + 1],
                                   id[4 * i + 2] == ABSENT ? -1 : id[4 * i + 2],
                                   id[4 * i + 3] == ABSENT ? -1 : id[4 * i + 3]);
        }
        params.counts[place] = count;
        if (head == 0) params.visible[row] = visible;
    }
#pragma unroll
    for (int i = 0; i < TOPK; ++i) sorted[warp][i][lane] = id[i];
    sorted[warp][TOPK][lane] = ABSENT;

    // This warp alone owns its word of every page: first all zero, then the pages that occur.
    uint32_t* column = params.members + (static_cast<int64_t>(head) * params.words + word) * params.page_columns;
    for (int i = lane; i < params.page_columns / 4; i += 32)
        reinterpret_cast<uint4*>(column)[i] = make_uint4(0, 0, 0, 0);
    __syncwarp();
    int taken = 0, next = id[0];
    while (true) {
        const int page = __reduce_min_sync(ALL, next);
        if (page == ABSENT) break;
        const uint32_t mask = __ballot_sync(ALL, next == page);
        if (lane == 0) column[page] = mask;
        if (next == page) next = sorted[warp][++taken][lane];
    }
}

/// The page lists of one block: 32 neighbouring pages of one chunk, KV head and request.
struct ListBlock {
    int chunk, head, request, first_page;
    int begin, end;             // rows
    int first_word, last_word;  // of this warp's share; empty when first > last
    bool exists;

    __device__ explicit ListBlock(const ListParams& params) {
        const int page_blocks = params.page_columns / LISTS;
        int index = blockIdx.x;
        first_page = index % page_blocks * LISTS;
        index /= page_blocks;
        request = index % params.requests;
        index /= params.requests;
        head = index % params.kv_heads;
        chunk = index / params.kv_heads;
        const int64_t chunk_begin = static_cast<int64_t>(chunk) * params.chunk_rows;
        begin = static_cast<int>(max(static_cast<int64_t>(__ldg(params.cu_seqlens_q + request)), chunk_begin));
        end = static_cast<int>(
            min(static_cast<int64_t>(__ldg(params.cu_seqlens_q + request + 1)), chunk_begin + params.chunk_rows));
        const int pages = min(((__ldg(params.seq_lens + request) - 1) >> 7) + 1, params.table_width);
        exists = begin < end && first_page < pages;
        if (!exists) return;
        const int low = begin >> 5, high = (end - 1) >> 5;
        const int share = (high - low) / static_cast<int>(blockDim.x >> 5) + 1;
        first_word = low + static_cast<int>(threadIdx.x >> 5) * share;
        last_word = min(first_word + share - 1, high);
    }

    /// Rows of word `w` that belong to this request and chunk.
    __device__ uint32_t window(int w) const {
        uint32_t bits = ALL;
        if (w == begin >> 5) bits &= ALL << (begin & 31);
        if (w == (end - 1) >> 5) bits &= ALL >> (31 - ((end - 1) & 31));
        return bits;
    }

    /// Members of this lane's page in word `w`.
    __device__ uint32_t mask(const ListParams& params, int w) const {
        const int64_t place = (static_cast<int64_t>(head) * params.words + w) * params.page_columns + first_page;
        return __ldg(params.members + place + (threadIdx.x & 31)) & window(w);
    }

    /// Entries of this lane's page in this warp's words.
    __device__ int count(const ListParams& params) const {
        int entries = 0;
#pragma unroll 4
        for (int w = first_word; w <= last_word; ++w) entries += __popc(mask(params, w));
        return entries;
    }
};

__device__ __forceinline__ int tiles_of(int entries) { return (entries + TILE_QUERIES - 1) / TILE_QUERIES; }

__device__ __forceinline__ int loads_of(const ListParams& params, int tiles) {
    return (tiles + params.tiles_per_load - 1) / params.tiles_per_load;
}

/// Grid: one block for each 32 lists, in list order; any number of warps.
extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32) count_lists(const ListParams params) {
    __shared__ int counted[MOST_WARPS][LISTS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const ListBlock block(params);
    if (!block.exists) {
        if (threadIdx.x == 0) params.totals[blockIdx.x] = make_int2(0, 0);
        return;
    }
    counted[warp][lane] = block.count(params);
    __syncthreads();
    if (warp != 0) return;
    int entries = 0;
    const int warps = blockDim.x >> 5;
#pragma unroll 4
    for (int w = 0; w < warps; ++w) entries += counted[w][lane];
    const int tiles = __reduce_add_sync(ALL, tiles_of(entries));
    const int loads = __reduce_add_sync(ALL, loads_of(params, tiles_of(entries)));
    if (lane == 0) params.totals[blockIdx.x] = make_int2(tiles, loads);
}

__device__ __forceinline__ int inclusive_scan(int value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(ALL, value, step);
        if (lane >= step) value += before;
    }
    return value;
}

/// One block of 1024 threads replaces `totals` by what lies before each block.
extern "C" __global__ void __launch_bounds__(1024) scan_lists(const ListParams params) {
    __shared__ int warp_tiles[32], warp_loads[32];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int per_head = params.page_columns / LISTS * params.requests;
    const int blocks = per_head * params.kv_heads * params.chunks;
    for (int i = threadIdx.x; i < params.progress_words; i += 1024) params.progress[i] = 0;
    int tiles_before = 0, loads_before = 0;
    for (int first = 0; first < blocks; first += 1024) {
        const int index = first + static_cast<int>(threadIdx.x);
        const int2 own = index < blocks ? params.totals[index] : make_int2(0, 0);
        const int tiles = inclusive_scan(own.x, lane), loads = inclusive_scan(own.y, lane);
        if (lane == 31) {
            warp_tiles[warp] = tiles;
            warp_loads[warp] = loads;
        }
        __syncthreads();
        const int warps_tiles = inclusive_scan(warp_tiles[lane], lane);
        const int warps_loads = inclusive_scan(warp_loads[lane], lane);
        const int tiles_in_warps = __shfl_sync(ALL, warps_tiles, warp) - __shfl_sync(ALL, tiles, 31);
        const int loads_in_warps = __shfl_sync(ALL, warps_loads, warp) - __shfl_sync(ALL, loads, 31);
        if (index < blocks) {
            const int2 before = make_int2(tiles_before + tiles_in_warps + tiles - own.x,
                                          loads_before + loads_in_warps + loads - own.y);
            params.totals[index] = before;
            if (index % per_head == 0) params.chunk_loads[index / per_head] = before.y;
        }
        tiles_before += __shfl_sync(ALL, warps_tiles, 31);
        loads_before += __shfl_sync(ALL, warps_loads, 31);
        __syncthreads();
    }
    if (threadIdx.x == 0) params.chunk_loads[params.chunks * params.kv_heads] = loads_before;
}

/// The same grid and blocks as count_lists.
extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32) write_lists(const ListParams params) {
    __shared__ int counted[MOST_WARPS][LISTS];  // entries of each warp's words, then of the warps before it
    __shared__ int list_tiles[LISTS], list_first_tile[LISTS], list_first_load[LISTS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const ListBlock block(params);
    if (!block.exists) return;
    counted[warp][lane] = block.count(params);
    __syncthreads();
    if (warp == 0) {
        int entries = 0;
#pragma unroll 4
        for (int w = 0; w < warps; ++w) {
            const int own = counted[w][lane];
            counted[w][lane] = entries;
            entries += own;
        }
        const int2 before = params.totals[blockIdx.x];
        const int tiles = tiles_of(entries), loads = loads_of(params, tiles);
        const int first_tile = before.x + inclusive_scan(tiles, lane) - tiles;
        list_tiles[lane] = tiles;
        list_first_tile[lane] = first_tile;
        list_first_load[lane] = before.y + inclusive_scan(loads, lane) - loads;
        for (int e = entries; e < tiles * TILE_QUERIES; ++e)
            params.entries[static_cast<int64_t>(first_tile) * TILE_QUERIES + e] = NO_ENTRY;
    }
    __syncthreads();

    // Page loads: lane = list, the warps take turns.
    const int page = block.first_page + lane, tiles = list_tiles[lane];
    if (warp < loads_of(params, tiles)) {
        const int physical = __ldg(params.page_table + static_cast<int64_t>(block.request) * params.table_width + page);
        for (int load = warp; load < loads_of(params, tiles); load += warps) {
            const int done = load * params.tiles_per_load;
            params.loads[list_first_load[lane] + load] =
                make_int4(physical, (block.head << 8) | min(params.tiles_per_load, tiles - done), page,
                          list_first_tile[lane] + done);
        }
    }
    __syncwarp();

    // Entries: lane = page while reading masks, lane = row while writing.
    int64_t position = static_cast<int64_t>(list_first_tile[lane]) * TILE_QUERIES + counted[warp][lane];
    for (int w = block.first_word; w <= block.last_word; ++w) {
        const uint32_t mine = block.mask(params, w);
        uint32_t pages = __ballot_sync(ALL, mine != 0);
        if (pages == 0) continue;
        const int row = w * 32 + lane;
        int support[TOPK];
        const int4* stored = reinterpret_cast<const int4*>(
            params.supports + (static_cast<int64_t>(block.head) * params.total_q + min(row, params.total_q - 1)) * TOPK);
#pragma unroll
        for (int i = 0; i < TOPK / 4; ++i) {
            const int4 four = __ldg(stored + i);
            support[4 * i] = four.x;
            support[4 * i + 1] = four.y;
            support[4 * i + 2] = four.z;
            support[4 * i + 3] = four.w;
        }
        while (pages != 0) {
            const int source = __ffs(pages) - 1;
            pages &= pages - 1;
            const uint32_t rows = __shfl_sync(ALL, mine, source);
            const int64_t base = __shfl_sync(ALL, position, source);
            if (rows >> lane & 1) {
                // The slot is the page's rank in the row's support; -1 compares as a large unsigned.
                const uint32_t wanted = block.first_page + source;
                int slot = 0;
#pragma unroll
                for (int i = 0; i < TOPK; ++i) slot += static_cast<uint32_t>(support[i]) < wanted;
                const uint32_t below = rows & ((1u << lane) - 1);
                params.entries[base + __popc(below)] = static_cast<uint32_t>(row) << 4 | slot;
            }
            if (lane == source) position += __popc(rows);
        }
    }
}
