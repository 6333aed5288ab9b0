"""PageWeaver with its search always inside the timed call."""

from pwbench.variants._pageweaver import PageWeaver

VARIANT = PageWeaver(
    "pageweaver-regroup",
    "pageweaver's kernels over rows regrouped by a search inside the timed call",
    order="online",
)
