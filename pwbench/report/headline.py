"""The answer in sentences: what is fastest, by how much, at what error, how sure, and why."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations

from pwbench import stats
from pwbench.report.cells import ACCURATE, clock, error, times, worst
from pwbench.report.contenders import (
    DEFAULT_WINDOW,
    ONE_PRECISION,
    Contender,
    Gain,
    samples_of,
    shares_pages,
    stage_us,
)
from pwbench.report.model import SWEEP, Report, Scope
from pwbench.report.reach import binding_terms, geometric_mean
from pwbench.results import STAGES, Row


@dataclass
class Headline:
    """Sentences for one scope.

    Attributes:
        answer: what is fastest and by how much, with the error of both sides.
        alike: the same for the fastest that is about as exact as the baseline; or that there is none.
        facts: (question, answer) pairs: how sure, why, how accurate, does the search pay.
        sure: whether there were enough samples for a verdict.
    """

    answer: str
    alike: str = ""
    facts: list[tuple[str, str]] = field(default_factory=list)
    sure: bool = False


def headline(report: Report, scope: Scope) -> Headline:
    """The scope's answer."""
    rivals = [c for c in scope.shown if c in scope.geomeans and c not in scope.probes]
    rivals = [c for c in rivals if c.variant != scope.baseline]
    if scope.baseline is None and scope.cells:
        return _without_baseline(scope)
    if not rivals:
        return Headline(scope.note or "Only the baseline was measured, so there is nothing to compare.")
    best = rivals[0]
    mean = scope.geomeans[best]
    if scope.bounds:
        accuracy = ("At what accuracy?", _how_accurate(scope, best))
        return Headline(_bounds(scope, best), facts=[accuracy], sure=mean.enough)
    found = Headline(_answer(scope, best), _alike(scope, best, rivals), sure=mean.enough)
    asked = (
        ("How sure?", _how_sure(scope, best)),
        ("Why?", _why(scope, best)),
        ("Against what exactly?", _against_which_kernels(scope, best)),
        ("At what accuracy?", _how_accurate(scope, best)),
        ("Does the search pay?", _does_the_search_pay(scope)),
    )
    found.facts = [(question, text) for question, text in asked if text]
    return found


def _without_baseline(scope: Scope) -> Headline:
    """Who is fastest on how many captures, and where the order changes along a sweep."""
    rivals = [c for c in scope.shown if c not in scope.probes]
    first: dict[Contender, list[str]] = {}
    for capture in scope.captures:
        timed = {c: scope.cells[c, capture]["complete_us"] for c in rivals if (c, capture) in scope.cells}
        if timed:
            first.setdefault(min(timed, key=lambda c: timed[c]), []).append(capture)
    total = len(scope.captures)
    if len(rivals) < 2 or not first:
        return Headline(f"{scope.note} Nothing else was measured to compare.")
    ranked = sorted(first.items(), key=lambda item: -len(item[1]))
    if len(ranked) == 1:
        best, _ = ranked[0]
        every = _captures(total) if total == 1 else f"all {_captures(total)}"
        answer = f"{scope.named(best)} has the shortest time on {every}."
        answer += " It is never overtaken: no break-even was measured." if scope.suite == SWEEP else ""
    else:
        parts = [f"{scope.named(c)} on {len(on)} of {_captures(total)}" for c, on in ranked]
        answer = f"The shortest time has {', '.join(parts)}."
    crossings = _crossings(scope, rivals) if scope.suite == SWEEP else []
    note = f"{scope.note} {' '.join(crossings)}".strip()
    return Headline(answer, facts=[("Against what?", note)], sure=True)


def _crossings(scope: Scope, rivals: list[Contender]) -> list[str]:
    """Between which captures of a sweep one contender overtakes another, where it does so once."""
    found = []
    for one, other in combinations(rivals, 2):
        both = [c for c in scope.captures if (one, c) in scope.cells and (other, c) in scope.cells]
        ahead = [scope.cells[one, c]["complete_us"] < scope.cells[other, c]["complete_us"] for c in both]
        turns = [i for i in range(1, len(ahead)) if ahead[i] != ahead[i - 1]]
        if len(turns) == 1:
            new, old = (one, other) if ahead[-1] else (other, one)
            between = f"between {both[turns[0] - 1]} and {both[turns[0]]}"
            found.append(f"{scope.named(new)} overtakes {scope.named(old)} {between}.")
    return found


