"""Writing with a model: `chargpt sample --interactive`.

There are two readers of lines. `KeyReader` edits the line on a terminal and erases it, with the
suggestions above it, when it ends; its keys stand for commands. `PlainReader` only prints lines,
for screen readers, pipes and terminals that cannot move the cursor. `Writer` does what a line says.
"""

import io
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app, get_app_or_none
from prompt_toolkit.filters import Condition
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from chargpt.cli import console, runs
from chargpt.cli.main import handling, hang_up
from chargpt.config import Config, parse_override, unescape
from chargpt.errors import ChargptError, ConfigError, Stopped, TextError
from chargpt.inference.generation import stream_run
from chargpt.inference.sampling import Piece
from chargpt.inference.selection import Sample, new_sample
from chargpt.inference.suggestions import Suggestion, suggest
from chargpt.outputs import write_new, writing
from chargpt.store.run import Run
from chargpt.text.display import display_text, printable

KEYS = (
    "Type the start of a text and press Enter. While the line is empty: 1 to 9 choose a "
    "suggestion, Enter samples, Tab shows others, Backspace undoes. /help says more; Ctrl-D ends."
)
PLAIN_KEYS = (
    "Type the start of a text and press Enter. /1 to /9 choose a suggestion, an empty line "
    "samples, /retry shows others, /undo undoes. /help says more; Ctrl-D ends."
)
HELP = (
    "A line begins a new text, which the model continues. An empty line continues the last text, "
    "or begins a new document; Ctrl-C ends what is sampled. /1 to /9 append a suggestion, /retry "
    "shows others, /undo undoes the last change. /edit opens the end of the text (Ctrl-E on an "
    "empty line), and /edit TEXT replaces its last line. /save FILE writes the text. "
    "/temperature 0.5 changes a setting and /temperature prints it, also length, top_k, top_p, "
    "min_p, seed, stop (/stop []: none), unknown, suggestions (0: none) and ahead, the words of a "
    "suggestion. Ctrl-D or /quit ends."
)
EDIT_HELP = "Ctrl-D ends the editing, Ctrl-C discards it."
CHANGEABLE = ("temperature", "length", "top_k", "top_p", "min_p", "seed", "stop", "unknown")
KEPT_CHARACTERS = 100_000  # at the end of a streamed text, for what is said about it
SHOWN_CHARACTERS = 200  # of the line that a suggestion was appended to
EDITED_CHARACTERS = 2_000  # at the end of a text


class PlainReader:
    """Reader that prints lines only; suggestions are messages, on stderr, where they change."""

    help = PLAIN_KEYS

    def __init__(self) -> None:
        self.shown: Sequence[str] = []

    def read(self, suggestions: Sequence[str]) -> str:
        for line in suggestions if suggestions != self.shown else ():
            console.say(line)
        self.shown = suggestions
        return input("> ")

    def edit(self, text: str) -> str:
        raise ConfigError("there is no line editor here; replace the last line with /edit TEXT")


class KeyReader:
    """Reader with a line editor, and keys for commands while the line is empty."""

    help = KEYS

    def __init__(self) -> None:
        self.n_shown = 0
        keys, is_empty = KeyBindings(), Condition(lambda: not get_app().current_buffer.text)
        commands = {"tab": "/retry", "backspace": "/undo", "c-e": "/edit"}
        for key, command in commands.items():
            keys.add(key, filter=is_empty)(partial(self._answer, command))
        for number in range(1, 10):
            is_shown = Condition(partial(self._is_shown, number))
            keys.add(str(number), filter=is_empty & is_shown)(partial(self._answer, f"/{number}"))
        self.lines: PromptSession[str] = PromptSession(
            key_bindings=keys, erase_when_done=True, enable_suspend=True, reserve_space_for_menu=0
        )
        end = KeyBindings()
        end.add("c-d")(lambda event: event.current_buffer.validate_and_handle())
        self.editor: PromptSession[str] = PromptSession(
            key_bindings=end, erase_when_done=True, multiline=True, reserve_space_for_menu=0
        )

    @staticmethod
    def _answer(command: str, event: KeyPressEvent) -> None:
        event.app.exit(result=command)

    def _is_shown(self, number: int) -> bool:
        return number <= self.n_shown

    def read(self, suggestions: Sequence[str]) -> str:
        """Return the next line, or the command of a key; show suggestions first.

        Raises:
            EOFError: there is none.
            KeyboardInterrupt: Ctrl-C.
        """
        self.n_shown = len(suggestions)
        # the prompt above the line is cut at the terminal's width
        lines = [console.wrapped(each, sys.stdout, hanging="  ") for each in suggestions]
        return self.lines.prompt("\n".join([*lines, "> "]))

    def edit(self, text: str) -> str:
        """Return a text as the person has changed it; the errors are those of `read`."""
        console.say(EDIT_HELP)
        return self.editor.prompt("", default=text)


