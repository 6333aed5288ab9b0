"""What the PageWeaver variants share, and when their search pays for itself."""

from pwbench.operator import SparsePrefillCall
from pwbench.variants._base import Options
from pwbench.variants._union import Order, UnionVariant

SAVED_US = {"fast": 0.0010, "accurate": 0.0014}
"""What the search saves for each row and KV head, microseconds on an H200: 4 to 5 % of attention."""
SEARCH_US, HIDDEN_SEARCH_US = 11.6, 5.2
"""What it costs the call, whatever the rows, since all windows are searched side by side: most of its 14 us,
or less where it hides behind the making of more than SEARCH_HIDES_IMAGES V images."""
SEARCH_HIDES_IMAGES = 256


class PageWeaver(UnionVariant):
    """Tasks of 8 rows, in two tiles of 4; the search fills tiles, whose unions the tensor cores pay for."""

    def __init__(self, name: str, summary: str, order: Order | None) -> None:
        """``order`` None: whichever pays, by what the host knows."""
        super().__init__(
            name, summary, order or "online", group=8, search_group=4, search_window=64, matching=True
        )
        self.adapts = order is None

    def order_for(self, call: SparsePrefillCall, options: Options) -> Order:
        if not self.adapts:
            return self.order
        hides = call.page_table.numel() * call.kv_heads > SEARCH_HIDES_IMAGES
        saved = SAVED_US[options.precision] * call.total_q * call.kv_heads
        return "online" if saved > (HIDDEN_SEARCH_US if hides else SEARCH_US) else "original"
