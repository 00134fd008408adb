"""Encoded texts on disk, with checksums that reveal damage.

    <cache>/tokens/<key>/tokens.bin       ids in the smallest unsigned dtype that holds them
    <cache>/tokens/<key>/tokenizer.json
    <cache>/tokens/<key>/meta.json        sizes and checksums of the others; written last
    <cache>/index/<hash of path and settings>.json  size, times, inode of its files, and the key

Every file is replaced atomically, and the content is determined by the key, so processes that
prepare the same text at the same time do not disturb each other.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import platformdirs

from chargpt.errors import RunError, TextError
from chargpt.files import file_stamp, is_left_over, read_json, write_atomically
from chargpt.text.tokenizer import CharTokenizer, Tokens

FORMAT, VERSION = "chargpt-tokens", 1
MAX_META_BYTES = 100_000
MAX_INDEX_BYTES = 500_000_000
MAX_CHECKED_BYTES = 100_000_000  # token files up to this size are checked at every start
MIN_FREE_BYTES = 64_000_000  # to leave on the disk
CHUNK_BYTES = 1 << 20


class DamagedCacheError(TextError):
    """Cached tokens differ from what was written."""


@dataclass(frozen=True)
class CachedText:
    """An encoded text, memory-mapped."""

    key: str
    tokenizer: CharTokenizer
    tokens: Tokens
    rare_count: int


def cache_folder() -> Path:
    """Return the folder of encoded texts: `$CHARGPT_CACHE`, or the system's cache folder."""
    chosen = os.environ.get("CHARGPT_CACHE")
    try:
        path = Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("chargpt")
        if not chosen and not path.is_absolute():
            raise RuntimeError
        return path
    except RuntimeError:  # no such user, or this one has no home
        raise TextError(
            f"there is no home folder for the cache {chosen or ''!r:.80}; set CHARGPT_CACHE to a "
            "writable folder"
        ) from None


def make_tokens_folder() -> Path:
    """Create the folder of token files, delete what killed processes left there, and return it."""
    folder = cache_folder() / "tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None
    leftovers = [*folder.glob(".tokens.*.tmp"), *folder.parent.glob("*/.*.json.*.tmp")]
    for leftover in (*leftovers, *folder.glob("*/.*.json.*.tmp")):
        with suppress(OSError):  # another process has deleted it, or another user owns it
            if is_left_over(leftover):
                leftover.unlink()
    return folder


def _unwritable(folder: Path, error: OSError) -> TextError:
    reason = error.strerror or type(error).__name__
    return TextError(
        f"the cache {folder} cannot be written ({reason}); set CHARGPT_CACHE to a writable folder"
    )


def require_space(folder: Path, size: int) -> None:
    """Check that `size` more bytes fit on the folder's disk, else raise TextError."""
    free = shutil.disk_usage(folder).free
    if free < size + MIN_FREE_BYTES:
        raise TextError(
            f"the cache {folder} has {free / 1e6:,.0f} MB free, too little to encode this text; "
            "make room or set CHARGPT_CACHE to a folder on a larger disk"
        )


class CacheFile:
    """A temporary file of the cache, deleted on exit unless `store` moves it.

    Attributes:
        file: open for reading and writing.
        crc32: of the bytes written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f".tokens.{secrets.token_hex(6)}.tmp"
        # unlike tempfile's, readable by others if the umask allows it
        self.file = open(self.path, "x+b")  # noqa: SIM115
        self.crc32 = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.path.unlink(missing_ok=True)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes, or raise TextError if the disk is nearly full."""
        require_space(self.path.parent, len(data))
        self.crc32 = zlib.crc32(data, self.crc32)
        self.file.write(data)


