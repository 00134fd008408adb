"""Verbatim overlap: which parts of a text occur word for word in the training split.

n-grams are found by their hash. With prefix sums P_i = sum over j < i of (t_j + 1) B^j modulo 2^64,
the hash of the n tokens from i on is (P_{i+n} - P_i) B^{-i} (Karp and Rabin 1987, with prefix sums
instead of a rolling hash): a few array operations for any n. So no index is built: the training
split is scanned once, in chunks, for all lengths together, and its hashes are looked up in the
small table of the texts' hashes. For n-grams of MIN_MATCH tokens or more only the surroundings of
anchors are scanned: aligned machine words of the training split that a text has too.
Shapes in this file: N = tokens of the training split, M = tokens of a text.
"""

import math
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from chargpt.inference.copying import (
    BASE,
    CHUNK,
    Hashes,
    base_powers,
    ngram_hashes,
    prefix_sums,
)
from chargpt.inference.evaluation import OnProgress
from chargpt.text.corpus import Corpus, document_ends
from chargpt.text.documents import find_documents
from chargpt.text.tokenizer import CharTokenizer, Ints, Tokens

NGRAM_LENGTHS = (4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MIN_COMPARED = 16  # parts of the validation split, at least, since their overlap varies much
MAX_DOCUMENT_TOKENS = 10_000  # compared, of one document; more are taken of short ones
MIN_MATCH = 20  # characters of a match that counts; shorter ones are common phrases
MIN_VISIBLE = 10  # of them that are not blank: indented code is full of blanks
MIN_NGRAMS = 30  # behind a fraction; those of fewer vary too much
MAX_SCANNED = 30_000_000  # tokens of a training split whose n-grams below MIN_MATCH are counted too
TABLE_BITS = 20  # of a hash, by which most n-grams of the training split are skipped
MAX_POSITIONS = 32  # stored for one n-gram; a run of spaces may occur a million times
SEPARATOR = 0x5851F42D4C957F2D  # no token id; random bits, for the hashes


@dataclass(frozen=True)
class VerbatimMatch:
    """A part of a text that occurs in the training split."""

    start: int
    length: int
    text: str = ""
    position: int = 0  # of one occurrence, in tokens from the start of the training split


@dataclass(frozen=True)
class Overlap:
    """Verbatim overlap of one text with the training split, in matches of MIN_MATCH or more.

    `find_overlap` returns all matches, in tokens. Within an `OverlapReport` they are disjoint and
    in characters, without matches of mostly blanks: of a match that overlaps longer ones, what
    those leave. n-grams are of tokens.
    """

    # longest first; only the first MAX_POSITIONS occurrences of an n-gram are tried
    matches: list[VerbatimMatch]
    novel: dict[int, float]  # by n, the fraction of the text's n-grams that are not in the split
    ngrams: dict[int, int]  # by n, the number of the text's n-grams

    @property
    def longest(self) -> VerbatimMatch | None:
        """The longest match, if there is one."""
        return self.matches[0] if self.matches else None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The (start, end) of each match, in order."""
        return sorted((match.start, match.start + match.length) for match in self.matches)


@dataclass(frozen=True)
class OverlapReport:
    """Overlap of generated texts, and of the validation split for reference.

    Attributes:
        val: of parts of the validation split, each as long as one of the texts, or whole documents.
        val_characters: of those parts whose n-grams are counted.
        copied, known: those generated documents that the training split has, and the whole text.
    """

    texts: list[Overlap]
    val: list[Overlap]
    val_characters: int = 0
    copied: AbstractSet[str] = frozenset()
    known: AbstractSet[str] = frozenset()

    @property
    def longest_in_val(self) -> int:
        """Longest match in validation parts as long as all texts: the median over such groups."""
        n_texts = len(self.texts)
        groups = [self.val[i : i + n_texts] for i in range(0, len(self.val), n_texts)]
        return median_low(map(longest_match, groups)) if groups else 0

    def longest_matches(self) -> list[VerbatimMatch]:
        """Return the different matches of the texts, longest first."""
        by_text = {match.text: match for each in self.texts for match in each.matches}
        return sorted(by_text.values(), key=lambda match: -match.length)

    def novel_rows(self) -> list[list[str]]:
        """Return n, and the novel fraction in the texts and in the validation split, as table rows.

        Each fraction is given with its number of n-grams; rows with few of them are left out.
        """
        rows = []
        for n in (n for n in NGRAM_LENGTHS if n <= 2 * MIN_MATCH):
            row = [str(n)]
            for overlaps in (self.texts, self.val):
                total = sum(each.ngrams.get(n, 0) for each in overlaps)
                novel = sum(each.novel[n] * each.ngrams[n] for each in overlaps if n in each.novel)
                if total >= MIN_NGRAMS:
                    row.append(f"{novel / total:.1%} of {total:,}")
            if len(row) == 3:
                rows.append(row)
        return rows


def longest_match(overlaps: Sequence[Overlap]) -> int:
    """Return the length of the longest verbatim match; 0 if there is none."""
    return max((each.longest.length for each in overlaps if each.longest), default=0)


def measure_overlap(
    corpus: Corpus,
    texts: Sequence[str],
    documents: Collection[str] = (),
    on_progress: OnProgress = lambda *_: None,
) -> OverlapReport:
    """Return the verbatim overlap of generated texts with the training split of their corpus.

    Args:
        documents: generated documents, whole, to look up if the corpus is a list of them.
        on_progress: called with the number of training tokens done, and of all.
    """
    training, val, tokenizer = corpus.split("train"), corpus.split("val"), corpus.tokenizer
    generated = [tokenizer.encode(text, unknown="replace") for text in texts]
    parts = _validation_parts(val, tokenizer, [len(tokens) for tokens in generated])
    tokenized = [*generated, *(val[start:end] for start, end in parts)]
    overlaps = find_overlap(training, tokenized, on_progress)
    found = [_in_characters(*each, tokenizer) for each in zip(overlaps, tokenized, strict=True)]
    compared = found[len(generated) :]
    n_counted = last = 0
    for index, (start, end) in sorted(enumerate(parts), key=lambda each: each[1]):
        if start < last:  # its n-grams would be counted twice
            compared[index] = replace(compared[index], novel={}, ngrams={})
        else:
            n_counted += tokenizer.count_characters(val[start:end])
            last = end
    copied, known = find_documents(
        corpus, documents if tokenizer.eos_token else (), tokenizer.eos_token
    )
    return OverlapReport(found[: len(generated)], compared, n_counted, copied, known)


def _validation_parts(
    val: Tokens, tokenizer: CharTokenizer, lengths: Sequence[int]
) -> list[tuple[int, int]]:
    """Return (start, end) of parts of the validation split, in groups as long as the texts.

    They are whole documents, without EOS tokens, from all of the split if there are any: cut ones
    would be beginnings alone, whose n-grams differ.
    """
    if tokenizer.eos_token:
        ends = document_ends(val, tokenizer.eos_token_id)
        starts = np.append(0, ends[:-1])
        number = max(len(lengths), MIN_COMPARED, MAX_DOCUMENT_TOKENS * len(ends) // len(val))
        chosen = np.linspace(0, len(ends) - 1, min(number, len(ends))).round().astype(int)
        stops = np.minimum(ends[chosen] - 1, starts[chosen] + MAX_DOCUMENT_TOKENS)
        return list(zip(starts[chosen].tolist(), stops.tolist(), strict=True))
    repeats = math.ceil(MIN_COMPARED / max(1, len(lengths)))
    parts = []
    for repeat in range(repeats):
        for number, length in enumerate(lengths):
            fraction = (number * repeats + repeat) / max(1, repeats * len(lengths) - 1)
            start = max(0, round((len(val) - length) * fraction))
            parts.append((start, min(start + length, len(val))))
    return parts


def _in_characters(overlap: Overlap, tokens: Tokens, tokenizer: CharTokenizer) -> Overlap:
    """Return an overlap of tokens (M,) in whole characters, with disjoint matches that count."""
    edges = np.append(np.flatnonzero(tokens < tokenizer.first_continuation_id), len(tokens))
    ordered = sorted(overlap.matches, key=lambda match: (match.start, match.length))
    starts, ends = np.reshape(overlap.spans, (-1, 2)).T
    firsts = np.searchsorted(edges, starts)
    lasts = np.searchsorted(edges, ends, side="right") - 1
    is_free = np.ones(len(edges), dtype=bool)
    matches = []
    for index in np.argsort(firsts - lasts, kind="stable"):  # the longest first
        free = np.arange(firsts[index], lasts[index])
        free = free[is_free[free]]
        # what overlaps is longer and covers an end of the match: the rest is one part
        text = tokenizer.decode(tokens[edges[free[0]] : edges[free[-1] + 1]]) if free.size else ""
        n_visible = sum(not character.isspace() for character in text)
        if len(text) >= MIN_MATCH and n_visible >= MIN_VISIBLE:
            is_free[free] = False
            match = ordered[index]
            position = match.position + int(edges[free[0]]) - match.start
            matches.append(VerbatimMatch(int(free[0]), len(text), text, position))
    return replace(overlap, matches=sorted(matches, key=lambda match: -match.length))


def find_overlap(
    training: Tokens, texts: Sequence[Tokens], on_progress: OnProgress = lambda *_: None
) -> list[Overlap]:
    """Return the overlap of each text with the training tokens (N,), in one pass over those.

    Of more than MAX_SCANNED tokens, n-grams below MIN_MATCH are not counted.
    """
    joined, starts = _join(texts)
    longest = max((len(text) for text in texts), default=0)
    shortest = MIN_MATCH if len(training) > MAX_SCANNED else 1
    lengths = [n for n in NGRAM_LENGTHS if shortest <= n <= min(longest, len(training))]
    tables = _find_ngrams(training, joined, lengths, MAX_POSITIONS, on_progress)
    matches = _matches(np.asarray(training), joined, tables)  # views of a memory map are slow
    overlaps = []
    for text, start in zip(texts, starts, strict=True):
        end = start + len(text)
        own = [
            replace(match, start=match.start - start)
            for match in matches
            if start <= match.start < end
        ]
        occurs = {
            table.n: table.n_stored[table.ids[start : end - table.n + 1]] > 0
            for table in tables
            if table.n <= len(text)
        }
        novel = {n: 1 - float(each.mean()) for n, each in occurs.items()}
        overlaps.append(Overlap(own, novel, {n: len(each) for n, each in occurs.items()}))
    return overlaps


def longest_copied(
    training: Tokens, texts: Sequence[Tokens], first_continuation_id: int
) -> list[int]:
    """Return for each text the length of its longest part that the training tokens (N,) have.

    In whole characters, exact for all lengths, up to equal hashes of different n-grams. Since a
    part that occurs has shorter ones that do, the length is found by bisection, for all texts
    together: the training tokens are scanned about log2 M times.

    Args:
        first_continuation_id: ids from this one on continue a character.
    """
    joined, starts = _join(texts)
    # of the characters of each text, and its end
    edges = [np.append(np.flatnonzero(text < first_continuation_id), len(text)) for text in texts]
    lengths, limits = [0] * len(texts), [len(each) for each in edges]  # one that does not occur
    while True:
        middles = {
            index: (length + limit) // 2
            for index, (length, limit) in enumerate(zip(lengths, limits, strict=True))
            if limit - length > 1
        }
        if not middles:
            return lengths
        # of as many characters, n-grams of different numbers of tokens
        sizes = {index: edges[index][n:] - edges[index][:-n] for index, n in middles.items()}
        different = np.unique(np.concatenate(list(sizes.values()))).tolist()
        tables = _find_ngrams(training, joined, different, max_positions=1)
        occurs = {table.n: table.n_stored[table.ids] > 0 for table in tables}
        for index, n in middles.items():
            begins = starts[index] + edges[index][:-n]
            has_any = any(occurs[m][begins[sizes[index] == m]].any() for m in different)
            (lengths if has_any else limits)[index] = n


def _join(texts: Sequence[Tokens]) -> tuple[Tokens, list[int]]:
    """Return the texts as one, with the start of each in it.

    A separator follows each: no n-gram with one is in the training split.
    """
    parts = [part for text in texts for part in (text, np.array([SEPARATOR]))]
    starts = np.cumsum([0, *(len(text) + 1 for text in texts)])[:-1]
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts]), starts.tolist()


def _find_ngrams(
    training: Tokens,
    joined: Tokens,
    lengths: Sequence[int],
    max_positions: int,
    on_progress: OnProgress = lambda *_: None,
) -> list["_NGramTable"]:
    """Return the n-grams of these lengths, in rising order, of the joined texts, looked up.

    Args:
        max_positions: stored for one n-gram of MIN_MATCH tokens or more; of a shorter one 1.
    """
    n_powers = max(len(joined), CHUNK + max(lengths, default=0))
    powers, inverses = base_powers(BASE, n_powers), base_powers(pow(BASE, -1, 2**64), n_powers)
    sums = prefix_sums(joined, powers)
    tables = [
        _NGramTable(
            ngram_hashes(sums, inverses, n, len(joined) - n),
            n,
            max_positions if n >= MIN_MATCH else 1,
        )
        for n in lengths
    ]
    short = [table for table in tables if table.n < MIN_MATCH]
    long, anchors = tables[len(short) :], _Anchors(joined, training.dtype)
    for first in range(0, len(training) if lengths else 0, CHUNK):
        chunk = np.asarray(training[first : first + CHUNK + lengths[-1] - 1])
        for group in filter(None, (short, long)):
            positions = np.arange(len(chunk)) if group is short else anchors.near(chunk)
            sums = prefix_sums(chunk[positions], powers)
            for table in group:
                count = max(0, len(positions) - table.n + 1)
                table.look_up(ngram_hashes(sums, inverses, table.n, count), positions, first)
        on_progress(min(first + CHUNK, len(training)), len(training))
    return tables


class _HashTable:
    """The different hashes (M,) of a text's n-grams, by `ids` in the order of the text."""

    def __init__(self, hashes: Hashes) -> None:
        self.hashes, self.ids = np.unique(hashes, return_inverse=True)
        self.find_only(self.hashes)

    def find_only(self, hashes: Hashes) -> None:
        """Leave out the other hashes from now on, or most of them, for speed."""
        self.filter = np.zeros(2**TABLE_BITS, dtype=bool)
        self.filter[hashes >> np.uint64(64 - TABLE_BITS)] = True

    def find(self, hashes: Hashes) -> tuple[Ints, Ints]:
        """Return the ids of those hashes that are in the table, and their indices."""
        indices = np.flatnonzero(self.filter[hashes >> np.uint64(64 - TABLE_BITS)])
        ids = np.searchsorted(self.hashes, hashes[indices]).clip(max=len(self.hashes) - 1)
        is_equal = self.hashes[ids] == hashes[indices]
        return ids[is_equal], indices[is_equal]


class _Anchors(_HashTable):
    """Where the training split may have matches with a text.

    An anchor is an n-gram that begins at a machine word of the training split. It is so short that
    every match contains one, and no other place of the training split needs to be read.

    Args:
        text: shape (M,).
        dtype: of the tokens of the training split.
    """

    def __init__(self, text: Tokens, dtype: np.dtype[Any]) -> None:
        self.per_word = 8 // dtype.itemsize  # tokens
        n = MIN_MATCH - self.per_word + 1
        self.n_words = -(-n // self.per_word)
        self.mask = np.uint64(2 ** (8 * dtype.itemsize * ((n - 1) % self.per_word + 1)) - 1)
        padded = np.append(text.astype(dtype), np.zeros(self.per_word * self.n_words, dtype))
        windows = sliding_window_view(padded, self.per_word * self.n_words)
        super().__init__(self._hashes(np.ascontiguousarray(windows).view(np.uint64).T))

    def _hashes(self, words: Sequence[Hashes] | Hashes) -> Hashes:
        hashes = (words[-1] & self.mask) * np.uint64(BASE)
        for word in words[:-1]:
            hashes = (hashes ^ word) * np.uint64(BASE)
        return hashes

    def near(self, chunk: Tokens) -> Ints:
        """Return the positions in a part of the training split that a match may include."""
        padding = self.per_word + -len(chunk) % self.per_word
        words = np.append(chunk, np.zeros(padding, chunk.dtype)).view(np.uint64)
        count = max(0, len(words) - self.n_words + 1)
        _, found = self.find(self._hashes([words[i : i + count] for i in range(self.n_words)]))
        is_near = np.zeros(len(chunk), dtype=bool)
        near = found[:, None] * self.per_word + np.arange(1 - self.per_word, MIN_MATCH)
        is_near[near.clip(0, len(chunk) - 1)] = True
        return np.flatnonzero(is_near)


class _NGramTable(_HashTable):
    """The n-grams of one length of a text, and where the training split has them.

    Args:
        hashes: of the n-grams, in the order of the text.
        n: their length.
        max_positions: stored for one n-gram.
    """

    def __init__(self, hashes: Hashes, n: int, max_positions: int) -> None:
        super().__init__(hashes)
        self.n, self.max_positions = n, max_positions
        self.positions: list[tuple[Ints, Ints]] = []  # (ids, positions) of each chunk
        self.n_stored = np.zeros(len(self.hashes), dtype=np.int64)

    def look_up(self, hashes: Hashes, tokens: Ints, first: int) -> None:
        """Look up n-grams of those tokens of a chunk that are at these positions.

        The chunk begins at position `first` of the training split.
        """
        ids, indices = self.find(hashes)
        positions = tokens[indices]
        # the tokens are consecutive ones; n-grams that begin in the next chunk belong to it
        is_own = (tokens[indices + self.n - 1] - positions == self.n - 1) & (positions < CHUNK)
        ids, positions = ids[is_own], positions[is_own]
        order = np.argsort(ids, kind="stable")
        ids, positions = ids[order], positions[order] + first
        rank = np.arange(len(ids)) - np.searchsorted(ids, ids)  # among equal ids of this chunk
        is_kept = self.n_stored[ids] + rank < self.max_positions
        self.positions.append((ids[is_kept], positions[is_kept]))
        self.n_stored += np.bincount(ids[is_kept], minlength=len(self.hashes))
        self.find_only(self.hashes[self.n_stored < self.max_positions])

    def pairs(self) -> tuple[Ints, Ints]:
        """Return starts in the text and in the training split of all equal n-grams."""
        ids, positions = (np.concatenate(each) for each in zip(*self.positions, strict=True))
        order = np.argsort(ids, kind="stable")
        ids, positions = ids[order], positions[order]
        low = np.searchsorted(ids, self.ids, side="left")
        counts = np.searchsorted(ids, self.ids, side="right") - low
        starts = np.repeat(np.arange(len(self.ids)), counts)
        offsets = np.repeat(low - counts.cumsum() + counts, counts)
        return starts, positions[np.arange(len(starts)) + offsets]


def _matches(training: Tokens, text: Tokens, tables: list[_NGramTable]) -> list[VerbatimMatch]:
    """Return the matches of a text that cannot be extended, longest first.

    The pair of a start in the text and an equal position in the training split is found by the
    longest n-gram that begins there: matches by shorter ones are within that match, or shorter.
    """
    found: dict[tuple[int, int], int] = {}  # the first position of each
    is_open = np.ones(len(text), dtype=bool)  # no longer n-gram has been found here
    for table in (table for table in reversed(tables) if table.n >= MIN_MATCH):
        starts, positions = table.pairs()
        is_longest = is_open[starts]
        is_open[starts] = False
        starts, offsets = starts[is_longest], (positions - starts)[is_longest]
        order = np.lexsort((starts, offsets))
        last, end = -len(text), 0  # offset and end of the match before
        for start, offset in zip(starts[order].tolist(), offsets[order].tolist(), strict=True):
            if offset == last and start < end:
                continue
            position = start + offset
            length = _common_length(text[start:], training[position:])
            if length < MIN_MATCH:
                continue  # only hashes were equal
            last, end = offset, start + length
            before = _common_length(text[:start][::-1], training[:position][::-1])
            key, first = (start - before, end), position - before
            found[key] = min(first, found.get(key, first))
    matches = [
        VerbatimMatch(start, end - start, position=position)
        for (start, end), position in sorted(found.items())
    ]
    return sorted(matches, key=lambda match: -match.length)


def _common_length(first: Tokens, second: Tokens) -> int:
    """Return how many tokens two texts have in common from their start on."""
    count = min(len(first), len(second))
    return int(np.append(first[:count] != second[:count], True).argmax())
