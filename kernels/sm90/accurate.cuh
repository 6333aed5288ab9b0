// Consumers at precision `accurate` (rows.cuh has the arithmetic): one page at a time, in order; the
// other warpgroup fills the tensor core meanwhile.
#pragma once

/// One page for one tile; the next one is left in `page`.
__device__ __forceinline__ void attend_run(const Shared& shared, Rows& rows, Walk& walk, Page& page, uint32_t& issued,
                                           uint64_t tile, int warp, int seen) {
    const uint64_t keys = swizzle128_descriptor(smem_address(shared.stage(page.stage)));
    float scores[SCORES], product[SCORES], correction[2];
    uint32_t high[16], low[16];
    wait_page(shared, issued, page);
    wgmma_fence();
    multiply_keys<true>(scores, tile, tile + TILE_BYTES / 16, keys);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(scores);
    const bool live = (page.members >> warp) & 1;
    if (live) {
        exponentiate(rows, scores, seen - page.logical * PAGE, correction, high, low);
    } else {
#pragma unroll
        for (int at = 0; at < 16; ++at) high[at] = low[at] = 0;
    }
    wgmma_fence();
    multiply_values(product, high, low, keys + KEYS_BYTES / 16);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(product);
    release_page(shared, page);
    if (live) accumulate(rows, product, correction);
    page = walk.next();
}
