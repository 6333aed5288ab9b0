"""The exceptions pwbench raises on purpose, and the exit code each becomes on the command line.

    PwbenchError                    every deliberate failure
    ├── InputError         exit 2   the caller handed over something that is not a valid input
    │   ├── OperatorError           a tensor of the call breaks the operator's contract
    │   └── CaptureError            a capture is missing, truncated, edited or foreign
    ├── CheckFailed        exit 1   a check or gate ran and its answer is no
    └── MeasurementError   exit 3   a measurement could not be made (no GPU, no compiler, no timer)
        └── VariantUnavailable      a competitor cannot run here; its row says why

A message names what failed, the value seen, the value expected, and what to do next.
"""


class PwbenchError(Exception):
    """Every deliberate failure; ``exit_code`` is what the command line returns for it."""

    exit_code = 2


class InputError(PwbenchError):
    """The caller handed over something that is not a valid input."""


class OperatorError(InputError):
    """A tensor of the call breaks the operator's contract."""


class CaptureError(InputError):
    """A capture is missing, truncated, edited or foreign."""


class CheckFailed(PwbenchError):
    """A check or gate ran and its answer is no."""

    exit_code = 1


class MeasurementError(PwbenchError):
    """A measurement could not be made."""

    exit_code = 3


class VariantUnavailable(MeasurementError):
    """A competitor cannot run here; the message says why and what would mend it."""
