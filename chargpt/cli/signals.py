"""INT, TERM and HUP: a training step and a save are finished first; anything else ends at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from chargpt.cli import console

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class Stopped(BaseException):
    """A signal has ended the command; its number decides the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """What to do with a signal: `patient`, it is only noted, for the training loop to see."""

    def __init__(self) -> None:
        self.caught: list[int] = []
        self.patient = False
        self.terminals = [number for number in (1, 2) if os.isatty(number)]

    def note(self, number: int, _frame: object) -> None:
        """Note a signal, or stop at once: on a second INT, and where nothing is to be saved.

        Raises:
            Stopped: at once.
        """
        if number == getattr(signal, "SIGHUP", None):  # the terminal is gone, and writing fails
            for terminal in self.terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)
        if not self.patient or (self.caught and number == signal.SIGINT):
            raise Stopped(number)
        self.caught.append(number)
        if console.is_main():  # not by way of Python's streams, which the signal may have cut into
            with suppress(OSError):
                os.write(2, b"stopping after this step (again to stop at once)\n")


@contextmanager
def catch_signals() -> Iterator[Signals]:
    """Take over the signals that end a process, but for those it was told to ignore (`nohup`)."""
    signals = Signals()
    numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, signals.note) for number in heeded}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
