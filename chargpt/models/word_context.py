"""Word-context model: counts of the next token after the current word so far and the words before.

    p_m(w | h) = (max(c(h_m w) - d, 0) + d t(h_m) p_{m-1}(w | h)) / c(h_m)

h_m is the current word so far with the m words before it, m = 0, 1, 2, and p_{-1} is the n-gram
model of order `BACKOFF_ORDER`; c, d and t are as in ngram.py, c being the number of occurrences.
Unlike that of an n-gram, a context is as long as its words, and leaves out the tokens between them
(a skipping model: Goodman 2001, section 4; the word model of compressors such as PAQ).

All that a context depends on lies within the last `LOOKBACK` tokens. So a text has the same
contexts in decoding and in evaluation, wherever the tokens before a window are given.

Shapes in this file: N = tokens of the training text, V = vocabulary size, B = batch, T = tokens.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from chargpt.models.ngram import UNSEEN, NGramOrder
from chargpt.text.tokenizer import CharTokenizer, Ints, Tokens

Bools = npt.NDArray[np.bool_]

WORDS = 2  # before the current one, in the longest context
BACKOFF_ORDER = 5  # of the n-gram model
LOOKBACK = 32
NO_TOKEN = -1  # before the start of a text
MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
INVERSE = pow(MULTIPLIER, -1, 1 << 64)
CHUNK = 1 << 20  # tokens hashed at once


def word_token_mask(tokenizer: CharTokenizer) -> Bools:
    """Return which tokens are part of words, (V,): letters, marks, digits, `_`, bytes, unknown."""
    is_part = [
        character.isalnum() or character == "_" or unicodedata.category(character)[0] == "M"
        for character in tokenizer.characters
    ]
    return np.pad(is_part, (0, tokenizer.vocab_size - len(is_part)), constant_values=True)


class WordContextModel(nn.Module):
    """Word-context model of a training text (N,), given which tokens are part of words, (V,)."""

    def __init__(self, tokens: Tokens, vocab_size: int, in_words: Bools) -> None:
        super().__init__()
        tokens = tokens.astype(np.int64)
        self.in_words = in_words
        self.hashes: list[Ints] = []  # sorted, of the seen contexts of each m
        orders, chunks = [], []
        for start in range(0, len(tokens), CHUNK):
            chunk = tokens[None, max(0, start - LOOKBACK) : start + CHUNK]
            found = hash_contexts(chunk, in_words)
            chunks.append([hashes[0, min(start, LOOKBACK) :] for hashes in found])
        for hashes in map(np.concatenate, zip(*chunks, strict=True)):
            codes, counts = np.unique(hashes[:-1] * vocab_size + tokens[1:], return_counts=True)
            contexts, followers = np.divmod(codes, vocab_size)
            is_first = np.append(True, contexts[1:] != contexts[:-1])
            ids = is_first.cumsum() - 1
            self.hashes.append(contexts[is_first])
            codes = ids * vocab_size + followers
            orders.append(NGramOrder(codes, counts, ids[-1] + 1, vocab_size))
        self.orders = cast("list[NGramOrder]", nn.ModuleList(orders))  # of the contexts of each m

    def contexts(self, tokens: Tensor) -> list[Tensor]:
        """Return the ids of the contexts that end at each of tokens (B, T), by m, or UNSEEN."""
        found = []
        all_hashes = hash_contexts(tokens.cpu().numpy(), self.in_words)
        for known, hashes in zip(self.hashes, all_hashes, strict=True):
            ids = np.searchsorted(known, hashes).clip(max=len(known) - 1)
            ids = np.where(known[ids] == hashes, ids, UNSEEN)
            found.append(torch.from_numpy(ids).to(tokens.device))
        return found

    def iter_probs(self, probs: Tensor, contexts: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield p_0, p_1, ... (B, T, V) after contexts (B, T): `probs`, which begin as p_{-1}."""
        for order, context in zip(self.orders, contexts, strict=True):
            order.interpolate(probs.view(-1, probs.size(-1)), context.flatten())
            yield probs


def hash_contexts(tokens: Ints, in_words: Bools) -> list[Ints]:
    """Return the hashes of the contexts that end at each token, by m, (B, T) each.

    They are below 2^63 / V, so that hash * V + token fits into int64. The hash of a sequence is a
    polynomial in MULTIPLIER modulo 2^64 with its tokens (ids or NO_TOKEN) as coefficients: a
    difference of two prefix sums, times a power.
    """
    length = tokens.shape[1]
    index = np.broadcast_to(np.arange(length), tokens.shape)
    powers = np.full(length, MULTIPLIER, dtype=np.uint64).cumprod()
    inverses = np.full(length, INVERSE, dtype=np.uint64).cumprod()
    coefficients = (tokens + 1).astype(np.uint64)
    sums = np.pad((coefficients * inverses).cumsum(axis=1), ((0, 0), (1, 0)))  # (B, T + 1)

    def at(values: npt.NDArray[Any], places: Ints) -> npt.NDArray[Any]:
        return np.take_along_axis(values, places.clip(min=0), axis=1)

    def scrambled(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return a permutation of all hashes that is not linear, so that sums do not coincide."""
        hashes = hashes * np.uint64(MULTIPLIER)
        return (hashes ^ hashes >> np.uint64(32)) * np.uint64(MULTIPLIER)

    is_word = in_words[tokens] & (tokens != NO_TOKEN)
    begins = is_word & ~np.pad(is_word, ((0, 0), (1, 0)))[:, :-1]
    # of the latest word at or before each token; -1 if there is none
    start = np.maximum.accumulate(np.where(begins, index, -1), axis=1)
    end = np.maximum.accumulate(np.where(is_word, index, -1), axis=1)
    oldest = index - LOOKBACK + 1
    first = np.where(is_word, start, index)  # another token is a context of its own
    words = (sums[:, 1:] - at(sums, np.maximum(first, oldest))) * powers  # up to each token
    contexts = [words]
    for _ in range(WORDS):
        last = np.where(first > 0, at(end, first - 1), -1)  # of the word before
        first = np.where(last >= 0, at(start, last), -1)
        is_near = (last >= 0) & (first >= oldest)
        contexts.append(scrambled(contexts[-1]) + np.where(is_near, at(words, last), 0))
    shift = np.uint64(1 + len(in_words).bit_length())
    return [(scrambled(hashes) >> shift).astype(np.int64) for hashes in contexts]
