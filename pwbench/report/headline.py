"""The answer in sentences: what is fastest, by how much, how sure, why, and at what accuracy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pwbench import stats
from pwbench.report.cells import ACCURATE, clock, error, times, worst
from pwbench.report.contenders import DEFAULT_WINDOW, Contender, samples_of
from pwbench.report.model import Report, Scope

_DOCUMENTED = " (documented)"


@dataclass
class Headline:
    """Sentences for one scope.

    Attributes:
        answer: what is fastest and by how much.
        facts: (question, answer) pairs: how sure, why, how accurate, does the search pay.
        sure: whether there were enough samples for a verdict.
    """

    answer: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    sure: bool = False


def headline(report: Report, scope: Scope) -> Headline:
    """The scope's answer."""
    rivals = [c for c in scope.shown if c in scope.geomeans and c not in scope.probes]
    rivals = [c for c in rivals if c.variant != scope.baseline]
    if not rivals:
        return Headline(scope.note or "Only the baseline was measured, so there is nothing to compare.")
    best = rivals[0]
    mean = scope.geomeans[best]
    over = f"{scope.baseline}, as a geomean over {_captures(scope.counted(best))}"
    verb = "is" if mean.enough else "looks"
    found = Headline(f"{best.full} {verb} fastest: {times(mean.value)} as fast as {over}.", sure=mean.enough)
    if mean.value <= 1:
        found.answer = f"Nothing beats {scope.baseline}: the best, {best.full}, reaches {times(mean.value)}."
    if scope.device == "cpu":
        found.answer += " CPU times show that the variants work; they say nothing about a GPU."
    found.facts.append(("How sure?", _how_sure(scope, best, mean)))
    why = _why(scope, best)
    if why:
        found.facts.append(("Why?", why))
    kernels = _against_which_kernels(scope, best)
    if kernels:
        found.facts.append(("Against what exactly?", kernels))
    found.facts.append(("At what accuracy?", _how_accurate(scope, best, rivals)))
    pays = _does_the_search_pay(scope)
    if pays:
        found.facts.append(("Does the search pay?", pays))
    return found


def _how_sure(scope: Scope, best: Contender, mean: stats.Ratio) -> str:
    rows = scope.rows_of(best)
    fewest = min(len(samples_of(row)) for row in rows)
    if not mean.enough:
        return f"Not sure: {fewest} samples per capture are too few for a verdict (at least {stats.ENOUGH})."
    floors = [row["noise_floor"] for row in rows if row["noise_floor"] is not None]
    text = f"The 95 % interval is {mean.low:.3f} to {mean.high:.3f}, from {fewest} samples per capture"
    text += " taken in turn with the baseline's." if mean.paired else ", measured in different sessions."
    if floors:
        text += f" Timed against itself the baseline differs by up to {max(floors):.1%}, the noise floor."
    return text


def _why(scope: Scope, best: Contender) -> str:
    """Page visits and stages of the fastest beside the baseline's, summed over the captures."""
    pairs = []
    for capture in scope.captures:
        if (best, capture) in scope.speedups:
            base = scope.base_row(best, capture)
            if base is not None:
                pairs.append((base, scope.cells[best, capture]))
    if not pairs:
        return ""
    totals = {}
    for name in ("complete", "attention", "search", "metadata"):
        totals[name] = [sum(row[f"{name}_us"] or 0.0 for row in side) for side in zip(*pairs, strict=True)]
    unit, write = clock(value / len(pairs) for values in totals.values() for value in values)
    old, new = ([values[i] / len(pairs) for values in totals.values()] for i in (0, 1))
    text = (
        f"Of its mean {write(new[0])} {unit} per call, attention takes {write(new[1])}"
        + (f", search {write(new[2])}" if new[2] else "")
        + (f", metadata {write(new[3])}" if new[3] else "")
        + (" (stages overlap)" if sum(new[1:]) > new[0] else "")
        + f"; {scope.baseline} takes {write(old[0])}."
    )
    visits = [row["union_pages"] for _, row in pairs]
    selected = [row["selected_pages"] for _, row in pairs]
    if all(visits) and all(selected) and sum(visits) < sum(selected):
        text += (
            f" Queries that share a page list make {sum(visits):,} page visits where each alone would make "
            f"{sum(selected):,}: {sum(visits) / sum(selected):.0%}."
        )
    terms = sorted({str(row["roofline_term"]) for _, row in pairs if row["roofline_term"]})
    shares = [row["roofline_us"] / row["complete_us"] for _, row in pairs if row["roofline_us"]]
    if terms and shares and scope.device == "cuda":
        low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
        reach = low if low == high else f"{low} to {high}"
        rates = ", at documented rates" if any(term.endswith(_DOCUMENTED) for term in terms) else ""
        bound = " or ".join(dict.fromkeys(term.removesuffix(_DOCUMENTED) for term in terms))
        text += f" It reaches {reach} of the roofline (bound by {bound}{rates})."
    return text


