"""`Recorder`: what an attention operator calls, in process, to hand over its inputs.

Two ways in. `Recorder.record` takes a prefill chunk of one request and joins chunks until each
target (layer, queries, context) is whole, so a chunk recorded can be longer than the chunk the
engine prefills. `Recorder.record_call` takes one complete operator call as an engine makes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from pwbench.capture.quantize import CONVENTION, ROUNDING, pages_from_tokens, saturated
from pwbench.errors import InputError
from pwbench.operator import GROUP_HEADS, HEAD_DIM, INVALID, TOPK, SparsePrefillCall


@dataclass(frozen=True)
class Target:
    """The last ``queries`` positions of the first ``context`` tokens, at ``layer``."""

    layer: int
    queries: int
    context: int

    @property
    def begin(self) -> int:
        return self.context - self.queries


@dataclass
class Recording:
    """One call with what is known about it.

    Attributes:
        call: the inputs, on the CPU.
        out_model: what the model itself computed, ``[total_q, Hq, D]`` bfloat16, or None.
        facts: manifest entries that the recording knows (``layer``, ``chunk``, ``quant``).
    """

    call: SparsePrefillCall
    out_model: torch.Tensor | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Parts:
    """A target's chunks so far, copied to the CPU; ``end`` is the next position expected."""

    end: int
    q: list[torch.Tensor] = field(default_factory=list)
    topk: list[torch.Tensor] = field(default_factory=list)
    out: list[torch.Tensor] = field(default_factory=list)


