"""Statistics of a text, and warnings about it: the result of `chargpt data info`."""

import math
import re
from collections import Counter
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from chargpt.text.corpus import REQUIRED_SPLITS, Corpus, PairCounts, count_pairs, count_tokens
from chargpt.text.display import sign_or_code
from chargpt.text.tokenizer import CharTokenizer, Ints, Tokens

MAX_SHOWN = 10  # characters listed as the most or least frequent
MAX_VOCAB_SIZE = 5_000  # limits of the warnings
MIN_CHARACTERS = 10_000
# What looks like a list: many short or sorted lines, none of them empty
MIN_LIST, MAX_ITEM, MAX_MEAN_ITEM = 100, 500, 40  # lines; characters; characters
MIN_SORTED = 0.95  # fraction of neighbouring lines in order
SEPARATOR = re.compile(r"([%*=~+_.-])\1*")  # a line that may stand between items
MIN_SEPARATORS = 0.05  # fraction of the lines
MAX_ONCE_FRACTION = 0.2  # of the vocabulary, for characters that occur once
CHUNK = 1 << 20  # tokens
# nats between the character frequencies of the splits that change the loss noticeably
MIN_DIVERGENCE = 0.05
MIN_DIVERGENCE_RATIO = 5  # to that of a sample of the training split
MAX_DIFFERING = 3  # characters named as rarer, or as more frequent
SAMPLE_BLOCK = 64  # characters of that sample's blocks
MAX_SAMPLES = 8  # of documents
MAX_COMPARED = 20_000_000  # tokens of a text whose documents are compared
MIN_REPEATED = 0.05  # fraction of the validation documents
MIN_VALIDATION = 1000  # characters of the validation split


def describe(corpus: Corpus) -> dict[str, Any]:
    """Return the statistics of a text, all splits together, and warnings about it.

    `documents` is 0 if the text is no list of them. `longest_line` is in characters, without the
    line end. `most_frequent` and `least_frequent` are (character, count) in that order.
    `unigram_bits` is the entropy of a character, `bigram_bits` that given the previous one, in
    bits. `rare_fraction` is that of the characters that are not in the vocabulary. `warnings` are
    sentences about properties that impair training.
    """
    tokenizer, tokens = corpus.tokenizer, corpus.tokens
    counts = count_tokens(tokens, tokenizer.vocab_size)
    pairs = count_pairs(tokens, tokenizer.vocab_size)
    known = counts[: len(tokenizer.characters)]
    order = np.argsort(-known, kind="stable")
    ranked = [(tokenizer.characters[index], int(known[index])) for index in order]
    lines, longest_line = _measure_lines(tokenizer, tokens)
    return {
        "name": corpus.name,
        "characters": corpus.n_characters,
        "vocab_size": tokenizer.vocab_size,
        "most_frequent": ranked[:MAX_SHOWN],
        "least_frequent": ranked[: -MAX_SHOWN - 1 : -1],
        "documents": corpus.n_documents,
        "lines": lines,
        "longest_line": longest_line,
        "unigram_bits": entropy_bits(counts) / corpus.characters_per_token,
        "bigram_bits": conditional_entropy_bits(pairs) / corpus.characters_per_token,
        "vocabulary_summary": tokenizer.describe(),
        "rare_fraction": corpus.rare_fraction,
        "warnings": _warnings(corpus, known, pairs),
    }


def _measure_lines(tokenizer: CharTokenizer, tokens: Tokens) -> tuple[int, int]:
    """Return the number of lines, and the length of the longest in characters.

    The end of a document ends a line, unless it follows a line end.
    """
    newline, eos = map(tokenizer.characters.find, ("\n", tokenizer.eos_token or "\n"))
    n_lines = longest = length = 0  # length: of the line at the end of a chunk
    for offset in range(0, tokens.size, CHUNK):
        chunk = tokens[offset : offset + CHUNK]
        chunk = chunk[chunk < tokenizer.first_continuation_id]  # one token of each character
        edges = np.flatnonzero((chunk == newline) | (chunk == eos))
        lengths = np.diff(edges, prepend=-1 - length, append=chunk.size) - 1
        n_lines += int(((chunk[edges] == newline) | (lengths[:-1] > 0)).sum())
        longest, length = max(longest, int(lengths.max())), int(lengths[-1])
    return n_lines + (length > 0), longest


