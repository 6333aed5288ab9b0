"""Time forms of an attention kernel side by side: other macros, one aligned line each.

    python scripts/attention_bench.py captures/tuning --form "" --form TRY=1 --precision fast

A form is the design's own kernel with macros of its own (``NAME=NUMBER,...``; the empty form is the kernel
as shipped). Beside the stage's time stand what bounds it: nanoseconds a tensor-core round and SM, useful
TFLOP/s, the page traffic from L2, and the error against the float64 reference on 64 rows. For working on
kernels; results that are kept come from `pwbench replay`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from pwbench import capture, counters, reference, timing
from pwbench.grouping import identity_order
from pwbench.operator import SparsePrefillCall, supports
from pwbench.variants import Options, Prepared, _union_gpu, _union_plan

COLUMNS = ("us", 8), ("ns/round", 9), ("TFLOP/s", 8), ("TB/s", 6), ("rel-L2", 8), ("MHz", 5)


def macros_of(form: str) -> dict[str, int]:
    """``NAME=NUMBER,...`` as macros.

    Raises:
        argparse.ArgumentTypeError: it is not of that form.
    """
    try:
        pairs = [pair.split("=") for pair in form.split(",") if pair]
        return {name: int(number) for name, number in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{form!r} is not NAME=NUMBER,...") from None


def with_macros(design: str, macros: Mapping[str, int]) -> str:
    """The name of a design, registered here, that differs from ``design`` in its macros."""
    if not macros:
        return design
    name = f"{design}+{len(_union_plan.DESIGNS)}"
    _union_plan.DESIGNS[name] = {
        precision: dataclasses.replace(one, defines={**one.defines, **macros})
        for precision, one in _union_plan.DESIGNS[design].items()
    }
    return name


def lines(
    title: str,
    call: SparsePrefillCall,
    prepared: Mapping[str, Prepared],
    samples: int,
    multiprocessors: int,
    mode: str = "graph",
) -> Iterator[str]:
    """Times every form of ``prepared`` on ``call``, interleaved with cold L2; a line for each."""
    pages, _ = supports(call)
    rows = np.sort(np.random.default_rng(0).permutation(call.total_q)[:64])
    truth = reference.attend(call, rows)
    for one in prepared.values():
        one.out.fill_(torch.nan)
    times = timing.measure(prepared, samples, mode, "cold")
    for form, one in prepared.items():
        named = f"{title:28} {form or 'as shipped':20}"
        if times[form].failure:
            yield f"{named} {times[form].failure}"
            continue
        ids = one.query_ids()
        order = identity_order(call.kv_heads, call.total_q) if ids is None else ids.cpu().numpy()
        count = counters.count(call, pages, order, one.group)
        us = median(times[form].stages_us["attention"])
        figures = (
            f"{us:.1f}",
            f"{us * 1e3 * multiprocessors / max(count['subgroup_pages'], 1):.0f}",
            f"{count['useful_flops'] / us / 1e6:.0f}",
            f"{count['kv_bytes'] / us / 1e6:.2f}",
            f"{reference.compare(one.out[torch.from_numpy(rows).to(one.out.device)], truth).rel_l2:.5f}",
            f"{median(times[form].sm_clock_mhz):.0f}" if times[form].sm_clock_mhz else "-",
        )
        yield f"{named} " + " ".join(f"{f:>{w}}" for f, (_, w) in zip(figures, COLUMNS, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 3 where there is no GPU."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("captures", nargs="+", type=Path)
    parser.add_argument("--design", default="pageweaver", choices=sorted(_union_plan.DESIGNS))
    parser.add_argument("--form", action="append", default=[], type=macros_of, metavar="NAME=NUMBER,...")
    parser.add_argument("--precision", default="fast", choices=("fast", "accurate"))
    parser.add_argument("--order", default="original", choices=("original", "precomputed"))
    parser.add_argument("--samples", type=int, default=30)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("torch sees no CUDA GPU here.", file=sys.stderr)
        return 3
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"{'capture':28} {'form':20}", *(f"{name:>{width}}" for name, width in COLUMNS))
    for path in capture.discover(given.captures):
        call = capture.load(path).call("cuda")
        prepared = {}
        for macros in given.form or [{}]:
            form = ",".join(f"{name}={number}" for name, number in macros.items())
            name = with_macros(given.design, macros)
            options = Options(precision=given.precision)
            prepared[form] = _union_gpu.prepare(call, options, name=name, order=given.order)
        for line in lines(path.name, call, prepared, given.samples, multiprocessors):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
