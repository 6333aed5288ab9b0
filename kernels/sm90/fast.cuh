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

#if FLAT
/// One consumer warpgroup: its tile of every task. The next page may belong to the next task: a task
/// ends in the shadow of the next one's first product.
__device__ __forceinline__ void consume(const Shared& shared, const AttentionParams& params, int group) {
    const int warp = uniform((threadIdx.x & 127) / 32);
    const auto tile_of = [&](int n) { return swizzle128_descriptor(smem_address(shared.q_tile(n % Q_BUFFERS, group))); };
    uint32_t issued = 0;
    Walk walk{shared, group};
    Page page = walk.next();
    Rows rows;
    Owner owner;
    uint64_t tile;
    uint32_t scores[HALF_SCORES], codes[HALF_SCORES], packed[16];
    float correction[2];
    int begun = -1;  // the task that `rows` and `owner` belong to

    while (page.task >= 0) {  // a run: pages near enough to be held while the next one is waited for
        if (page.members == 0) {
            finish_empty_task(shared, params, page.task, group);
            page = walk.next();
            continue;
        }
        if (page.task != begun) {
            begun = page.task;
            wait_queries(shared, params, begun, group);
            owner = owner_of(shared, begun, group);
            tile = tile_of(begun);
            begin_rows(rows, shared.row_factor(begun % Q_BUFFERS, group));
            clear(rows);
        }
        wait_page(shared, issued, page);
        wgmma_fence();
        multiply_keys(scores, tile, keys_of(shared, page));
        wgmma_commit_group();
        Page after = walk.next();
        wgmma_wait_group<0>();
        pin(scores);
        bool live = (page.members >> warp) & 1, moved = false;
        if (live) moved = exponentiate(rows, scores, codes, owner.seen - page.logical * PAGE, correction);
        if (moved) rescale(rows, correction);
        pack_page(packed, codes, live);

        while (may_hold(page, after)) {
            const bool ends = after.task != page.task;
            if (ends) {
                wait_queries(shared, params, after.task, group);
                tile = tile_of(after.task);
            }
            wait_page(shared, issued, after);
            wgmma_fence();
            multiply_keys(scores, tile, keys_of(shared, after));
            wgmma_commit_group();
            multiply_values(rows, packed, keys_of(shared, page) + KEYS_BYTES / 16);
            wgmma_commit_group();
            const Page later = walk.next();
            Owner next = owner;
            if (ends) {
                next = owner_of(shared, after.task, group);
                begin_rows(rows, shared.row_factor(after.task % Q_BUFFERS, group));
            }
            wgmma_wait_group<1>();
            pin(scores);

            live = (after.members >> warp) & 1;
            moved = false;
            if (live) moved = exponentiate(rows, scores, codes, next.seen - after.logical * PAGE, correction);

            wgmma_wait_group<0>();
            pin(rows.o);
            release_page(shared, page);
            if (ends) {
                finish_task(shared, params, rows, owner, page.task);
                begun = after.task;
            }
            owner = next;
            // NOTE: one place touches the sums between products; with two, ptxas serialises (C7520).
            if (moved || ends) {
#pragma unroll
                for (int at = 0; at < CHAINED; ++at) rows.o[at] = ends ? 0.f : rows.o[at] * correction[at / 2 % 2];
            }
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
        if (after.task != page.task) finish_task(shared, params, rows, owner, page.task);
        page = after;
    }
}
#else
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

/// One consumer warpgroup: its tile of every task.
__device__ __forceinline__ void consume(const Shared& shared, const AttentionParams& params, int group) {
    const int warp = uniform((threadIdx.x & 127) / 32);
    uint32_t issued = 0;
    Walk walk{shared, group};
    Page page = walk.next();
    while (page.task >= 0) {
        if (page.members == 0) {
            finish_empty_task(shared, params, page.task, group);
            page = walk.next();
            continue;
        }
        const int n = page.task, buffer = n % Q_BUFFERS;
        wait_queries(shared, params, n, group);
        const Owner owner = owner_of(shared, n, group);
        const uint64_t tile = swizzle128_descriptor(smem_address(shared.q_tile(buffer, group)));
        Rows rows;
        begin_rows(rows, shared.row_factor(buffer, group));
        clear(rows);
        while (page.task == n) attend_run(shared, rows, walk, page, issued, tile, warp, owner.seen);
        finish_task(shared, params, rows, owner, n);
    }
}
#endif
