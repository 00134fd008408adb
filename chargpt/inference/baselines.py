"""Losses of baselines estimated from counts: uniform, unigram, bigram and interpolated n-gram."""

import math

import numpy as np

from chargpt.config import MAX_BLOCK_SIZE
from chargpt.errors import TextError
from chargpt.inference.evaluation import BaselineLoss, even_spans, gather_rows
from chargpt.models.ngram import NGRAM_ORDER, NGramLM
from chargpt.text.corpus import Corpus, PairCounts
from chargpt.text.tokenizer import Floats, Tokens

UNIGRAM_ALPHA = 1.0  # pseudo-count of additive smoothing
BIGRAM_ALPHA = 0.1
NGRAM = f"{NGRAM_ORDER}-gram"


class Baselines:
    """The baselines of a text, fitted to its training split.

    `uniform`: ln V per token. `unigram` and `bigram`: frequencies in the training split, with 1
    added to each character's count and 0.1 to each pair's. `6-gram`: `ngram`, by default
    `fit_ngram(corpus)`.
    """

    def __init__(self, corpus: Corpus, ngram: NGramLM | None = None) -> None:
        self.tokenizer = corpus.tokenizer
        self.token_counts = corpus.token_counts("train")  # (V,)
        self.pair_counts = corpus.pair_counts("train")
        self.ngram = ngram or fit_ngram(corpus)

    def losses(
        self, tokens: Tokens, *, max_tokens: int | None = None, span: int | None = None
    ) -> dict[str, float]:
        """Return the loss of each baseline in nats per character, by name; see `evaluate`."""
        found = self.evaluate(tokens, max_tokens=max_tokens, span=span)
        return {name: loss.nats_per_char for name, loss in found.items()}

    def evaluate(
        self, tokens: Tokens, *, max_tokens: int | None = None, span: int | None = None
    ) -> dict[str, BaselineLoss]:
        """Return the loss of each baseline, by name.

        They score the characters that `evaluate_tokens` scores with the same arguments, each with
        all of its context. `span`, the model's block size, is also the length of the blocks whose
        losses are added up; `max_tokens` needs it.

        Raises:
            TextError: there are fewer than 2 characters.
        """
        assert max_tokens is None or span is not None
        n_inputs = len(tokens) - 1
        if n_inputs < 1:
            raise TextError(
                "the split contains fewer than 2 characters; give a longer text or a larger "
                "text.val_fraction or text.test_fraction"
            )
        starts, length = even_spans(n_inputs, span or n_inputs, max_tokens)
        n_earlier = NGRAM_ORDER - 2  # tokens of context before each span
        rows = gather_rows(tokens, starts - n_earlier, length + n_earlier)
        first, second = rows[:, n_earlier:-1].ravel(), rows[:, n_earlier + 1 :].ravel()
        counts = self.token_counts + UNIGRAM_ALPHA
        pair_log_probs = bigram_log_probs(self.pair_counts, first, second, BIGRAM_ALPHA)
        losses = {  # of each token
            "uniform": np.full(second.size, math.log(len(counts))),
            "unigram": -np.log(counts / counts.sum())[second],
            "bigram": -pair_log_probs,
            NGRAM: self.ngram.losses(rows)[:, n_earlier:],
        }

        def block_sums(values: Floats) -> Floats:
            by_row = values.reshape(len(rows), length).astype(np.float64)
            sums: Floats = np.add.reduceat(by_row, np.arange(0, length, span or length), axis=1)
            return sums.ravel()

        sizes = block_sums((second < self.tokenizer.first_continuation_id).astype(np.float64))
        n_characters = max(1, sizes.sum())
        return {
            name: BaselineLoss(
                float(each.sum(dtype=np.float64)) / n_characters,
                np.stack((block_sums(each), sizes)),
            )
            for name, each in losses.items()
        }


def fit_ngram(corpus: Corpus) -> NGramLM:
    """Return an n-gram model fitted to the last `ngram.MAX_TOKENS` tokens of the training split."""
    return NGramLM.fit(corpus.split("train"), corpus.tokenizer.vocab_size, MAX_BLOCK_SIZE)


def bigram_log_probs(fitted: PairCounts, first: Tokens, second: Tokens, alpha: float) -> Floats:
    """Return log-probabilities of tokens `second` after tokens `first`, (N,) each.

    Equal to those of `BigramLM.from_counts(fitted, ..., alpha)`, without its V x V table.
    """
    vocab_size = fitted.vocab_size
    row_sums = np.bincount(fitted.first, weights=fitted.counts, minlength=vocab_size)
    # A last entry that equals no pair, for pairs beyond all fitted ones.
    codes = np.append(fitted.first * vocab_size + fitted.second, -1)
    counts = np.append(fitted.counts, 0)
    wanted = first * vocab_size + second
    index = np.searchsorted(codes[:-1], wanted)
    found = np.where(codes[index] == wanted, counts[index], 0)
    return np.log((found + alpha) / (row_sums[first] + alpha * vocab_size))
