"""The command line: a table of commands, and errors and signals as an exit code.

A command's module, with torch and the rest, is imported when the command is called. `--help` of the
program and of a command answer at once: the latter is a page that was written beforehand. Its
options and arguments are those of the command, so that others are rejected without the import.

INT, TERM and HUP end a command at once, by `Stopped`. While a run trains,
`training.start.deferred_signals` replaces their handler.
"""

import gc
import inspect
import io
import itertools
import math
import os
import re
import shlex
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from chargpt import __version__
from chargpt.cli import console
from chargpt.distributed import is_main_rank, launch_seconds
from chargpt.errors import (
    ChargptError,
    ConfigError,
    DeviceError,
    Stopped,
    is_out_of_memory,
    reason_of,
)

# Typer vendors click in some versions and depends on it in others; the bases of its public
# exception are right in both.
ClickException: Any = typer.BadParameter.__mro__[2]
INTERRUPTED = 130  # some of its versions return this exit code after Ctrl-C, others raise `Abort`
DASHES = "([–—−])[–—−-]*(?=[a-zA-Z])"  # in place of -, at the start of an option
# what a space or a forgotten -s has split: a setting's key and value, or a duration
SPLIT_SETTING = r" (?:-s|--set) ([\w.]+)(?: =?|= ) ?([^-\s]\S*)"
BARE_SETTING = r" (?<!-s )(?<!--set )([a-z_][\w.]*)=(\S+)"
SPLIT_BUDGET = r" --budget[ =]([\d.]+) ([smh])"
HELP_PAGES = Path(__file__).parent / "help"  # written by scripts/write_help_pages.py
HELP_COLUMNS = 80
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")  # the last is Ctrl-Break of Windows
REPEAT_SECONDS = 1.0  # within which signals have one cause, such as a closed terminal

COMMANDS = (
    "train sample evaluate compare score compress decompress explain report play export import "
    "runs verify plan doctor config data"
).split()
MODULES = {  # in `chargpt.cli`; else named like the command
    "decompress": "compress",
    "import": "import_",
    "play": "export",
    "score": "evaluate",
    "verify": "runs",
}
OTHER_COMMANDS = {  # of other tools, and what they are here; {}: the words that follow
    word: meant
    for words, meant in {
        "chat interactive": "sample --interactive {}",
        "download fetch": "data get {}",
        "eval test": "evaluate {}",
        "fine-tune finetune": "train TEXT --from RUN",
        "generate predict": "sample {}",
        "help": "{} --help",
        "info": "data info {}",
        "init": "train {}",
        "list ls": "runs {}",
        "resume": "train --resume {}",
        "version": "--version",
    }.items()
    for word in words.split()
}
SETTINGS: dict[str, Any] = {
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 80},
}


def help_text(command: str) -> str:
    """Return what `--help` of a command prints; "" of a new one, whose page is not written yet.

    That of a subcommand is named as in `export gguf`.
    """
    page = HELP_PAGES / f"{command.replace(' ', '-')}.txt"
    return page.read_text(encoding="utf-8") if page.exists() else ""


def load_command(name: str) -> Any:
    """Import a command's module and return its click command.

    Raises:
        ConfigError: the current folder was deleted: libraries of PyTorch would end the process.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder was deleted; change to another with cd") from None
    # on a busy machine the import of PyTorch takes seconds
    with console.say_if_slow("loading PyTorch ..."), handling(exit_at_once):
        module = import_module(f"chargpt.cli.{MODULES.get(name, name)}")
    if (function := getattr(module, name, None)) is None:
        return typer.main.get_command(module.app)
    app = typer.Typer(add_completion=False, **SETTINGS)
    app.command(name)(function)
    return typer.main.get_command(app)


def page_command(page: str) -> Any:
    """Return a click command with the options that a help page lists.

    It parses them as the command does, but accepts any value; arguments are left to its context.
    """
    parameters: list[inspect.Parameter] = []
    listed = page.partition("\nOptions:\n")[2]
    options = r"(?m)^  (-\S+(?:(?: /)? -\S+)*)(?: (\S+))?(.*(?:\n    .*)*)"
    for flags, metavar, meaning in re.findall(options, listed):
        if "--help" not in flags:
            name, how = f"p{len(parameters)}", inspect.Parameter.KEYWORD_ONLY
            default = ... if "[required]" in meaning else None
            option = typer.Option(default, *flags.replace(" / ", "/").split(", "))
            kind = str | None if metavar else bool | None
            parameters.append(inspect.Parameter(name, how, default=option, annotation=kind))

    def command(**_: object) -> None: ...

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, **SETTINGS)
    app.command(context_settings={"allow_extra_args": True})(command)
    return typer.main.get_command(app)


class LazyGroup(TyperGroup):
    """A group that imports a command when it is called, not when it is listed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing:
            reject_dashes(ctx, args)
            if args[0] not in COMMANDS:
                reject_command(ctx, args)
            else:
                check_usage(ctx, *args)
        name, _, remaining = super().resolve_command(ctx, args)
        return name, name and load_command(name), remaining


