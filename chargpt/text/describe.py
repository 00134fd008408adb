"""What a text is like, and what in it will hurt: the facts behind `chargpt data info`."""

from dataclasses import dataclass

import numpy as np

from chargpt.text.corpus import Corpus
from chargpt.text.statistics import (
    Counts,
    PairCounts,
    conditional_entropy_bits,
    count_pairs,
    count_tokens,
    entropy_bits,
)
from chargpt.text.tokenizer import Tokens

SHOWN = 10
LARGE_VOCABULARY = 5_000
FEW_CHARACTERS = 10_000
LONG_LINE = 1_000_000
RARE_SHARE = 0.2  # of the vocabulary, seen once
CHUNK = 1 << 20


@dataclass(frozen=True)
class Description:
    """The facts of a text.

    Attributes:
        characters, vocab_size, lines, longest_line: numbers; a line's length leaves out its end.
        most_frequent, least_frequent: (character, count), the most or least frequent first.
        unigram_bits: entropy of a character, in bits.
        bigram_bits: entropy of a character given the one before it, in bits.
        unknown_share: share of the characters that `min_count` turned into the unknown token.
        warnings: sentences about what will hurt, each with a remedy where there is one.
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
    unknown_share: float
    warnings: tuple[str, ...]


def describe(corpus: Corpus) -> Description:
    """Return the facts of a prepared text, all splits together."""
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
        most_frequent=tuple(ranked[:SHOWN]),
        least_frequent=tuple(ranked[: -SHOWN - 1 : -1]),
        lines=lines,
        longest_line=longest,
        unigram_bits=entropy_bits(counts),
        bigram_bits=conditional_entropy_bits(pairs),
        unknown_share=corpus.unknown_share,
        warnings=tuple(_warnings(corpus, known, pairs, longest)),
    )


def _lines(tokens: Tokens, newline: int) -> tuple[int, int]:
    """Return how many lines there are and how long the longest is; -1 means no line ends."""
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
    tokenizer, total = corpus.tokenizer, corpus.tokens.size
    found = []
    if total < FEW_CHARACTERS:
        found.append(
            f"{total:,} characters are almost no text: a model will learn it by heart; "
            f"give at least {FEW_CHARACTERS:,}, better a million"
        )
    if tokenizer.vocab_size > LARGE_VOCABULARY:
        found.append(
            f"a vocabulary of {tokenizer.vocab_size:,} makes the model large and slow, and most of "
            "it is hardly ever seen; set text.min_count to 5 or more"
        )
    once = int((known == 1).sum())
    if once > RARE_SHARE * tokenizer.vocab_size and once > 10:
        found.append(
            f"{once:,} of the {tokenizer.vocab_size:,} characters occur only once, and cannot be "
            "learnt; set text.min_count to 2 or more"
        )
    if longest > LONG_LINE:
        found.append(f"its longest line has {longest:,} characters; that is fine, if it is meant")
    returns = _pairs_of(corpus, pairs, "\r", "\n")
    if returns:
        found.append(
            f"{returns:,} lines end in CR LF (Windows), and the model will write them so; "
            "convert the text if that is not wanted"
        )
    return found


def _pairs_of(corpus: Corpus, pairs: PairCounts, first: str, second: str) -> int:
    characters = corpus.tokenizer.characters
    left, right = characters.find(first), characters.find(second)
    if min(left, right) < 0:
        return 0
    chosen = (pairs.first == left) & (pairs.second == right)
    return int(pairs.counts[chosen].sum())
