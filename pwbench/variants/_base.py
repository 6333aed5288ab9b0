"""What a competitor is: it prepares once, untimed, then offers the call and its stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pwbench.operator import SparsePrefillCall

STAGE_NAMES = ("search", "metadata", "attention", "reduction")
"""The stages a complete call may be split into, in the order they run."""


@dataclass(frozen=True)
class Options:
    """How a variant should run.

    Attributes:
        precision: ``fast`` (Q and P in 8 bits) or ``accurate`` (rel-L2 <= 2.5e-3).
        window: query positions that one regroup window holds, 64 or 128.
    """

    precision: str = "fast"
    window: int = 128


class Stage(NamedTuple):
    """One part of the complete call. Running the stages in order equals one complete call."""

    name: str
    run: Callable[[], None]


@dataclass
class Prepared:
    """A variant bound to one call: everything allocated and compiled, nothing computed yet.

    Attributes:
        run: the complete call, everything the operator's inputs require each time. On a GPU it
            launches on the current torch stream without allocating or synchronising, so that it
            can be captured into a CUDA graph (``graphable`` says so).
        stages: the same work cut into ordered stages; one attention stage when it cannot be cut.
        out: where the output lands, ``[total_q, Hq, D]`` bfloat16 (the CPU variants use float32).
        query_ids: the permutation the last run used, ``[Hkv, total_q]`` int32; None = original order.
        group: queries that share one page list (8 for union8, 1 where nothing is shared).
        details: facts for the result row, such as the peer's version and which of its kernels ran.
        counters: counters of the result row, for a variant that does not work by groups of an
            execution order; None = those of `pwbench.counters.count` for its order and group.
        debug: what the last run decided on the way, by name, for tests; None where nothing is kept.
    """

    run: Callable[[], None]
    stages: list[Stage]
    out: torch.Tensor
    query_ids: Callable[[], torch.Tensor | None] = field(default=lambda: None)
    group: int = 1
    graphable: bool = True
    details: dict[str, str] = field(default_factory=dict)
    counters: Callable[[], dict[str, float]] | None = None
    debug: Callable[[], dict[str, Any]] | None = None


class Variant(ABC):
    """A competitor. Subclasses set the class attributes and implement `prepare`.

    Attributes:
        search_window: query rows of the windows it searches, where it has a size of its own; None = as
            the options ask.
    """

    name: str
    summary: str
    precisions: tuple[str, ...] = ("fast",)
    search_window: int | None = None

    def unavailable(self, device: torch.device) -> str | None:
        """Why this variant cannot run on ``device`` here and now, or None when it can."""
        return None

    @abstractmethod
    def prepare(self, call: SparsePrefillCall, options: Options) -> Prepared:
        """Bind to ``call``: allocate and compile. Untimed.

        Raises:
            VariantUnavailable: it cannot run this call here; the row reports the message.
        """
