"""Verbatim overlap of texts with the training text: longest match, matched spans, novel n-grams.

N-grams are compared by a polynomial hash (Karp and Rabin 1987). With prefix sums
P_i = sum over j < i of (t_j + 1) B^j modulo 2^64, the hash of the n tokens from i on is
(P_{i+n} - P_i) B^{-i}: a few array operations for any n. The training text is read once, in chunks,
for all n together; only the n-grams of the texts are indexed.
Shapes: N = tokens of the training text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from chargpt.text.corpus import Corpus

LENGTHS = (4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MIN_MATCH = 20  # characters of a verbatim match; shorter ones are common phrases
CHUNK = 2**20  # tokens of the training text that are hashed at a time
FILTER_BITS = 22  # leading bits of a hash that index the filter table
MAX_POSITIONS = 32  # stored per n-gram; a run of spaces may occur a million times
BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64

Tokens = npt.NDArray[Any]
Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class VerbatimMatch:
    """A passage that occurs in a text and in the training text.

    Attributes:
        start: offset in the text.
        length: in characters.
        place: offset in the training text.
    """

    start: int
    length: int
    place: int


@dataclass(frozen=True)
class Overlap:
    """Verbatim overlap of one text with the training text.

    Attributes:
        longest: the longest match of at least MIN_MATCH characters; only the first MAX_POSITIONS
            occurrences of each n-gram are extended.
        copied: (start, end) of the spans that such matches cover, in order, disjoint.
        novel: by n, the fraction of the text's n-grams that the training text does not contain.
    """

    longest: VerbatimMatch | None
    copied: list[tuple[int, int]]
    novel: dict[int, float]


@dataclass(frozen=True)
class OverlapReport:
    """Verbatim overlap of generated texts, and of held-out text for reference.

    Attributes:
        texts: one overlap for each generated text.
        held_out: one for each of as many passages of the validation split, equally long.
        training: token ids of the training split, (N,).
    """

    texts: list[Overlap]
    held_out: list[Overlap]
    training: Tokens

    def novel(self) -> list[tuple[int, float, float]]:
        """Return (n, novel fraction of the generated n-grams, and of the held-out ones)."""
        rows = []
        for n in self.texts[0].novel if self.texts else ():
            generated, held_out = (
                [overlap.novel[n] for overlap in overlaps if n in overlap.novel]
                for overlaps in (self.texts, self.held_out)
            )
            if generated and held_out:
                mean, reference = (sum(each) / len(each) for each in (generated, held_out))
                rows.append((n, mean, reference))
        return rows


def measure_overlap(
    corpus: Corpus,
    texts: Sequence[str],
    on_progress: Callable[[int, int], object] = lambda *_: None,
) -> OverlapReport:
    """Return the verbatim overlap of generated texts with a corpus's training split.

    Args:
        corpus: the text that the model was trained on.
        texts: generated texts.
        on_progress: called with the number of training tokens read, and N.
    """
    training, val = corpus.split("train"), corpus.split("val")
    generated = [corpus.tokenizer.encode(text, unknown="replace") for text in texts]
    held_out = []
    for number, tokens in enumerate(generated):
        start = (len(val) - len(tokens)) * number // max(1, len(generated) - 1)
        held_out.append(val[max(0, start) :][: len(tokens)])
    overlaps = find_overlaps(
        training, [*generated, *held_out], lambda n: on_progress(n, len(training))
    )
    return OverlapReport(overlaps[: len(generated)], overlaps[len(generated) :], training)


def find_overlaps(
    training: Tokens, texts: Sequence[Tokens], on_progress: Callable[[int], object] = lambda _: None
) -> list[Overlap]:
    """Return each text's verbatim overlap with the training text, in one pass over the latter.

    Args:
        training: token ids of any integer type, (N,); may be memory-mapped.
        texts: token ids of the same vocabulary, each (M,).
        on_progress: called with the number of training tokens read.
    """
    longest = max((len(text) for text in texts), default=0)
    lengths = [n for n in LENGTHS if n <= min(longest, len(training))]
    indexes = [_NGramIndex(texts, n) for n in lengths]
    powers, inverses = _powers(CHUNK + (lengths[-1] if lengths else 0))
    for first in range(0, len(training) if lengths else 0, CHUNK):
        chunk = training[first : first + CHUNK + lengths[-1] - 1]
        sums = _prefix_sums(chunk, powers)
        for index in indexes:
            # n-grams that begin in the next chunk are counted there
            count = min(CHUNK, len(chunk) - index.n + 1)
            if count > 0:
                index.search(sums, inverses, first, count)
        on_progress(min(first + CHUNK, len(training)))
    return [_overlap(training, text, number, indexes) for number, text in enumerate(texts)]


class _NGramIndex:
    """Index of the texts' distinct n-grams for one n, and their positions in the training text."""

    def __init__(self, texts: Sequence[Tokens], n: int) -> None:
        self.n = n
        hashes = [_ngram_hashes(text, n) for text in texts]
        self.ends = np.cumsum([0, *(len(each) for each in hashes)])
        self.hashes, self.ids = np.unique(np.concatenate(hashes), return_inverse=True)
        self.is_found = np.zeros(len(self.hashes), dtype=bool)
        self.positions: list[tuple[Indices, Indices]] = []  # (ids, positions) of each chunk
        self.n_occurrences = np.zeros(len(self.hashes), dtype=np.int64)
        self.filter = np.zeros(2**FILTER_BITS, dtype=bool)
        self.filter[self.hashes >> np.uint64(64 - FILTER_BITS)] = True

    def search(self, sums: Hashes, inverses: Hashes, first: int, count: int) -> None:
        """Look up the `count` n-grams that begin in the chunk at offset `first`."""
        hashes = (sums[self.n : self.n + count] - sums[:count]) * inverses[:count]
        offsets = np.flatnonzero(self.filter[hashes >> np.uint64(64 - FILTER_BITS)])
        ids = np.searchsorted(self.hashes, hashes[offsets]).clip(max=len(self.hashes) - 1)
        is_equal = self.hashes[ids] == hashes[offsets]
        ids, offsets = ids[is_equal], offsets[is_equal]
        self.is_found[ids] = True
        if self.n >= MIN_MATCH:
            self._store(ids, offsets + first)

    def _store(self, ids: Indices, positions: Indices) -> None:
        order = np.argsort(ids, kind="stable")
        ids, positions = ids[order], positions[order]
        rank_in_chunk = np.arange(len(ids)) - np.searchsorted(ids, ids)
        is_stored = self.n_occurrences[ids] + rank_in_chunk < MAX_POSITIONS
        self.positions.append((ids[is_stored], positions[is_stored]))
        self.n_occurrences += np.bincount(ids, minlength=len(self.hashes))

    def ids_of(self, number: int) -> Indices:
        """Return the n-gram ids of one text, (M - n + 1,)."""
        return self.ids[self.ends[number] : self.ends[number + 1]]

    def occurrences(self, number: int) -> tuple[Indices, Indices]:
        """Return all pairs of an offset in one text and a stored position of its n-gram."""
        ids = self.ids_of(number)
        if not self.positions:
            return ids[:0], ids[:0]
        stored_ids, positions = (np.concatenate(each) for each in zip(*self.positions, strict=True))
        order = np.argsort(stored_ids, kind="stable")
        stored_ids, positions = stored_ids[order], positions[order]
        low = np.searchsorted(stored_ids, ids, side="left")
        counts = np.searchsorted(stored_ids, ids, side="right") - low
        starts = np.repeat(np.arange(len(ids)), counts)
        within = np.arange(len(starts)) - np.repeat(counts.cumsum() - counts, counts)
        return starts, positions[np.repeat(low, counts) + within]


