"""Encode a text in two passes, with memory for a chunk and for the order of its documents.

The first pass counts the characters, for the tokenizer, and hashes the bytes, for the key. The
second pass encodes. A checksum in both passes reveals a text that changes in between.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from chargpt.config import TextConfig
from chargpt.errors import TextError
from chargpt.text import TextProgress, cache
from chargpt.text.cache import CachedText, CacheFile, DamagedCacheError
from chargpt.text.decoding import Chunk, codec_name, decode
from chargpt.text.documents import eos_token_of, mark_documents, shuffled
from chargpt.text.source import Source, copy_stdin, describe_binary, iter_chunks
from chargpt.text.statistics import count_tokens
from chargpt.text.tokenizer import (
    N_CODE_POINTS,
    CharTokenizer,
    Ints,
    Rare,
    choose_min_count,
    code_points,
)


class _Checksum:
    """CRC-32 of all bytes of a text, which is far cheaper than a hash."""

    crc32 = 0

    def tee(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Pass chunks on and add them to the checksum."""
        for chunk in chunks:
            self.crc32 = zlib.crc32(chunk.content, self.crc32)
            yield chunk


def ingest(
    source: Source, settings: TextConfig, on_progress: TextProgress | None, notes: list[str]
) -> CachedText:
    """Read a text and store its tokens in the cache, unless they are there and undamaged.

    `on_progress` is called with "reading" in the first pass and "encoding" in the second. `notes`
    receives sentences for the user.

    Raises:
        TextError: the text is empty, changes while it is read, cannot be read or decoded, or the
            disk is full.
    """
    folder = cache.make_tokens_folder()
    try:
        with ExitStack() as stack:
            if source.is_stdin:
                spool = stack.enter_context(CacheFile(folder))
                copy_stdin(spool.write)
                source = replace(source, stream=spool.file)
            first, second = _Checksum(), _Checksum()  # of both passes
            binary: list[str] | None = [] if settings.encoding == "auto" else None
            chunks = first.tee(iter_chunks(source, on_progress, "reading", binary))
            counts, digests = _count_characters(chunks, settings)
            notes += describe_binary(binary or [])
            min_count = settings.min_count or choose_min_count(counts)
            rare = settings.rare if min_count > 1 else "keep"
            key = text_key(digests, settings, 1 if rare == "keep" else min_count, rare)
            if (cached := load_or_note(key, notes)) is not None:
                return cached
            if not counts.any():
                raise TextError(f"{source.name} is empty; give a text that holds characters")
            eos_token = eos_token_of(settings.documents)
            tokenizer = CharTokenizer.from_counts(
                counts, min_count, rare, eos_token, settings.extra_characters
            )
            cache.require_space(folder, int(counts.sum()) * tokenizer.dtype.itemsize)
            rare_count = int(counts.sum() - counts[code_points(tokenizer.characters)].sum())
            tokens = stack.enter_context(CacheFile(folder))
            chunks = second.tee(iter_chunks(source, on_progress, "encoding", binary))
            for text in text_pieces(chunks, settings):
                tokens.write(tokenizer.encode(text, "replace").view(np.uint8).data)
            if first.crc32 != second.crc32:
                raise TextError(
                    f"{source.name} changed while it was read; try again when nothing writes to it"
                )
            if eos_token:
                unordered, tokens = tokens, stack.enter_context(CacheFile(folder))
                _shuffle(unordered, tokens, tokenizer, settings.seed)
            return cache.store(key, tokenizer, tokens, rare_count)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise TextError(
            f"{source.name} cannot be read or encoded ({reason}); "
            "check the disk of the text and of the cache (CHARGPT_CACHE)"
        ) from None


def _count_characters(chunks: Iterator[Chunk], settings: TextConfig) -> tuple[Ints, list[str]]:
    """Return the number of occurrences of each code point, and each file's digest."""
    counts = np.zeros(N_CODE_POINTS, dtype=np.int64)
    hashes: dict[str, Any] = {}  # by file name
    # The thread ends here even on an error: a generator that garbage collection closes would
    # join it at any time, which can deadlock.
    with ThreadPoolExecutor(1, "hash") as worker:
        for text in text_pieces(_hashed(chunks, hashes, worker), settings):
            if text.isascii():
                counts[:128] += count_tokens(np.frombuffer(text.encode("ascii"), np.uint8), 128)
            else:
                found = np.bincount(code_points(text))
                counts[: found.size] += found
    return counts, [digest.hexdigest() for digest in hashes.values()]


def text_pieces(chunks: Iterator[Chunk], settings: TextConfig) -> Iterator[str]:
    """Yield the text of chunks in pieces, with the EOS tokens of its documents."""
    files = decode(chunks, settings.encoding, settings.encoding_errors)
    return mark_documents(files, settings.documents)


def _shuffle(source: CacheFile, target: CacheFile, tokenizer: CharTokenizer, seed: int) -> None:
    """Write the tokens of one file to another, with the documents in random order."""
    source.file.flush()
    tokens = np.memmap(source.path, dtype=tokenizer.dtype, mode="r")
    cache.require_space(target.path.parent, tokens.nbytes)
    for chunk in shuffled(tokens, tokenizer.eos_token_id, seed):
        target.write(chunk.view(np.uint8).data)


def _hashed(
    chunks: Iterator[Chunk], hashes: dict[str, Any], worker: ThreadPoolExecutor
) -> Iterator[Chunk]:
    """Pass chunks on while a second thread hashes each file's bytes (hashlib releases the GIL).

    BLAKE2b is as strong as SHA-256 and faster on processors without SHA instructions.
    """
    pending: Future[None] | None = None
    for chunk in chunks:
        digest = hashes.setdefault(chunk.file_name, hashlib.blake2b(digest_size=32))
        if pending:
            pending.result()  # bounds the memory
        pending = worker.submit(digest.update, chunk.content)
        yield chunk


def load_or_note(key: str, notes: list[str]) -> CachedText | None:
    """Return cached tokens; None if there are none, with a note if they are damaged."""
    try:
        return cache.load(key)
    except DamagedCacheError:
        note = "the cached tokens were damaged and have been rebuilt from the text"
        if note not in notes:
            notes.append(note)
        return None


def text_key(digests: list[str], settings: TextConfig, min_count: int, rare: Rare) -> str:
    """Return the SHA-256 of the files' digests and of all that determines their tokens."""
    facts = [cache.VERSION, codec_name(settings.encoding), min_count, digests]
    if settings.encoding_errors != "strict":
        facts.append(settings.encoding_errors)
    if rare == "bytes":
        facts.append(rare)
    if settings.extra_characters:
        facts.append({"characters": settings.extra_characters})
    if settings.documents:
        facts.append([settings.documents, settings.seed])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
