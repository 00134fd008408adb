"""What the library logs, as messages on stderr."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chargpt.cli import console
from chargpt.log import logger

writers: list[Callable[[str], None]] = [console.say]  # the last one writes: a progress bar, if any


class NoteHandler(logging.Handler):
    """Writes messages, each once in a row."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message of a record."""
        message = record.getMessage()
        if message != self.last:
            self.last = message
            writers[-1](message)


@contextmanager
def shown_notes() -> Iterator[None]:
    """Write the infos and warnings of the logger `chargpt` in the block, and only there."""
    handler, level = NoteHandler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True
