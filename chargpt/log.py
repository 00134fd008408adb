"""What users should know, beside results and errors: records of the logger `chargpt`.

Warnings ask for attention, infos do not. The command line prints both; in Python they go where the
program's logging sends them.
"""

import logging
import re
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from chargpt.errors import ChargptError

logger = logging.getLogger("chargpt")

# from the options that messages name to the arguments of Python, in this order
ARGUMENTS = {
    r"--resume with a text and --out": "start='new or resume'",
    r"--resume\b": "start='resume'",
    r"--force\b": "start='replace'",
    r"--encoding-errors (\w+)": r"settings={'text.encoding_errors': '\1'}",
    r"--unknown skip or replace": "unknown='skip' or 'replace'",
    r"--(encoding|budget) (?!and\b|or\b|plans\b)([\w-]+)": r"\1='\2'",
    r"--from ([^\s;,)]+)": r"from_run='\1'",
    r"--mixture\b": "chargpt.with_mixture",
    r"--(out|budget|encoding|unknown|device)\b(?!-)": r"\1=",
    r"-c\b": "config=",
}


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
    functions = "train|sample|evaluate|score|compare"
    message = re.sub(rf"(`|\n  )chargpt ({functions})\b([^`\n]*)`?", _call, message)
    setting = r"-s [\w.]+=(?:'[^']*'|[^\s;,)'`]+)"
    message = re.sub(rf"(?<![\w-]){setting}(?: {setting})*", _settings, message)
    for option, argument in ARGUMENTS.items():
        message = re.sub(rf"(?<![\w-]){option}", argument, message)
    return message


def _call(command: re.Match[str]) -> str:
    """Return the call of a command; options but `-s` and words in capitals are its arguments."""
    begin, function, rest = command.groups()
    plain, named, name = list[str](), list[str](), ""
    try:
        words = shlex.split(rest)
    except ValueError:  # a path that is not quoted
        return command[0]
    for word in words:
        if word == "--resume":
            named.append(f"start='{'new or resume' if '--out' in words else 'resume'}'")
        elif word.startswith("--"):
            name = {"from": "from_run", "text": "path"}.get(word[2:], word[2:]) + "="
        else:
            value = word if word.isupper() else repr(word)
            (named if name else plain).append(name + value)
            name = ""
    arguments = f"({', '.join(plain + named)})" if words else ""
    return f"{begin}chargpt.{function}{arguments}{begin.strip()}"


def _settings(options: re.Match[str]) -> str:
    """Return the argument `settings` for one or several `-s KEY=VALUE`."""
    pairs = [pair.split("=", 1) for pair in options[0].removeprefix("-s ").split(" -s ")]
    values = {
        key: "None" if value == "null" else value if re.match(r"[\d'A-Z]", value) else repr(value)
        for key, value in pairs
    }
    return f"settings={{{', '.join(f'{key!r}: {value}' for key, value in values.items())}}}"
