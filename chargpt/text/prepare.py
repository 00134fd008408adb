"""Prepare a text for training: read it in two passes and store its token ids in a folder.

    tokens.bin  ids in the smallest unsigned dtype that holds them
    lines.bin   of a list of documents, shuffled like them: int64, the number of lines before each
    meta.json   name, key, files, and sizes and checksums of the others; written last

The first pass counts the characters, for the tokenizer, and hashes the bytes, for the key. The
second pass encodes. Both go by segments, those of a long text in several processes, and with a
journal from which an interrupted preparation goes on (workers.py). Documents are then stored in
`shuffled_order`, so that every split is a sample of them. Validation and test splits that have
files of their own follow the text. The memory needed is that of a chunk per process, and of the
order of the documents.
"""

import hashlib
import json
import os
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, BeforeValidator, FailFast, NonNegativeInt, Strict
from xxhash import xxh3_64, xxh3_128

from chargpt.config import TextConfig
from chargpt.errors import RunError, TextError, UnreadableError, reason_of
from chargpt.files import IS_WINDOWS, in_background, open_regular, read_json, to_json
from chargpt.log import logger
from chargpt.text import TextProgress
from chargpt.text.corpus import Corpus, HeldOut, count_tokens, shuffled, shuffled_order
from chargpt.text.describe import sure_documents
from chargpt.text.display import REPLACEMENT
from chargpt.text.source import (
    CHANGED,
    CHUNK_BYTES,
    MAX_REPLACED,
    SEGMENT_BYTES,
    Places,
    Segment,
    Source,
    TextFile,
    codec_name,
    eos_token_of,
    find_text,
    opened,
    require_size,
    require_unchanged,
    split_source,
    text_pieces,
)
from chargpt.text.tokenizer import (
    N_CODE_POINTS,
    CharTokenizer,
    Ints,
    Rare,
    Tokens,
    choose_min_count,
    code_points,
    codes_to_text,
    name_characters,
)

TOKENS, LINES, META = "tokens.bin", "lines.bin", "meta.json"
# of a text that is being prepared; before documents are shuffled
JOURNAL, UNSHUFFLED = "journal.jsonl", ("unshuffled.bin", "unshuffled-lines.bin")
TEXT_FILES = (TOKENS, LINES, META, JOURNAL, *UNSHUFFLED)
KEY_VERSION = 2  # which a key begins with; of version 1 it does not
# XXH3 is many times as fast, and neither keys nor checksums need protection against forged texts
HASHES: dict[int, Callable[..., Any]] = {
    1: partial(hashlib.blake2b, digest_size=32),
    2: xxh3_128,
}
MAX_META_BYTES = 500_000_000  # of a million files
MAX_HELD_BYTES = 1 << 26  # of a file that is read into memory instead of mapped
MAX_START = 500_000  # characters by which a list is recognised
MIN_SEGMENTS = 8  # of a text for several processes, which take 0.3 s to start
CHECK_DELAY = 2.0  # seconds until a resumed run's long text is checked, beside its steps


class Counted(NamedTuple):
    """What the first pass finds in a segment.

    Attributes:
        n_stored, n_bytes: bytes read, as stored and decompressed.
        codes, counts: the code points in it, and how often each occurs.
        digests: of the bytes of each stretch; "" of none.
        begins: number of characters before each file that begins in it; of a list of documents,
            the number of lines.
        end: that number of all.
    """

    n_stored: int
    n_bytes: int
    codes: list[int]
    counts: list[int]
    digests: list[str]
    begins: list[int]
    end: int


class Encoded(NamedTuple):
    """What the second pass has written of a segment: checksums of tokens, and of lines if any."""

    n_stored: int
    checksums: list[int]


class Offset(NamedTuple):
    """Number of tokens, documents, and characters or lines before a segment."""

    token: int = 0
    document: int = 0
    place: int = 0


RunPass = Callable[[str, Sequence[Sequence[Any]]], list[Any]]  # see `_runner`


def _as_parts(value: Any) -> Any:
    """Return a list of sizes and checksums; in version 1 there is one pair, of the whole file."""
    is_pair = isinstance(value, list) and [*map(type, value)] == [int, int]
    return [value] if is_pair else value