Reader = PlainReader | KeyReader  # reads the lines that a person types


def new_reader(*, is_plain: bool) -> Reader:
    """Return a reader with keys where the terminal allows it and nobody asked for a plain one."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_plain or not is_terminal or os.environ.get("TERM") in ("dumb", "unknown"):
        return PlainReader()
    return KeyReader()


def end_by_signal(number: int, _frame: object) -> None:
    """Raise KeyboardInterrupt for Ctrl-C, else `Stopped`: the reader then restores the terminal."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    hang_up(number)
    app = get_app_or_none()
    if app is None or app.loop is None or app.is_done:
        raise Stopped(number)
    # raised here, it could end a task of the line editor only
    app.loop.call_soon_threadsafe(partial(app.exit, exception=Stopped(number)))


def interact(run: Run, config: Config, *, begins: bool, is_plain: bool = False) -> None:
    """Read lines and keys until the end of standard input, and do what they say.

    A seed of null is a new seed for each text.

    Args:
        run: whose model continues the texts.
        config: its settings.
        begins: whether to continue the prompt of the settings first.
        is_plain: print lines only.
    """
    if sys.stdin is None:
        raise TextError("standard input is closed; type or pipe the prompts")
    reader = new_reader(is_plain=is_plain)
    writer = Writer(run, config, reader)
    console.say(reader.help)
    with handling(end_by_signal):
        if begins:
            writer.sample()
        while True:
            try:
                line = reader.read(writer.menu())
            except KeyboardInterrupt:
                console.out("")
                continue
            except EOFError:
                break
            if line.strip() in ("/quit", "/exit"):
                break
            try:
                writer.obey(line)
            except ChargptError as error:
                say_error(error)
    if sys.stdin.isatty() and isinstance(reader, PlainReader):
        console.out("")


def say_error(error: ChargptError) -> None:
    """Print an error, with commands in place of the options and settings that it names."""
    message = str(error).replace("--unknown", "/unknown")
    console.say("chargpt: " + message.removeprefix("sample.").removeprefix("text."))


def percent(prob: float) -> str:
    """Return a probability as `21.6%` or `0.03%`."""
    return "under 0.01%" if prob < 1e-4 else f"{prob:.{1 if prob >= 1e-3 else 2}%}"


