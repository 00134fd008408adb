"""`chargpt sample`: text from a trained model."""

import dataclasses
import json
import secrets
import sys
from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from chargpt.analysis.memorization import LEAST, Check
from chargpt.analysis.memorization import check as check_overlap
from chargpt.cli import console, options, tables
from chargpt.cli.progress import Progress
from chargpt.config import Config, SampleConfig
from chargpt.errors import ConfigError
from chargpt.inference.sampling import sample as generate
from chargpt.inference.sampling import stream_run
from chargpt.store.run import Run
from chargpt.text.corpus import read_text
from chargpt.text.tokenizer import Unknown


def sample(
    run: options.RunOrNewest = None,
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
    check: Annotated[
        bool, typer.Option("--check", help="Mark what stands in the training text too.")
    ] = False,
    unknown: options.UnknownPolicy = None,
    checkpoint: options.Checkpoint = "best",
    json_: options.Json = False,
    device: options.Device = None,
) -> None:
    """Generate text from a trained model, streamed as it is sampled.

    Examples: `chargpt sample`, `chargpt sample runs/novel --prompt "It was" --length 300`,
    `chargpt sample --temperature 0.5 --num-samples 3 --seed 1 --json`.
    """
    loaded = options.open_run(run, checkpoint, device)
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
    policy = options.unknown_policy(unknown)
    if settings.num_samples == 1 and not json_ and not check:
        show_as_it_comes(settings.prompt, stream_run(loaded, settings, unknown=policy))
        return
    texts = write_texts(loaded, settings, policy)
    found = check_texts(loaded, texts) if check else None
    if json_:
        facts: dict[str, object] = {
            "samples": texts,
            "seed": settings.seed,
            "run": str(loaded.folder),
            "step": loaded.step,
        }
        if found is not None:
            facts["memorization"] = [dataclasses.asdict(memory) for memory in found.texts]
        console.out(json.dumps(facts, ensure_ascii=False))
        return
    for number, text in enumerate(texts, 1):
        copied = found.texts[number - 1].copied if found else []
        console.out(f"-- sample {number} --\n{for_reader()(marked(text, copied))}")
    if found is not None:
        show_check(found, loaded)


def write_texts(run: Run, settings: SampleConfig, unknown: Unknown | None) -> list[str]:
    """Return the texts, with a progress bar while they are sampled."""
    with Progress(settings.num_samples * settings.length, "character") as bar:
        return generate(run, settings, unknown=unknown, on_progress=bar.callback("sampled"))


def check_texts(run: Run, texts: list[str]) -> Check:
    """Return the verbatim overlap of texts with the training text, with a progress bar."""
    with Progress(1, "character") as bar:
        return check_overlap(run.corpus(), texts, bar.callback("of the training text"))


def marked(text: str, copied: list[tuple[int, int]]) -> str:
    """Return a text with its copied stretches in brackets that texts hardly hold."""
    for start, end in reversed(copied):
        text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    return text


def show_check(found: "Check", run: "Run") -> None:
    """Print the longest copy, and how much is novel beside text that the run never saw."""
    longest = [memory.longest for memory in found.texts if memory.longest]
    unseen = max((m.longest.length for m in found.held_out if m.longest), default=0)
    beside = f"in unseen text of that length {unseen or f'under {LEAST}'}"
    if longest:
        copy = max(longest, key=lambda each: each.length)
        words = run.tokenizer.decode(found.training[copy.place : copy.place + copy.length])
        console.out(
            f"longest stretch that stands in the training text: {copy.length} characters, from "
            f"character {copy.place:,} on ({beside}): {console.printable(words)[:80]!r}"
        )
    else:
        console.out(f"no stretch of {LEAST} characters stands in the training text ({beside})")
    rows = [
        [str(length), f"{ours:.1%}", f"{theirs:.1%}"]
        for length, ours, theirs in found.novel()
        if length <= 2 * LEAST
    ]
    tables.table(["characters", "novel here", "in unseen text"], rows)


def given_prompt(prompt: str | None, file: str | None) -> str | None:
    """Return the prompt, from the command line or from a file.

    Raises:
        ConfigError: both were given.
        TextError: the file cannot be read as text.
    """
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
