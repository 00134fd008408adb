"""From a text's name, a config and overrides to a `Config`, and which keys the user fixed."""

import os
import sys
from collections.abc import Iterable
from functools import reduce
from pathlib import Path

from chargpt.config import Config, load_config, parse_override, read_config_tree
from chargpt.errors import TextError
from chargpt.text.catalog import settings_for
from chargpt.yaml_reader import to_yaml


def build_config(
    text: str | None = None,
    config: str | None = None,
    overrides: Iterable[str] = (),
    *,
    device: str | None = None,
) -> Config:
    """Return the config of a run.

    Args:
        text: a file, folder, glob, name in the catalog, or `-`; None for the built-in text.
        config: a shipped config's name or a YAML file; `gpt` by default.
        overrides: texts like `train.max_steps=100`, which take precedence over the config.
        device: replaces the config's.

    Raises:
        ConfigError: a key or value is wrong.
        TextError: the path of the text is not Unicode.
    """
    defaults: dict[str, object] = {}
    if text == "":
        raise TextError("the path of the text is empty; name a file, a folder or a pattern")
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise TextError(
            f"the path {text} is not {sys.getfilesystemencoding()}; rename the text, or set "
            "PYTHONUTF8=1 if its name is right"
        ) from None
    if text is not None and not os.path.exists(text):  # unlike Path.exists, False for any text
        defaults |= settings_for(text) or {}
    settings = list(overrides)
    if text is not None and "text.path" not in defaults:
        path = text if text == "-" else str(Path(text).absolute())
        settings = [f"text.path={to_yaml(path)}", *settings]
    if device is not None:
        settings.append(f"device={to_yaml(device)}")
    return load_config(config or "gpt", settings, defaults)


def fixed_keys(config: str | None, overrides: Iterable[str] = ()) -> set[str]:
    """Return the dotted keys that a config and overrides set."""
    keys = {parse_override(override)[0] for override in overrides}
    for section, values in read_config_tree(config)[0].items() if config else ():
        names = values if isinstance(values, dict) else {}
        keys |= {f"{section}.{name}" for name in names} or {section}
    return keys


def fixed_values(
    settings: Config,
    config: str | None,
    overrides: Iterable[str] = (),
    *,
    text: str | None = None,
    device: str | None = None,
) -> dict[str, object]:
    """Return the values in `settings` of every key that the arguments of `build_config` set."""
    arguments = {"text.path": text, "device": device}
    keys = fixed_keys(config, overrides) | {k for k, v in arguments.items() if v is not None}
    return {key: reduce(getattr, key.split("."), settings) for key in sorted(keys)}