class Writer:
    """A text, what can be undone in it, and suggestions of how it continues."""

    def __init__(self, run: Run, config: Config, reader: Reader) -> None:
        self.run, self.reader = run, reader
        self.config = config.with_values({"sample.num_samples": 1})
        self.texts = [config.sample.prompt]  # the last one is written; others come back by undoing
        self.counts = {"suggestions": 5, "ahead": 2}
        self.suggestions: list[Suggestion] | None = None  # None: not computed for this text yet
        self.excluded: list[str] = []  # suggestions that were shown before
        self.saved: dict[Path, bytes] = {}  # the last one last
        self.commands = {
            "help": lambda _: console.say(HELP),
            "undo": self.undo,
            "retry": self.retry,
            "edit": self.edit,
            "save": self.save,
        }

    @property
    def text(self) -> str:
        """The text; a document that has ended ends with the EOS token."""
        return self.texts[-1]

    def obey(self, line: str) -> None:
        """Do what a line says: run its command, or continue the text that it begins.

        Raises:
            ChargptError: it cannot be done; nothing has changed.
        """
        if not re.match(r"/[\w-]+( |=|$)", line):  # or a path
            self.sample(line)
            return
        name, value = [*re.split("[ =]+", line[1:].strip(), maxsplit=1), ""][:2]
        if name in self.commands:
            self.commands[name](value)
        elif name.isdecimal():
            self.choose(int(name))
        elif name in self.counts:
            self.set_count(name, value)
        else:
            self.config = change_setting(self.config, name, value, [*CHANGEABLE, *self.counts])

    def menu(self) -> list[str]:
        """Return the suggestions as numbered lines; compute them if the text has changed."""
        if self.suggestions is None:
            self.suggestions = []
            try:
                if self.counts["suggestions"]:
                    self.suggestions = self._suggest()
            except ChargptError as error:
                say_error(error)
        return [
            f"{number} {self._label(each.text)} {percent(each.prob)}"
            for number, each in enumerate(self.suggestions, 1)
        ]

    def _suggest(self) -> list[Suggestion]:
        n, words = self.counts["suggestions"], self.counts["ahead"]
        unknown = self.config.text.unknown
        return suggest(self.run, self.text, n, words=words, excluded=self.excluded, unknown=unknown)

    def _label(self, suggested: str) -> str:
        """Return a suggestion for display: … where it continues a word, no space at its start."""
        shown = suggested.removesuffix(self.run.tokenizer.eos_token or "\0")
        is_rest = self.text[-1:].isalnum() and shown[:1].isalnum()
        words = ["…" * is_rest + display_text(shown.removeprefix(" "), keep_spaces=True)]
        if shown != suggested:
            words.append("(the document ends)")
        return printable(" ".join(filter(None, words)))

    def change(self, text: str) -> None:
        """Make a text the present one."""
        self.texts.append(text)
        self._forget_suggestions()

    def _forget_suggestions(self) -> None:
        self.suggestions, self.excluded = None, []

    def show(self, start: int) -> None:
        """Print the text from the line on that holds its character `start`."""
        text = self.text.removesuffix("\n")  # which may be the end of a document
        start = max(text.rfind("\n", 0, start) + 1, start - SHOWN_CHARACTERS)
        console.out_text(text[start:], "\n")

    def sample(self, line: str = "") -> None:
        """Print a line, or the text if it is empty, and its continuation, as it is sampled."""
        tokenizer = self.run.tokenizer
        line = tokenizer.choose_form(line)
        if self.config.text.unknown != "error":
            runs.say_unknown(self.run, tokenizer.find_unknown(line), self.config.text.unknown)
        before, prompt = "", line
        if not line and tokenizer.eos_token:  # the model reads the last document
            before, eos_token, prompt = self.text.rpartition(tokenizer.eos_token)
            before += eos_token
        elif not line:
            prompt = self.text
        config = self.config.with_values({"sample.prompt": prompt})
        sampled = print_stream(self.run, config, KeyboardInterrupt, n_kept=None)
        end = tokenizer.eos_token if sampled.ended == "document" else ""
        self.change(before + sampled + end)

    def choose(self, number: int) -> None:
        """Append a suggestion."""
        if not 1 <= number <= len(self.suggestions or ()):
            raise ConfigError(f"there is no suggestion {number}; choose one that is shown")
        assert self.suggestions is not None
        start = len(self.text)
        self.change(self.text + self.suggestions[number - 1].text)
        self.show(start)

    def undo(self, _: str = "") -> None:
        """Return to the text before the last change."""
        if len(self.texts) == 1:
            raise ConfigError("there is nothing to undo; begin a text")
        self.texts.pop()
        self._forget_suggestions()
        self.show(len(self.text))

    def retry(self, _: str = "") -> None:
        """Show other suggestions; after the last ones, the first again."""
        self.excluded += [each.text for each in self.suggestions or ()]
        self.suggestions = None
        if self.counts["suggestions"] and not self.menu():
            console.say("there are no other suggestions; these are the first again")
            self._forget_suggestions()

    def edit(self, replacement: str = "") -> None:
        """Replace the last line of the text, or let the person change its end."""
        start = self.text.rfind("\n") + 1
        if not replacement:
            start = max(0, len(self.text) - EDITED_CHARACTERS)
            start = self.text.rfind("\n", 0, start) + 1 if start else 0
            try:
                replacement = self.reader.edit(self.text[start:])
            except (KeyboardInterrupt, EOFError):
                return
        replacement = self.run.tokenizer.choose_form(replacement)
        self.run.tokenizer.encode(replacement, unknown=self.config.text.unknown)  # or an error
        self.change(self.text[:start] + replacement)
        self.show(len(self.text))

    def save(self, name: str = "") -> None:
        """Write the text to a file; it may replace what was saved there before and is unchanged."""
        if not name and not self.saved:
            raise ConfigError("no file is named; name one, as in /save story.txt")
        path = Path(name).expanduser().absolute() if name else next(reversed(self.saved))
        text = self.text.removesuffix(self.run.tokenizer.eos_token or "\0")
        before, content = self.saved.get(path), text.encode(errors="replace")
        with writing(path):
            is_ours = before is not None and path.is_file() and path.read_bytes() == before
        write_new(path, content, force=is_ours or None)
        self.saved.pop(path, None)
        self.saved[path] = content
        console.say(f"{console.characters(len(text))} written to {path}")

    def set_count(self, name: str, value: str) -> None:
        """Change the number of suggestions or of their words, and print it."""
        if value:
            most, least = (9, 0) if name == "suggestions" else (5, 1)
            if not value.isdecimal() or not least <= int(value) <= most:
                raise ConfigError(f"{name}: expected a number from {least} to {most}")
            self.counts[name] = int(value)
            self._forget_suggestions()
        console.say(f"{name} is {self.counts[name]}")


