"""From a text's name, a config and overrides to a `Config`."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from chargpt.config import Config, load_config
from chargpt.errors import TextError
from chargpt.text.catalog import settings_for
from chargpt.yaml_io import to_flow_yaml


def build_config(
    path: str | None = None,
    config: str | None = None,
    overrides: Iterable[str] = (),
    *,
    device: str | None = None,
) -> Config:
    """Return the config of a run.

    Args:
        path: a file, folder, glob, name in the catalog, or `-`; None for the built-in text.
        config: a shipped config's name or a YAML file; `gpt` by default.
        overrides: strings like `train.max_steps=100`, which take precedence over the config.
        device: replaces the config's.

    Raises:
        ConfigError: a key or value is wrong.
        TextError: the path of the text is not Unicode.
    """
    if path == "":
        raise TextError("the path of the text is empty; name a file, a folder or a pattern")
    try:
        (path or "").encode()
    except UnicodeEncodeError:
        raise TextError(
            f"the path {path} is not {sys.getfilesystemencoding()}; rename the text, or set "
            "PYTHONUTF8=1 if its name is right"
        ) from None
    settings, defaults = list(overrides), None
    if path is not None:
        value: object = path if path == "-" else str(Path(os.path.expanduser(path)).absolute())
        if not os.path.exists(path):  # unlike Path.exists, False for any string
            defaults = settings_for(path)
        if defaults is not None:
            value = defaults.pop("text.path")
        settings = [f"text.path={to_flow_yaml(value)}", *settings]
    if device is not None:
        settings.append(f"device={to_flow_yaml(device)}")
    return load_config(config or "gpt", settings, defaults)
