// A consumer warpgroup: the page loop and what lies between tasks, in either precision (rows.cuh).
//
// The next page's Q K^T and this page's P V are issued together. A warp stalls while it issues products
// that the tensor core has no room for yet, so what the two warpgroups overlap is one's softmax with the
// other's products. From a task to the next no product is shared; but what the next one needs is asked for under the
// last P V, and the finished rows are stored under the first Q K^T.
//
// NOTE: every product begins and ends within one turn of a loop, and none stands in a branch: ptxas
// serialises all of them otherwise (C7514, C7520). Nor does a branch that lanes might take apart lie between
// a product and its wait (C7518).
#pragma once

__device__ __forceinline__ uint64_t keys_of(const Page& page) { return swizzle128_descriptor(0) | page.keys; }

__device__ __forceinline__ uint64_t values_of(const Page& page) { return keys_of(page) + KEYS_BYTES / 16; }

/// A run: pages of one task for one tile, from `page`, whose scores these are, to the last, or to one that is too far
/// behind the next to be held meanwhile. It `begins` its task, or goes on with it. The page it ends with is left in
/// `page`, its P V in flight and its V^T held, and what comes next in `after`.
__device__ __forceinline__ void attend_run(const Shared& shared, Rows& rows, Score (&scores)[SCORE_REGISTERS],
                                           uint32_t (&packed)[FRAGMENT_REGISTERS], Walk& walk, Page& page, Page& after,
                                           int warp, int seen, bool begins, uint64_t tile) {
    uint32_t probabilities[32];
    float correction[2];

    bool live = (page.members >> warp) & 1, moved = false;
    if (live) moved = exponentiate(rows, scores, probabilities, seen - page.logical * PAGE, correction, begins);
    if (moved && !begins) scale_rows(rows.o, correction);
    pack_page(packed, probabilities, live);
    bool ready = both_ready(shared, page, after);

    while (may_hold(page, after)) {
        if (!ready) {
            wait_values(shared, page);
            wait_keys(shared, after);
        }
        wgmma_fence();
        multiply_keys(scores, tile, keys_of(after));
        wgmma_commit_group();
        multiply_values(rows, packed, values_of(page));
        wgmma_commit_group();
        const Page later = walk.next(shared);
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
    multiply_values(rows, packed, values_of(page));
    wgmma_commit_group();
}

/// One consumer warpgroup: its tile of every task, a run a turn.
__device__ __forceinline__ void consume(const Shared& shared, const AttentionParams& params, int group) {
    const int warp = uniform((threadIdx.x & 127) / 32);
    Score scores[SCORE_REGISTERS];
    uint32_t packed[FRAGMENT_REGISTERS];
    Rows rows;
    Owner owner{-1, 0, 0};  // whose `rows` are

    int n = 0;
    TileTask task = tile_task(shared, n, group);
    if (task.none) return;
    load_first_queries(shared, params, group);
    Page page = task.walk.next(shared);
    bool begins = true, ready = false;  // `page` is its task's first; it is known to be there, and its Q tile
    for (;;) {
        if (!ready) {
            while (page.members == 0 && !task.none) {
                release_task(shared, n);
                if (task.owner.query >= 0) store_zeros(output_of(params, task.owner));
                task = tile_task(shared, ++n, group);
                page = task.walk.next(shared);
                if (!task.none) wait_queries(shared, n);
            }
            if (page.members == 0) break;
            wait_first(shared, page);
        }
        const uint64_t tile = swizzle128_descriptor(shared.tile_address(n % Q_BUFFERS, group));
        wgmma_fence();
        multiply_keys(scores, tile, keys_of(page));
        wgmma_commit_group();
        wgmma_wait_group<1>();  // for ptxas alone, which does not know here that the last P V is over (C7517)
        pin(rows.o);
        if (begins) {
            store_output(params, rows, owner);
            owner = task.owner;
            begin_rows(rows, shared.row_factor(n % Q_BUFFERS, group));
            clear(rows);
        }
        Page after = task.walk.next(shared);
        wgmma_wait_group<0>();
        pin(scores);
        release_keys(shared, page);

        attend_run(shared, rows, scores, packed, task.walk, page, after, warp, owner.seen, begins, tile);
        const Page last = page;
        page = after;
        begins = after.members == 0;
        ready = false;
        if (begins) {
            // NOTE: no further than to the next task while V^T is held: the other tile may need its place to end this
            // one, and the task after the next has no place for its Q before.
            task = tile_task(shared, n + 1, group);
            page = task.walk.next(shared);
            ready = page.members != 0 && first_ready(shared, n + 1, page);
            release_task(shared, n++);
        }
        wgmma_wait_group<0>();
        pin(rows.o);
        release_values(shared, last);
        if (begins && !task.none && !ready) wait_queries(shared, n);
    }
    store_output(params, rows, owner);
}