def change_setting(config: Config, name: str, value: str, names: Sequence[str]) -> Config:
    """Return the config with a setting changed, as by `/temperature 0.5`; print its value.

    Raises:
        ConfigError: there is no such setting, or the value is invalid; `names` has those there are.
    """
    name = name.replace("-", "_")
    if name not in CHANGEABLE:
        raise ConfigError(f"there is no setting {name!r:.40}; there are {', '.join(names)}")
    section = "text" if name == "unknown" else "sample"
    key = f"{section}.{name}"
    if name == "stop" and value[:1] not in ("", "[", '"'):  # any text, as --stop takes it
        config = config.with_values({key: (unescape(value),)})
    elif value.strip():
        config = config.with_values(dict([parse_override(f"{key}={value.strip()}")]))
    now = getattr(getattr(config, section), name)
    console.say(f"{name} is {json.dumps(now, ensure_ascii=False)}")
    return config


def print_stream(
    run: Run, config: Config, *ended_by: type[BaseException], n_kept: int | None = KEPT_CHARACTERS
) -> Sample:
    """Print a text as it is sampled, and return it, of a long one only the end.

    Args:
        run: whose model is sampled.
        config: instead of the run's.
        ended_by: exceptions that end the text, not the command.
        n_kept: characters at the end of a long text that are returned at least; None: all.
    """
    prompt, text, piece = config.sample.prompt, "", Piece()
    pieces = stream_run(run, config.sample, unknown=config.text.unknown)
    # CR and LF of one line end may be in two pieces
    shown = io.IncrementalNewlineDecoder(None, translate=sys.stdout.isatty())
    console.out_text(shown.decode(prompt))
    try:
        with suppress(*ended_by):
            for (piece,) in pieces:
                console.out_text(shown.decode(piece.text))
                text += piece.text
                if n_kept is not None and len(text) > 2 * n_kept:
                    prompt, text = "", text[-n_kept:]
    except (KeyboardInterrupt, Stopped):  # what is written stays, as a line
        console.out("")
        raise
    console.out_text(shown.decode("", final=True), "\n")
    return new_sample(prompt, text, piece.ended, piece.surprisal)
