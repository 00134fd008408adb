"""Signals while a run trains: the first lets the step finish, so that the run can be saved."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class StoppingHandler:
    """A handler that ends the work by an exception, and which training may therefore replace.

    Attributes:
        caught: numbers of the signals so far: Python drops exceptions that are raised within
            `__del__`.
    """

    def __init__(self) -> None:
        self.caught: list[int] = []


@contextmanager
def deferred_signals(on_signal: Callable[[int], object]) -> Iterator[list[int]]:
    """Record the signals that would end the work, in the list that the block gets.

    These are Ctrl-C, unless the program handles it otherwise, and those with a `StoppingHandler`.
    If the second one is Ctrl-C, the replaced handler ends the step at once, and nothing is saved; a
    second TERM or HUP is only recorded. Outside the main thread none is recorded.

    Args:
        on_signal: called with the number of each signal that is recorded.
    """
    caught: list[int] = []
    previous: dict[int, Any] = {}

    def handle(number: int, frame: object) -> None:
        if caught and number == signal.SIGINT:
            previous[number](number, frame)
        caught.append(number)
        on_signal(number)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in NAMES if hasattr(signal, name)):
                handler = signal.getsignal(number)
                if isinstance(handler, StoppingHandler):
                    caught[:] = handler.caught  # by now, with an exception that was dropped
                elif handler is not signal.default_int_handler:
                    continue
                previous[number] = signal.signal(number, handle)
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