def _warnings(corpus: Corpus, known: Ints, pairs: PairCounts) -> list[str]:
    vocab_size, once = corpus.tokenizer.vocab_size, int((known == 1).sum())
    carriage_return, newline = map(corpus.tokenizer.characters.find, "\r\n")
    is_windows = (pairs.first == carriage_return) & (pairs.second == newline)
    n_returns = int(pairs.counts[is_windows].sum())
    found = quick_warnings(corpus)
    if vocab_size > MAX_VOCAB_SIZE and not corpus.tokenizer.has_bytes:
        found.append(
            f"a vocabulary of {vocab_size:,} characters makes the model large and slow, and most "
            "of them are rare; spell those as bytes with -s text.rare=bytes -s text.min_count=2"
        )
    if once > max(10, MAX_ONCE_FRACTION * vocab_size):
        found.append(
            f"{once:,} of the {len(known):,} characters occur only once and cannot be learned; "
            "set text.min_count to 2 or more"
        )
    if n_returns:
        found.append(
            f"{n_returns:,} lines end in CR LF (Windows), which the model will reproduce; "
            "convert them to LF if that is unwanted"
        )
    difference = compare_splits(corpus)
    return found if difference is None else [*found, difference.warning]


def quick_warnings(corpus: Corpus) -> list[str]:
    """Return the warnings about training on a text that are found at once."""
    return [*filter(None, (warn_of_length(corpus), warn_of_list(corpus), warn_of_repeats(corpus)))]


def warn_of_length(corpus: Corpus) -> str:
    """Return a warning if the text or its validation split is too short, else ""."""
    total, n_val = corpus.n_characters, corpus.count_characters("val")
    if total < MIN_CHARACTERS:
        return (
            f"{total:,} characters are too few: a model will memorise them; "
            f"give at least {MIN_CHARACTERS:,}, better a million"
        )
    if n_val < MIN_VALIDATION:
        correct = ", or correct text.documents" if corpus.n_documents else ""
        return (
            f"the validation split has {n_val:,} characters, too few to measure a loss; "
            f"give a longer text, or set text.val_fraction higher{correct}"
        )
    return ""


def warn_of_list(corpus: Corpus) -> str:
    """Return advice on `text.documents` if the start of a text looks like a list, else ""."""
    if corpus.n_documents:
        return ""
    lines = corpus.tokenizer.decode(corpus.tokens[:CHUNK]).replace("\r", "").split("\n")[:-1]
    separators = Counter(filter(SEPARATOR.fullmatch, lines))
    for line, count in separators.most_common(1):
        if count >= MIN_SEPARATORS * max(MIN_LIST, len(lines)):
            return (
                f"{count:,} lines are {line}; if they separate items, -s "
                f"text.documents='\\n{line}\\n' shuffles those, and each sample is one item"
            )
    items = [line.casefold() for line in lines]
    n_sorted = sum(first <= second for first, second in pairwise(items))
    lengths = [len(item) for item in items]
    if len(items) < MIN_LIST or 0 in lengths or max(lengths) > MAX_ITEM:
        return ""
    if fmean(lengths) > MAX_MEAN_ITEM and n_sorted < MIN_SORTED * len(items):
        return ""
    return (
        "the text looks like a list of items; with -s text.documents=lines they are shuffled, and "
        "each sample is one item (the loss of shuffled items is not comparable with that of a "
        "sorted list, in which neighbours are alike)"
    )


def warn_of_repeats(corpus: Corpus) -> str:
    """Return a warning if many validation documents also occur in the training split, else ""."""
    tokenizer = corpus.tokenizer
    if not corpus.n_documents or corpus.tokens.size > MAX_COMPARED:
        return ""
    train, val = (
        tokenizer.decode(corpus.split(split)).split(tokenizer.eos_token)[:-1]
        for split in REQUIRED_SPLITS
    )
    known = set(train)
    repeated = sum(document in known for document in val)
    if repeated < max(1, MIN_REPEATED * len(val)):
        return ""
    return (
        f"{repeated:,} of {len(val):,} documents of the validation split, "
        f"{repeated / len(val):.0%}, occur in the training split too, so its loss is lower than "
        "that of new documents; drop the repeated ones (those of lines: sort -u)"
    )


