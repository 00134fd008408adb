"""Atomic directories: a reader finds a directory complete, or not at all.

A directory is written as `NAME.tmp`: every file is flushed to disk, the manifest (size and SHA-256
of each file) last. Then it is flushed and renamed to `NAME`, and its parent is flushed. Pointer
files (`latest.json`) name one directory and the SHA-256 of its manifest. Readers check every byte
against the manifest, and read no file that is larger than they expect.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from chargpt.errors import RunError, UnreadableError
from chargpt.files import (
    Buffers,
    entry_names,
    exists,
    read_json,
    read_regular,
    sync_directory,
    to_json,
    write_atomically,
    write_synced,
)

MANIFEST = "manifest.json"
CHECKPOINT_NAME = re.compile(r"step-[0-9]{8,18}")  # of a checkpoint's directory
MAX_JSON_BYTES = 64_000_000


def commit(folder: Path, files: Mapping[str, Buffers], metadata: Mapping[str, object]) -> None:
    """Write a directory atomically; if that fails (OSError), leave all as it was.

    Args:
        folder: the directory to make. One of that name is replaced; files in it that are not
            among `files` are kept.
        files: content by file name.
        metadata: further entries of the manifest, which `read` compares.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    if exists(temporary):  # not a leftover of ours, which was deleted before
        temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    names = (*files, MANIFEST)
    try:
        temporary.mkdir(parents=True)
        with ThreadPoolExecutor(len(files)) as pool:  # hashing takes longer than writing
            digests = {name: pool.submit(_sha256, chunks) for name, chunks in files.items()}
            for name, chunks in files.items():
                write_synced(temporary / name, chunks)
        manifest = {
            name: {"size": sum(map(len, chunks)), "sha256": digests[name].result()}
            for name, chunks in files.items()
        }
        write_synced(temporary / MANIFEST, [to_json({**metadata, "files": manifest})])
        sync_directory(temporary)
        old = _set_aside(folder)
        try:
            os.rename(temporary, folder)
        except BaseException:
            if exists(old):
                os.rename(old, folder)
            raise
    except BaseException:
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


def discard(folder: Path, names: Iterable[str]) -> None:
    """Delete a directory, renamed first so that no part of it can be taken for a complete one."""
    remove(_set_aside(folder), names)


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


def write_pointer(parent: Path, pointer: str, folder: Path) -> None:
    """Make the pointer file `pointer`.json name a directory and its manifest's SHA-256."""
    content = {"checkpoint": folder.name, "manifest_sha256": _manifest_sha256(folder)}
    write_atomically(parent / f"{pointer}.json", to_json(content))


def read_pointer(parent: Path, pointer: str) -> tuple[Path, str]:
    """Return the directory that a pointer (`latest`, `best`) names, and its manifest's SHA-256.

    Raises:
        UnreadableError: the pointer exists and cannot be read.
        RunError: it is missing or malformed.
    """
    path = parent / f"{pointer}.json"
    content = _read_json(path)
    target, digest = str(content.get("checkpoint")), str(content.get("manifest_sha256"))
    if not CHECKPOINT_NAME.fullmatch(target):
        raise RunError(f"{path} names no checkpoint; resuming the run repairs it")
    return parent / target, digest


def resolve_pointer(parent: Path, pointer: str) -> Path:
    """Return the directory that a pointer names, or raise RunError if its manifest is another."""
    folder, digest = read_pointer(parent, pointer)
    _read_manifest(folder)
    try:
        is_same = _manifest_sha256(folder) == digest
    except OSError as error:
        raise read_error(folder / MANIFEST, error) from None
    if not is_same:
        raise RunError(f"{folder} is not the checkpoint that {pointer}.json names; use another")
    return folder


def _manifest_sha256(folder: Path) -> str:
    return _sha256([read_regular(folder / MANIFEST, MAX_JSON_BYTES)])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        raise read_error(path, error) from None


def read_error(path: Path, error: Exception) -> RunError:
    """Return the error about a file: it is damaged or missing, or the system cannot read it."""
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | NotADirectoryError):
        return UnreadableError(
            f"{path} cannot be read ({error.strerror}); try again, and if that does not help, "
            "check the disk and the permissions"
        )
    cause = error.strerror if isinstance(error, OSError) else error
    return RunError(f"{path} cannot be read ({cause}); restore it or use another checkpoint")


def _read_manifest(
    folder: Path, metadata: Mapping[str, object] | None = None
) -> dict[str, tuple[int, str]]:
    """Return the size and SHA-256 of each file that a manifest lists; arguments as for `read`."""
    path = folder / MANIFEST
    try:
        is_link = stat.S_ISLNK(folder.lstat().st_mode)
    except OSError as error:
        raise read_error(folder, error) from None
    if is_link:
        raise RunError(f"{folder} is a symbolic link, not a checkpoint; restore it")
    content = _read_json(path)
    if any(content.get(key) != value for key, value in (metadata or {}).items()):
        raise RunError(f"{path} belongs to another checkpoint; use another")
    files = content.get("files")
    if not isinstance(files, dict):
        raise RunError(f"{path} lists no files; use another checkpoint")
    listed = {}
    for name, entry in files.items():
        entry = entry if isinstance(entry, dict) else {}
        size, digest = entry.get("size"), entry.get("sha256")
        if name != Path(name).name or not isinstance(size, int) or not isinstance(digest, str):
            raise RunError(f"{path} is malformed at {name!r:.80}; use another checkpoint")
        listed[name] = (size, digest)
    return listed


def read(
    folder: Path, max_bytes: Mapping[str, int], metadata: Mapping[str, object] | None = None
) -> dict[str, bytes]:
    """Return files of a committed directory, every byte checked against the manifest.

    Args:
        folder: committed.
        max_bytes: the files to read, and the largest size accepted for each.
        metadata: further entries that the manifest must have.

    Raises:
        RunError: a file is missing, too large, changed, or not a regular file.
    """
    listed = _read_manifest(folder, metadata)
    files = {}
    for name, limit in max_bytes.items():
        path = folder / name
        if name not in listed:
            raise RunError(f"{folder} lacks {name}; use another checkpoint")
        size, digest = listed[name]
        try:
            content = read_regular(path, limit)
        except (OSError, ValueError) as error:
            raise read_error(path, error) from None
        if len(content) != size:
            raise RunError(f"{path} is not of the size it was saved with; use another checkpoint")
        if _sha256([content]) != digest:
            raise RunError(f"{path} has changed since it was saved; use another checkpoint")
        files[name] = content
    return files
