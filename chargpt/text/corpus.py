"""A prepared text: its tokens, memory-mapped, and its consecutive splits."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from chargpt.config import TextConfig
from chargpt.errors import TextError
from chargpt.text import cache
from chargpt.text.cache import CachedText, cache_folder
from chargpt.text.catalog import EMBEDDED
from chargpt.text.ingest import ingest, load_or_note
from chargpt.text.source import STDIN, MissingTextError, codec_name, find_source, pieces
from chargpt.text.statistics import Counts, PairCounts, count_pairs, count_tokens
from chargpt.text.tokenizer import CharTokenizer, Tokens

__all__ = ["SPLITS", "Corpus", "Split", "cache_folder", "load_corpus", "read_text"]

MAX_READ_BYTES = 1 << 30
CHANGED = "the text has changed since the run was trained on it, and the old one's tokens are used"

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val")  # those that every run has
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Corpus:
    """A text as tokens, cut into consecutive parts.

    Attributes:
        name: short, for people.
        key: names the text's content and the settings that decide its tokens.
        tokenizer: what the ids mean.
        tokens: the whole text, shape (characters,), memory-mapped, read-only.
        val_fraction, test_fraction: shares of the splits.
        unknown_share: share of the characters that became the unknown token.
        notes: sentences that the user should see.
        folder: where counts are kept; None keeps none.
    """

    name: str
    key: str
    tokenizer: CharTokenizer
    tokens: Tokens
    val_fraction: float
    test_fraction: float
    unknown_share: float = 0.0
    notes: tuple[str, ...] = ()
    folder: Path | None = None

    def _bounds(self, split: Split) -> tuple[int, int]:
        total = self.tokens.size
        # As exact decimals: 0.1 of 10 characters is 1, not a hair more.
        val = math.ceil(total * Fraction(str(self.val_fraction)))
        test = min(math.ceil(total * Fraction(str(self.test_fraction))), total - val)
        train = total - val - test
        return {
            "train": (0, train),
            "val": (train, train + val),
            "test": (train + val, total),
        }[split]

    def split(self, name: Split) -> Tokens:
        """Return one part as a view, shape (characters,): train first, then val, test last.

        The validation and test parts are rounded up to whole characters.
        """
        start, stop = self._bounds(name)
        return self.tokens[start:stop]

    def require_blocks(self, block_size: int) -> None:
        """Check that train and val each hold a block and the character after it.

        Raises:
            TextError: they do not; it says how many there are and what to set.
        """
        train, val = self.split("train").size, self.split("val").size
        shorter = min(train, val)
        if shorter > block_size:
            return
        total = self.tokens.size
        needed = block_size + 1
        found = (
            f"{self.name} holds {_characters(total)}, {train:,} to train on and {val:,} to "
            f"validate on, and model.block_size {block_size:,} needs {needed:,} of each"
        )
        remedies = ["give a longer text"]
        if shorter > 1:
            remedies.insert(0, f"set model.block_size to {shorter - 1:,} or less")
        least = math.ceil(1000 * needed / total) / 1000
        if val < needed and least + self.test_fraction < 1 and total * (1 - least) > needed:
            remedies.insert(1, f"set text.val_fraction to {least:g} or more")
        raise TextError(f"{found}; " + ", or ".join(remedies))

    def token_counts(self, split: Split) -> Counts:
        """Return how often each id occurs in a split, shape (V,); kept on disk."""
        start, stop = self._bounds(split)
        size = self.tokenizer.vocab_size
        kept = self._kept_counts(f"tokens-{start}-{stop}.npy")
        if kept is not None and kept.shape == (size,):
            return kept
        counts = count_tokens(self.tokens[start:stop], size)
        self._keep_counts(f"tokens-{start}-{stop}.npy", counts)
        return counts

    def pair_counts(self, split: Split) -> PairCounts:
        """Return how often each id follows each other one in a split; kept on disk."""
        start, stop = self._bounds(split)
        size = self.tokenizer.vocab_size
        kept = self._kept_counts(f"pairs-{start}-{stop}.npy")
        if kept is not None and kept.ndim == 2 and len(kept) == 3:
            return PairCounts(kept[0], kept[1], kept[2], size)
        pairs = count_pairs(self.tokens[start:stop], size)
        self._keep_counts(
            f"pairs-{start}-{stop}.npy", np.stack([pairs.first, pairs.second, pairs.counts])
        )
        return pairs

    def _kept_counts(self, name: str) -> Counts | None:
        return cache.load_counts(self.folder / name) if self.folder else None

    def _keep_counts(self, name: str, counts: Counts) -> None:
        if self.folder:
            cache.save_counts(self.folder / name, counts)


def _characters(count: int) -> str:
    return "1 character" if count == 1 else f"{count:,} characters"


def load_corpus(
    settings: TextConfig, *, key: str | None = None, progress: Progress | None = None
) -> Corpus:
    """Return the text that the settings name, encoded now or found in the cache.

    Args:
        settings: which text, how to read it, how to cut it.
        key: the text that a run was trained on. If what the settings name has changed since, or
            has gone, its cached tokens are used instead, with a note.
        progress: called with a stage, how much of it is done, and of how much (0: unknown).

    Raises:
        TextError: there is no such text, it cannot be read, or it is another than `key`.
    """
    if settings.path == STDIN and key and (cached := cache.load(key)):
        return _corpus(settings, cached, "standard input", [])  # that pipe has run dry
    notes: list[str] = []
    spec = _specification(settings)
    try:
        source = find_source(settings)
        signature = source.signature()
    except MissingTextError:
        wanted = key or cache.recall(spec)
        cached = cache.load(wanted) if wanted else None
        if cached is None:
            raise
        notes.append(f"the text {_name(settings)} has gone, and its cached tokens are used")
        return _corpus(settings, cached, _name(settings), notes)
    current = cache.recall(spec, signature) if source.files else None
    if key is None or current in (None, key):
        cached = load_or_note(current, notes) if current else None
        if cached is None:
            cached = ingest(source, settings, progress, notes)
            if source.files:
                cache.remember(spec, signature, cached.key)
        if key in (None, cached.key):
            return _corpus(settings, cached, source.name, notes)
    return _corpus(settings, _old_text(str(key), source.name), source.name, [CHANGED])


def is_cached(key: str | None) -> bool:
    """Return whether the cache has the tokens of a text, so that its source is not needed."""
    return key is not None and cache.load(key) is not None


def _old_text(key: str, name: str) -> CachedText:
    """Return the cached tokens of a text that its source no longer holds."""
    cached = cache.load(key)
    if cached is None:
        raise TextError(
            f"the text {name} has changed since the run was trained on it, and the cache no "
            "longer has the old one; restore the text or train a new run"
        )
    return cached


def _specification(settings: TextConfig) -> list[Any]:
    """Return all that decides, with the files' state, which tokens a text has."""
    path = settings.path
    where = None if path is None else os.path.abspath(os.path.expanduser(path))
    return [where, settings.suffixes, codec_name(settings.encoding), settings.min_count]


def _name(settings: TextConfig) -> str:
    return Path(settings.path).name if settings.path else EMBEDDED


def _corpus(settings: TextConfig, cached: CachedText, name: str, notes: list[str]) -> Corpus:
    return Corpus(
        name=name,
        key=cached.key,
        tokenizer=cached.tokenizer,
        tokens=cached.tokens,
        val_fraction=settings.val_fraction,
        test_fraction=settings.test_fraction,
        unknown_share=cached.unknown_count / cached.tokens.size,
        notes=tuple(notes),
        folder=cached.folder,
    )


def read_text(
    path: str | os.PathLike[str], encoding: str = "auto", max_bytes: int = MAX_READ_BYTES
) -> str:
    """Return a text whole: a file, folder, glob or `-`, read as a corpus is.

    Raises:
        TextError: it cannot be read or decoded, or is larger than `max_bytes`.
    """
    source = find_source(TextConfig(path=str(path), encoding=encoding))
    parts: list[str] = []
    size = 0
    for piece in pieces(source, encoding):
        size += len(piece)
        if size > max_bytes:
            raise TextError(f"{path} is over {max_bytes:,} characters; give a shorter text")
        parts.append(piece.decode("ascii") if isinstance(piece, bytes) else piece)
    return "".join(parts)
