"""Prepare a text for training: read it in two passes and store its token ids in a folder.

    tokens.bin  ids in the smallest unsigned dtype that holds them
    lines.bin   of a list of documents, shuffled like them: int64, the number of lines before each
    meta.json   name, key, files, and sizes and checksums of the others; written last

The first pass counts the characters, for the tokenizer, and hashes the bytes, for the key. The
second pass encodes. Documents are then stored in `shuffled_order`, so that every split is a sample
of them. Validation and test splits that have files of their own follow the text. The memory needed
is that of a chunk, and of the order of the documents.
"""

import hashlib
import json
import os
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from chargpt.config import TextConfig
from chargpt.errors import RunError, TextError, UnreadableError
from chargpt.files import IS_WINDOWS, open_regular, read_json, to_json, write_synced
from chargpt.log import logger
from chargpt.text import TextProgress
from chargpt.text.corpus import (
    Corpus,
    HeldOut,
    count_tokens,
    shuffled,
    shuffled_order,
)
from chargpt.text.describe import sure_documents
from chargpt.text.display import REPLACEMENT
from chargpt.text.source import (
    CHUNK_BYTES,
    Places,
    Source,
    TextFile,
    codec_name,
    eos_token_of,
    find_text,
    iter_chunks,
    opened,
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
TEXT_FILES = (TOKENS, LINES, META)
KEY_VERSION = 1
MAX_META_BYTES = 500_000_000  # of a million files
MAX_START = 500_000  # characters by which a list is recognised


class _Meta(BaseModel, strict=True, extra="forbid", title=META):
    """The content of `meta.json`, beside its own CRC-32, `crc32`."""

    name: str
    key: str
    rare_count: Annotated[int, Field(ge=0)]
    tokenizer_sha256: str
    checksums: dict[str, tuple[int, int]]  # size and CRC-32 of the other files, by name
    files: list[TextFile]
    held_out: dict[str, HeldOut] = {}
    format: Literal["chargpt-text"] = "chargpt-text"
    version: Literal[1] = 1


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
    source: Source, settings: TextConfig, folder: Path, on_progress: TextProgress | None = None
) -> Corpus:
    """Read and encode a text, write it to a folder, and log what is notable about it.

    The folder is empty, or made here. `on_progress` is called with "reading" in the first pass and
    "encoding" in the second.

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
                split: stack.enter_context(opened(each, settings.encoding, folder))
                for split, each in {"train": source, **source.held_out}.items()
            }
            if settings.documents == "auto":
                start = ""
                for piece in text_pieces(iter_chunks(parts["train"]), settings):
                    start += piece
                    if len(start) >= MAX_START:
                        break
                documents = sure_documents(start)
                settings = settings.model_copy(update={"documents": documents})
            is_last = len(parts["train"].files) > 1 and "val" not in parts
            if is_last and settings.documents is None:
                logger.warning(
                    "the validation split is the end of the last files; -s text.documents=files "
                    "shuffles the files and splits between them"
                )
            return _encode(parts, settings, folder, on_progress)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise TextError(
            f"{source.name} cannot be read, or encoded in {folder} ({reason}); check both disks, "
            "or name another place with --out (without a run: TMPDIR)"
        ) from None


def _encode(
    parts: Mapping[str, Source],
    settings: TextConfig,
    folder: Path,
    on_progress: TextProgress | None,
) -> Corpus:
    """Read the text and its held-out parts in both passes and write the files; see `prepare`."""
    counted, digests = {}, {}
    for split, part in parts.items():
        counted[split], digests[split] = _count_characters(part, settings, on_progress)
        if not counted[split].any():
            raise TextError(f"{part.name} is empty; give a text that holds characters")
    counts = sum(counted.values(), np.zeros_like(counted["train"]))
    _log_characters(counts, counted["train"], settings)
    min_count = settings.min_count or choose_min_count(counts)
    rare = settings.rare if min_count > 1 else "keep"
    tokenizer = CharTokenizer.from_counts(
        counts, min_count, rare, eos_token_of(settings.documents), settings.extra_characters
    )
    places = Places()
    begins, checksums = _write_tokens(parts, settings, tokenizer, places, folder, on_progress)
    files = [file for part in parts.values() for file in (part.files or [None])]
    meta = _Meta(
        name=_as_utf8(parts["train"].name),
        key=text_key(digests, settings, 1 if rare == "keep" else min_count, rare),
        rare_count=int(counts.sum() - counts[code_points(tokenizer.characters)].sum()),
        tokenizer_sha256=_sha256(tokenizer),
        checksums=checksums,
        files=[
            file._replace(path=_as_utf8(file.path), begin=begin)
            for file, begin in zip(files, places.files, strict=True)
            if file is not None  # as of a stream
        ],
        held_out={
            split: HeldOut(_as_utf8(part.name), begin)
            for (split, part), begin in zip(parts.items(), begins, strict=True)
            if split != "train"
        },
    )
    content = meta.model_dump()
    content["crc32"] = zlib.crc32(to_json(content))
    write_synced(folder / META, [to_json(content)])
    return _open(folder, settings, tokenizer, meta)


def _log_characters(counts: Ints, trained: Ints, settings: TextConfig) -> None:
    """Log which characters may be a mistake, by the counts of the code points, (0x110000,).

    `trained` are those of the training text.
    """
    only = np.flatnonzero((counts > 0) & (trained == 0))
    if only.size:
        names = name_characters(codes_to_text(only[np.argsort(-counts[only], kind="stable")]))
        logger.warning(f"characters of held-out files that the training text lacks: {names}")
    if settings.encoding_errors == "replace" and (count := int(counts[ord(REPLACEMENT)])):
        logger.warning(
            f"bytes that do not decode, replaced by U+FFFD: {count:,}, "
            f"{count / counts.sum():.2%} of the characters"
        )
    if n_nul := int(counts[0]):
        logger.warning(f"NUL characters, U+0000, in the text: {n_nul:,}")


def _write_tokens(
    parts: Mapping[str, Source],
    settings: TextConfig,
    tokenizer: CharTokenizer,
    places: Places,
    folder: Path,
    on_progress: TextProgress | None,
) -> tuple[list[int], dict[str, tuple[int, int]]]:
    """Write the tokens of all parts, documents shuffled within each, and their lines.

    Returns the number of tokens before each part, and the sizes and checksums of the files.
    """
    begins, first_documents, path = list[int](), list[int](), folder / TOKENS

    def encoded() -> Iterator[Tokens]:
        n_tokens = 0
        for part in parts.values():
            begins.append(n_tokens)
            first_documents.append(len(places.lines))
            chunks = iter_chunks(part, on_progress, "encoding")
            for text in text_pieces(chunks, settings, places):
                tokens = tokenizer.encode(text, "replace")
                n_tokens += len(tokens)
                yield tokens

    checksums = {TOKENS: _write(path, encoded())}
    if tokenizer.eos_token:
        tokens = _mapped(path, tokenizer.dtype)
        path.unlink()  # the map keeps its content
        orders = [
            first + shuffled_order(end - first, settings.seed)
            for first, end in pairwise([*first_documents, len(places.lines)])
        ]
        order = np.concatenate(orders)
        lines = np.frombuffer(places.lines, np.int64)[order]
        checksums = {
            TOKENS: _write(path, shuffled(tokens, tokenizer.eos_token_id, order)),
            LINES: _write(folder / LINES, iter([lines])),
        }
    for name in checksums:
        with open(folder / name, "r+b") as file:  # Windows flushes no file that is only read
            os.fsync(file.fileno())
    return begins, checksums


def _as_utf8(name: str) -> str:
    """Return a name with U+FFFD for the bytes of a file name that are not UTF-8."""
    return os.fsencode(name).decode(errors="replace")


def _count_characters(
    source: Source, settings: TextConfig, on_progress: TextProgress | None
) -> tuple[Ints, list[str]]:
    """Return the number of occurrences of each code point, and the digests of non-empty files.

    BLAKE2b is as strong as SHA-256 and faster on processors without SHA instructions.
    """
    counts = np.zeros(N_CODE_POINTS, dtype=np.int64)
    hashes: dict[str, Any] = defaultdict(partial(hashlib.blake2b, digest_size=32))
    for text in text_pieces(iter_chunks(source, on_progress, "reading", hashes), settings):
        if text.isascii():
            counts[:128] += count_tokens(np.frombuffer(text.encode("ascii"), np.uint8), 128)
        else:
            found = np.bincount(code_points(text))
            counts[: found.size] += found
    return counts, [digest.hexdigest() for digest in hashes.values()]


def text_key(
    digests: Mapping[str, list[str]], settings: TextConfig, min_count: int, rare: Rare
) -> str:
    """Return the SHA-256 of the files' digests and of all that determines their tokens."""
    held_out = dict(digests)
    facts = [KEY_VERSION, codec_name(settings.encoding), min_count, held_out.pop("train")]
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
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _write(path: Path, arrays: Iterator[Tokens]) -> tuple[int, int]:
    """Write arrays to a new file; return its size and CRC-32."""
    size = checksum = 0
    with open(path, "xb") as file:
        for array in arrays:
            content = array.view(np.uint8).data
            checksum, size = zlib.crc32(content, checksum), size + file.write(content)
    return size, checksum


