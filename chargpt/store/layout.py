"""The files of a run, by their names: recognising a run, its links and foreign files; deletion.

runs/<name>/config.yaml  tokenizer.json  text/  metrics.jsonl  checkpoints/
            mixture.safetensors  report.html  play.html  tensorboard/  .lock
            .new/                         a start that has not created its run yet

Nothing else in a run's folder is ever deleted, and nothing is listed, read, written or deleted
through a link in place of one of them.
"""

import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from chargpt.errors import RunError, reason_of
from chargpt.files import (
    entry_names,
    exists,
    is_missing,
    name_pattern,
    open_regular,
    reading,
    suppress_missing,
)
from chargpt.log import logger
from chargpt.store.checkpoint import CHECKPOINT_NAME, CONFIG, FILES, KEEP, TOKENIZER, UNFINISHED
from chargpt.store.commit import MANIFEST
from chargpt.text.prepare import TEXT_FILES
from chargpt.text.tokenizer import FORMAT

METRICS, CHECKPOINTS, TEXT = "metrics.jsonl", "checkpoints", "text"
MIXTURE_FILE = "mixture.safetensors"  # store/mixture.py
REPORT, PLAY, TENSORBOARD, LOCK = "report.html", "play.html", "tensorboard", ".lock"
NEW = ".new"  # folder in which a run is made: `RunFolder.create` moves its content into the run
RESULTS = (REPORT, PLAY, MIXTURE_FILE)
RUN_FILES = (METRICS, *RESULTS, CONFIG, TOKENIZER)
POINTERS = ("latest.json", "best.json")  # of runs by earlier versions
RUN_PATHS = re.compile(  # of all that a run writes, relative to its folder
    rf"""
    {re.escape(NEW)} |
    ({re.escape(NEW)}/)? (
        {re.escape(LOCK)} |
        {name_pattern(RUN_FILES)} |
        {TEXT} (/{name_pattern(TEXT_FILES)})? |
        {TENSORBOARD} (/events\.out\.tfevents\.[^/\n]+)? |
        {CHECKPOINTS} (/{name_pattern(POINTERS)})? |
        {CHECKPOINTS}/({CHECKPOINT_NAME.pattern} | {UNFINISHED.pattern})
            (/{name_pattern((*FILES, KEEP))})?
    )""",
    re.VERBOSE,
)

STARTS = {  # patterns of the first bytes of files whose names are others' too
    LOCK: b"",
    TOKENIZER: b".*%b.*" % FORMAT.encode(),
    METRICS: rb'{"step".*',
    f"{TENSORBOARD}/": rb".*brain\.Event.*",
}


def identity_of(path: Path | int) -> tuple[int, int] | None:
    """Return device and inode of the folder at a path or descriptor; None if there is none."""
    with suppress_missing():
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return None


def find_link(path: Path) -> str | None:
    """Return the relative path of a link, pipe or device in place of a file or folder of a run."""
    pending = [""]
    while pending:
        parent, entries = pending.pop(), list[os.DirEntry[str]]()
        with suppress_missing():  # a checkpoint, deleted by a training process
            entries += os.scandir(path / parent)
        for entry in entries:
            name = parent + entry.name
            if not RUN_PATHS.fullmatch(name):
                continue
            is_junction = getattr(entry, "is_junction", lambda: False)()  # of Windows
            if entry.is_dir(follow_symlinks=False) and not is_junction:
                pending.append(f"{name}/")
            elif not entry.is_file(follow_symlinks=False):
                return str(name)
    return None


def require_no_links(path: Path) -> None:
    """Reject a run in whose folder a link, pipe or device is in place of a file or folder of it.

    Raises:
        UnreadableError: the folder cannot be read now.
        RunError: there is one.
    """
    with reading(path):
        link = find_link(path)
    if link is not None:
        raise RunError(
            f"{path / link} is a symbolic link, a pipe or a device, which a run may not hold; "
            "delete it, or put what it stands for in its place"
        )


def is_run(path: Path) -> bool:
    """Return whether a folder is a run, or raise OSError if it cannot be read."""
    names = entry_names(path)
    if MANIFEST in names:  # a checkpoint
        return False
    return (CONFIG in names and TOKENIZER in names) or has_checkpoint(path)


