"""Find the files of a text, read their bytes in chunks, decode them, and mark documents.

Documents are the items of a text, such as names, tweets, poems or files. Every document ends with
the EOS token (end of sequence): one character, which the model learns to predict. It is the line
end if the documents are lines, else U+001E, the record separator of ASCII.
"""

import codecs
import glob
import gzip
import io
import json
import os
import re
import stat
import sys
import tempfile
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain, pairwise, repeat, takewhile
from pathlib import Path
from typing import IO, NamedTuple, cast

from chargpt.config import TextConfig
from chargpt.errors import MissingTextError, TextError, most_similar, reason_of
from chargpt.files import expand_user, is_missing, quoted
from chargpt.log import logger
from chargpt.text.catalog import BUILT_IN, CATALOG, built_in_text
from chargpt.text.encodings import count_garbage, guess_encodings

CHUNK_BYTES = 1 << 19  # small enough for a processor's cache, with its text and tokens
SEGMENT_BYTES = 1 << 25  # of a text, read by one process
MAX_TEXT_BYTES = 100 * 10**9  # of all files together, decompressed
MAX_READ_CHARACTERS = 1 << 30  # of a text that is read as a whole
# decompressed bytes of a gzip file: some, and more of a large one
MAX_EXPANDED, MAX_EXPANSION = 1 << 26, 100
MAX_FILES = 1_000_000
CHANGED = "{} changed while it was read; try again when nothing writes to it"
MAX_COMPARED_NAMES = 2000  # of files, with one that does not exist
STDIN = "-"
REPLACE_REMEDY = ", or replace what does not decode with --encoding-errors replace"
GZIP_MAGIC = b"\x1f\x8b"
BOMS = (  # UTF-32 before UTF-16, whose little-endian mark is a prefix of UTF-32's
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
CONTROL = bytes({*range(32)} - {*b"\b\t\n\v\f\r\x1b\x1c\x1d\x1e\x1f"})  # hardly ever in a text
MAX_CONTROL = 0.02  # fraction of a text's first bytes; compressed data have about 0.08
NOT_TEXT = (  # how files begin, what they are, and what makes text of them
    (rb"%PDF-", "a PDF document", "pdftotext"),
    (rb"PK\x03\x04.{26}mimetypeapplication/epub", "an EPUB book", "pandoc -t plain"),
    (rb"PK\x03\x04.{26}mimetypeapplication/vnd.oasis", "an OpenDocument file", "pandoc -t plain"),
    (rb"PK\x03\x04.*?word/document", "a Word document", "pandoc -t plain"),
    (rb"PK\x03\x04", "a ZIP archive", "unzip"),
    (rb"\{\\rtf", "an RTF document", "pandoc -t plain"),
    (rb"\xd0\xcf\x11\xe0", "an old Office document", "soffice --convert-to txt"),
    (rb".{60}BOOKMOBI", "a Kindle book", "ebook-convert"),
    (rb".{257}ustar[\0 ][ 0]", "a tar archive", "tar -xf"),
    (rb"BZh[1-9]1AY&SY", "a bzip2 file", "bunzip2"),
    (rb"\xfd7zXZ\0", "an xz file", "unxz"),
    (rb"\x28\xb5\x2f\xfd", "a Zstandard file", "unzstd"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x"),
    (rb"Rar!\x1a\x07", "a RAR archive", "unrar x"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBP|II\*\0|MM\0\*", "an image", "tesseract"),
    (rb"SQLite format 3\0", "an SQLite database", "sqlite3"),
    (rb"PAR1", "a Parquet table", "duckdb"),
    (rb"\x80[\x02-\x05]", "a Python pickle", "the program that wrote it"),
)
ANY_NOT_TEXT = re.compile(b"|".join(begin for begin, *_ in NOT_TEXT), re.DOTALL)
MARKUP = re.compile(
    r"\ufeff?\s*(<!--.*?-->\s*)*<(!doctype|\?xml|html|head|body|p|div|svg)\b",
    re.IGNORECASE | re.DOTALL,
)
BYTE_ORDER_MARK = "\ufeff"
LINE_ENDS = "\u2028\u2029"  # beside CR and LF
RECORD_SEPARATOR = "\x1e"
SPLIT_WORDS = {  # in the names of files, by split
    "train": {"train", "training"},
    "val": {"val", "valid", "validation", "dev"},
    "test": {"test", "testing"},
}
MAX_REPLACED = 0.01  # of a text's characters, by U+FFFD, before its encoding is a wrong one
MAX_EXCLUDED = 5  # patterns of a message
MAX_UNNAMED = 0.01  # of the bytes, in files whose names say no split, such as a README
URL = re.compile(r"\b(https?|ftp):/+(.+)")  # paths lose the second slash


class TextFile(NamedTuple):
    """A file of a text.

    Attributes:
        path: absolute.
        size, mtime_ns: in bytes and nanoseconds, when it was found.
        begin: number of characters before it; of a list of documents, the number of lines.
    """

    path: str
    size: int
    mtime_ns: int
    begin: int = 0

    def has_changed(self) -> bool:
        """Return whether it has another size or time now; not if it is gone."""
        try:
            status = os.stat(self.path)
        except (OSError, ValueError):  # as on another machine
            return False
        return (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns)


@dataclass(frozen=True)
class Source:
    """A text that can be read.

    Attributes:
        name: short name for messages and tables.
        files: the files to read, in order.
        stream: the whole text as a seekable stream, instead of files. A source without either is
            standard input.
        note: a sentence for the user, or "".
        held_out: the sources of the validation and test splits, by split, of a text that has such.
        root: absolute folder of several files, to which patterns of `text.exclude` are relative.
    """

    name: str
    files: tuple[TextFile, ...] = ()
    stream: IO[bytes] | None = None
    note: str = ""
    held_out: Mapping[str, "Source"] = field(default_factory=dict)
    root: str = ""


class Stretch(NamedTuple):
    """A file of a text, or a part of one that begins and ends between lines or documents.

    Attributes:
        path: of the file, or the name of a stream.
        begin, end: of a part, in bytes; None: where the file ends.
    """

    path: str
    begin: int = 0
    end: int | None = None


class Segment(NamedTuple):
    """A part of a text that is read at once.

    Attributes:
        split: that it is a part of.
        stretches: files, or one part of a large file.
        is_last: whether no other segment of the split follows.
        stream: is read instead of files.
    """

    split: str
    stretches: list[Stretch]
    is_last: bool
    stream: IO[bytes] | None = None


@dataclass
class Places:
    """Where the files and documents of a text begin.

    Attributes:
        files: number of characters before each file; of a list of documents, the number of lines.
        lines: number of lines before each document. Every file begins a new line.
        end: number of characters or lines so far.
        n_stored, n_bytes: bytes read so far, as stored and decompressed.
    """

    files: list[int] = field(default_factory=list)
    lines: "array[int]" = field(default_factory=lambda: array("q"))
    end: int = 0
    n_stored: int = 0
    n_bytes: int = 0


def require_text(content: object) -> None:
    """Check that an argument `text` is a text and not the path of one, else TextError."""
    if not isinstance(content, str):
        problem = f"text: expected a string (it is of type {type(content).__name__})"
    elif os.path.isfile(content):
        problem = f"{content} is a file, not a text"
    else:
        return
    raise TextError(f"{problem}; give its content, or the file as path= to train and evaluate")


def find_text(settings: TextConfig, text: str | None = None) -> Source:
    """Return the source of a text to train on, with those of its splits that have their own.

    The text is what `settings.path` names: a file, folder or glob, `-`, or None for the built-in
    text; or `text` itself.

    Raises:
        MissingTextError: there is no file.
        TextError: a path cannot be read, the text is none, or a file is in two splits.
    """
    source = _find(settings, text)
    paths = {"val": settings.val_path, "test": settings.test_path}
    held_out = {
        split: _find(settings.model_copy(update={"path": path}))
        for split, path in paths.items()
        if path is not None
    }
    if not held_out:
        return _split_by_name(source)
    if [settings.path, *paths.values()].count(STDIN) > 1:
        raise TextError("standard input is named twice; give one of the texts as a file")
    names = [file.path for each in (source, *held_out.values()) for file in each.files]
    if twice := next((path for path, n in Counter(names).items() if n > 1), None):
        raise TextError(f"{twice} is in two splits; give each split files of its own")
    return replace(source, held_out=held_out)


def _split_by_name(source: Source) -> Source:
    """Return a source with its files in splits, if their names say so, as published texts' do."""
    root = os.path.commonpath([file.path for file in source.files] or [""])
    parts = defaultdict[str, list[TextFile]](list)
    for file in source.files:
        words = re.split("[^a-z]+", os.path.relpath(file.path, root).lower())
        named = [split for split, names in SPLIT_WORDS.items() if not names.isdisjoint(words)]
        parts[named[0] if len(named) == 1 else ""].append(file)
    sizes = {split: sum(file.size for file in files) for split, files in parts.items()}
    others = parts.pop("", [])  # such as a README
    if {*parts} <= {"train"} or not (parts["train"] or others):
        return source
    by_size = sorted(others, key=lambda file: file.size)
    largest = Path(by_size[-1].path).name if others else ""
    if not parts["train"] or sizes.get("", 0) > MAX_UNNAMED * sum(sizes.values()):
        said = " and ".join(filter(parts.get, parts))
        note = (
            f"{source.note}; some names say {said}, but those of others do not, "
            f"such as {largest} (text.exclude): all files are one text"
        )
        return replace(source, note=note)
    counts = ", ".join(f"{len(parts[split]):,} {split}" for split in SPLIT_WORDS if split in parts)
    note = f"{source.note}; by their names: {counts}"
    if others:
        note += f"; not used: {len(others):,}, such as {largest}"
    held_out = {
        split: Source(
            os.path.relpath(parts[split][0].path, root)
            + (f" and {len(parts[split]) - 1:,} more" if len(parts[split]) > 1 else ""),
            tuple(parts[split]),
            root=source.root,
        )
        for split in ("val", "test")
        if split in parts
    }
    return replace(source, files=tuple(parts["train"]), note=note, held_out=held_out)


def _find(settings: TextConfig, text: str | None = None) -> Source:
    path = settings.path
    if text is not None:
        require_text(text)
        try:
            return Source("text in memory", stream=io.BytesIO(text.encode()))
        except UnicodeEncodeError as error:
            raise TextError(
                f"the text holds a lone surrogate at index {error.start:,}, which is not a "
                "character; decode its bytes with their true encoding"
            ) from None
    if path is None:
        return Source(BUILT_IN, stream=io.BytesIO(built_in_text().encode()))
    if path == STDIN:
        return Source("standard input")
    found = expand_user(path)
    try:
        mode = os.stat(found).st_mode
        if stat.S_ISDIR(mode):
            return _find_folder(found, settings)
        if stat.S_ISREG(mode):
            return Source(found.name, (_text_file(found),))
    except (OSError, ValueError) as error:
        if not is_missing(error):
            raise TextError(_unreadable(path, error)) from None
        if glob.has_magic(str(found)) and not URL.search(str(found)):
            return _find_glob(found, settings)
        raise MissingTextError(missing_message(found)) from None
    raise TextError(f"{path} is a device or a pipe, not a file; pipe its text in and name it `-`")


def _text_file(path: Path) -> TextFile:
    status = path.stat()
    return TextFile(str(path.absolute()), status.st_size, status.st_mtime_ns)


def missing_message(path: Path) -> str:
    """Return the message for a path that does not exist, with the most similar one that does."""
    if match := URL.search(str(path)):
        url = f"{match[1]}://{match[2]}"
        named = next((each.name for each in CATALOG.values() if each.url == url), None)
        command = f"chargpt data get {named}" if named else f"curl -LO {quoted(url)}"
        return f"{url} is an address and not a file; download it first: `{command}`"
    remedy = "correct the path, or see `chargpt data list` for texts to fetch"
    if similar := most_similar(str(path), CATALOG):
        remedy = f"did you mean `chargpt data get {similar}`?"
    with suppress(OSError):
        names = sorted(os.listdir(path.parent))[:MAX_COMPARED_NAMES]
        if similar := most_similar(path.name, names):
            remedy = f"did you mean {path.parent / similar}?"
    return f"there is no file {path}; {remedy}"


def _unreadable(path: str, error: OSError | ValueError) -> str:
    return (
        f"{path} cannot be read ({reason_of(error)}); change its permissions or name another file"
    )


def _find_glob(pattern: Path, settings: TextConfig) -> Source:
    root = Path(*takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    matches = glob.iglob(str(pattern), recursive=True)
    paths = {path.absolute() for path in map(Path, matches) if path.is_file()}
    if not paths:
        raise MissingTextError(f"no file matches {pattern}; correct the pattern or quote it")
    return _selected("/".join(pattern.parts[-3:]), root, paths, settings)


def _find_folder(root: Path, settings: TextConfig) -> Source:
    """Return the folder's files, without hidden ones."""
    endings = tuple("." + suffix.lower().lstrip("*").lstrip(".") for suffix in settings.suffixes)
    paths: set[Path] = set()
    others: Counter[str] = Counter()  # endings of the files that are left out
    examples: dict[str, Path] = {}  # of these endings
    visited: set[str] = set()

    def reject(error: OSError) -> None:
        raise TextError(_unreadable(str(error.filename), error))

    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=reject):
        if (real := os.path.realpath(folder)) in visited:  # a symbolic link to a parent
            subfolders.clear()
            continue
        visited.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            if not path.is_file():
                continue
            if path.name.lower().endswith(endings):
                paths.add(path.absolute())
            else:
                others[path.suffix] += 1
                examples.setdefault(path.suffix, path)
        if len(paths) > MAX_FILES:
            raise TextError(f"{root} holds over {MAX_FILES:,} files; join them into fewer")
    kind = f"in {', '.join(endings)} (text.suffixes)"
    if not paths:
        if runs := [*root.glob("checkpoints"), *root.glob("*/checkpoints")]:
            run = runs[0].parent
            raise MissingTextError(
                f"{root} is a {'run' if run == root else 'folder of runs'}, not a text; name a "
                f"text (`chargpt train --resume {quoted(run)}` continues the run)"
            )
        common = max(others, key=others.__getitem__, default="")
        read = f"-s text.suffixes={common}" if common else quoted(f"{glob.escape(str(root))}/*")
        remedy = f"; name another folder, or its files: {read}"
        if others and (problem := problem_of(_head(str(examples[common])))):
            remedy = f", and {examples[common].name} (1 of {others[common]:,}) {problem}"
        raise MissingTextError(f"the folder {root} holds no file that ends {kind}{remedy}")
    listed = (f"{n:,} {ending or 'without an ending'}" for ending, n in others.most_common(3))
    left_out = f"; not read: {others.total():,} ({', '.join(listed)})" if others else ""
    name = f"{root.absolute().name}/"
    return _selected(name, root, paths, settings, f", which end {kind}", left_out)


def _selected(
    name: str, root: Path, paths: set[Path], settings: TextConfig, kind: str = "", others: str = ""
) -> Source:
    """Return the files that `text.exclude` does not match, in natural order: 2 before 10.

    Args:
        root: absolute or not; patterns match names, and paths relative to it, also of folders.
        kind, others: what the note says of these files, and of others.
    """

    def is_excluded(path: Path) -> bool:
        if not settings.exclude:
            return False
        inside = path.relative_to(root.absolute())
        names = {path.name, *(each.as_posix() for each in (inside, *inside.parents))}
        return any(fnmatchcase(name, each) for each in settings.exclude for name in names)

    @cache
    def natural(part: str) -> list[str | int]:
        return [int(each) if each.isdecimal() else each for each in re.split(r"(\d+)", part)]

    kept = (path for path in paths if not is_excluded(path))
    files = sorted(kept, key=lambda path: ([*map(natural, path.parts)], str(path)))
    if not files:
        raise MissingTextError(
            f"text.exclude leaves out all files of {name}: {len(paths):,}; exclude fewer"
        )
    if excluded := len(paths) - len(files):
        others += f"; left out by text.exclude: {excluded:,}"
    note = f"files read of {name}: {len(files):,}{kind}, sorted by path and number{others}"
    is_notable = kind or len(paths) > 1
    note = note if is_notable else ""
    return Source(name, tuple(map(_text_file, files)), note=note, root=str(root.absolute()))


@contextmanager
def opened(
    source: Source,
    settings: TextConfig,
    folder: Path | None = None,
    max_bytes: int = MAX_TEXT_BYTES,
) -> Iterator[Source]:
    """Yield a source that can be read more than once, and log what is notable about it.

    Standard input becomes a temporary file in `folder`. Of several files those that are no text are
    left out, if the encoding is `auto` and any of them is one.

    Raises:
        TextError: a file cannot be read, or standard input is longer than `max_bytes`.
    """
    if source.note:
        logger.info(source.note)
    with ExitStack() as stack:
        if not source.files and source.stream is None:
            copy = stack.enter_context(tempfile.TemporaryFile(dir=folder))
            copy_stdin(copy.write, max_bytes)
            source = replace(source, stream=copy)
        yield _without_others(source, settings)


def _without_others(source: Source, settings: TextConfig) -> Source:
    """Return a source without the files that are no text, and log what the files' starts show.

    Raises:
        TextError: some files begin with UTF-8, and another with a text that is none.
    """
    codec, has_utf8 = codec_name(settings.encoding), False
    others = dict[str, UnicodeDecodeError]()  # by path, of files of another encoding
    files: list[TextFile | None] = [*source.files] or [None]
    problems = dict[TextFile, str]()
    marked_up, utf8 = list[str](), list[str]()
    for file in files:
        head = next(_read(Stretch(file.path if file else source.name), source.stream))[0]
        name, problem = Path(file.path).name if file else source.name, problem_of(head)
        if file and codec == "auto" and problem:
            problems[file] = problem
        elif codec != "auto" and "make text of it" in problem:
            logger.warning(f"{name} {problem}: its bytes are read as {codec}")
        own_codec, start = _codec_of(codec, head), ""
        with suppress(UnicodeError):  # as of a codec of host names
            start = head.decode(own_codec, "ignore")
        if MARKUP.match(start):
            marked_up.append(name)
        if head.isascii() or problem:
            continue
        if (error := _utf8_error(head)) is not None:
            if file and own_codec == "utf-8":
                others[file.path] = error
            continue
        has_utf8 = True
        # latin-1 is the encoding of those who train on bytes
        if not own_codec.startswith(("utf", "iso8859-1")):
            utf8.append(name)
    texts = tuple(file for file in source.files if file not in problems)
    if problems and any(file.size for file in texts):
        first = min(problems)
        logger.warning(
            f"files not read: {len(problems):,}, such as {Path(first.path).name}, which "
            f"{problems[first]}"
        )
        source = replace(source, files=texts)
    if has_utf8 and others and settings.encoding_errors == "strict":
        relative = (Path(os.path.relpath(path, source.root)).as_posix() for path in others)
        excluded = [*settings.exclude, *map(glob.escape, relative)]
        path, first_error = next(iter(others.items()))
        raise TextError(_undecodable(path, "utf-8", 0, first_error, excluded))
    if utf8:
        logger.warning(f"{utf8[0]} looks like UTF-8 and is read as {codec}")
    if marked_up:
        logger.warning(
            f"files of HTML or XML, whose tags are read as text: {len(marked_up):,}, such as "
            f"{marked_up[0]}; `pandoc -t plain` removes them"
        )
    return source


def _head(path: str) -> bytes:
    """Return the first chunk of a file, decompressed."""
    return next(_read(Stretch(path), None))[0]


def problem_of(head: bytes) -> str:
    """Return why a file that begins with `head` is no UTF-8 text, and a remedy; "" if it may be.

    It is binary if it holds a NUL byte, and over 2% control characters.
    """
    if head.startswith(tuple(mark for mark, _ in BOMS)):
        return ""
    for begin, kind, tool in NOT_TEXT if ANY_NOT_TEXT.match(head) else ():
        if re.match(begin, head, re.DOTALL):
            return f"is {kind}; make text of it with `{tool}`, and name that"
    n_control, n_nul = len(head) - len(head.translate(None, CONTROL)), head.count(0)
    if re.search(rb"\x1b(\$[@B]|\([BJ])", head) and head.isascii():
        return "is ISO-2022-JP; read it with --encoding iso2022_jp"
    if not n_nul or n_control <= max(1, MAX_CONTROL * len(head)):
        return ""
    for encoding in ("utf-16-le", "utf-16-be") if len(head) % 2 == 0 else ():
        counts = Counter(head.decode(encoding, "replace"))
        n_ascii = sum(n for char, n in counts.items() if char.isascii())
        if 2 * n_ascii >= n_nul and count_garbage(counts) <= MAX_CONTROL * counts.total():
            return f"is UTF-16 without a byte order mark; read it with --encoding {encoding}"
    return (
        f"is binary (control characters, such as NUL bytes: {n_control:,} of the first "
        f"{len(head):,} bytes); name a text"
    )


def copy_stdin(write: Callable[[bytes], object], max_bytes: int) -> None:
    """Copy standard input, which can be read only once; TextError if it is closed or too large."""
    if sys.stdin is None:
        raise TextError("standard input is closed; pipe a text in, or name a file")
    if sys.stdin.isatty():
        logger.info("type the text; Ctrl-D ends it")
    size, stream = 0, cast(io.BufferedIOBase, sys.stdin.buffer)
    while content := stream.read1(CHUNK_BYTES):  # `read` needs two Ctrl-D on a terminal
        size += len(content)
        if size > max_bytes:
            raise TextError(f"standard input is over {max_bytes:,} bytes; give a shorter text")
        write(content)


def split_source(source: Source, split: str, settings: TextConfig) -> list[Segment]:
    """Return the files of an opened source in segments of about `SEGMENT_BYTES`.

    The text is that of its segments in a row. Only large files are divided, of UTF-8 text that is
    not compressed.

    Raises:
        OSError: a file cannot be read.
    """
    segments, size = [list[Stretch]()], 0
    for file in source.files:
        cuts = _find_cuts(file, settings) if file.size > SEGMENT_BYTES else ()
        for begin, end in pairwise([0, *cuts, None]):
            if size >= SEGMENT_BYTES:
                segments.append([])
                size = 0
            segments[-1].append(Stretch(file.path, begin or 0, end))
            size += (file.size if end is None else end) - (begin or 0)
    if not source.files:
        segments = [[Stretch(source.name)]]
    return [Segment(split, each, each is segments[-1], source.stream) for each in segments]


def _find_cuts(file: TextFile, settings: TextConfig) -> Iterator[int]:
    """Yield the offsets at which a large file can be divided: after a line, or a separator."""
    documents = settings.documents
    mark = b"\n" if documents in (None, "auto", "lines") else documents.encode()
    # "aa" may begin at either "a" of "aaa", but further line ends belong to the separator
    overlaps = mark.strip(b"\n") and any(mark.startswith(mark[i:]) for i in range(1, len(mark)))
    is_ambiguous = overlaps or not {*LINE_ENDS}.isdisjoint(mark.decode())  # which may become LF
    with open(file.path, "rb") as raw:
        head = raw.read(CHUNK_BYTES)
        is_utf8 = _codec_of(codec_name(settings.encoding), head) == "utf-8"
        if documents == "files" or is_ambiguous or not is_utf8 or head.startswith(GZIP_MAGIC):
            return
        cut, target = 0, SEGMENT_BYTES
        while target < min(file.size, cut + 2 * SEGMENT_BYTES):
            raw.seek(target)
            found = raw.read(CHUNK_BYTES).find(mark)
            target += CHUNK_BYTES
            if found >= 0:
                cut = target - CHUNK_BYTES + found + len(mark)
                target = cut + SEGMENT_BYTES
                if cut < file.size:
                    yield cut


def _read(stretch: Stretch, stream: IO[bytes] | None) -> Iterator[tuple[bytes, int]]:
    """Yield chunks of a file or stream, decompressed if it is a gzip file, and the bytes read.

    Of an empty one there is one empty chunk. It is not read: those of /proc and /sys state a size
    of 0, and some of them have no end.

    Raises:
        TextError: it cannot be read, or is a gzip file that is damaged or expands too much.
    """
    name, begin, end = stretch
    try:
        with open(name, "rb", buffering=0) if stream is None else nullcontext(stream) as raw:
            if stream is None and not os.fstat(raw.fileno()).st_size:
                yield b"", 0
                return
            raw.seek(0)
            is_gzip = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC or name.lower().endswith(".gz")
            raw.seek(begin)
            file = gzip.GzipFile(fileobj=raw, mode="rb") if is_gzip else raw

            def read() -> bytes:
                size = CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - raw.tell())
                return file.read(size)

            content = read()
            yield content, raw.tell()
            while content := read():
                if is_gzip and file.tell() > max(MAX_EXPANDED, MAX_EXPANSION * raw.tell()):
                    raise TextError(
                        f"{name} is a gzip file that expands to over {MAX_EXPANSION} times its "
                        "size; if it is a text, decompress it with gunzip"
                    )
                yield content, raw.tell()
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise TextError(
            f"{name} is not a complete gzip file (damaged, cut short or misnamed); fetch it again"
        ) from None
    except OSError as error:
        raise TextError(_unreadable(name, error)) from None


def codec_name(encoding: str) -> str:
    """Return the canonical name of a text encoding, or raise TextError; `auto` stays `auto`."""
    if encoding == "auto":
        return encoding
    with suppress(LookupError, ValueError):
        info = codecs.lookup(encoding)
        if getattr(info, "_is_text_encoding", True) and info.incrementaldecoder:
            return info.name
    raise TextError(
        f"there is no text encoding {encoding!r:.60}; "
        "common ones are utf-8, utf-16, cp1252, cp1251, latin-1"
    )


def text_pieces(
    segment: Segment,
    settings: TextConfig,
    places: Places | None = None,
    on_chunk: Callable[[str, bytes], object] = lambda *_: None,
) -> Iterator[str]:
    """Yield the text of a segment in pieces, with the EOS tokens of its documents.

    Args:
        places: receives where files and documents begin.
        on_chunk: called with the path of a file and bytes of it, decompressed.

    Raises:
        TextError: a file cannot be read or is a damaged archive, or the text is too large; bytes
            that do not decode are named with their offset, if errors are `strict`.
    """
    codec = codec_name(settings.encoding)
    places = places or Places()

    def chunks(stretch: Stretch) -> Iterator[bytes]:
        before = places.n_stored - stretch.begin
        for content, position in _read(stretch, segment.stream):
            places.n_bytes += len(content)
            require_size(places.n_bytes, stretch.path)
            if content:
                on_chunk(stretch.path, content)
            places.n_stored = before + position
            yield content

    files = (
        _decode_file(stretch, codec, settings.encoding_errors, chunks(stretch))
        for stretch in segment.stretches
    )
    if settings.newlines == "lf":
        files = (lf_newlines(pieces) for pieces in files)
    yield from mark_documents(files, settings.documents, places, is_last=segment.is_last)
    if segment.stretches[0].begin:
        del places.files[0]
    if segment.stretches[-1].end is not None and eos_token_of(settings.documents):
        places.end -= 1  # that of the end of a file


def require_size(n_bytes: int, path: str) -> None:
    """Raise TextError if a text has more bytes, decompressed, than are accepted."""
    if n_bytes > MAX_TEXT_BYTES:
        raise TextError(
            f"the text is over {MAX_TEXT_BYTES:,} bytes, decompressed, at {path}; give a shorter "
            "text"
        )


def require_unchanged(source: Source) -> None:
    """Raise TextError if a file of a source has changed since it was found."""
    for file in source.files:
        if file.has_changed():
            raise TextError(CHANGED.format(file.path))


def lf_newlines(pieces: Iterable[str]) -> Iterator[str]:
    """Yield pieces of a text with line ends of every kind as LF."""
    decoder = io.IncrementalNewlineDecoder(None, translate=True)
    for piece in pieces:
        text = decoder.decode(piece)
        for line_end in LINE_ENDS:
            text = text.replace(line_end, "\n")
        yield text
    yield decoder.decode("", final=True)


def _codec_of(codec: str, head: bytes) -> str:
    """Return the codec of a file: that of its byte order mark, if `codec` leaves it open."""
    for mark, marked in BOMS:
        if head.startswith(mark) and (codec == "auto" or marked.startswith(codec)):
            return marked
    return "utf-8" if codec in ("auto", "utf-8-sig") else codec


def _decode_file(
    stretch: Stretch, codec: str, errors: str, contents: Iterator[bytes]
) -> Iterator[str]:
    """Yield the text of one file's chunks, which may end inside a character, without its BOM."""
    name, offset, _ = stretch  # of the chunk's first byte
    head = next(contents)
    is_start = offset == 0
    codec = _codec_of(codec, head if is_start else b"")
    if is_start and codec == "utf-8" and (problem := problem_of(head)):
        raise TextError(f"{name} {problem}")
    decoder = codecs.getincrementaldecoder(codec)(errors)
    for content in chain([head], contents, [b""]):
        n_pending = len(decoder.getstate()[0])  # bytes of an incomplete character
        try:
            text = decoder.decode(content, final=not content)
        except UnicodeError as error:
            raise TextError(_undecodable(name, codec, offset - n_pending, error)) from None
        offset += len(content)
        if text:
            yield text.removeprefix(BYTE_ORDER_MARK) if is_start else text
            is_start = False


def _undecodable(
    name: str, codec: str, offset: int, error: UnicodeError, excluded: Sequence[str] = ()
) -> str:
    """Return the message for an error in bytes that begin at `offset` of the file.

    If `excluded` are given, patterns that leave such files out, others of the text are UTF-8.
    """
    problem, guesses, is_auto, has_few = str(error), list[tuple[str, str]](), False, True
    if isinstance(error, UnicodeDecodeError):
        content = error.object
        byte, position = content[error.start], offset + error.start
        problem = f"byte 0x{byte:02X} at offset {position:,}: {error.reason}"
        if codec == "utf-8" and error.reason == "unexpected end of data":
            return (
                f"{name} ends within a character ({problem}), as a file that was cut does; leave "
                f"its last bytes out: head -c {position} {quoted(name)}"
            )
        guesses = guess_encodings(content, error.start)
        is_readable = _codec_of("auto", content) != "utf-8" or _utf8_error(content) is None
        is_auto = is_readable and not codec.startswith(("utf-16", "utf-32"))
        with suppress(UnicodeError):  # as of a codec of host names
            n_replaced = content.decode(codec, "replace").count("\ufffd")
            has_few = n_replaced <= MAX_REPLACED * len(content)
    problem = f"{name} is not {codec.upper()} text ({problem})"
    readings = ", ".join(f'{encoding} reads it as "{words}"' for encoding, words in guesses)
    if excluded and readings:
        command = f"iconv -f {guesses[0][0].replace('_', '-')} -t utf-8"
        is_packed = name.lower().endswith(".gz")
        command = f"zcat {quoted(name)} | {command}" if is_packed else f"{command} {quoted(name)}"
        remedy = f"replace it by the output of `{command}` ({readings})"
        if len(excluded) <= MAX_EXCLUDED:
            patterns = quoted(json.dumps(excluded, ensure_ascii=False))
            remedy += f", or leave it out with -s text.exclude={patterns}"
        problem += ", unlike other files of the text"
    else:
        advice = "auto reads it" if is_auto else readings
        advice = f" (--encoding {advice})" if advice else " with --encoding"
        remedy = f"name the encoding of the whole text{advice} or convert it to UTF-8"
    return f"{problem}; {remedy}{REPLACE_REMEDY if has_few else ''}"


def _utf8_error(content: bytes) -> UnicodeDecodeError | None:
    """Return why bytes, which may end inside a character, are not UTF-8; None if they are."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content)
    except UnicodeDecodeError as error:
        return error
    return None


def decode_bytes(content: bytes, encoding: str, name: str = "the text") -> tuple[str, str, str]:
    """Return a text as a corpus reads it, its codec, and its byte order mark or "".

    Raises:
        TextError: the bytes do not decode, or the text does not encode to the same bytes.
    """
    if content.startswith(GZIP_MAGIC):
        raise TextError(
            f"{name} is a gzip file, whose bytes would not be restored; decompress it with gunzip"
        )
    codec = _codec_of(codec_name(encoding), content)
    try:
        text = content.decode(codec)
    except UnicodeError as error:
        problem = problem_of(content[:CHUNK_BYTES]) if codec == "utf-8" else ""
        message = f"{name} {problem}" if problem else _undecodable(name, codec, 0, error)
        raise TextError(message.removesuffix(REPLACE_REMEDY)) from None  # it would not be restored
    with suppress(UnicodeError):
        if text.encode(codec) == content:
            mark = BYTE_ORDER_MARK if text.startswith(BYTE_ORDER_MARK) else ""
            return text.removeprefix(mark), codec, mark
    raise TextError(
        f"{name} is read as {codec.upper()}, which does not give the same bytes back; convert it "
        "to UTF-8"
    )


def eos_token_of(documents: str | None) -> str:
    """Return the character that ends each document of `text.documents`; "" if that is null."""
    return {None: "", "auto": "", "lines": "\n"}.get(documents, RECORD_SEPARATOR)


def mark_documents(
    files: Iterable[Iterator[str]],
    documents: str | None,
    places: Places | None = None,
    *,
    is_last: bool = True,
) -> Iterator[str]:
    """Yield the text of files with the EOS token after each document, and no empty document.

    Without documents, a line end follows a file that lacks one, if it is not the last.

    Args:
        files: pieces of the text of each file; a document ends where its file ends. TextError if
            one holds U+001E, unless that separates them or they are lines.
        documents: `lines`, `files`, the separator of the documents, or None or `auto`: nothing is
            changed. If it holds a line end, the documents' line ends become LF.
        places: receives where files and documents begin.
        is_last: whether no other files follow.
    """
    places = places or Places()
    eos_token = eos_token_of(documents)
    before = "\n"  # the last piece of a file
    for pieces in chain(files, () if is_last else [None]):
        if not before.endswith(("\n", "\r", *LINE_ENDS)):
            newline = "\r\n" if "\r\n" in before else "\n"
            places.end += len(newline)
            yield newline
        if pieces is None:
            return
        places.files.append(places.end)
        before = "\n"
        if not eos_token or documents is None:
            for piece in pieces:
                places.end += len(piece)
                before = piece or before
                yield piece
            continue
        separator = {"lines": "\n", "files": RECORD_SEPARATOR}.get(documents, documents)
        n_separating = separator.count("\n")  # lines that end in a separator
        # line ends at the start of a document belong to the separator; after a line there are none
        is_stripped = len(separator) > 1 and separator[-1] == "\n"
        is_open = False  # whether a document has begun
        for *ended, last in _split(pieces, documents, separator):
            text = list[str]()
            for part, has_ended in (*zip(ended, repeat(True)), (last, False)):
                if is_stripped and not is_open:
                    places.end += len(part) - len(part := part.lstrip("\n"))
                if part and not is_open:
                    places.lines.append(places.end)
                    is_open = True
                text.append(part)
                places.end += part.count("\n")
                if has_ended:
                    text.append(eos_token if is_open else "")
                    places.end += n_separating
                    is_open = False
            yield "".join(text)
        if is_open:
            yield eos_token
        places.end += 1


def as_read(text: str, settings: TextConfig) -> str:
    """Return a text with the line ends and documents that reading it from a file would give it.

    Raises:
        TextError: as of `mark_documents`.
    """
    pieces = lf_newlines([text]) if settings.newlines == "lf" else iter([text])
    return "".join(mark_documents([pieces], settings.documents))


def _split(pieces: Iterator[str], documents: str, separator: str) -> Iterator[list[str]]:
    """Yield the text of one file in parts of documents, of which all but the last have ended."""
    rest = ""
    for piece in lf_newlines(pieces) if "\n" in separator else pieces:
        if RECORD_SEPARATOR in piece and documents not in ("lines", RECORD_SEPARATOR):
            raise TextError(
                "the text holds the character U+001E, which marks the end of a document; remove it"
            )
        *ended, rest = (rest + piece).split(separator)
        complete = max(0, len(rest) - len(separator) + 1)  # the rest may begin a separator
        yield [*ended, rest[:complete]]
        rest = rest[complete:]
    yield [rest]


def read_text(path: str | os.PathLike[str], settings: TextConfig = TextConfig()) -> str:
    """Return a whole text: a file, folder, glob or `-`, read like a corpus with these settings.

    Raises:
        TextError: it cannot be read or decoded, or is over 2^30 characters.
    """
    texts: list[str] = []
    size = 0
    max_bytes = 4 * (MAX_READ_CHARACTERS + 1)  # at 4 bytes each, and a byte order mark
    found = _find(settings.model_copy(update={"path": str(path)}))
    with opened(found, settings, max_bytes=max_bytes) as source:
        stretches = [Stretch(file.path) for file in source.files] or [Stretch(source.name)]
        for text in text_pieces(Segment("", stretches, True, source.stream), settings):
            size += len(text)
            if size > MAX_READ_CHARACTERS:
                raise TextError(
                    f"{path} is over {MAX_READ_CHARACTERS:,} characters; give a shorter text"
                )
            texts.append(text)
        require_unchanged(source)
    return "".join(texts)
