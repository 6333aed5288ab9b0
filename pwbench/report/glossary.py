"""Words that a page explains, each only where the page uses it."""

from __future__ import annotations

import re
from html import unescape

from pwbench import stats
from pwbench.report.cells import ACCURATE, error
from pwbench.report.contenders import WINDOWS


def explained(page: str) -> list[tuple[str, str]]:
    """(word, meaning) of every word of the list that ``page`` (HTML) shows to its reader."""
    text = visible(page)
    return [(word, meaning) for word, used, meaning in _WORDS if re.search(used, text)]


def visible(page: str) -> str:
    """The text of an HTML page as its reader sees it, figures included, white space made single."""
    body = page[page.find("<body") :]
    body = re.sub(r"<title>.*?</title>|<!--.*?-->", " ", body, flags=re.S)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))


_WORDS = (
    (
        "capture",
        r"\bcaptures?\b",
        "The recorded inputs of one call of the operator in a real model run: one layer, one chunk of "
        "the prompt.",
    ),
    (
        "-l1, -l2 ... in a name",
        r"\w-l\d+\b",
        "The layer of the model that the capture was recorded at; before it the prompt and the "
        "context: code-a-64k-l3 is layer 3 over 65,536 tokens of the prompt code-a.",
    ),
    (
        "page",
        r"\bpages?\b",
        "128 consecutive tokens of the KV cache. Each query selects up to 16 of them.",
    ),
    (
        "page visit",
        r"\b[Pp]age visits?\b",
        "One page read once for one group of queries. Their number decides how many bytes of K and V move.",
    ),
    (
        "union",
        r"\bunions?\b",
        "The pages that at least one query of a group selected, each listed once; the group reads "
        "them together.",
    ),
    (
        "tile",
        r"\btiles?\b",
        "The rows that the tensor cores work on at once: of pageweaver four queries with their 16 heads.",
    ),
    (
        "affinity",
        r"\baffinity\b",
        "How much neighbouring queries agree in their pages. High: small unions, little to read.",
    ),
    (
        "regrouping",
        r"\b[Rr]egroup",
        "Changing the order of queries that lie near each other, so that those with similar pages "
        "share a group.",
    ),
    (
        "complete call",
        r"\bcomplete call\b",
        "Everything that must happen each time, given the operator's inputs: search, metadata, "
        "attention, and whatever a competitor needs (quantising, planning). Measured as one unit.",
    ),
    (
        "stage",
        r"\bstages?\b",
        "A part of the complete call, timed by itself: search, metadata, attention, reduction.",
    ),
    (
        "gap",
        r"\bgap\b",
        "The complete call less the sum of its stages. Positive: launches and waiting. Negative: the "
        "stages overlap in the complete call, which then takes less time than they do one by one.",
    ),
    (
        "cold L2, warm L2",
        r"\b([Cc]old|[Ww]arm) L2\b",
        "Cold: the GPU's L2 cache was emptied before every sample, as after other layers of a model. "
        "Warm: it was left as the previous sample had filled it.",
    ),
    (
        "CUDA graph",
        r"\bCUDA graph\b",
        "The launches of a call, recorded once and replayed as a whole; eager launches go out one by one.",
    ),
    (
        "Cake, CuTe union",
        r"\bCake\b|\bCuTe\b",
        "FlashInfer's kernels for this operator. CuTe union is the newer; FlashInfer itself sends "
        "short chunks and very long contexts to the older ones, Cake v1 and v2.",
    ),
    (
        "speed-up",
        r"\b[Ss]peed-ups?\b",
        "Median time of the baseline divided by the median time of the variant, from samples taken in "
        "turn. The 95 % interval comes from resampling them (bootstrap).",
    ),
    (
        "geomean",
        r"\b[Gg]eomeans?\b",
        "Geometric mean: the captures' ratios multiplied, and the root of it. Twice as fast here and "
        "half as fast there gives 1.",
    ),
    (
        "verdict",
        r"\bverdict\b",
        "faster or slower: the whole interval lies beyond the noise floor. same: the whole interval "
        f"lies within twice the floor. unsure: neither, or fewer than {stats.ENOUGH} samples.",
    ),
    (
        "noise floor, A/A",
        r"\bnoise floor\b|\bA/A\b",
        "The baseline timed against itself in the same session (A/A): how far that ratio strays from "
        "1 is the floor.",
    ),
    (
        "rel-L2",
        r"\brel-L2\b",
        "Relative error of the output against a reference on the same FP8 cache: the norm of the "
        "difference over the norm of the reference. Smaller is more exact.",
    ),
    (
        "fast, accurate, its own",
        r"\b(fast|accurate)\b",
        "Precisions of pwbench's kernels: fast computes with queries and probabilities in 8 bits, "
        f"accurate keeps rel-L2 within {error(ACCURATE)} on seeded tensors. Other libraries have one "
        "precision, their own, and no such limit.",
    ),
    (
        "like accuracy",
        r"\blike accuracy\b",
        f"About as exact as the baseline: the worst rel-L2 over the captures is at most {error(ACCURATE)}, "
        "or at most the baseline's own worst on those captures where that is larger. So the limit differs "
        "from suite to suite.",
    ),
    (
        "W64, W128",
        r"\bW(64|128)\b",
        WINDOWS,
    ),
    (
        "seeded, the model's own",
        r"\bseeded\b",
        "The values of Q, K and V: random ones from a seed, on which the limits of precision are meant; or "
        "those that the model computed, whose errors are others and have no limit. The pages that were "
        "selected are the capture's in both.",
    ),
    (
        "roofline",
        r"\b[Rr]oofline\b",
        "The least time that the GPU's ceilings allow for a call's work: the longest of its terms, "
        "which binds.",
    ),
)
"""(word, pattern by which a page is known to use it, meaning)."""
