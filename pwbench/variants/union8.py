"""Groups of 8 query rows as they come, each walking its union of pages once."""

from pwbench.variants._union import UnionVariant

VARIANT = UnionVariant(
    "union8",
    summary="8 consecutive rows walk one union of pages",
    order="original",
)
