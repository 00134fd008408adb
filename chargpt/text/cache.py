"""Encoded texts on disk, and the way to notice when they are damaged.

    <cache>/tokens/<key>/tokens.bin       ids, the smallest unsigned integers that hold them
    <cache>/tokens/<key>/tokenizer.json
    <cache>/tokens/<key>/meta.json        what the others must be; written last
    <cache>/tokens/<key>/*.npy            counts, made when first asked for
    <cache>/index/<spec>.json             (path, size, mtime, inode) of a text's files -> key

Every file is replaced whole, and the content follows from the key, so processes that prepare the
same text at the same time do not disturb each other.
"""

import hashlib
import io
import json
import os
import shutil
import tempfile
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import platformdirs

from chargpt.errors import RunError, TextError
from chargpt.files import write_atomically
from chargpt.text.tokenizer import CharTokenizer, Tokens

FORMAT = "chargpt-tokens"
VERSION = 1
MAX_META_BYTES = 100_000
MAX_INDEX_BYTES = 500_000_000
CHECKED_BYTES = 100_000_000  # token files up to here are summed at every start: 0.06 s
ROOM = 64_000_000  # bytes to leave free on the disk
ROOM_EVERY = 64 << 20  # bytes written between looks at the free disk
STALE = 24 * 3600  # seconds after which a temporary file belongs to nobody
CHUNK_BYTES = 1 << 20


class DamagedCacheError(TextError):
    """Cached tokens are not what was written."""


@dataclass(frozen=True)
class CachedText:
    """An encoded text, memory-mapped."""

    key: str
    folder: Path
    tokenizer: CharTokenizer
    tokens: Tokens
    unknown_count: int


def cache_folder() -> Path:
    """Return where encoded texts are kept: `$CHARGPT_CACHE`, or the system's place for caches."""
    chosen = os.environ.get("CHARGPT_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("chargpt")


def tokens_folder() -> Path:
    """Return the folder of encoded texts, made if need be, rid of what killed processes left.

    Raises:
        TextError: it cannot be made.
    """
    folder = cache_folder() / "tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in (*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")):
            if time.time() - leftover.stat().st_mtime > STALE:
                leftover.unlink(missing_ok=True)
    except FileNotFoundError:  # another process was quicker
        pass
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder


def _unwritable(folder: Path, error: OSError) -> TextError:
    reason = error.strerror or type(error).__name__
    return TextError(
        f"the cache {folder} cannot be written ({reason}); set CHARGPT_CACHE to a folder that can"
    )


def require_room(folder: Path, size: int) -> None:
    """Check that `size` more bytes fit on the folder's disk.

    Raises:
        TextError: they do not.
    """
    free = shutil.disk_usage(folder).free
    if free < size + ROOM:
        raise TextError(
            f"the cache {folder} has {free / 1e6:,.0f} MB free, too little to encode this text; "
            "make room or set CHARGPT_CACHE to a folder on a larger disk"
        )


class TokenFile:
    """Ids on their way into the cache: a temporary file, and its checksum while that is wanted."""

    def __init__(self, folder: Path) -> None:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".tokens.", suffix=".tmp")
        self.folder, self.path = folder, Path(name)
        self.file = os.fdopen(handle, "w+b")
        self.worker = ThreadPoolExecutor(1, "crc32")
        self.sum: Future[int] | None = None
        self.summing = True
        self.size = self.room_until = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.shutdown()
        self.file.close()
        self.path.unlink(missing_ok=True)

    def write(self, ids: Tokens) -> None:
        """Append ids.

        Raises:
            TextError: the disk is nearly full.
        """
        if self.size + ids.nbytes > self.room_until:
            require_room(self.folder, max(ROOM_EVERY, ids.nbytes))
            self.room_until = self.size + max(ROOM_EVERY, ids.nbytes)
        if self.summing:
            self.sum = self.worker.submit(zlib.crc32, ids.data, self.crc32)
        self.file.write(ids.data)
        self.size += ids.nbytes

    @property
    def crc32(self) -> int:
        """Checksum of what was written."""
        return self.sum.result() if self.sum else 0

    def rewind(self) -> None:
        """Go to the start, to read."""
        self.file.seek(0)

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        return self.file.read(size)


def store(key: str, tokenizer: CharTokenizer, tokens: TokenFile, unknown_count: int) -> CachedText:
    """Move an encoded text into the cache under its key, and return it.

    Args:
        key: names the folder.
        tokenizer: what the ids mean.
        tokens: the ids, in `tokenizer.dtype`.
        unknown_count: how many of the ids are the unknown token.

    Raises:
        TextError: the disk is full or the cache cannot be written.
    """
    folder = tokens_folder() / key
    try:
        folder.mkdir(exist_ok=True)
        tokens.file.close()
        os.replace(tokens.path, folder / "tokens.bin")
        vocabulary = tokenizer.to_json().encode("ascii")
        write_atomically(folder / "tokenizer.json", vocabulary)
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "count": tokens.size // tokenizer.dtype.itemsize,
            "crc32": tokens.crc32,
            "unknown_count": unknown_count,
            "tokenizer_sha256": hashlib.sha256(vocabulary).hexdigest(),
            "unchanged_since": _stamp(folder / "tokens.bin"),
        }
        write_atomically(folder / "meta.json", json.dumps(meta, indent=1).encode("ascii"))
    except OSError as error:
        raise _unwritable(folder, error) from None
    stored = load(key)
    assert stored is not None
    return stored


