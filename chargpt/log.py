"""What users should know, beside results and errors: records of the logger `chargpt`.

Warnings ask for attention, infos do not. The command line prints both; in Python they go where the
program's logging sends them.
"""

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from chargpt.errors import ChargptError

logger = logging.getLogger("chargpt")

VALUE = r"""(?:'[^']*'|"[^"]*"|[^\s;,()'"`]|,(?=\w))+"""  # a word, quoted for a shell if need be
# from the options that messages name to the arguments of Python, in this order
ARGUMENTS = {
    r"--resume with a text and --out": "start='new or resume'",
    r"--resume (?=--out)": "start='new or resume' ",
    r"--resume\b": "start='resume'",
    r"--force\b": "start='replace'",
    r"--models\b": "models",
    r"--unknown skip or replace": "unknown='skip' or 'replace'",
    r"--encoding-errors ": "-s text.encoding_errors=",
    r"--from ": "--from_run ",
    r"--text ": "--path ",
}
NAMES = (  # of arguments like their options
    "out|budget|encoding|unknown|device|from_run|path|prompt|length|stop|match|only|without|word|"
    "lines|acrostic|end|max-chars|no-copy|whole|num-samples|before|after|candidates"
)
FUNCTIONS = "train|sample|evaluate|score|compare"


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


@contextmanager
def arguments_named() -> Iterator[None]:
    """Name the arguments of Python, not options, in what this thread raises and logs in a block."""
    thread = threading.get_ident()

    def rename(record: logging.LogRecord) -> bool:
        if record.thread == thread:
            record.msg, record.args = in_python(record.getMessage()), ()
        return True

    logger.addFilter(rename)
    try:
        yield
    except ChargptError as error:
        error.args = (in_python(str(error)), *error.args[1:])
        raise
    finally:
        logger.removeFilter(rename)


def in_python(message: str) -> str:
    """Return a message with the arguments of Python in place of commands and options.

    Commands that have no function stay as they are, such as `chargpt data get`.
    """

    def value(word: str) -> str:
        content = re.sub(r"""'([^']*)'|"([^"]*)\"""", r"\1\2", word)
        is_code = re.fullmatch(r"[\d.e-]+|[A-Z]+", content)
        return "None" if word == "null" else content if is_code else repr(content)

    def argument(option: re.Match[str]) -> str:
        return f"{option[1].replace('-', '_')}={value(option[2]) if option[2] else ''}"

    def settings(options: re.Match[str]) -> str:
        pairs = re.findall(rf"-s ([\w.]+)=({VALUE})", options[0])
        return f"settings={{{', '.join(f'{key!r}: {value(word)}' for key, word in pairs)}}}"

    def call(command: re.Match[str]) -> str:
        begin, function, rest = command.groups()
        words = re.findall(rf"settings={{.*?}}|\w+={VALUE}|{VALUE}", rest)
        words = [word if re.match(r"\w+=", word) else value(word) for word in words]
        words.sort(key=lambda word: "=" in word)  # the text or run comes first
        arguments = f"({', '.join(words)})" if words else ""
        return f"{begin}chargpt.{function}{arguments}{begin.strip()}"

    setting = rf"-s [\w.]+={VALUE}"
    rules: dict[str, Any] = {
        **ARGUMENTS,
        rf"{setting}(?: {setting})*": settings,
        rf"--({NAMES})\b(?: ({VALUE}))?": argument,
    }
    for option, replacement in rules.items():
        message = re.sub(rf"(?<![\w-]){option}", replacement, message)
    return re.sub(rf"(`|\n  )chargpt ({FUNCTIONS})\b([^`\n]*)`?", call, message)
