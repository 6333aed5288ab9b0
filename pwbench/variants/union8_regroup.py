"""Groups of 8 found by the greedy search, which runs inside the timed call."""

from pwbench.variants._union import UnionVariant

VARIANT = UnionVariant(
    "union8-regroup",
    summary="union8 over rows regrouped by a search inside the timed call",
    order="online",
)
