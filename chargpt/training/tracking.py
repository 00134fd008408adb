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
        self.lost = False  # the disk has refused

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a record under its step. Where the disk refuses, nothing more is written."""
        if self.lost:
            return
        try:
            self._add(record)
        except OSError:  # metrics.jsonl has it all
            self.lost = True

    def _add(self, record: Mapping[str, Any]) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.folder), purge_step=self.step + 1)
        self.step = record["step"]
        for name, value in record.items():
            if isinstance(value, str):
                self.writer.add_text(name, f"```\n{value}\n```", self.step)
            elif name not in HIDDEN:
                self.writer.add_scalar(name, value, self.step)
        self.writer.flush()

    def close(self) -> None:
        """Write out what is left; what is added later goes into another file."""
        if self.writer is not None and not self.lost:
            self.writer.close()
        self.writer = None
