"""The run folder on disk: its file names, its creation, its lock and its checkpoints.

runs/<name>/config.yaml  tokenizer.json  metrics.jsonl  report.html  checkpoints/
"""

import errno
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout
from torch import Tensor

from chargpt.config import Config
from chargpt.errors import ChargptError, RunError
from chargpt.files import write_atomically
from chargpt.store import commit
from chargpt.store.checkpoint import (
    CONFIG,
    MODEL,
    NAME,
    OPTIMIZER,
    STATE,
    TOKENIZER,
    Checkpoint,
    list_checkpoints,
    prune_checkpoints,
    read_checkpoint,
    step_of,
    write_checkpoint,
)
from chargpt.store.metrics import MetricsLog
from chargpt.store.state import RunState
from chargpt.store.tensors import serialize
from chargpt.text.tokenizer import CharTokenizer

METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"
REPORT, TENSORBOARD, LOCK = "report.html", "tensorboard", ".lock"
RUN_FILES = (CONFIG, TOKENIZER, METRICS, CHECKPOINTS, REPORT, TENSORBOARD, LOCK)
CHECKPOINT_FILES = re.compile(r"step-[0-9]{8,18}(\.old)?(\.tmp)?|(latest|best)\.json|\..*\.tmp")


def is_run(path: Path) -> bool:
    """Return whether a folder is a run."""
    return (path / CONFIG).is_file()


def has_checkpoint(path: Path) -> bool:
    """Return whether a run has saved a checkpoint, intact or damaged."""
    checkpoints = path / CHECKPOINTS
    if checkpoints.is_symlink():
        return True  # its target may be on a disk that is not mounted now
    return checkpoints.is_dir() and any(NAME.fullmatch(name) for name in os.listdir(checkpoints))


def find_foreign_file(path: Path) -> str | None:
    """Return the name of a file in a run's folder that no run writes, or None."""
    if not path.exists():
        return None
    for entry in path.iterdir():
        if entry.name not in RUN_FILES and not entry.name.endswith(".tmp"):
            return entry.name
    checkpoints = path / CHECKPOINTS
    if checkpoints.is_symlink() or (checkpoints.exists() and not checkpoints.is_dir()):
        return CHECKPOINTS
    for entry in checkpoints.iterdir() if checkpoints.exists() else ():
        if not CHECKPOINT_FILES.fullmatch(entry.name):
            return f"{CHECKPOINTS}/{entry.name}"
    return None


