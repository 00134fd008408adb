"""Statistics of a text, and warnings about it: the result of `chargpt data info`."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np

from chargpt.log import logger
from chargpt.text.corpus import REQUIRED_SPLITS, Corpus
from chargpt.text.display import sign_or_code
from chargpt.text.statistics import (
    PairCounts,
    conditional_entropy_bits,
    count_pairs,
    count_tokens,
    divergence_nats,
    entropy_bits,
)
from chargpt.text.tokenizer import CharTokenizer, Ints, Tokens

MAX_SHOWN = 10  # characters listed as the most or least frequent
MAX_VOCAB_SIZE = 5_000  # limits of the warnings
MIN_CHARACTERS = 10_000
MAX_LINE = 1_000_000  # characters
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


@dataclass(frozen=True)
class Description:
    """Statistics of a text.

    Attributes:
        documents: their number; 0 if the text is no list of them.
        longest_line: its number of characters, without the line end.
        most_frequent, least_frequent: (character, count), the most or least frequent first.
        unigram_bits: entropy of a character, in bits.
        bigram_bits: entropy of a character given the previous one, in bits.
        vocabulary_summary: number of characters in it, and of byte tokens, as a phrase.
        rare_fraction: fraction of the characters that are not in the vocabulary.
        warnings: sentences about properties that impair training.
    """

    name: str
    characters: int
    vocab_size: int
    most_frequent: tuple[tuple[str, int], ...]
    least_frequent: tuple[tuple[str, int], ...]
    documents: int
    lines: int
    longest_line: int
    unigram_bits: float
    bigram_bits: float
    vocabulary_summary: str
    rare_fraction: float
    warnings: tuple[str, ...]


def describe(corpus: Corpus) -> Description:
    """Return the statistics of a text, all splits together."""
    tokenizer, tokens = corpus.tokenizer, corpus.tokens
    counts = count_tokens(tokens, tokenizer.vocab_size)
    pairs = count_pairs(tokens, tokenizer.vocab_size)
    known = counts[: len(tokenizer.characters)]
    order = np.argsort(-known, kind="stable")
    ranked = [(tokenizer.characters[index], int(known[index])) for index in order]
    lines, longest = _lines(tokenizer, tokens)
    return Description(
        name=corpus.name,
        characters=corpus.n_characters,
        vocab_size=tokenizer.vocab_size,
        most_frequent=tuple(ranked[:MAX_SHOWN]),
        least_frequent=tuple(ranked[: -MAX_SHOWN - 1 : -1]),
        documents=corpus.n_documents,
        lines=lines,
        longest_line=longest,
        unigram_bits=entropy_bits(counts) / corpus.characters_per_token,
        bigram_bits=conditional_entropy_bits(pairs) / corpus.characters_per_token,
        vocabulary_summary=tokenizer.describe(),
        rare_fraction=corpus.rare_fraction,
        warnings=tuple(_warnings(corpus, known, pairs, lines, longest)),
    )


def log_warnings(corpus: Corpus) -> None:
    """Log what impairs training on a text, as far as that is found at once."""
    for warning in _quick_warnings(corpus):
        logger.warning(warning)


def _quick_warnings(corpus: Corpus) -> list[str]:
    too_short = warn_of_length(corpus) or warn_of_validation(corpus)
    return [*too_short, *warn_of_list(corpus), *warn_of_repeats(corpus)]


def warn_of_length(corpus: Corpus) -> list[str]:
    """Return a warning if the text is too short to train on, else nothing."""
    total = corpus.n_characters
    if total >= MIN_CHARACTERS:
        return []
    return [
        f"{total:,} characters are too few: a model will memorise them; "
        f"give at least {MIN_CHARACTERS:,}, better a million"
    ]


def warn_of_validation(corpus: Corpus) -> list[str]:
    """Return a warning if the validation split is too short to measure a loss, else nothing."""
    n_characters = corpus.count_characters("val")
    if n_characters >= MIN_VALIDATION:
        return []
    documents = ""
    if corpus.n_documents:
        documents = f" (the text is {corpus.n_documents:,} documents: is text.documents right?)"
    return [
        f"the validation split has {n_characters:,} characters, too few to measure a loss"
        f"{documents}; give a longer text, or set text.val_fraction higher"
    ]


def warn_of_list(corpus: Corpus) -> list[str]:
    """Return advice on `text.documents`, if the start of a text looks like a list of items."""
    if corpus.n_documents:
        return []
    lines = corpus.tokenizer.decode(corpus.tokens[:CHUNK]).replace("\r", "").split("\n")
    separators = Counter(line for line in lines if SEPARATOR.fullmatch(line))
    for line, count in separators.most_common(1):
        if count >= MIN_SEPARATORS * max(MIN_LIST, len(lines)):
            return [
                f"{count:,} lines are {line}; if they separate items, -s "
                f"text.documents='\\n{line}\\n' shuffles those, and each sample is one item"
            ]
    items = lines if lines[-1] else lines[:-1]
    lengths = [len(item) for item in items]
    if len(items) < MIN_LIST or 0 in lengths or max(lengths) > MAX_ITEM:
        return []
    if sum(lengths) > MAX_MEAN_ITEM * len(items) and not _is_sorted(items):
        return []
    return [
        "the text looks like a list of items; with -s text.documents=lines they are shuffled, and "
        "each sample is one item (the loss of shuffled items is not comparable with that of a "
        "sorted list, in which neighbours are alike)"
    ]


def _is_sorted(items: list[str]) -> bool:
    """Return whether nearly all items are in order, with or without regard to case."""
    return any(
        sum(first <= second for first, second in pairwise(ordered)) >= MIN_SORTED * len(items)
        for ordered in (items, [item.casefold() for item in items])
    )


def warn_of_repeats(corpus: Corpus) -> list[str]:
    """Return a warning if many validation documents also occur in the training split."""
    tokenizer = corpus.tokenizer
    if not corpus.n_documents or corpus.tokens.size > MAX_COMPARED:
        return []
    train, val = (
        tokenizer.decode(corpus.split(split)).split(tokenizer.eos_token)[:-1]
        for split in REQUIRED_SPLITS
    )
    known = set(train)
    repeated = sum(document in known for document in val)
    if repeated < MIN_REPEATED * len(val):
        return []
    return [
        f"{repeated:,} of {len(val):,} documents of the validation split, "
        f"{repeated / len(val):.0%}, occur in the training split too, so its loss is lower than "
        "that of new documents; drop the repeated ones (those of lines: sort -u)"
    ]


@dataclass(frozen=True)
class SplitDifference:
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
    remedy = (
        "if the text is a list of items, text.documents=lines, =files or =SEPARATOR shuffles it"
    )
    start = corpus.tokenizer.decode(corpus.tokens[:CHUNK])
    if start.count("\n\n") >= MIN_SEPARATORS * max(MIN_LIST, start.count("\n")):
        remedy = "-s text.documents='\\n\\n' shuffles its paragraphs"
    if is_several_files(corpus.name):
        remedy = "-s text.documents=files shuffles the files"
    if corpus.n_documents:
        n_val = int((val == corpus.tokenizer.eos_token_id).sum())
        what = f"the last {n_val:,} of {corpus.n_documents:,} documents"
        remedy = "give more documents, a higher text.val_fraction or another text.seed"
    return SplitDifference(
        divergence,
        f"the validation split, {what}, differs from the training split: the KL "
        f"divergence of its {unit} frequencies is {divergence:.3f} nats, {by_chance:.3f} by "
        f"chance ({_name_differing(corpus.tokenizer, val_counts, counts)}). Its loss measures that "
        f"difference too; {remedy}",
    )


def is_several_files(name: str) -> bool:
    """Return whether the name of a text is that of a folder or a glob."""
    return name.endswith("/") or "*" in name


def _name_differing(tokenizer: CharTokenizer, counts: Ints, reference: Ints) -> str:
    """Name the tokens whose frequencies differ most from others, (V,) each, in a phrase.

    They are those with the largest terms of the symmetric KL divergence: a token that is missing
    has no term in the other one.
    """
    probs, reference_probs = (each / each.sum() for each in (counts + 1, reference + 1))
    gains = probs - reference_probs
    ranked = np.argsort(-gains * np.log(probs / reference_probs), kind="stable")
    parts = []
    for name, tokens in (
        ("rarer", ranked[gains[ranked] < 0]),
        ("more frequent", ranked[gains[ranked] > 0]),
    ):
        signs = [
            sign_or_code(tokenizer.token_text(token)) for token in tokens[:MAX_DIFFERING].tolist()
        ]
        parts.append(f"{name} there: {' '.join(signs)}")
    return "; ".join(parts)


def _lines(tokenizer: CharTokenizer, tokens: Tokens) -> tuple[int, int]:
    """Return the number of lines and the longest one's length in characters."""
    newline = tokenizer.characters.find("\n")
    eos_token_id = tokenizer.eos_token_id if tokenizer.eos_token not in ("", "\n") else -1
    lines = longest = length = 0  # length: of the current line
    has_ended = True  # whether the text before the chunk is empty or ends with a line end
    for offset in range(0, tokens.size, CHUNK):
        chunk = tokens[offset : offset + CHUNK]
        chunk = chunk[chunk < tokenizer.first_continuation_id]  # one token of each character
        is_newline, is_eos = chunk == newline, chunk == eos_token_id
        ends = np.flatnonzero(is_newline | is_eos)
        if not ends.size:
            length += chunk.size
            has_ended = False
            continue
        longest = max(longest, int(np.diff(ends, prepend=-1 - length).max()) - 1)
        follows_end = np.append(has_ended, is_newline[:-1])  # then an EOS token ends no line
        lines += int(is_newline.sum() + (is_eos & ~follows_end).sum())
        has_ended = bool(is_newline[-1])
        length = chunk.size - int(ends[-1]) - 1
    return lines + bool(length), max(longest, length)


