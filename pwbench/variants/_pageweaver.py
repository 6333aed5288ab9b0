"""What the PageWeaver variants share, and when their search pays for itself."""

from pwbench.operator import TOPK, SparsePrefillCall
from pwbench.variants._union import Order, UnionVariant

SEARCH_PAYS_ROWS = 4096
"""Rows times KV heads from which the search pays. On an H200 the windows of 64 rows are searched side by
side in about 11 us, of which some 5 us are not hidden behind the V images, whatever the number of rows; what it saves,
about 4 % of attention, grows with the rows: 25 ns each make 4 us at 4096."""


class PageWeaver(UnionVariant):
    """Tasks of 8 rows, in two tiles of 4; the search fills tiles, whose unions the tensor cores pay for."""

    def __init__(self, name: str, summary: str, order: Order | None) -> None:
        """``order`` None: whichever pays, by what the host knows."""
        super().__init__(name, summary, order or "online", group=8, search_group=4, search_window=64)
        self.adapts = order is None

    def order_for(self, call: SparsePrefillCall) -> Order:
        if not self.adapts:
            return self.order
        choice = call.page_table.shape[1] > TOPK and call.total_q * call.kv_heads >= SEARCH_PAYS_ROWS
        return "online" if choice else "original"
