"""A run's figures for TensorBoard, for those who look at their runs there."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chargpt.errors import ConfigError

HIDDEN = ("step", "seconds")


class Tracker:
    """Writes each record as TensorBoard's scalars and texts, from its first on.

    Args:
        folder: of TensorBoard's files.
        step: what was written of later steps counts no more.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, step: int) -> None:
        if find_spec("tensorboard") is None:
            raise ConfigError(
                "track.tensorboard needs a package that is not installed; "
                "pip install 'chargpt[track]', or leave the setting out"
            )
        self.folder = folder
        self.step = step
        self.writer: Any = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a record under its step, to be seen at once."""
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.folder), purge_step=self.step + 1)
        for name, value in record.items():
            if isinstance(value, str):
                self.writer.add_text(name, f"```\n{value}\n```", record["step"])
            elif name not in HIDDEN:
                self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Write out what is left."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
