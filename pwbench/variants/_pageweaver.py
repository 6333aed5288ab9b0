"""What the PageWeaver variants share, and when their search pays for itself."""

from pwbench.operator import SparsePrefillCall
from pwbench.variants._union import Order, UnionVariant

SEARCH_PAYS_ROWS = 4096
"""Rows times KV heads from which the search can pay: windows are searched side by side in about 11 us on
an H200, whatever their number, and what it saves, some 4 % of attention, grows with the rows: 25 ns each
make 4 us at 4096."""
SEARCH_HIDES_PAGES = 256
"""Pages of context above which the search hides behind the making of their V images, which the call waits
for anyway; below, it is paid in full and neighbouring rows agree so well that it finds little."""


class PageWeaver(UnionVariant):
    """Tasks of 8 rows, in two tiles of 4; the search fills tiles, whose unions the tensor cores pay for."""

    def __init__(self, name: str, summary: str, order: Order | None) -> None:
        """``order`` None: whichever pays, by what the host knows."""
        super().__init__(name, summary, order or "online", group=8, search_group=4, search_window=64)
        self.adapts = order is None

    def order_for(self, call: SparsePrefillCall) -> Order:
        if not self.adapts:
            return self.order
        hides = call.page_table.shape[1] > SEARCH_HIDES_PAGES
        pays = call.total_q * call.kv_heads >= SEARCH_PAYS_ROWS
        return "online" if hides and pays else "original"
