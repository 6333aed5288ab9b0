// The page loop of a consumer warpgroup, in either precision (rows.cuh).
//
// The next page's Q K^T and this page's P V are issued together. A warp stalls while it issues products
// that the tensor core has no room for yet, so what the two warpgroups overlap is one's softmax with the
// other's products.
//
// NOTE: every product begins and ends within one turn of the loop, and none stands in a branch: ptxas
// serialises all of them otherwise (C7514, C7520).
#pragma once

__device__ __forceinline__ uint64_t keys_of(const Shared& shared, const Page& page) {
    return swizzle128_descriptor(shared.stage_address(page.stage));
}

__device__ __forceinline__ uint64_t values_of(const Shared& shared, const Page& page) {
    return keys_of(shared, page) + KEYS_BYTES / 16;
}

/// Pages of one task for one tile, from `page` to the last, or to one that is too far behind the next to be
/// held meanwhile; what comes after them is left in `page`.
__device__ __forceinline__ void attend_run(const Shared& shared, Rows& rows, Walk& walk, Page& page, uint64_t tile,
                                           int warp, int seen) {
    Score scores[SCORE_REGISTERS];
    uint32_t probabilities[32], packed[FRAGMENT_REGISTERS];
    float correction[2];

    wait_first(shared, page);
    wgmma_fence();
    multiply_keys(scores, tile, keys_of(shared, page));
    wgmma_commit_group();
    Page after = walk.next();
    wgmma_wait_group<0>();
    pin(scores);
    release_keys(shared, page);
    bool live = (page.members >> warp) & 1, moved = false;
    if (live) moved = exponentiate(rows, scores, probabilities, seen - page.logical * PAGE, correction);
    if (moved) scale_rows(rows.o, correction);
    pack_page(packed, probabilities, live);
    bool ready = both_ready(shared, page, after);

    while (may_hold(page, after)) {
        if (!ready) {
            wait_values(shared, page);
            wait_keys(shared, after);
        }
        wgmma_fence();
        multiply_keys(scores, tile, keys_of(shared, after));
        wgmma_commit_group();
        multiply_values(rows, packed, values_of(shared, page));
        wgmma_commit_group();
        const Page later = walk.next();
        wgmma_wait_group<1>();
        pin(scores);
        release_keys(shared, after);

        live = (after.members >> warp) & 1;
        moved = false;
        if (live) moved = exponentiate(rows, scores, probabilities, seen - after.logical * PAGE, correction);
        ready = both_ready(shared, after, later);  // asked here, where the answer has time to come

        wgmma_wait_group<0>();
        pin(rows.o);
        release_values(shared, page);
        if (moved) scale_rows(rows.o, correction);
        pack_page(packed, probabilities, live);
        page = after;
        after = later;
    }
    wait_values(shared, page);
    wgmma_fence();
    multiply_values(rows, packed, values_of(shared, page));
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(rows.o);
    release_values(shared, page);
    page = after;
}
