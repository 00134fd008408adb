"""Counts of tokens and of pairs, and the entropies they give. Memory stays bounded.

Legend: V = vocabulary size, N = number of tokens, P = number of distinct pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]

CHUNK = 1 << 20  # tokens looked at at once: what stays in a processor's cache counts fastest
SPARSE_CHUNK = 1 << 23  # sorting is worth larger portions
DENSE_PAIRS = 1 << 24  # V * V up to which all pairs are counted in one table (128 MB)


@dataclass(frozen=True)
class PairCounts:
    """How often each token follows each other one; only pairs that occur are listed.

    Attributes:
        first, second, counts: int64 arrays of shape (P,), sorted by (first, second).
        vocab_size: V.
    """

    first: Counts
    second: Counts
    counts: Counts
    vocab_size: int

    @property
    def total(self) -> int:
        """Number of pairs, repeats included."""
        return int(self.counts.sum())


def count_tokens(tokens: Tokens, vocab_size: int) -> Counts:
    """Return how often each id occurs, shape (V,)."""
    if tokens.dtype == np.uint8:
        return _count_bytes(tokens)[:vocab_size]
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, tokens.size, CHUNK):
        counts += np.bincount(tokens[start : start + CHUNK], minlength=vocab_size)
    return counts


def _count_bytes(tokens: Tokens) -> Counts:
    """Count byte tokens two at a time, shape (256,)."""
    even = tokens.size - tokens.size % 2
    table = _count_words(tokens[:even]).reshape(256, 256)
    counts: Counts = table.sum(axis=0) + table.sum(axis=1)
    if even < tokens.size:
        counts[tokens[even]] += 1
    return counts


def _count_words(tokens: Tokens) -> Counts:
    """Count an even number of byte tokens as little-endian 16-bit words, shape (65536,)."""
    counts = np.zeros(1 << 16, dtype=np.int64)
    for start in range(0, tokens.size, 2 * CHUNK):
        chunk = np.ascontiguousarray(tokens[start : start + 2 * CHUNK])
        counts += np.bincount(chunk.view("<u2"), minlength=1 << 16)
    return counts


def count_pairs(tokens: Tokens, vocab_size: int) -> PairCounts:
    """Return how often each id follows each other one; N tokens make N - 1 pairs."""
    if tokens.dtype == np.uint8:
        return _from_dense(_count_byte_pairs(tokens)[:vocab_size, :vocab_size], vocab_size)
    if vocab_size * vocab_size <= DENSE_PAIRS:
        table = np.zeros(vocab_size * vocab_size, dtype=np.int64)
        for codes in _pair_codes(tokens, vocab_size, CHUNK):
            if table.size <= codes.size:
                table += np.bincount(codes, minlength=table.size)
            else:
                kinds, counts = np.unique(codes, return_counts=True)
                table[kinds] += counts
        return _from_dense(table.reshape(vocab_size, vocab_size), vocab_size)
    codes, counts = _count_sparse(tokens, vocab_size)
    return PairCounts(codes // vocab_size, codes % vocab_size, counts, vocab_size)


def _count_byte_pairs(tokens: Tokens) -> Counts:
    """Count pairs of byte tokens, shape (256, 256): those at even offsets, then at odd ones."""
    table = np.zeros(1 << 16, dtype=np.int64)
    for offset in (0, 1):
        part = tokens[offset:]
        table += _count_words(part[: part.size - part.size % 2])
    return table.reshape(256, 256).T  # the first of a pair is the word's low byte


def _from_dense(table: Counts, vocab_size: int) -> PairCounts:
    first, second = np.nonzero(table)
    return PairCounts(first, second, table[first, second], vocab_size)


def _pair_codes(tokens: Tokens, vocab_size: int, chunk: int) -> Iterator[Counts]:
    """Yield first * V + second of consecutive pairs, a portion at a time."""
    for start in range(0, tokens.size - 1, chunk):
        part = tokens[start : start + chunk + 1].astype(np.int64)
        yield part[:-1] * vocab_size + part[1:]


def _count_sparse(tokens: Tokens, vocab_size: int) -> tuple[Counts, Counts]:
    """Return the distinct pair codes, sorted, and their counts."""
    empty = np.zeros(0, dtype=np.int64)
    merged = (empty, empty)
    waiting: list[tuple[Counts, Counts]] = []
    for codes in _pair_codes(tokens, vocab_size, SPARSE_CHUNK):
        waiting.append(np.unique(codes, return_counts=True))
        # Merging only when as much waits as was merged keeps the work near-linear.
        if sum(kinds.size for kinds, _ in waiting) > max(SPARSE_CHUNK, merged[0].size):
            merged, waiting = _merge([merged, *waiting]), []
    return _merge([merged, *waiting])


def _merge(parts: list[tuple[Counts, Counts]]) -> tuple[Counts, Counts]:
    codes = np.concatenate([kinds for kinds, _ in parts])
    counts = np.concatenate([numbers for _, numbers in parts])
    if not codes.size:
        return codes, counts
    order = np.argsort(codes, kind="stable")
    codes, counts = codes[order], counts[order]
    starts = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
    return codes[starts], np.add.reduceat(counts, starts)


def entropy_bits(counts: npt.NDArray[Any]) -> float:
    """Return the entropy in bits of the distribution that the counts show (0 for no counts)."""
    present = counts[counts > 0].astype(np.float64)
    if not present.size:
        return 0.0
    shares = present / present.sum()
    return float(-(shares * np.log2(shares)).sum()) + 0.0  # no negative zero


def conditional_entropy_bits(pairs: PairCounts) -> float:
    """Return the entropy in bits of a token given the one before it."""
    first = np.bincount(pairs.first, weights=pairs.counts, minlength=1)
    return max(0.0, entropy_bits(pairs.counts) - entropy_bits(first))
