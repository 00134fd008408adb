"""The run folder on disk: its creation, its lock and its checkpoints."""

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout
from torch import Tensor

from chargpt.config import Config
from chargpt.errors import ChargptError, RunError, UnreadableError
from chargpt.files import UNSUPPORTED, exists, read_regular, write_atomically
from chargpt.store import commit, selection
from chargpt.store.checkpoint import (
    CONFIG,
    KEEP,
    MAX_METADATA_BYTES,
    MODEL,
    OPTIMIZER,
    STATE,
    TOKENIZER,
    Checkpoint,
    list_checkpoints,
    name_of,
    parse_config,
    prune_checkpoints,
    read_checkpoint,
    restore_checkpoints,
    write_checkpoint,
)
from chargpt.store.layout import (
    CHECKPOINTS,
    LOCK,
    METRICS,
    delete_replaced,
    delete_run_files,
    find_foreign_file,
    has_checkpoint,
    has_results,
    is_run,
    move_aside,
    restore_replaced,
)
from chargpt.store.metrics import MetricsLog
from chargpt.store.state import RunState
from chargpt.store.tensors import serialize
from chargpt.text.tokenizer import CharTokenizer


class RunFolder:
    """The folder of one run: creation, lock, checkpoints and metrics.

    Attributes:
        notes: sentences for the user about what was found and repaired.
        is_new: whether the folder did not exist before the run.
        is_created: whether this process has created the run in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self.is_new = self.is_created = False
        self.checkpoints = path / CHECKPOINTS
        self.metrics = MetricsLog(path / METRICS)
        self._lock = FileLock(path / LOCK)

    @staticmethod
    def require_unused(path: Path, *, allow_unsaved: bool = False) -> None:
        """Check that a new run at `path` would overwrite nothing.

        What an interrupted start has left counts as nothing, and with `allow_unsaved` any run that
        has not saved a checkpoint yet.

        Raises:
            RunError: the path is in use.
            OSError: the folder cannot be read.
        """
        if not exists(path):
            return
        if not path.is_dir():
            raise RunError(f"{path} is a file; name another folder with --out")
        foreign = find_foreign_file(path)
        is_used = has_checkpoint(path) if allow_unsaved else has_results(path)
        if foreign is None and not is_used:
            return
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
        path = self.path
        self.is_new = self.is_new or not exists(path)
        try:
            if not force:
                self.require_unused(path, allow_unsaved=allow_unsaved)
            elif kept := [
                each for each in list_checkpoints(self.checkpoints) if exists(each / KEEP)
            ]:
                raise RunError(
                    f"{path} holds {kept[0].name}, which `compress --keep` protects, so --force "
                    f"does not delete it; delete {kept[0] / KEEP}, or name another folder with "
                    "--out"
                )
            elif foreign := find_foreign_file(path):
                raise RunError(
                    f"{path} holds {foreign!r}, which no run writes, so --force does not delete "
                    "it; move that file away, or name another folder with --out"
                )
            path.mkdir(parents=True, exist_ok=True)
            self.lock()
            if force:
                move_aside(path)
            else:  # again: another process may have created it before the lock
                self.require_unused(path, allow_unsaved=allow_unsaved)
            self.is_created = True
            delete_run_files(path)
            self.checkpoints.mkdir(exist_ok=True)
            tokenizer.save(path / TOKENIZER)
            self.write_config(config)
        except BaseException as error:
            self.discard()
            if not isinstance(error, OSError):
                raise
            raise RunError(
                f"{path} cannot be written ({error.strerror}); name another folder with --out"
            ) from None
        return self

    def discard(self) -> None:
        """Delete a run that this process has begun, if it has no results; its folder too if new."""
        if not (self.is_new or self.is_created) or not exists(self.path):
            return
        with suppress(RunError, OSError):
            self.lock()  # else another process trains into the folder; restores a replaced run
            if not has_results(self.path):
                delete_run_files(self.path)
                self.unlock()
                (self.path / LOCK).unlink(missing_ok=True)
        if self.is_new:
            with suppress(OSError):
                self.path.rmdir()

    def lock(self) -> None:
        """Lock the folder against other training processes, until `unlock` or process exit.

        It raises RunError if another process holds the lock, OSError if it cannot be written.
        """
        try:
            self._lock.acquire(timeout=0.2)  # seconds: listing.is_locked holds it for a moment
        except Timeout:
            raise RunError(
                f"another process is training into {self.path}; wait for it or stop it, or name "
                "another folder with --out"
            ) from None
        except (OSError, NotImplementedError) as error:  # the library's two ways to say "no locks"
            if isinstance(error, OSError) and error.errno not in UNSUPPORTED:
                raise
            self.notes.append(
                f"the file system of {self.path} has no locks; let no other process train into it"
            )
        restore_replaced(self.path)
        with suppress(OSError):
            restore_checkpoints(self.checkpoints)

    @contextmanager
    def unlocked_on_error(self) -> Iterator[Self]:
        """Discard a run without results and unlock the folder if the block raises.

        A traceback may keep this object alive.
        """
        try:
            yield self
        except BaseException:
            self.discard()
            if self._lock.is_locked:
                self.unlock()
            raise

    def unlock(self) -> None:
        """Release the lock.

        If this run was to replace another (`--force`) and saved nothing, the old one is restored.
        """
        with suppress(OSError):
            restore_replaced(self.path)
        self._lock.release(force=True)  # `discard` may have locked it twice

    def require_space(self, n_bytes: int) -> None:
        """Check that the disk has `n_bytes` free, else raise OSError (ENOSPC)."""
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

        If a write fails (OSError), earlier checkpoints are unchanged.
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
        # `latest` last: after a crash in between it names the older checkpoint, so that resuming
        # repeats the steps and this save
        if is_best or state.best_step in (None, 0, state.step):
            commit.write_pointer(self.checkpoints, "best", folder)
        commit.write_pointer(self.checkpoints, "latest", folder)
        delete_replaced(self.path)
        with suppress(RunError):  # while it is not known which one is the best, all are kept
            best, _ = commit.read_pointer(self.checkpoints, "best")
            protected = {best.name, name_of(state.best_step or 0)}
            prune_checkpoints(self.checkpoints, protected, config.train.keep_last, folder)
        return folder

    def create_from_weights(
        self,
        config: Config,
        tokenizer: CharTokenizer,
        state: RunState,
        model: Mapping[str, Tensor],
    ) -> None:
        """Create a run with one checkpoint, without optimizer state: it cannot be resumed.

        It raises what `create` does, and OSError if the checkpoint cannot be written.
        """
        self.create(config, tokenizer)
        try:
            self.save(
                config=config,
                tokenizer=tokenizer,
                state=state,
                model=model,
                optimizer={},
                is_best=True,
            )
        except BaseException:
            self.discard()
            raise
        finally:
            self.unlock()

    def keep(self, step: int) -> None:
        """Protect a checkpoint from being deleted as an old one."""
        write_atomically(self.checkpoints / name_of(step) / KEEP, b"")

    def is_kept(self, step: int) -> bool:
        """Return whether a checkpoint is protected."""
        return exists(self.checkpoints / name_of(step) / KEEP)

    def repair_pointer(self, saved: Checkpoint) -> None:
        """Let `best.json` name the best checkpoint again if it is missing or damaged.

        `saved` is the checkpoint that training continues from. Its state says which is best; if
        that one is gone, `best.json` names `saved`.
        """
        best = self.checkpoints / name_of(saved.state.best_step or 0)
        try:
            commit.resolve_pointer(self.checkpoints, "best")
        except UnreadableError:  # it may be intact
            return
        except RunError:
            with suppress(ChargptError, OSError):
                if exists(best):
                    read_checkpoint(best, optimizer=False)
                else:
                    best = saved.folder
                commit.write_pointer(self.checkpoints, "best", best)
                self.notes.append(f"best.json was missing or damaged; it names {best.name} again")

    def note_edits(self, config: Config) -> None:
        """Note how `config.yaml` differs from the checkpoint's config; the latter is used."""
        path = self.path / CONFIG
        try:
            edited = parse_config(read_regular(path, MAX_METADATA_BYTES), path)
            differences = ", ".join(edited.differing_keys(config))
        except FileNotFoundError:
            return
        except (ChargptError, OSError, ValueError) as error:
            differences = f"that it cannot be read ({error})"
        if differences:
            self.notes.append(
                f"{path} differs from the checkpoint in {differences}; the checkpoint's settings "
                "are used, and -s KEY=VALUE changes them"
            )

    def load(self, which: str, *, optimizer: bool = True) -> tuple[Checkpoint, list[str]]:
        """Return a checkpoint, every byte checked; instead of a damaged one the newest intact one.

        If a training process saves at the same time and deletes what is read, it is read again.

        Args:
            which: `best`, `latest`, or a step's number, for which there is no substitute.
            optimizer: whether to read the optimizer state, which only training needs.

        Returns:
            The checkpoint, and one sentence for each checkpoint that was skipped.

        Raises:
            UnreadableError: the system cannot read the checkpoint, which may be intact.
            RunError: no checkpoint is intact.
        """
        return selection.load(self.path, which, optimizer=optimizer)
