"""The files of a run folder, by their exact names: nothing else in it is ever deleted.

runs/<name>/config.yaml  tokenizer.json  metrics.jsonl  checkpoints/
            mixture.safetensors  report.html  play.html  tensorboard/
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from chargpt.files import TEMPORARY, entry_names, exists, open_regular
from chargpt.store.checkpoint import (
    CONFIG,
    FILES,
    KEEP,
    MAX_TEXT_BYTES,
    TOKENIZER,
    UNFINISHED,
)
from chargpt.store.commit import NAME
from chargpt.text.tokenizer import FORMAT

METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"
MIXTURE = "mixture.safetensors"  # store/mixture.py
REPORT, PLAY, TENSORBOARD, LOCK = "report.html", "play.html", "tensorboard", ".lock"
REPLACED = ".replaced"  # the run that `--force` replaces, until the new one has saved
RUN_FILES = (METRICS, REPORT, PLAY, MIXTURE, CONFIG, TOKENIZER)
POINTERS = ("latest.json", "best.json")
EVENTS = re.compile(r"events\.out\.tfevents\..+")  # TensorBoard's


def is_run(path: Path) -> bool:
    """Return whether a folder is a run.

    Raises:
        OSError: it cannot be read.
    """
    names = entry_names(path)
    return (CONFIG in names and TOKENIZER in names) or has_checkpoint(path)


def is_readable_run(path: Path) -> bool:
    """Return whether a folder is a run, as far as this user can read it."""
    try:
        return is_run(path)
    except OSError:
        return False


def has_checkpoint(path: Path) -> bool:
    """Return whether a run, or the one it is to replace, has a checkpoint, intact or damaged.

    Raises:
        OSError: the folder cannot be read.
    """
    return has_checkpoint_itself(path) or has_checkpoint_itself(path / REPLACED)


def has_checkpoint_itself(path: Path) -> bool:
    """Return whether a run has saved a checkpoint, intact or damaged."""
    checkpoints = path / CHECKPOINTS
    if exists(checkpoints) and stat.S_ISLNK(checkpoints.lstat().st_mode):
        return True  # its target may be on a disk that is not mounted now
    return any(NAME.fullmatch(name) for name in entry_names(checkpoints))


def find_foreign_file(path: Path) -> str | None:
    """Return the path within a run's folder of a file that no run writes, or None.

    Raises:
        OSError: the folder cannot be read.
    """
    for parts in _entries(path):
        if not _is_run_file(parts):
            return "/".join(parts)
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
        with open_regular(path, MAX_TEXT_BYTES) as file:
            return FORMAT.encode() in file.read(100)
    except ValueError:
        return False


def delete_run_files(path: Path, part: str | None = None) -> None:
    """Delete the files that runs write in a folder, and the folders that are then empty.

    The lock, the replaced run, and all that cannot be deleted remain. With `part`, only the file or
    folder of this name is deleted.
    """
    for parts in _entries(path):
        entry = path.joinpath(*parts)
        if _is_run_file(parts) and parts[0] not in (LOCK, REPLACED) and part in (None, parts[0]):
            with suppress(OSError):
                entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _entries(folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield the relative path of everything in a folder, the innermost first."""

    def reject(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    for root, folders, files in os.walk(folder, topdown=False, onerror=reject):
        inside = Path(root).relative_to(folder).parts
        for name in (*folders, *files):
            yield (*inside, name)


def _is_run_file(parts: tuple[str, ...]) -> bool:
    """Return whether a run writes a file or folder at this relative path."""
    first, rest = parts[0], parts[1:]
    if first == REPLACED:
        return not rest or (rest[0] != REPLACED and _is_run_file(rest))
    if not rest:
        return first in (CHECKPOINTS, TENSORBOARD, LOCK) or _is_written(first, RUN_FILES)
    if first == TENSORBOARD:
        return len(rest) == 1 and EVENTS.fullmatch(rest[0]) is not None
    if first != CHECKPOINTS:
        return False
    if len(rest) == 1:
        return _is_step_folder(rest[0]) or _is_written(rest[0], POINTERS)
    return _is_step_folder(rest[0]) and len(rest) == 2 and _is_written(rest[1], (*FILES, KEEP))


def _is_step_folder(name: str) -> bool:
    return bool(NAME.fullmatch(name) or UNFINISHED.fullmatch(name))


def _is_written(name: str, names: tuple[str, ...]) -> bool:
    """Return whether a name is one of these, or what a killed write of one leaves."""
    leftover = TEMPORARY.fullmatch(name)
    return (leftover[1] if leftover else name) in names
