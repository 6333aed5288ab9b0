"""The page-major design on the CPU: what the kernels do, in float32 and plain torch.

Pages are walked in turn, each with the rows that selected it. Every entry leaves a partial output,
normalised by its own sum, in the slot its page has in the row's support; the reduction adds a row's
slots in ascending order.
"""

from __future__ import annotations

from typing import Any

import torch

from pwbench.operator import (
    GROUP_HEADS,
    HEAD_DIM,
    PAGE,
    TOPK,
    SparsePrefillCall,
    supports,
    visible_tokens,
)
from pwbench.page_plan import PageLists, list_queries
from pwbench.variants._union_cpu import float_pages

_LISTS_AT_ONCE = 64
"""Pages widened to float32 together: 8 MiB."""


class PageWalk:
    """One call and the state that passes from stage to stage.

    Attributes:
        chunk_rows: rows whose partial outputs are held at once.
        lists: the page lists, made by `metadata`.
        partial: ``[Hkv, chunk_rows, 16 slots, 16 heads, D]`` float32, each slot's own softmax average.
        top, weight: largest logit and sum of exponentials of each, ``[Hkv, chunk_rows, 16, 16]`` float32.
        out: ``[total_q, Hq, D]`` float32, every row written once by the `reduction` of its chunk.
    """

    def __init__(self, call: SparsePrefillCall, chunk_rows: int) -> None:
        self.call = call
        self.chunk_rows = chunk_rows
        self.lists: PageLists | None = None
        self.out = torch.empty((call.total_q, call.q_heads, HEAD_DIM), dtype=torch.float32)
        slots = (call.kv_heads, chunk_rows, TOPK, GROUP_HEADS)
        # Filled with NaN: a slot that is read without having been written shows in the output.
        self.partial = torch.full((*slots, HEAD_DIM), torch.nan)
        self.top = torch.full(slots, torch.nan)
        self.weight = torch.full(slots, torch.nan)

    @property
    def chunks(self) -> int:
        return -(-self.call.total_q // self.chunk_rows)

    def metadata(self) -> None:
        pages, counts = supports(self.call)
        self.lists = list_queries(pages, self.call.cu_seqlens_q.numpy(), self.chunk_rows)
        self.counts = torch.from_numpy(counts)
        self.visible = torch.from_numpy(visible_tokens(self.call))

    def attention(self, chunk: int) -> None:
        """Partial outputs of every entry of one chunk, page by page."""
        lists = self._lists()
        for head in range(self.call.kv_heads):
            mine = ((lists.chunk == chunk) & (lists.kv_head == head)).nonzero()[0]
            for first in range(0, len(mine), _LISTS_AT_ONCE):
                part = mine[first : first + _LISTS_AT_ONCE]
                entry, k, v = float_pages(self.call, head, lists.request[part], lists.page[part])
                for index, place in zip(part, entry, strict=True):
                    self._attend_list(int(index), k[place], v[place])

    def _attend_list(self, index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        lists, call = self._lists(), self.call
        head = int(lists.kv_head[index])
        part = slice(int(lists.offsets[index]), int(lists.offsets[index + 1]))
        rows = torch.from_numpy(lists.rows[part]).long()
        slots = torch.from_numpy(lists.slots[part]).long()
        q = call.q[rows, head * GROUP_HEADS : (head + 1) * GROUP_HEADS].float()
        logits = q @ k.T * (call.softmax_scale * call.k_scale)
        token = int(lists.page[index]) * PAGE + torch.arange(PAGE)
        # Masked by selection, not by adding: a token past L may hold NaN.
        hidden = token >= self.visible[rows, None]
        logits.masked_fill_(hidden[:, None, :], -torch.inf)
        top = logits.amax(dim=-1)
        p = logits.sub_(top[..., None]).exp_()
        weight = p.sum(dim=-1)
        local = rows % self.chunk_rows
        self.partial[head, local, slots] = p @ v / weight[..., None]
        self.top[head, local, slots] = top
        self.weight[head, local, slots] = weight

    def reduction(self, chunk: int) -> None:
        """Merge the slots of one chunk's rows in ascending order; rows without a page become 0."""
        first = chunk * self.chunk_rows
        rows = min(self.chunk_rows, self.call.total_q - first)
        for head in range(self.call.kv_heads):
            filled = torch.arange(TOPK) < self.counts[head, first : first + rows, None]
            top = self.top[head, :rows].masked_fill(~filled[:, :, None], -torch.inf)
            highest = top.amax(dim=1).nan_to_num(nan=torch.nan, neginf=0.0)
            total = torch.zeros(rows, GROUP_HEADS, HEAD_DIM)
            mass = torch.zeros(rows, GROUP_HEADS, 1)
            for slot in range(TOPK):
                mine = filled[:, slot, None, None]
                share = self.weight[head, :rows, slot] * torch.exp(top[:, slot] - highest)
                mass += torch.where(mine, share[..., None], 0.0)
                total += torch.where(mine, share[..., None] * self.partial[head, :rows, slot], 0.0)
            heads = slice(head * GROUP_HEADS, (head + 1) * GROUP_HEADS)
            total *= self.call.v_scale / torch.where(mass == 0, 1.0, mass)
            self.out[first : first + rows, heads] = total

    def download(self) -> dict[str, Any]:
        """The page lists that `metadata` made, for tests."""
        return {"lists": self.lists}

    def _lists(self) -> PageLists:
        if self.lists is None:
            raise RuntimeError("attention needs the page lists that the metadata stage makes")
        return self.lists
