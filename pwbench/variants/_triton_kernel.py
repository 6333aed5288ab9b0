"""The Triton baseline's two kernels. Imported only where Triton and a GPU are present."""

from __future__ import annotations

import triton
import triton.language as tl


# Sizes that change from call to call must not each compile a kernel of their own.
@triton.jit(do_not_specialize=["total_q", "requests", "table_width"])
def clean_ids(
    topk,
    page_table,
    cu_seqlens_q,
    seq_lens,
    positions,
    pages,
    rows,
    counts,
    visible,
    total_q,
    requests,
    table_width,
    PAGE: tl.constexpr,
    TOPK: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Support of one query row: distinct visible ids ascending, their rows of the cache, how many.

    One program per (row, KV head); ``REQUESTS`` is ``requests`` rounded up to a power of two.
    """
    row = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64) * total_q + row

    request_slot = tl.arange(0, REQUESTS)
    ends = tl.load(cu_seqlens_q + 1 + request_slot, mask=request_slot < requests, other=2147483647)
    request = tl.sum((ends <= row).to(tl.int32), 0)
    seen = tl.minimum(tl.load(seq_lens + request), tl.load(positions + row) + 1)

    slot = tl.arange(0, TOPK)
    ids = tl.load(topk + place * TOPK + slot)
    valid = (ids >= 0) & (ids < (seen + PAGE - 1) // PAGE)
    repeats = tl.sum(((ids[None, :] == ids[:, None]) & (slot[None, :] < slot[:, None])).to(tl.int32), 1)
    first = valid & (repeats == 0)
    rank = tl.sum(((ids[None, :] < ids[:, None]) & first[None, :]).to(tl.int32), 1)

    physical = tl.load(page_table + request.to(tl.int64) * table_width + ids, mask=first, other=0)
    tl.store(pages + place * TOPK + rank, ids, mask=first)
    tl.store(rows + place * TOPK + rank, physical, mask=first)
    tl.store(counts + place, tl.sum(first.to(tl.int32), 0))
    tl.store(visible + place, seen)


@triton.jit(do_not_specialize=["total_q"])
def attend(
    q,
    k,
    v,
    out,
    pages,
    rows,
    counts,
    visible,
    q_row,
    q_head,
    kv_page,
    kv_head,
    kv_token,
    logit_scale,
    value_scale,
    total_q,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOPK: tl.constexpr,
):
    """Attention of one query position in the 16 query heads of one KV head.

    K and V arrive as bytes and are widened to bfloat16; tokens past the visible ones are never read,
    so whatever lies there cannot leak. ``logit_scale`` includes log2(e).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    place = head * total_q + row
    count = tl.load(counts + place)
    seen = tl.load(visible + place)

    heads = head * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, HEAD_DIM)
    offset = tl.arange(0, PAGE)
    q_tile = tl.load(q + row * q_row + heads[:, None] * q_head + dim[None, :])

    highest = tl.full([HEADS], float("-inf"), tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, HEAD_DIM], tl.float32)
    for n in range(count):
        page = tl.load(pages + place * TOPK + n)
        physical = tl.load(rows + place * TOPK + n).to(tl.int64)
        live = page * PAGE + offset < seen
        where = physical * kv_page + head * kv_head + offset[:, None] * kv_token + dim[None, :]
        k_bytes = tl.load(k + where, mask=live[:, None], other=0)
        v_bytes = tl.load(v + where, mask=live[:, None], other=0)
        k_tile = k_bytes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
        v_tile = v_bytes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)

        logits = tl.dot(q_tile, tl.trans(k_tile)) * logit_scale
        logits = tl.where(live[None, :], logits, float("-inf"))
        # A listed page has at least one visible token, so the new maximum is finite.
        higher = tl.maximum(highest, tl.max(logits, 1))
        weights = tl.exp2(logits - higher[:, None])
        decay = tl.exp2(highest - higher)
        mass = mass * decay + tl.sum(weights, 1)
        total = tl.dot(weights.to(tl.bfloat16), v_tile, total * decay[:, None])
        highest = higher

    scale = tl.where(mass > 0, value_scale / mass, 0.0)
    scale = tl.where(mass != mass, mass, scale)  # a NaN query stays NaN, it does not become zero
    result = total * scale[:, None]
    target = out + (row * tl.num_programs(1) + head) * (HEADS * HEAD_DIM)
    tl.store(target + tl.arange(0, HEADS)[:, None] * HEAD_DIM + dim[None, :], result.to(tl.bfloat16))
