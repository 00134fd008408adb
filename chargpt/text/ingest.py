"""One pass over a text of any size: its checksum, its characters' counts, its tokens.

The vocabulary is known only at the end, so ids are given out as characters appear (provisional
ids, from 1) and written to a nameless temporary file; then that file, far quicker to read than the
text, is mapped to the final ids. A text is thus read once, be it a pipe or an archive.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from chargpt.config import TextConfig
from chargpt.errors import TextError
from chargpt.text import cache
from chargpt.text.cache import CachedText, DamagedCacheError
from chargpt.text.source import Piece, Source, codec_name, pieces
from chargpt.text.statistics import count_tokens
from chargpt.text.tokenizer import CODE_POINTS, CharTokenizer, Tokens, code_points

ROOM_EVERY = 64 << 20  # bytes written between looks at the free disk
MAP_CHUNK = 1 << 20  # tokens

Progress = Callable[[str, int, int], None]


def ingest(
    source: Source, settings: TextConfig, progress: Progress | None, notes: list[str]
) -> CachedText:
    """Read a text and put its tokens into the cache, unless they are there and whole.

    Args:
        source: the text.
        settings: its encoding and `min_count`.
        progress: called with ("reading", bytes done, bytes in all or 0), then with
            ("encoding", characters done, characters in all).
        notes: takes sentences that the user should see.

    Raises:
        TextError: the text is empty or cannot be read or decoded, or the disk is full.
    """
    folder = cache.tokens_folder()
    size = source.size
    cache.require_room(folder, size)

    def read(done: int) -> None:
        if progress:
            progress("reading", done, size)

    try:
        with tempfile.TemporaryFile(dir=folder) as file, Hasher() as hasher:
            spool = Spool(file, folder, counting=settings.min_count > 1)
            for piece in pieces(source, settings.encoding, hasher.update, read):
                spool.add(piece)
            key = text_key(hasher.digests(), settings)
            if (cached := load_or_note(key, notes)) is not None:
                return cached
            if not spool.count:
                raise TextError(f"{source.name} is empty; give a text that holds characters")
            tokenizer = CharTokenizer.from_counts(spool.counts(), settings.min_count)
            cache.require_room(folder, spool.count * tokenizer.dtype.itemsize)
            cache.store(
                key, tokenizer, spool.tokens(tokenizer, progress), spool.unknown_count(tokenizer)
            )
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise TextError(
            f"{source.name} cannot be read or encoded ({reason}); "
            "check the disk of the text and of the cache (CHARGPT_CACHE)"
        ) from None
    stored = cache.load(key)
    assert stored is not None
    return stored


def load_or_note(key: str, notes: list[str]) -> CachedText | None:
    """Return cached tokens; None if there are none, with a note if they are damaged."""
    try:
        return cache.load(key)
    except DamagedCacheError:
        note = "the cached tokens were damaged and have been made anew from the text"
        if note not in notes:
            notes.append(note)
        return None


def text_key(digests: list[str], settings: TextConfig) -> str:
    """Return the key of a text: sha256 over its files' sums and what else decides its tokens."""
    facts = [cache.VERSION, codec_name(settings.encoding), settings.min_count, digests]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class Hasher:
    """The sum of each file, computed beside the encoding (hashlib leaves other threads running).

    It is BLAKE2b, which is as strong as SHA-256 and nearly twice as fast on processors without
    SHA instructions, where SHA-256 would take longer than all the rest.
    """

    DEPTH = 64  # chunks that may wait: bounds memory, evens out the two threads

    def __init__(self) -> None:
        self.sums: dict[int, Any] = {}
        self.worker = ThreadPoolExecutor(1, "sums")
        self.waiting: list[Future[None]] = []

    def __enter__(self) -> "Hasher":
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.shutdown()

    def update(self, number: int, chunk: bytes) -> None:
        """Take the next chunk of file `number`."""
        digest = self.sums.get(number)
        if digest is None:
            digest = self.sums[number] = hashlib.blake2b(digest_size=32)
        self.waiting.append(self.worker.submit(digest.update, chunk))
        if len(self.waiting) > self.DEPTH:
            self.waiting.pop(0).result()

    def digests(self) -> list[str]:
        """Return the hexadecimal sums of the files in order, once all is taken in."""
        for future in self.waiting:
            future.result()
        self.waiting.clear()
        return [self.sums[number].hexdigest() for number in sorted(self.sums)]


