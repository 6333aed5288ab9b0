"""PageWeaver over an order found beforehand: what regrouping would gain if the search were free."""

from pwbench.variants._pageweaver import PageWeaver

VARIANT = PageWeaver(
    "pageweaver-precomputed",
    "pageweaver's kernels over an order found before the timed call",
    order="precomputed",
)
