"""The fastest form of PageWeaver: persistent blocks, tiles filled by a search where that pays."""

from pwbench.variants._pageweaver import PageWeaver

VARIANT = PageWeaver(
    "pageweaver",
    "the union walk in its fastest form, searching where that pays",
    order=None,
)