class SplitDifference(NamedTuple):
    """How the validation split differs from the training split."""

    divergence: float  # KL divergence of the token frequencies, in nats
    warning: str


def compare_splits(corpus: Corpus) -> SplitDifference | None:
    """Return how the validation split differs from the training split, None if it hardly does.

    The KL divergence of their character frequencies is compared with that of a sample of the
    training split as long as the validation split from the rest of it. The sample is in evenly
    spread blocks; of documents, which are shuffled, each of a few parts is one, and their mean
    counts. A mixture split counts as part of the training split.
    """
    val, vocab_size = corpus.split("val"), corpus.tokenizer.vocab_size
    train = corpus.tokens[: len(corpus.split("mixture")) + len(corpus.split("train"))]
    counts = count_tokens(train, vocab_size)
    n_blocks = len(train) // SAMPLE_BLOCK
    n_sampled = min(n_blocks // 2, math.ceil(len(val) / SAMPLE_BLOCK))
    if not n_sampled:
        return None
    blocks = train[: n_blocks * SAMPLE_BLOCK].reshape(n_blocks, SAMPLE_BLOCK)
    samples = [blocks[np.arange(n_sampled) * n_blocks // n_sampled]]
    if corpus.n_documents:
        n_samples = min(MAX_SAMPLES, n_blocks // n_sampled)
        samples = np.split(blocks[: n_samples * n_sampled], n_samples)
    sampled = [count_tokens(sample.ravel(), vocab_size) for sample in samples]
    by_chance = fmean(divergence_nats(each, counts - each) for each in sampled)
    val_counts = corpus.token_counts("val")
    divergence = divergence_nats(val_counts, counts)
    if divergence < max(MIN_DIVERGENCE, MIN_DIVERGENCE_RATIO * by_chance):
        return None
    what, unit = "the end of the text", "token" if corpus.tokenizer.has_bytes else "character"
    remedy = "if the text lists items, text.documents=lines, =files or =SEPARATOR shuffles them"
    if corpus.n_documents:
        n_val = int((val == corpus.tokenizer.eos_token_id).sum())
        what = f"the last {n_val:,} of {corpus.n_documents:,} documents"
        remedy = "give more documents, a higher text.val_fraction or another text.seed"
    return SplitDifference(
        divergence,
        f"the validation split, {what}, differs from the training split: the KL divergence of its "
        f"{unit} frequencies is {divergence:.3f} nats, {by_chance:.3f} by chance "
        f"({_name_differing(corpus.tokenizer, val_counts, counts)}). Its loss measures that "
        f"difference too; {remedy}",
    )


def _name_differing(tokenizer: CharTokenizer, counts: Ints, reference: Ints) -> str:
    """Name the tokens with the largest terms of the symmetric KL divergence of two counts, (V,)."""
    probs, reference_probs = (each / each.sum() for each in (counts + 1, reference + 1))
    gains = probs - reference_probs
    ranked = np.argsort(-gains * np.log(probs / reference_probs), kind="stable")
    rarer, commoner = (
        " ".join(sign_or_code(tokenizer.token_text(token)) for token in tokens[:MAX_DIFFERING])
        for tokens in (ranked[gains[ranked] < 0], ranked[gains[ranked] > 0])
    )
    return f"rarer there: {rarer}; more frequent there: {commoner}"


def divergence_nats(counts: Ints, reference: Ints) -> float:
    """Return the KL divergence in nats of frequencies from others, which are smoothed by 1."""
    probs, reference_probs = counts / counts.sum(), (reference + 1) / (reference + 1).sum()
    present = probs > 0
    return float((probs * np.log(probs / reference_probs, where=present, out=0 * probs)).sum())


def entropy_bits(counts: npt.NDArray[Any]) -> float:
    """Return the entropy in bits of the distribution with these counts (0 for no counts)."""
    present = counts[counts > 0].astype(np.float64)
    probs = present / present.sum()
    return float(-(probs * np.log2(probs)).sum()) + 0.0  # no negative zero


def conditional_entropy_bits(pairs: PairCounts) -> float:
    """Return the entropy in bits of a token given the previous one."""
    first = np.bincount(pairs.first, weights=pairs.counts, minlength=1)
    return max(0.0, entropy_bits(pairs.counts) - entropy_bits(first))
