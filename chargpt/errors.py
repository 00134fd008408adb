"""Exceptions with a message for the user.

Each message is one sentence that states the cause and the remedy. A command prints it, as IPython
does, and exits with `exit_code`: 2 if the input was invalid, 1 if it was valid and the operation
failed. Internal invariants are `assert` statements, which print a traceback.
"""

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import PurePath

MIN_SIMILARITY = 0.8  # of names, from 0 to 1; below it a suggestion is more confusing than helpful
# in errors of torch on CUDA, MPS and XPU, of cuBLAS and cuDNN, and of a CPU (Windows, oneDNN)
OUT_OF_MEMORY = (
    "out.of.(device.)?memory|alloc_failed|can't allocate memory|not enough memory: you|"
    "could not create a primitive(?! descriptor)"
)
NOT_FINITE = "the model's loss is not finite: its weights are too large; use another checkpoint"


class ChargptError(Exception):
    """Base class of all errors that a user can correct."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in place of a traceback: the message, which says it all."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(ChargptError):
    """A setting is unknown, malformed, out of range or in conflict with another."""


class TextError(ChargptError):
    """A text is missing, unreadable, undecodable or too short."""


class MissingTextError(TextError):
    """There is no text at the path, or no built-in one."""


class UnknownCharacterError(TextError):
    """A text contains characters outside the vocabulary."""


class DeviceError(ChargptError):
    """This machine lacks the device, the memory or the connection that was requested."""


class CaptureError(ChargptError):
    """A computation cannot be captured as a CUDA graph."""


class RunError(ChargptError):
    """A run folder is missing, in use, incomplete or damaged."""


class UnreadableError(RunError):
    """A file of a run exists, and the system cannot read it now; it may be intact."""


class FinishedError(RunError):
    """The run to resume has no steps left."""


class OperationError(ChargptError):
    """The input was valid, and the operation failed."""

    exit_code = 1


class TooFewError(OperationError):
    """Too few samples are new or distinct."""


class UnsavedError(OperationError):
    """The checkpoint of the last step could not be written."""


class DivergedError(OperationError):
    """A loss, gradient or weight is NaN or infinite, first at `step`."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class DownloadError(OperationError):
    """A text could not be downloaded, or its checksum is wrong."""


class Stopped(BaseException):
    """A signal ends the work.

    Attributes:
        number: of the signal; the exit code is 128 + number (`exit_code_of` in `cli/main.py`).
        is_saved: whether training has saved a checkpoint first.
        is_reported: whether a message has said that the work has stopped.
    """

    def __init__(self, number: int, *, is_saved: bool = False) -> None:
        super().__init__(number)
        self.number, self.is_saved, self.is_reported = number, is_saved, False


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error of Python, numpy or torch says that there is not enough memory."""
    return isinstance(error, MemoryError) or bool(re.search(OUT_OF_MEMORY, str(error).lower()))


def reason_of(error: Exception) -> str:
    """Return why an operation failed, in a line; some errors of the system hold no text."""
    if isinstance(error, OSError) and len(error.args) != 1:
        known = os.strerror(error.errno) if error.errno else type(error).__name__
        return error.strerror or known
    return " ".join(str(error).split()) or type(error).__name__


def most_similar(name: str, names: Iterable[str]) -> str | None:
    """Return the name that was probably meant, whatever its ending; None if none is similar."""
    by_stem = {PurePath(each).stem: each for each in names}
    near = get_close_matches(PurePath(name).stem, by_stem, n=1, cutoff=MIN_SIMILARITY)
    return by_stem[near[0]] if near else None
