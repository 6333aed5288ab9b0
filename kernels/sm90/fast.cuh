// Consumers at precision `fast` (rows.cuh has the arithmetic).
//
// The next page's Q K^T and this page's P V are issued together; the next page's probabilities are made
// while P V finishes.
//
// NOTE: every product begins and ends within one turn of the loop, and none stands in a branch: ptxas
// serialises all of them otherwise (C7514, C7520).
#pragma once

__device__ __forceinline__ uint64_t keys_of(const Shared& shared, const Page& page) {
    return swizzle128_descriptor(smem_address(shared.stage(page.stage)));
}

/// Pages of one task for one tile, from `page` to the first one of another task, or too far ahead to
/// hold `page` meanwhile, which is left in `page`.
__device__ __forceinline__ void attend_run(const Shared& shared, Rows& rows, Walk& walk, Page& page, uint32_t& issued,
                                           uint64_t tile, int warp, int seen) {
    uint32_t scores[HALF_SCORES], codes[HALF_SCORES], packed[16];
    float correction[2];

    wait_page(shared, issued, page);
    wgmma_fence();
    multiply_keys(scores, tile, keys_of(shared, page));
    wgmma_commit_group();
    Page after = walk.next();
    wgmma_wait_group<0>();
    pin(scores);
    bool live = (page.members >> warp) & 1, moved = false;
    if (live) moved = exponentiate(rows, scores, codes, seen - page.logical * PAGE, correction);
    if (moved) rescale(rows, correction);
    pack_page(packed, codes, live);

    while (may_hold(page, after)) {
        const uint64_t values = keys_of(shared, page) + KEYS_BYTES / 16;
        wait_page(shared, issued, after);
        wgmma_fence();
        multiply_keys(scores, tile, keys_of(shared, after));
        wgmma_commit_group();
        multiply_values(rows, packed, values);
        wgmma_commit_group();
        const Page later = walk.next();
        wgmma_wait_group<1>();
        pin(scores);

        live = (after.members >> warp) & 1;
        moved = false;
        if (live) moved = exponentiate(rows, scores, codes, seen - after.logical * PAGE, correction);

        wgmma_wait_group<0>();
        pin(rows.o);
        release_page(shared, page);
        if (moved) rescale(rows, correction);
        pack_page(packed, codes, live);
        page = after;
        after = later;
    }
    wgmma_fence();
    multiply_values(rows, packed, keys_of(shared, page) + KEYS_BYTES / 16);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(rows.o);
    release_page(shared, page);
    page = after;
}
