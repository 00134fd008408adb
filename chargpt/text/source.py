"""Where a text comes from: find its files, stream their bytes, decode them, say what is wrong.

Nothing here holds more than a chunk in memory. A decoded piece is `bytes` where it is all ASCII
(which needs no decoding) and `str` otherwise.
"""

import codecs
import difflib
import encodings.aliases
import glob
import gzip
import io
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from chargpt.config import TextConfig
from chargpt.errors import TextError
from chargpt.text.catalog import CATALOG, EMBEDDED, embedded_text

CHUNK_BYTES = 1 << 19  # with what is made of it, stays in a processor's cache
MAX_TEXT_BYTES = 100 * 10**9  # decompressed; what an archive can cost at most
MAX_FILES = 1_000_000
STDIN = "-"
GZIP_MAGIC = b"\x1f\x8b"
BOMS = (  # UTF-32's first: its little-endian mark begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
BYTE_ORDER_MARK = "\ufeff"

Piece = bytes | str


class MissingTextError(TextError):
    """There is nothing where the text should be; cached tokens may stand in for it."""


@dataclass(frozen=True)
class Source:
    """A text that can be read.

    Attributes:
        name: short, for people.
        files: what to read, in order; empty for standard input and the embedded text.
        embedded: the embedded text's bytes.
    """

    name: str
    files: tuple[Path, ...] = ()
    embedded: bytes | None = None

    def signature(self) -> list[list[str | int]]:
        """Return what tells whether the files are still the same: path, size, mtime, inode."""
        rows: list[list[str | int]] = []
        for path in self.files:
            facts = _status(path)
            rows.append([str(path), facts.st_size, facts.st_mtime_ns, facts.st_ino])
        return rows

    @property
    def size(self) -> int:
        """Bytes on disk; 0 where nobody can know."""
        if self.embedded is not None:
            return len(self.embedded)
        return sum(_status(path).st_size for path in self.files)

    def streams(self) -> Iterator[tuple[str, IO[bytes]]]:
        """Yield each file's name and its open bytes, compressed as they are."""
        if self.embedded is not None:
            yield self.name, io.BytesIO(self.embedded)
        elif not self.files:
            yield self.name, sys.stdin.buffer
        for path in self.files:
            with _readable(path), open(path, "rb", buffering=0) as raw:
                yield str(path), raw


def find_source(settings: TextConfig) -> Source:
    """Return the source that `settings.path` names: a file, folder, glob, `-` or nothing.

    Raises:
        TextError: there is nothing to read there; it says what is.
    """
    path = settings.path
    if path is None:
        try:
            return Source(EMBEDDED, embedded=embedded_text().encode())
        except TextError as error:
            raise MissingTextError(str(error)) from None
    if path == STDIN:
        return Source("standard input")
    expanded = os.path.expanduser(path)
    try:
        mode = os.stat(expanded).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _find_glob(expanded, path)
    except (OSError, ValueError) as error:
        raise TextError(_unreadable(path, error)) from None
    if stat.S_ISDIR(mode):
        return _find_folder(Path(expanded), settings.suffixes)
    if not stat.S_ISREG(mode):
        raise TextError(
            f"{path} is a device or a pipe, not a file; pipe its text in and name it `-`"
        )
    file = Path(expanded)
    return Source(file.name, (file.absolute(),))


def _find_glob(pattern: str, written: str) -> Source:
    if not glob.has_magic(pattern):
        raise MissingTextError(_missing(pattern, written))
    found = (Path(match).absolute() for match in glob.iglob(pattern, recursive=True))
    files = sorted({path for path in found if path.is_file()})
    if not files:
        raise MissingTextError(f"no file matches {written}; correct the pattern or quote it")
    return Source(written, tuple(files))


def _find_folder(folder: Path, suffixes: tuple[str, ...]) -> Source:
    """Return the folder's files in order of their paths; hidden ones are left out."""
    endings = tuple("." + suffix.lower().lstrip("*").lstrip(".") for suffix in suffixes)
    files: list[Path] = []
    visited: set[tuple[int, int]] = set()

    def refuse(error: OSError) -> None:
        raise TextError(_unreadable(str(error.filename), error))

    for place, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        facts = os.stat(place)
        if (facts.st_dev, facts.st_ino) in visited:  # a link that leads back up
            folders.clear()
            continue
        visited.add((facts.st_dev, facts.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = Path(place, name)
            if not name.startswith(".") and name.lower().endswith(endings) and path.is_file():
                files.append(path.absolute())
        if len(files) > MAX_FILES:
            raise TextError(f"{folder} holds over {MAX_FILES:,} files; join them into fewer")
    if not files:
        raise MissingTextError(
            f"the folder {folder} holds no file that ends in {', '.join(endings)}; "
            "set text.suffixes to what its texts end in"
        )
    return Source(f"{folder.absolute().name}/", tuple(sorted(files)))


def _missing(path: str, written: str) -> str:
    """Return the sentence for a path that leads nowhere, with the likeliest right one."""
    name, parent = os.path.basename(path), os.path.dirname(path) or "."
    if written in CATALOG:
        return f"there is no file {written}; fetch the text with `chargpt data get {written}`"
    try:
        beside = sorted(entry for entry in os.listdir(parent) if not entry.startswith("."))[:2000]
    except OSError:
        return f"there is no file {written}, nor its folder; correct the path"
    near = difflib.get_close_matches(name, beside, n=1)
    if near:
        return f"there is no file {written}; did you mean {os.path.join(parent, near[0])}?"
    known = difflib.get_close_matches(name, CATALOG, n=1)
    if known:
        return f"there is no file {written}; did you mean `chargpt data get {known[0]}`?"
    return f"there is no file {written}; correct the path, or see `chargpt data list` for texts"


def _unreadable(path: str, error: OSError | ValueError) -> str:
    reason = getattr(error, "strerror", None) or "it is not a path"
    if isinstance(error, PermissionError):
        return f"{path} may not be read (permission denied); change its permissions"
    return f"{path} cannot be read ({reason}); name another file"


def _status(path: Path) -> os.stat_result:
    with _readable(path):
        return os.stat(path)


class _readable:
    """Turn what the system says about a file into a TextError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileNotFoundError):
            raise MissingTextError(_missing(str(self.path), str(self.path))) from None
        if isinstance(error, OSError):
            raise TextError(_unreadable(str(self.path), error)) from None


def codec_name(encoding: str) -> str:
    """Return the canonical name of a text encoding, `auto` as it is.

    Raises:
        TextError: there is no such encoding, or it does not make text of bytes.
    """
    if encoding == "auto":
        return encoding
    try:
        info = codecs.lookup(encoding)
        if getattr(info, "_is_text_encoding", True) and info.incrementaldecoder:
            return info.name
        problem = f"{encoding} turns bytes into other bytes, not into text"
    except (LookupError, ValueError):
        problem = f"there is no encoding {encoding!r:.60}"
    known = {*encodings.aliases.aliases, *encodings.aliases.aliases.values(), "auto"}
    near = difflib.get_close_matches(encoding.lower().replace("-", "_"), sorted(known), n=1)
    hint = f"did you mean {near[0]}?" if near else "common ones are utf-8, utf-16, cp1252, latin-1"
    raise TextError(f"{problem}; {hint}")


def pieces(
    source: Source,
    encoding: str = "auto",
    on_chunk: Callable[[int, bytes], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[Piece]:
    """Yield the text of a source, a chunk at a time, without byte order marks.

    Args:
        source: what to read.
        encoding: `auto` or a codec's name.
        on_chunk: called with each file's number and each chunk of its bytes, decompressed.
        on_progress: called with the bytes read so far, compressed as they are.

    Raises:
        TextError: bytes that do not decode (with their offset), a broken archive, and the like.
    """
    encoding = codec_name(encoding)
    before = total = 0
    for number, (name, raw) in enumerate(source.streams()):
        decoder: Decoder | None = None
        position = 0
        for chunk, position in _chunks(name, raw):
            total += len(chunk)
            if total > MAX_TEXT_BYTES:
                raise TextError(f"{name} unpacks to over {MAX_TEXT_BYTES:,} bytes; cut it smaller")
            if decoder is None:
                decoder = Decoder(name, encoding, chunk)
            if on_chunk:
                on_chunk(number, chunk)
            yield decoder.feed(chunk)
            if on_progress:
                on_progress(before + position)
        if decoder is not None:
            yield decoder.feed(b"", final=True)
        before += position


def _chunks(name: str, raw: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield chunks of a stream, decompressed, with the bytes of the stream read so far."""
    head = raw.read(CHUNK_BYTES)
    if not head.startswith(GZIP_MAGIC) and not name.lower().endswith(".gz"):
        position = 0
        while head:
            position += len(head)
            yield head, position
            head = raw.read(CHUNK_BYTES)
        return
    counted = _Counted(head, raw)
    unpacked = gzip.GzipFile(fileobj=io.BufferedReader(counted, CHUNK_BYTES))
    try:
        while chunk := unpacked.read(CHUNK_BYTES):
            yield chunk, counted.position
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise TextError(
            f"{name} is not a whole gzip file (damaged, cut short or misnamed); fetch it again"
        ) from None


class _Counted(io.RawIOBase):
    """A stream that puts back the bytes looked at, and knows how many went by."""

    def __init__(self, head: bytes, raw: IO[bytes]) -> None:
        self.head, self.raw, self.position = head, raw, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        chunk = self.head[: len(buffer)]
        self.head = self.head[len(chunk) :]
        if not chunk:
            chunk = self.raw.read(len(buffer)) or b""
        buffer[: len(chunk)] = chunk
        self.position += len(chunk)
        return len(chunk)


class Decoder:
    """Bytes of one file to text, in chunks that may end inside a character."""

    def __init__(self, name: str, encoding: str, head: bytes) -> None:
        """Take the file's name, `auto` or a codec's name, and the file's first bytes."""
        self.name = name
        self.told = encoding != "auto"
        marked = next((codec for mark, codec in BOMS if head.startswith(mark)), "utf-8")
        self.codec = encoding if self.told else marked
        self.ascii_is_plain = self.codec in {"utf-8", "utf-8-sig", "ascii", "iso8859-1", "cp1252"}
        self.refuses_nul = self.codec in {"utf-8", "utf-8-sig"}
        self.decoder = codecs.getincrementaldecoder(self.codec)("strict")
        self.pending = b""
        self.consumed = 0
        self.started = False

    def feed(self, chunk: bytes, final: bool = False) -> Piece:
        """Return the text that a chunk completes."""
        if self.refuses_nul and (nul := chunk.find(b"\0")) >= 0:
            raise TextError(
                f"{self.name} holds a NUL byte at offset {self.consumed + nul:,}, so it is binary, "
                "or UTF-16 without its mark; name a text, or try --encoding utf-16-le"
            )
        if self.ascii_is_plain and not self.pending and chunk.isascii():
            self.consumed += len(chunk)
            self.started = self.started or bool(chunk)
            return chunk
        try:
            text = self.decoder.decode(chunk, final)
            self.pending = self.decoder.getstate()[0]
        except UnicodeError as error:
            raise TextError(self._undecodable(error)) from None
        self.consumed += len(chunk)
        if text and not self.started:
            self.started = True
            text = text.removeprefix(BYTE_ORDER_MARK)
        return text

    def _undecodable(self, error: UnicodeError) -> str:
        where = "some of its bytes"
        if isinstance(error, UnicodeDecodeError):
            offset = self.consumed - len(self.pending) + error.start
            where = f"byte 0x{error.object[error.start]:02X} at offset {offset:,}"
        remedy = "name its true encoding, for example --encoding cp1252, cp1251 or latin-1"
        shown = {"utf-8": "UTF-8", "utf-8-sig": "UTF-8"}.get(self.codec, self.codec)
        return f"{self.name} is not {shown} text ({where} does not decode); {remedy}"
