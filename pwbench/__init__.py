"""pwbench: record, replay, report and gate Top-K page-sparse attention prefill on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

__version__ = "0.1.0"
__all__ = ["__version__", "load_results"]


def load_results(paths: str | Path | Sequence[str | Path] = "results") -> pd.DataFrame:
    """Results files as one tidy DataFrame: `pwbench.results.load`, which documents the columns.

    Example:
        >>> pwbench.load_results("results").query("status == 'ok'")[["capture", "variant", "complete_us"]]
    """
    from pwbench import results  # pandas is slow to import and most commands do not need it

    return results.load(paths)