def _bounds(scope: Scope, best: Contender) -> str:
    """The fastest's speed-up on every capture of a suite of bounds."""
    parts = [
        f"{times(scope.speedups[best, c].value)} on {c}"
        for c in scope.captures
        if (best, c) in scope.speedups
    ]
    return f"Bounds, each for itself, of {scope.named(best)} over {scope.baseline}: {', '.join(parts)}."


def _answer(scope: Scope, best: Contender) -> str:
    """What is fastest, by how much, and the errors that belong to that comparison."""
    mean = scope.geomeans[best]
    over = f"geomean over {_captures(scope.counted(best))}"
    own, theirs = _errors(scope, best)
    at = f", with {_against(scope, own, theirs)}" if own is not None else ""
    over += ", errors the worst of them" if own is not None and scope.counted(best) > 1 else ""
    if mean.value <= 1:
        reached = f"the best, {scope.named(best)}, reaches {times(mean.value)}"
        text = f"Nothing beats {scope.baseline}: {reached}{at} ({over})."
    else:
        verb = "is" if mean.enough else "looks"
        faster = f"{times(mean.value)} as fast as {scope.baseline}"
        text = f"{scope.named(best)} {verb} fastest: {faster}{at} ({over})."
    if scope.device == "cpu":
        text += " CPU times show that the variants work; they say nothing about a GPU."
    return text


def _alike(scope: Scope, best: Contender, rivals: list[Contender]) -> str:
    """The fastest whose error is about the baseline's, where the fastest of all is not; what lacks rows."""
    limit = max(ACCURATE, _errors(scope, best)[1] or 0.0)
    exact = [c for c in rivals if (own := _errors(scope, c)[0]) is not None and own <= limit]
    if not exact and "accurate" in scope.unmeasured:
        return "At like accuracy: not measured; this suite has no rows at accurate."
    if exact and exact[0] != best and scope.geomeans[exact[0]].value <= 1:
        lacks = f"; {best.label} (accurate): not measured" if "accurate" in scope.unmeasured else ""
        return f"Nothing measured at like accuracy is faster than {scope.baseline}{lacks}."
    missing = [f"Not measured at {precision} in this suite." for precision in scope.unmeasured]
    return " ".join([*_fastest_alike(scope, best, exact, limit), *missing])


def _fastest_alike(scope: Scope, best: Contender, exact: list[Contender], limit: float) -> list[str]:
    if not exact:
        return [f"At like accuracy: nothing that was measured comes within {error(limit)}."]
    if exact[0] == best:
        return []  # the first answer says it
    faster = f"{scope.named(exact[0])}, {times(scope.geomeans[exact[0]].value)}"
    return [f"At like accuracy: {faster} with {_against(scope, *_errors(scope, exact[0]))}."]


def _errors(scope: Scope, contender: Contender) -> tuple[float | None, float | None]:
    """Worst rel-L2 over the compared captures: the contender's and the baseline's."""
    pairs = scope.pairs(contender)
    return worst((row for _, row in pairs), "rel_l2"), worst((base for base, _ in pairs), "rel_l2")


def _against(scope: Scope, own: float | None, theirs: float | None) -> str:
    return f"rel-L2 {error(own)}" + ("" if theirs is None else f" where {scope.baseline} has {error(theirs)}")


def _how_sure(scope: Scope, best: Contender) -> str:
    """The interval, what it is made of, and the noise floor, in plain words."""
    mean, pairs = scope.geomeans[best], scope.pairs(best)
    counts = sorted({len(samples_of(row)) for pair in pairs for row in pair})
    if not mean.enough:
        fewest = f"{counts[0]} sample{'' if counts[0] == 1 else 's'} per capture"
        are = "is" if counts[0] == 1 else "are"
        return f"Not sure: {fewest} {are} too few for a verdict (at least {stats.ENOUGH})."
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    text = (
        f"The speed-up lies between {mean.low:.3f} and {mean.high:.3f} (95 % interval). Each side was timed "
        f"{each} times on every capture; those samples were drawn again at random {stats.RESAMPLES:,} times, "
        f"and 95 % of the geomeans that came out lie in there. It says how firm the timing is, on these "
        f"captures only."
    )
    apart = sum(not ratio.paired for (c, _), ratio in scope.speedups.items() if c == best)
    if not apart:
        text += " The two took turns, sample by sample, in one session."
    else:
        text += (
            f" On {apart} of {_captures(len(pairs))} the two were measured in different sessions, which "
            f"alone can differ by {stats.CROSS_SESSION_FLOOR:.0%}."
        )
    return text + _noise(scope, pairs)


