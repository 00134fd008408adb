"""What users should know, beside results and errors: records of the logger `chargpt`.

Warnings ask for attention, infos do not. The command line prints both; in Python they go where the
program's logging sends them.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("chargpt")


@contextmanager
def collected_notes() -> Iterator[list[str]]:
    """Yield a list that receives the messages logged by this thread in the block.

    Infos are among them whatever the logger's level is; other handlers get what they got before.
    """
    notes: list[str] = []
    level, effective_level = logger.level, logger.getEffectiveLevel()
    thread = threading.get_ident()

    def collect(record: logging.LogRecord) -> bool:
        if record.thread == thread:
            notes.append(record.getMessage())
        return record.levelno >= effective_level

    logger.addFilter(collect)
    logger.setLevel(min(effective_level, logging.INFO))
    try:
        yield notes
    finally:
        logger.setLevel(level)
        logger.removeFilter(collect)
