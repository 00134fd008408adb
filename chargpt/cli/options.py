"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from chargpt.text.tokenizer import Unknown

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
    Unknown | None,
    typer.Option("--unknown", help="What to do with characters outside the vocabulary."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
