"""Everything a training run writes to disk: metrics, config, checkpoints."""

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from chargpt.config import Config
from chargpt.errors import ConfigError, reason_of
from chargpt.store.checkpoint import RunState, step_of
from chargpt.store.folder import TENSORBOARD, RunFolder
from chargpt.text.tokenizer import CharTokenizer

NOT_LOGGED = ("step", "seconds")  # in TensorBoard


class RunWriter:
    """Writes a run's files. A failed write does not stop the training, which says so.

    Args:
        folder: of the run; None writes nothing.
        tensorboard: whether to write TensorBoard's files too.

    Attributes:
        newest: folder of the newest checkpoint; None before the first.
        disk_error: why the last write failed; None once a checkpoint is saved again.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: RunFolder | None, *, tensorboard: bool = False) -> None:
        self.folder, self.has_tensorboard = folder, tensorboard and folder is not None
        if self.has_tensorboard and find_spec("tensorboard") is None:
            raise ConfigError(
                "track.tensorboard needs a package that is not installed; "
                "pip install '.[track]' in chargpt's folder, or leave the setting out"
            )
        self.newest: Path | None = None
        self.disk_error: str | None = None
        self.step = 0  # of the last record
        self.tensorboard: Any = None  # writer of TensorBoard's files
        self.executor = ThreadPoolExecutor(1)  # starts with the first save from a GPU
        self._pending: Future[None] | None = None  # a checkpoint that is being written
        self._saved: RunState | None = None  # for `finish`

    def record(self, *records: Mapping[str, Any]) -> None:
        """Append records to the metrics, and those whose earlier write failed."""
        if self.folder is None:
            return
        with self._tolerate_disk_errors():
            self.folder.metrics.append(*records)
        if self.has_tensorboard and records:
            try:
                self._add_to_tensorboard(self.folder.path / TENSORBOARD, *records)
            except OSError:  # metrics.jsonl holds the same records
                self.has_tensorboard, self.tensorboard = False, None

    def _add_to_tensorboard(self, folder: Path, *records: Mapping[str, Any]) -> None:
        """Write scalars and texts; those of later steps in earlier files are hidden."""
        if self.tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(str(folder), purge_step=self.step + 1)
        for record in records:
            self.step = record["step"]
            for name, value in record.items():
                if isinstance(value, str):
                    self.tensorboard.add_text(name, f"```\n{value}\n```", self.step)
                elif name not in NOT_LOGGED:
                    self.tensorboard.add_scalar(name, value, self.step)
        self.tensorboard.flush()

    def write_config(self, config: Config) -> None:
        """Replace the run's config."""
        if self.folder is not None:
            with self._tolerate_disk_errors():
                self.folder.write_config(config)

    def save(
        self,
        config: Config,
        tokenizer: CharTokenizer,
        state: RunState,
        tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    ) -> None:
        """Commit a checkpoint, from a GPU in the background; `finish` returns the result."""
        assert self.folder is not None
        save, is_on_cpu = self.folder.save, next(iter(tensors[0].values())).device.type == "cpu"
        model, optimizer = (  # no copy of what is on the CPU
            {name: x.detach().cpu() for name, x in part.items()} for part in tensors
        )

        def save_or_note_error() -> None:
            with self._tolerate_disk_errors():
                self.newest = save(
                    config=config,
                    tokenizer=tokenizer,
                    state=state,
                    model=model,
                    optimizer=optimizer,
                )
                self.disk_error, self._saved = None, state

        if is_on_cpu:
            save_or_note_error()
        else:
            self._pending = self.executor.submit(save_or_note_error)

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint."""
        return None if self.newest is None else step_of(self.newest)

    def finish(self) -> RunState | None:
        """Wait for the checkpoint that is being written.

        Returns:
            The state of the last save since the previous call; None if none has succeeded.
        """
        pending, self._pending = self._pending, None  # even if it raises
        if pending is not None:
            pending.result()
        saved, self._saved = self._saved, None
        return saved

    def continue_from(self, checkpoint: Path) -> None:
        """Drop the metrics after a checkpoint that training continues from."""
        self.newest, step = checkpoint, step_of(checkpoint)
        if self.folder is None:
            return
        with self._tolerate_disk_errors():
            self.folder.metrics.truncate_after(step)
        self.close()
        self.step = step

    def close(self) -> None:
        """Finish TensorBoard's file; later records go to a new one."""
        if self.tensorboard is not None:
            self.tensorboard.close()
            self.tensorboard = None

    @contextlib.contextmanager
    def _tolerate_disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.disk_error = reason_of(error)
