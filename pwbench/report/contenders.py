"""One line of a table: a variant the way it was run, and how two rows of it compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pwbench import stats
from pwbench.results import Row

DEFAULT_WINDOW = 128
OWN_WINDOW = ("pageweaver",)
"""Kernels whose search has a window of its own. One of them may search some captures of a suite and leave
others in their order: that is its choice, not another contender."""
WINDOWS = (
    "W64 or W128 in a name: the search looks for partners among so many neighbouring queries. A name without "
    f"it means {DEFAULT_WINDOW} for union8, and 64 for pageweaver, which knows no other."
)
"""What a window in a label means."""
ONE_PRECISION = ("flashinfer", "flashinfer-cake", "flashinfer-paged", "reference", "triton")
"""Variants with one arithmetic. They run beside either precision of the others, and whatever precision
their rows carry, what they compute is the same: a reader is shown one line, without that word."""
OWN_PRECISION = "its own"
"""What stands in place of the precision of a contender that has only one."""


@dataclass(frozen=True)
class Contender:
    """A variant the way it was run: what one line of a table stands for.

    Attributes:
        window: the search's, where the options decide it; None for a kernel of `OWN_WINDOW`.
    """

    variant: str
    precision: str
    window: int | None

    @property
    def label(self) -> str:
        """The variant's name, with the window when it is not the default."""
        return self.variant + (f" W{self.window}" if self.window not in (None, DEFAULT_WINDOW) else "")

    @property
    def fixed_path(self) -> bool:
        """Whether it is one path of a kernel that chooses its path itself, measured to tell them apart."""
        stem, *path = self.variant.split("-", 1)
        return stem in OWN_WINDOW and bool(path)

    @property
    def competes(self) -> bool:
        """Whether it does the whole work: the ``-precomputed`` path is handed its permutation."""
        return not self.variant.endswith("-precomputed")

    @property
    def full(self) -> str:
        """`label` with the precision."""
        return f"{self.label} ({self.precision})"


@dataclass(frozen=True)
class Gain:
    """What regrouping does to one capture: the paper's three paths of one kernel.

    Attributes:
        contender: the online path: ``-regroup``, or a variant that chose to search by itself.
        original, online, precomputed: rows; the last may be None.
        online_ratio: T_original / T_online, above 1 when regrouping pays for itself.
        precomputed_ratio: T_original / T_precomputed: the same if the search were free.
    """

    capture: str
    contender: Contender
    original: Row
    online: Row
    precomputed: Row | None
    online_ratio: stats.Ratio
    precomputed_ratio: stats.Ratio | None

    @property
    def kernel(self) -> str:
        return self.contender.variant.removesuffix("-regroup")

    @property
    def window(self) -> int | None:
        """Query rows of the windows that were searched."""
        return None if self.online["window"] is None else int(self.online["window"])

    @property
    def says(self) -> str:
        """faster, slower, same or unsure: the online path against the original order, by the rule of all
        verdicts."""
        rows = (self.original, self.online)
        same_session = self.original["session"] == self.online["session"]
        floor = stats.floor_of(*(row.get("noise_floor") for row in rows), same_session=same_session)
        return stats.verdict(self.online_ratio.inverse(), floor).lower()

    @property
    def net_us(self) -> float:
        """T_original - T_online."""
        return float(self.original["complete_us"] - self.online["complete_us"])

    @property
    def attention_saved_us(self) -> float:
        return stage_us(self.original, "attention") - stage_us(self.online, "attention")

    @property
    def overhead_paid_us(self) -> float:
        """Search and metadata of the online path beyond those of the original path."""
        paid = sum(stage_us(self.online, s) for s in ("search", "metadata"))
        return paid - sum(stage_us(self.original, s) for s in ("search", "metadata"))


def compare(base: Row, row: Row) -> stats.Ratio:
    """``base`` time / ``row`` time, paired when both are of one session."""
    first, second = samples_of(base), samples_of(row)
    paired = base["session"] == row["session"] and len(first) == len(second)
    return stats.ratio_of_medians(first, second, paired)


def contender_of(row: Row) -> Contender:
    """Which line of a table the row belongs to."""
    own = row["variant"].split("-")[0] in OWN_WINDOW or row["window"] is None
    return Contender(row["variant"], row["precision"], None if own else int(row["window"]))


def samples_of(row: Row) -> Sequence[float]:
    """Samples of the complete call; its median alone where they were not kept."""
    values = row.get("complete_samples")
    return [row["complete_us"]] if values is None or len(values) == 0 else values


def stage_us(row: Row, name: str) -> float:
    """Median time of a stage, 0 where the variant has none."""
    return float(row.get(f"{name}_us") or 0.0)


def shares_pages(row: Row) -> bool:
    """Whether the row tells how its queries share pages. One that counts every query alone does not: its
    kernel may share pages in a way of its own."""
    return bool(row["groups"] and row["union_pages"] and row["groups"] < row["total_q"] * row["kv_heads"])
