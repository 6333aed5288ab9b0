"""What the FlashInfer baselines share: finding the package and the contract of its MSA prefill."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from pwbench.errors import VariantUnavailable
from pwbench.operator import HEAD_DIM, PAGE, SparsePrefillCall

VERSION = "0.7.4"
INSTALL = f"pip install flashinfer-python=={VERSION}"
CUTE_INSTALL = "pip install nvidia-cutlass-dsl==4.8.1"


def unavailable(name: str, device: torch.device, module: str) -> str | None:
    """Why FlashInfer's ``module`` cannot run on ``device``, or None."""
    if device.type != "cuda":
        return f"{name} needs a CUDA GPU."
    if not torch.cuda.is_available():
        return f"{name} needs a CUDA GPU and torch sees none."
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"{name} is compared on compute capability 9.0 (H100, H200) only."
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == "flashinfer":
            return f"FlashInfer is not installed: {INSTALL}."
        return f"FlashInfer {version()} cannot import {module} ({error}): {INSTALL}."
    except Exception as error:  # an import that compiles can fail in any way; the row says how
        return f"FlashInfer {version()} failed to import {module}: {type(error).__name__}: {error}."
    return None


def version() -> str:
    """FlashInfer's version, ``unknown`` when it does not say."""
    try:
        return str(importlib.import_module("flashinfer.version").__version__)
    except Exception:
        return "unknown"


def check_selections(name: str, call: SparsePrefillCall) -> None:
    """FlashInfer takes ids ascending, distinct, visible and padded at the end, as its own Top-K writes
    them; tables of any other form are another operator to it.

    Raises:
        VariantUnavailable: a row is not of that form.
    """
    ids = call.topk.long()
    request = torch.bucketize(
        torch.arange(call.total_q, device=call.device), call.cu_seqlens_q[1:].long(), right=True
    )
    seen = torch.minimum(call.seq_lens[request].long(), call.positions.long() + 1)
    padding = ids == -1
    rising = (ids[..., 1:] > ids[..., :-1]) | padding[..., 1:]
    visible = padding | (ids >= 0) & (ids * PAGE < seen[None, :, None])
    reopened = padding[..., :-1] & ~padding[..., 1:]
    good = rising.all(-1) & visible.all(-1) & ~reopened.any(-1)
    if not bool(good.all()):
        head, row = (~good).nonzero()[0].tolist()
        raise VariantUnavailable(
            f"{name} takes ascending, distinct, visible ids with -1 last; "
            f"KV head {head}, row {row} is {call.topk[head, row].tolist()}."
        )


def query_offset(name: str, call: SparsePrefillCall) -> torch.Tensor | None:
    """Position of each request's first query, ``[B]`` int32, or None when queries are right-aligned.

    Raises:
        VariantUnavailable: positions inside a request are not consecutive, or reach past its tokens.
    """
    bounds, lengths = call.cu_seqlens_q.tolist(), call.seq_lens.tolist()
    where = call.positions.cpu()
    offsets, aligned = [], True
    for request, length in enumerate(lengths):
        rows = where[bounds[request] : bounds[request + 1]].long()
        first = int(rows[0]) if len(rows) else length
        if not torch.equal(rows, torch.arange(first, first + len(rows))):
            raise VariantUnavailable(
                f"{name} takes consecutive positions; those of request {request} are not."
            )
        if first + len(rows) > length:
            raise VariantUnavailable(
                f"{name} takes positions inside the request; request {request} has {length} tokens "
                f"and a query at {first + len(rows) - 1}."
            )
        offsets.append(first)
        aligned &= first == length - len(rows)
    return None if aligned else torch.tensor(offsets, dtype=torch.int32, device=call.device)


def check_layout(name: str, call: SparsePrefillCall) -> None:
    """The MSA kernels read K and V as halves of one dense buffer and q as one dense block.

    Raises:
        VariantUnavailable: they are not.
    """
    if not isinstance(call.kv, torch.Tensor) or not call.kv.is_contiguous():
        raise VariantUnavailable(
            f"{name} takes K and V side by side in one dense cache; this call's are apart."
        )
    if not call.q.is_contiguous():
        raise VariantUnavailable(f"{name} takes contiguous q; its strides are {call.q.stride()}.")


def route(call: SparsePrefillCall) -> str:
    """Which of its kernels FlashInfer sends this call to, asked of its own dispatcher."""
    dispatch: Any = importlib.import_module("flashinfer.msa_ops._sm90_dispatch")
    cake: Any = importlib.import_module("flashinfer.msa_ops.cake_hopper_sm90")
    sizes = {
        "num_q_heads": call.q_heads,
        "num_kv_heads": call.kv_heads,
        "max_pages": call.page_table.shape[1],
    }
    try:
        cute = dispatch._cute_prefill_preferred(call.q, call.k, call.v, call.page_table)
        if not cute and cake.prefill_route_available(**sizes):
            return f"Cake {cake.plan_sparse_prefill(**sizes).impl}"
        return "CuTe single" if call.page_table.shape[1] > dispatch._MPG_UNION_MAX else "CuTe union"
    except AttributeError as error:
        return f"kernel unknown ({error})"


def warm(name: str, run: Any, device: torch.device) -> None:
    """Run once, so that every program is built before anything is captured or timed.

    Raises:
        VariantUnavailable: the peer's own error, with what to install when a package is missing.
    """
    try:
        run()
        torch.cuda.synchronize(device)
    except ModuleNotFoundError as error:
        advice = CUTE_INSTALL if "cut" in str(error.name) else INSTALL
        raise VariantUnavailable(f"{name} needs the package {error.name}: {advice}.") from error
    except (NotImplementedError, ValueError, RuntimeError) as error:
        text = str(error).strip().splitlines()
        raise VariantUnavailable(
            f"{name} refused this call: {text[0] if text else type(error).__name__}"
        ) from error


def kv_views(call: SparsePrefillCall) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V with one KV head per row, ``[n_pages * Hkv, 1, P, D]`` views of the cache."""
    pages = call.k.shape[0] * call.kv_heads
    if isinstance(call.kv, torch.Tensor):
        flat = call.kv.view(pages, 1, PAGE, 2 * HEAD_DIM)
        return flat[..., :HEAD_DIM], flat[..., HEAD_DIM:]
    return call.kv[0].view(pages, 1, PAGE, HEAD_DIM), call.kv[1].view(pages, 1, PAGE, HEAD_DIM)
