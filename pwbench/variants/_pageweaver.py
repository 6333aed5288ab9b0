"""What the PageWeaver variants share, and when their search pays for itself."""

from typing import NamedTuple

from pwbench.operator import SparsePrefillCall
from pwbench.variants._base import Options
from pwbench.variants._union import Order, UnionVariant

SHORT_IMAGES = 128
"""Up to so many V images a call is short: unions are small, and the search has little to hide behind."""


class Payoff(NamedTuple):
    """What the search is worth, in microseconds on an H200."""

    saved: float
    """For each row and KV head: 5 to 7 % of attention."""
    cost: float
    """Of the call, whatever the rows, since all windows are searched side by side."""


PAYOFFS = {
    ("fast", "short"): Payoff(0.0008, 8.3),
    ("fast", "long"): Payoff(0.0013, 6.2),
    ("accurate", "short"): Payoff(0.0014, 6.5),
    ("accurate", "long"): Payoff(0.0025, 5.0),
}
"""Measured on texts of 24K and 48K tokens that are in no other suite, and on five layers of one at 8K."""


class PageWeaver(UnionVariant):
    """Tasks of 8 rows, in two tiles of 4. The search fills tiles, whose unions the tensor cores pay for, and
    then pairs them by the pages that a task copies."""

    def __init__(self, name: str, summary: str, order: Order | None) -> None:
        """``order`` None: whichever pays, by what the host knows."""
        super().__init__(
            name, summary, order or "online", group=8, search_group=4, search_window=64, matching=True
        )
        self.adapts = order is None

    @property
    def choice(self) -> str:
        """When it searches, in words; empty where it has no choice."""
        if not self.adapts:
            return ""
        least = {key: f"{round(payoff.cost / payoff.saved, -2):,.0f}" for key, payoff in PAYOFFS.items()}
        return (
            "It searches where that saves more than it costs, by what was measured on an H200. Where pages "
            f"times KV heads are at most {SHORT_IMAGES}: from {least['fast', 'short']} queries times KV "
            f"heads on at fast, {least['accurate', 'short']} at accurate; where they are more: from "
            f"{least['fast', 'long']} and {least['accurate', 'long']}. Else the queries stay in their order."
        )

    def order_for(self, call: SparsePrefillCall, options: Options) -> Order:
        if not self.adapts:
            return self.order
        images = call.page_table.numel() * call.kv_heads
        payoff = PAYOFFS[options.precision, "short" if images <= SHORT_IMAGES else "long"]
        return "online" if payoff.saved * call.total_q * call.kv_heads > payoff.cost else "original"
