"""Values chosen so that a wrong order, mask or denominator shows as itself, not as a little more error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pwbench import reference
from pwbench.operator import GROUP_HEADS, HEAD_DIM, PAGE, SparsePrefillCall, supports
from tests.calls import make_call
from tests.gpu.cases import clean, fill, mild, rows_of, select
from tests.gpu.harness import DEVICE, check, every_run, gpu, needs_cuda, prepare, run, same

pytestmark = gpu

TIGHT = {"fast": 1e-2, "accurate": 3e-3}
"""rel-L2 where all logits are equal: quantising Q changes nothing and P is one number."""


def outputs(call: SparsePrefillCall, variant: str, precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    call = call.to(DEVICE)
    return run(prepare(variant, precision, call)), reference.attend(call)


def logical_tokens(call: SparsePrefillCall) -> torch.Tensor:
    """Logical token index of every token of every page of request 0, ``[n_pages, P]``; -1 elsewhere."""
    tokens = torch.full((call.k.shape[0], PAGE), -1)
    for page in range(-(-int(call.seq_lens[0]) // PAGE)):
        tokens[call.page_table[0, page]] = page * PAGE + torch.arange(PAGE)
    return tokens


@every_run
def test_constant_values_come_out_as_that_constant(variant: str, precision: str) -> None:
    call = clean(q_lens=(70,), prefix_lens=(3000,), query_gain=2.0)
    call = replace(call, kv=fill(call, value=1.0))
    out, _ = outputs(call, variant, precision)
    # One bf16 step above 1 is 2^-7, below it 2^-8.
    assert float((out.float() - 1).abs().max()) <= 2**-7


@every_run
def test_a_value_that_names_its_token_shows_the_key_order(variant: str, precision: str) -> None:
    """V is one-hot in the token's place in its page: the output counts every place once per page."""
    call = clean(q_lens=(20,), prefix_lens=(2000,))
    one_hot = torch.eye(PAGE).expand(call.k.shape[0], call.kv_heads, PAGE, HEAD_DIM)
    call = replace(call, kv=fill(call, value=one_hot))
    out, ref = outputs(call, variant, precision)
    check(out, ref, 6e-2 if precision == "fast" else 3e-3, "one-hot values")


@every_run
def test_a_value_that_names_its_channel_shows_the_channel_order(variant: str, precision: str) -> None:
    codes = torch.arange(HEAD_DIM, dtype=torch.uint8)
    codes[127] = 0x80 + 64  # byte 127 is NaN
    channels = codes.view(torch.float8_e4m3fn).float()
    call = clean(q_lens=(20,), prefix_lens=(2000,), query_gain=1.0)
    call = replace(call, kv=fill(call, value=channels))
    out, _ = outputs(call, variant, precision)
    want = channels.to(DEVICE).expand_as(out)
    # NOTE: a tensor core that adds P V page upon page in its accumulator truncates. A denominator from a
    # column of ones is short by as much only where V's products are as exact as those of one: 448 may come
    # out 2.2 % low. Neighbouring e4m3 values are at least 6 % apart, so channels still tell their names.
    rtol = 3e-2 if precision == "fast" else 2**-7
    assert torch.allclose(out.float(), want, rtol=rtol, atol=1e-4)


@every_run
def test_uniform_keys_average_exactly_the_visible_tokens(variant: str, precision: str) -> None:
    """Equal logits; V holds the bits of the token's index, so a token too many or too few shows."""
    call = clean(q_lens=(150,), prefix_lens=(1900,))
    tokens = logical_tokens(call)
    bits = (tokens[..., None] >> torch.arange(HEAD_DIM).clamp(max=15)) & 1
    call = replace(call, kv=fill(call, key=0.0, value=bits[:, None].float()))
    out, ref = outputs(call, variant, precision)
    check(out, ref, TIGHT[precision], "means of visible tokens")
    pages, _ = supports(call)
    visible = np.minimum(call.seq_lens[0].item(), call.positions.numpy() + 1)
    for row in (0, 17, 149):
        chosen = pages[0, row][pages[0, row] >= 0]
        seen = (chosen[:, None] * PAGE + np.arange(PAGE)).ravel()
        seen = seen[seen < visible[row]]
        assert abs(float(out[row, 3, 0]) - np.mean(seen & 1)) <= 1e-2


