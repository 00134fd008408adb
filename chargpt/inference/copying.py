"""Which token follows each n-gram of a text, so that sampling can avoid to copy longer stretches.

n-grams are looked up by a hash: a polynomial in BASE modulo 2^64 with the tokens as coefficients
(Karp and Rabin 1987). With prefix sums P_i = sum over j < i of (t_j + 1) B^j, that of the n tokens
from i on is (P_{i+n} - P_i) B^{-i}: a few array operations for any n.

Shapes in this file: N = tokens of the text, K = different n-grams with their next token, M =
contexts.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from chargpt.device import require_memory
from chargpt.text.tokenizer import Ints, Tokens

BASE = 0x9E3779B97F4A7C15  # any odd number has an inverse modulo 2^64
CHUNK = 2**20  # tokens hashed at once
BYTES_PER_TOKEN = 17  # of memory while an index is built, of which 8 stay

Hashes = npt.NDArray[np.uint64]


class CopyIndex:
    """The tokens that follow each n-gram of a text: 8 bytes a token.

    A key is the hash of an n-gram, with the token that follows in its lowest bits. Where the hashes
    of two n-grams are equal, one token more is found; none is missed.
    """

    def __init__(self, texts: Iterable[Tokens], n: int, vocab_size: int) -> None:
        """Index the n-grams of texts, (N,) each; DeviceError if the memory is too small."""
        self.n = n
        self.token_bits = np.uint64((1 << (vocab_size - 1).bit_length()) - 1)
        powers = base_powers(BASE, CHUNK + n)
        self.powers = powers[1 : n + 1]
        inverses = base_powers(pow(BASE, -1, 2**64), CHUNK)
        keys = [np.zeros(0, np.uint64)]
        for tokens in texts:
            require_memory(BYTES_PER_TOKEN * len(tokens), "the index of the training text")
            for start in range(0, len(tokens) - n, CHUNK):
                chunk = np.asarray(tokens[start : start + CHUNK + n])
                count = len(chunk) - n
                hashes = ngram_hashes(prefix_sums(chunk, powers), inverses, n, count)
                hashes *= np.uint64(BASE)  # the first token counts in all bits, not the lowest
                hashes &= ~self.token_bits
                hashes |= chunk[n:].astype(np.uint64)
                keys.append(hashes)
        joined = np.concatenate(keys)
        del keys
        joined.sort()
        self.keys = joined[np.append(True, joined[1:] != joined[:-1])[: len(joined)]]  # (K,)

    def followers(self, contexts: Tokens) -> tuple[Ints, Ints]:
        """Return the tokens that follow contexts of n tokens, (M, n), with the row of each."""
        values = contexts.astype(np.uint64) + np.uint64(1)
        codes = (values * self.powers).sum(axis=1) & ~self.token_bits  # (M,)
        first = np.searchsorted(self.keys, codes)
        counts = np.searchsorted(self.keys, codes | self.token_bits, side="right") - first
        rows = np.repeat(np.arange(len(codes)), counts)
        places = np.arange(len(rows)) + np.repeat(first - counts.cumsum() + counts, counts)
        tokens: Ints = (self.keys[places] & self.token_bits).astype(np.int64)
        return rows, tokens


def base_powers(base: int, count: int) -> Hashes:
    """Return the powers of a base modulo 2^64, from the 0th on."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


def prefix_sums(tokens: Tokens, powers: Hashes) -> Hashes:
    """Return the sums P of tokens (N,), (N + 1,)."""
    terms = (tokens.astype(np.uint64) + np.uint64(1)) * powers[: len(tokens)]
    return np.concatenate((np.zeros(1, dtype=np.uint64), np.add.accumulate(terms)))


def ngram_hashes(sums: Hashes, inverses: Hashes, n: int, count: int) -> Hashes:
    """Return the hashes of the first `count` n-grams of a text with these prefix sums, (N + 1,)."""
    return (sums[n : n + count] - sums[:count]) * inverses[:count]
