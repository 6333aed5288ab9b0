"""BF16 or FP32 keys and values to FP8 E4M3 pages, the operator's cache layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pwbench.operator import PAGE

E4M3_MAX = 448.0

CONVENTION = "stored = value / scale"
ROUNDING = "to nearest even, saturating at 448"


def to_e4m3(values: torch.Tensor, scale: float) -> torch.Tensor:
    """``values / scale`` rounded to the nearest E4M3 number; magnitudes above 448 become 448."""
    return (values.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def pages_from_tokens(
    k: torch.Tensor, v: torch.Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> torch.Tensor:
    """Pack one request's history into pages, zeros after the last token.

    Args:
        k, v: ``[tokens, Hkv, D]``, any floating type.
        k_scale, v_scale: stored = value / scale.

    Returns:
        ``[ceil(tokens / P), Hkv, P, 2D]`` float8_e4m3fn, page i holding tokens i*P and on.
    """
    stored = torch.cat([to_e4m3(k, k_scale), to_e4m3(v, v_scale)], dim=-1).view(torch.uint8)
    tokens, heads, width = stored.shape
    padded = F.pad(stored, (0, 0, 0, 0, 0, -tokens % PAGE))
    pages = padded.view(-1, PAGE, heads, width).transpose(1, 2).contiguous()
    return pages.view(torch.float8_e4m3fn)


def saturated(values: torch.Tensor, scale: float) -> int:
    """How many values E4M3 cannot hold at this scale."""
    return int((values.float().abs() > E4M3_MAX * scale).sum())