def reject_dashes(context: Any, words: list[str]) -> None:
    """Raise if an option begins with a dash that is no -, as some editors write it."""
    for before, word, following in zip(["", *words], words, [*words[1:], "-"], strict=False):
        # what follows an option may be a prompt that begins with a dash
        dashes = re.match(DASHES, word)
        if dashes and before[:1] != "-" and not os.path.exists(word):
            name = word[dashes.end() :]
            form = f"{'--' if name[1:2].isalpha() else '-'}{name}"
            has_value = "=" not in name and not re.match(f"-|{DASHES}", following)
            form = shlex.join([form, following] if has_value else [form])
            context.fail(f"{dashes[1]} is no -: write {form}")


def reject_command(context: Any, words: list[str]) -> None:
    """Raise if a command is one of other tools, or a text or a run in its place."""
    word, *following = words
    form = OTHER_COMMANDS.get(word, "")
    is_run = os.path.isdir(os.path.join(words[-1], "checkpoints"))
    if word == "info" and is_run:
        form = "report {}"
    if not form and os.path.exists(word):
        form, following = "sample {}" if is_run else "train {}", words
    if form:
        form = form.format(shlex.join(following)).strip()
        context.fail(f"No such command {word!r}: it is `chargpt {form}`")


def check_usage(parent: Any, name: str, *words: str) -> None:
    """Raise if options, arguments or the subcommand are not those of a command's help page.

    Print the page and exit if it is asked for, and the terminal is wide enough.
    """
    if not (page := help_text(name)):
        return
    subcommands = re.findall(r"(?m)^  (\w+)", page.partition("\nCommands:\n")[2])
    asks_for_help = {"--help", "-h", "-help"} & set(words[:1] if subcommands else words)
    if asks_for_help or (subcommands and not words):
        if console.terminal_width(sys.stdout) >= HELP_COLUMNS:
            console.write_out(page.rstrip() + "\n")
            raise typer.Exit
    elif not subcommands:
        context = page_command(page).make_context(name, list(words), parent=parent)
        reject_values(context)
        arguments = page.split("\n")[0].partition("[OPTIONS]")[2].split()
        required = [each for each in arguments if each[0] != "["]
        if missing := required[len(context.args) :]:
            context.fail(f"Missing argument {missing[0].strip('{}')!r}")
        extra = context.args[len(arguments) :] if "..." not in "".join(arguments) else []
        if name == "sample":  # several runs may be named
            extra = [each for each in context.args[1:] if not is_path(each)]
        if extra:
            shown = textwrap.shorten(" ".join(extra), 80, placeholder=" ...")
            remedy = extra_remedy(name, extra, words)
            context.fail(f"Got unexpected extra argument(s) ({shown}){remedy and f'; {remedy}'}")
    elif words[0] in subcommands:
        check_usage(parent, f"{name} {words[0]}", *words[1:])
    else:
        if OTHER_COMMANDS.get(words[0], "").startswith(f"{name} "):
            reject_command(parent, list(words))
        names = ", ".join(subcommands)
        group = type(parent)(parent.command, parent=parent, info_name=name)
        group.fail(f"No such command {words[0]!r}: one of {names} follows `chargpt {name}`")


def is_path(word: str) -> bool:
    """Return whether a word names a folder, or looks like the path of one."""
    return os.path.isdir(word) or (os.sep in word and not os.path.isfile(word) and " " not in word)


def reject_values(context: Any) -> None:
    """Raise if the value of an option is an option, or begins with the = of `-o=FILE`."""
    flags = {flag for each in context.command.params for flag in (*each.opts, *each.secondary_opts)}
    for option in context.command.params:
        value = context.params[option.name]
        if not isinstance(value, str) or not {"--prompt", "--stop"}.isdisjoint(option.opts):
            continue
        if value in flags:
            context.fail(f"Option {option.opts[-1]!r} requires an argument")
        if value[:1] == "=" and option.opts[0][:2] != "--":
            context.fail(f"a short option has no =: write {option.opts[0]} {value[1:]}")