def _overlap(training: Tokens, text: Tokens, number: int, indexes: list[_NGramIndex]) -> Overlap:
    found = {each.n: each.is_found[each.ids_of(number)] for each in indexes if each.n <= len(text)}
    novel = {n: 1 - float(is_found.mean()) for n, is_found in found.items()}
    is_covered = np.zeros(len(text) + 2, dtype=bool)
    for start in np.flatnonzero(found.get(MIN_MATCH, np.zeros(0, dtype=bool))).tolist():
        is_covered[start + 1 : start + 1 + MIN_MATCH] = True
    edges = np.flatnonzero(is_covered[1:] != is_covered[:-1]).tolist()
    copied = list(zip(edges[::2], edges[1::2], strict=True))
    matches = (
        _longest_match(training, text, *each.occurrences(number), each.n)
        for each in reversed(indexes)
    )
    return Overlap(next((match for match in matches if match), None), copied, novel)


def _longest_match(
    training: Tokens, text: Tokens, starts: Indices, positions: Indices, length: int
) -> VerbatimMatch | None:
    """Extend matches of `length` tokens to the right as far as possible; return the longest."""
    best_starts, best_positions = starts, positions
    while len(starts):
        best_starts, best_positions = starts, positions
        is_inside = (starts + length < len(text)) & (positions + length < len(training))
        starts, positions = starts[is_inside], positions[is_inside]
        is_equal = text[starts + length] == training[positions + length]
        starts, positions = starts[is_equal], positions[is_equal]
        length += len(starts) > 0
    for start, position in zip(best_starts.tolist(), best_positions.tolist(), strict=True):
        if np.array_equal(text[start : start + length], training[position : position + length]):
            return VerbatimMatch(start, length, position)
    return None  # hash collisions only


def _powers(count: int) -> tuple[Hashes, Hashes]:
    """Return the first powers of BASE and of its inverse modulo 2^64, each (count,)."""
    powers = np.full((2, count), [[BASE], [pow(BASE, -1, 2**64)]], dtype=np.uint64)
    powers[:, 0] = 1
    ascending, inverses = np.multiply.accumulate(powers, axis=1)
    return ascending, inverses


def _prefix_sums(tokens: Tokens, powers: Hashes) -> Hashes:
    terms = (tokens.astype(np.uint64) + np.uint64(1)) * powers[: len(tokens)]
    return np.concatenate((np.zeros(1, dtype=np.uint64), np.add.accumulate(terms)))


def _ngram_hashes(text: Tokens, n: int) -> Hashes:
    """Return the hashes of a text's n-grams, (M - n + 1,)."""
    if len(text) < n:
        return np.zeros(0, dtype=np.uint64)
    powers, inverses = _powers(len(text))
    sums = _prefix_sums(text, powers)
    return (sums[n:] - sums[:-n]) * inverses[: len(text) - n + 1]