def is_readable_run(path: Path, *, logs: bool = False) -> bool:
    """Return whether a folder is a run, as far as this user can read it; log if it cannot be."""
    try:
        return path.name != NEW and is_run(path)
    except OSError as error:
        if logs:
            logger.warning(f"{path} cannot be read ({reason_of(error)}): it may be a run")
        return False


def find_runs(parent: Path, depth: int = 2, *, logs: bool = False) -> Iterator[Path]:
    """Yield the runs at most `depth` levels deep in a folder, none in a run or through a link.

    With `logs`, folders that cannot be read are logged.
    """
    for path in parent.glob("*"):
        if os.path.islink(path):
            continue
        if is_readable_run(path, logs=logs):
            yield path
        elif depth > 1:
            yield from find_runs(path, depth - 1, logs=logs)


def is_abandoned(path: Path) -> bool:
    """Return whether a folder holds only what a start that was killed has left."""
    with suppress(OSError, NotImplementedError):  # one that lives has the lock, if there are locks
        names = {*entry_names(path)} if not path.is_symlink() else set()
        if NEW in names <= {NEW, LOCK} and find_link(path) is None:
            with FileLock(path / LOCK, timeout=0):
                return True
    return False


def has_checkpoint(path: Path) -> bool:
    """Return whether a run has saved a checkpoint, intact or damaged."""
    checkpoints = path / CHECKPOINTS
    if exists(checkpoints) and stat.S_ISLNK(checkpoints.lstat().st_mode):
        return True  # its target may be on a disk that is not mounted now
    return any(CHECKPOINT_NAME.fullmatch(name) for name in entry_names(checkpoints))


def has_results(path: Path) -> bool:
    """Return whether a run has a checkpoint, or what is made from one."""
    names = entry_names(path)
    return any(name in names for name in RESULTS) or has_checkpoint(path)


def find_foreign_file(path: Path) -> str | None:
    """Return the path within a run's folder of a file that no run writes, or None."""
    for entry in _entries(path):
        if not _is_own(path, entry):
            return entry
    checkpoints = path / CHECKPOINTS
    if exists(checkpoints) and not stat.S_ISDIR(checkpoints.lstat().st_mode):
        return CHECKPOINTS  # a file or a link
    names = entry_names(path)
    if TOKENIZER in names:
        return None
    # a run gets its tokenizer first: without it, these files are somebody's own
    return next((name for name in (*RUN_FILES, TEXT) if name in names), None)


def _is_own(path: Path, name: str) -> bool:
    """Return whether a path in a run's folder is one that a run writes, and begins like it."""
    start = next((start for prefix, start in STARTS.items() if name.startswith(prefix)), None)
    if start is None or not RUN_PATHS.fullmatch(name):
        return RUN_PATHS.fullmatch(name) is not None
    if not (path / name).lstat().st_size:  # Windows does not let a locked file be read
        return name != TOKENIZER
    try:
        with open_regular(path / name, sys.maxsize) as file:
            return re.fullmatch(start, file.read(100), re.DOTALL) is not None
    except ValueError:
        return False


def delete_run_files(path: Path, keep: tuple[str, ...] = (LOCK,)) -> None:
    """Delete the files that runs write in a folder, and the folders that are then empty.

    What cannot be deleted remains, and so do the files and folders with the names in `keep`. The
    config goes first: without it the rest, after a kill, is no run.
    """
    for name in sorted(_entries(path), key=lambda name: name != CONFIG):
        entry = path / name
        if name.partition("/")[0] not in keep and RUN_PATHS.fullmatch(name):
            with suppress(OSError):
                entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _entries(folder: Path) -> Iterator[str]:
    """Yield the relative path of everything in a folder, the innermost first."""

    def reject(error: OSError) -> None:
        if not is_missing(error):
            raise error

    for root, folders, files in os.walk(folder, topdown=False, onerror=reject):
        inside = Path(root).relative_to(folder).parts
        for name in (*folders, *files):
            yield "/".join((*inside, name))
