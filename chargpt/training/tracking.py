"""Metrics of a run as TensorBoard files."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chargpt.errors import ConfigError

NOT_LOGGED = ("step", "seconds")


class TensorBoardLog:
    """Writes records as TensorBoard scalars and texts, to files created with the first record.

    An earlier session's records of steps after `step`, which training continues from, are hidden.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, step: int) -> None:
        if find_spec("tensorboard") is None:
            raise ConfigError(
                "track.tensorboard needs a package that is not installed; "
                "pip install '.[track]' in chargpt's folder, or leave the setting out"
            )
        self.folder = folder
        self.step = step
        self.writer: Any = None
        self.is_broken = False  # a write failed

    def add(self, *records: Mapping[str, Any]) -> None:
        """Write records under their steps; after a disk error, write nothing more."""
        if self.is_broken:
            return
        try:
            if self.writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(str(self.folder), purge_step=self.step + 1)
            for record in records:
                self.step = record["step"]
                for name, value in record.items():
                    if isinstance(value, str):
                        self.writer.add_text(name, f"```\n{value}\n```", self.step)
                    elif name not in NOT_LOGGED:
                        self.writer.add_scalar(name, value, self.step)
            self.writer.flush()
        except OSError:  # metrics.jsonl holds the same records
            self.is_broken = True

    def close(self) -> None:
        """Flush and close the file; later records go to a new one."""
        if self.writer is not None and not self.is_broken:
            self.writer.close()
        self.writer = None
