"""Signals: INT, TERM and HUP let a training step finish and save; elsewhere they end at once."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from chargpt.cli import console

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class Stopped(BaseException):
    """A signal has ended the command; its number decides the exit code."""

    def __init__(self, number: int, *, is_reported: bool = False) -> None:
        super().__init__(number)
        self.number = number
        self.is_reported = is_reported  # whether a message has named the signal


class Signals:
    """The handler of the signals that end a process.

    Attributes:
        caught: numbers of the signals so far, also of those that raised `Stopped`: Python drops
            exceptions that are raised within `__del__`, and such a signal ends the command later.
        is_deferred: whether a signal is only recorded, for the training loop to see.
    """

    def __init__(self) -> None:
        self.caught: list[int] = []
        self.is_deferred = False
        self.terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def handle(self, number: int, _frame: object) -> None:
        """Record a signal; raise `Stopped` if they are not deferred, or at a Ctrl-C after one."""
        if number == getattr(signal, "SIGHUP", None):  # the terminal is gone: writing would fail
            for terminal in self.terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)
        stops_now = not self.is_deferred or (bool(self.caught) and number == signal.SIGINT)
        self.caught.append(number)
        if stops_now:
            raise Stopped(number)
        if console.is_main():  # without Python's streams, which the signal may have interrupted
            with suppress(OSError):
                os.write(2, b"\nstopping after this step (another Ctrl-C stops at once)\n")


@contextmanager
def handling(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Give the signals that end a process a handler, except those it ignores already (`nohup`)."""
    numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def exit_at_once(number: int, _frame: object) -> None:
    """End the process, which must have nothing to clean up yet.

    An exception instead could be lost: modules in C drop those of the imports that they begin.
    """
    if console.is_main():
        with suppress(OSError):
            os.write(2, b"stopped\n")
    os._exit(128 + number)


@contextmanager
def catch_signals() -> Iterator[Signals]:
    """Handle the signals that end a process by `Signals`.

    Raises:
        Stopped: at the end, if a signal came that has not ended the command yet.
    """
    signals = Signals()
    previous_hook = sys.unraisablehook

    def hide_stopped(dropped: "sys.UnraisableHookArgs") -> None:
        if not isinstance(dropped.exc_value, Stopped):
            previous_hook(dropped)

    sys.unraisablehook = hide_stopped
    try:
        with handling(signals.handle):
            yield signals
            if signals.caught:
                raise Stopped(signals.caught[0])
    finally:
        sys.unraisablehook = previous_hook
