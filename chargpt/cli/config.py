"""`chargpt config`: every setting with its type, default and meaning."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from chargpt.cli import console, options
from chargpt.config import Config, Settings, describe_unknown_key, load_config
from chargpt.errors import ConfigError
from chargpt.files import dump_yaml

TYPES = {int: "integer", float: "number", bool: "true or false", str: "string"}
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class Setting:
    """A setting; `value` is the run's, or the default."""

    key: str  # dotted
    type: str
    default: Any
    value: Any
    meaning: str


def config(
    key: Annotated[
        str | None, typer.Argument(help="A setting, or a section such as train; all by default.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Show the values of a run.")
    ] = None,
    config_: Annotated[
        str | None,
        typer.Option("-c", "--config", metavar="NAME|FILE", help="Show the values of a config."),
    ] = None,
    json_: options.Json = False,
) -> None:
    """List every setting with its type, default and meaning.

    Settings are changed with -s, as in `chargpt train -s train.max_steps=500`, or in a YAML file.
    `chargpt train` starts from the config gpt.

    Examples: `chargpt config`, `chargpt config train -c gpt`,
    `chargpt config model.n_layer --run runs/a`.
    """
    if run is not None and config_ is not None:
        raise ConfigError("--run and -c exclude each other; give one")
    if run is not None:
        from chargpt.store.checkpoint import newest_metadata  # which need PyTorch
        from chargpt.store.run import open_run

        values = newest_metadata(open_run(run).checkpoints)[0]
    else:
        values = Config() if config_ is None else load_config(config_)
    found = [
        each
        for each in settings(values)
        if not key or f"{each.key}.".startswith(f"{key}.")  # itself, or in this section
    ]
    if key and os.path.isfile(key):
        raise ConfigError(f"{key} is a file; -c {key} shows the values of a config")
    if not found:
        raise ConfigError(f"{key} is not a setting{describe_unknown_key(str(key))}")
    if json_:
        console.out_json([asdict(setting) for setting in found])
        return
    for setting in found:
        is_default = setting.value == setting.default
        default = "" if is_default else f"default {in_yaml(setting.default)}; "
        console.out(f"{setting.key} = {in_yaml(setting.value)}   ({default}{setting.type})")
        console.out_sentence(setting.meaning, indent="    ")
    if run is None and config_ is None:
        console.say("these are the defaults; -c gpt shows what `chargpt train` starts from")


def settings(
    values: Settings, defaults: Settings = Config(), prefix: str = ""
) -> Iterator[Setting]:
    """Yield all settings in the order of the YAML file, with the values of a config."""
    for name, field in type(values).model_fields.items():
        value, default = getattr(values, name), getattr(defaults, name)
        if isinstance(value, Settings):
            yield from settings(value, default, f"{name}.")
        else:
            meaning = " ".join((field.description or "").split())
            yield Setting(f"{prefix}{name}", describe_type(field), default, value, meaning)


def describe_type(field: FieldInfo) -> str:
    """Return a setting's type and range in words."""
    annotation = field.annotation
    is_union = get_origin(annotation) not in (None, Literal, tuple)
    types = get_args(annotation) if is_union else (annotation,)
    bounds = ", ".join(
        f"{sign} {limit if abs(limit) < 2**62 else '2^63'}"
        for metadata in field.metadata
        for name, sign in BOUNDS.items()
        if (limit := getattr(metadata, name, None)) is not None
    )
    words = " or ".join(_name_of(each) for each in types if each is not NoneType)
    return f"{words} {bounds}".rstrip() + (", or null" if NoneType in types else "")


def _name_of(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(get_args(annotation))
    if get_origin(annotation) is tuple:
        first = get_args(annotation)[0]
        pairs = "list of pairs" if get_origin(first) is tuple else "list of integers"
        return "list of texts" if first is str else pairs
    return TYPES[annotation]


def in_yaml(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if isinstance(value, str):
        return dump_yaml({"value": value}).removeprefix("value: ").rstrip("\n")
    return json.dumps(value)
