"""What the GPU can do at most, and the time that leaves for a call: the roofline.

`measure` (in `pwbench.probes`) finds the rates of this GPU and stores them in
``results/ceilings-<gpu>.json``; `find` gives the stored ones, or the documented ones of an H200.

The terms, of one call on all SMs together:

    tensor   matrix operations / FP8 rate; doubled when Q and P take two passes each (``accurate``)
    exp      one exponential per query head and visible key / exp2 rate
    L2       bytes of the page visits / L2 rate, for variants whose page lists are known
    HBM      Q, output and every page that is used at all, once / copy bandwidth; nothing when L2 is warm
    launch   one launch

The largest term is ``roofline_us``: what a perfect kernel with this variant's groups could reach.
The *floor* is laxer. It takes the chip's rates at its highest clock and only work that no kernel
can avoid, so a time below it is no feat but an error of the measurement.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pwbench.errors import InputError
from pwbench.files import parse_json, replace_text
from pwbench.operator import HEAD_DIM

SCHEMA = {"name": "pwbench.ceilings", "major": 1, "minor": 0}
KEY_FLOPS = 4 * HEAD_DIM
"""Useful flops of one query head on one key: a multiply and an add per channel, for QK and for PV."""


@dataclass(frozen=True)
class Rates:
    """Rates of one GPU, per second; times in microseconds. None where a probe could not run.

    Attributes:
        hbm: copy bandwidth, bytes read plus bytes written.
        l2: bytes from L2 into shared memory by bulk copies, no multicast.
        l2_multicast: bytes arriving in shared memory by bulk copies, multicast to clusters of 2.
        fp8: FP8 matrix flops, operands resident in shared memory.
        fp8_product: FP8 matrix flops of a whole 8192^3 product.
        bf16_product: BF16 matrix flops of a whole 8192^3 product.
        exp2: base-2 exponentials.
        launch_us: what one more small kernel adds to a CUDA graph.
        launch_eager_us: what one more small kernel adds to a stream.
    """

    hbm: float | None = None
    l2: float | None = None
    l2_multicast: float | None = None
    fp8: float | None = None
    fp8_product: float | None = None
    bf16_product: float | None = None
    exp2: float | None = None
    launch_us: float | None = None
    launch_eager_us: float | None = None


DESCRIPTIONS = {
    "hbm": ("copy bandwidth", "TB/s", 1e12),
    "l2": ("L2 to shared memory", "TB/s", 1e12),
    "l2_multicast": ("the same, arriving by multicast to 2", "TB/s", 1e12),
    "fp8": ("FP8 matrix rate, operands in shared memory", "TFLOP/s", 1e12),
    "fp8_product": ("FP8 matrix rate, 8192^3 product", "TFLOP/s", 1e12),
    "bf16_product": ("BF16 matrix rate, 8192^3 product", "TFLOP/s", 1e12),
    "exp2": ("exp2 rate", "T/s", 1e12),
    "launch_us": ("launch gap in a CUDA graph", "us", 1.0),
    "launch_eager_us": ("launch gap on a stream", "us", 1.0),
}
"""Field of `Rates` -> (what it is, unit, factor of the unit), for people."""


@dataclass(frozen=True)
class Ceilings:
    """The rates of one GPU and where they come from.

    Attributes:
        gpu: its name.
        rates: what it does in practice; every rate the roofline needs is known.
        source: ``documented`` or ``measured``.
        provenance: of a measurement: when, with which versions, at which clocks.
    """

    gpu: str
    rates: Rates
    source: str
    provenance: Mapping[str, Any]


H200 = Ceilings(
    "NVIDIA H200",
    Rates(
        hbm=4.25e12,
        l2=9.0e12,
        l2_multicast=16.4e12,
        fp8=1650e12,
        fp8_product=1348e12,
        bf16_product=758e12,
        exp2=16 * 132 * 1.55e9,
        launch_us=0.6,
        launch_eager_us=1.9,
    ),
    "documented",
    {"note": "H200, driver 580, CUDA 13.0, at its 700 W limit (SM clock 1.55 GHz under matrix load)"},
)
"""What an H200 was seen to do. Used where no measurement is stored, and marked as documented."""

# Per clock and SM, from the architecture: matrix flops of FP8, exponentials; per clock, bytes of L2.
_FP8_PER_CLOCK, _EXP_PER_CLOCK, _L2_PER_CLOCK = 2 * 4096, 16, 5120
_TOP_CLOCK, _TOP_SMS, _TOP_HBM = 1.98e9, 132, 4.9e12
PEAK = Rates(
    hbm=_TOP_HBM,
    l2=_L2_PER_CLOCK * 2.0e9,
    fp8=_FP8_PER_CLOCK * _TOP_SMS * _TOP_CLOCK,
    exp2=_EXP_PER_CLOCK * _TOP_SMS * _TOP_CLOCK,
    launch_us=0.0,
)
"""What no Hopper GPU exceeds, whatever its clock does: the basis of the floor."""


@dataclass(frozen=True)
class Roofline:
    """The least time for a call, microseconds.

    Attributes:
        us: the largest term.
        term: its name, with ``(documented)`` behind it unless the rates were measured.
        terms: every term by name.
        floor_us: below this a time is a measurement error.
    """

    us: float
    term: str
    terms: dict[str, float]
    floor_us: float


def roofline(
    counters: Mapping[str, int],
    *,
    io_bytes: int,
    page_bytes: int,
    group: int,
    precision: str,
    l2: str,
    mode: str,
    ceilings: Ceilings = H200,
) -> Roofline:
    """The least time for a call with these counters.

    Args:
        counters: of `pwbench.counters.count`, for the order and group the variant used.
        io_bytes: bytes of Q and of the output.
        page_bytes: bytes of the distinct cache pages that any query selected.
        group: queries that share a page list. 1 means that the variant's sharing is not known: then
            only useful work and bytes that must move at least once count.
        precision, l2, mode: as the row is measured.
    """
    rates = ceilings.rates
    known = group > 1
    flops = counters["mma_flops"] if known else counters["useful_flops"]
    exponentials = counters["useful_flops"] / KEY_FLOPS
    visits = counters["kv_bytes"] if known else 0
    cold_bytes = io_bytes + page_bytes if l2 == "cold" else 0
    passes = 2 if precision == "accurate" else 1

    def us(amount: float, rate: float | None) -> float:
        return amount / rate * 1e6 if rate else 0.0

    terms = {
        "tensor": us(flops * passes, rates.fp8),
        "exp": us(exponentials, rates.exp2),
        "L2": us(visits, rates.l2),
        "HBM": us(cold_bytes, rates.hbm),
        "launch": (rates.launch_us if mode == "graph" else rates.launch_eager_us) or 0.0,
    }
    term = max(terms, key=lambda name: terms[name])
    # No exponentials here: a kernel may compute them on other units.
    floor = max(us(counters["useful_flops"], PEAK.fp8), us(cold_bytes, PEAK.hbm))
    label = term if ceilings.source == "measured" else f"{term} ({ceilings.source})"
    return Roofline(terms[term], label, terms, floor)


def implausible(rates: Rates) -> list[str]:
    """Measured rates above what the chip can do: a probe that measured something else."""
    found = []
    for name, peak in asdict(PEAK).items():
        value = getattr(rates, name)
        if peak and value is not None and value > peak:
            what, unit, factor = DESCRIPTIONS[name]
            found.append(
                f"{what} reads {value / factor:.4g} {unit}, no Hopper GPU exceeds {peak / factor:.4g}"
            )
    return found


# Stored measurements ----------------------------------------------------------------------------


def path_for(gpu: str, folder: str | Path = "results") -> Path:
    """Where the ceilings of ``gpu`` are stored."""
    return Path(folder) / f"ceilings-{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def store(ceilings: Ceilings, path: str | Path) -> None:
    """Write measured ceilings as JSON, whole or not at all."""
    replace_text(path, json.dumps(as_dict(ceilings), indent=2) + "\n")


def as_dict(ceilings: Ceilings) -> dict[str, Any]:
    """The JSON form."""
    return {
        "schema": SCHEMA,
        "gpu": ceilings.gpu,
        "source": ceilings.source,
        "rates": asdict(ceilings.rates),
        "provenance": dict(ceilings.provenance),
    }


def load(path: str | Path) -> Ceilings:
    """Read stored ceilings.

    Raises:
        InputError: not a ceilings file, another major version, or a rate that is no positive number.
    """
    path = Path(path)
    try:
        data = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} is not readable as JSON ({error}); measure again: pwbench ceilings."
        ) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if not isinstance(schema, dict) or schema.get("name") != SCHEMA["name"]:
        raise InputError(f"{path} is no ceilings file; its schema should be named {SCHEMA['name']}.")
    if schema.get("major") != SCHEMA["major"]:
        raise InputError(
            f"{path} has ceilings format {schema.get('major')}, this pwbench reads {SCHEMA['major']}; "
            "measure again: pwbench ceilings."
        )
    stored = data.get("rates")
    if not isinstance(stored, dict):
        raise InputError(f"{path}: rates is {stored!r}, expected a JSON object; measure again.")
    rates = {field.name: stored.get(field.name) for field in fields(Rates)}
    for name, value in rates.items():
        if value is not None and not (isinstance(value, int | float) and 0 < value < 1e300):
            raise InputError(f"{path}: {name} is {value!r}, expected a positive number; measure again.")
    provenance = data.get("provenance")
    about = provenance if isinstance(provenance, dict) else {}
    return Ceilings(str(data.get("gpu")), Rates(**rates), "measured", about)


def find(gpu: str | None, folder: str | Path = "results") -> Ceilings | None:
    """The ceilings to use for ``gpu``: stored ones, else the documented ones when it is an H200.

    On the CPU (``gpu`` None) rows carry the documented H200's roofline, so that it can be read beside
    the counters anywhere. Any other GPU without a stored measurement has none.

    Raises:
        InputError: the stored file cannot be used.
    """
    if gpu is None:
        return H200
    path = path_for(gpu, folder)
    if path.exists():
        measured = load(path)
        # A probe that could not run (no compiler, say) leaves its rate to the documented one.
        if "H200" in gpu:
            documented = asdict(H200.rates)
            merged = {name: value or documented[name] for name, value in asdict(measured.rates).items()}
            return Ceilings(measured.gpu, Rates(**merged), "measured", measured.provenance)
        return measured
    return H200 if "H200" in gpu else None
