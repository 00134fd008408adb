"""Losses of baselines estimated from counts: uniform, unigram, bigram and interpolated n-gram."""

import math

import numpy as np

from chargpt.errors import TextError
from chargpt.models.ngram import ORDER, NGramLM
from chargpt.text.corpus import Corpus, Split
from chargpt.text.statistics import PairCounts, count_pairs

UNIGRAM_ALPHA = 1.0  # pseudo-count of additive smoothing
BIGRAM_ALPHA = 0.1
NGRAM = f"{ORDER}-gram"
NGRAM_CHARACTERS = 1_000_000  # scored by the n-gram baseline at most
MAX_BLOCK_SIZE = 65_536  # the maximum of model.block_size


def baselines(
    corpus: Corpus,
    split: Split = "val",
    characters: int | None = None,
    ngram: NGramLM | None = None,
) -> dict[str, float]:
    """Return the loss of each baseline on a split, in nats per character.

    Args:
        corpus: its training split is counted.
        split: the split to score.
        characters: score only this many characters from the start of the split; all by default.
        ngram: the model from `fit_ngram(corpus)`; fitted here by default.

    Returns:
        `uniform`: ln V. `unigram` and `bigram`: frequencies in the training split, with 1 added to
        each character's count and 0.1 to each pair's. `6-gram`: `NGramLM`, fitted to at most the
        last 4,000,000 characters of the training split. They score the same characters as the
        protocol `full`, each with all of its context; `6-gram` at most the first 1,000,000.

    Raises:
        TextError: the split has fewer than 2 characters.
    """
    vocab_size = corpus.tokenizer.vocab_size
    scored = corpus.pair_counts(split)
    if characters is not None:
        scored = count_pairs(corpus.split(split)[: characters + 1], vocab_size)
    if not scored.total:
        raise TextError(
            f"the {split} split contains fewer than 2 characters; give a longer text or a larger "
            f"text.{split}_fraction"
        )
    counts = corpus.token_counts("train") + UNIGRAM_ALPHA
    unigram_log_probs = np.log(counts / counts.sum())
    ngram = ngram or fit_ngram(corpus)
    scored_by_ngram = corpus.split(split)[None, : (characters or NGRAM_CHARACTERS) + 1]
    return {
        "uniform": math.log(vocab_size),
        "unigram": float(-(unigram_log_probs[scored.second] * scored.counts).sum()) / scored.total,
        "bigram": bigram_nats(corpus.pair_counts("train"), scored, BIGRAM_ALPHA),
        NGRAM: float(ngram.losses(scored_by_ngram).mean(dtype=np.float64)),
    }


def fit_ngram(corpus: Corpus) -> NGramLM:
    """Return an n-gram model fitted to a corpus's training split."""
    return NGramLM.fit(corpus.split("train"), corpus.tokenizer.vocab_size, MAX_BLOCK_SIZE)


def bigram_nats(fitted: PairCounts, scored: PairCounts, alpha: float) -> float:
    """Return the mean loss of a bigram model in nats, without its V x V table.

    Equal to the loss of `BigramLM.from_counts(fitted, ..., alpha)`.

    Args:
        fitted: pair counts that the model is fitted to.
        scored: pair counts that are scored.
        alpha: pseudo-count of additive smoothing.
    """
    vocab_size = fitted.vocab_size
    row_sums = np.bincount(fitted.first, weights=fitted.counts, minlength=vocab_size)
    # A last entry that equals no pair, for pairs beyond all fitted ones.
    codes = np.append(fitted.first * vocab_size + fitted.second, -1)
    counts = np.append(fitted.counts, 0)
    wanted = scored.first * vocab_size + scored.second
    index = np.searchsorted(codes[:-1], wanted)
    found = np.where(codes[index] == wanted, counts[index], 0)
    log_probs = np.log((found + alpha) / (row_sums[scored.first] + alpha * vocab_size))
    return float(-(log_probs * scored.counts).sum()) / scored.total
