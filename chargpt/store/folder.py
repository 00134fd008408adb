"""The folder of one run: its creation, its lock, its checkpoints and its text."""

import errno
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout
from torch import Tensor

from chargpt.config import Config, TextConfig
from chargpt.distributed import is_main_rank
from chargpt.errors import ChargptError, RunError, reason_of
from chargpt.files import (
    IS_WINDOWS,
    MAX_YAML_CHARACTERS,
    UNSUPPORTED,
    entry_names,
    exists,
    lock_descriptor,
    path_of,
    quoted,
    read_regular,
    sync_directory,
    sync_files,
    write_atomically,
)
from chargpt.log import logger
from chargpt.store.checkpoint import (
    CONFIG,
    KEEP,
    MAX_METADATA_BYTES,
    MODEL,
    OPTIMIZER,
    STATE,
    TOKENIZER,
    Checkpoint,
    RunState,
    load_checkpoint,
    name_of,
    parse_config,
    prune_checkpoints,
    restore_checkpoints,
    write_checkpoint,
)
from chargpt.store.layout import (
    CHECKPOINTS,
    LOCK,
    METRICS,
    NEW,
    TEXT,
    delete_run_files,
    find_foreign_file,
    find_link,
    has_results,
    identity_of,
    is_run,
    require_no_links,
)
from chargpt.store.metrics import MetricsLog
from chargpt.store.tensors import serialize
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import JOURNAL, read_prepared
from chargpt.text.tokenizer import CharTokenizer


