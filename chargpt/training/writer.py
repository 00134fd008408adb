"""Everything a training run writes to disk: metrics, config, checkpoints."""

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from chargpt.config import Config
from chargpt.store.folder import RunFolder
from chargpt.store.layout import TENSORBOARD
from chargpt.store.state import RunState
from chargpt.text.tokenizer import CharTokenizer
from chargpt.training.tracking import TensorBoardLog


class RunWriter:
    """Writes a run's files. A failed write does not stop the training.

    Args:
        folder: of the run; None writes nothing.
        tensorboard: whether to write TensorBoard's files too.

    Attributes:
        saved_step: of the newest checkpoint; None before the first.
        disk_error: why the last write failed; None once a checkpoint is saved again.
    """

    def __init__(self, folder: RunFolder | None, *, tensorboard: bool = False) -> None:
        self.folder = folder
        self.saved_step: int | None = None
        self.disk_error: str | None = None
        self.tensorboard: TensorBoardLog | None = None
        self.executor = ThreadPoolExecutor(1)  # starts with the first save from a GPU
        if folder is not None and tensorboard:
            self.tensorboard = TensorBoardLog(folder.path / TENSORBOARD, 0)

    def record(self, *records: Mapping[str, object]) -> None:
        """Append records to the metrics."""
        if self.folder is None:
            return
        with self._tolerate_disk_errors():
            self.folder.metrics.append(*records)
        if self.tensorboard is not None:
            self.tensorboard.add(*records)

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
        *,
        is_best: bool,
    ) -> Future[Path | None]:
        """Commit a checkpoint, from a GPU in the background.

        Returns:
            A future of its folder, or of None if the write failed.
        """
        assert self.folder is not None
        is_on_cpu = next(iter(tensors[0].values())).device.type == "cpu"
        model, optimizer = (  # no copy of what is on the CPU
            {name: x.detach().cpu() for name, x in part.items()} for part in tensors
        )
        save = self.folder.save

        def commit() -> Path | None:
            with self._tolerate_disk_errors():
                path = save(
                    config=config,
                    tokenizer=tokenizer,
                    state=state,
                    model=model,
                    optimizer=optimizer,
                    is_best=is_best,
                )
                self.saved_step, self.disk_error = state.step, None
                return path
            return None

        if not is_on_cpu:
            return self.executor.submit(commit)
        done: Future[Path | None] = Future()
        done.set_result(commit())
        return done

    def continue_from(self, step: int) -> None:
        """Drop the metrics after a checkpoint that training continues from."""
        self.saved_step = step
        if self.folder is None:
            return
        with self._tolerate_disk_errors():
            self.folder.metrics.truncate_after(step)
        if self.tensorboard is not None:
            self.tensorboard.close()
            self.tensorboard = TensorBoardLog(self.tensorboard.folder, step)

    def close(self) -> None:
        """Finish TensorBoard's files."""
        if self.tensorboard is not None:
            self.tensorboard.close()

    @contextlib.contextmanager
    def _tolerate_disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.disk_error = error.strerror or str(error)
