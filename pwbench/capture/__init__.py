"""Captures: one recorded operator call in a directory. Write, read, verify, and the sources."""

from pwbench.capture.checks import Check, failures, verify
from pwbench.capture.format import Tables
from pwbench.capture.reader import Capture, discover, load
from pwbench.capture.recorder import Recorder, Recording, Target
from pwbench.capture.writer import write

__all__ = [
    "Capture",
    "Check",
    "Recorder",
    "Recording",
    "Tables",
    "Target",
    "discover",
    "failures",
    "load",
    "verify",
    "write",
]
