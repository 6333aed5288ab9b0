"""How near to the ceilings of the GPU a contender comes, and which of them binds."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pwbench import ceilings
from pwbench.report.contenders import Contender, shares_pages
from pwbench.report.model import Scope
from pwbench.results import Row


def reached(scope: Scope) -> dict[Contender, dict[str, float]]:
    """Share of every ceiling that each contender reaches, geomean over the captures; GPU rows only."""
    known = ceilings.find(scope.gpu) if scope.device == "cuda" else None
    if known is None:
        return {}
    limits = {"tensor": known.rates.fp8, "L2": known.rates.l2, "exp": known.rates.exp2}
    found: dict[Contender, dict[str, float]] = {}
    for contender in scope.shown:
        shares: dict[str, list[float]] = {}
        for row in scope.rows_of(contender):
            if row["groups"] is None or not row["useful_flops"]:
                continue
            for name, rate in row_rates(row).items():
                limit = limits[name]
                if limit and rate:
                    shares.setdefault(name, []).append(rate / limit)
            if row["roofline_us"]:
                shares.setdefault("roofline", []).append(row["roofline_us"] / row["complete_us"])
        if shares:
            found[contender] = {name: geometric_mean(values) for name, values in shares.items()}
    return found


def source(scope: Scope) -> str:
    """Where the ceilings of `reached` are from: ``measured``, ``documented``, or empty: there are none."""
    known = ceilings.find(scope.gpu) if scope.device == "cuda" else None
    return known.source if known is not None else ""


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def row_rates(row: Row) -> dict[str, float]:
    """Rates the attention stage achieves, per second: ``tensor`` flops, ``L2`` bytes, ``exp`` operations.

    A variant whose page lists are not shared reports only useful work; its bytes are not known.
    """
    seconds = (row["attention_us"] or row["complete_us"]) * 1e-6
    shared = shares_pages(row)
    passes = 2 if row["precision"] == "accurate" else 1
    flops = row["mma_flops"] if shared else row["useful_flops"]
    rates = {"tensor": passes * flops / seconds, "exp": row["useful_flops"] / 512 / seconds}
    if shared:
        rates["L2"] = row["kv_bytes"] / seconds
    return rates


def binding_terms(rows: Iterable[Row]) -> list[str]:
    """The terms of the roofline that bind the rows, the most frequent first, without where their rates are
    from."""
    terms = [str(row["roofline_term"]).split(" (")[0] for row in rows if row["roofline_term"]]
    return sorted(dict.fromkeys(terms), key=lambda term: -terms.count(term))
