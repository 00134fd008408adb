"""Verbatim overlap: which parts of a text occur word for word in the training split.

n-grams are found by their hash. With prefix sums P_i = sum over j < i of (t_j + 1) B^j modulo 2^64,
the hash of the n tokens from i on is (P_{i+n} - P_i) B^{-i} (Karp and Rabin 1987, with prefix sums
instead of a rolling hash): a few array operations for any n. So no index is built: the training
split is scanned once, in chunks, for all lengths together, and its hashes are looked up in the
small table of the texts' hashes.
Shapes in this file: N = tokens of the training split, M = tokens of a text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low

import numpy as np
import numpy.typing as npt

from chargpt.inference.evaluation import OnProgress
from chargpt.text.corpus import Corpus
from chargpt.text.tokenizer import CharTokenizer, Tokens

NGRAM_LENGTHS = (4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MIN_COMPARED = 16  # parts of the validation split, at least, since their overlap varies much
MIN_MATCH = 20  # characters of a match that counts; shorter ones are common phrases
CHUNK = 2**20  # tokens of the training split
TABLE_BITS = 22  # of a hash, by which most n-grams of the training split are skipped
MAX_POSITIONS = 32  # stored for one n-gram; a run of spaces may occur a million times
BASE = 0x9E3779B97F4A7C15  # any odd number has an inverse modulo 2^64

Hashes = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class VerbatimMatch:
    """A part of a text that occurs in the training split."""

    start: int  # in the text
    length: int
    position: int  # start in the training split
    text: str = ""


@dataclass(frozen=True)
class Overlap:
    """Verbatim overlap of one text with the training split, in matches of MIN_MATCH or more.

    `find_overlap` returns positions and lengths in tokens; within an `OverlapReport` they are in
    characters. n-grams are of tokens.
    """

    # only the first MAX_POSITIONS occurrences of an n-gram are tried
    longest: VerbatimMatch | None
    matched: list[tuple[int, int]]  # parts covered by matches, as disjoint (start, end) in order
    novel: dict[int, float]  # by n, the fraction of the text's n-grams that are not in the split


@dataclass(frozen=True)
class OverlapReport:
    """Overlap of generated texts, and of the validation split for reference."""

    texts: list[Overlap]
    val: list[Overlap]  # of parts of the validation split, each as long as one of the texts

    @property
    def longest_in_val(self) -> int:
        """Longest match in validation parts as long as all texts: the median over such groups."""
        n_texts = len(self.texts)
        groups = [self.val[i : i + n_texts] for i in range(0, len(self.val), n_texts)]
        return median_low(map(longest_match, groups)) if groups else 0

    def novel_rows(self) -> list[list[str]]:
        """Return n, the novel fraction in the texts and in the validation split, as table rows."""
        rows = []
        for n in NGRAM_LENGTHS:
            ours, others = (
                [each.novel[n] for each in overlaps if n in each.novel]
                for overlaps in (self.texts, self.val)
            )
            if ours and others and n <= 2 * MIN_MATCH:
                means = (sum(each) / len(each) for each in (ours, others))
                rows.append([str(n), *(f"{mean:.1%}" for mean in means)])
        return rows


def longest_match(overlaps: Sequence[Overlap]) -> int:
    """Return the length of the longest verbatim match; 0 if there is none."""
    return max((each.longest.length for each in overlaps if each.longest), default=0)


def find_copied_documents(corpus: Corpus, wanted: set[str], separator: str) -> set[str]:
    """Return which of the wanted texts are documents of the training split, which `separator` ends.

    They are matched whole, since most documents are shorter than a verbatim match.
    """
    training, tokenizer = corpus.split("train"), corpus.tokenizer
    known: set[str] = set()
    rest = ""
    start = 0
    while start < len(training):
        end = start + CHUNK
        while end < len(training) and training[end] >= tokenizer.first_continuation_id:
            end += 1  # a character of several bytes stays whole
        items = (rest + tokenizer.decode(training[start:end])).split(separator)
        rest = items.pop()
        known |= wanted.intersection(items)
        start = end
    return known


def measure_overlap(
    corpus: Corpus, texts: Sequence[str], on_progress: OnProgress = lambda *_: None
) -> OverlapReport:
    """Return the verbatim overlap of generated texts with the training split of their corpus.

    `on_progress` is called with the number of training tokens done, and of all.
    """
    training, val = corpus.split("train"), corpus.split("val")
    generated = [corpus.tokenizer.encode(text, unknown="replace") for text in texts]
    repeats = math.ceil(MIN_COMPARED / max(1, len(generated)))
    compared = []
    for repeat in range(repeats):
        for number, tokens in enumerate(generated):
            fraction = (number * repeats + repeat) / max(1, repeats * len(generated) - 1)
            start = max(0, round((len(val) - len(tokens)) * fraction))
            compared.append(val[start:][: len(tokens)])
    tokenized = [*generated, *compared]
    overlaps = find_overlap(training, tokenized, on_progress)
    found = [
        _in_characters(overlap, tokens, training, corpus.tokenizer)
        for overlap, tokens in zip(overlaps, tokenized, strict=True)
    ]
    return OverlapReport(found[: len(generated)], found[len(generated) :])


def _in_characters(
    overlap: Overlap, tokens: Tokens, training: Tokens, tokenizer: CharTokenizer
) -> Overlap:
    """Return an overlap of tokens (M,) in characters, without matches then under MIN_MATCH."""
    is_start = tokens < tokenizer.first_continuation_id
    index = np.append(is_start.cumsum() - is_start, is_start.sum()).tolist()
    matched = [(index[start], index[end]) for start, end in overlap.matched]
    longest = overlap.longest
    if longest is not None:
        start, end = longest.start, longest.start + longest.length
        position = tokenizer.count_characters(training[: longest.position])
        text = tokenizer.decode(tokens[start:end])
        longest = VerbatimMatch(index[start], index[end] - index[start], position, text)
    return replace(
        overlap,
        matched=[(start, end) for start, end in matched if end - start >= MIN_MATCH],
        longest=longest if longest and longest.length >= MIN_MATCH else None,
    )


def find_overlap(
    training: Tokens, texts: Sequence[Tokens], on_progress: OnProgress = lambda *_: None
) -> list[Overlap]:
    """Return the overlap of each text with the training tokens (N,), in one pass over those."""
    longest = max((len(text) for text in texts), default=0)
    lengths = [n for n in NGRAM_LENGTHS if n <= min(longest, len(training))]
    powers, inverses = _powers(max(longest, CHUNK + (lengths[-1] if lengths else 0)))
    text_sums = [_prefix_sums(text, powers) for text in texts]
    tables = [_NGramTable(text_sums, inverses, n) for n in lengths]
    for first in range(0, len(training) if lengths else 0, CHUNK):
        chunk = training[first : first + CHUNK + lengths[-1] - 1]
        sums = _prefix_sums(chunk, powers)
        for table in tables:
            # n-grams that begin in the next chunk belong to it
            count = min(CHUNK, len(chunk) - table.n + 1)
            if count > 0:
                table.look_up(sums, inverses, first, count)
        on_progress(min(first + CHUNK, len(training)), len(training))
    return [_overlap_of(training, text, number, tables) for number, text in enumerate(texts)]


class _NGramTable:
    """All n-grams of one length of some texts, and where the training split has them.

    `sums` are the texts' prefix sums.
    """

    def __init__(self, sums: Sequence[Hashes], inverses: Hashes, n: int) -> None:
        self.n = n
        hashes = [_hashes(each, inverses, n, max(0, len(each) - n)) for each in sums]
        self.ends = np.cumsum([len(each) for each in hashes])  # of each text's n-grams
        self.hashes, self.ids = np.unique(np.concatenate(hashes), return_inverse=True)
        self.occurs = np.zeros(len(self.hashes), dtype=bool)
        self.positions: list[tuple[Positions, Positions]] = []  # (ids, positions) of each chunk
        self.n_stored = np.zeros(len(self.hashes), dtype=np.int64)
        self.filter = np.zeros(2**TABLE_BITS, dtype=bool)
        self.filter[self.hashes >> np.uint64(64 - TABLE_BITS)] = True

    def look_up(self, sums: Hashes, inverses: Hashes, first: int, count: int) -> None:
        """Look up the `count` n-grams that begin in a chunk of the training split."""
        hashes = _hashes(sums, inverses, self.n, count)
        positions = np.flatnonzero(self.filter[hashes >> np.uint64(64 - TABLE_BITS)])
        ids = np.searchsorted(self.hashes, hashes[positions]).clip(max=len(self.hashes) - 1)
        is_equal = self.hashes[ids] == hashes[positions]
        ids, positions = ids[is_equal], positions[is_equal]
        self.occurs[ids] = True
        if self.n >= MIN_MATCH:
            self._store(ids, positions + first)

    def _store(self, ids: Positions, positions: Positions) -> None:
        order = np.argsort(ids, kind="stable")
        ids, positions = ids[order], positions[order]
        rank = np.arange(len(ids)) - np.searchsorted(ids, ids)  # among equal ids of this chunk
        is_kept = self.n_stored[ids] + rank < MAX_POSITIONS
        self.positions.append((ids[is_kept], positions[is_kept]))
        self.n_stored += np.bincount(ids, minlength=len(self.hashes))

    def ids_of(self, number: int) -> Positions:
        """Return the id of each n-gram of one text."""
        start = self.ends[number - 1] if number else 0
        return self.ids[start : self.ends[number]]

    def pairs(self, number: int) -> tuple[Positions, Positions]:
        """Return starts in one text and in the training split of all equal n-grams."""
        ids = self.ids_of(number)
        if not self.positions:
            return ids[:0], ids[:0]
        stored_ids = np.concatenate([ids for ids, _ in self.positions])
        positions = np.concatenate([positions for _, positions in self.positions])
        order = np.argsort(stored_ids, kind="stable")
        stored_ids, positions = stored_ids[order], positions[order]
        low = np.searchsorted(stored_ids, ids, side="left")
        counts = np.searchsorted(stored_ids, ids, side="right") - low
        starts = np.repeat(np.arange(len(ids)), counts)
        offsets = np.repeat(low - counts.cumsum() + counts, counts)
        return starts, positions[np.arange(len(starts)) + offsets]


def _overlap_of(training: Tokens, text: Tokens, number: int, tables: list[_NGramTable]) -> Overlap:
    occurrence = {
        table.n: table.occurs[table.ids_of(number)] for table in tables if table.n <= len(text)
    }
    novel = {n: 1 - float(occurs.mean()) for n, occurs in occurrence.items()}
    covered = np.zeros(len(text) + 2, dtype=bool)
    for start in np.flatnonzero(occurrence.get(MIN_MATCH, np.zeros(0, dtype=bool))).tolist():
        covered[start + 1 : start + 1 + MIN_MATCH] = True
    edges = np.flatnonzero(covered[1:] != covered[:-1]).tolist()
    matched = list(zip(edges[::2], edges[1::2], strict=True))
    longest = None
    for table in reversed(tables):
        if longest is None:
            longest = _longest(training, text, *table.pairs(number), table.n)
    return Overlap(longest, matched, novel)


def _longest(
    training: Tokens, text: Tokens, starts: Positions, positions: Positions, length: int
) -> VerbatimMatch | None:
    """Return the longest extension of the matches of `length` tokens at (starts, positions)."""
    longest_starts, longest_positions = starts, positions
    while len(starts):
        longest_starts, longest_positions = starts, positions
        is_inside = (starts + length < len(text)) & (positions + length < len(training))
        starts, positions = starts[is_inside], positions[is_inside]
        is_equal = text[starts + length] == training[positions + length]
        starts, positions = starts[is_equal], positions[is_equal]
        length += len(starts) > 0
    for start, position in zip(longest_starts.tolist(), longest_positions.tolist(), strict=True):
        if np.array_equal(text[start : start + length], training[position : position + length]):
            return VerbatimMatch(start, length, position)
    return None  # only hashes were equal


def _powers(count: int) -> tuple[Hashes, Hashes]:
    """Return the powers of the base and of its inverse modulo 2^64."""
    both = []
    for base in (BASE, pow(BASE, -1, 2**64)):
        factors = np.full(count, base, dtype=np.uint64)
        factors[0] = 1
        both.append(np.multiply.accumulate(factors))
    return both[0], both[1]


def _prefix_sums(tokens: Tokens, powers: Hashes) -> Hashes:
    terms = (tokens.astype(np.uint64) + np.uint64(1)) * powers[: len(tokens)]
    return np.concatenate((np.zeros(1, dtype=np.uint64), np.add.accumulate(terms)))


def _hashes(sums: Hashes, inverses: Hashes, n: int, count: int) -> Hashes:
    """Return the hashes of the first `count` n-grams of a text with these prefix sums, (M + 1,)."""
    return (sums[n : n + count] - sums[:count]) * inverses[:count]