def _require_few(value: Any) -> Any:
    """Reject a mapping of more than two keys, as its errors would take gigabytes."""
    if isinstance(value, dict) and len(value) > 2:
        raise ValueError("it has more than two keys")
    return value


Part = Annotated[tuple[NonNegativeInt, int], Strict(False)]  # size and checksum; JSON has lists
Parts = Annotated[list[Part], FailFast(), BeforeValidator(_as_parts)]


class _Meta(BaseModel, strict=True, title=META):
    """The content of `meta.json`, beside its own CRC-32, `crc32`."""

    name: str
    key: str
    rare_count: NonNegativeInt
    tokenizer_sha256: str
    # size and checksum of the consecutive parts of the other files, by name
    checksums: Annotated[dict[str, Parts], BeforeValidator(_require_few)]
    files: Annotated[list[TextFile], FailFast()]
    held_out: Annotated[dict[str, HeldOut], BeforeValidator(_require_few)] = {}
    format: Literal["chargpt-text"] = "chargpt-text"
    version: Literal[1, 2, 3] = 3  # before it, checksums were CRC-32

    def require_consistent(self, tokenizer: CharTokenizer, key: str | None) -> None:
        """Check that it is of the run's text, and its numbers against each other, else ValueError.

        Tokenizer and key are as for `read_prepared`.
        """
        if self.tokenizer_sha256 != _sha256(tokenizer) or key not in (None, self.key):
            raise ValueError("it is the text of another run")
        sizes = {name: sum(size for size, _ in parts) for name, parts in self.checksums.items()}
        units = {TOKENS: tokenizer.dtype.itemsize, **({LINES: 8} if tokenizer.eos_token else {})}
        if sizes.keys() != units.keys() or any(sizes[name] % unit for name, unit in units.items()):
            raise ValueError(f"{META} lists other files, or other sizes, than a text has")
        n_tokens = sizes[TOKENS] // units[TOKENS]
        held_out = [
            self.held_out[split].begin for split in ("val", "test") if split in self.held_out
        ]
        begins = [file.begin for file in self.files]
        if (
            not self.held_out.keys() <= {"val", "test"}
            or any(begin >= end for begin, end in pairwise([0, *held_out, n_tokens]))
            or [0, *begins] != sorted([0, *begins])
            or self.rare_count > n_tokens
        ):
            raise ValueError(f"{META} holds offsets or counts that no text has")


def load_corpus(
    settings: TextConfig | str | Path = TextConfig(),
    *,
    text: str | None = None,
    on_progress: TextProgress | None = None,
) -> Corpus:
    """Return a prepared text whose files are deleted already and last as long as the object.

    `settings` is a path, or names one; `text` is the text itself instead. The other arguments and
    the errors are those of `prepare`.
    """
    if not isinstance(settings, TextConfig):
        settings = TextConfig(path=str(settings))
    source = find_text(settings, text)
    with tempfile.TemporaryDirectory(prefix="chargpt-") as folder:
        return replace(prepare(source, settings, Path(folder), on_progress), folder=None)


def prepare(
    source: Source,
    settings: TextConfig,
    folder: Path,
    on_progress: TextProgress | None = None,
    like: str | None = None,
) -> Corpus:
    """Read and encode a text, write it to a folder, and log what is notable about it.

    The folder is empty, or made here; its files are not flushed to disk. `on_progress` is called
    with "reading" in the first pass and "encoding" in the second. `like` is a key that the text's
    is to be compared with.

    Raises:
        TextError: the text is empty, changes while it is read, cannot be read or decoded, or the
            disk is full.
    """
    if source.stream is not None:  # a text in memory and the built-in text are UTF-8
        settings = settings.model_copy(update={"encoding": "auto"})
    codec_name(settings.encoding)  # rejects unknown ones
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            parts = {
                split: stack.enter_context(opened(each, settings, folder))
                for split, each in {"train": source, **source.held_out}.items()
            }
            if settings.documents == "auto":
                segment = split_source(parts["train"], "train", settings)[0]
                start = next(_merged(text_pieces(segment, settings), MAX_START), "")
                settings = settings.model_copy(update={"documents": sure_documents(start)})
            is_last = len(parts["train"].files) > 1 and "val" not in parts
            if is_last and settings.documents is None:
                logger.warning(
                    "the validation split is the end of the last files; -s text.documents=files "
                    "shuffles the files and splits between them"
                )
            segments = [
                segment
                for split, part in parts.items()
                for segment in split_source(part, split, settings)
            ]
            version = KEY_VERSION if like is None else version_of(like)
            runner = _runner(parts, segments, settings, folder, on_progress, version)
            run_pass = stack.enter_context(runner)
            return _encode(parts, segments, settings, folder, run_pass, version)
    except OSError as error:
        raise TextError(
            f"{source.name} cannot be read, or encoded in {folder} ({reason_of(error)}); check "
            "both disks, or name another place with --out (without a run: TMPDIR)"
        ) from None


