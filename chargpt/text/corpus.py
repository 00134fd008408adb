"""A text as token ids: its documents, consecutive splits, batches, and counts of tokens.

All of it in bounded memory. Shapes in this file: V = vocabulary size, N = number of tokens,
P = number of distinct pairs, B = batch size, T = block size.
"""

import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from chargpt.config import TextConfig
from chargpt.errors import RunError, TextError
from chargpt.text.source import TextFile
from chargpt.text.tokenizer import CharTokenizer, Ints, Tokens

MIN_BLOCK_SIZE = 8  # shorter ones are not advised
MAX_MIXTURE_FRACTION = 0.03  # of the text
MIN_MIXTURE_CHARACTERS = 100  # that a mixture is fitted to

Split = Literal["mixture", "train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)  # in the order of the text
REQUIRED_SPLITS: tuple[Split, ...] = ("train", "val")  # the splits of every run
CHUNK = 1 << 20  # tokens counted or copied at once: small enough for a processor's cache
SPARSE_CHUNK = 1 << 23  # tokens whose pairs are sorted at once
MAX_DENSE_PAIRS = 1 << 24  # V * V up to which all pairs are counted in one table (128 MB)
MAX_CONTINUATIONS = 3  # bytes of a character in UTF-8 after the first


class Place(NamedTuple):
    """Where a passage stands in the files of a text."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}, line {self.line:,}"


class HeldOut(NamedTuple):
    """A validation or test split that has files of its own: their name, and its first token."""

    name: str
    begin: int


@dataclass(frozen=True)
class PairCounts:
    """Number of occurrences of each pair of consecutive tokens; absent pairs are not listed.

    Attributes:
        first, second, counts: int64 arrays of shape (P,), sorted by (first, second).
        vocab_size: V.
    """

    first: Ints
    second: Ints
    counts: Ints
    vocab_size: int


@dataclass(frozen=True)
class Corpus:
    """A text as tokens, cut into consecutive splits.

    Attributes:
        name: short name for messages and tables.
        key: hash of the text's content and of the settings that determine its tokens.
        tokens: the whole text, shape (tokens,), read-only, memory-mapped if it is long.
        settings: of the text; the splits are computed from them, not stored.
        rare_count: number of occurrences of characters that are not in the vocabulary.
        files: that it was read from; none of a text in memory or standard input.
        lines: of a list of documents, the number of lines before each, (documents,).
        held_out: the splits that have files of their own, after the text.
        folder: of its files, which `prepare` has written.
        check: of their checksums, while it is still under way.
    """

    name: str
    key: str
    tokenizer: CharTokenizer
    tokens: Tokens
    settings: TextConfig
    rare_count: int = 0
    files: tuple[TextFile, ...] = ()
    lines: Ints | None = None
    held_out: Mapping[str, HeldOut] = field(default_factory=dict)
    folder: Path | None = None
    check: Future[None] | None = None

    def require_intact(self) -> None:
        """Wait for the check of the files; raise RunError if one is damaged."""
        if self.check is not None:
            self.check.result()

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Raise RunError instead of an error in the block if a file is damaged."""
        try:
            yield
        except (IndexError, RuntimeError, ValueError):  # as of ids that the vocabulary lacks
            self.require_intact()
            raise

    @cached_property
    def n_characters(self) -> int:
        """Number of characters of the whole text."""
        return int(self._chunk_starts[-1])

    def count_characters(self, split: Split) -> int:
        """Return the number of characters, not tokens, of a split."""
        return self.tokenizer.count_characters(self.split(split))

    def origin(self, split: Split) -> str:
        """Return " of NAME" for a split that has files of its own, else ""."""
        return f" of {self.held_out[split].name}" if split in self.held_out else ""

    def describe_splits(self) -> str:
        """Return the number of characters of each split, with the files of its own if it has."""
        return ", ".join(
            f"{self.count_characters(split):,} {split}{self.origin(split)}"
            for split in SPLITS
            if len(self.split(split))
        )

    @property
    def rare_fraction(self) -> float:
        """Fraction of the characters that are not in the vocabulary."""
        return self.rare_count / self.n_characters

    @property
    def rare_form(self) -> str:
        """What becomes of characters that are not in the vocabulary."""
        return "spelled as bytes" if self.tokenizer.has_bytes else "unknown"

    @property
    def characters_per_token(self) -> float:
        """1, or less if byte tokens spell some characters."""
        return self.n_characters / self.tokens.size

    @cached_property
    def _chunk_starts(self) -> Ints:
        """Number of characters before each chunk of tokens, and of all."""
        chunks = (self.tokens[i : i + CHUNK] for i in range(0, self.tokens.size, CHUNK))
        return np.cumsum([0, *map(self.tokenizer.count_characters, chunks)])

    def _index(self, character: int) -> int:
        """Return the index of the token that begins a character."""
        if character == self.n_characters:
            return self.tokens.size
        if not self.tokenizer.has_bytes:
            return character
        chunk = int(np.searchsorted(self._chunk_starts, character, side="right")) - 1
        tokens = self.tokens[chunk * CHUNK : (chunk + 1) * CHUNK]
        starts = np.flatnonzero(tokens < self.tokenizer.first_continuation_id)
        return chunk * CHUNK + int(starts[character - self._chunk_starts[chunk]])

    @cached_property
    def _document_boundaries(self) -> Ints:
        """0, and the index after each document, (1 + documents,)."""
        return np.append(0, document_ends(self.tokens, self.tokenizer.eos_token_id))

    @property
    def n_documents(self) -> int:
        """Number of documents; 0 if the text is no list of them."""
        return len(self._document_boundaries) - 1 if self.tokenizer.eos_token else 0

    @property
    def unused_separator(self) -> str:
        """A message if `text.documents` separates nothing within the files, else ""."""
        documents, n_files = self.settings.documents, sum(file.size > 0 for file in self.files)
        is_word = documents in (None, "auto", "lines", "files")
        if is_word or self.n_documents > max(1, n_files):
            return ""
        if self.n_documents > 1:
            return (
                f"text.documents={documents!r} separates nothing within the files of {self.name}, "
                "so that each is one document; correct it if they hold several"
            )
        return (
            f"text.documents={documents!r} separates nothing in {self.name}; set it to null for "
            "one text in its order, or to what separates its documents"
        )

    def with_settings(self, **values: object) -> "Corpus":
        """Return the same text with other sizes of its splits."""
        return replace(self, settings=self.settings.model_copy(update=values))

    def split(self, name: Split) -> Tokens:
        """Return a split as a view, shape (tokens,), in the order mixture, train, val, test.

        The sizes of the validation and test splits are rounded up to whole characters. The mixture
        split is at most 3% of the text, then rounded up to a whole document. The other splits end
        where the nearest document does.
        """
        number = SPLITS.index(name)
        return self.tokens[self._edges[number] : self._edges[number + 1]]

    @cached_property
    def _edges(self) -> list[int]:
        """Index of the first token of each split, and the number of tokens."""
        held_out = {split: each.begin for split, each in self.held_out.items()}
        end = min(held_out.values(), default=self.tokens.size)
        total = (
            self.tokenizer.count_characters(self.tokens[:end]) if held_out else self.n_characters
        )
        # Exact decimals: in floating point, 0.1 of 10 characters could round up to 2.
        val = math.ceil(total * Fraction(str(self.settings.val_fraction)))
        test = math.ceil(total * Fraction(str(self.settings.test_fraction)))
        val = 0 if "val" in held_out else val
        test = 0 if held_out else min(test, total - val)
        end = total - val - test
        mixture = min(self.settings.mixture_characters, int(MAX_MIXTURE_FRACTION * total), end)
        edges = np.array([self._index(each) for each in (0, mixture, end, end + val, total)])
        if "val" in held_out:
            edges[3] = held_out.get("test", self.tokens.size)
        edges[4] = self.tokens.size
        if self.tokenizer.eos_token:
            boundaries = self._document_boundaries
            number = np.searchsorted(boundaries, edges)
            before, after = boundaries[np.maximum(number - 1, 0)], boundaries[number]
            nearest = np.where(after - edges <= edges - before, after, before)
            edges[1:] = np.maximum(nearest, after[1])[1:]
        return list(map(int, edges))

    def place_of(self, position: int) -> Place | None:
        """Return file and line of a token of the training split; None of a text in memory."""
        if not self.files or self.files[0].begin:  # all files are of held-out splits
            return None
        index, begins = self._edges[1] + position, [file.begin for file in self.files]
        if self.lines is None:
            chunk = index // CHUNK
            rest = self.tokenizer.count_characters(self.tokens[chunk * CHUNK : index])
            number = bisect_right(begins, self._chunk_starts[chunk] + rest) - 1
            line, start = 1, self._index(begins[number])
        else:
            document = int(np.searchsorted(self._document_boundaries, index, side="right")) - 1
            before = int(self.lines[document])
            number = bisect_right(begins, before) - 1
            line, start = before - begins[number] + 1, int(self._document_boundaries[document])
        line += self._lines_before(index) - self._lines_before(start)
        path = self.files[number].path
        with suppress(ValueError):  # Windows: it is on another drive
            path = os.path.relpath(path)
        return Place(path, line)

    def _lines_before(self, index: int) -> int:
        """Return the number of line ends before a token."""
        chunk = index // CHUNK
        return int(self._chunk_lines[chunk]) + self._count_lines(self.tokens[chunk * CHUNK : index])

    @cached_property
    def _chunk_lines(self) -> Ints:
        """Number of line ends before each chunk of tokens, and of all."""
        chunks = (self.tokens[i : i + CHUNK] for i in range(0, self.tokens.size, CHUNK))
        return np.cumsum([0, *map(self._count_lines, chunks)])

    def _count_lines(self, tokens: Tokens) -> int:
        characters = self.tokenizer.characters
        line_end = "\n" if "\n" in characters else "\r"
        return int(np.count_nonzero(tokens == characters.find(line_end)))

    def require_blocks(self, block_size: int) -> None:
        """Check that train and val each hold a block and the character after it.

        Raises:
            TextError: they do not; the message says what to set.
        """
        train, val = self.split("train").size, self.split("val").size
        shorter, needed = min(train, val), block_size + 1
        if shorter >= needed:
            return
        if self.n_documents == 1 and self.unused_separator:
            raise TextError(self.unused_separator)
        remedies = ["give a longer text"]
        if shorter > MIN_BLOCK_SIZE:
            remedies.insert(0, f"set model.block_size to {shorter - 1:,} or less")
        fraction = min(1.0, math.ceil(1000 * needed / self.n_characters) / 1000)
        other = self.with_settings(val_fraction=fraction)
        if min(len(other.split(split)) for split in REQUIRED_SPLITS) >= needed:
            remedies.insert(0, f"set text.val_fraction to {fraction:g}")
        documents = ""
        if self.n_documents:
            documents = f" (documents: {self.n_documents:,})"
            remedies.append(f"correct text.documents ({self.settings.documents!r:.40})")
        unit = "tokens " if self.tokenizer.has_bytes else ""
        raise TextError(
            f"{self.name} holds {self.n_characters:,} characters{documents}, {train:,} {unit}to "
            f"train on and {val:,} to validate on, and model.block_size {block_size:,} needs "
            f"{needed:,} of each; {', or '.join(remedies)}"
        )

    def token_counts(self, split: Split) -> Ints:
        """Return the number of occurrences of each id in a split, shape (V,)."""
        return count_tokens(self.split(split), self.tokenizer.vocab_size)

    def pair_counts(self, split: Split) -> PairCounts:
        """Return the number of occurrences of each pair of ids in a split."""
        return count_pairs(self.split(split), self.tokenizer.vocab_size)


@dataclass(frozen=True)
class JoinedCorpus(Corpus):
    """Several texts as one: each split consists of theirs, in order; see `joined`.

    Attributes:
        parts: the texts.
        edges: index of the first token of each split, and the number of tokens.
    """

    parts: tuple[Corpus, ...] = ()
    edges: tuple[int, ...] = ()

    @cached_property
    def _edges(self) -> list[int]:
        return list(self.edges)

    def place_of(self, position: int) -> Place | None:
        """Return file and line of a token of the training split; None of a text in memory."""
        # not its index: a character may be one token here and several byte tokens in its part
        number = self.tokenizer.count_characters(self.split("train")[:position])
        for part in self.parts:
            if number < (size := part.count_characters("train")):
                start = part.count_characters("mixture")
                return part.place_of(part._index(start + number) - part._edges[1])
            number -= size
        return None


def joined(parts: Sequence[Corpus], tokenizer: CharTokenizer) -> JoinedCorpus:
    """Return several texts as one, in the tokens of another vocabulary.

    Its characters that the vocabulary lacks become the replacement token. The tokens are in memory.

    Raises:
        RunError: a file of a text is damaged.
    """
    splits = [
        np.concatenate([translated(part, part.split(split), tokenizer) for part in parts])
        for split in SPLITS
    ]
    return JoinedCorpus(
        name=" and ".join(part.name for part in parts),
        key="",
        tokenizer=tokenizer,
        tokens=np.concatenate(splits),
        settings=parts[0].settings,
        rare_count=sum(part.rare_count for part in parts),
        parts=tuple(parts),
        edges=(0, *np.cumsum([split.size for split in splits]).tolist()),
    )


def translated(corpus: Corpus, tokens: Tokens, tokenizer: CharTokenizer) -> Tokens:
    """Return tokens of a text as those of another vocabulary; errors of `joined`."""
    corpus.require_intact()
    return tokenizer.encode(corpus.tokenizer.decode(tokens), unknown="replace")


def count_tokens(tokens: Tokens, vocab_size: int) -> Ints:
    """Return the number of occurrences of each id, shape (V,)."""
    if tokens.dtype == np.uint8:  # counting two bytes at once is twice as fast
        n_even = tokens.size - tokens.size % 2
        pairs = np.ascontiguousarray(tokens[:n_even]).view("<u2")
        table = np.zeros(vocab_size << 8, dtype=np.int64)
        for start in range(0, pairs.size, CHUNK):
            table += np.bincount(pairs[start : start + CHUNK], minlength=table.size)
        square = table.reshape(vocab_size, 256)[:, :vocab_size]
        counts: Ints = square.sum(axis=0) + square.sum(axis=1)
        counts[tokens[n_even:]] += 1
        return counts
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, tokens.size, CHUNK):
        counts += np.bincount(tokens[start : start + CHUNK], minlength=vocab_size)
    return counts


