"""A text as token ids, and its consecutive splits."""

import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from chargpt.config import TextConfig
from chargpt.errors import TextError
from chargpt.text.documents import document_ends
from chargpt.text.source import TextFile
from chargpt.text.statistics import PairCounts, count_pairs, count_tokens
from chargpt.text.tokenizer import CharTokenizer, Ints, Tokens

MAX_SEARCHED = 100_000_000  # tokens of the training split
MIN_BLOCK_SIZE = 8  # shorter ones are not advised
MAX_MIXTURE_FRACTION = 0.03  # of the text
MIN_MIXTURE_CHARACTERS = 100  # that a mixture is fitted to

Split = Literal["mixture", "train", "val", "test"]
REQUIRED_SPLITS: tuple[Split, ...] = ("train", "val")  # the splits of every run
CHUNK = 1 << 20  # tokens whose characters are counted together


class Place(NamedTuple):
    """Where a passage stands in the files of a text."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}, line {self.line:,}"


@dataclass(frozen=True)
class Corpus:
    """A text as tokens, cut into consecutive splits.

    Attributes:
        name: short name for messages and tables.
        key: hash of the text's content and of the settings that determine its tokens.
        tokens: the whole text, shape (tokens,), memory-mapped, read-only.
        settings: of the text; the splits are computed from them, not stored.
        rare_count: number of occurrences of characters that are not in the vocabulary.
        files: that it was read from; none of a text in memory or standard input.
        lines: of a list of documents, the number of lines before each, (documents,).
        folder: of its files, which `prepare` has written.
    """

    name: str
    key: str
    tokenizer: CharTokenizer
    tokens: Tokens
    settings: TextConfig
    rare_count: int = 0
    files: tuple[TextFile, ...] = ()
    lines: Ints | None = None
    folder: Path | None = None

    @cached_property
    def n_characters(self) -> int:
        """Number of characters of the whole text."""
        return int(self._chunk_starts[-1])

    def count_characters(self, split: Split) -> int:
        """Return the number of characters, not tokens, of a split."""
        return self.tokenizer.count_characters(self.split(split))

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

    def with_settings(self, **values: object) -> "Corpus":
        """Return the same text with other sizes of its splits."""
        return replace(self, settings=self.settings.model_copy(update=values))

    def split(self, name: Split) -> Tokens:
        """Return a split as a view, shape (tokens,), in the order mixture, train, val, test.

        The sizes of the validation and test splits are rounded up to whole characters. The mixture
        split is at most 3% of the text, then rounded up to a whole document. The other splits end
        where the nearest document does.
        """
        start, stop = self._bounds(name)
        return self.tokens[start:stop]

    def _bounds(self, name: Split) -> tuple[int, int]:
        """Return the indices of the first token of a split and of that after its last."""
        total = self.n_characters
        # Exact decimals: in floating point, 0.1 of 10 characters could round up to 2.
        val = math.ceil(total * Fraction(str(self.settings.val_fraction)))
        test = min(math.ceil(total * Fraction(str(self.settings.test_fraction))), total - val)
        end = total - val - test
        mixture = min(self.settings.mixture_characters, int(MAX_MIXTURE_FRACTION * total), end)
        lengths = {"mixture": mixture, "train": end - mixture, "val": val, "test": test}
        stops = dict(zip(lengths, accumulate(lengths.values()), strict=True))
        start, stop = stops[name] - lengths[name], stops[name]
        return self._edge(start, mixture), self._edge(stop, mixture)

    def _edge(self, character: int, mixture: int) -> int:
        """Return the index of the token at which a split begins or ends.

        It is that of the character or, for a list of documents, that of the end of a document: of
        the first one from the end of the mixture split on, of the nearest one elsewhere.
        """
        index = self._index(character)
        if not self.tokenizer.eos_token:
            return index
        boundaries = self._document_boundaries
        number = int(np.searchsorted(boundaries, index))
        after = int(boundaries[number])
        if character <= mixture:
            return after
        before = int(boundaries[number - 1])
        nearest = after if after - index <= index - before else before
        return max(nearest, self._edge(mixture, mixture))

    def source_has_changed(self) -> bool:
        """Return whether a file of the text has another size or time than when it was read.

        Files that are not there, as on another machine, have not changed.
        """
        for file in self.files:
            with suppress(OSError, ValueError):
                status = os.stat(file.path)
                if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                    return True
        return False

    def find(self, passages: Iterable[str]) -> dict[str, int]:
        """Return the index of the token at which passages first occur in the training split.

        Passages that do not occur are left out; all of them, if the split is long.
        """
        first, training = self._bounds("train")[0], self.split("train")
        if len(training) > MAX_SEARCHED:
            return {}
        content, found = training.tobytes(), {}
        for passage in passages:
            tokens = self.tokenizer.encode(passage, "replace").astype(training.dtype)
            start = content.find(tokens.tobytes())
            while start > 0 and start % training.itemsize:  # it begins within a token
                start = content.find(tokens.tobytes(), start + 1)
            if start >= 0:
                found[passage] = first + start // training.itemsize
        return found

    def find_places(self, passages: Iterable[str]) -> dict[str, Place]:
        """Return where in its files passages of the training split stand, as far as is known."""
        if not self.files:
            return {}
        return {passage: self._place_of(index) for passage, index in self.find(passages).items()}

    def _place_of(self, index: int) -> Place:
        """Return file and line of the token with this index."""
        begins = [file.begin for file in self.files]
        if self.lines is None:
            chunk = index // CHUNK * CHUNK
            character = int(self._chunk_starts[index // CHUNK])
            character += self.tokenizer.count_characters(self.tokens[chunk:index])
            number = bisect_right(begins, character) - 1
            line, start = 1, self._index(begins[number])
        else:
            document = int(np.searchsorted(self._document_boundaries, index, side="right")) - 1
            before = int(self.lines[document])
            number = bisect_right(begins, before) - 1
            line, start = before - begins[number] + 1, int(self._document_boundaries[document])
        newline = self.tokenizer.characters.find("\n")
        line += int(np.count_nonzero(self.tokens[start:index] == newline))
        return Place(os.path.relpath(self.files[number].path), line)

    def require_blocks(self, block_size: int) -> None:
        """Check that train and val each hold a block and the character after it.

        Raises:
            TextError: they do not; the message says what to set.
        """
        train, val = self.split("train").size, self.split("val").size
        shorter = min(train, val)
        if shorter > block_size:
            return
        total = self.n_characters
        needed = block_size + 1
        characters = "1 character" if total == 1 else f"{total:,} characters"
        if self.n_documents == 1:
            causes = {"lines": "it is one line", "files": "it is one file"}
            documents = str(self.settings.documents)
            separator = f"the separator {documents!r:.40} does not occur within it"
            raise TextError(
                f"{self.name} holds {characters} in 1 document, since "
                f"{causes.get(documents, separator)}, and one document cannot be split; "
                "set text.documents=null, or give several documents"
            )
        remedies = ["give a longer text"]
        if shorter > MIN_BLOCK_SIZE:
            remedies.insert(0, f"set model.block_size to {shorter - 1:,} or less")
        if fraction := self._sufficient_val_fraction(needed):
            remedies.insert(0, f"set text.val_fraction to {fraction:g}")
        if self.n_documents:
            characters += f" in {self.n_documents:,} documents"
            remedies.append("correct text.documents")
        unit = "tokens " if self.tokenizer.has_bytes else ""
        raise TextError(
            f"{self.name} holds {characters}, {train:,} {unit}to train on and {val:,} to validate "
            f"on, and model.block_size {block_size:,} needs {needed:,} of each; "
            + ", or ".join(remedies)
        )

    def _sufficient_val_fraction(self, size: int) -> float | None:
        """Return the lowest `val_fraction`, in steps of 0.001, with `size` tokens in train and val.

        None if there is no such fraction.
        """
        corpora = [
            self.with_settings(val_fraction=thousandths / 1000)
            for thousandths in range(1, math.ceil(1000 * (1 - self.settings.test_fraction)))
        ]
        # the validation split grows with its fraction, by whole documents
        index = bisect_left(corpora, size, key=lambda corpus: corpus.split("val").size)
        if index == len(corpora) or corpora[index].split("train").size < size:
            return None
        return corpora[index].settings.val_fraction

    def token_counts(self, split: Split) -> Ints:
        """Return the number of occurrences of each id in a split, shape (V,)."""
        return count_tokens(self.split(split), self.tokenizer.vocab_size)

    def pair_counts(self, split: Split) -> PairCounts:
        """Return the number of occurrences of each pair of ids in a split."""
        return count_pairs(self.split(split), self.tokenizer.vocab_size)
