"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from chargpt.text.tokenizer import Unknown

Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Of initial weights and batches; 1337 by default."),
]
RunPath = Annotated[Path, typer.Argument(help="The run's folder.")]
RunOrNewest = Annotated[
    Path | None, typer.Argument(help="The run's folder. Without it: the newest run.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("-s", "--set", metavar="KEY=VALUE", help="Change a setting: train.max_steps=500."),
]
ConfigName = Annotated[
    str | None,
    typer.Option(
        "-c",
        "--config",
        metavar="NAME|FILE",
        help="A shipped config or a YAML file; gpt by default.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="DEVICE", help="cpu, cuda, cuda:N or mps; a GPU by default, if any."
    ),
]
Encoding = Annotated[
    str | None,
    typer.Option("--encoding", help="How the text's bytes are written, if not UTF-8 or UTF-16."),
]
Checkpoint = Annotated[
    str, typer.Option("--checkpoint", metavar="best|latest|STEP", help="Which checkpoint.")
]
UnknownPolicy = Annotated[
    Unknown | None,
    typer.Option(
        "--unknown",
        help="What to do with characters outside the vocabulary; error by default.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def with_seed(overrides: list[str] | None, seed: int | None) -> tuple[str, ...]:
    """Return the overrides of -s with that of --seed."""
    return (*(overrides or ()), *([] if seed is None else [f"seed={seed}"]))
