"""The union walk on the CPU: what the kernels do, in float32 and plain torch.

Every group walks its union of pages in ascending order with an online softmax. A page reaches all
slots of the group; the membership mask says whose it is, the causal position which of its tokens
count. Query rows are read from, and outputs written to, their original places.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pwbench.grouping import Unions, identity_order, match, prepare_unions, regroup
from pwbench.operator import (
    GROUP_HEADS,
    HEAD_DIM,
    PAGE,
    SparsePrefillCall,
    request_of_rows,
    supports,
    visible_tokens,
)
from pwbench.variants._base import Options, Prepared, Stage

_ROWS_AT_ONCE = 2048
"""Query-head rows of the groups that walk together: their pages and scores fill a few MiB of cache."""


def prepare(
    call: SparsePrefillCall,
    options: Options,
    *,
    order: str,
    group: int,
    search_group: int | None = None,
    window: int | None = None,
    matching: bool = False,
) -> Prepared:
    """Bind the float32 walk to a call.

    Args:
        call: a valid call on the CPU.
        options: both precisions compute the same float32; ``window`` is that of the search.
        search_group, window: what the search puts together, and where it looks; None = ``group`` and
            as the options ask.
        matching: the search is `match` instead of `regroup`.
        order: ``original``, ``online`` (the search is a stage) or ``precomputed`` (it happens here).
        group: slots that share one page list.
    """
    walk = UnionWalk(call, group)
    search_group, window = search_group or group, window or options.window
    stages = [Stage("metadata", walk.metadata), Stage("attention", walk.attention)]
    if order == "online":
        stages.insert(0, Stage("search", lambda: walk.search(window, search_group, matching)))
    elif order == "precomputed":
        walk.search(window, search_group, matching)

    def run() -> None:
        for stage in stages:
            stage.run()

    searched = {"window": str(window), "search_group": str(search_group)} if order != "original" else {}
    return Prepared(
        run=run,
        stages=stages,
        out=walk.out,
        query_ids=lambda: None if order == "original" else torch.from_numpy(walk.order.copy()),
        group=group,
        graphable=False,
        details={
            "peer": f"torch {torch.__version__}, float32 page walk",
            **searched,
        },
    )


class UnionWalk:
    """One call, one group size and the state that passes from stage to stage.

    Attributes:
        order: row executed at each slot, ``[Hkv, total_q]`` int32; the original order until `search`
            has run. Any bijection inside each request may be put here.
        unions: the page lists that `metadata` made for ``order``.
        out: ``[total_q, Hq, D]`` float32, wholly written by `attention`.
    """

    def __init__(self, call: SparsePrefillCall, group: int) -> None:
        self.call = call
        self.group = group
        self.order = identity_order(call.kv_heads, call.total_q)
        self.unions: Unions | None = None
        self.out = torch.empty((call.total_q, call.q_heads, HEAD_DIM), dtype=torch.float32)

    def search(self, window: int, group: int, matching: bool = False) -> None:
        pages, _ = supports(self.call)
        bounds = self.call.cu_seqlens_q.numpy()
        self.order = match(pages, bounds, window) if matching else regroup(pages, bounds, window, group)

    def metadata(self) -> None:
        pages, _ = supports(self.call)
        self.unions = prepare_unions(pages, self.order, self.call.cu_seqlens_q.numpy(), self.group)

    def attention(self) -> None:
        if self.unions is None:
            raise RuntimeError("attention needs the page lists that the metadata stage makes")
        at_once = max(1, _ROWS_AT_ONCE // (self.group * GROUP_HEADS))
        for head in range(self.call.kv_heads):
            job = _HeadJob.build(self.call, self.unions, self.order, head, self.group)
            for first in range(0, len(job.lengths), at_once):
                _walk(job, slice(first, first + at_once), self.out)


@dataclass
class _HeadJob:
    """The groups of one KV head, longest union first, so that those still walking are a prefix."""

    head: int
    scale: float
    v_scale: float
    q: torch.Tensor  # [total_q, 16, D] bfloat16, a view
    k: torch.Tensor  # [pages used, P, D] float32
    v: torch.Tensor  # [pages used, P, D] float32, zero past L
    lengths: np.ndarray  # [G] |U_G|
    rows: torch.Tensor  # [G, group] original row of each slot
    visible: torch.Tensor  # [G, group] tokens the slot may see; 0 where the slot is empty
    filled: torch.Tensor  # [G, group] whether the slot holds a row
    page: torch.Tensor  # [G, longest] entry of k and v
    first_token: torch.Tensor  # [G, longest]
    mask: torch.Tensor  # [G, longest] membership bits

    @classmethod
    def build(
        cls, call: SparsePrefillCall, unions: Unions, order: np.ndarray, head: int, group: int
    ) -> _HeadJob:
        mine = np.flatnonzero(unions.kv_head == head)
        mine = mine[np.argsort(-unions.lengths[mine], kind="stable")]
        lengths, begin = unions.lengths[mine], unions.begin[mine].astype(np.int64)
        size = unions.size[mine]
        request = request_of_rows(call.cu_seqlens_q.numpy())

        slot = np.arange(group)
        filled = slot < size[:, None]
        rows = order[head][np.where(filled, begin[:, None] + slot, begin[:, None])].astype(np.int64)
        visible = np.where(filled, visible_tokens(call)[rows], 0)

        step = np.arange(int(lengths.max(initial=0)))
        entry = unions.offsets[mine][:, None] + np.minimum(step, np.maximum(lengths[:, None] - 1, 0))
        entry = np.minimum(entry, max(len(unions.pages) - 1, 0))
        logical = unions.pages[entry].astype(np.int64)
        walking = step < lengths[:, None]
        owner = np.broadcast_to(request[begin][:, None], logical.shape)
        page, k, v = float_pages(call, head, owner[walking], logical[walking])
        place = np.zeros(logical.shape, dtype=np.int64)
        place[walking] = page
        return cls(
            head=head,
            scale=call.softmax_scale * call.k_scale,
            v_scale=call.v_scale,
            q=call.q[:, head * GROUP_HEADS : (head + 1) * GROUP_HEADS],
            k=k,
            v=v,
            lengths=lengths,
            rows=torch.from_numpy(rows),
            visible=torch.from_numpy(visible),
            filled=torch.from_numpy(filled),
            page=torch.from_numpy(place),
            first_token=torch.from_numpy(logical * PAGE),
            mask=torch.from_numpy(unions.masks[entry].astype(np.int64)),
        )


def _walk(job: _HeadJob, part: slice, out: torch.Tensor) -> None:
    """Walk the unions of some groups together, one page of each per step, and write their rows."""
    lengths = job.lengths[part]
    rows, filled = job.rows[part], job.filled[part]
    groups, slots = rows.shape
    q = job.q[rows].float().mul_(job.scale).flatten(1, 2)
    # The start is finite so that a slot which has met no page of its own never takes inf from inf.
    top = torch.full((groups, slots * GROUP_HEADS, 1), torch.finfo(torch.float32).min)
    weight = torch.zeros_like(top)
    total = torch.zeros(groups, slots * GROUP_HEADS, HEAD_DIM)
    token, bit = torch.arange(PAGE), torch.arange(slots)
    for step in range(int(lengths[0])):
        n = int(np.count_nonzero(lengths > step))
        page = job.page[part][:n, step]
        member = (job.mask[part][:n, step, None] >> bit & 1).bool()
        seen = job.first_token[part][:n, step, None, None] + token < job.visible[part][:n, :, None]
        hidden = ~(seen & member[:, :, None])

        scores = torch.bmm(q[:n], job.k[page].transpose(1, 2))
        # Masked by selection, not by adding: a token past L may hold NaN.
        scores.view(n, slots, GROUP_HEADS, PAGE).masked_fill_(hidden[:, :, None], -torch.inf)
        new_top = torch.maximum(top[:n], scores.amax(dim=-1, keepdim=True))
        decay = torch.exp(top[:n] - new_top)
        scores.sub_(new_top).exp_()
        weight[:n] = weight[:n] * decay + scores.sum(dim=-1, keepdim=True)
        folded = torch.baddbmm(total[:n] * decay, scores, job.v[page])
        # A slot keeps its sum untouched by pages that only its neighbours selected.
        mine = member.repeat_interleave(GROUP_HEADS, dim=1)[:, :, None]
        total[:n] = torch.where(mine, folded, total[:n])
        top[:n] = new_top
    total *= job.v_scale / torch.where(weight == 0, 1.0, weight)
    heads = slice(job.head * GROUP_HEADS, (job.head + 1) * GROUP_HEADS)
    out[rows[filled], heads] = total.view(groups, slots, GROUP_HEADS, HEAD_DIM)[filled]


def float_pages(
    call: SparsePrefillCall, head: int, request: np.ndarray, logical: np.ndarray
) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """K and V of the named logical pages in float32, each page of each request once.

    Args:
        call: the call, on any device.
        head: KV head.
        request, logical: the pages wanted, ``[n]`` each, repeats allowed.

    Returns:
        ``(entry [n], k, v)``: page i is ``k[entry[i]]``, ``[P, D]`` stored values. V is 0 past the
        request's last token, where the cache may hold NaN that a zero weight would not silence.
    """
    wanted, entry = np.unique(request * (int(logical.max(initial=0)) + 1) + logical, return_inverse=True)
    owner, page = np.divmod(wanted, int(logical.max(initial=0)) + 1)
    table = call.page_table.cpu().numpy()
    physical = torch.from_numpy(table[owner, page].astype(np.int64)).to(call.device)
    length = call.seq_lens.cpu().numpy().astype(np.int64)[owner]
    stored = torch.from_numpy(page[:, None] * PAGE + np.arange(PAGE) < length[:, None]).to(call.device)
    k, v = (
        part.view(torch.uint8)[physical, head].view(torch.float8_e4m3fn).float() for part in (call.k, call.v)
    )
    return entry, k, v.masked_fill_(~stored[:, :, None], 0.0)
