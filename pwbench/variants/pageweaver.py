"""The fastest form of PageWeaver: search, page lists and a union walk, sized for the machine."""

from pwbench.variants._union import UnionVariant

VARIANT = UnionVariant(
    "pageweaver",
    summary="search, page lists and the union walk in their fastest form",
    order="online",
    cpu_group=16,  # two thread blocks of 8 rows share each page
)
