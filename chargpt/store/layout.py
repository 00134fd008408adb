"""The files of a run folder, by their exact names: nothing else in it is ever deleted.

runs/<name>/config.yaml  tokenizer.json  text/  metrics.jsonl  checkpoints/
            mixture.safetensors  report.html  play.html  tensorboard/  .lock
            .new/                         a start that has not created its run yet
"""

import itertools
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from chargpt.files import entry_names, exists, name_pattern, open_regular
from chargpt.store.checkpoint import (
    CHECKPOINT_NAME,
    CONFIG,
    FILES,
    KEEP,
    MAX_METADATA_BYTES,
    TOKENIZER,
    UNFINISHED,
)
from chargpt.store.commit import MANIFEST
from chargpt.text.prepare import TEXT_FILES
from chargpt.text.tokenizer import FORMAT

METRICS, CHECKPOINTS, TEXT = "metrics.jsonl", "checkpoints", "text"
MIXTURE_FILE = "mixture.safetensors"  # store/mixture.py
REPORT, PLAY, TENSORBOARD, LOCK = "report.html", "play.html", "tensorboard", ".lock"
NEW = ".new"  # folder in which a run is made: `RunFolder.create` moves its content into the run
RESULTS = (METRICS, REPORT, PLAY, MIXTURE_FILE)
RUN_FILES = (*RESULTS, CONFIG, TOKENIZER)
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


def is_run(path: Path) -> bool:
    """Return whether a folder is a run, or raise OSError if it cannot be read."""
    names = entry_names(path)
    if MANIFEST in names:  # a checkpoint
        return False
    return (CONFIG in names and TOKENIZER in names) or has_checkpoint(path)


def is_readable_run(path: Path) -> bool:
    """Return whether a folder is a run, as far as this user can read it."""
    try:
        return path.name != NEW and is_run(path)
    except OSError:
        return False


def has_checkpoint(path: Path) -> bool:
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
    if TOKENIZER in names and _is_tokenizer(path / TOKENIZER):
        return None
    # a run gets its tokenizer first: without it, these files are somebody's own
    return next((name for name in (*RUN_FILES, TEXT) if name in names), None)


def _is_tokenizer(path: Path) -> bool:
    try:
        with open_regular(path, MAX_METADATA_BYTES) as file:
            return FORMAT.encode() in file.read(100)
    except ValueError:
        return False


def delete_run_files(path: Path, keep: tuple[str, ...] = (LOCK,)) -> None:
    """Delete the files that runs write in a folder, and the folders that are then empty.

    What cannot be deleted remains, and so do the files and folders with the names in `keep`.
    """
    for name in _entries(path):
        entry = path / name
        if name.partition("/")[0] not in keep and RUN_PATHS.fullmatch(name):
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


def unused_old_name(path: Path) -> Path:
    """Return NAME.old, or NAME.old-N with the first free number from 2 on."""
    numbered = (path.with_name(f"{path.name}.old-{number}") for number in itertools.count(2))
    candidates = itertools.chain([path.with_name(f"{path.name}.old")], numbered)
    return next(each for each in candidates if not exists(each))
