"""Everything a training run writes to disk: metrics, config, checkpoints."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from chargpt.config import Config
from chargpt.errors import ConfigError, reason_of
from chargpt.store.checkpoint import RunState, step_of
from chargpt.store.folder import RunFolder
from chargpt.store.layout import TENSORBOARD
from chargpt.text.tokenizer import CharTokenizer

NOT_LOGGED = ("step", "seconds")  # in TensorBoard


class RunWriter:
    """Writes a run's files. A failed write does not stop the training, which says so.

    Args:
        folder: of the run; None writes nothing.
        tensorboard: whether to write TensorBoard's files too.

    Attributes:
        newest: folder of the newest checkpoint; None before the first.
        errors: why the last write of the metrics, the checkpoint or the config failed, by these
            names; none once one succeeds.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: RunFolder | None, *, tensorboard: bool = False) -> None:
        self.folder, self.has_tensorboard = folder, tensorboard and folder is not None
        if self.has_tensorboard and find_spec("tensorboard") is None:
            raise ConfigError(
                "track.tensorboard needs a package that is not installed; "
                "pip install '.[track]' in chargpt's folder, or set it to false"
            )
        self.newest: Path | None = None
        self.errors: dict[str, str] = {}
        self.step = 0  # of the last record
        self.tensorboard: Any = None  # writer of TensorBoard's files
        self.executor = ThreadPoolExecutor(1)  # starts with the first save from a GPU
        self._pending: Future[None] | None = None  # a checkpoint that is being written
        self._saved: RunState | None = None  # for `finish`

    def record(self, *records: Mapping[str, Any]) -> None:
        """Append records to the metrics, and those whose earlier write failed."""
        if self.folder is None:
            return
        self.folder.metrics.hold(*records)
        self._write("metrics", self.folder.metrics.append)
        if self.has_tensorboard and records:
            try:
                self._add_to_tensorboard(self.folder, *records)
            except OSError:  # metrics.jsonl holds the same records
                self.has_tensorboard, self.tensorboard = False, None

    def _add_to_tensorboard(self, folder: RunFolder, *records: Mapping[str, Any]) -> None:
        """Write scalars and texts; those of later steps in earlier files are hidden."""
        if self.tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            folder.require_own()
            path = str(folder.path / TENSORBOARD)
            self.tensorboard = SummaryWriter(path, purge_step=self.step + 1)
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
            self._write("config", partial(self.folder.write_config, config))

    def save(
        self,
        config: Config,
        tokenizer: CharTokenizer,
        state: RunState,
        tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    ) -> None:
        """Commit a checkpoint, from a GPU in the background; `finish` returns the result."""
        assert self.folder is not None
        save = partial(self.folder.save, config=config, tokenizer=tokenizer, state=state)
        is_on_cpu = next(iter(tensors[0].values())).device.type == "cpu"
        model, optimizer = (  # no copy of what is on the CPU
            {name: x.detach().cpu() for name, x in part.items()} for part in tensors
        )

        def save_checkpoint() -> None:
            self.newest = save(model=model, optimizer=optimizer)
            self._saved = state

        if is_on_cpu:
            self._write("checkpoint", save_checkpoint)
        else:
            self._pending = self.executor.submit(self._write, "checkpoint", save_checkpoint)

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
        self._write("metrics", partial(self.folder.metrics.truncate_after, step))
        self.close()
        self.step = step

    def close(self) -> None:
        """Finish TensorBoard's file; later records go to a new one."""
        if self.tensorboard is not None:
            self.tensorboard.close()
            self.tensorboard = None

    def _write(self, what: str, write: Callable[[], object]) -> None:
        """Call `write` and note an error of the disk, also if the folder is no longer the run's."""
        assert self.folder is not None
        try:
            self.folder.follow()
            write()
        except OSError as error:
            self.errors[what] = reason_of(error)
        else:
            self.errors.pop(what, None)