def extra_remedy(name: str, extra: list[str], words: Sequence[str]) -> str:
    """Return what surplus arguments mean, or ""."""
    if "--resume" in words:
        return "`chargpt train --resume RUN` resumes a run"
    for i, word in enumerate(words):
        whole = " ".join(itertools.takewhile(lambda each: each[:1] != "-", words[i:]))
        is_prompt = i > 0 and words[i - 1] in ("-p", "--prompt")
        if whole.startswith(f"{word} ") and (is_prompt or os.path.exists(whole)):
            return f"what has spaces needs quotes: {shlex.quote(whole)}"
    if name == "train":
        line = f" {' '.join(words)}"
        if match := re.search(SPLIT_SETTING, line) or re.search(BARE_SETTING, line):
            config = import_module("chargpt.config")
            if form := config.right_form(*match.groups(), ("set", "budget")):
                return str(form)
        if match := re.search(SPLIT_BUDGET, line):
            return f"write --budget {match[1]}{match[2]}"
    is_file = any(map(os.path.isfile, extra))
    if name == "train" and re.fullmatch(r"\d+[smh]?", extra[0]):
        return "-s train.max_steps=500 or --budget 10m says how long to train"
    if name == "train" and extra[0] in import_module("chargpt.config").shipped_configs():
        return f"-c {extra[0]} is a config"
    if name == "sample":
        flag = "--prompt-file" if is_file else "-p"
        return f"{flag} {shlex.quote(' '.join(extra))} is a prompt"
    files = {
        "train": "a pattern such as '*.txt' needs quotes",
        "evaluate": "--text FILE names another text",
    }
    return files.get(name, "") if is_file else ""


app = typer.Typer(
    name="chargpt",
    cls=LazyGroup,
    epilog="Start with `chargpt train` (a built-in text) or `chargpt train my.txt`.",
    no_args_is_help=True,
    **SETTINGS,
)
for _command in COMMANDS:  # placeholders, for the list of commands
    # the list has the first line of a docstring, which a page has after the usage
    app.command(_command, help=help_text(_command).partition("\n\n")[2])(lambda: None)