def _encode(
    parts: Mapping[str, Source],
    segments: Sequence[Segment],
    settings: TextConfig,
    folder: Path,
    run_pass: RunPass,
    version: int,
) -> Corpus:
    """Read the segments of all parts in both passes and write the files; see `prepare`."""
    counted = [Counted(*each) for each in run_pass("reading", [[version]] * len(segments))]
    counts = {split: np.zeros(N_CODE_POINTS, np.int64) for split in parts}
    for segment, each in zip(segments, counted, strict=True):
        counts[segment.split][np.array(each.codes, np.intp)] += np.array(each.counts, np.int64)
    for split, part in parts.items():
        require_unchanged(part)
        if not counts[split].any():
            raise TextError(f"{part.name} is empty; give a text that holds characters")
    require_size(sum(each.n_bytes for each in counted), parts["train"].name)
    total = sum(counts.values(), np.zeros_like(counts["train"]))
    _log_characters(total, counts["train"], settings)
    min_count = settings.min_count or choose_min_count(total)
    rare = settings.rare if min_count > 1 else "keep"
    tokenizer = CharTokenizer.from_counts(
        total, min_count, rare, eos_token_of(settings.documents), settings.extra_characters
    )
    offsets = _offsets(counted, tokenizer)
    firsts = dict[str, Offset]()  # by split
    for segment, offset in zip(segments, offsets, strict=False):
        firsts.setdefault(segment.split, offset)
    n_before = [offset.document for offset in firsts.values()]
    checksums = _write_tokens(run_pass, offsets, n_before, tokenizer, settings.seed, folder)
    for part in parts.values():
        require_unchanged(part)
    files = [file for part in parts.values() for file in part.files]
    begins = [
        offset.place + begin
        for segment, offset, each in zip(segments, offsets, counted, strict=False)
        for begin in each.begins
        if segment.stream is None
    ]
    digests = _digests(segments, counted, version)
    meta = _Meta(
        name=_as_utf8(parts["train"].name),
        key=text_key(digests, settings, 1 if rare == "keep" else min_count, rare, version),
        rare_count=int(total.sum() - total[code_points(tokenizer.characters)].sum()),
        tokenizer_sha256=_sha256(tokenizer),
        checksums=checksums,
        files=[
            file._replace(path=_as_utf8(file.path), begin=begin)
            for file, begin in zip(files, begins, strict=True)
        ],
        held_out={
            split: HeldOut(_as_utf8(part.name), firsts[split].token)
            for split, part in parts.items()
            if split != "train"
        },
    )
    content = meta.model_dump()
    content["crc32"] = zlib.crc32(to_json(content))
    (folder / META).write_bytes(to_json(content))
    return _open(folder, settings, tokenizer, meta)


