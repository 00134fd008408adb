"""`chargpt sample --interactive`: the model continues what the user types."""

import json
import re
import sys
from contextlib import suppress

from chargpt.cli import console, runs
from chargpt.config import Config, SampleConfig, parse_override, unescape
from chargpt.errors import ChargptError, ConfigError, TextError
from chargpt.inference.generation import stream_run
from chargpt.store.run import Run
from chargpt.text.tokenizer import UnknownPolicy

with suppress(ImportError):
    import readline  # noqa: F401  # input() then edits the line and remembers earlier ones

HELP = (
    "Type the start of a text and press Enter: the model continues it. An empty line continues the "
    "last text, or begins a new document. `/temperature 0.5` changes a setting and `/temperature` "
    "prints it, also length, top_k, top_p, min_p, seed, stop (`/stop []`: none) and unknown. "
    "Ctrl-C ends a text, Ctrl-D or `/quit` the command."
)
CHANGEABLE = ("temperature", "length", "top_k", "top_p", "min_p", "seed", "stop", "unknown")


def interact(run: Run, config: Config, unknown: UnknownPolicy | None) -> None:
    """Read lines from standard input until its end; print a continuation of each.

    A seed of null is a new seed for each text; without `unknown`, that of the config is used.
    """
    if sys.stdin is None:
        raise TextError("standard input is closed; type or pipe the prompts")
    console.say(HELP)
    config = config.with_values({"sample.num_samples": 1})
    if unknown is not None:
        config = config.with_values({"text.unknown": unknown})
    text = config.sample.prompt
    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:
            console.out("")
            continue
        except EOFError:
            break
        try:
            if line.strip() == "/help":
                console.say(HELP)
            elif line.strip() in ("/quit", "/exit"):
                break
            elif re.match(r"/[\w-]+( |=|$)", line):  # and not a path
                config = change_setting(config, line[1:])
            else:
                last = "" if run.tokenizer.eos_token else text
                if config.text.unknown != "error":
                    runs.say_unknown(run, run.tokenizer.find_unknown(line), config.text.unknown)
                settings = config.sample.model_copy(update={"prompt": line or last})
                text = print_stream(run, settings, config.text.unknown, (KeyboardInterrupt,))
        except ChargptError as error:
            message = str(error).replace("--unknown", "/unknown")
            console.say("chargpt: " + message.removeprefix("sample.").removeprefix("text."))
    if sys.stdin.isatty():
        console.out("")


def change_setting(config: Config, written: str) -> Config:
    """Return the config with a setting changed, written like `temperature 0.5`; print its value.

    Raises:
        ConfigError: there is no such setting, or the value is invalid.
    """
    name, value = [*re.split("[ =]+", written.strip(), maxsplit=1), ""][:2]
    name = name.replace("-", "_")
    if name not in CHANGEABLE:
        raise ConfigError(f"there is no setting {name!r:.40}; there are {', '.join(CHANGEABLE)}")
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
    run: Run,
    settings: SampleConfig,
    unknown: UnknownPolicy | None,
    ended_by: tuple[type[BaseException], ...] = (),
) -> str:
    """Print a text as it is sampled, and return it with its prompt.

    Args:
        unknown: instead of that of the run's config.
        ended_by: exceptions that end the text, not the command.
    """
    text = settings.prompt
    pieces = stream_run(run, settings, unknown=unknown)
    console.out_text(text)
    with suppress(*ended_by):
        for (piece,) in pieces:
            text += piece
            console.out_text(piece)
    console.out("")
    return text
