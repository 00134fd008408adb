"""The files of a run folder, by their exact names: nothing else in it is ever deleted.

runs/<name>/config.yaml  tokenizer.json  metrics.jsonl  checkpoints/
            mixture.safetensors  report.html  play.html  tensorboard/
            .lock  .replaced/
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from chargpt.files import entry_names, exists, name_pattern, open_regular
from chargpt.store.checkpoint import CONFIG, FILES, KEEP, MAX_METADATA_BYTES, TOKENIZER, UNFINISHED
from chargpt.store.commit import CHECKPOINT_NAME, MANIFEST
from chargpt.text.tokenizer import FORMAT

METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"
MIXTURE_FILE = "mixture.safetensors"  # store/mixture.py
REPORT, PLAY, TENSORBOARD, LOCK = "report.html", "play.html", "tensorboard", ".lock"
REPLACED = ".replaced"  # folder of the run that `--force` replaces, until the new one has saved
RESULTS = (METRICS, REPORT, PLAY, MIXTURE_FILE)
RUN_FILES = (*RESULTS, CONFIG, TOKENIZER)
POINTERS = ("latest.json", "best.json")
# The folder that holds `checkpoints/` counts as the run: moved aside first and put back last.
REPLACED_PARTS = (CHECKPOINTS, TENSORBOARD, *RUN_FILES)
RUN_PATHS = re.compile(  # of all that a run writes, relative to its folder
    rf"""
    {re.escape(REPLACED)} |
    ({re.escape(REPLACED)}/)? (
        {re.escape(LOCK)} |
        {name_pattern(RUN_FILES)} |
        {TENSORBOARD} (/events\.out\.tfevents\.[^/\n]+)? |
        {CHECKPOINTS} (/{name_pattern(POINTERS)})? |
        {CHECKPOINTS}/({CHECKPOINT_NAME.pattern} | {UNFINISHED.pattern})
            (/{name_pattern((*FILES, KEEP))})?
    )""",
    re.VERBOSE,
)


def is_run(path: Path) -> bool:
    """Return whether a folder is a run, or raise OSError if it cannot be read."""
    names = entry_names(path)
    if MANIFEST in names:  # a checkpoint
        return False
    return (CONFIG in names and TOKENIZER in names) or has_checkpoint(path)


def is_readable_run(path: Path) -> bool:
    """Return whether a folder is a run, as far as this user can read it."""
    try:
        return is_run(path)
    except OSError:
        return False


def has_checkpoint(path: Path) -> bool:
    """Return whether a run, or the one it is to replace, has a checkpoint, intact or damaged."""
    return has_own_checkpoint(path) or has_own_checkpoint(path / REPLACED)


def has_own_checkpoint(path: Path) -> bool:
    """Return whether a run has saved a checkpoint, intact or damaged."""
    checkpoints = path / CHECKPOINTS
    if exists(checkpoints) and stat.S_ISLNK(checkpoints.lstat().st_mode):
        return True  # its target may be on a disk that is not mounted now
    return any(CHECKPOINT_NAME.fullmatch(name) for name in entry_names(checkpoints))


def has_results(path: Path) -> bool:
    """Return whether a run has written more than the files that it starts with."""
    names = entry_names(path)
    return any(name in names for name in RESULTS) or has_checkpoint(path)


def find_foreign_file(path: Path) -> str | None:
    """Return the path within a run's folder of a file that no run writes, or None."""
    for entry in _entries(path):
        if not RUN_PATHS.fullmatch(entry):
            return entry
    checkpoints = path / CHECKPOINTS
    if exists(checkpoints) and not stat.S_ISDIR(checkpoints.lstat().st_mode):
        return CHECKPOINTS  # a file or a link
    names = entry_names(path)
    if REPLACED in names or (TOKENIZER in names and _is_tokenizer(path / TOKENIZER)):
        return None
    # a run writes its tokenizer first: without it, these files are somebody's own
    return next((name for name in RUN_FILES if name in names), None)


def _is_tokenizer(path: Path) -> bool:
    try:
        with open_regular(path, MAX_METADATA_BYTES) as file:
            return FORMAT.encode() in file.read(100)
    except ValueError:
        return False


def delete_run_files(path: Path, part: str | None = None) -> None:
    """Delete the files that runs write in a folder, and the folders that are then empty.

    The lock, the replaced run, and all that cannot be deleted remain. With `part`, only the file or
    folder of this name is deleted.
    """
    for name in _entries(path):
        entry, first = path / name, name.partition("/")[0]
        is_deleted = first not in (LOCK, REPLACED) and part in (None, first)
        if is_deleted and RUN_PATHS.fullmatch(name):
            with suppress(OSError):
                entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _entries(folder: Path) -> Iterator[str]:
    """Yield the relative path of everything in a folder, the innermost first."""

    def reject(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    for root, folders, files in os.walk(folder, topdown=False, onerror=reject):
        inside = Path(root).relative_to(folder).parts
        for name in (*folders, *files):
            yield "/".join((*inside, name))


def move_aside(run: Path) -> None:
    """Move the files of a run that has saved into its folder `.replaced`."""
    if not has_own_checkpoint(run):
        return
    (run / REPLACED).mkdir(exist_ok=True)
    for name in REPLACED_PARTS:
        if exists(run / name):
            os.rename(run / name, run / REPLACED / name)


def restore_replaced(run: Path) -> None:
    """Put the old run back, unless the new one has saved; then delete the old one."""
    if not exists(run / REPLACED):
        return
    if not has_own_checkpoint(run):
        for name in reversed(REPLACED_PARTS):
            if exists(run / REPLACED / name):
                delete_run_files(run, name)
                os.replace(run / REPLACED / name, run / name)
    delete_replaced(run)


def delete_replaced(run: Path) -> None:
    """Delete the old run; what cannot be deleted now is left to the next call."""
    with suppress(OSError):
        if exists(run / REPLACED):
            delete_run_files(run / REPLACED)
            (run / REPLACED).rmdir()