class Recorder:
    """Collects targets from prefill chunks, and whole calls.

    Everything kept is copied to the CPU before a method returns, so an engine may reuse its buffers.

    Args:
        targets: what `record` should collect.
        layers: layers whose whole calls `record_call` keeps; None keeps all.
        max_calls: how many calls `record_call` keeps at most.
        k_scale, v_scale: FP8 scales for `record`, stored = value / scale.

    Raises:
        InputError: a target asks for more queries than its context has.

    Example:
        >>> recorder = Recorder(layers=[12], max_calls=4)
        >>> recorder.record_call(call, layer=12)  # in the engine's attention, before or after the kernel
        >>> for n, one in enumerate(recorder.calls):
        ...     write(f"captures/mine/call-{n}", one.call, facts=one.facts)
    """

    def __init__(
        self,
        targets: Iterable[Target] = (),
        *,
        layers: Iterable[int] | None = None,
        max_calls: int = 16,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        self.targets = list(dict.fromkeys(targets))
        for target in self.targets:
            if not 0 < target.queries <= target.context:
                raise InputError(
                    f"Target at layer {target.layer} asks for {target.queries} queries of a context of "
                    f"{target.context}; expected between 1 and the context."
                )
        self._layers = None if layers is None else set(layers)
        self._max_calls = max_calls
        self._scales = (k_scale, v_scale)
        self._parts = {target: _Parts(end=target.begin) for target in self.targets}
        self._whole: dict[Target, Recording] = {}
        self.calls: list[Recording] = []
        self.skipped_dummies = 0
        self.skipped_calls = 0

    # Chunks of one request ------------------------------------------------------------------

    def wants(self, layer: int, begin: int, end: int) -> bool:
        """Whether any target needs positions ``begin`` to ``end - 1`` of ``layer``."""
        return any(_overlaps(target, layer, begin, end) for target in self.targets)

    def record(
        self,
        layer: int,
        begin: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        topk: torch.Tensor,
        softmax_scale: float,
        out: torch.Tensor | None = None,
    ) -> None:
        """Take one prefill chunk of one request: its queries sit at ``begin``, ``begin + 1``, ...

        Args:
            layer: layer index.
            begin: position of the chunk's first query; chunks of a layer come in order.
            q: ``[n, Hq, D]``.
            k, v: the whole history up to this chunk's last token, ``[begin + n, Hkv, D]``.
            topk: selected logical pages, ``[Hkv, n, <= TOPK]``, any order, -1 pads.
            softmax_scale: multiplies the logits.
            out: what the model computes from these, ``[n, Hq, D]``.

        Raises:
            InputError: a shape is not the operator's, or a chunk is missing or came twice.
        """
        end = begin + q.shape[0]
        targets = [t for t in self.targets if _overlaps(t, layer, begin, end) and t not in self._whole]
        if not targets:
            return
        _check_chunk(layer, begin, q, k, v, topk)
        for target in targets:
            parts = self._parts[target]
            low, high = max(begin, target.begin), min(end, target.context)
            if low != parts.end:
                raise InputError(
                    f"Layer {layer} was handed positions from {low}, expected {parts.end} next; chunks must "
                    "come in order, one request at a time, without left padding."
                )
            rows = slice(low - begin, high - begin)
            parts.end = high
            parts.q.append(q[rows].to("cpu", torch.bfloat16, copy=True))
            parts.topk.append(_padded(topk[:, rows]).to("cpu", copy=True))
            if out is not None:
                parts.out.append(out[rows].to("cpu", torch.bfloat16, copy=True))
            if high == target.context:
                history = k[: target.context], v[: target.context]
                self._whole[target] = self._join(target, parts, *history, softmax_scale)
                del self._parts[target]

    def _join(
        self, target: Target, parts: _Parts, k: torch.Tensor, v: torch.Tensor, softmax_scale: float
    ) -> Recording:
        k_scale, v_scale = self._scales
        kv = pages_from_tokens(k, v, k_scale, v_scale).cpu()
        pages = kv.shape[0]
        call = SparsePrefillCall(
            q=torch.cat(parts.q),
            kv=kv,
            topk=torch.cat(parts.topk, dim=1),
            page_table=torch.arange(pages, dtype=torch.int32)[None],
            cu_seqlens_q=torch.tensor([0, target.queries], dtype=torch.int32),
            seq_lens=torch.tensor([target.context], dtype=torch.int32),
            positions=torch.arange(target.begin, target.context, dtype=torch.int32),
            softmax_scale=softmax_scale,
            k_scale=k_scale,
            v_scale=v_scale,
        ).validate()
        quant = {
            "kv_dtype": "float8_e4m3fn",
            "k_scale": k_scale,
            "v_scale": v_scale,
            "convention": CONVENTION,
            "rounding": ROUNDING,
            "who": "pwbench",
            "saturated_values": saturated(k, k_scale) + saturated(v, v_scale),
        }
        chunk = {"begin": target.begin, "queries": target.queries, "context": target.context}
        whole_out = torch.cat(parts.out) if parts.out else None
        return Recording(call, whole_out, {"layer": target.layer, "chunk": chunk, "quant": quant})

    def take(self) -> dict[Target, Recording]:
        """The targets, whole, in the order asked for.

        Raises:
            InputError: a target did not see all of its positions.
        """
        missing = [t for t in self.targets if t not in self._whole]
        if missing:
            first = missing[0]
            raise InputError(
                f"{len(missing)} of {len(self.targets)} targets are incomplete; layer {first.layer} of "
                f"context {first.context} ends at position {self._parts[first].end}. Is it a sparse layer?"
            )
        return {target: self._whole[target] for target in self.targets}

    # Whole calls ----------------------------------------------------------------------------

    def record_call(
        self,
        call: SparsePrefillCall,
        layer: int | None = None,
        out: torch.Tensor | None = None,
        **facts: Any,
    ) -> bool:
        """Take one complete operator call of any number of requests; returns whether it was kept.

        The dummies that engines run for profiling and graph capture select page 0 sixteen times
        over: they are skipped and counted in ``skipped_dummies``. Calls of other layers or beyond
        ``max_calls`` are skipped and counted in ``skipped_calls``.

        Raises:
            OperatorError: the call breaks the operator's contract.
        """
        if is_dummy(call.topk):
            self.skipped_dummies += 1
            return False
        unwanted = self._layers is not None and layer not in self._layers
        if unwanted or len(self.calls) >= self._max_calls:
            self.skipped_calls += 1
            return False
        call.validate()
        kept = call.to("cpu")
        if kept.q.data_ptr() == call.q.data_ptr():
            kept = _cloned(kept)
        out_model = None if out is None else out.to("cpu", torch.bfloat16, copy=True)
        quant = {
            "kv_dtype": "float8_e4m3fn",
            "k_scale": call.k_scale,
            "v_scale": call.v_scale,
            "convention": CONVENTION,
            "who": "engine",
        }
        self.calls.append(Recording(kept, out_model, {"layer": layer, "quant": quant, **facts}))
        return True


def is_dummy(topk: torch.Tensor) -> bool:
    """Whether a selection is a profiling or graph-capture dummy: page 0 in all TOPK places.

    No selector repeats a page, so this cannot be a real row, however short the context.
    """
    return topk.numel() > 0 and topk.shape[-1] > 1 and not bool(topk.any())


def _overlaps(target: Target, layer: int, begin: int, end: int) -> bool:
    return target.layer == layer and begin < target.context and target.begin < end


def _padded(topk: torch.Tensor) -> torch.Tensor:
    """``[Hkv, n, k <= TOPK]`` of any integer type as contiguous ``[Hkv, n, TOPK]`` int32."""
    padded = torch.full((*topk.shape[:2], TOPK), INVALID, dtype=torch.int32, device=topk.device)
    padded[..., : topk.shape[-1]] = topk
    return padded


def _cloned(call: SparsePrefillCall) -> SparsePrefillCall:
    names = ("q", "topk", "page_table", "cu_seqlens_q", "seq_lens", "positions")
    tensors: dict[str, Any] = {name: getattr(call, name).clone() for name in names}
    tensors["kv"] = (
        call.kv.clone() if isinstance(call.kv, torch.Tensor) else tuple(x.clone() for x in call.kv)
    )
    return SparsePrefillCall(
        **tensors, softmax_scale=call.softmax_scale, k_scale=call.k_scale, v_scale=call.v_scale
    )


def _check_chunk(
    layer: int, begin: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, topk: torch.Tensor
) -> None:
    rows, heads = q.shape[0], topk.shape[0]
    expected_q = [rows, GROUP_HEADS * heads, HEAD_DIM]
    if list(q.shape) != expected_q:
        raise InputError(f"Layer {layer}: q is {list(q.shape)}, expected {expected_q} for {heads} KV heads.")
    if topk.shape[1] != rows or topk.shape[2] > TOPK:
        raise InputError(
            f"Layer {layer}: topk is {list(topk.shape)}, expected [{heads}, {rows}, at most {TOPK}]."
        )
    for name, history in (("k", k), ("v", v)):
        if list(history.shape) != [begin + rows, heads, HEAD_DIM]:
            raise InputError(
                f"Layer {layer}: {name} is {list(history.shape)}, expected the whole history "
                f"{[begin + rows, heads, HEAD_DIM]}."
            )
