"""Captures: one recorded operator call in a directory. Write, read, verify, and the sources."""

from pwbench.capture.format import Tables
from pwbench.capture.reader import Capture, discover, load
from pwbench.capture.recorder import Recorder, Recording, Target
from pwbench.capture.writer import write

__all__ = [
    "Capture",
    "Recorder",
    "Recording",
    "Tables",
    "Target",
    "discover",
    "load",
    "write",
]
