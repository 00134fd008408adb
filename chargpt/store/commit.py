"""Atomic directories: a reader finds a directory complete, or not at all.

A directory is written as `NAME.PID.tmp`: every file is flushed to disk, the manifest (size and
SHA-256 of each file) last. Then it is flushed and renamed to `NAME`, and its parent is flushed.
Readers check every byte against the manifest, and read no file that is larger than they expect.
"""

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from chargpt.errors import RunError
from chargpt.files import (
    Buffers,
    entry_names,
    exists,
    read_json,
    read_regular,
    reading,
    sync_directory,
    to_json,
    write_synced,
)

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1_000_000


def commit(folder: Path, files: Mapping[str, Buffers]) -> None:
    """Write a directory atomically; if that fails (OSError), leave all as it was.

    Args:
        folder: the directory to make. One of that name is replaced; files in it that are not
            among `files` are kept.
        files: content by file name.
    """
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    names = (*files, MANIFEST)
    try:
        temporary.mkdir()
        with ThreadPoolExecutor(len(files)) as pool:  # hashing takes longer than writing
            digests = {name: pool.submit(_sha256, chunks) for name, chunks in files.items()}
            for name, chunks in files.items():
                write_synced(temporary / name, chunks)
        manifest = {
            name: {"size": sum(map(len, chunks)), "sha256": digests[name].result()}
            for name, chunks in files.items()
        }
        write_synced(temporary / MANIFEST, [to_json({"files": manifest})])
        sync_directory(temporary)
        old = _set_aside(folder)
        os.rename(temporary, folder)
    except BaseException:
        restore_set_aside(folder, names)
        remove(temporary, names)
        raise
    sync_directory(folder.parent)
    restore_set_aside(folder, names)
    remove(old, names)


def _sha256(chunks: Buffers) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def discard(folder: Path, names: Collection[str]) -> None:
    """Delete a directory, renamed first so that no part of it can be taken for a complete one.

    One that holds other files than `names` stays, also if another process has just added it.
    """
    if set(entry_names(folder)) <= set(names):
        aside = _set_aside(folder)
        if set(entry_names(aside)) <= set(names):
            remove(aside, names)
        else:
            os.rename(aside, folder)


def _set_aside(folder: Path) -> Path:
    """Rename a directory, if there is one, so that readers do not find it; return its new path."""
    aside = folder.with_name(f"{folder.name}.old.tmp")
    if exists(folder):
        os.rename(folder, aside)
    return aside


def restore_set_aside(folder: Path, names: Iterable[str]) -> None:
    """Undo a replacement that a kill interrupted, or move files not in `names` to the new one."""
    aside = folder.with_name(f"{folder.name}.old.tmp")
    if not exists(folder) and exists(aside / MANIFEST):
        os.rename(aside, folder)
    elif exists(folder):
        for name in set(entry_names(aside)) - set(names):
            os.rename(aside / name, folder / name)


def remove(folder: Path, names: Iterable[str]) -> None:
    """Delete the named files of a directory, and the directory unless it holds others."""
    for name in sorted(names, key=lambda name: name != MANIFEST):  # without it none is restored
        with suppress(OSError):
            (folder / name).unlink()
    with suppress(OSError):
        folder.rmdir()


def read(folder: Path, max_bytes: Mapping[str, int]) -> dict[str, bytes]:
    """Return files of a committed directory, every byte checked against the manifest.

    Args:
        folder: committed.
        max_bytes: the files to read, and the largest size accepted for each.

    Raises:
        UnreadableError: the system cannot read a file now.
        RunError: a file is missing, too large, changed, or not a regular file.
    """
    listed = _read_manifest(folder)
    files = {}
    for name, limit in max_bytes.items():
        path = folder / name
        with reading(path):
            content = read_regular(path, limit)
        if (len(content), _sha256([content])) != listed.get(name):
            raise RunError(f"{path} has changed since it was saved; use another checkpoint")
        files[name] = content
    return files


def _read_manifest(folder: Path) -> dict[str, tuple[object, object]]:
    """Return the size and SHA-256 of each file that a directory's manifest lists."""
    path = folder / MANIFEST
    with reading(path):
        if folder.is_symlink():
            raise ValueError("its folder is a symbolic link")
        try:
            files = read_json(path, MAX_MANIFEST_BYTES)["files"]
            return {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}
        except (AttributeError, KeyError, TypeError):
            raise ValueError("it is malformed") from None