def _stamp(path: Path) -> list[int]:
    facts = path.stat()
    return [facts.st_size, facts.st_mtime_ns, facts.st_ino]


def load(key: str) -> CachedText | None:
    """Return the encoded text with this key; None if there is none.

    Raises:
        DamagedCacheError: there is one, and it is not what was written.
    """
    folder = cache_folder() / "tokens" / key
    if not key.isalnum() or not (folder / "meta.json").exists():
        return None
    try:
        meta = _read_json(folder / "meta.json", MAX_META_BYTES)
        if meta["format"] != FORMAT or meta["version"] != VERSION:
            raise ValueError("another format")
        count, unknown_count = int(meta["count"]), int(meta["unknown_count"])
        vocabulary = (folder / "tokenizer.json").read_bytes()
        if hashlib.sha256(vocabulary).hexdigest() != meta["tokenizer_sha256"]:
            raise ValueError("another tokenizer")
        tokenizer = CharTokenizer.from_json(vocabulary.decode("ascii"))
        _check_tokens(folder, meta, count * tokenizer.dtype.itemsize)
        path = folder / "tokens.bin"
        tokens = np.memmap(path, dtype=tokenizer.dtype, mode="r", shape=(count,))
    except (OSError, ValueError, KeyError, TypeError, RunError):
        raise DamagedCacheError(
            f"the cached tokens in {folder} are damaged; delete that folder and give the text again"
        ) from None
    return CachedText(key, folder, tokenizer, tokens, unknown_count)


def _check_tokens(folder: Path, meta: dict[str, Any], size: int) -> None:
    """Raise ValueError unless the token file is what was written."""
    path = folder / "tokens.bin"
    stamp = _stamp(path)
    if stamp[0] != size or size == 0:
        raise ValueError("another size")
    unchanged = stamp == meta["unchanged_since"]
    if unchanged and size > CHECKED_BYTES:
        return
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    if checksum != meta["crc32"]:
        raise ValueError("another checksum")
    if not unchanged:  # copied, or written twice at once: whole all the same
        meta = {**meta, "unchanged_since": stamp}
        try_to_write(folder / "meta.json", json.dumps(meta, indent=1).encode("ascii"))


def try_to_write(path: Path, content: bytes) -> None:
    """Write what merely saves time next time; a cache that cannot be written does no harm."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError:
        pass


def _read_json(path: Path, limit: int) -> dict[str, Any]:
    """Return a JSON object from a file of at most `limit` bytes, or raise ValueError."""
    with open(path, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError("too large")
    try:
        tree = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(tree, dict):
        raise ValueError("not an object")
    return tree


def _index_path(spec: list[Any]) -> Path:
    digest = hashlib.sha256(json.dumps(spec).encode()).hexdigest()
    return cache_folder() / "index" / f"{digest}.json"


def remember(spec: list[Any], files: list[list[str | int]], key: str) -> None:
    """Note that the text of this specification, its files being so, has this key."""
    try_to_write(_index_path(spec), json.dumps({"key": key, "files": files}).encode())


def recall(spec: list[Any], files: list[list[str | int]] | None = None) -> str | None:
    """Return the key noted for this specification, if the files are (or were) still so."""
    try:
        noted = _read_json(_index_path(spec), MAX_INDEX_BYTES)
        key = noted["key"]
        fits = files is None or noted["files"] == files
    except (OSError, ValueError, KeyError):
        return None
    return key if fits and isinstance(key, str) else None


def save_counts(path: Path, counts: npt.NDArray[np.int64]) -> None:
    """Keep counts beside the tokens, with a checksum before them."""
    content = io.BytesIO()
    np.save(content, counts, allow_pickle=False)
    checksum = zlib.crc32(content.getbuffer())
    try_to_write(path, checksum.to_bytes(4, "little") + content.getvalue())


def load_counts(path: Path) -> npt.NDArray[np.int64] | None:
    """Return counts that `save_counts` kept; None if there are none, or they are damaged."""
    try:
        content = path.read_bytes()
        if zlib.crc32(content[4:]) != int.from_bytes(content[:4], "little"):
            return None
        counts = np.load(io.BytesIO(content[4:]), allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return counts if isinstance(counts, np.ndarray) and counts.dtype == np.int64 else None