@every_run
def test_a_valid_nan_value_reaches_only_those_who_selected_its_page(variant: str, precision: str) -> None:
    """Page 5 is selected by every eighth row alone and holds NaN among its valid tokens."""
    call = rows_of(lambda head, row: [*range(4), 5] if row % 8 == 2 else range(4), q_len=48)
    assert isinstance(call.kv, torch.Tensor)
    raw = call.kv.clone().view(torch.uint8)
    raw[call.page_table[0, 5], :, 17, HEAD_DIM:] = 0x7F
    call = replace(call, kv=raw.view(torch.float8_e4m3fn))
    out, ref = outputs(call, variant, precision)
    others = torch.tensor([row % 8 != 2 for row in range(48)], device=DEVICE)
    check(out[others], ref[others], 6e-2 if precision == "fast" else 3e-3, "rows without the NaN page")


@needs_cuda
@every_run
def test_a_future_nan_value_does_not_reach_earlier_rows(variant: str, precision: str) -> None:
    """Token 700 is valid but lies after rows 0 to 49 of the chunk, in a page they all read.

    The CPU forms multiply it by a weight of zero and do let it through; captures hold no such byte.
    """
    call = select(clean(q_lens=(100,), prefix_lens=(650,)), lambda head, row: range(6))
    assert isinstance(call.kv, torch.Tensor)
    raw = call.kv.clone().view(torch.uint8)
    raw[call.page_table[0, 700 // PAGE], :, 700 % PAGE, HEAD_DIM:] = 0xFF
    call = replace(call, kv=raw.view(torch.float8_e4m3fn))
    out, ref = outputs(call, variant, precision)
    check(out[:50], ref[:50], 6e-2 if precision == "fast" else 3e-3, "rows before the NaN token")


@every_run
def test_a_nan_query_leaves_its_neighbours_alone(variant: str, precision: str) -> None:
    call = mild(q_lens=(40,))
    q = call.q.clone()
    q[9] = torch.nan
    q[22, 5] = torch.nan
    spoiled, _ = outputs(replace(call, q=q), variant, precision)
    whole, ref = outputs(call, variant, precision)
    fine = torch.ones(40, GROUP_HEADS, dtype=torch.bool, device=DEVICE)
    fine[9], fine[22, 5] = False, False
    assert bool(torch.isfinite(spoiled[fine]).all())
    assert float((spoiled[fine].float() - whole[fine].float()).norm() / ref[fine].norm()) <= 6e-2
    assert bool(torch.isnan(spoiled[9]).all())


@every_run
def test_permuting_heads_permutes_outputs(variant: str, precision: str) -> None:
    call = mild(q_lens=(40,), kv_heads=2)
    within = torch.randperm(GROUP_HEADS, generator=torch.Generator().manual_seed(3))
    order = torch.cat([within, within + GROUP_HEADS])
    straight, _ = outputs(call, variant, precision)
    permuted, _ = outputs(replace(call, q=call.q[:, order].contiguous()), variant, precision)
    assert same(permuted, straight[:, order.to(DEVICE)])


@every_run
def test_kv_heads_do_not_see_each_other(variant: str, precision: str) -> None:
    call = mild(q_lens=(40,), kv_heads=2)
    assert isinstance(call.kv, torch.Tensor)
    both, _ = outputs(call, variant, precision)
    second = replace(
        call,
        q=call.q[:, GROUP_HEADS:].contiguous(),
        kv=call.kv.view(torch.uint8)[:, 1:].contiguous().view(torch.float8_e4m3fn),
        topk=call.topk[1:].contiguous(),
    )
    alone, _ = outputs(second, variant, precision)
    assert same(alone, both[:, GROUP_HEADS:])


@every_run
@pytest.mark.parametrize("kind", ["ascending", "descending", "shuffled"])
def test_the_order_of_ids_does_not_change_a_bit(kind: str, variant: str, precision: str) -> None:
    call = make_call(seed=4, q_lens=(40,), selection="random", query_gain=1.0)
    pages, _ = supports(call)
    if kind == "descending":
        other = pages[..., ::-1].copy()
    elif kind == "shuffled":
        other = np.random.default_rng(0).permuted(pages, axis=-1)
    else:
        other = pages
    given, _ = outputs(call, variant, precision)
    reordered = replace(call, topk=torch.from_numpy(np.ascontiguousarray(other)))
    assert same(given, outputs(reordered, variant, precision)[0])


@every_run
def test_both_layouts_of_the_cache_give_the_same_bits(variant: str, precision: str) -> None:
    beside, _ = outputs(mild(q_lens=(70,), kv_heads=2), variant, precision)
    apart, _ = outputs(mild(q_lens=(70,), kv_heads=2, separate=True), variant, precision)
    assert same(beside, apart)
