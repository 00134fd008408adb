"""Baselines estimated from counts: uniform, unigram, bigram and n-gram losses on a split."""

import math

import numpy as np

from chargpt.errors import TextError
from chargpt.models.ngram import ORDER, NGramLM
from chargpt.text.corpus import Corpus, Split
from chargpt.text.statistics import PairCounts, count_pairs

UNIGRAM_ALPHA = 1.0
BIGRAM_ALPHA = 0.1
NGRAM = f"{ORDER}-gram"
NGRAM_CHARACTERS = 1_000_000
MAX_BLOCK_SIZE = 65_536  # as the config allows


def baselines(
    corpus: Corpus,
    split: Split = "val",
    characters: int | None = None,
    ngram: NGramLM | None = None,
) -> dict[str, float]:
    """Return the nats per character that counting alone reaches on a split.

    Args:
        corpus: counted in its training split.
        split: that is scored.
        characters: how many of it are scored, from its start on; all by default.
        ngram: what `fit_ngram` returned, if it is at hand.

    Returns:
        `uniform`: ln V. `unigram` and `bigram`: the training split's frequencies, with 1 added to
        each character's count and 0.1 to each pair's. `6-gram`: `NGramLM`, counted in the last
        4,000,000 characters of a longer training split. They score what `full` scores, each
        character with all of its context; of a longer split, `6-gram` the first 1,000,000.

    Raises:
        TextError: the split holds too few characters.
    """
    size = corpus.tokenizer.vocab_size
    scored = corpus.pair_counts(split)
    if characters is not None:
        scored = count_pairs(corpus.split(split)[: characters + 1], size)
    if not scored.total:
        raise TextError(
            f"the {split} split holds fewer than 2 characters; give a longer text or a larger "
            f"text.{split}_fraction"
        )
    counts = corpus.token_counts("train") + UNIGRAM_ALPHA
    unigram = np.log(counts / counts.sum())
    ngram = ngram or fit_ngram(corpus)
    scored_by_ngram = corpus.split(split)[None, : (characters or NGRAM_CHARACTERS) + 1]
    return {
        "uniform": math.log(size),
        "unigram": float(-(unigram[scored.second] * scored.counts).sum()) / scored.total,
        "bigram": bigram_nats(corpus.pair_counts("train"), scored, BIGRAM_ALPHA),
        NGRAM: float(ngram.losses(scored_by_ngram).mean(dtype=np.float64)),
    }


def fit_ngram(corpus: Corpus) -> NGramLM:
    """Return the n-gram model counted in a corpus's training split."""
    return NGramLM.fit(corpus.split("train"), corpus.tokenizer.vocab_size, MAX_BLOCK_SIZE)


def bigram_nats(fitted: PairCounts, scored: PairCounts, alpha: float) -> float:
    """Return the mean loss on `scored` pairs of the bigram of `fitted` ones, for any V.

    It is what `BigramLM.from_counts(fitted, ..., alpha)` reaches, without its V x V table.
    """
    size = fitted.vocab_size
    rows = np.bincount(fitted.first, weights=fitted.counts, minlength=size)
    known = np.append(fitted.first * size + fitted.second, -1)  # -1: no pair, for those beyond all
    counts = np.append(fitted.counts, 0)
    wanted = scored.first * size + scored.second
    place = np.searchsorted(known[:-1], wanted)
    seen = np.where(known[place] == wanted, counts[place], 0)
    log_likelihoods = np.log((seen + alpha) / (rows[scored.first] + alpha * size))
    return float(-(log_likelihoods * scored.counts).sum()) / scored.total