class RunFolder:
    """The folder of one run: creation, lock, checkpoints and metrics."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self.metrics = MetricsLog(path / METRICS)
        self._lock = FileLock(path / LOCK)

    @staticmethod
    def require_free(path: Path, *, allow_unsaved: bool = False) -> None:
        """Check that a new run at `path` would overwrite nothing.

        Args:
            path: of the new run's folder.
            allow_unsaved: accept a run that has not saved a checkpoint yet.

        Raises:
            RunError: the path is in use.
            OSError: the folder cannot be read.
        """
        if not path.exists() and not path.is_symlink():
            return
        if not path.is_dir():
            raise RunError(f"{path} is a file; name another folder with --out")
        if allow_unsaved:
            if find_foreign_file(path) is None and not has_checkpoint(path):
                return
        elif all(p.name == LOCK for p in path.iterdir()):
            return
        foreign = find_foreign_file(path)
        if foreign is not None and not is_run(path):
            raise RunError(
                f"{path} exists and holds {foreign!r}, which no run writes; name another folder "
                "with --out"
            )
        raise RunError(
            f"{path} exists; continue it with --resume, replace it with --force, "
            "or name another folder with --out"
        )

    def create(
        self,
        config: Config,
        tokenizer: CharTokenizer,
        *,
        force: bool = False,
        allow_unsaved: bool = False,
    ) -> Self:
        """Create a new run's folder, lock it, and return self.

        Args:
            config: resolved.
            tokenizer: of the training text.
            force: replace an existing run.
            allow_unsaved: replace a run that has not saved a checkpoint yet.

        Raises:
            RunError: the path is in use, or cannot be written.
        """
        path, is_new = self.path, not self.path.exists()
        try:
            if not force:
                self.require_free(path, allow_unsaved=allow_unsaved)
            elif foreign := find_foreign_file(path):
                raise RunError(
                    f"{path} holds {foreign!r}, which no run writes, so --force does not delete "
                    "it; move that file away, or name another folder with --out"
                )
            path.mkdir(parents=True, exist_ok=True)
            self.lock()
            if not force:  # again: another process may have created it before the lock
                self.require_free(path, allow_unsaved=allow_unsaved)
            for entry in path.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != LOCK:
                    entry.unlink()
            self.checkpoints.mkdir()
            write_atomically(path / TOKENIZER, tokenizer.to_json().encode())
            self.write_config(config)
        except OSError as error:
            if is_new:
                shutil.rmtree(path, ignore_errors=True)
            raise RunError(
                f"{path} cannot be written ({error.strerror}); name another folder with --out"
            ) from None
        return self

    def lock(self) -> None:
        """Lock the folder against other training processes, until `unlock` or process exit.

        Raises:
            RunError: another process holds the lock.
            OSError: the folder cannot be written.
        """
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RunError(
                f"another process is training into {self.path}; wait for it or stop it, or name "
                "another folder with --out"
            ) from None

    def unlock(self) -> None:
        """Release the lock."""
        self._lock.release()

    def require_space(self, n_bytes: int) -> None:
        """Check that the disk has `n_bytes` free.

        Raises:
            OSError: it has less (ENOSPC).
        """
        folder = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if shutil.disk_usage(folder).free < n_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def write_config(self, config: Config) -> None:
        """Write `config.yaml`."""
        write_atomically(self.path / CONFIG, config.to_yaml().encode())

    def save(
        self,
        *,
        config: Config,
        tokenizer: CharTokenizer,
        state: RunState,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        is_best: bool,
    ) -> Path:
        """Commit a checkpoint of `state.step`, update the pointers, prune; return its folder.

        Raises:
            OSError: a write failed; earlier checkpoints are unchanged.
        """
        files = {
            MODEL: serialize(model),
            OPTIMIZER: serialize(optimizer),
            CONFIG: [config.to_yaml().encode()],
            TOKENIZER: [tokenizer.to_json().encode()],
            STATE: [state.to_json()],
        }
        self.require_space(sum(len(chunk) for chunks in files.values() for chunk in chunks))
        folder = write_checkpoint(self.checkpoints, state.step, files)
        # `latest` last: after a crash before it, the resumed run repeats the save with `best`
        if is_best or not state.best_step:
            commit.write_pointer(self.checkpoints, "best", folder)
        commit.write_pointer(self.checkpoints, "latest", folder)
        try:
            best = [commit.resolve_pointer(self.checkpoints, "best", NAME)]
        except RunError:
            best = []
        prune_checkpoints(self.checkpoints, best, config.train.keep_last, folder)
        return folder

    def load(self, which: str, *, optimizer: bool = True) -> tuple[Checkpoint, list[str]]:
        """Return a checkpoint, every byte checked; instead of a damaged one the newest intact one.

        Args:
            which: `best`, `latest`, or a step's number, for which there is no substitute.
            optimizer: whether to read the optimizer state, which only training needs.

        Returns:
            The checkpoint, and one sentence for each checkpoint that was skipped.

        Raises:
            RunError: no checkpoint is intact.
        """
        candidates, skipped = self._candidates(which)
        for folder in candidates:
            try:
                return read_checkpoint(folder, optimizer=optimizer), skipped
            except ChargptError as error:
                skipped.append(str(error))
        raise RunError(
            skipped[0] if len(skipped) == 1 else "no checkpoint is intact: " + "; ".join(skipped)
        )

    def _candidates(self, which: str) -> tuple[list[Path], list[str]]:
        """Return the checkpoints to try, in order, and why the one named is not among them."""
        folders = list_checkpoints(self.checkpoints)[::-1]
        if not folders:
            raise RunError(
                f"{self.path} holds no checkpoint yet; train it first, or name another run"
            )
        if which not in ("best", "latest"):
            steps = {str(step_of(folder)): folder for folder in folders}
            if which not in steps:
                raise RunError(
                    f"{self.path} has no checkpoint {which!r}; it has best, latest and steps "
                    + ", ".join(reversed(steps))
                )
            return [steps[which]], []
        try:
            named, _ = commit.read_pointer(self.checkpoints, which, NAME)
        except RunError as error:
            return folders, [str(error)]
        others = [folder for folder in folders if folder != named]
        try:
            commit.resolve_pointer(self.checkpoints, which, NAME)
        except RunError as error:
            return others, [str(error)]
        return [named, *others], []
