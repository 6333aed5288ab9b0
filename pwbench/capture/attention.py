"""Memory-bounded attention in PyTorch: what a model runs while it is being recorded.

Neither function builds anything of size queries x keys for a whole chunk, so contexts of 128K fit.
Both work in float32 on the values they are given and return the input's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pwbench.operator import PAGE

# Those that take a mask of any width: the choice must not depend on library versions.
_MASKED_BACKENDS = {
    True: [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    False: [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
}
_TILE_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}


def page_sparse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    topk: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Each query attends to the visible tokens of its selected pages.

    Args:
        q: ``[n, Hq, D]``.
        k, v: the history, ``[tokens, Hkv, D]``.
        topk: distinct logical page ids, ``[Hkv, n, K]`` integers, -1 pads.
        positions: causal position of each query, ``[n]``.
        scale: multiplies the logits.

    Returns:
        ``[n, Hq, D]`` in the dtype of ``q``; zero where nothing is visible.
    """
    rows, q_heads, dim = q.shape
    tokens, kv_heads, _ = k.shape
    group, selected = q_heads // kv_heads, topk.shape[-1]
    k_pages, v_pages = _paged(k), _paged(v)
    tile = max(1, _TILE_BYTES.get(q.device.type, 64 << 20) // (selected * PAGE * dim * 4 * 2))
    offsets = torch.arange(PAGE, device=q.device)
    out = torch.empty_like(q)
    for head in range(kv_heads):
        heads = slice(head * group, (head + 1) * group)
        for begin in range(0, rows, tile):
            part = slice(begin, min(begin + tile, rows))
            ids = topk[head, part].long()
            token = ids.clamp(min=0)[..., None] * PAGE + offsets
            visible = (ids >= 0)[..., None] & (token <= positions[part, None, None]) & (token < tokens)
            hidden = ~visible.flatten(1)[:, None]
            keys = k_pages[head][ids.clamp(min=0)].flatten(1, 2).float()
            logits = torch.bmm(q[part, heads].float() * scale, keys.transpose(1, 2))
            weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            weights = weights.masked_fill(hidden.all(dim=-1, keepdim=True), 0.0)
            values = v_pages[head][ids.clamp(min=0)].flatten(1, 2).float()
            out[part, heads] = torch.bmm(weights, values).to(q.dtype)
    return out


def dense_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """Full causal attention of a chunk over its whole history, tiled over queries.

    Shapes as in `page_sparse`; key j is visible to query i when ``j <= positions[i]``.
    """
    rows, q_heads, _ = q.shape
    tokens, kv_heads, _ = k.shape
    keys = k.transpose(0, 1).repeat_interleave(q_heads // kv_heads, dim=0)[None]
    values = v.transpose(0, 1).repeat_interleave(q_heads // kv_heads, dim=0)[None]
    tile = max(1, min(rows, (32 << 20) // max(tokens, 1)))
    index = torch.arange(tokens, device=q.device)
    out = torch.empty_like(q)
    for begin in range(0, rows, tile):
        part = slice(begin, min(begin + tile, rows))
        seen = int(positions[part].max()) + 1
        mask = index[None, :seen] <= positions[part, None]
        queries = q[part].transpose(0, 1)[None]
        with sdpa_kernel(_MASKED_BACKENDS[q.device.type == "cuda"]):
            result = F.scaled_dot_product_attention(
                queries, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, scale=scale
            )
        out[part] = result[0].transpose(0, 1)
    return out


def _paged(history: torch.Tensor) -> torch.Tensor:
    """``[tokens, Hkv, D]`` as ``[Hkv, pages, P, D]``, zeros after the last token."""
    tokens, heads, dim = history.shape
    padded = F.pad(history, (0, 0, 0, 0, 0, -tokens % PAGE))
    return padded.view(-1, PAGE, heads, dim).permute(2, 0, 1, 3).contiguous()