def _noise(scope: Scope, pairs: list[tuple[Row, Row]]) -> str:
    rows = [row for pair in pairs for row in pair]
    floors = [row["noise_floor"] for row in rows if row["noise_floor"] is not None]
    text = ""
    if floors:
        text = (
            f" Noise (A/A): timed against itself in the same way, {scope.baseline} seemed up to "
            f"{max(floors):.1%} faster or slower than it is."
        )
    floor = f"{scope.floor(rows):.1%}"
    return text + f" Faster or slower is said only where the whole interval lies beyond {floor}."


def _why(scope: Scope, best: Contender) -> str:
    """Time, stages and page visits of the fastest beside the baseline's, in the headline's own mean."""
    pairs = scope.pairs(best)
    sides = [[row["complete_us"] for row in side] for side in zip(*pairs, strict=True)]
    old, new = (geometric_mean(side) for side in sides)
    unit, write = clock((old, new))
    mean = "the geomean over the captures" if len(pairs) > 1 else "on the one capture"
    text = (
        f"A call takes {write(new)} {unit} instead of {scope.baseline}'s {write(old)} ({mean}, hence "
        f"{times(old / new)}). {_stage_shares([row for _, row in pairs])}"
    )
    return (
        text
        + _ladder(scope, best)
        + _visits(scope, pairs)
        + _roofline(scope, best, [row for _, row in pairs])
    )


def _ladder(scope: Scope, best: Contender) -> str:
    """From the baseline to the fastest in steps, each a geomean over the same captures: the kernel at the
    baseline's accuracy without a search, with it, and at the fastest's precision."""
    if best.precision != "fast":
        return ""
    kernel = best.variant.removesuffix("-regroup")
    unsearched = kernel if kernel != best.variant else f"{kernel}-original"
    names = (unsearched, best.variant)
    steps = []
    for name in names:
        window = best.window if name == best.variant else None
        step = Contender(name, "accurate", window)
        alike = {c for k, c in scope.speedups if k == step} == {c for k, c in scope.speedups if k == best}
        if alike and step in scope.geomeans:
            steps.append((scope.named(step), scope.geomeans[step].value))
    if not steps:
        return ""
    steps = [(scope.baseline_label, 1.0), *steps, (scope.named(best), scope.geomeans[best].value)]
    return " Step by step: " + " → ".join(f"{name} {times(value)}" for name, value in steps) + "."


def _stage_shares(rows: list[Row]) -> str:
    """Each stage's part of the call, a mean over captures, since a stage may be absent from some."""
    shares = {s: sum(stage_us(row, s) / row["complete_us"] for row in rows) / len(rows) for s in STAGES}
    parts = [f"{name} {share:.0%}" for name, share in shares.items() if share]
    if len(parts) < 2:
        return ""
    mean = "on average over the captures" if len(rows) > 1 else "of the call"
    over = "; stages overlap, so together they exceed 100 %" if sum(shares.values()) > 1.005 else ""
    return f"Of it, {mean}: {', '.join(parts)}{over}."


def _visits(scope: Scope, pairs: list[tuple[Row, Row]]) -> str:
    """Page visits, against the baseline's where its sharing is known, else against no sharing at all."""
    if not all(base["selected_pages"] and row["union_pages"] for base, row in pairs):
        return ""
    visits = sum(row["union_pages"] for _, row in pairs)
    alone = sum(row["selected_pages"] for _, row in pairs)
    where = "" if len(pairs) == 1 else ", summed over the captures"
    text = f" Page visits{where}: {visits:,}"
    if all(shares_pages(base) for base, _ in pairs):
        theirs = sum(base["union_pages"] for base, _ in pairs)
        return f"{text}, {scope.baseline}'s {theirs:,} ({visits / theirs:.0%})."
    if visits >= alone:
        return ""
    text += f", {visits / alone:.0%} of the {alone:,} that there would be if no two queries shared a page."
    if str(scope.baseline).startswith("flashinfer"):
        text += f" How many {scope.baseline} makes is not counted: its kernels share pages in their own way."
    return text


