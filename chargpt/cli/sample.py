"""`chargpt sample`: text generated from a trained model."""

import json
import re
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import torch
import typer

from chargpt.cli import console, options, runs
from chargpt.cli.overlap import SampleOverlap, is_finished, mark, measure, print_overlap
from chargpt.config import Config, SampleConfig, TextConfig, parse_override, unescape
from chargpt.errors import ChargptError, ConfigError, TextError
from chargpt.inference.generation import sample as sample_texts
from chargpt.inference.generation import stream_run
from chargpt.store.run import Run
from chargpt.text.prepare import read_text
from chargpt.text.tokenizer import UnknownPolicy

with suppress(ImportError):
    import readline  # noqa: F401  # input() then edits the line and remembers earlier ones

HELP = (
    "Type the start of a text and press Enter: the model continues it. An empty line continues the "
    "last text, or begins a new document. `/temperature 0.5` changes a setting and `/temperature` "
    "prints it, also length, top_k, top_p, min_p, seed, stop (`/stop []`: none) and unknown. "
    "Ctrl-C ends a text, Ctrl-D or `/quit` the command."
)
MAX_RUN, MAX_RUN_FRACTION = 40, 1 / 3  # characters in a row that are the same, of a sample
CHANGEABLE = ("temperature", "length", "top_k", "top_p", "min_p", "seed", "stop", "unknown")


def setting(name: str, *flags: str, metavar: str, help_: str = "") -> Any:
    """Return the option of a field of `SampleConfig`, with its meaning, default and bounds.

    Args:
        name: of the field.
        flags: of the option, if it has others than the field's name.
        metavar: what stands for the value in the help.
        help_: begins the help.
    """
    field = SampleConfig.model_fields[name]
    meaning = " ".join((field.description or "").split()).rstrip(".").replace("null: ", "")
    default = "" if field.default is None else f"; {field.default}"
    limits = {
        key: getattr(each, key)
        for each in field.metadata
        for key in ("ge", "gt", "le")
        if hasattr(each, key)
    }
    return typer.Option(
        None,
        *flags,
        metavar=metavar,
        help=f"{help_} {meaning}{default} by default.".strip(),
        min=limits.get("ge", limits.get("gt")),
        max=limits.get("le"),
    )


def sample(
    ctx: typer.Context,
    run: options.RunOrNewest = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="Start of the text.")
    ] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="The prompt, in a file; - for stdin.")
    ] = None,
    length: int | None = setting("length", "-n", "--length", metavar="N"),
    temperature: float | None = setting("temperature", metavar="T"),
    top_k: int | None = setting("top_k", metavar="K"),
    top_p: float | None = setting("top_p", metavar="P"),
    min_p: float | None = setting("min_p", metavar="P"),
    num_samples: int | None = setting("num_samples", metavar="N"),
    seed: int | None = setting("seed", metavar="N", help_="The same seed gives the same text;"),
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="End before this text (\\n: a line end); may be repeated."
        ),
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Continue what you type, until Ctrl-D.")
    ] = False,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Mark verbatim matches with the training split.")
    ] = False,
    unknown: options.UnknownOption = None,
    mixture: options.Mixture = False,
    checkpoint: options.Checkpoint = "best",
    json_: options.Json = False,
    device: options.Device = None,
    encoding: options.Encoding = None,
) -> None:
    """Generate text from a trained model, streamed as it is sampled.

    Examples: `chargpt sample`, `chargpt sample runs/novel -p "It was" -n 300`,
    `chargpt sample --temperature 0.5 --num-samples 3 --seed 1 --json`,
    `chargpt sample --interactive`.
    """
    loaded = runs.load_named_run(run, checkpoint, device, mixture=mixture)
    # on a busy machine torch's threads would wait for each other in every decode step
    torch.set_num_threads(1)
    prompt = given_prompt(prompt, prompt_file, encoding)
    if stop is not None:
        ctx.params["stop"] = [unescape(text) for text in stop]
    if prompt is not None:
        prompt = readable_prompt(loaded, prompt, unknown or loaded.config.text.unknown)
    config = sample_config(loaded.config, {**ctx.params, "prompt": prompt})
    if interactive:
        if json_ or overlap or (num_samples or 1) > 1:
            raise ConfigError(
                "--interactive prints one text at a time; drop --json, --overlap and --num-samples"
            )
        interact(loaded, config, unknown)
        return
    settings = config.sample
    if settings.seed is None:  # chosen here, so that it can be printed
        settings = settings.model_copy(update={"seed": secrets.randbits(32)})
    if settings.num_samples == 1 and not json_ and not overlap:
        texts = [print_stream(loaded, settings, unknown)]
    else:
        corpus = loaded.corpus() if overlap else None  # an error before the work
        ends_early = settings.stop or loaded.tokenizer.eos_token  # progress then counts samples
        with console.show_progress(
            "sample" if ends_early else "character", "generated"
        ) as on_progress:
            texts = sample_texts(loaded, settings, unknown=unknown, on_progress=on_progress)
        measured = measure(corpus, texts, settings) if corpus else None
        if json_:
            console.out_json({**as_json(loaded, texts, settings, measured), "mixture": mixture})
        else:
            print_samples(loaded, texts, settings, measured)
    if config.sample.seed is None and settings.temperature and sys.stdout.isatty() and not json_:
        console.say(f"--seed {settings.seed} gives the same text")
    say_cut(loaded, texts, settings)
    say_repetition(texts, settings)


