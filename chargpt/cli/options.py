"""Options that several commands share, and the step from words on the line to a `Config`."""

import json
import re
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chargpt.cli import console

if TYPE_CHECKING:
    from chargpt.store.run import Run

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
Unknown = Annotated[
    str | None,
    typer.Option("--unknown", help="Characters outside the vocabulary: error, skip or replace."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def build_config(
    text: str | None,
    config: str | None,
    overrides: list[str] | None,
    *,
    device: str | None = None,
    encoding: str | None = None,
) -> Any:
    """Return the Config that a command line describes: text, file, then overrides."""
    from chargpt.config import load_config
    from chargpt.text.catalog import settings_for

    defaults: dict[str, object] = {}
    if text is not None and text != "-" and not Path(text).exists():
        defaults |= settings_for(text) or {}
    written = list(overrides or [])
    if text is not None and "text.path" not in defaults:
        path = text if text == "-" else str(Path(text).absolute())
        written = [f"text.path={quoted(path)}", *written]
    if device is not None:
        written.append(f"device={quoted(device)}")
    if encoding is not None:
        written.append(f"text.encoding={quoted(encoding)}")
    return load_config(config or "gpt", written, defaults)


def given_keys(config: str | None, overrides: list[str] | None) -> set[str]:
    """Return the dotted keys that a config file and -s options set."""
    from chargpt.config import parse_override, read_config_tree

    keys = {parse_override(written)[0] for written in overrides or []}
    for section, values in read_config_tree(config)[0].items() if config else ():
        names = values if isinstance(values, dict) else {}
        keys |= {f"{section}.{name}" for name in names} or {section}
    return keys


def given_values(
    settings: Any,
    config: str | None,
    overrides: list[str] | None,
    text: str | None,
    device: str | None,
    encoding: str | None,
) -> dict[str, object]:
    """Return the settings that a command line fixes, by their dotted keys."""
    fixed = {"text.path": text, "device": device, "text.encoding": encoding}
    keys = given_keys(config, overrides) | {key for key, word in fixed.items() if word is not None}
    return {key: reduce(getattr, key.split("."), settings) for key in sorted(keys)}


def parsed(overrides: list[str] | None, device: str | None) -> dict[str, object]:
    """Return what -s and --device say, by dotted keys."""
    from chargpt.config import parse_override

    values = dict(parse_override(written) for written in overrides or [])
    return values if device is None else {**values, "device": device}


def load_run(path: Path, checkpoint: str, device: str | None) -> "Run":
    """Return a run from disk, and say what was passed over on the way.

    Raises:
        ChargptError: there is no such run or checkpoint, or none that is whole.
    """
    from chargpt.store.run import load_run

    run = load_run(path, checkpoint, device or "auto")
    for note in run.notes:
        console.say(note)
    return run


def unknown_policy(word: str | None) -> Any:
    """Return --unknown's word, checked; None leaves it to the run.

    Raises:
        ConfigError: it is not one of the three.
    """
    from chargpt.errors import ConfigError

    if word not in (None, "error", "skip", "replace"):
        raise ConfigError(f"--unknown {word} is none of error, skip, replace")
    return word


def quoted(value: str) -> str:
    """Return a text as a YAML scalar that reads back as that text."""
    return json.dumps(value)


def slug(name: str) -> str:
    """Return a text's name as part of a folder's name: `novel.txt` gives `novel`."""
    return re.sub(r"[^\w.-]+", "-", Path(name).stem).strip("-.") or "text"


def free_folder(name: str) -> Path:
    """Return runs/name, or with the first number that is free."""
    path, number = Path("runs", name), 2
    while path.exists():
        path, number = Path("runs", f"{name}-{number}"), number + 1
    return path


class PrepareProgress:
    """Shows how a text is fetched, or a long one read; says nothing of a short one."""

    def __init__(self) -> None:
        self.bar: Any = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if total < 50_000_000 and stage != "fetching":
            return
        if self.bar is None:
            self.bar = console.Progress(total, stage)
        detail = f"{stage} {console.size(done)} of {console.size(total)}"
        self.bar.move_to(done, detail if self.bar.wants_detail() else None)
        if done >= total:
            self.bar.close()
            self.bar = None
