"""pwbench: record, replay, report and gate Top-K page-sparse attention prefill on Hopper GPUs."""

__version__ = "0.1.0"
