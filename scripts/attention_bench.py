"""Time forms of an attention kernel side by side: other macros, other orders, one aligned line each.

    python scripts/attention_bench.py captures/tuning/* --form "" --form TRY=1 --precision fast

A form is the design's own kernel with macros of its own (``NAME=VALUE,...``; the empty form is the kernel
as shipped). Beside the stage's time stand what bounds it: nanoseconds a tensor-core round and SM, useful
TFLOP/s, the page traffic from L2, and the error against the float64 reference. For working on kernels;
results that are kept come from `pwbench replay`.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from statistics import median

import numpy as np
import torch

from pwbench import capture, counters, reference, timing
from pwbench.operator import supports
from pwbench.variants import Options, Prepared, _union_gpu, _union_plan


def with_macros(design: str, form: str) -> str:
    """The name of a design that differs from ``design`` in the macros of ``form``."""
    if not form:
        return design
    macros = dict(pair.split("=", 1) for pair in form.split(","))
    forms = _union_plan.DESIGNS[design]
    name = f"{design}+{form}"
    _union_plan.DESIGNS[name] = {
        precision: dataclasses.replace(one, defines={**one.defines, **{k: int(v) for k, v in macros.items()}})
        for precision, one in forms.items()
    }
    return name


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("captures", nargs="+", type=Path)
    parser.add_argument("--design", default="pageweaver", choices=sorted(_union_plan.DESIGNS))
    parser.add_argument("--form", action="append", default=[], metavar="NAME=VALUE,...")
    parser.add_argument("--precision", default="fast", choices=("fast", "accurate"))
    parser.add_argument("--order", default="original", choices=("original", "precomputed"))
    parser.add_argument("--samples", type=int, default=30)
    given = parser.parse_args()
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    columns = ("us", 8), ("ns/round", 9), ("TFLOP/s", 8), ("TB/s", 6), ("rel-L2", 8), ("MHz", 5)
    print(f"{'capture':28} {'form':20}", *(f"{name:>{width}}" for name, width in columns))
    for path in capture.discover([str(path) for path in given.captures]):
        call = capture.load(path).call("cuda")
        pages, _ = supports(call)
        rows = np.sort(np.random.default_rng(0).permutation(call.total_q)[:64])
        truth = reference.attend(call, rows)
        prepared: dict[str, Prepared] = {}
        for form in given.form or [""]:
            name = with_macros(given.design, form)
            prepared[form] = one = _union_gpu.prepare(
                call, Options(precision=given.precision), name=name, order=given.order
            )
            one.run()
        times = timing.measure(prepared, given.samples, "graph", "cold")
        for form, one in prepared.items():
            if times[form].failure:
                print(f"{path.name:28} {form:20} {times[form].failure}")
                continue
            order = one.query_ids()
            ids = np.arange(call.total_q, dtype=np.int32)[None].repeat(call.kv_heads, 0)
            count = counters.count(call, pages, ids if order is None else order.cpu().numpy(), one.group)
            us = median(times[form].stages_us["attention"])
            round_ns = us * 1e3 * multiprocessors / count["subgroup_pages"]
            error = reference.compare(one.out[torch.from_numpy(rows)].double(), truth).rel_l2
            print(
                f"{path.name:28} {form or 'as shipped':20} {us:8.1f} "
                f"{round_ns:9.0f} {count['useful_flops'] / us / 1e6:8.0f} "
                f"{count['kv_bytes'] / us / 1e6:6.2f} {error:8.5f} {median(times[form].sm_clock_mhz):5.0f}"
            )


if __name__ == "__main__":
    main()