def as_json(
    run: Run, texts: list[str], settings: SampleConfig, overlap: SampleOverlap | None
) -> dict[str, object]:
    """Return samples under the JSON keys that all commands use."""
    return {
        "samples": texts,
        "finished": [is_finished(text, settings) for text in texts],
        "seed": settings.seed,
        "run": str(run.folder),
        "step": run.step,
        **(overlap.to_json(texts) if overlap else {}),
    }


def given_prompt(prompt: str | None, file: str | None, encoding: str | None) -> str | None:
    """Return the prompt of --prompt or --prompt-file."""
    if file is not None:
        if prompt is not None:
            raise ConfigError("--prompt and --prompt-file exclude each other; give one")
        prompt = read_text(file, TextConfig(encoding=encoding or "auto"))
        if prompt.endswith("\n"):
            console.say("the prompt ends with a line end, so the samples continue on a new line")
        return prompt
    options.reject({"--encoding": encoding}, "is that of a --prompt-file, and there is none")
    if re.search(r"\\[nt]", prompt or ""):
        console.say(
            r"\n and \t in --prompt are two characters each; for line ends and tabs use "
            r"--prompt-file, or -p $'...\n...' in bash"
        )
    return prompt


def readable_prompt(run: Run, prompt: str, unknown: UnknownPolicy) -> str:
    """Return a prompt as the model reads it; say what it does not read."""
    tokenizer = run.tokenizer
    tokens = tokenizer.encode(prompt, unknown=unknown)
    runs.say_unknown(run, tokenizer.find_unknown(prompt), unknown)
    n_tokens = len(tokens) + len(tokenizer.eos_token)  # which precedes it
    if n_tokens > run.model.block_size:
        unit = "tokens" if tokenizer.has_bytes or tokenizer.eos_token else "characters"
        console.say(
            f"the prompt has {n_tokens:,} {unit}; the model reads the last {run.model.block_size:,}"
        )
    return prompt if unknown == "error" else tokenizer.decode(tokens)


def say_cut(run: Run, texts: list[str], settings: SampleConfig) -> None:
    """Print how many samples are documents without their end."""
    n_cut = sum(not is_finished(text, settings) for text in texts)
    if n_cut and run.tokenizer.eos_token:
        console.say(
            f"documents cut at {console.characters(settings.length)}: {n_cut:,} of "
            f"{len(texts):,}; a higher -n finishes them"
        )


def say_repetition(texts: list[str], settings: SampleConfig) -> None:
    """Print how many samples repeat one character for long, and what repeats less."""
    n_repetitive = 0
    for text in texts:
        sampled = text[len(settings.prompt) :]
        runs_of_one = (run[0] for run in re.finditer(r"(.)\1*", sampled, re.DOTALL))
        longest = max(map(len, runs_of_one), default=0)
        n_repetitive += longest > max(MAX_RUN, MAX_RUN_FRACTION * len(sampled))
    if n_repetitive:
        console.say(
            f"samples with a long run of one character: {n_repetitive:,} of {len(texts):,}; "
            "a higher --temperature without --top-k, --top-p and --min-p repeats less, and so does "
            "a model that was trained longer"
        )


def print_samples(
    run: Run, texts: list[str], settings: SampleConfig, overlap: SampleOverlap | None
) -> None:
    """Print texts with their verbatim matches marked, and what was found."""
    n_prompt = len(settings.prompt)
    for number, text in enumerate(texts, 1):
        spans = overlap.report.texts[number - 1].spans if overlap else []
        if overlap and text in overlap.report.copied:
            spans = [(0, len(text) - n_prompt)]
        if run.tokenizer.eos_token != "\n":
            console.out(f"-- sample {number} --")
        console.out_text(text[:n_prompt] + mark(text[n_prompt:], spans), "\n")
    if overlap is not None:
        print_overlap(overlap, texts, settings)


def sample_config(config: Config, given: Mapping[str, Any]) -> Config:
    """Return the run's config with the given sampling settings."""
    changes = {
        f"sample.{name}": given[name]
        for name in SampleConfig.model_fields
        if given[name] not in (None, [], ())
    }
    try:
        return config.with_values(changes)
    except ConfigError as error:
        message = str(error)
        for name in SampleConfig.model_fields:  # name the options instead of the settings
            message = message.replace(f"sample.{name}", f"--{name.replace('_', '-')}")
        raise ConfigError(message) from None


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
