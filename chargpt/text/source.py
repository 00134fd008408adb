"""Find the files of a text and read their bytes in chunks."""

import glob
import gzip
import io
import os
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, NamedTuple

from chargpt.errors import MissingTextError, TextError, most_similar
from chargpt.text import TextProgress
from chargpt.text.catalog import BUILT_IN, CATALOG, built_in_text
from chargpt.text.decoding import BOMS, Chunk

CHUNK_BYTES = 1 << 19  # small enough for a processor's cache, with its text and tokens
MAX_TEXT_BYTES = 100 * 10**9  # of all files together, decompressed
MAX_FILES = 1_000_000
MAX_PATH = 1000  # characters of what may be a path instead of a text
STDIN = "-"
GZIP_MAGIC = b"\x1f\x8b"


class TextFile(NamedTuple):
    """A file of a text.

    Attributes:
        path: absolute.
        size, mtime_ns: in bytes and nanoseconds, when it was read.
        begin: number of characters before it; of a list of documents, the number of lines.
    """

    path: str
    size: int
    mtime_ns: int
    begin: int = 0


@dataclass(frozen=True)
class Source:
    """A text that can be read.

    Attributes:
        name: short name for messages and tables.
        files: the files to read, in order.
        stream: the whole text as a seekable stream, instead of files. A source without either is
            standard input.
        notes: sentences for the user.
    """

    name: str
    files: tuple[Path, ...] = ()
    stream: IO[bytes] | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_stdin(self) -> bool:
        """Whether the text is standard input, which can be read only once."""
        return not self.files and self.stream is None

    def stamps(self) -> list[TextFile]:
        """Return the files with size and time, which change with their content."""
        found = []
        for path in self.files:
            with _os_errors_as_text_errors(str(path)):
                status = path.stat()
                found.append(TextFile(str(path), status.st_size, status.st_mtime_ns))
        return found

    def size(self) -> int:
        """Return the number of bytes as stored; 0 for standard input."""
        if self.stream is not None:
            return self.stream.seek(0, os.SEEK_END)
        return sum(file.size for file in self.stamps())


def require_text(content: object) -> None:
    """Check that an argument `text` is a text and not the path of one, else TextError."""
    if not isinstance(content, str):
        raise TextError(
            f"text: expected a string (it is of type {type(content).__name__}); give a file's "
            "content, or the file as path= to train and evaluate"
        )
    if len(content) <= MAX_PATH and "\0" not in content and os.path.isfile(content):
        raise TextError(
            f"{content} is a file, not a text; give its content, or the file as path= to train and "
            "evaluate"
        )


def text_in_memory(content: str) -> Source:
    """Return a source that holds the text itself.

    Raises:
        TextError: it is the path of a file, or holds a lone surrogate.
    """
    require_text(content)
    try:
        return Source("text in memory", stream=io.BytesIO(content.encode()))
    except UnicodeEncodeError as error:
        raise TextError(
            f"the text holds a lone surrogate at index {error.start:,}, which is not a character; "
            "decode its bytes with their true encoding"
        ) from None


def find_source(
    path: str | None, suffixes: tuple[str, ...], *, for_training: bool = True
) -> Source:
    """Return the source at a path: a file, folder, glob, `-`, or None for the built-in text.

    `suffixes` are the endings of a folder's files. A TextError says why nothing can be read; only
    `for_training` does it advise what applies to a training text alone.
    """
    if path is None:
        return Source(BUILT_IN, stream=io.BytesIO(built_in_text().encode()))
    if path == STDIN:
        return Source("standard input")
    expanded = os.path.expanduser(path)
    try:
        mode = os.stat(expanded).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _find_glob(expanded, path, for_training)
    except (OSError, ValueError) as error:
        raise TextError(_unreadable(path, error)) from None
    if stat.S_ISDIR(mode):
        return _find_folder(Path(expanded), suffixes, for_training)
    if not stat.S_ISREG(mode):
        raise TextError(
            f"{path} is a device or a pipe, not a file; pipe its text in and name it `-`"
        )
    file = Path(expanded)
    return Source(file.name, (file.absolute(),))


