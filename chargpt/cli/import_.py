"""`chargpt import`: a run from the files of another tool."""

from pathlib import Path
from typing import Annotated

import typer

from chargpt.cli import console, options
from chargpt.imports import import_huggingface, import_nanogpt

app = options.command_group("Import a model as a run.")
Out = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run to make.")]


@app.command()
def hf(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that `chargpt export hf` wrote.")
    ],
    out: Out,
) -> None:
    """Import a folder that `chargpt export hf` wrote, bitwise identical.

    Example: `chargpt import hf novel-hf runs/novel`.
    """
    print_new_run(import_huggingface(folder, out))


@app.command()
def nanogpt(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="Its ckpt.pt.")],
    out: Out,
    meta: Annotated[Path, typer.Option(metavar="FILE", help="Its meta.pkl, with the characters.")],
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its input.txt, to evaluate and explain on.")
    ] = None,
) -> None:
    """Import a checkpoint of nanoGPT; no code in it is run.

    Example: `chargpt import nanogpt out/ckpt.pt runs/nano --meta data/shakespeare_char/meta.pkl`.
    """
    print_new_run(import_nanogpt(checkpoint, meta, out, text))


def print_new_run(run: Path) -> None:
    """Print the path of a new run."""
    console.out(str(run))
    console.say(
        "the run has no optimizer state: train from its weights with `chargpt train --from`"
    )