def _warnings(
    corpus: Corpus, known: Ints, pairs: PairCounts, lines: int, longest: int
) -> list[str]:
    tokenizer = corpus.tokenizer
    warnings = warn_of_length(corpus) or warn_of_validation(corpus)
    if tokenizer.vocab_size > MAX_VOCAB_SIZE and not tokenizer.has_bytes:
        warnings.append(
            f"a vocabulary of {tokenizer.vocab_size:,} characters makes the model large and slow, "
            "and most of them are rare; spell those as bytes with -s text.rare=bytes "
            "-s text.min_count=2"
        )
    once = int((known == 1).sum())
    if once > MAX_ONCE_FRACTION * tokenizer.vocab_size and once > 10:
        warnings.append(
            f"{once:,} of the {len(tokenizer.characters):,} characters occur only once and cannot "
            "be learned; set text.min_count to 2 or more"
        )
    if longest > MAX_LINE:
        warnings.append(
            f"its longest line has {longest:,} characters; check that its line ends are \\n"
        )
    carriage_return, newline = map(tokenizer.characters.find, "\r\n")
    ends_line = (pairs.first == carriage_return) & (pairs.second == newline)
    if returns := int(pairs.counts[ends_line].sum()):
        warnings.append(
            f"{returns:,} lines end in CR LF (Windows), which the model will reproduce; "
            "convert them to LF if that is unwanted"
        )
    warnings += [*warn_of_list(corpus), *warn_of_repeats(corpus)]
    difference = compare_splits(corpus)
    return warnings if difference is None else [*warnings, difference.warning]
