"""Counts of tokens and of token pairs, and their entropies, in bounded memory.

Legend: V = vocabulary size, N = number of tokens, P = number of distinct pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from chargpt.text.tokenizer import Ints, Tokens

CHUNK = 1 << 20  # tokens counted at once: small enough for a processor's cache
SPARSE_CHUNK = 1 << 23  # tokens sorted at once
MAX_DENSE_PAIRS = 1 << 24  # V * V up to which all pairs are counted in one table (128 MB)


@dataclass(frozen=True)
class PairCounts:
    """Number of occurrences of each pair of consecutive tokens; absent pairs are not listed.

    Attributes:
        first, second, counts: int64 arrays of shape (P,), sorted by (first, second).
        vocab_size: V.
    """

    first: Ints
    second: Ints
    counts: Ints
    vocab_size: int


def count_tokens(tokens: Tokens, vocab_size: int) -> Ints:
    """Return the number of occurrences of each id, shape (V,)."""
    if tokens.dtype == np.uint8:  # counting two bytes at once is twice as fast
        n_even = tokens.size - tokens.size % 2
        words = np.ascontiguousarray(tokens[:n_even]).view("<u2")
        table = count_tokens(words, 1 << 16).reshape(256, 256)
        counts: Ints = table.sum(axis=0) + table.sum(axis=1)
        counts[tokens[n_even:]] += 1
        return counts[:vocab_size]
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, tokens.size, CHUNK):
        counts += np.bincount(tokens[start : start + CHUNK], minlength=vocab_size)
    return counts


def max_id(tokens: Tokens) -> int:
    """Return the largest id, in bounded memory."""
    return max(int(tokens[i : i + CHUNK].max()) for i in range(0, tokens.size, CHUNK))


def count_pairs(tokens: Tokens, vocab_size: int) -> PairCounts:
    """Return the number of occurrences of each pair of consecutive ids (N - 1 pairs in all)."""
    if vocab_size * vocab_size <= MAX_DENSE_PAIRS:
        table = np.zeros(vocab_size * vocab_size, dtype=np.int64)
        for codes in _pair_codes(tokens, vocab_size, CHUNK):
            np.add.at(table, codes, 1)
        codes = np.flatnonzero(table)
        counts = table[codes]
    else:
        codes, counts = _count_sparse(tokens, vocab_size)
    return PairCounts(codes // vocab_size, codes % vocab_size, counts, vocab_size)


def _pair_codes(tokens: Tokens, vocab_size: int, chunk: int) -> Iterator[Ints]:
    """Yield first * V + second of consecutive pairs, `chunk` pairs at a time."""
    for start in range(0, tokens.size - 1, chunk):
        ids = tokens[start : start + chunk + 1].astype(np.int64)
        yield ids[:-1] * vocab_size + ids[1:]


def _count_sparse(tokens: Tokens, vocab_size: int) -> tuple[Ints, Ints]:
    """Return the distinct pair codes, sorted, and their counts."""
    merged = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    pending: list[tuple[Ints, Ints]] = []
    for codes in _pair_codes(tokens, vocab_size, SPARSE_CHUNK):
        pending.append(np.unique(codes, return_counts=True))
        # Merging only when as much is pending as was merged keeps the work near-linear.
        if sum(codes.size for codes, _ in pending) > max(SPARSE_CHUNK, merged[0].size):
            merged, pending = _merge([merged, *pending]), []
    return _merge([merged, *pending])


def _merge(tables: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Add up tables of (codes, counts) by code."""
    codes, rows = np.unique(np.concatenate([codes for codes, _ in tables]), return_inverse=True)
    counts = np.zeros(codes.size, dtype=np.int64)
    np.add.at(counts, rows, np.concatenate([counts for _, counts in tables]))
    return codes, counts


def divergence_nats(counts: Ints, reference: Ints) -> float:
    """Return the KL divergence in nats of frequencies from others, which are smoothed by 1."""
    probs, reference_probs = counts / counts.sum(), (reference + 1) / (reference + 1).sum()
    present = probs > 0
    return float((probs * np.log(probs / reference_probs, where=present, out=0 * probs)).sum())


def entropy_bits(counts: npt.NDArray[Any]) -> float:
    """Return the entropy in bits of the distribution with these counts (0 for no counts)."""
    present = counts[counts > 0].astype(np.float64)
    if not present.size:
        return 0.0
    probs = present / present.sum()
    return float(-(probs * np.log2(probs)).sum()) + 0.0  # no negative zero


def conditional_entropy_bits(pairs: PairCounts) -> float:
    """Return the entropy in bits of a token given the previous one."""
    first = np.bincount(pairs.first, weights=pairs.counts, minlength=1)
    return max(0.0, entropy_bits(pairs.counts) - entropy_bits(first))