class Spool:
    """Provisional ids of a growing text, in a file."""

    def __init__(self, file: IO[bytes], folder: Path, counting: bool) -> None:
        """Take an empty file, the folder it is in, and whether counts are wanted, not just kinds.

        Counting takes as long as all the rest.
        """
        self.file, self.folder, self.counting = file, folder, counting
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)
        # Provisional id of each code point; 0 has none yet.
        self.table: npt.NDArray[Any] = np.zeros(CODE_POINTS, dtype=self.dtype)
        self.ascii_table = bytes(256)
        self.known = [np.zeros(0, dtype=np.int64)]  # code points in order of appearance
        self.kinds = 0
        self.id_counts = np.zeros(256, dtype=np.int64)
        self.segments: list[tuple[np.dtype[Any], int]] = []
        self.count = 0
        self.room_looked_at = 0

    def add(self, piece: Piece) -> None:
        """Append a piece of the text."""
        if not piece:
            return
        ids = self._ids(piece)
        if self.dtype.itemsize * (self.count - self.room_looked_at) > ROOM_EVERY:
            cache.require_room(self.folder, ROOM_EVERY)
            self.room_looked_at = self.count
        self.file.write(ids.data)
        if self.counting:
            self.id_counts += count_tokens(ids, self.id_counts.size)
        self.count += ids.size
        if self.segments and self.segments[-1][0] == self.dtype:
            self.segments[-1] = (self.dtype, self.segments[-1][1] + ids.size)
        else:
            self.segments.append((self.dtype, ids.size))

    def _ids(self, piece: Piece) -> Tokens:
        """Return the provisional ids of a piece, giving out new ones where needed."""
        if isinstance(piece, bytes) and self.dtype == np.uint8:
            translated = piece.translate(self.ascii_table)
            if b"\0" not in translated:
                return np.frombuffer(translated, dtype=np.uint8)
        codes: npt.NDArray[Any]
        codes = np.frombuffer(piece, np.uint8) if isinstance(piece, bytes) else code_points(piece)
        ids = np.take(self.table, codes)
        if not ids.all():
            self._admit(np.unique(codes[ids == 0]))
            ids = np.take(self.table, codes)
        return ids

    def _admit(self, codes: npt.NDArray[Any]) -> None:
        """Give provisional ids to new code points, widening the ids if they run out."""
        last = self.kinds + codes.size
        needed = np.min_scalar_type(last)
        if needed.itemsize > self.dtype.itemsize:
            self.dtype = np.dtype(needed)
            self.table = self.table.astype(self.dtype)
        self.table[codes] = np.arange(self.kinds + 1, last + 1)
        self.known.append(codes.astype(np.int64))
        self.kinds = last
        room = 1 << 8 * self.dtype.itemsize if self.dtype.itemsize < 4 else CODE_POINTS + 1
        self.id_counts = np.pad(self.id_counts, (0, room - self.id_counts.size))
        if not self.counting:
            self.id_counts[1 : last + 1] = 1
        if self.dtype == np.uint8:
            self.ascii_table = self.table[:256].tobytes()

    def counts(self) -> npt.NDArray[np.int64]:
        """Return how often each code point occurs (not counting: 1 or 0), shape (CODE_POINTS,)."""
        counts = np.zeros(CODE_POINTS, dtype=np.int64)
        counts[np.concatenate(self.known)] = self.id_counts[1 : self.kinds + 1]
        return counts

    def _final_ids(self, tokenizer: CharTokenizer) -> Tokens:
        """Return the final id of each provisional id."""
        final = np.zeros(max(256, self.kinds + 1), dtype=tokenizer.dtype)
        known = code_points(tokenizer.characters)
        provisional = self.table[known]
        if tokenizer.unknown_id is not None:
            final[:] = tokenizer.unknown_id
        final[provisional] = np.arange(known.size)
        return final

    def unknown_count(self, tokenizer: CharTokenizer) -> int:
        """Return how many characters share the unknown token."""
        if not tokenizer.has_unknown:
            return 0
        known = self.id_counts[self.table[code_points(tokenizer.characters)]]
        return self.count - int(known.sum())

    def tokens(self, tokenizer: CharTokenizer, progress: Progress | None) -> Iterator[Tokens]:
        """Yield the final ids of the whole text, a portion at a time."""
        final = self._final_ids(tokenizer)
        bytewise = final.tobytes() if final.dtype == np.uint8 and final.size == 256 else None
        done = 0
        self.file.seek(0, os.SEEK_SET)
        for dtype, left in self.segments:
            while left > 0:
                chunk = self.file.read(min(left, MAP_CHUNK) * dtype.itemsize)
                if dtype == np.uint8 and bytewise is not None:
                    yield np.frombuffer(chunk.translate(bytewise), dtype=np.uint8)
                else:
                    yield np.take(final, np.frombuffer(chunk, dtype=dtype))
                done += len(chunk) // dtype.itemsize
                left -= len(chunk) // dtype.itemsize
                if progress:
                    progress("encoding", done, self.count)
