"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, cast

import typer

from chargpt.cli import console
from chargpt.errors import ConfigError
from chargpt.store.run import Run, load_run, newest_run
from chargpt.text.tokenizer import Unknown

RunOrNewest = Annotated[
    Path | None, typer.Argument(help="The run's folder. Without it: the newest run.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("-s", "--set", metavar="KEY=VALUE", help="Change a setting: train.max_steps=500."),
]
ConfigName = Annotated[
    str | None,
    typer.Option("-c", "--config", metavar="NAME|FILE", help="A shipped config or a YAML file."),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:N or mps.")
]
Encoding = Annotated[
    str | None,
    typer.Option("--encoding", help="How the text's bytes are written, if not UTF-8 or UTF-16."),
]
Checkpoint = Annotated[
    str, typer.Option("--checkpoint", metavar="best|latest|STEP", help="Which checkpoint.")
]
UnknownPolicy = Annotated[
    str | None,
    typer.Option("--unknown", help="Characters outside the vocabulary: error, skip or replace."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def open_run(path: Path | None, checkpoint: str, device: str | None) -> Run:
    """Return a run, or the newest one, and print which checkpoints were damaged.

    Raises:
        ChargptError: there is no such run or checkpoint, or none is intact.
    """
    run = load_run(path or newest_run(), checkpoint, device or "auto")
    for note in run.notes:
        console.say(note)
    return run


def unknown_policy(word: str | None) -> Unknown | None:
    """Return the value of --unknown; None leaves it to the run.

    Raises:
        ConfigError: it is not one of the three.
    """
    if word not in (None, "error", "skip", "replace"):
        raise ConfigError(f"--unknown {word} is none of error, skip, replace")
    return cast("Unknown | None", word)