def _roofline(scope: Scope, best: Contender, rows: list[Row]) -> str:
    """How far the fastest is from what the GPU's ceilings allow it."""
    shares = [row["roofline_us"] / row["complete_us"] for row in rows if row["roofline_us"]]
    terms = binding_terms(rows)
    if not terms or not shares or scope.device != "cuda":
        return ""
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    reach = low if low == high else f"{low} to {high}"
    documented = any("(documented)" in str(row["roofline_term"]) for row in rows)
    rates = ", at documented rates" if documented else ""
    return (
        f" The ceilings of this GPU would allow its work in {reach} of the time (its roofline; what binds is "
        f"{' or '.join(terms)}{rates})."
    )


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


def _how_accurate(scope: Scope, best: Contender) -> str:
    own, theirs = _errors(scope, best)
    if own is None:
        return "It was not checked against the reference."
    text = f"{scope.named(best)}: rel-L2 {error(own)}"
    text += f"; {scope.baseline}: {error(theirs)}" if theirs is not None else ""
    text += ", against a reference on the same FP8 cache, each the worst of its captures."
    if all(row["tensors"] == "seeded" for row in scope.rows_of(best)):
        text += " Q and KV were seeded random values, not the model's own."
    elif all(row["tensors"] == "stored" for row in scope.rows_of(best)):
        text += " Q and KV were the model's own values, on which no limit is meant."
    cache = worst(scope.rows_of(best), "fp8_cache_rel_l2")
    if cache is not None:
        text += f" Storing K and V in FP8 alone costs {error(cache)}."
    text += _whose_limit(scope)
    limit = max(ACCURATE, theirs or 0.0)
    if theirs is None:
        return text
    return text + (
        f" Like accuracy means a worst rel-L2 of at most the larger of that limit and {scope.baseline}'s own "
        f"worst on the same captures: here {error(limit)}."
    )


def _whose_limit(scope: Scope) -> str:
    """What the limit of `ACCURATE` is, and that a baseline with one precision is not bound by it."""
    text = f" The limit of {error(ACCURATE)} is pwbench's own, for its kernels at accurate on seeded tensors."
    if scope.baseline in ONE_PRECISION:
        text += f" {scope.baseline} has one precision, its own, and keeps or breaks no limit."
    return text


def _does_the_search_pay(scope: Scope) -> str:
    kernels: dict[Contender, list[Gain]] = {}
    usual = [gain for gain in scope.gains if gain.contender.window in (None, DEFAULT_WINDOW)]
    for gain in usual or scope.gains:
        kernels.setdefault(gain.contender, []).append(gain)
    parts = []
    for contender, gains in kernels.items():
        mean = stats.geomean([gain.online_ratio for gain in gains])
        net = 1 - 1 / mean.value
        word = "saves" if net >= 0 else "costs"
        kernel = contender.full.replace("-regroup", "")
        part = f"for {kernel} regrouping {word} {abs(net):.1%} of the call, search included"
        part += _wins_and_losses(gains)
        if contender.fixed_path:
            part += _left_out(scope, contender)
        parts.append(part)
    text = "; ".join(parts)
    doubt = (
        ""
        if all(g.online_ratio.enough for gains in kernels.values() for g in gains)
        else " Too few samples to be sure."
    )
    return text[:1].upper() + text[1:] + "." + doubt if text else ""


def _wins_and_losses(gains: list[Gain]) -> str:
    """On how many captures the search wins and loses beyond the noise; nothing where it wins on all."""
    verdicts = [gain.says for gain in gains]
    words = {
        "faster": "wins on",
        "slower": "loses on",
        "same": "makes no difference on",
        "unsure": "unsure on",
    }
    counted = [f"{words[v]} {verdicts.count(v)}" for v in words if v in verdicts]
    if set(verdicts) == {"faster"}:
        return ""
    return f" (of {_captures(len(gains))} it {', '.join(counted)})".replace("it unsure on", "unsure on")


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
