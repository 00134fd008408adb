"""`chargpt sample`: text from a trained model."""

import json
import secrets
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chargpt.cli import console, options

if TYPE_CHECKING:
    from chargpt.config import Config, SampleConfig


def sample(
    run: Annotated[
        Path | None, typer.Argument(help="The run's folder. Without it: the newest run.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="How the text begins.")] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option("--prompt-file", metavar="FILE", help="The prompt, in a file; - for stdin."),
    ] = None,
    length: Annotated[
        int | None, typer.Option("--length", min=1, help="Characters to write.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", min=0, help="0: the likeliest character every time."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, help="Only the k likeliest characters.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Only the likeliest that together have probability p."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option("--min-p", help="Only those at least m times as likely as the likeliest."),
    ] = None,
    num_samples: Annotated[
        int | None, typer.Option("--num-samples", min=1, help="How many texts.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="The same seed gives the same text.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")
    ] = None,
    unknown: options.Unknown = None,
    checkpoint: options.Checkpoint = "best",
    json_: options.Json = False,
    device: options.Device = None,
) -> None:
    """Write text with a trained model, as it comes.

    Examples: `chargpt sample`, `chargpt sample runs/novel --prompt "It was" --length 300`,
    `chargpt sample --temperature 0.5 --num-samples 3 --seed 1 --json`.
    """
    from chargpt.inference.sampling import stream_run
    from chargpt.store.run import load_run, newest_run

    path = run or newest_run()
    loaded = load_run(path, checkpoint, device or "auto")
    for note in loaded.state["skipped"]:
        console.say(note)
    settings = choose(
        loaded.config,
        prompt=given_prompt(prompt, prompt_file),
        length=length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        num_samples=num_samples,
        seed=seed,
        stop=tuple(stop) if stop else None,
    )
    pieces = stream_run(loaded, settings, unknown=options.unknown_policy(unknown))
    if settings.num_samples == 1 and not json_:
        show_as_it_comes(settings.prompt, pieces)
        return
    texts = [settings.prompt] * settings.num_samples
    for step in pieces:
        texts = [text + piece for text, piece in zip(texts, step, strict=True)]
    if json_:
        facts = {"samples": texts, "seed": settings.seed, "run": str(path), "step": loaded.step}
        console.out(json.dumps(facts, ensure_ascii=False))
        return
    for number, text in enumerate(texts, 1):
        console.out(f"-- sample {number} --\n{for_reader()(text)}")


def given_prompt(prompt: str | None, file: str | None) -> str | None:
    """Return the prompt, from the command line or from a file.

    Raises:
        ConfigError: both were given.
        TextError: the file cannot be read as text.
    """
    from chargpt.errors import ConfigError
    from chargpt.text.corpus import read_text

    if prompt is not None and file is not None:
        raise ConfigError("--prompt and --prompt-file both name a prompt; give one")
    return prompt if file is None else read_text(file)


def choose(config: "Config", **wanted: object) -> "SampleConfig":
    """Return the run's sampling settings with those that were asked for, and a seed in any case.

    Raises:
        ConfigError: a setting is out of its range.
    """
    changes = {f"sample.{key}": value for key, value in wanted.items() if value is not None}
    settings = config.with_values(changes).sample
    if settings.seed is not None:
        return settings
    return settings.model_copy(update={"seed": secrets.randbits(32)})


def show_as_it_comes(prompt: str, pieces: Iterable[list[str]]) -> None:
    """Print one text, piece by piece."""
    shown = for_reader()
    console.out(shown(prompt), end="")
    for (piece,) in pieces:
        console.out(shown(piece), end="")
    console.out("")


def for_reader() -> Callable[[str], str]:
    """Return what makes a text fit to print: a file gets it as it is, a terminal nothing odd."""
    return console.printable if sys.stdout.isatty() else str
