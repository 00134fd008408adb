"""One pass over a text of any size, be it a pipe or an archive: its key and its tokens."""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from chargpt.config import TextConfig
from chargpt.errors import TextError
from chargpt.text import cache
from chargpt.text.cache import CachedText, DamagedCacheError, TokenFile
from chargpt.text.source import Source, codec_name, pieces
from chargpt.text.spool import Spool
from chargpt.text.tokenizer import CharTokenizer

Progress = Callable[[str, int, int], None]


def ingest(
    source: Source, settings: TextConfig, progress: Progress | None, notes: list[str]
) -> CachedText:
    """Read a text and put its tokens into the cache, unless they are there and whole.

    Args:
        source: the text.
        settings: its encoding and `min_count`.
        progress: called with ("reading", bytes done, bytes in all or 0), then with
            ("encoding", characters done, characters in all) if a second pass is needed.
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
        with TokenFile(folder) as file, Hasher() as hasher:
            spool = Spool(file, counting=settings.min_count > 1)
            for piece in pieces(source, settings.encoding, hasher.update, read):
                spool.add(piece)
            spool.settle()
            key = text_key(hasher.digests(), settings)
            if (cached := load_or_note(key, notes)) is not None:
                return cached
            if not spool.count:
                raise TextError(f"{source.name} is empty; give a text that holds characters")
            tokenizer = CharTokenizer.from_counts(spool.counts(), settings.min_count)
            unknown_count = spool.unknown_count(tokenizer)
            if spool.is_final(tokenizer):
                return cache.store(key, tokenizer, file, unknown_count)
            cache.require_room(folder, spool.count * tokenizer.dtype.itemsize)
            with TokenFile(folder) as final:
                for ids in spool.tokens(tokenizer, progress):
                    final.write(ids)
                return cache.store(key, tokenizer, final, unknown_count)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise TextError(
            f"{source.name} cannot be read or encoded ({reason}); "
            "check the disk of the text and of the cache (CHARGPT_CACHE)"
        ) from None


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

    DEPTH = 128  # chunks that may wait: bounds memory, evens out the two threads

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
