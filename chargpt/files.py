"""Atomic, durable writing of files, and reading with a size limit."""

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

Chunks = Sequence[bytes | memoryview]  # the content of a file, in parts
UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK}  # by a network file system
TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{12}\.tmp")  # what a killed `write_atomically` leaves


def exists(path: Path) -> bool:
    """Return whether there is anything at a path, be it a link to nothing.

    `Path.exists` takes every error for "no" in some versions of Python.

    Raises:
        OSError: the system cannot tell.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def entry_names(folder: Path) -> list[str]:
    """Return the names of a folder's entries; none if there is no folder.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file and flush it to disk (fsync)."""
    with open(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(folder: Path) -> None:
    """Flush a directory's entries to disk, so that renames in it survive a power cut."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Replace a file: readers see the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        write_synced(temporary, [content] if isinstance(content, bytes) else content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def file_stamp(path: Path) -> list[int]:
    """Return the size, mtime in ns and inode of a file, at least one of which changes with it."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. Links, pipes and devices are rejected unopened.

    Raises:
        ValueError: it is not a regular file, or larger than `max_bytes`.
        OSError: it is missing or unreadable.
    """
    with open_regular(path, max_bytes) as file:
        return file.read()


def open_regular(path: Path, max_bytes: int) -> IO[bytes]:
    """Open a regular file to read; `read_regular` says what is rejected."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > max_bytes:
        raise ValueError(f"it is larger than {max_bytes:,} bytes")
    return open(path, "rb")


def parse_json(content: bytes | str) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ValueError: it is not a JSON object, or nested too deep.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a regular file.

    Raises:
        ValueError: it is not a regular file, too large, or not a JSON object.
        OSError: it is missing or unreadable.
    """
    return parse_json(read_regular(path, max_bytes))


def to_json(value: object) -> bytes:
    """Return indented JSON with sorted keys, so that equal values give equal bytes."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