def store(key: str, tokenizer: CharTokenizer, tokens: CacheFile, rare_count: int) -> CachedText:
    """Move an encoded text, with ids in `tokenizer.dtype`, into the cache, and return it."""
    folder = make_tokens_folder() / key
    try:
        folder.mkdir(exist_ok=True)
        tokens.file.flush()
        os.fsync(tokens.file.fileno())
        tokens.file.close()
        os.replace(tokens.path, folder / "tokens.bin")
        size, *_ = stamp = file_stamp(folder / "tokens.bin")
        vocabulary = tokenizer.to_json().encode("ascii")
        write_atomically(folder / "tokenizer.json", vocabulary)
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "count": size // tokenizer.dtype.itemsize,
            "crc32": tokens.crc32,
            "rare_count": rare_count,
            "tokenizer_sha256": hashlib.sha256(vocabulary).hexdigest(),
            "file_stamp": stamp,
        }
        write_atomically(folder / "meta.json", json.dumps(meta, indent=1).encode("ascii"))
    except OSError as error:
        raise _unwritable(folder, error) from None
    stored = load(key)
    assert stored is not None
    return stored


def load(key: str) -> CachedText | None:
    """Return the encoded text with this key, or None; DamagedCacheError if it is damaged."""
    folder = cache_folder() / "tokens" / key
    if not re.fullmatch("[0-9a-f]{64}", key) or not (folder / "meta.json").exists():
        return None
    try:
        meta = read_json(folder / "meta.json", MAX_META_BYTES)
        vocabulary = (folder / "tokenizer.json").read_bytes()
        digest = hashlib.sha256(vocabulary).hexdigest()
        if (meta["format"], meta["version"], meta["tokenizer_sha256"]) != (FORMAT, VERSION, digest):
            raise ValueError
        tokenizer = CharTokenizer.from_json(vocabulary.decode("ascii"))
        count, rare_count = int(meta["count"]), int(meta["rare_count"])
        path = folder / "tokens.bin"
        if not _is_intact(path, meta, count * tokenizer.dtype.itemsize):
            raise ValueError
        tokens = np.memmap(path, dtype=tokenizer.dtype, mode="r", shape=(count,))
    except (OSError, ValueError, KeyError, TypeError, RunError):
        raise DamagedCacheError(
            f"the cached tokens in {folder} are damaged; delete that folder and give the text again"
        ) from None
    return CachedText(key, tokenizer, tokens, rare_count)


def _is_intact(path: Path, meta: dict[str, Any], size: int) -> bool:
    """Return whether the token file is what was written."""
    stamp = file_stamp(path)
    if stamp[0] != size or size == 0:
        return False
    is_unchanged = stamp == meta["file_stamp"]
    if is_unchanged and size > MAX_CHECKED_BYTES:
        return True
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    if checksum != meta["crc32"]:
        return False
    if not is_unchanged:  # a copy of the folder, or written by two processes
        meta = {**meta, "file_stamp": stamp}
        _try_write(path.with_name("meta.json"), json.dumps(meta, indent=1).encode("ascii"))
    return True


def _try_write(path: Path, content: bytes) -> None:
    """Write a file that only saves time; a cache that cannot be written is no error here."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


def _index_path(spec: list[Any]) -> Path:
    digest = hashlib.sha256(json.dumps(spec).encode()).hexdigest()
    return cache_folder() / "index" / f"{digest}.json"


def write_index(spec: list[Any], file_stamps: list[list[str | int]], key: str) -> None:
    """Note the key of the text with this specification, whose files have these stamps."""
    _try_write(_index_path(spec), json.dumps({"key": key, "files": file_stamps}).encode())


def read_index(spec: list[Any], file_stamps: list[list[str | int]] | None = None) -> str | None:
    """Return the key noted for this specification; with stamps, only if they are the same."""
    try:
        entry = read_json(_index_path(spec), MAX_INDEX_BYTES)
        key, is_current = entry["key"], file_stamps is None or entry["files"] == file_stamps
    except (OSError, ValueError, KeyError):
        return None
    return key if is_current and isinstance(key, str) else None