def _against_which_kernels(scope: Scope, best: Contender) -> str:
    """What the baseline ran where it is a library that chooses, and the speed-up over each of its kernels."""
    ran: dict[str, list[str]] = {}
    for capture in scope.captures:
        base = scope.base_row(best, capture) if (best, capture) in scope.speedups else None
        if base is not None and base["peer"]:
            ran.setdefault(str(base["peer"]), []).append(capture)
    parts = []
    for peer, captures in sorted(ran.items(), key=lambda item: -len(item[1])):
        where = captures[0] if len(captures) == 1 else _captures(len(captures))
        mean = stats.geomean([scope.speedups[best, capture] for capture in captures])
        parts.append(f"{peer} on {where} ({times(mean.value)})")
    return "; ".join(parts) + "." if parts else ""


def _how_accurate(scope: Scope, best: Contender, rivals: list[Contender]) -> str:
    own = worst(scope.rows_of(best), "rel_l2")
    if own is None:
        return "It was not checked against the reference."
    text = f"Its worst rel-L2 error is {error(own)}"
    base = [c for c in scope.contenders if c.variant == scope.baseline]
    theirs = worst((row for c in base for row in scope.rows_of(c)), "rel_l2")
    text += f", {scope.baseline}'s {error(theirs)}." if theirs is not None else "."
    if all(row["tensors"] == "seeded" for row in scope.rows_of(best)):
        text += " Q and KV were seeded random values, not the model's own."
    cache = worst(scope.rows_of(best), "fp8_cache_rel_l2")
    if cache is not None:
        text += f" Storing K and V in FP8 alone costs {error(cache)}."
    if own > ACCURATE:
        exact = [c for c in rivals if (worst(scope.rows_of(c), "rel_l2") or 1.0) <= ACCURATE]
        if exact:
            mean = scope.geomeans[exact[0]]
            text += f" Fastest within {error(ACCURATE)}: {exact[0].full} at {times(mean.value)}."
        else:
            text += f" No contender within {error(ACCURATE)} was measured beside the baseline."
    return text


def _does_the_search_pay(scope: Scope) -> str:
    kernels: dict[Contender, list[stats.Ratio]] = {}
    usual = [gain for gain in scope.gains if gain.contender.window in (None, DEFAULT_WINDOW)]
    for gain in usual or scope.gains:
        kernels.setdefault(gain.contender, []).append(gain.online_ratio)
    parts = []
    for contender, ratios in kernels.items():
        mean = stats.geomean(ratios)
        lost = sum(r.value < 1 for r in ratios)
        net = 1 - 1 / mean.value
        word = "saves" if net >= 0 else "costs"
        kernel = contender.full.replace("-regroup", "")
        part = f"for {kernel} regrouping {word} {abs(net):.1%} of the call, search included"
        part += f" (it loses on {lost} of {_captures(len(ratios))})" if lost else ""
        if contender.fixed_path:
            part += _left_out(scope, contender)
        parts.append(part)
    text = "; ".join(parts)
    doubt = (
        "" if all(r.enough for ratios in kernels.values() for r in ratios) else " Too few samples to be sure."
    )
    return text[:1].upper() + text[1:] + "." + doubt if text else ""


def _left_out(scope: Scope, path: Contender) -> str:
    """Where the kernel chose not to search, though searching everywhere is what was judged."""
    choice = replace(path, variant=path.variant.split("-")[0])
    rows = [scope.cells[choice, c] for c in scope.captures if (choice, c) in scope.cells]
    skipped = sum(row["window"] is None for row in rows)
    if not skipped:
        return ""
    return f"; left to itself it searches on {len(rows) - skipped} of {_captures(len(rows))}"


def _captures(number: int) -> str:
    return f"{number} capture{'' if number == 1 else 's'}"
