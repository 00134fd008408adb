"""From a text's name, a config and overrides to a `Config`."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from chargpt.config import Config, load_config
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
    if text == "":
        raise TextError("the path of the text is empty; name a file, a folder or a pattern")
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise TextError(
            f"the path {text} is not {sys.getfilesystemencoding()}; rename the text, or set "
            "PYTHONUTF8=1 if its name is right"
        ) from None
    settings, defaults = list(overrides), None
    if text is not None:
        path: object = text if text == "-" else str(Path(os.path.expanduser(text)).absolute())
        if not os.path.exists(text):  # unlike Path.exists, False for any text
            defaults = settings_for(text)
        if defaults is not None:
            path = defaults.pop("text.path")
        settings = [f"text.path={to_yaml(path)}", *settings]
    if device is not None:
        settings.append(f"device={to_yaml(device)}")
    return load_config(config or "gpt", settings, defaults)
