"""Statistics of a text, and warnings about it: the result of `chargpt data info`."""

import math
from dataclasses import dataclass

import numpy as np

from chargpt.text.corpus import Corpus
from chargpt.text.statistics import (
    PairCounts,
    conditional_entropy_bits,
    count_pairs,
    count_tokens,
    divergence_nats,
    entropy_bits,
)
from chargpt.text.tokenizer import Counts, Tokens

MAX_SHOWN = 10  # characters listed as the most or least frequent
MAX_VOCAB_SIZE = 5_000  # beyond this and the following limits there is a warning
MIN_CHARACTERS = 10_000
MAX_LINE = 1_000_000  # characters
MAX_ONCE_FRACTION = 0.2  # of the vocabulary, for characters that occur once
CHUNK = 1 << 20  # tokens
# nats between the character frequencies of the splits that change the loss noticeably
MIN_DIVERGENCE = 0.05
MIN_DIVERGENCE_RATIO = 5  # to that of a sample of the training split
SAMPLE_BLOCK = 64  # characters of that sample's blocks


@dataclass(frozen=True)
class Description:
    """Statistics of a text.

    Attributes:
        longest_line: its number of characters, without the line end.
        most_frequent, least_frequent: (character, count), the most or least frequent first.
        unigram_bits: entropy of a character, in bits.
        bigram_bits: entropy of a character given the previous one, in bits.
        unknown_fraction: fraction of the characters that `min_count` made the unknown token.
        warnings: sentences about properties that impair training.
    """

    name: str
    characters: int
    vocab_size: int
    most_frequent: tuple[tuple[str, int], ...]
    least_frequent: tuple[tuple[str, int], ...]
    lines: int
    longest_line: int
    unigram_bits: float
    bigram_bits: float
    unknown_fraction: float
    warnings: tuple[str, ...]


def describe(corpus: Corpus) -> Description:
    """Return the statistics of a text, all splits together."""
    tokenizer, tokens = corpus.tokenizer, corpus.tokens
    counts = count_tokens(tokens, tokenizer.vocab_size)
    pairs = count_pairs(tokens, tokenizer.vocab_size)
    known = counts[: len(tokenizer.characters)]
    order = np.argsort(-known, kind="stable")
    ranked = [(tokenizer.characters[index], int(known[index])) for index in order]
    lines, longest = _lines(tokens, tokenizer.characters.find("\n"))
    return Description(
        name=corpus.name,
        characters=int(tokens.size),
        vocab_size=tokenizer.vocab_size,
        most_frequent=tuple(ranked[:MAX_SHOWN]),
        least_frequent=tuple(ranked[: -MAX_SHOWN - 1 : -1]),
        lines=lines,
        longest_line=longest,
        unigram_bits=entropy_bits(counts),
        bigram_bits=conditional_entropy_bits(pairs),
        unknown_fraction=corpus.unknown_fraction,
        warnings=tuple(_warnings(corpus, known, pairs, longest)),
    )


def warn_of_length(corpus: Corpus) -> list[str]:
    """Return a warning if the text is too short to train on, else nothing."""
    total = corpus.tokens.size
    if total >= MIN_CHARACTERS:
        return []
    return [
        f"{total:,} characters are too few: a model will memorise them; "
        f"give at least {MIN_CHARACTERS:,}, better a million"
    ]


def compare_splits(corpus: Corpus) -> str | None:
    """Return a warning if the validation split differs from the training split, else None.

    The KL divergence of their character frequencies is compared with that of a sample of the
    training split as long as the validation split, in evenly spread blocks, from the rest of it.
    """
    train, val = corpus.split("train"), corpus.split("val")
    counts, vocab_size = corpus.token_counts("train"), corpus.tokenizer.vocab_size
    n_blocks = len(train) // SAMPLE_BLOCK
    n_sampled = min(n_blocks // 2, math.ceil(len(val) / SAMPLE_BLOCK))
    if not n_sampled:
        return None
    blocks = train[: n_blocks * SAMPLE_BLOCK].reshape(n_blocks, SAMPLE_BLOCK)
    sample = blocks[np.arange(n_sampled) * n_blocks // n_sampled].ravel()
    sampled = count_tokens(sample, vocab_size)
    by_chance = divergence_nats(sampled, counts - sampled)
    divergence = divergence_nats(corpus.token_counts("val"), counts)
    if divergence < max(MIN_DIVERGENCE, MIN_DIVERGENCE_RATIO * by_chance):
        return None
    return (
        "the validation split, the end of the text, differs from the training split: the KL "
        f"divergence of its character frequencies is {divergence:.3f} nats, {by_chance:.3f} by "
        "chance. Its loss measures that difference too; if the text is a list, shuffle its lines "
        "(shuf in.txt > out.txt)"
    )


def _lines(tokens: Tokens, newline: int) -> tuple[int, int]:
    """Return the number of lines and the longest one's length; `newline` is an id, -1 if absent."""
    lines = longest = 0
    start = 0  # of the current line
    for offset in range(0, tokens.size, CHUNK):
        ends = np.flatnonzero(tokens[offset : offset + CHUNK] == newline) + offset
        if ends.size:
            starts = np.concatenate(([start], ends[:-1] + 1))
            longest = max(longest, int((ends - starts).max()))
            lines += ends.size
            start = int(ends[-1]) + 1
    if start < tokens.size:
        lines += 1
        longest = max(longest, tokens.size - start)
    return lines, longest


def _warnings(corpus: Corpus, known: Counts, pairs: PairCounts, longest: int) -> list[str]:
    tokenizer = corpus.tokenizer
    warnings = warn_of_length(corpus)
    if tokenizer.vocab_size > MAX_VOCAB_SIZE:
        warnings.append(
            f"a vocabulary of {tokenizer.vocab_size:,} characters makes the model large and slow, "
            "and most of them are rare; set text.min_count to 5 or more"
        )
    once = int((known == 1).sum())
    if once > MAX_ONCE_FRACTION * tokenizer.vocab_size and once > 10:
        warnings.append(
            f"{once:,} of the {tokenizer.vocab_size:,} characters occur only once and cannot be "
            "learned; set text.min_count to 2 or more"
        )
    if longest > MAX_LINE:
        warnings.append(
            f"its longest line has {longest:,} characters; check that its line ends are \\n"
        )
    first, second = tokenizer.characters.find("\r"), tokenizer.characters.find("\n")
    returns = int(pairs.counts[(pairs.first == first) & (pairs.second == second)].sum())
    if returns:
        warnings.append(
            f"{returns:,} lines end in CR LF (Windows), which the model will reproduce; "
            "convert them to LF if that is unwanted"
        )
    warning = compare_splits(corpus)
    return warnings if warning is None else [*warnings, warning]
