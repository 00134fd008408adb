"""Everything that can go wrong for a user, as one small tree.

Each message is one sentence that says the cause and the remedy. A command prints it and leaves
with `exit_code`: 2 where the input was wrong, 1 where the input was right and the work failed.
Broken invariants of the code itself are `assert`s, and those do print a traceback.
"""


class ChargptError(Exception):
    """Base of every error that a user can meet and put right."""

    exit_code = 2


class ConfigError(ChargptError):
    """A setting is unknown, malformed, out of range or at odds with another."""


class TextError(ChargptError):
    """A text is missing, unreadable, undecodable or too short."""


class UnknownCharacterError(TextError):
    """A text holds characters that the vocabulary does not have."""


class DeviceError(ChargptError):
    """The device or number format asked for is not to be had on this machine."""


class RunError(ChargptError):
    """A run folder is missing, taken, unfinished or damaged."""


class FinishedError(RunError):
    """A run that was to go on has nothing left to do."""


class WorkError(ChargptError):
    """The input was right, and the work failed all the same."""

    exit_code = 1


class DivergedError(WorkError):
    """A loss, a gradient or a weight is no longer a finite number, from `step` on."""

    def __init__(self, words: str, step: int) -> None:
        super().__init__(words)
        self.step = step


class DownloadError(WorkError):
    """A named corpus could not be fetched, or is not what its publisher stated."""