def count_pairs(tokens: Tokens, vocab_size: int) -> PairCounts:
    """Return the number of occurrences of each pair of consecutive ids (N - 1 pairs in all)."""
    if vocab_size * vocab_size <= MAX_DENSE_PAIRS:
        table = np.zeros(vocab_size * vocab_size, dtype=np.int64)
        for codes in _pair_codes(tokens, vocab_size, CHUNK):
            np.add.at(table, codes, 1)
        codes = np.flatnonzero(table)
        counts = table[codes]
    else:
        codes = counts = np.zeros(0, dtype=np.int64)
        for chunk in _pair_codes(tokens, vocab_size, SPARSE_CHUNK):
            found, n_found = np.unique(chunk, return_counts=True)
            codes, rows = np.unique(np.concatenate((codes, found)), return_inverse=True)
            weights = np.concatenate((counts, n_found))
            counts = np.bincount(rows, weights, minlength=0).astype(np.int64)
    return PairCounts(codes // vocab_size, codes % vocab_size, counts, vocab_size)


def _pair_codes(tokens: Tokens, vocab_size: int, chunk: int) -> Iterator[Ints]:
    """Yield first * V + second of consecutive pairs, `chunk` pairs at a time."""
    for start in range(0, tokens.size - 1, chunk):
        ids = tokens[start : start + chunk + 1].astype(np.int64)
        yield ids[:-1] * vocab_size + ids[1:]


def document_ends(tokens: Tokens, eos_token_id: int) -> Ints:
    """Return the index after each EOS token, shape (documents,)."""
    starts = range(0, len(tokens), CHUNK)
    found = [np.flatnonzero(tokens[i : i + CHUNK] == eos_token_id) + i + 1 for i in starts]
    return np.concatenate(found)


def shuffled_order(n_documents: int, seed: int) -> Ints:
    """Return the random order of documents, the same in every version of numpy."""
    return np.random.Philox(key=seed).random_raw(n_documents).argsort(kind="stable")


def shuffled(tokens: Tokens, eos_token_id: int, order: Ints) -> Iterator[Tokens]:
    """Yield the tokens of a text in chunks, its documents in this order."""
    tokens = np.asarray(tokens)
    ends = document_ends(tokens, eos_token_id)
    for first in range(0, len(order), CHUNK):  # of all documents at once it would take much memory
        some = order[first : first + CHUNK]
        chunks = (ends[some] - np.where(some, ends[some - 1], 0)).cumsum() // CHUNK
        for chosen in np.split(some, np.flatnonzero(np.diff(chunks)) + 1):
            starts = np.where(chosen, ends[chosen - 1], 0)
            spans = zip(starts.tolist(), ends[chosen].tolist(), strict=True)
            yield np.concatenate([tokens[start:end] for start, end in spans])


def block_offsets(
    tokens: Tokens,
    block_size: int,
    batch_size: int,
    seed: int,
    step: int,
    first_continuation_id: int = 1 << 32,
) -> Ints:
    """Return random offsets of blocks of T + 1 tokens, uniform over the text, shape (B,).

    They are a pure function of (seed, step). No block begins inside a character: ids from
    `first_continuation_id` on continue one. The bits come from Philox (Salmon et al. 2011), whose
    raw output is the same in every numpy version, which `Generator.integers` does not promise.

    Raises:
        RunError: as of `require_whole`.
    """
    require_whole(tokens)
    n_offsets = len(tokens) - block_size
    assert n_offsets > 0, "the caller checks that a block fits"
    key = np.array([seed, step], dtype=np.uint64)
    bits = np.random.Philox(key=key).random_raw(batch_size)
    uniform = (bits >> np.uint64(11)) * 2.0**-53
    offsets = np.minimum((uniform * n_offsets).astype(np.int64), n_offsets - 1)
    for _ in range(MAX_CONTINUATIONS):
        offsets -= tokens[offsets] >= first_continuation_id
    return offsets


def require_whole(tokens: Tokens) -> None:
    """Raise RunError if the file of mapped tokens was truncated.

    Reading them would end the process by SIGBUS, without a word.
    """
    if isinstance(tokens, np.memmap):
        mapped = tokens._mmap  # type: ignore[attr-defined]  # numpy has no other name for it
        if mapped.size() < len(mapped):  # that of the file now, wherever it is
            raise RunError(
                "text/tokens.bin of the run became shorter while it was in use; restore it from a "
                "copy"
            )
