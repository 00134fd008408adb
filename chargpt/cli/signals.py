"""Signals of the command line: INT, TERM and HUP end a command at once, by `Stopped`.

While a run trains, `training.start.deferred_signals` replaces the handler.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from chargpt.cli import console
from chargpt.errors import Stopped

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class Signals:
    """The handler of the signals that end a process.

    Attributes:
        caught: numbers of the signals so far. Python drops exceptions that are raised within
            `__del__`: such a signal ends the process later.
    """

    def __init__(self) -> None:
        self.caught: list[int] = []

    def __call__(self, number: int, _frame: object) -> None:
        """Raise `Stopped`."""
        hang_up(number)
        self.caught.append(number)
        raise Stopped(number)


def hang_up(number: int) -> None:
    """Write no more to a terminal that is gone (SIGHUP): it would fail."""
    if number == getattr(signal, "SIGHUP", None):
        for descriptor in (1, 2):
            if os.isatty(descriptor):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def say_stopping(number: int) -> None:
    """Say that training stops after the present step."""
    hang_up(number)
    if not console.is_silent:  # without Python's streams, which the signal may have interrupted
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
    if not console.is_silent:
        with suppress(OSError):
            os.write(2, b"stopped\n")
    os._exit(128 + number)


@contextmanager
def catch_signals() -> Iterator[None]:
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
        with handling(signals):
            yield
            if signals.caught:
                raise Stopped(signals.caught[0])
    finally:
        sys.unraisablehook = previous_hook