def _find_glob(pattern: str, written: str, for_training: bool) -> Source:
    if not glob.has_magic(pattern):
        raise MissingTextError(_missing(written, for_training))
    matches = (Path(match).absolute() for match in glob.iglob(pattern, recursive=True))
    files = sorted({path for path in matches if path.is_file()})
    if not files:
        raise MissingTextError(f"no file matches {written}; correct the pattern or quote it")
    name = "/".join(Path(written).parts[-3:])
    notes = (f"files read of {name}: {len(files):,}, sorted by path",) if len(files) > 1 else ()
    return Source(name, tuple(files), notes=notes)


def _endings(suffixes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("." + suffix.lower().lstrip("*").lstrip(".") for suffix in suffixes)


def _find_folder(root: Path, suffixes: tuple[str, ...], for_training: bool) -> Source:
    """Return the folder's files, sorted by path, without hidden ones."""
    endings = _endings(suffixes)
    files: list[Path] = []
    others: Counter[str] = Counter()  # endings of the files that are left out
    visited: set[tuple[int, int]] = set()

    def reject(error: OSError) -> None:
        raise TextError(_unreadable(str(error.filename), error))

    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=reject):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in visited:  # a symbolic link to a parent
            subfolders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in names:
            path = Path(folder, name)
            if name.startswith(".") or not path.is_file():
                continue
            if name.lower().endswith(endings):
                files.append(path.absolute())
            else:
                others[path.suffix] += 1
        if len(files) > MAX_FILES:
            raise TextError(f"{root} holds over {MAX_FILES:,} files; join them into fewer")
    common = max(others, key=others.__getitem__, default="")
    remedy = f"name its files by a pattern, such as '{root}/**/*{common}'"
    if common and for_training:
        remedy = f"set text.suffixes, as with -s text.suffixes={common}, or {remedy}"
    if not files:
        if (root / "checkpoints").is_dir():
            resume = f", or continue the run with `chargpt train --resume {root}`"
            raise MissingTextError(
                f"{root} is a run, not a text; name a text{resume * for_training}"
            )
        if not others:
            raise MissingTextError(f"the folder {root} holds no files; name another")
        raise MissingTextError(
            f"the folder {root} holds no file that ends in {', '.join(endings)}; {remedy}"
        )
    name = f"{root.absolute().name}/"
    note = (
        f"files read of {name}: {len(files):,}, which end in {', '.join(endings)}, sorted by path"
    )
    if n_others := others.total():
        listed = ", ".join(
            f"{n:,} {ending or 'without an ending'}" for ending, n in others.most_common(3)
        )
        note += f"; not read: {n_others:,} ({listed})"
        if common and others[common] > len(files):
            note += f"; to read the {common} files, {remedy}"
    return Source(name, tuple(sorted(files)), notes=(note,))


def _missing(written: str, for_training: bool) -> str:
    """Return the message for a path that does not exist, with the most similar one that does."""
    catalog = CATALOG if for_training else {}
    path = os.path.expanduser(written)
    name, parent = os.path.basename(path), os.path.dirname(path) or "."
    if written in catalog:
        return f"there is no file {written}; fetch the text with `chargpt data get {written}`"
    try:
        names = sorted(entry for entry in os.listdir(parent) if not entry.startswith("."))[:2000]
    except OSError:
        return f"there is no file {written}, nor its folder; correct the path"
    if similar := most_similar(name, names):
        return f"there is no file {written}; did you mean {os.path.join(parent, similar)}?"
    if similar := most_similar(name, catalog):
        return f"there is no file {written}; did you mean `chargpt data get {similar}`?"
    others = ", or see `chargpt data list` for texts"
    return f"there is no file {written}; correct the path{others * for_training}"


def _unreadable(path: str, error: OSError | ValueError) -> str:
    if isinstance(error, PermissionError):
        return f"{path} may not be read (permission denied); change its permissions"
    reason = getattr(error, "strerror", None) or "it is not a path"
    return f"{path} cannot be read ({reason}); name another file"


