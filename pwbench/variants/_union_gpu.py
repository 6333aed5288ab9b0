"""The union variants on a Hopper GPU: search, page lists and V images, then an attention kernel.

Everything per call is two launches on the current torch stream:

    online order     plan_and_pack     -> attention
    original order   prepare_and_pack  -> attention

The stages launch the same work cut apart: ``search`` (regroup), ``metadata`` (V images and page
lists) and ``attention``. Grids and buffers follow from shapes alone, so ids and lengths may change in
place between replays of a captured graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pwbench import kernels
from pwbench.errors import VariantUnavailable
from pwbench.kernels import Kernel, Launch
from pwbench.operator import HEAD_DIM, PAGE, SparsePrefillCall
from pwbench.variants._base import Options, Prepared, Stage
from pwbench.variants._union_plan import (
    BLOCK,
    DESIGNS,
    PAGE_RECORD,
    TASK_QUEUE,
    TASK_RECORD,
    Design,
    Plan,
    Workspace,
    listed_tasks,
    unions_of,
)


def prepare(call: SparsePrefillCall, options: Options, *, name: str, order: str) -> Prepared:
    """Bind a union variant to a call on the GPU.

    Args:
        call: a valid call on a CUDA device of compute capability 9.0.
        options: ``precision`` picks the attention kernel's form, ``window`` the search's (rounded down to
            whole tasks).
        name: the variant; its part before the first hyphen names the design.
        order: ``original``, ``online`` (the search is part of the call) or ``precomputed`` (it runs here, for
            the request boundaries that the call has now: they must not change in place afterwards).

    Raises:
        VariantUnavailable: a tensor's layout or size is beyond the kernels.
        MeasurementError: no compiler or no GPU.
    """
    check_layout(call)
    design = DESIGNS[name.split("-")[0]][options.precision]
    with torch.cuda.device(call.device):
        walk = _UnionWalk(call, design, options.window, regrouped=order != "original")
        if order == "precomputed":
            walk.regroup()
            torch.cuda.synchronize()
    if order == "online":
        launches = [walk.plan_and_pack, walk.attention]
        stages = [
            Stage("search", walk.regroup),
            Stage("metadata", in_turn([walk.pack_values, walk.prepare])),
            Stage("attention", walk.attention),
        ]
    else:
        launches = [walk.prepare_and_pack, walk.attention]
        stages = [Stage("metadata", walk.prepare_and_pack), Stage("attention", walk.attention)]
    searched = {"window": str(walk.plan.window), "search_group": str(walk.plan.search_group)}
    if order == "original":
        searched.clear()
    return Prepared(
        run=in_turn(launches),
        stages=stages,
        out=walk.out,
        query_ids=lambda: None if order == "original" else walk.workspace.order.clone(),
        group=design.queries,
        details={
            "kernels": " ".join([design.source, *(f"{k}={v}" for k, v in design.defines.items())]),
            **searched,
            "workspace_bytes": str(walk.workspace.bytes),
        },
        debug=walk.download,
    )


def in_turn(launches: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """One callable that makes the launches in order."""

    def run() -> None:
        for launch in launches:
            launch()

    return run


def check_layout(call: SparsePrefillCall) -> None:
    """Prove that the kernels can address the call's tensors.

    Raises:
        VariantUnavailable: naming the tensor at fault.
    """
    for name in ("q", "topk", "page_table", "cu_seqlens_q", "seq_lens", "positions"):
        tensor = getattr(call, name)
        if not tensor.is_contiguous() or (name in ("q", "topk") and tensor.data_ptr() % 16):
            raise VariantUnavailable(
                f"{name} has strides {tensor.stride()} and starts at {tensor.data_ptr():#x}; the kernels "
                f"need it contiguous and q and topk 16-byte aligned. Pass a contiguous copy."
            )
    for name, part in (("K", call.k), ("V", call.v)):
        strides = part.stride()
        if strides[-1] != 1 or any(s % 16 for s in strides[:-1]) or part.data_ptr() % 16:
            raise VariantUnavailable(
                f"{name} of the cache has strides {strides}; the kernels need contiguous channels and "
                "16-byte aligned tokens, heads and pages."
            )


class _UnionWalk:
    """The launches of one call, bound to its tensors and workspace."""

    def __init__(self, call: SparsePrefillCall, design: Design, window: int, *, regrouped: bool) -> None:
        self.call = call
        self.design = design
        self.plan = Plan.of(call, design, window)
        self.workspace = Workspace.allocate(self.plan, call.device)
        self.out = torch.empty_like(call.q)
        self._multiprocessors = torch.cuda.get_device_properties(call.device).multi_processor_count
        self._programmatic = {"PROGRAMMATIC": 1} if design.programmatic else {}
        # Left out where it is the default, which keeps binaries compiled without it in use.
        self._packing = {**self._programmatic, **({"VALUE_BYTES": 2} if design.value_bytes == 2 else {})}

        self._bind_metadata(regrouped)
        self.attention = self._bind_attention()

    def _bind_metadata(self, regrouped: bool) -> None:
        plan = self.plan
        lists, values = self._prepare_params(regrouped), self._pack_params()
        packers = plan.pack_blocks(self._multiprocessors)
        fused = {**self._packing, "PACK_SELECTED": int(plan.packs_selected)}

        def prepare(entry: str) -> Kernel:
            defines = {"TASK_QUERIES": plan.queries, **fused}
            return kernels.get("prepare.cu", entry, defines, shared=plan.prepare_shared)

        self.prepare = prepare("prepare").bind(
            (plan.tasks,), BLOCK, lists, programmatic=self.design.programmatic
        )
        self.prepare_and_pack = prepare("prepare_and_pack").bind(
            (plan.tasks + packers,), BLOCK, lists, values
        )
        pack = kernels.get(
            "pack_values.cu", "pack_selected" if plan.packs_selected else "pack_values", self._packing
        )
        selection = [self._selection_params()] if plan.packs_selected else []
        self.pack_values = pack.bind((packers,), BLOCK, values, *selection)
        if regrouped:
            self._bind_search(lists, values, packers, fused)

    def _bind_search(
        self, lists: np.ndarray, values: np.ndarray, packers: int, fused: dict[str, int]
    ) -> None:
        plan, search = self.plan, self._regroup_params()
        defines = {
            "GROUP": plan.search_group,
            "TASK_QUERIES": plan.queries,
            "WINDOW": plan.window,
            **({"MATCHING": 1} if self.design.matching else {}),
            **fused,
        }

        def regroup(entry: str) -> Kernel:
            return kernels.get("regroup.cu", entry, defines, shared=plan.regroup_shared)

        self.regroup = regroup("regroup").bind((plan.windows,), BLOCK, search)
        self.plan_and_pack = regroup("plan_and_pack").bind(
            (plan.windows + packers,), BLOCK, search, lists, values
        )

    def _regroup_params(self) -> np.ndarray:
        call, plan = self.call, self.plan
        return kernels.pack(
            kernels.params_dtype("window.cuh", "RegroupParams"),
            topk=call.topk,
            cu_seqlens_q=call.cu_seqlens_q,
            seq_lens=call.seq_lens,
            positions=call.positions,
            order=self.workspace.order,
            total_q=plan.total_q,
            requests=plan.requests,
            max_pages=plan.max_pages,
            kv_heads=plan.kv_heads,
            windows_per_head=plan.windows_per_head,
        )

    def _prepare_params(self, regrouped: bool) -> np.ndarray:
        call, plan, space = self.call, self.plan, self.workspace
        queued = self.design.persistent
        return kernels.pack(
            kernels.params_dtype("tasks.cuh", "PrepareParams"),
            topk=call.topk,
            order=space.order if regrouped else None,
            page_table=call.page_table,
            cu_seqlens_q=call.cu_seqlens_q,
            seq_lens=call.seq_lens,
            positions=call.positions,
            task_records=space.tasks,
            page_records=space.pages,
            task_order=space.task_order if queued else None,
            queue=space.queue if queued else None,
            total_q=plan.total_q,
            requests=plan.requests,
            max_pages=plan.max_pages,
            kv_heads=plan.kv_heads,
            tasks_per_head=plan.tasks_per_head,
        )

    def _pack_params(self) -> np.ndarray:
        call, plan = self.call, self.plan
        page, head, token, _ = call.v.stride()  # one byte an element
        return kernels.pack(
            kernels.params_dtype("pack_values.cuh", "PackParams"),
            v=call.v,
            images=self.workspace.images,
            page_table=call.page_table,
            seq_lens=call.seq_lens,
            page_stride=page,
            head_stride=head,
            token_stride=token,
            requests=plan.requests,
            max_pages=plan.max_pages,
            kv_heads=plan.kv_heads,
            blocks=plan.pack_blocks(self._multiprocessors),
        )

    def _selection_params(self) -> np.ndarray:
        return kernels.pack(
            kernels.params_dtype("pack_values.cuh", "Selection"),
            topk=self.call.topk,
            cu_seqlens_q=self.call.cu_seqlens_q,
            positions=self.call.positions,
            total_q=self.plan.total_q,
        )

    def _bind_attention(self) -> Launch:
        call, plan, space, design = self.call, self.plan, self.workspace, self.design
        defines = {**design.defines, **self._programmatic}
        params = kernels.pack(
            kernels.params_dtype("records.cuh", "AttentionParams"),
            q=call.q,
            out=self.out,
            values=space.images,
            task_records=space.tasks,
            page_records=space.pages,
            task_order=space.task_order if design.persistent else None,
            queue=space.queue if design.persistent else None,
            query_bytes=call.q_heads * HEAD_DIM * call.q.element_size(),
            tasks=plan.tasks,
            kv_heads=plan.kv_heads,
            record_stride=plan.record_stride,
            scale_log2=call.softmax_scale * call.k_scale * math.log2(math.e),
            v_scale=call.v_scale,
        )
        page, head, token, _ = call.k.stride()
        keys = kernels.tensor_map(
            call.k.data_ptr(),
            "uint8",
            sizes=(HEAD_DIM, PAGE, plan.kv_heads, plan.pool_pages),
            strides=(token, head, page),
            box=(HEAD_DIM, PAGE, 1, 1),
        )
        blocks = self._multiprocessors if design.persistent else plan.tasks * design.cluster
        return kernels.get(
            design.source, "attention", defines, shared=_shared_bytes(design.source, defines)
        ).bind(
            (blocks - blocks % design.cluster,),
            design.threads,
            keys,
            params,
            programmatic=design.programmatic,
        )

    def download(self) -> dict[str, Any]:
        """What the last run's kernels decided, for tests: the order, the unions and, of a persistent
        design, the tasks in the order in which they run."""
        torch.cuda.synchronize()
        tasks = self.workspace.tasks.cpu().numpy().view(TASK_RECORD)
        pages = self.workspace.pages.cpu().numpy().view(PAGE_RECORD)
        return {
            "order": self.workspace.order.cpu().numpy(),
            "tasks": tasks,
            "pages": pages.reshape(len(tasks), self.plan.record_stride),
            "unions": unions_of(tasks, pages.reshape(len(tasks), self.plan.record_stride)),
            "task_order": self._task_order(),
            "images": self.workspace.images.view(self.plan.pool_pages, self.plan.kv_heads, -1),
        }

    def _task_order(self) -> np.ndarray | None:
        if not self.design.persistent:
            return None
        queue = self.workspace.queue.cpu().numpy().view(TASK_QUEUE)[0]
        return listed_tasks(queue, self.workspace.task_order.cpu().numpy())


def _shared_bytes(source: str, defines: Mapping[str, int]) -> int:
    """The constant ``shared_bytes`` of an attention source: its dynamic shared memory."""
    import cupy

    pointer = kernels.load(source, defines).get_global("shared_bytes")
    return int(cupy.ndarray((1,), dtype=cupy.int32, memptr=pointer).get()[0])
