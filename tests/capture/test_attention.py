import pytest
import torch

from pwbench import reference
from pwbench.capture import attention
from tests.calls import make_call


def history(call):
    """Contiguous float K and V of a one-request call."""
    length = int(call.seq_lens[0])
    pages = call.page_table[0, : -(-length // 128)].long()
    return [
        half.contiguous()
        .view(torch.uint8)[pages]
        .view(torch.float8_e4m3fn)
        .float()
        .transpose(1, 2)
        .flatten(0, 1)[:length]
        for half in (call.k, call.v)
    ]


@pytest.mark.parametrize("selection", ["random", "empty", "identical"])
@pytest.mark.parametrize("tile_bytes", [1, 64 << 20])
def test_page_sparse_attention_is_the_operator(monkeypatch, selection, tile_bytes):
    monkeypatch.setitem(attention._TILE_BYTES, "cpu", tile_bytes)
    call = make_call(3, (9,), kv_heads=2, selection=selection, poison="none")
    k, v = history(call)
    out = attention.page_sparse(call.q.float(), k, v, call.topk, call.positions, call.softmax_scale)
    assert reference.compare(out, reference.attend(call).float()).rel_l2 < 1e-6
    assert torch.isfinite(out).all()


def test_dense_attention_is_causal_softmax_whatever_the_tile():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(50, 32, 128, generator=generator)
    k, v = torch.randn(2, 80, 2, 128, generator=generator)
    positions = torch.arange(30, 80)
    out = attention.dense_causal(q, k, v, positions, 0.1)
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(16, 1)) * 0.1
    logits.masked_fill_(torch.arange(80)[None] > positions[:, None], -torch.inf)
    want = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v.repeat_interleave(16, 1))
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