class RunFolder:
    """The folder of one run: creation, lock, checkpoints and metrics.

    Attributes:
        path: of the folder.
        identity: device and inode of the folder that is written to; None if any at the path is.
        moved_from: the path at which the folder was locked, once it is no longer there.
    """

    def __init__(self, path: Path, identity: tuple[int, int] | None = None) -> None:
        self.path, self.identity = path, identity
        self.moved_from: Path | None = None
        self.metrics = MetricsLog(path / METRICS)
        self.is_created = False  # by this object
        self._lock = FileLock(path / LOCK)
        self._descriptor: int | None = None  # of the locked folder
        self._text_flush: Future[None] | None = None  # of a new run

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def new_text(self) -> Path:
        """The folder in which a text is prepared before the run is created."""
        return self.path / NEW / TEXT

    def require_unused(self, *, replace: bool = False) -> None:
        """Check that a new run may be created here: no run with results, unless `replace`.

        Raises:
            RunError: the path is in use, or cannot be used.
        """
        try:
            self._require_unused(replace=replace)
        except OSError as error:
            raise self._unwritable(error) from None

    def _require_unused(self, *, replace: bool) -> None:
        path = self.path
        if not exists(path):
            return
        if not path.is_dir():
            raise RunError(f"{path} is a file; name another folder with --out")
        if replace and path.resolve() in (Path.cwd(), *Path.cwd().parents):
            raise RunError(
                f"{path} holds the current folder, and --force would rename it; start from another "
                "folder"
            )
        require_no_links(path)
        foreign = find_foreign_file(path)
        if foreign is not None and not is_run(path):
            raise RunError(
                f"{path} exists and holds {foreign!r}, which no run writes; name another folder "
                "with --out"
            )
        names = entry_names(path)
        if not replace and CONFIG in names and CHECKPOINTS not in names:
            raise RunError(
                f"{path} is a run whose folder {CHECKPOINTS} is missing; restore it (is its disk "
                "mounted?), or start a new run with --force, which renames this one"
            )
        if not replace and (has_results(path) or foreign is not None):
            raise RunError(
                f"{path} exists; continue it with --resume, replace it with --force, "
                "or name another folder with --out"
            )

    @contextmanager
    def locked(self, *, is_new: bool = False) -> Iterator[Self]:
        """Lock the folder in the block, against other training processes.

        With `is_new` the folder is made, and if the block raises before a run that it has created
        has results, what was written is deleted. Of a start that was killed only a text remains,
        for `prepare` to go on with. Other ranks than 0 lock and write nothing.

        Raises:
            RunError: another process holds the lock, the folder cannot be written, or holds a link.
        """
        if not is_main_rank():
            yield self
            return
        try:
            had_folder = exists(self.path)
            if is_new:
                self.path.mkdir(parents=True, exist_ok=True)
            require_no_links(self.path)
            self._acquire()
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            self._delete_new(keep=(TEXT,))
            yield self
        except BaseException:
            with suppress(OSError):
                self.require_own()
                has_begun = has_results(self.path) or exists(self.metrics.path)
                if is_new and self.is_created and not has_begun:
                    delete_run_files(self.path)
            raise
        finally:
            with suppress(OSError):
                self.require_own()
                self._delete_new()
                if IS_WINDOWS:
                    self._lock.release()
                if is_new and {*os.listdir(self.path)} <= {LOCK}:
                    (self.path / LOCK).unlink(missing_ok=True)
                    if not had_folder:
                        self.path.rmdir()
            self._lock.release()
            self._close()
            self.identity = None

    def _watch(self) -> None:
        """Note which folder is at the path, for `follow`, and lock it if the system can.

        Raises:
            BlockingIOError: another process has locked it, and its `.lock` was deleted since.
        """
        self._close()
        self.identity = identity_of(self.path)
        if not IS_WINDOWS:  # which renames no folder with an open file, such as the lock
            with suppress(OSError):
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        if self._descriptor is not None:
            lock_descriptor(self._descriptor)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def follow(self) -> None:
        """Update the path if the folder was renamed, so that a write reaches no other one.

        Raises:
            OSError: the folder is gone, or there is another at its path.
        """
        identity = self.identity
        if self._descriptor is not None:  # some file systems number their inodes anew
            identity = identity_of(self._descriptor)
        if identity is not None and identity_of(self.path) != identity:
            self.moved_from = self.moved_from or self.path
            if self._descriptor is None:
                raise OSError(errno.ESTALE, "it is no longer at its path", str(self.path))
            self.path = path_of(self._descriptor)
            self.metrics.path = self.path / METRICS

    def require_own(self) -> None:
        """Check before a write that it reaches this folder, and nothing through a link.

        Raises:
            OSError: as `follow`, or a link is in place of a file or folder of the run.
        """
        self.follow()
        if (link := find_link(self.path)) is not None:
            raise OSError(errno.ELOOP, f"{link} in it is a link, a pipe or a device")

    def _acquire(self) -> None:
        try:
            self._lock.acquire(timeout=0.2)  # seconds: listing.is_locked holds it for a moment
        except Timeout:
            raise self._in_use() from None
        except (OSError, NotImplementedError) as error:  # the library's two ways to say "no locks"
            if isinstance(error, OSError) and error.errno not in UNSUPPORTED:
                raise
            logger.warning(
                f"the file system of {self.path} has no locks; let no other process train into it"
            )
        try:
            self._watch()
        except BlockingIOError:
            self._lock.release()
            raise self._in_use() from None
        with suppress(OSError):
            restore_checkpoints(self.checkpoints)

    def _in_use(self) -> RunError:
        return RunError(
            f"another process is training into {self.path}; wait for it or stop it, or name "
            "another folder with --out"
        )

    def _delete_new(self, keep: tuple[str, ...] = ()) -> None:
        """Delete what a start has left that has not created its run."""
        if exists(self.path / NEW):
            delete_run_files(self.path / NEW, keep)
            with suppress(OSError):
                (self.path / NEW).rmdir()

    def _unwritable(self, error: OSError) -> RunError:
        reason = reason_of(error)
        return RunError(f"{self.path} cannot be written ({reason}); name another folder with --out")

    def create(
        self,
        config: Config,
        tokenizer: CharTokenizer,
        text: Path | None = None,
        *,
        replace: bool = False,
    ) -> Self:
        """Create a new run and return self.

        The run is made in the subfolder `.new` and then moved to its place, so that at any time
        there is a whole run, the old or the new one, or none. An old run with results is renamed.

        Args:
            config: resolved.
            tokenizer: of the training text.
            text: folder of the prepared text, whose files are linked or copied unless it is
                `new_text`; None: the run has no text.
            replace: whether the old run may have results.

        Raises:
            RunError: the path is in use, cannot be written, or no config can hold the settings.
        """
        new, content = self.path / NEW, config.to_yaml()
        if len(content) > MAX_YAML_CHARACTERS:
            raise RunError(
                f"the settings take over {MAX_YAML_CHARACTERS:,} characters, the maximum of a "
                "config; shorten the longest (text.extra_characters: characters of the base run)"
            )
        try:
            # again: another process may have created one since the start
            self.require_unused(replace=replace)
            self.require_own()
            if self.moved_from is not None:
                raise RunError(f"{self.moved_from} was renamed to {self.path}; start again")
            if text != self.new_text:
                self._delete_new()
            (new / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            if text is not None and text != self.new_text:
                link_files(text, self.new_text)
            (self.new_text / JOURNAL).unlink(missing_ok=True)
            tokenizer.save(new / TOKENIZER)
            write_atomically(new / CONFIG, content.encode())
            if has_results(self.path) or find_foreign_file(self.path) is not None:
                self._rename_old_run()
            else:
                delete_run_files(self.path, keep=(LOCK, NEW))
                for name in (TOKENIZER, TEXT, CHECKPOINTS, CONFIG):  # the config makes it a run
                    if exists(new / name):
                        os.rename(new / name, self.path / name)
                new.rmdir()
            sync_directory(self.path)
            if self.has_text():
                self._text_flush = sync_files(self.path / TEXT, entry_names(self.path / TEXT))
        except OSError as error:
            raise self._unwritable(error) from None
        self.is_created = True
        return self

    def _rename_old_run(self) -> None:
        """Rename the run here, with the new one in its subfolder, and move that one here.

        Of a link to a run, it is the folder that is renamed: the link may be on another disk.
        """
        lock, path = FileLock(self.path / NEW / LOCK), self.path
        if path.is_symlink():
            path = path.resolve()
        old = unused_old_name(path)
        is_locked = self._lock.is_locked
        if IS_WINDOWS:
            self._lock.release()
        elif is_locked:
            lock.acquire()  # of the new folder
        os.rename(path, old)
        try:
            os.rename(old / NEW, path)
        except OSError:
            os.rename(old, path)
            raise
        sync_directory(path.parent)
        self._lock.release()
        if not IS_WINDOWS:
            self._lock = lock
        elif is_locked:
            self._acquire()
        if is_locked and not IS_WINDOWS:
            self._watch()
        logger.warning(f"the run that was {self.path} is now {old}")

    def require_space(self, n_bytes: int) -> None:
        """Check that the disk has `n_bytes` free, else raise OSError (ENOSPC)."""
        folder = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if shutil.disk_usage(folder).free < n_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def require_room(self, n_checkpoints: int, n_bytes: int) -> None:
        """Raise RunError unless the disk has room for `n_checkpoints` of `n_bytes` each."""
        n_bytes *= n_checkpoints
        try:
            self.require_space(n_bytes)
        except OSError:
            what, remedy = "a checkpoint", "free some space"
            if n_checkpoints > 1:
                what = f"{n_checkpoints} checkpoints"
                remedy += ", lower train.keep_last, or name another place with --out"
            raise RunError(
                f"{self.path} needs {n_bytes / 1e6:,.1f} MB of disk for {what}, and less is free; "
                f"{remedy}"
            ) from None

    def write_config(self, config: Config) -> None:
        """Write `config.yaml`; OSError as of `require_own`."""
        self.require_own()
        write_atomically(self.path / CONFIG, config.to_yaml().encode())

    def save(
        self,
        *,
        config: Config,
        tokenizer: CharTokenizer,
        state: RunState,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
    ) -> Path:
        """Commit a checkpoint of `state.step`, delete old ones, return its folder.

        The text of a new run is on disk before its first checkpoint. If a write fails (OSError),
        earlier checkpoints are unchanged.
        """
        files = {
            MODEL: serialize(model),
            OPTIMIZER: serialize(optimizer),
            CONFIG: [config.to_yaml().encode()],
            TOKENIZER: [tokenizer.to_json().encode()],
            STATE: [state.to_json()],
        }
        self.require_own()
        self.require_space(sum(len(chunk) for chunks in files.values() for chunk in chunks))
        self.checkpoints.mkdir(exist_ok=True)
        if self._text_flush is not None:  # training has not waited for it
            self._text_flush.result()
        folder = write_checkpoint(self.checkpoints, state.step, files)
        prune_checkpoints(self.checkpoints, state.best_step, config.train.keep_last, folder)
        return folder

    def copy_to(self, copy: "RunFolder", best_step: int | None) -> None:
        """Add all but the other checkpoints to a copy that has the last one, and the metrics.

        What the disk has no room for is left out or cut; readers find it by its checksum.
        """

        def ignore(folder: str, names: list[str]) -> set[str]:
            is_outer = Path(folder) == self.checkpoints
            return {*names} - {name_of(best_step or 0)} if is_outer else {LOCK}

        with suppress(OSError):
            self.require_own()
            shutil.copytree(self.path, copy.path, True, ignore, dirs_exist_ok=True)  # links as such
        with suppress(OSError):
            copy.metrics.unwritten = self.metrics.unwritten
            copy.metrics.append()

    @contextmanager
    def kept(self, step: int) -> Iterator[None]:
        """Protect a checkpoint from deletion in the block, and from then on if it succeeds.

        Raises:
            RunError: it is gone, or the folder cannot be written.
        """
        was_kept = self.is_kept(step)
        path = self.checkpoints / name_of(step) / KEEP
        try:
            if not was_kept:
                path.touch()
                sync_directory(path.parent)
        except OSError as error:
            raise RunError(
                f"{path} cannot be written ({reason_of(error)}); if the run is being trained, try "
                "again: the checkpoint may have been replaced"
            ) from None
        try:
            yield
        except BaseException:
            if not was_kept:
                with suppress(OSError):
                    path.unlink()
            raise

    def is_kept(self, step: int) -> bool:
        """Return whether a checkpoint is protected."""
        return exists(self.checkpoints / name_of(step) / KEEP)

    def describe_edits(self, config: Config) -> str | None:
        """Return a sentence if `config.yaml` differs from a checkpoint's config, which is used."""
        path = self.path / CONFIG
        try:
            edited = parse_config(read_regular(path, MAX_METADATA_BYTES), path)
            differences = ", ".join(edited.differing_keys(config))
        except FileNotFoundError:
            return None
        except (ChargptError, OSError, ValueError) as error:
            differences = f"that it cannot be read ({error})"
        if not differences:
            return None
        return (
            f"{path} differs from the checkpoint in {differences}; the checkpoint's settings "
            "are used, and -s KEY=VALUE changes them"
        )

    def load(self, which: str, *, optimizer: bool = True) -> Checkpoint:
        """Return a checkpoint, every byte checked; instead of a damaged one the newest intact one.

        Which checkpoints are skipped, and why, is logged. If a training process saves at the same
        time and deletes what is read, it is read again.

        Args:
            which: `best`, `latest`, or a step's number, for which there is no substitute.
            optimizer: whether to read the optimizer state, which only training needs.

        Raises:
            UnreadableError: the system cannot read the checkpoint, which may be intact.
            RunError: no checkpoint is intact.
        """
        saved, skipped = load_checkpoint(self.checkpoints, which, optimizer=optimizer)
        for sentence in skipped:
            logger.warning(sentence)
        if skipped:
            logger.warning(f"{saved.folder.name} is used instead")
        return saved

    def has_text(self) -> bool:
        """Return whether the run has a text of its own."""
        return exists(self.path / TEXT)

    def adopt_text(self) -> None:
        """Make the prepared text in `new_text` the text of a run that has none."""
        (self.new_text / JOURNAL).unlink(missing_ok=True)
        sync_files(self.new_text, entry_names(self.new_text)).result()
        os.rename(self.new_text, self.path / TEXT)
        sync_directory(self.path)

    def read_text(
        self, settings: TextConfig, tokenizer: CharTokenizer, key: str | None, *, waits: bool = True
    ) -> Corpus:
        """Return the run's own text; arguments and errors are those of `read_prepared`.

        Raises:
            RunError: the run has none.
        """
        if not self.has_text():
            raise RunError(
                f"{self.path} has no text of its own: it was deleted, or an earlier version of "
                "chargpt has trained the run; give it the same text, under any name, with `chargpt "
                f"train TEXT --resume --out {quoted(self.path)}`, which also finishes its steps"
            )
        return read_prepared(self.path / TEXT, settings, tokenizer, key, waits=waits)


def link_files(source: Path, target: Path) -> None:
    """Put the files of a prepared text into another folder, as links if the file system has them.

    Nothing writes to them any more.
    """
    target.mkdir()
    for name in entry_names(source):
        try:
            os.link(source / name, target / name)
        except OSError:
            shutil.copyfile(source / name, target / name)


def unused_old_name(path: Path) -> Path:
    """Return NAME.old, or NAME.old-N with the first free number from 2 on."""
    numbered = (path.with_name(f"{path.name}.old-{number}") for number in itertools.count(2))
    candidates = itertools.chain([path.with_name(f"{path.name}.old")], numbered)
    return next(each for each in candidates if not exists(each))