def _show_version(value: bool) -> None:
    if value:
        console.out(f"chargpt {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "-v", "-V", "--version", callback=_show_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    """Train, sample and measure character-level GPT models."""


def run() -> NoReturn:
    """Run the command line and exit with its code."""
    console.started = time.perf_counter() - launch_seconds()
    console.is_silent = False
    with suppress(DeviceError):  # which `train` rejects
        has_ranks = sys.argv[1:2] in (["train"], ["compare"], ["plan"])
        console.is_silent = has_ranks and not is_main_rank()
    open_streams()
    # Importing torch makes a million objects that stay. Collecting garbage among them at Python's
    # default rate takes a fifth of a start.
    gc.set_threshold(200_000, 10, 10)
    command = typer.main.get_command(app)

    def run_command() -> Any:
        with catch_signals(*NAMES[1:]):  # Python's own handler of SIGINT raises, too
            return command.main(prog_name="chargpt", standalone_mode=False)

    with console.shown_notes():
        code = exit_code_of(run_command)
    distributed = sys.modules.get("torch.distributed")  # it is not imported for this
    if distributed is not None and distributed.is_initialized():
        # the command failed on this rank: destroying the process group could wait for the others
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    gc.freeze()  # there is no garbage worth finding on exit
    sys.exit(code)


def open_streams() -> None:
    """Make stdout and stderr print ? for what they cannot encode, and go nowhere if closed.

    Bytes of stdin that do not decode become U+FFFD.
    """
    for descriptor in (0, 1, 2):  # else the next file opened would get the number of a closed one
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace", newline="")  # Windows would write CR LF for LF
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")


def exit_code_of(command: Callable[[], Any]) -> int:
    """Run a command; print its error, if any, and return its exit code."""
    try:
        code = command()
        if code == INTERRUPTED:
            console.say("stopped")
        return code if isinstance(code, int) else 0
    except ChargptError as error:
        message, code = str(error), error.exit_code
    except ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            console.write_out(error.format_message() + "\n")
            return 0
        message, code = _describe_usage(error, sys.argv), 2
    except (typer.Abort, KeyboardInterrupt):
        console.say("stopped")
        return INTERRUPTED
    except Stopped as stop:
        if not stop.is_reported:
            console.say("stopped")
        return 128 + stop.number
    except (BrokenPipeError, console.OutputClosed):  # `chargpt sample | head` is no failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        message, code = _describe(error), 1
    console.print_error(message)
    return code


def _describe_usage(error: Any, words: Sequence[str]) -> str:
    """Return the sentence about an error in a command line, with what to write instead."""
    message = textwrap.shorten(_in_own_words(error), 240, placeholder=" ...")
    context = getattr(error, "ctx", None)
    if message.endswith("does not take a value"):
        is_run = error.option_name == "--resume"
        remedy = "`chargpt train --resume RUN` resumes a run" if is_run else "drop the value"
        return f"{error.option_name} takes no value: {remedy}"
    if context and type(error).__name__ == "NoSuchOption":
        message = error.message
        after = [i for i, word in enumerate(words) if word in COMMANDS]
        if context.parent is None and after:
            line = shlex.join([*words[after[0] :], *words[1 : after[0]]])
            return f"options follow their command: write `chargpt {line}`"
        flags = [flag for each in context.command.params for flag in each.opts]
        names = {flag[2:].replace("-", "_") for flag in ("--help", *flags) if flag[:2] == "--"}
        usage = help_text(context.command_path.partition(" ")[2]).partition("\n")[0]
        names |= set(re.findall(r"[A-Z]+", usage.partition("[OPTIONS] ")[2].upper()))
        name = error.option_name  # of `-lr`, it is `-l`, and of `-version` `-e`
        pairs, form = itertools.pairwise([*words, "-"]), rf"-\w*{re.escape(name[1:])}"
        written, following = next((pair for pair in pairs if re.match(form, pair[0])), (name, "-"))
        word, _, value = written.partition("=")
        value = value or following * (following[:1] != "-")
        config = import_module("chargpt.config")
        message = config.right_form(word, value and shlex.quote(value), names) or message
    return f"{message}; see `{context.command_path} --help`" if context else message


def _in_own_words(error: Any) -> str:
    """Return the message of an error in an argument, with the range of a number.

    Typer's versions check values by click or by pydantic, each in its words. All numbers have a
    lower limit.
    """
    message = str(error.format_message()).replace("Value error, ", "")
    parameter = getattr(error, "param", None)
    limits = parameter if hasattr(parameter, "min") else getattr(parameter, "type", None)
    low, high = getattr(limits, "min", None), getattr(limits, "max", None)
    if low is None or not isinstance(error, typer.BadParameter):
        return message.rstrip(".").replace("\n", " ")
    kind = "an integer" if "integer" in message else "a number"
    span = f"of {low:g} or more" if high is None else f"from {low:g} to {high:.12g}"
    return f"{message.partition(':')[0]}: expected {kind} {span}"


def _describe(error: Exception) -> str:
    """Return the sentence about an error of the system or a bug; print a bug's traceback."""
    if isinstance(error, OSError):
        path = f"{error.filename}: " if error.filename else ""
        return (
            f"{path}{reason_of(error)}; check the disk, its free space and the permissions, "
            "then try again (training: with --resume)"
        )
    if is_out_of_memory(error):
        return (
            "there is not enough memory; end other programs, or give less at once: a shorter text, "
            "fewer samples, a smaller model"
        )
    if not console.is_silent:
        traceback.print_exception(error)
    return (
        "this is a bug in chargpt; please report it with all of the above and what `chargpt "
        "doctor` prints (training: --resume continues from the last checkpoint)"
    )


class Signals:
    """The handler of the signals that end a process.

    Attributes:
        caught: numbers of the signals so far. Python drops exceptions that are raised within
            `__del__`: such a signal ends the process later.
    """

    def __init__(self) -> None:
        self.caught: list[int] = []
        self.last = -math.inf  # time of the last signal

    def __call__(self, number: int, _frame: object) -> None:
        """Raise `Stopped`, but not at a repetition, which would end the deletion of files."""
        hang_up(number)
        self.caught.append(number)
        before, self.last = self.last, time.monotonic()
        if self.last > before + REPEAT_SECONDS:
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
def handling(handler: Callable[[int, object], None], *names: str) -> Iterator[None]:
    """Give the signals that end a process, or the named ones of them, a handler.

    Those that the process ignores already (`nohup`) stay ignored.
    """
    numbers = [getattr(signal, name) for name in names or NAMES if hasattr(signal, name)]
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
            os.write(2, b"\nstopped\n" if console.notice else b"stopped\n")
    os._exit(128 + number)


@contextmanager
def catch_signals(*names: str) -> Iterator[None]:
    """Handle the signals that end a process, or the named ones of them, by `Signals`.

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
        with handling(signals, *names):
            yield
            if signals.caught:
                raise Stopped(signals.caught[0])
    finally:
        sys.unraisablehook = previous_hook
