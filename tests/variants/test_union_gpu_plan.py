"""What the GPU form of the union variants decides on the host: designs, sizes, layouts, refusals."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pwbench import kernels
from pwbench.errors import VariantUnavailable
from pwbench.grouping import Unions, prepare_unions, regroup
from pwbench.operator import TOPK, supports
from pwbench.variants import _union_plan as plans
from pwbench.variants._union_gpu import check_layout
from pwbench.variants._union_plan import (
    BLOCK,
    DESIGNS,
    PAGE_RECORD,
    SLOTS,
    TASK_RECORD,
    Design,
    Plan,
    unions_of,
)
from tests.calls import make_call


def plan(
    total_q: int = 100,
    requests: int = 1,
    max_pages: int = 64,
    queries: int = 8,
    window: int = 128,
    search_group: int | None = None,
    value_bytes: int = 1,
) -> Plan:
    return Plan(total_q, requests, 1, max_pages, 100, queries, search_group or queries, window, value_bytes)


def tasks_of(queries: int, **more: int) -> Design:
    """A design of which only the tasks and the search matter."""
    return Design("any.cu", queries, threads=128, **more)


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    queries=st.integers(1, 16),
    window=st.sampled_from([64, 120, 128]),
)
def test_bounds_from_shapes_hold_every_task_and_window(lengths: list[int], queries: int, window: int) -> None:
    sizes = plan(sum(lengths), len(lengths), queries=queries, window=window)
    assert sum(-(-n // queries) for n in lengths) <= sizes.tasks_per_head
    assert sum(-(-n // window) for n in lengths) <= sizes.windows_per_head


@pytest.mark.parametrize(
    ("queries", "asked", "given_"), [(8, 128, 128), (12, 128, 120), (12, 64, 60), (16, 64, 64)]
)
def test_windows_hold_whole_tasks(queries: int, asked: int, given_: int) -> None:
    assert Plan.of(make_call(1), tasks_of(queries), asked).window == given_


@pytest.mark.parametrize("asked", [64, 128])
def test_a_design_may_fix_what_is_searched(asked: int) -> None:
    fixed = Plan.of(make_call(1), tasks_of(8, search_group=4, search_window=64), asked)
    assert (fixed.queries, fixed.search_group, fixed.window) == (8, 4, 64)
    free = Plan.of(make_call(1), tasks_of(8), asked)
    assert (free.queries, free.search_group, free.window) == (8, 8, asked)


def test_a_page_table_wider_than_a_records_id_is_refused() -> None:
    call = make_call(1)
    wide = replace(call, page_table=torch.zeros((1, plans.MAX_PAGES + 1), dtype=torch.int32))
    with pytest.raises(VariantUnavailable, match="65537 pages wide"):
        Plan.of(wide, tasks_of(8), 128)
    just_fits = replace(call, page_table=wide.page_table[:, :-1])
    assert Plan.of(just_fits, tasks_of(8), 128).max_pages == plans.MAX_PAGES


def test_few_queries_pack_what_they_select_and_many_pack_every_page() -> None:
    assert plan(total_q=64, max_pages=8192).packs_selected
    assert plan(total_q=64, max_pages=8192).pack_blocks(132) == 64 * 4
    assert not plan(total_q=8192, max_pages=512).packs_selected
    assert plan(total_q=8192, max_pages=512).pack_blocks(132) == 512


@pytest.mark.parametrize(("value_bytes", "blocks"), [(1, 8), (2, 6)])
def test_as_many_blocks_pack_as_fit_a_multiprocessor(value_bytes: int, blocks: int) -> None:
    sizes = plan(total_q=8192, max_pages=8192, value_bytes=value_bytes)
    assert sizes.pack_blocks(132) == 132 * blocks
    assert blocks * BLOCK <= 2048  # threads
    assert blocks * (sizes.image_bytes + 1024) <= 228 * 1024  # shared memory


@pytest.mark.parametrize(("precision", "image"), [("fast", 16384), ("accurate", 32768)])
@pytest.mark.parametrize("name", sorted(DESIGNS))
def test_the_accurate_designs_alone_have_images_of_f16(name: str, precision: str, image: int) -> None:
    call = make_call(1, (40,), kv_heads=2)
    sizes = Plan.of(call, DESIGNS[name][precision], 128)
    assert sizes.image_bytes == image
    space = plans.Workspace.allocate(sizes, torch.device("cpu"))
    assert space.images.numel() == call.v.numel() * image // 16384


@given(
    st.integers(1, plans.MAX_PAGES),
    st.sampled_from([60, 64, 120, 128]),
    st.sampled_from([4, 8]),
    st.sampled_from([1, 2]),
)
def test_every_launch_fits_the_shared_memory_of_a_block(
    max_pages: int, window: int, group: int, value_bytes: int
) -> None:
    sizes = plan(max_pages=max_pages, window=window, search_group=group, value_bytes=value_bytes)
    bitmap = -(-max_pages // 32) * 4 + -(-max_pages // 32) * 2
    for shared in (sizes.prepare_shared, sizes.regroup_shared):
        assert max(16384 * value_bytes, bitmap) <= shared <= kernels.MAX_SHARED


@pytest.mark.parametrize("value_bytes", [1, 2])
def test_a_64k_context_leaves_room_for_four_search_blocks_an_sm(value_bytes: int) -> None:
    assert 4 * (plan(max_pages=512, value_bytes=value_bytes).regroup_shared + 1024) <= 228 * 1024


@pytest.mark.parametrize(
    ("name", "mirror"), [("PageRecord", PAGE_RECORD), ("SlotRecord", TASK_RECORD["slots"].subdtype[0])]
)
def test_records_are_laid_out_as_in_the_kernels(name: str, mirror: np.dtype) -> None:
    assert kernels.params_dtype("records.cuh", name) == mirror


def test_a_task_record_is_144_bytes_with_its_slots_last() -> None:
    text = kernels.source_path("records.cuh").read_text()
    body = re.search(r"struct alignas\(16\) TaskRecord \{(.*?)\};", text, re.S)
    assert body
    assert re.findall(r"(\w+)(?:\[\w+\])?;", body[1]) == list(TASK_RECORD.names or ())
    assert TASK_RECORD.itemsize == 144
    assert f"constexpr int SLOTS = {SLOTS};" in text


def test_constants_are_the_kernels() -> None:
    text = kernels.source_path("metadata.cuh").read_text()
    for name, value in (("BLOCK", plans.BLOCK), ("TOPK", TOPK)):
        assert re.search(rf"constexpr int {name} = {value};", text), name


@pytest.mark.parametrize("precision", ["fast", "accurate"])
@pytest.mark.parametrize("name", sorted(DESIGNS))
def test_designs_fit_a_task_record_and_whole_warpgroups(name: str, precision: str) -> None:
    design = DESIGNS[name][precision]
    assert 1 <= design.queries <= SLOTS
    assert design.threads % 128 == 0
    assert design.cluster in (1, 2, 4)
    assert design.queries % (design.search_group or design.queries) == 0
    assert (design.search_window or design.queries) % design.queries == 0


@pytest.mark.parametrize("name", ["q", "topk", "page_table", "positions"])
def test_a_strided_tensor_is_refused_by_name(name: str) -> None:
    call = make_call(1, (40,))
    check_layout(call)
    tensor = getattr(call, name)
    spread = torch.stack([tensor, tensor], dim=-1)[..., 0]
    with pytest.raises(VariantUnavailable, match=f"^{name} has strides"):
        check_layout(replace(call, **{name: spread}))


def test_a_cache_whose_pages_are_not_16_byte_aligned_is_refused() -> None:
    call = make_call(1, separate=True)
    check_layout(call)
    k, v = call.kv
    flat = torch.empty(v.numel() + 8, dtype=torch.uint8)[8:].view(v.dtype).view(v.shape)
    with pytest.raises(VariantUnavailable, match=r"^V of the cache has strides"):
        check_layout(replace(call, kv=(k, flat)))


def test_unions_read_back_from_records_are_those_written() -> None:
    call = make_call(3, (29, 0, 3), kv_heads=2, selection="dirty")
    pages, bounds = supports(call)[0], call.cu_seqlens_q.numpy()
    unions = prepare_unions(pages, regroup(pages, bounds), bounds)
    tasks, records = records_of(unions, unused=2)
    seen = unions_of(tasks, records)
    for field in ("kv_head", "begin", "size", "offsets", "pages", "masks"):
        np.testing.assert_array_equal(getattr(seen, field), getattr(unions, field), err_msg=field)


def records_of(unions: Unions, unused: int) -> tuple[np.ndarray, np.ndarray]:
    """Records as the kernels write them, with unused tasks behind each head's."""
    per_head = len(unions.size) // 2
    tasks = np.zeros(2 * (per_head + unused), TASK_RECORD)
    records = np.zeros((len(tasks), 8 * TOPK), PAGE_RECORD)
    for group in range(len(unions.size)):
        task = group + group // per_head * unused
        listed = slice(unions.offsets[group], unions.offsets[group + 1])
        tasks[task]["pages"] = count = listed.stop - listed.start
        tasks[task]["queries"] = unions.size[group]
        tasks[task]["kv_head"] = unions.kv_head[group]
        records[task]["logical"][:count] = unions.pages[listed]
        records[task]["members"][:count] = unions.masks[listed]
    tasks["kv_head"][-unused:] = 1
    return tasks, records
