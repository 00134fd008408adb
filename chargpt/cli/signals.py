"""INT, TERM and HUP: a training step and a save are finished first; anything else ends at once."""

import os
import signal
import sys
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
    """What to do with a signal: `patient`, it is only noted, for the training loop to see.

    One that is to stop all at once is noted too: Python drops what is raised while it clears an
    object away. Such a one is seen by the training loop all the same, or at the command's end.
    """

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
        at_once = not self.patient or (bool(self.caught) and number == signal.SIGINT)
        self.caught.append(number)
        if at_once:
            raise Stopped(number)
        if console.is_main():  # not by way of Python's streams, which the signal may have cut into
            with suppress(OSError):
                os.write(2, b"stopping after this step (again to stop at once)\n")


@contextmanager
def catch_signals() -> Iterator[Signals]:
    """Take over the signals that end a process, but for those it was told to ignore (`nohup`).

    Raises:
        Stopped: at the end, if a signal came and has ended nothing yet.
    """
    signals = Signals()
    numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, signals.note) for number in heeded}
    tell_of_dropped = sys.unraisablehook

    def tell_of_others(dropped: "sys.UnraisableHookArgs") -> None:
        if not isinstance(dropped.exc_value, Stopped):
            tell_of_dropped(dropped)

    sys.unraisablehook = tell_of_others
    try:
        yield signals
        if signals.caught:
            raise Stopped(signals.caught[0])
    finally:
        sys.unraisablehook = tell_of_dropped
        for number, handler in before.items():
            signal.signal(number, handler)
