"""Printing for commands: data on stdout, messages and progress on stderr, numbers with units."""

import errno
import json
import logging
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn, TextIO

from rich.filesize import decimal

from chargpt.errors import OperationError, TextError
from chargpt.log import logger
from chargpt.text.display import CONTROL, display_char, one_line, printable

if TYPE_CHECKING:
    from tqdm import tqdm

NOTICE_SECONDS = 1.0  # before `say_if_slow` prints
DELAY_SECONDS = 0.5  # shorter work shows no bar
PLAIN_LINE_SECONDS = 5.0  # between two lines of progress where there is no terminal
BAR = "{percentage:3.0f}% {bar} {n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}"
SPARKS = "▁▂▃▄▅▆▇█"

LAUNCHER_SECONDS = 3  # in which `torchrun` ends the other ranks when rank 0 has ended
started = time.perf_counter()  # when the command began; `run` sets it
is_silent = False  # on the ranks of `torchrun` but the first; `run` sets it
active_bar: "tqdm[NoReturn] | None" = None  # the progress bar on the terminal
notice = ""  # of `say_if_slow`, on the terminal's last line until the next message or bar


def terminal_width(stream: TextIO) -> int:
    """Return the columns of a terminal; 80 if it does not know them."""
    with suppress(OSError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80


def wrapped(text: str, stream: TextIO, indent: str = "", hanging: str = "") -> str:
    """Return sentences with line breaks at spaces, to the width of the terminal, if it is one.

    `indent` begins every line, and `hanging` those after a break too. Lines that
    begin with a space are commands to copy and stay whole.
    """
    if not stream.isatty():
        return textwrap.indent(text, indent)
    # an option and its value stay together
    text = re.sub(r"( --?[a-z][\w-]*) (?=\S)| (?=-\d)", lambda found: f"{found[1] or ''}\0", text)
    wrapper = textwrap.TextWrapper(
        terminal_width(stream),
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines = (line if line.startswith(" ") else wrapper.fill(line) for line in text.split("\n"))
    return "\n".join(lines).replace("\0", " ")


def say(*lines: str, hanging: str = "", is_sample: bool = False, end: str = "\n") -> None:
    """Print lines of a message on stderr, above the progress bar, in place of a notice.

    Commands may stand below a line. A sample keeps its own line breaks and, in a file, every
    character. A message without an `end` is a notice. A closed stderr stops no work.
    """
    global notice
    text = "\n".join(lines)
    if not is_sample:
        text = "\n".join(wrapped(one_line(each), sys.stderr, hanging=hanging) for each in lines)
    elif sys.stderr.isatty():
        text = printable(text)
    if is_silent:
        return
    try:
        if active_bar is None:
            erased = f"\r{' ' * len(notice)}\r" if notice else ""
            notice = "" if end else text
            print(erased + text, end=end, file=sys.stderr, flush=True)
        else:
            active_bar.delay = 0  # it is shown again after the text, and removed only if due
            active_bar.write(text, file=sys.stderr)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


@contextmanager
def say_if_slow(text: str) -> Iterator[threading.Timer]:
    """Show a message on a terminal in a second, unless the block ends or cancels it before.

    It is not shown either if there is a progress bar, which says more. The end of the block erases
    it, since a notebook keeps what a command has printed.
    """

    def notify() -> None:
        if active_bar is None:
            say(text, end="")

    timer = threading.Timer(NOTICE_SECONDS, notify)
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield timer
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()
        if notice:
            say("", end="")


class NoteHandler(logging.Handler):
    """Writes messages, each once in a row."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message of a record."""
        message = record.getMessage()
        if message != self.last:
            self.last = message
            say(message)


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
    """Print a line of results on stdout, without control characters."""
    write_out(one_line(text) + end)


def out_text(text: str, end: str = "") -> None:
    """Print a generated or given text on stdout: as it is for a file, printable for a terminal.

    Raises:
        TextError: the encoding of stdout, which is no terminal, lacks a character.
    """
    if sys.stdout.isatty():
        write_out(printable(text) + end)
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
    if active_bar is not None and sys.stdout.isatty():  # it is shown again at its next update
        active_bar.clear()
    try:
        print(text, end="", flush=True)
    except OSError as error:  # EPIPE, which click would make exit code 1; EINVAL on Windows
        if error.errno not in (errno.EPIPE, errno.EINVAL):
            raise
        raise OutputClosed from None


def out_sentence(*lines: str, indent: str = "", hanging: str = "") -> None:
    """Print sentences on stdout, each line wrapped on a terminal."""
    for line in lines:
        write_out(wrapped(one_line(line), sys.stdout, indent, hanging) + "\n")


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


def print_error(text: str) -> None:
    """Print an error message; on another rank than 0 only if rank 0 does not end with its own."""
    if not is_silent:
        say(f"chargpt: {text}")
    else:
        time.sleep(LAUNCHER_SECONDS)
        with suppress(OSError):
            text = f"chargpt: process {os.environ['RANK']}: {one_line(text)}"
            print(text, file=sys.stderr, flush=True)


def characters(count: int) -> str:
    """Return `1,115,394 characters`."""
    return f"{count:,} character{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """Return bytes as `13.9 MB`."""
    return decimal(round(count))


def short(count: float) -> str:
    """Return a number as `870k` or `3.7M`."""
    for unit in ("", "k", "M", "G"):
        if count < 999.5:  # more would be rounded to 1000
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"


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


def text_cell(text: str) -> str:
    """Return a line of a text for a table: printable, but in a file it keeps its writing order."""
    if sys.stdout.isatty():
        return one_line(text)
    return CONTROL.sub(lambda found: display_char(found[0]), text)


class ProgressBar:
    """Progress on stderr: a tqdm bar on a terminal, elsewhere a line every few seconds.

    Args:
        unit: what is counted.
        initial: number of units that were done before.
    """

    def __init__(self, unit: str, initial: int = 0) -> None:
        global active_bar
        self.unit, self.done = unit, initial
        self.last_line, self.last_done = time.monotonic(), initial
        if not is_silent and sys.stderr.isatty():
            if notice:
                say("", end="")
            from tqdm import tqdm  # which would delay --help

            active_bar = tqdm(
                initial=initial,
                unit=unit,
                # tqdm's own dynamic_ncols shows no bar on a terminal that does not know its rows
                ncols=terminal_width(sys.stderr),
                nrows=24,
                file=sys.stderr,
                leave=False,
                bar_format=BAR,
                delay=DELAY_SECONDS,
                colour=None if os.environ.get("NO_COLOR") else "cyan",
            )

    def update(self, done: int, total: int, detail: Callable[[], str]) -> None:
        """Show that `done` of `total` units are done.

        `detail` is called only when its text is shown, since it may synchronise the device.
        """
        step, self.done = done - self.done, done
        if (bar := active_bar) is not None:
            bar.total = total
            if time.time() - bar.last_print_t >= bar.mininterval or done == total:
                bar.ncols = terminal_width(sys.stderr)
                bar.set_postfix_str(one_line(detail()), refresh=False)
            bar.update(step)
            return
        now = time.monotonic()
        if is_silent or now - self.last_line < PLAIN_LINE_SECONDS:
            return
        rate = (done - self.last_done) / max(now - self.last_line, 1e-9)
        # after a rollback the rate is negative
        left = f", {duration((total - done) / rate)} left" if rate > 0 else ""
        say(f"{self.unit} {done:,}/{total:,}  {detail()}{left}")
        self.last_line, self.last_done = now, done

    def close(self) -> None:
        """Remove the bar."""
        global active_bar
        if active_bar is not None:
            active_bar.close()
            active_bar = None


@contextmanager
def show_progress(unit: str, label: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress; yield a function of (done, total) that shows both, with a label."""
    with closing(ProgressBar(unit)) as bar:
        yield lambda done, total: bar.update(done, total, lambda: label)


class LoadingProgress:
    """Shows the download of a text, and the preparation of a long one."""

    MIN_BYTES = 50_000_000
    bar: ProgressBar | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if total < self.MIN_BYTES and stage != "fetching":
            return
        self.bar = self.bar or ProgressBar("byte")
        self.bar.update(done, total, lambda: f"{stage} {size(done)} of {size(total)}")
        if done >= total:
            self.bar.close()
            self.bar = None