@contextmanager
def _runner(
    parts: Mapping[str, Source],
    segments: Sequence[Segment],
    settings: TextConfig,
    folder: Path,
    on_progress: TextProgress | None,
    version: int,
) -> Iterator[RunPass]:
    """Yield what runs a pass over all segments: in this process or, of a long text, in several.

    It is called with the name of the pass and the further arguments of its function for each
    segment, and returns the results.
    """
    files = [(split, file) for split, part in parts.items() for file in part.files]
    streams = [part.stream for part in parts.values() if part.stream is not None]
    total = sum(file.size for _, file in files)
    total += sum(stream.seek(0, os.SEEK_END) for stream in streams)
    workers = None
    if len(segments) >= MIN_SEGMENTS and sys.executable and not streams:
        from chargpt.text.workers import Workers  # most texts do not need them

        workers = Workers(folder, [version, files, settings.model_dump(mode="json")])
    else:
        delete_text_files(folder)  # of an interrupted preparation of another text

    def run_pass(stage: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        def report(n_read: int) -> None:
            if on_progress:
                on_progress(stage, n_read, total)

        if workers is not None:
            return workers.run(stage, segments, settings, arguments, report)
        results, item, n_read = list[Any](), None, 0
        for segment, more in zip(segments, arguments, strict=True):
            for item in PASSES[stage](segment, settings, None, *more):
                report(n_read + (item if isinstance(item, int) else item.n_stored))
            results.append(item)
            n_read += results[-1].n_stored
        return results

    with workers or nullcontext():
        yield run_pass


def delete_text_files(folder: Path) -> None:
    """Delete the files of a prepared text in a folder."""
    for name in TEXT_FILES:
        (folder / name).unlink(missing_ok=True)


def count_segment(
    segment: Segment, settings: TextConfig, known: Sequence[Any] | None, version: int
) -> Iterator[int | Counted]:
    """Count the characters of a segment and hash its bytes, for a key of this version.

    Yields the number of bytes read so far, as stored, and last the result, which is `known` if an
    interrupted preparation has noted it.
    """
    if known:
        yield Counted(*known)
        return
    counts = np.zeros(N_CODE_POINTS, dtype=np.int64)
    hashes = defaultdict[str, Any](HASHES[version])
    n_codes, places = 128, Places()
    pieces = text_pieces(segment, settings, places, lambda path, part: hashes[path].update(part))
    for text in _merged(pieces, CHUNK_BYTES // 2):
        if text.isascii():
            counts[:128] += count_tokens(np.frombuffer(text.encode("ascii"), np.uint8), 128)
        else:
            found = np.bincount(code_points(text))
            counts[: found.size] += found
            n_codes = max(n_codes, found.size)
        yield places.n_stored
    codes = np.flatnonzero(counts[:n_codes])  # all of them take a while in each of many segments
    yield Counted(
        places.n_stored,
        places.n_bytes,
        codes.tolist(),
        counts[codes].tolist(),
        [hashes[path].hexdigest() if path in hashes else "" for path, *_ in segment.stretches],
        places.files,
        places.end,
    )


def encode_segment(
    segment: Segment,
    settings: TextConfig,
    known: Sequence[Any] | None,
    vocabulary: str,
    folder: str,
    first: Sequence[int],
    last: Sequence[int],
) -> Iterator[int | Encoded]:
    """Encode a segment; write its tokens, and the lines of its documents, where they belong.

    Further arguments are the JSON of the tokenizer, and the `Offset` of the segment and of the
    next. What is yielded is as for `count_segment`; but `known` is checked against the files.
    """
    tokenizer, begin, end = _tokenizer(vocabulary), Offset(*first), Offset(*last)
    areas = [  # of the files
        (Path(folder, name), size * at, size * until)
        for name, size, at, until in zip(
            _unshuffled(tokenizer), (tokenizer.dtype.itemsize, 8), begin, end, strict=False
        )
    ]
    if known and known[1] == [_stored_checksum(*area) for area in areas]:
        yield Encoded(*known)
        return
    places, checksum = Places(), xxh3_64()
    path, at, until = areas[0]
    with open(path, "r+b") as file:
        file.seek(at)
        for text in _merged(text_pieces(segment, settings, places), CHUNK_BYTES // 2):
            content = tokenizer.encode(text, "replace").view(np.uint8).data
            checksum.update(content)
            file.write(content)
            yield places.n_stored
        has_changed = file.tell() != until
    checksums = [checksum.intdigest()]
    for path, at, until in areas[1:]:
        lines = np.array(places.lines, np.int64) + begin.place
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(lines.data)
            has_changed |= file.tell() != until
        checksums.append(xxh3_64(lines.data).intdigest())
    if has_changed:
        raise TextError(CHANGED.format(segment.stretches[-1].path))
    yield Encoded(places.n_stored, checksums)


def _merged(pieces: Iterator[str], least: int) -> Iterator[str]:
    """Yield a text in pieces of `least` characters: short ones, as of small files, cost more."""
    short, size = list[str](), 0
    for piece in pieces:
        short.append(piece)
        size += len(piece)
        if size >= least:
            yield "".join(short)
            short, size = [], 0
    if size:
        yield "".join(short)


def _stored_checksum(path: Path, begin: int, end: int) -> int:
    with open(path, "rb") as file:
        file.seek(begin)
        return _checksum(file, end - begin)


PASSES: dict[str, Callable[..., Iterator[Any]]] = {
    "reading": count_segment,
    "encoding": encode_segment,
}


_tokenizer = lru_cache(maxsize=1)(CharTokenizer.from_json)  # that of all segments


def _unshuffled(tokenizer: CharTokenizer) -> tuple[str, ...]:
    """Return the names of the files that the second pass writes: of tokens, and of lines if any."""
    return UNSHUFFLED if tokenizer.eos_token else (TOKENS,)


def _log_characters(counts: Ints, trained: Ints, settings: TextConfig) -> None:
    """Log which characters may be a mistake, by the counts of the code points, (0x110000,).

    `trained` are those of the training text.
    """
    only = np.flatnonzero((counts > 0) & (trained == 0))
    if only.size:
        names = name_characters(codes_to_text(only[np.argsort(-counts[only], kind="stable")]))
        logger.warning(f"characters of held-out files that the training text lacks: {names}")
    if settings.encoding_errors == "replace" and (count := int(counts[ord(REPLACEMENT)])):
        fraction, remedy = count / counts.sum(), ""
        if fraction > MAX_REPLACED:
            remedy = (
                "; the encoding is probably another one, and --encoding-errors strict names likely "
                "ones"
            )
        logger.warning(
            f"bytes that do not decode, replaced by U+FFFD: {count:,}, {fraction:.2%} of the "
            f"characters{remedy}"
        )
    if n_nul := int(counts[0]):
        logger.warning(f"NUL characters, U+0000, in the text: {n_nul:,}")


def _offsets(counted: Sequence[Counted], tokenizer: CharTokenizer) -> list[Offset]:
    """Return the offset of each segment, and that of the end."""
    offsets, eos_code = [Offset()], ord(tokenizer.eos_token or "\0")
    for each in counted:
        codes, counts = np.array(each.codes, np.int64), np.array(each.counts, np.int64)
        n_tokens = int(counts @ tokenizer.token_counts(codes))
        n_documents = int(counts[codes == eos_code].sum())
        token, document, place = offsets[-1]
        offsets.append(Offset(token + n_tokens, document + n_documents, place + each.end))
    return offsets


def _write_tokens(
    run_pass: RunPass,
    offsets: Sequence[Offset],
    n_before: Sequence[int],
    tokenizer: CharTokenizer,
    seed: int,
    folder: Path,
) -> dict[str, list[tuple[int, int]]]:
    """Write the tokens of all segments, and documents shuffled, with their lines.

    `n_before` are the documents before each split. Returns the sizes and checksums of the parts of
    the files.
    """
    names, dtype, end = _unshuffled(tokenizer), tokenizer.dtype, offsets[-1]
    for name, size in zip(names, (dtype.itemsize * end.token, 8 * end.document), strict=False):
        with open(folder / name, "ab") as file:  # which keeps what an earlier attempt has written
            file.truncate(size)
    arguments = [[tokenizer.to_json(), str(folder), *each] for each in pairwise(offsets)]
    encoded = [Encoded(*each) for each in run_pass("encoding", arguments)]
    if tokenizer.eos_token:
        tokens, lines = _mapped(folder / names[0], dtype), _mapped(folder / names[1], np.int64)
        for name in names:
            (folder / name).unlink()  # the maps keep their content
        edges = pairwise([*n_before, end.document])
        order = np.concatenate([at + shuffled_order(until - at, seed) for at, until in edges])
        checksums = {
            TOKENS: _write(folder / TOKENS, shuffled(tokens, tokenizer.eos_token_id, order)),
            LINES: _write(folder / LINES, iter([lines[order]])),
        }
    else:
        sizes = (dtype.itemsize * (until.token - at.token) for at, until in pairwise(offsets))
        checksums = {TOKENS: [*zip(sizes, (each.checksums[0] for each in encoded), strict=True)]}
    return checksums


def _as_utf8(name: str) -> str:
    """Return a name with U+FFFD for the bytes of a file name that are not UTF-8."""
    return os.fsencode(name).decode(errors="replace")


def _digests(
    segments: Sequence[Segment], counted: Sequence[Counted], version: int
) -> dict[str, list[str]]:
    """Return the digests of the files of each split that are not empty.

    That of a file read in several segments is the digest of theirs.
    """
    digests = defaultdict[str, list[str]](list)
    found = (
        (segment.split, stretch.path, digest)
        for segment, each in zip(segments, counted, strict=True)
        for stretch, digest in zip(segment.stretches, each.digests, strict=True)
    )
    for (split, _), file in groupby(found, key=lambda each: each[:2]):
        own = [digest for *_, digest in file if digest]
        if len(own) > 1:
            own = [HASHES[version]("".join(own).encode()).hexdigest()]
        digests[split] += own
    return digests


def version_of(key: str) -> int:
    """Return the version of a text's key."""
    version, mark, _ = key.partition("-")
    return int(version) if mark and version in map(str, HASHES) else 1


def text_key(
    digests: Mapping[str, list[str]],
    settings: TextConfig,
    min_count: int,
    rare: Rare,
    version: int,
) -> str:
    """Return the version, and the SHA-256 of digests and of all that determines their tokens."""
    held_out = dict(digests)
    facts = [version, codec_name(settings.encoding), min_count, held_out.pop("train")]
    if held_out:
        facts.append({"held_out": held_out})
    if settings.newlines != "keep":
        facts.append({"newlines": settings.newlines})
    if settings.encoding_errors != "strict":
        facts.append(settings.encoding_errors)
    if rare == "bytes":
        facts.append(rare)
    if settings.extra_characters:
        facts.append({"characters": settings.extra_characters})
    if settings.documents is None and max(map(len, digests.values())) > 1:
        facts.append("a line end between files")
    if settings.documents:
        facts.append([settings.documents, settings.seed])
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return key if version == 1 else f"{version}-{key}"


def _write(path: Path, arrays: Iterator[Tokens]) -> list[tuple[int, int]]:
    """Write arrays to a file; return size and checksum of its parts."""
    parts, size, checksum = list[tuple[int, int]](), 0, xxh3_64()
    with open(path, "wb") as file:
        for array in arrays:
            content = array.view(np.uint8).data
            checksum.update(content)
            size += file.write(content)
            if size >= SEGMENT_BYTES:
                parts.append((size, checksum.intdigest()))
                size, checksum = 0, xxh3_64()
    return [*parts, (size, checksum.intdigest())]


def _sha256(tokenizer: CharTokenizer) -> str:
    return hashlib.sha256(tokenizer.to_json().encode("ascii")).hexdigest()


def read_prepared(
    folder: Path,
    settings: TextConfig,
    tokenizer: CharTokenizer,
    key: str | None = None,
    *,
    waits: bool = True,
) -> Corpus:
    """Return the text that `prepare` has stored in a folder, every byte checked.

    Settings, tokenizer and key, unless it is None, are those of the run that owns it; the settings
    divide it into splits.
    Unless it waits, a long text is returned before it is checked, for `Corpus.require_intact`.

    Raises:
        UnreadableError: the system cannot read a file, which may be intact.
        RunError: a file is damaged or missing, or the text is another than the run's.
    """
    with _damage_reported(folder):
        content = read_json(folder / META, MAX_META_BYTES)
        if content.pop("crc32", None) != zlib.crc32(to_json(content)):
            raise ValueError(f"{META} has changed since it was written")
        meta = _Meta.model_validate(content)
        meta.require_consistent(tokenizer, key)
        files = dict[str, IO[bytes]]()
        for name, parts in meta.checksums.items():
            size = sum(size for size, _ in parts)
            files[name] = open_regular(folder / name, size)
            if os.fstat(files[name].fileno()).st_size < size:
                raise ValueError(f"{name} was cut short")
        corpus = _open(folder, settings, tokenizer, meta)
        if waits or corpus.tokens.nbytes < MIN_SEGMENTS * SEGMENT_BYTES:
            _check_files(folder, files, meta, tokenizer)
            return corpus
    check = partial(_check_files, folder, files, meta, tokenizer)
    return replace(corpus, check=in_background(check, CHECK_DELAY))


@contextmanager
def _damage_reported(folder: Path) -> Iterator[None]:
    """Raise UnreadableError or RunError in place of other errors about the files of a text."""
    try:
        yield
    except FileNotFoundError as error:
        cause = f"{Path(error.filename).name} is missing"
    except ValueError as error:
        cause = str(error).partition("\n")[0]
    except OSError as error:
        raise UnreadableError(
            f"the text in {folder} cannot be read ({reason_of(error)}); try again, and if that "
            "does not help, check the disk and the permissions"
        ) from None
    else:
        return
    raise RunError(f"the text in {folder} is damaged ({cause:.200}); restore it from a copy")


def _check_files(
    folder: Path, files: Mapping[str, IO[bytes]], meta: _Meta, tokenizer: CharTokenizer
) -> None:
    """Check the parts of all files against their checksums, and the ids against the vocabulary."""

    n_documents, last_id = 0, None

    def check_ids(chunk: bytes) -> None:
        nonlocal n_documents, last_id
        ids = np.frombuffer(chunk, tokenizer.dtype)
        if ids.max() >= tokenizer.vocab_size:
            raise ValueError("it holds ids that the vocabulary lacks")
        if LINES in files:
            n_documents += int(np.count_nonzero(ids == tokenizer.eos_token_id))
            last_id = ids[-1]

    with _damage_reported(folder):
        for name, parts in meta.checksums.items():
            check = check_ids if name == TOKENS else (lambda _: None)
            with files[name] as file:
                for size, checksum in parts:
                    if _checksum(file, size, check, is_crc32=meta.version < 3) != checksum:
                        raise ValueError(f"{name} has changed since it was written")
        if LINES in files and (
            last_id != tokenizer.eos_token_id
            or sum(size for size, _ in meta.checksums[LINES]) != 8 * n_documents
        ):
            raise ValueError(f"{LINES} is of other documents than {TOKENS}")


def _checksum(
    file: IO[bytes],
    size: int,
    check: Callable[[bytes], None] = lambda _: None,
    *,
    is_crc32: bool = False,
) -> int:
    """Return the checksum of the next `size` bytes, or of those left; each chunk is checked."""
    xxh3, crc32 = xxh3_64(), 0
    while chunk := file.read(min(CHUNK_BYTES, size)):
        check(chunk)
        size -= len(chunk)
        if is_crc32:
            crc32 = zlib.crc32(chunk, crc32)
        else:
            xxh3.update(chunk)
    return crc32 if is_crc32 else xxh3.intdigest()


def _mapped(path: Path, dtype: Any) -> Any:
    """Return the array in a file that is moved or deleted later: mapped, or a short one in memory.

    `require_whole` says if the file of a map was truncated.
    """
    if not IS_WINDOWS and path.stat().st_size > MAX_HELD_BYTES:
        return np.memmap(path, dtype, mode="r")
    array = np.fromfile(path, dtype)
    array.setflags(write=False)
    return array


def _open(folder: Path, settings: TextConfig, tokenizer: CharTokenizer, meta: _Meta) -> Corpus:
    """Return the text of a folder, memory-mapped if it is long."""
    lines = _mapped(folder / LINES, np.int64) if LINES in meta.checksums else None
    return Corpus(
        name=meta.name,
        key=meta.key,
        tokenizer=tokenizer,
        tokens=_mapped(folder / TOKENS, tokenizer.dtype),
        settings=settings,
        rare_count=meta.rare_count,
        files=tuple(meta.files),
        held_out=meta.held_out,
        lines=lines,
        folder=folder,
    )
