"""Writing files so that nobody ever sees half of one, even after a power cut."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

Chunks = Sequence[bytes | memoryview]  # the content of a file, in parts


def write_synced(path: Path, chunks: Chunks) -> None:
    """Write a file and wait until the disk has it."""
    with open(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(folder: Path) -> None:
    """Wait until the disk has a folder's entries: files made, renamed and deleted in it."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file: readers see the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        write_synced(temporary, [content])
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
