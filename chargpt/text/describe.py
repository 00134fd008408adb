"""Statistics of a text, and warnings about it: the result of `chargpt data info`."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple
from unicodedata import category, east_asian_width

import numpy as np
import numpy.typing as npt

from chargpt.config import unescape
from chargpt.files import quoted
from chargpt.log import logger
from chargpt.text.corpus import Corpus, PairCounts, count_pairs, count_tokens
from chargpt.text.display import sign_or_code
from chargpt.text.tokenizer import CharTokenizer, Ints, Tokens, codes_to_text

MAX_SHOWN = 10  # characters listed as the most or least frequent
MAX_VOCAB_SIZE = 5_000  # limits of the warnings
MIN_CHARACTERS = 10_000
# What looks like a list: many short or sorted lines, none of them empty
MIN_LIST, MAX_ITEM, MAX_MEAN_ITEM = 100, 500, 40  # lines; characters; characters
MIN_SORTED = 0.95  # fraction of neighbouring lines in order
# What is surely one: names and words rather than verse, code, numbers or records
MAX_MEAN_WORDS, MIN_DISTINCT, MIN_LETTERS, MAX_PUNCTUATED = 2, 0.8, 0.9, 0.02
GPT2_EOS = "<|endoftext|>"  # of GPT-2, which published texts of stories have between them
SEPARATOR = re.compile(rf"([%*=~+_.-])( ?\1)*|{re.escape(GPT2_EOS)}")  # a line between items
MIN_SEPARATORS = 0.05  # fraction of the lines
MIN_VARIED = 0.1  # fraction of the lines of a list that are distinct
# How a line of a conversation or log begins: a date or a time
TIMED = re.compile(r"\W{0,2}(\d{1,4}([./-])\d\d?\2\d{1,4}\b|\d\d?:\d\d\b)")
MIN_ALIKE = 0.9  # fraction of the paragraphs that begin with the same mark, such as `X:`
MAX_INDENTED = 0.1  # fraction of the lines of a list
MAX_ONCE_FRACTION = 0.2  # of the vocabulary, for characters that occur once
SPELL_RARE = "-s text.rare=bytes -s text.min_count=2"
CHUNK = 1 << 20  # tokens
JOINERS = "\u200c\u200d"  # part of the spelling in many scripts
BLANKS = " \t"
NEWLINES = {"LF": "\n", "CR": "\r", "U+2028": "\u2028", "U+2029": "\u2029"}
# nats between the character frequencies of the splits that change the loss noticeably
MIN_DIVERGENCE = 0.05
MIN_DIVERGENCE_RATIO = 5  # to that of a sample of the training split
MAX_DIFFERING = 3  # characters named as rarer, or as more frequent
SAMPLE_BLOCK = 64  # characters of that sample's blocks
MAX_SAMPLES = 8  # of documents
MAX_COMPARED = 20_000_000  # tokens of a text whose documents are compared
MAX_SEARCHED = 1_000_000_000  # tokens in which passages are searched, the last ones: a second
MIN_REPEATED = 0.05  # fraction of documents or passages
MANY_REPEATED = 0.25  # of passages: the documentation of a language repeats a fifth by itself
PASSAGE = 64  # tokens: what texts have in common by chance is shorter
# Bits of a line if all tokens were as likely, as of 16 English letters: shorter ones recur by
# chance. What occurs more often than MAX_COPIES, as in logs and tables, recurs by nature.
MIN_LINE_BITS, MAX_COPIES = 96, 3
N_PASSAGES = 256
# Passages in which so large a fraction of the tokens equals the one so many tokens before, as in
# blanks and repeated phrases, occur in many texts
MAX_PERIOD, MAX_PERIODIC = 16, 0.75
HASH_BITS = 20  # by which most passages of the training split are skipped
MULTIPLIER = 0x9E3779B97F4A7C15  # odd: of the hash of a passage, a polynomial modulo 2^64
MIN_VALIDATION = 1000  # characters of the validation split


def describe(corpus: Corpus) -> dict[str, Any]:
    """Return the statistics of a text, all splits together, and warnings about it.

    `documents` is 0 if the text is no list of them. `longest_line` is in characters, without the
    line end. `most_frequent` and `least_frequent` are (character, count) in that order.
    `unigram_bits` is the entropy of a token, `bigram_bits` that given the previous one, in bits per
    character. `rare_fraction` is that of the characters that are not in the vocabulary. `warnings`
    are sentences about properties that impair training.
    """
    tokenizer, tokens = corpus.tokenizer, corpus.tokens
    counts = count_tokens(tokens, tokenizer.vocab_size)
    pairs = count_pairs(tokens, tokenizer.vocab_size)
    known = counts[: len(tokenizer.characters)]
    order = np.argsort(-known, kind="stable")
    ranked = [(tokenizer.characters[index], int(known[index])) for index in order]
    line_ends = count_line_ends(corpus)
    return {
        "name": corpus.name,
        "characters": corpus.n_characters,
        "vocab_size": tokenizer.vocab_size,
        "most_frequent": ranked[:MAX_SHOWN],
        "least_frequent": ranked[: -MAX_SHOWN - 1 : -1],
        "documents": corpus.n_documents,
        **_measure_lines(tokenizer, tokens, line_ends),
        "line_ends": line_ends,
        "unigram_bits": entropy_bits(counts) / corpus.characters_per_token,
        "bigram_bits": conditional_entropy_bits(pairs) / corpus.characters_per_token,
        "vocabulary_summary": tokenizer.describe(),
        "rare_fraction": corpus.rare_fraction,
        "warnings": _warnings(corpus, known),
    }


def _measure_lines(
    tokenizer: CharTokenizer, tokens: Tokens, line_ends: Mapping[str, int]
) -> dict[str, int]:
    """Return the number of lines, and the length of the longest in characters.

    The end of a document ends a line, unless it follows a line end.
    """
    ends = [tokenizer.characters.find(each) for each in NEWLINES.values()]
    eos = tokenizer.characters.find(tokenizer.eos_token or "\n")
    n_lines = longest = length = 0  # length: of the line at the end of a chunk
    for offset in range(0, tokens.size, CHUNK):
        chunk = tokens[offset : offset + CHUNK]
        chunk = chunk[chunk < tokenizer.first_continuation_id]  # one token of each character
        edges = np.flatnonzero(np.isin(chunk, [*ends, eos]))
        lengths = np.diff(edges, prepend=-1 - length, append=chunk.size) - 1
        n_lines += int((np.isin(chunk[edges], ends) | (lengths[:-1] > 0)).sum())
        longest, length = max(longest, int(lengths.max())), int(lengths[-1])
    n_lines -= line_ends.get("CR LF", 0)  # which are two characters each
    return {"lines": n_lines + (length > 0), "longest_line": longest}


def count_line_ends(corpus: Corpus) -> dict[str, int]:
    """Return how many line ends of each kind a text has, of those that it has."""
    counts = Counter[str]()
    ids = {name: corpus.tokenizer.characters.find(end) for name, end in NEWLINES.items()}
    for start in range(0, corpus.tokens.size, CHUNK):
        chunk = corpus.tokens[start : start + CHUNK + 1]  # one more, for CR LF
        found = {name: chunk == token for name, token in ids.items()}
        n_pairs = int((found["CR"][:-1] & found["LF"][1:]).sum())
        counts.update({name: int(each[:CHUNK].sum()) for name, each in found.items()})
        counts.update({"CR LF": n_pairs, "CR": -n_pairs, "LF": -n_pairs})
    return dict(+counts)


def _warnings(corpus: Corpus, known: Ints) -> list[str]:
    vocab_size, once = corpus.tokenizer.vocab_size, int((known == 1).sum())
    n_bytes = len(replace(corpus.tokenizer, has_unknown=False, has_bytes=True).bytes_)
    found = quick_warnings(corpus, MIN_REPEATED)
    if vocab_size > MAX_VOCAB_SIZE and not corpus.tokenizer.has_bytes:
        found.append(
            f"a vocabulary of {vocab_size:,} characters makes the model large and slow, and most "
            f"of them are rare; spell those as bytes with {SPELL_RARE}"
        )
    if once > max(n_bytes, MAX_ONCE_FRACTION * vocab_size):  # else the vocabulary would grow
        found.append(
            f"{once:,} of the {len(known):,} characters occur only once and cannot be learned; "
            f"{SPELL_RARE} spells them as bytes, so that any prompt can be encoded"
        )
    counts = zip(corpus.tokenizer.characters, known.tolist(), strict=True)
    if invisible := [
        f"{count:,} U+{ord(character):04X}"
        for character, count in counts
        if category(character) == "Cf" and character not in JOINERS
    ]:
        listed = ", ".join(invisible[:MAX_SHOWN])
        found.append(f"invisible characters, which the model will reproduce: {listed}")
    difference = compare_splits(corpus)
    return found if difference is None else [*found, difference.warning]


def quick_warnings(corpus: Corpus, min_repeated: float = MANY_REPEATED) -> list[str]:
    """Return the warnings about training on a text that are found at once."""
    warnings = [warning(corpus) for warning in (warn_of_length, warn_of_list, warn_of_newlines)]
    return [*filter(None, (*warnings, warn_of_repeats(corpus, min_repeated)))]


def warn_of_length(corpus: Corpus) -> str:
    """Return a warning if the text or its validation split is too short, else ""."""
    total, n_val = corpus.n_characters, corpus.count_characters("val")
    if total < MIN_CHARACTERS:
        return (
            f"{total:,} characters are too few: a model will memorise them; "
            f"give at least {MIN_CHARACTERS:,}, better a million"
        )
    if n_val < MIN_VALIDATION and not corpus.unused_separator:
        remedy = "give a longer text, or set text.val_fraction higher"
        if corpus.n_documents:
            remedy += ", or correct text.documents"
        if origin := corpus.origin("val"):
            remedy = f"give more than{origin}"
        return f"the validation split has {n_val:,} characters, too few to measure a loss; {remedy}"
    return ""


class ListGuess(NamedTuple):
    """What makes a text look like a list of items."""

    documents: str  # its separator, as it is typed, or `lines`
    is_sure: bool
    reason: str

    @property
    def setting(self) -> str:
        """The option that makes the items documents."""
        return f"-s text.documents={quoted(self.documents)}"


def guess_list(text: str) -> ListGuess | None:
    """Return how the start of a text looks like a list of items, None if it does not.

    It is sure of separators that nothing else uses, and of lines that are names, words or sorted
    titles: distinct, of letters, and unlike verse without punctuation at their ends.
    """
    lines = re.split("\r\n|[\n\r\u2028\u2029]", text)
    lines = lines if lines[-1] else lines[:-1]
    for line, count in Counter(filter(SEPARATOR.fullmatch, lines)).most_common(1):
        if count >= MIN_SEPARATORS * max(MIN_LIST, len(lines)):
            n_apart = "\n".join(lines).count(f"\n\n{line}\n\n")
            newlines = r"\n\n" if 2 * n_apart > count else r"\n"
            reason = f"{count:,} lines are {line}, which may separate items"
            return ListGuess(f"{newlines}{line}{newlines}", line in ("%", GPT2_EOS), reason)
    blocks = [block for block in re.split("\n{2,}", "\n".join(lines)) if block]
    begins = ("a number" if re.match(r"\d+\n", block) else block[:2] for block in blocks)
    for begin, count in Counter(begins).most_common(1):
        is_mark = begin == "a number" or (not begin[0].isspace() and category(begin[-1])[0] in "PS")
        if is_mark and count >= max(MIN_LIST, MIN_ALIKE * len(blocks)):
            reason = f"{count:,} paragraphs begin with {begin} and may be items"
            return ListGuess(r"\n\n", False, reason)
    items = [line.casefold() for line in lines]
    lengths = [len(item) for item in items]
    if len(items) < MIN_LIST or 0 in lengths or max(lengths) > MAX_ITEM:
        return None
    if sum(item[0].isspace() for item in items) > MAX_INDENTED * len(items):  # as of JSON
        return None
    n_sorted = sum(first <= second for first, second in pairwise(items))
    is_sorted = n_sorted >= MIN_SORTED * len(items)
    if fmean(lengths) > MAX_MEAN_ITEM and not is_sorted:
        return None
    joined = "".join(items)
    n_letters = sum(category(each)[0] in "LM" or each in " '’-" for each in joined)
    # two wide characters are a word
    n_words = [
        max(len(item.split()), sum(east_asian_width(each) in "WF" for each in item) / 2)
        for item in items
    ]
    n_punctuated = sum(category(item[-1])[0] == "P" for item in items)
    n_distinct = len(set(items))
    is_sure = (
        n_distinct >= MIN_DISTINCT * len(items)
        and n_letters >= MIN_LETTERS * len(joined)
        and n_punctuated <= MAX_PUNCTUATED * len(items)
        and (is_sorted or fmean(n_words) <= MAX_MEAN_WORDS)
    )
    # messages of several lines have other line ends inside than between them
    has_mixed_ends = "\r\n" in text and re.search(r"(?<!\r)\n", text)
    is_timed = 2 * len([*filter(TIMED.match, items)]) > len(items)
    if not is_sure and (has_mixed_ends or is_timed or n_distinct < MIN_VARIED * len(items)):
        return None
    return ListGuess("lines", is_sure, "the text looks like a list of items, one a line")


def sure_documents(text: str) -> str | None:
    """Return the `text.documents` of a text by its start, which is logged; None unless it is sure.

    Its lines or what separates its items are then those of a list without a doubt.
    """
    guess = guess_list(text)
    if guess is None or not guess.is_sure:
        return None
    logger.info(
        f"{guess.reason}; they are shuffled, and each sample is one item, as with {guess.setting} "
        "(text.documents=null: one text in its order)"
    )
    return unescape(guess.documents)


def warn_of_list(corpus: Corpus) -> str:
    """Return advice on `text.documents` if a text may be a list, else ""."""
    text, eos_token = corpus.tokenizer.decode(corpus.tokens[:CHUNK]), corpus.tokenizer.eos_token
    if eos_token:
        separator = corpus.settings.documents or ""
        is_alone = 2 * text.count(f"\n{eos_token}\n") > text.count(eos_token)
        unused = corpus.unused_separator
        if unused or not is_alone or separator in ("lines", "files") or "\n" in separator:
            return unused
        setting = quoted(rf"\n{separator}\n")
        return (
            f"{separator} stands alone on its lines, so that documents begin and end with line "
            f"ends; -s text.documents={setting} leaves these out"
        )
    guess = guess_list(text)
    if guess is None or guess.is_sure:  # null was then chosen
        return ""
    return (
        f"{guess.reason}; if so, {guess.setting} shuffles the items, and each sample is one (the "
        "loss of shuffled items is not comparable with that of a sorted list, in which neighbours "
        "are alike)"
    )


def warn_of_newlines(corpus: Corpus) -> str:
    """Return a warning if a text has line ends other than LF, else ""."""
    if not any(end in corpus.tokenizer.characters for end in NEWLINES.values() if end != "\n"):
        return ""
    found = count_line_ends(corpus)
    kinds = ", ".join(f"{count:,} {name}" for name, count in found.items())
    return (
        f"line ends: {kinds}, which the model will reproduce; -s text.newlines=lf makes them all LF"
    )


class Repeats(NamedTuple):
    """How many documents or passages of a text occur in the training split.

    `unit` is what they are, and `number` that of all.
    """

    repeated: int
    number: int
    unit: str

    @property
    def fraction(self) -> float:
        """Fraction that occurs there."""
        return self.repeated / max(1, self.number)

    def __str__(self) -> str:
        if self.unit == "documents":
            return f"{self.repeated:,} of {self.number:,} documents ({self.fraction:.0%})"
        return f"about {self.fraction:.0%} of the {self.unit}"


def warn_of_repeats(corpus: Corpus, min_fraction: float = MANY_REPEATED) -> str:
    """Return a warning if much of the validation split occurs in the training split, else ""."""
    found = find_repeats(corpus, corpus.split("val"))
    if found.fraction < (MIN_REPEATED if found.unit == "documents" else min_fraction):
        return ""
    warning = (
        f"{found} of the validation split occur in the training split too, so its loss is lower "
        "than that of a text without these"
    )
    if found.unit == "documents":
        by = " (sort -u)" if corpus.settings.documents == "lines" else ""
        warning += f"; drop the repeated ones{by}"
    return warning


def find_repeats(corpus: Corpus, tokens: Tokens) -> Repeats:
    """Return how much of a text occurs in the training split.

    That is the fraction of whole documents, if it is notable; else that of evenly spread passages
    or, where it is higher, of whole lines, which are shorter and may be shuffled.

    Args:
        tokens: of the text, by the corpus's tokenizer, (tokens,).
    """
    tokenizer, found = corpus.tokenizer, []
    unit = "tokens" if tokenizer.has_bytes else "characters"
    if len(corpus.split("train")) + len(tokens) <= MAX_COMPARED:
        if eos_token := tokenizer.eos_token:
            documents, counts = _count_parts(corpus, tokens, eos_token)
            n_known = sum(document in counts for document in documents)
            repeats = Repeats(n_known, len(documents), "documents")
            if repeats.fraction >= MIN_REPEATED:
                return repeats
        if corpus.settings.documents != "lines":
            lines, counts = _count_parts(corpus, tokens, eos_token + "".join(NEWLINES.values()))
            least = math.ceil(MIN_LINE_BITS / math.log2(max(2, tokenizer.vocab_size)))
            copied = [
                line for line in lines if len(line) >= least and 0 < counts[line] <= MAX_COPIES
            ]
            unit_of_lines = f"{unit}, in whole lines of {least} or more,"
            found.append(Repeats(sum(map(len, copied)), sum(map(len, lines)), unit_of_lines))
    found.append(Repeats(*_repeated_passages(corpus, tokens), f"passages of {PASSAGE} {unit}"))
    return max(found, key=lambda each: each.fraction)


def _count_parts(corpus: Corpus, tokens: Tokens, ends: str) -> tuple[list[str], Counter[str]]:
    """Return the parts of a text between some characters, and their counts in the training split.

    They are strings of ids as code points, without blanks at their ends: nothing is decoded.
    """
    characters, unused = corpus.tokenizer.characters, corpus.tokenizer.vocab_size
    end, *others = [chr(i) for i in map(characters.find, ends) if i >= 0] or [chr(unused)]
    blanks = "".join(chr(i) for i in map(characters.find, BLANKS) if i >= 0)

    def split(text: str) -> list[str]:
        for other in others:
            text = text.replace(other, end)
        return [part.strip(blanks) for part in text.split(end)]

    parts = [part for part in split(codes_to_text(tokens)) if part]
    wanted, counts, rest, train = set(parts), Counter[str](), "", corpus.split("train")
    for start in range(0, len(train), CHUNK):
        *known, rest = split(rest + codes_to_text(train[start : start + CHUNK]))
        counts.update(filter(wanted.__contains__, known))
    return parts, counts


def _fold_blanks(tokens: Tokens, corpus: Corpus) -> Tokens:
    """Return tokens with one space for line ends, tabs and runs of spaces, as in a wrapped copy."""
    characters = corpus.tokenizer.characters
    if " " not in characters:
        return tokens
    space, table = characters.index(" "), np.arange(corpus.tokenizer.vocab_size, dtype=tokens.dtype)
    blanks = (each for each in "\n\r\t" if each != corpus.tokenizer.eos_token)
    table[[characters.index(each) for each in blanks if each in characters]] = space
    folded = table[tokens]
    is_kept = np.ones(len(folded), dtype=bool)
    is_kept[1:] = (folded[1:] != space) | (folded[:-1] != space)
    return folded[is_kept]


def _repeated_passages(corpus: Corpus, tokens: Tokens) -> tuple[int, int]:
    """Return how many passages of a text occur in the training split, and their number.

    The hashes of the training split are those of the passages that begin at a multiple of 8 bytes:
    of consecutive passages of a text, one for each token of 8 bytes, one begins there wherever the
    text stands.
    """
    fold = partial(_fold_blanks, corpus=corpus)
    train = corpus.split("train")
    n_offsets = 8 // train.itemsize
    size = PASSAGE + n_offsets - 1
    if len(tokens) <= MAX_COMPARED:
        tokens = fold(tokens)
    if len(tokens) < size:
        return 0, 0
    starts = np.unique(np.linspace(0, len(tokens) - size, N_PASSAGES).astype(np.int64))
    passages = [fold(tokens[start : start + 2 * size])[:size] for start in starts]
    whole = [each for each in passages if len(each) == size]
    rows = np.array(whole, tokens.dtype).reshape(-1, size)  # (passages, size)
    is_usable = np.ones(len(rows), dtype=bool)
    if corpus.tokenizer.eos_token:
        is_usable = (rows != corpus.tokenizer.eos_token_id).all(axis=1)
    for period in range(1, MAX_PERIOD + 1):
        is_usable &= (rows[:, period:] == rows[:, :-period]).mean(axis=1) < MAX_PERIODIC
    windows = np.lib.stride_tricks.sliding_window_view(rows[is_usable], PASSAGE, axis=1)
    wanted = _hash_passages(windows)[..., 0]  # (passages, n_offsets)
    shift = np.uint64(64 - HASH_BITS)
    is_near = np.zeros(1 << HASH_BITS, dtype=bool)
    is_near[wanted >> shift] = True
    train, found = train[-MAX_SEARCHED:], [wanted[:0, 0]]
    for start in range(0, len(train), CHUNK):
        chunk = fold(train[start : start + CHUNK + 2 * PASSAGE])
        hashes = _hash_passages(chunk[: len(chunk) // n_offsets * n_offsets])
        found.append(np.unique(hashes[is_near[hashes >> shift]]))
    is_found = np.isin(wanted, np.concatenate(found)).any(axis=1)
    return int(is_found.sum()), is_found.size


def _hash_passages(tokens: Tokens) -> npt.NDArray[np.uint64]:
    """Return the hashes of PASSAGE tokens from every 8th byte on, along the last axis."""
    hashes = np.array(tokens, order="C").view(np.uint64)
    n_words, multiplier = 1, MULTIPLIER
    while n_words < PASSAGE * tokens.itemsize // 8:
        hashes = hashes[..., :-n_words] * np.uint64(multiplier) + hashes[..., n_words:]
        n_words, multiplier = 2 * n_words, multiplier**2 % 2**64
    return hashes


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
    if origin := corpus.origin("val"):
        what, remedy = origin.removeprefix(" of "), "a file like the text would not differ"
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
