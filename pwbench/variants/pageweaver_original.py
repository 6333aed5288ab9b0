"""PageWeaver without its search: what regrouping is measured against."""

from pwbench.variants._pageweaver import PageWeaver

VARIANT = PageWeaver(
    "pageweaver-original",
    "pageweaver's kernels over rows in their original order",
    order="original",
)
