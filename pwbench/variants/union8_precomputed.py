"""Groups of 8 from the same search done beforehand: what the search would gain if it cost nothing."""

from pwbench.variants._union import UnionVariant

VARIANT = UnionVariant(
    "union8-precomputed",
    summary="union8 over rows regrouped beforehand, outside the timed call",
    order="precomputed",
)
