"""Several recordings of one layer as the one call that a serving engine would batch them into."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pwbench.capture.format import Tables
from pwbench.capture.recorder import Recording
from pwbench.errors import InputError
from pwbench.operator import INVALID, SparsePrefillCall


def combine(recordings: Sequence[Recording], placement_seed: int | None = None) -> Recording:
    """Put the requests of ``recordings`` behind each other in one call.

    Args:
        recordings: of one layer, with equal scales and KV heads.
        placement_seed: scatter the pages over the cache as a paged allocator does, in an order drawn
            from this seed; None keeps each request's pages together and in order.

    Returns:
        the combined recording; ``out_model`` only when all have one.

    Raises:
        InputError: nothing to combine, or layers, scales or head counts differ.
    """
    if not recordings:
        raise InputError("There is no recording to combine, expected at least one.")
    calls = [recording.call for recording in recordings]
    for what, values in (
        ("layer", [recording.facts.get("layer") for recording in recordings]),
        ("softmax_scale", [call.softmax_scale for call in calls]),
        ("k_scale", [call.k_scale for call in calls]),
        ("v_scale", [call.v_scale for call in calls]),
        ("number of KV heads", [call.kv_heads for call in calls]),
    ):
        if len(set(values)) != 1:
            raise InputError(f"Recordings to combine differ in {what}: {values}; one call has one.")
    kv = torch.cat([_bytes(call) for call in calls])
    place = np.arange(kv.shape[0])
    if placement_seed is not None:
        place = np.random.RandomState(placement_seed).permutation(kv.shape[0])
        kv = kv[torch.from_numpy(np.argsort(place))]
    first_page = np.cumsum([0] + [call.k.shape[0] for call in calls])
    width = max(call.page_table.shape[1] for call in calls)
    rows = []
    for first, call in zip(first_page, calls, strict=False):
        for row in Tables.of_call(call).page_table:
            moved = np.full(width, INVALID, dtype=np.int32)
            moved[: len(row)] = np.where(row < 0, INVALID, place[np.maximum(row, 0) + first])
            rows.append(moved)
    bounds = np.concatenate([[0]] + [np.diff(call.cu_seqlens_q.numpy()) for call in calls]).cumsum()
    call = SparsePrefillCall(
        q=torch.cat([call.q for call in calls]),
        kv=kv.view(torch.float8_e4m3fn),
        topk=torch.cat([call.topk for call in calls], dim=1),
        page_table=torch.from_numpy(np.stack(rows)),
        cu_seqlens_q=torch.from_numpy(bounds.astype(np.int32)),
        seq_lens=torch.cat([call.seq_lens for call in calls]),
        positions=torch.cat([call.positions for call in calls]),
        softmax_scale=calls[0].softmax_scale,
        k_scale=calls[0].k_scale,
        v_scale=calls[0].v_scale,
    ).validate()
    outs = [recording.out_model for recording in recordings]
    whole_out = (
        torch.cat([out for out in outs if out is not None]) if all(o is not None for o in outs) else None
    )
    facts = dict(recordings[0].facts)
    facts["chunk"] = [recording.facts.get("chunk") for recording in recordings]
    facts["prompt"] = [recording.facts.get("prompt") for recording in recordings]
    facts["page_placement"] = {"scattered_by_seed": placement_seed}
    return Recording(call, whole_out, facts)


def _bytes(call: SparsePrefillCall) -> torch.Tensor:
    parts = (call.kv,) if isinstance(call.kv, torch.Tensor) else call.kv
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)