def _sha256(tokenizer: CharTokenizer) -> str:
    return hashlib.sha256(tokenizer.to_json().encode("ascii")).hexdigest()


def read_prepared(folder: Path, settings: TextConfig, tokenizer: CharTokenizer) -> Corpus:
    """Return the text that `prepare` has stored in a folder, every byte checked.

    Settings and tokenizer are those of the run that owns it; the former divide it into splits.

    Raises:
        UnreadableError: the system cannot read a file, which may be intact.
        RunError: a file is damaged or missing, or the text is another than the run's.
    """
    try:
        content = read_json(folder / META, MAX_META_BYTES)
        if content.pop("crc32", None) != zlib.crc32(to_json(content)):
            raise ValueError(f"{META} has changed since it was written")
        meta = _Meta.model_validate_json(to_json(content))
        if meta.tokenizer_sha256 != _sha256(tokenizer):
            raise ValueError("it is the text of another run")
        for name, (size, checksum) in meta.checksums.items():
            if name not in TEXT_FILES or _measure(folder / name, size) != checksum:
                raise ValueError(f"{name:.40} has changed since it was written")
        corpus = _open(folder, settings, tokenizer, meta)
        if corpus.tokens.max() >= tokenizer.vocab_size:
            raise ValueError("it holds ids that the vocabulary lacks")
        return corpus
    except FileNotFoundError as error:
        cause = f"{Path(error.filename).name} is missing"
    except ValueError as error:
        cause = str(error).partition("\n")[0]
    except OSError as error:
        raise UnreadableError(
            f"the text in {folder} cannot be read ({error.strerror}); try again, and if that does "
            "not help, check the disk and the permissions"
        ) from None
    raise RunError(f"the text in {folder} is damaged ({cause:.200}); restore it from a copy")


def _measure(path: Path, size: int) -> int:
    """Return the CRC-32 of a regular file of a known size."""
    checksum = 0
    with open_regular(path, size) as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _mapped(path: Path, dtype: Any) -> Any:
    """Return the array in a file that is moved or deleted later, memory-mapped where that works."""
    return np.fromfile(path, dtype) if IS_WINDOWS else np.memmap(path, dtype, mode="r")


def _open(folder: Path, settings: TextConfig, tokenizer: CharTokenizer, meta: _Meta) -> Corpus:
    """Return the text of a folder, memory-mapped; ValueError if its ids are not the tokenizer's."""
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