@contextmanager
def _os_errors_as_text_errors(path: str) -> Iterator[None]:
    """Raise what the system reports about a file as a TextError."""
    try:
        yield
    except FileNotFoundError:
        raise MissingTextError(_missing(path, for_training=False)) from None
    except OSError as error:
        raise TextError(_unreadable(path, error)) from None


def copy_stdin(write: Callable[[bytes], object], max_bytes: int = MAX_TEXT_BYTES) -> None:
    """Copy standard input, which can be read only once; TextError if it is closed or too large."""
    if sys.stdin is None:
        raise TextError("standard input is closed; pipe a text in, or name a file")
    size = 0
    while content := sys.stdin.buffer.read(CHUNK_BYTES):
        size += len(content)
        if size > max_bytes:
            raise TextError(f"standard input is over {max_bytes:,} bytes; give a shorter text")
        write(content)


def iter_chunks(
    source: Source,
    on_progress: TextProgress | None = None,
    stage: str = "reading",
    binary: list[str] | None = None,
) -> Iterator[Chunk]:
    """Yield the bytes of a source's files, decompressed.

    Standard input must be copied to a stream first.

    Args:
        source: the text.
        on_progress: called with the stage and the bytes read, as stored.
        stage: name of this pass over the bytes.
        binary: receives the paths of binary files, which are skipped if there are others; None:
            none is skipped.

    Raises:
        TextError: a file cannot be read or is a damaged archive, or the text is too large.
    """
    assert not source.is_stdin, "standard input must be copied to a seekable stream first"
    total = source.size()
    n_bytes = n_stored = 0
    first_binary: Chunk | None = None
    for name in [str(path) for path in source.files] or [source.name]:
        with _os_errors_as_text_errors(name), _open(source, name) as raw:
            contents = _decompress(name, raw)
            head = next(contents, b"")
            if binary is not None and len(source.files) > 1 and _is_binary(head):
                binary.append(name)
                first_binary = first_binary or Chunk(name, head)
                n_stored += raw.seek(0, os.SEEK_END)
                continue
            for content in chain([head], contents):
                n_bytes += len(content)
                if n_bytes > MAX_TEXT_BYTES:
                    raise TextError(
                        f"the text is over {MAX_TEXT_BYTES:,} bytes, decompressed, at {name}; "
                        "give a shorter text"
                    )
                yield Chunk(name, content)
                if on_progress:
                    on_progress(stage, n_stored + raw.tell(), total)
            n_stored += raw.tell()
    if first_binary and not n_bytes:
        yield first_binary  # decoding rejects it


def _is_binary(head: bytes) -> bool:
    """Return whether the first chunk of a file holds a NUL byte, and no byte order mark."""
    return b"\0" in head and not any(head.startswith(mark) for mark, _ in BOMS)


def describe_binary(paths: Sequence[str]) -> list[str]:
    """Return a sentence on the binary files that were skipped, if any."""
    first, others = [Path(path).name for path in paths[:2]], len(paths) - 2
    listed = f"{', '.join(first)} and {others:,} more" if others > 0 else " and ".join(first)
    return [f"not read, since they are binary: {listed}"] if paths else []


def _open(source: Source, name: str) -> AbstractContextManager[IO[bytes]]:
    if source.stream is not None:
        return nullcontext(source.stream)
    return open(name, "rb", buffering=0)


def _decompress(name: str, raw: IO[bytes]) -> Iterator[bytes]:
    """Yield chunks of a stream, decompressed if it is a gzip file."""
    raw.seek(0)
    is_gzip = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC or name.lower().endswith(".gz")
    raw.seek(0)
    stream = gzip.GzipFile(fileobj=raw, mode="rb") if is_gzip else raw
    try:
        while content := stream.read(CHUNK_BYTES):
            yield content
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise TextError(
            f"{name} is not a complete gzip file (damaged, cut short or misnamed); fetch it again"
        ) from None
