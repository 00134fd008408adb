"""Printing for commands: data on stdout, messages on stderr, and numbers with units."""

import json
import logging
import os
import re
import sys
import textwrap
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from chargpt.errors import OperationError, TextError
from chargpt.log import logger
from chargpt.text.display import display_char

NOTICE_SECONDS = 1.0  # before `say_if_slow` prints
SPARKS = "▁▂▃▄▅▆▇█"
KEPT = "\n\t\N{SOFT HYPHEN}\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}\N{WORD JOINER}"

started = time.perf_counter()  # when the command began; `run` sets it
is_silent = False  # on the ranks of `torchrun` but the first; `run` sets it


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Return the columns and rows of a terminal; 80 and 24 if it does not know them."""
    columns = rows = 0
    with suppress(OSError):
        columns, rows = os.get_terminal_size(stream.fileno())
    return columns or 80, rows or 24


def wrapped(text: str, stream: TextIO, indent: str = "", hanging: str = "") -> str:
    """Return sentences with line breaks between words, to the width of the terminal, if it is one.

    `indent` begins every line, and `hanging` those after a break too. Lines that
    begin with a space are commands to copy and stay whole.
    """
    if not stream.isatty() and not indent:
        return text
    width = terminal_size(stream)[0] if stream.isatty() else 10**6
    # an option and its value stay together
    text = re.sub(r"( --?[a-z][\w-]*) (?=\S)| (?=-\d)", lambda found: f"{found[1] or ''}\0", text)
    return "\n".join(
        line if line.startswith(" ") else fill(line, width, indent, indent + hanging)
        for line in text.split("\n")
    ).replace("\0", " ")


def fill(text: str, width: int, indent: str = "", hanging: str = "") -> str:
    """Return a paragraph in lines of at most `width` characters, broken at spaces only."""
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def say(text: str, hanging: str = "") -> None:
    """Print a message on stderr; a closed stderr stops no work."""
    if is_silent:
        return
    try:
        print(wrapped(printable(text), sys.stderr, hanging=hanging), file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


@contextmanager
def say_if_slow(text: str) -> Iterator[threading.Timer]:
    """Print a message on a terminal in a second, unless the block ends or cancels it before."""
    notice = threading.Timer(NOTICE_SECONDS, say, [text])
    notice.daemon = True
    if sys.stderr.isatty():
        notice.start()
    try:
        yield notice
    finally:
        notice.cancel()


writers: list[Callable[[str], None]] = [say]  # of what is logged; the last writes


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


class OutputClosed(BaseException):
    """The program that reads stdout has ended, as in `chargpt sample | head`."""


def out(text: str, end: str = "\n") -> None:
    """Print results on stdout, without control characters."""
    write_out(printable(text) + end)


def out_text(text: str, end: str = "") -> None:
    """Print a generated text on stdout: as it is for a file, and printable for a terminal.

    Raises:
        TextError: the encoding of stdout, which is no terminal, lacks a character.
    """
    if sys.stdout.isatty():
        out(text, end)
        return
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError as error:
        raise TextError(
            f"the output is written as {sys.stdout.encoding}, which lacks "
            f"U+{ord(text[error.start]):04X}; set PYTHONIOENCODING=utf-8"
        ) from None
    write_out(text + end)


def write_out(text: str) -> None:
    """Write text to stdout.

    Raises:
        OutputClosed: nobody reads it.
    """
    if is_silent:
        return
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # which click would make exit code 1
        raise OutputClosed from None


def out_sentence(text: str, indent: str = "", hanging: str = "") -> None:
    """Print sentences on stdout, wrapped on a terminal."""
    out(wrapped(text, sys.stdout, indent, hanging))


def out_json(value: object) -> None:
    """Print one JSON value on stdout; what stdout or a terminal cannot take is escaped.

    Raises:
        OperationError: a number in it is NaN or infinite.
    """
    is_ascii = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    try:
        text = json.dumps(value, ensure_ascii=is_ascii, allow_nan=False)
    except ValueError:
        raise OperationError(
            "a result is NaN or infinite: the model's weights are too large; use another checkpoint"
        ) from None
    write_out("".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text) + "\n")


def has_process_group() -> bool:
    """Return whether this process is a rank of a process group; does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def print_error(text: str) -> None:
    """Print an error message: on rank 0, or on any rank once the process group exists."""
    if not is_silent:
        say(f"chargpt: {text}")
    elif has_process_group():
        with suppress(OSError):
            text = f"chargpt: process {os.environ['RANK']}: {printable(text)}"
            print(text, file=sys.stderr, flush=True)


def characters(count: int) -> str:
    """Return `1,115,394 characters`."""
    return f"{count:,} character{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """Return bytes as `13.9 MB`."""
    value, unit = _scale(count, ("bytes", "kB", "MB", "GB"))
    return f"{value:.0f} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def short(count: float) -> str:
    """Return a number as `870k` or `3.7M`."""
    value, unit = _scale(count, ("", "k", "M", "G"))
    return f"{value:.3g}{unit}" if value < 999.5 else f"{value:.0f}{unit}"


def _scale(count: float, units: Sequence[str]) -> tuple[float, str]:
    """Divide by 1000 until the number is below it; return the number and its unit."""
    for unit in units[:-1]:
        if count < 999.5:  # more would be rounded to 1000
            return count, unit
        count /= 1000
    return count, units[-1]


def duration(seconds: float) -> str:
    """Return `42 s`, `3 min 5 s` or `2 h 10 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def sparkline(values: Sequence[float], stream: TextIO, width: int = 24) -> str:
    """Return values as a row of bars, thinned evenly to `width`; empty off a Unicode terminal."""
    is_unicode = (stream.encoding or "").lower().startswith("utf")
    if not values or not is_unicode or not stream.isatty():
        return ""
    if len(values) > width:
        picks = [round(i * (len(values) - 1) / (width - 1)) for i in range(width)]
        values = [values[i] for i in picks]
    low = min(values)
    span = (max(values) - low) or 1.0
    return "".join(SPARKS[int((v - low) / span * (len(SPARKS) - 1))] for v in values)


def printable(text: str) -> str:
    """Return text with control characters as signs, so that it cannot control a terminal.

    Spaces of every kind and invisible characters that join or divide words are kept. Carriage
    returns, which end the lines of many texts, are removed.
    """
    return "".join(
        c if c.isprintable() or c in KEPT or unicodedata.category(c) == "Zs" else display_char(c)
        for c in text
        if c != "\r"
    )
