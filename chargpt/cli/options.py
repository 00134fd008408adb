"""Options that several commands share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from chargpt.config import parse_override
from chargpt.errors import ConfigError
from chargpt.text.tokenizer import UnknownPolicy

Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, help="Seed of initial weights, batches and dropout; 1337 by default."
    ),
]
RunPath = Annotated[Path, typer.Argument(help="The run's folder.")]
RunOrNewest = Annotated[
    Path | None, typer.Argument(help="The run's folder. Without it: the newest run.")
]
RunsOut = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--out",
        metavar="FOLDER",
        help="Where the result goes; a new folder in runs/ by default.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "-s",
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting: train.max_steps=500; `chargpt config` lists all.",
    ),
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
        metavar="DEVICE",
        help="auto, cpu, cuda, cuda:N, xpu, xpu:N or mps; by default auto, a GPU if there is one.",
    ),
]
Encoding = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Encoding of the text; by default UTF-8, or what its byte order mark says.",
    ),
]
RunEncoding = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Encoding of the file; by default that of the run's text."),
]
Val = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="A text of its own to validate on, instead of the end of TEXT."
    ),
]
Test = Annotated[
    str | None, typer.Option(metavar="FILE", help="A text of its own for the test split.")
]
EncodingErrors = Annotated[
    Literal["strict", "replace"] | None,
    typer.Option(
        help="Bytes that do not decode: an error (strict, the default), or U+FFFD (replace)."
    ),
]
Checkpoint = Annotated[str, typer.Option(metavar="best|latest|STEP", help="Which checkpoint.")]
Page = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="FILE", help="The page; by default one in the run."),
]
UnknownOption = Annotated[
    UnknownPolicy | None,
    typer.Option(help="What to do with characters outside the vocabulary; error by default."),
]
Mixture = Annotated[
    bool, typer.Option("--mixture", help="Use the mixture of the GPT with n-gram models.")
]
Mix = Annotated[
    list[float] | None,
    typer.Option(
        "--mix",
        metavar="W",
        min=0,
        max=1,
        help="Weight of the second run, 0 to 1, in a mix of two; that of the first is the rest. Of "
        "more runs, once for each after the first. All are equal by default.",
    ),
]
Adaptive = Annotated[
    bool,
    typer.Option(
        "--adaptive", help="Use the mixture, and let it learn from the text as it is read."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


SETTINGS = {  # that are named by an option of another name
    **{name: f"text.{name}" for name in ("encoding", "encoding_errors")},
    **{name: f"text.{name}_path" for name in ("val", "test")},
}


def command_group(help_: str) -> typer.Typer:
    """Return a command that has subcommands."""
    return typer.Typer(
        help=help_, no_args_is_help=True, add_completion=False, rich_markup_mode=None
    )


def reject(given: Mapping[str, object], cause: str) -> None:
    """Raise if an option in `given` has a value; `cause` says why it does not apply."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name} {cause}; drop it")


def given_settings(set_: list[str] | None = None, **options: object) -> dict[str, object]:
    """Return the settings of -s, and of `options` that are settings too, by dotted keys."""
    given = {
        SETTINGS.get(name, name): value for name, value in options.items() if value is not None
    }
    return {**dict(map(parse_override, set_ or ())), **given}
