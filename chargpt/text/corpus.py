"""A text as tokens, memory-mapped, and its consecutive splits."""

import math
import os
import shlex
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from chargpt.config import TextConfig
from chargpt.errors import MissingTextError, TextError
from chargpt.text import TextProgress, cache
from chargpt.text.cache import CachedText, DamagedCacheError
from chargpt.text.catalog import BUILT_IN
from chargpt.text.decoding import codec_name
from chargpt.text.display import REPLACEMENT
from chargpt.text.documents import document_ends
from chargpt.text.ingest import ingest, load_or_note, text_pieces
from chargpt.text.source import (
    STDIN,
    copy_stdin,
    describe_binary,
    find_source,
    iter_chunks,
    text_in_memory,
)
from chargpt.text.statistics import PairCounts, count_pairs, count_tokens
from chargpt.text.tokenizer import CharTokenizer, Ints, Tokens
from chargpt.yaml_io import to_flow_yaml

MAX_READ_CHARACTERS = 1 << 30
MAX_SEARCHED = 100_000_000  # tokens of the training split
MAX_MEMORY_BYTES = 64 << 20  # of standard input, before it goes to a temporary file
MANY_REPLACED = 0.01  # of all characters: the encoding is wrong
TOKENIZATION_SETTINGS = (  # what determines the tokens, apart from the content of the files
    *("suffixes", "encoding", "encoding_errors", "rare", "min_count", "extra_characters"),
    *("documents", "seed"),
)
MIN_BLOCK_SIZE = 8  # shorter ones are not advised
CHANGED = "the text has changed since the run was trained on it; the old text's tokens are used"

MAX_MIXTURE_FRACTION = 0.03  # of the text

Split = Literal["mixture", "train", "val", "test"]
REQUIRED_SPLITS: tuple[Split, ...] = ("train", "val")  # the splits of every run
CHUNK = 1 << 20  # tokens whose characters are counted together


@dataclass(frozen=True)
class Corpus:
    """A text as tokens, cut into consecutive splits.

    Attributes:
        name: short name for messages and tables.
        key: hash of the text's content and of the settings that determine its tokens.
        tokens: the whole text, shape (tokens,), memory-mapped, read-only.
        val_fraction, test_fraction: fractions of the text in the splits.
        mixture_characters: maximum length of the mixture split.
        rare_count: number of occurrences of characters that are not in the vocabulary.
        documents: what separates them, as `text.documents` says.
        notes: sentences for the user.
    """

    name: str
    key: str
    tokenizer: CharTokenizer
    tokens: Tokens
    val_fraction: float
    test_fraction: float
    mixture_characters: int = 0
    rare_count: int = 0
    documents: str | None = None
    notes: tuple[str, ...] = ()

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

    def split(self, name: Split) -> Tokens:
        """Return a split as a view, shape (tokens,), in the order mixture, train, val, test.

        The sizes of the validation and test splits are rounded up to whole characters. The mixture
        split is at most 3% of the text, then rounded up to a whole document. The other splits end
        where the nearest document does.
        """
        total = self.n_characters
        # Exact decimals: in floating point, 0.1 of 10 characters could round up to 2.
        val = math.ceil(total * Fraction(str(self.val_fraction)))
        test = min(math.ceil(total * Fraction(str(self.test_fraction))), total - val)
        end = total - val - test
        mixture = min(self.mixture_characters, int(MAX_MIXTURE_FRACTION * total), end)
        lengths = {"mixture": mixture, "train": end - mixture, "val": val, "test": test}
        stops = dict(zip(lengths, accumulate(lengths.values()), strict=True))
        start, stop = stops[name] - lengths[name], stops[name]
        return self.tokens[self._edge(start, mixture) : self._edge(stop, mixture)]

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

    def is_in_training(self, passage: str) -> bool:
        """Return whether the training split, if it is not long, holds a passage."""
        tokens, training = self.tokenizer.encode(passage, "replace"), self.split("train")
        if len(training) > MAX_SEARCHED:
            return False
        content, wanted = training.tobytes(), tokens.astype(training.dtype).tobytes()
        start = content.find(wanted)
        while start > 0 and start % training.itemsize:  # it begins within a token
            start = content.find(wanted, start + 1)
        return start >= 0

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
            separator = f"the separator {self.documents!r:.40} does not occur within it"
            raise TextError(
                f"{self.name} holds {characters} in 1 document, since "
                f"{causes.get(str(self.documents), separator)}, and one document cannot be split; "
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
            replace(self, val_fraction=thousandths / 1000)
            for thousandths in range(1, math.ceil(1000 * (1 - self.test_fraction)))
        ]
        # the validation split grows with its fraction, by whole documents
        index = bisect_left(corpora, size, key=lambda corpus: corpus.split("val").size)
        if index == len(corpora) or corpora[index].split("train").size < size:
            return None
        return corpora[index].val_fraction

    def token_counts(self, split: Split) -> Ints:
        """Return the number of occurrences of each id in a split, shape (V,)."""
        return count_tokens(self.split(split), self.tokenizer.vocab_size)

    def pair_counts(self, split: Split) -> PairCounts:
        """Return the number of occurrences of each pair of ids in a split."""
        return count_pairs(self.split(split), self.tokenizer.vocab_size)


def load_cached(settings: TextConfig, key: str | None, name: str) -> Corpus:
    """Return the text that a run was trained on from the cache, or the built-in text.

    `settings.path` comes from the run's folder, which may be someone else's: it is never opened.

    Raises:
        TextError: the cache does not have it; the message says how to read it again.
    """
    try:
        cached = cache.load(key) if key else None
    except DamagedCacheError:
        cached = None
    if cached is not None:
        return _corpus(settings, cached, name, [])
    if settings.path is None:
        return load_corpus(settings, key=key)
    if settings.path == STDIN:
        raise TextError(
            f"the run was trained on {name}, which the cache no longer has; give another text "
            "where the command takes one, or train on a file"
        )
    defaults = TextConfig().model_dump(mode="json")
    words = ["chargpt", "data", "info", settings.path]
    for setting, value in settings.model_dump(mode="json").items():
        if setting in TOKENIZATION_SETTINGS and value != defaults[setting]:
            words += ["-s", f"text.{setting}={to_flow_yaml(value)}"]
    raise TextError(
        f"the cache no longer has the text {name} of this run; read it again with\n  "
        + shlex.join(words)
    )


def load_corpus(
    settings: TextConfig = TextConfig(),
    *,
    key: str | None = None,
    text: str | None = None,
    on_progress: TextProgress | None = None,
) -> Corpus:
    """Return the text of the settings, from the cache or encoded now.

    Args:
        key: of the text that a run was trained on. If the text has changed since or is missing,
            its cached tokens are used instead, with a note.
        text: the text itself, instead of what `settings.path` names.
        on_progress: called while a text is read.

    Raises:
        TextError: there is no such text, it cannot be read, or it is not the text of `key`.
    """
    notes: list[str] = []
    # a text in memory and the built-in text are UTF-8
    if text is not None or settings.path is None:
        settings = settings.model_copy(update={"encoding": "auto"})
    spec = _specification(settings)
    try:
        if text is None:
            source = find_source(settings.path, settings.suffixes)
        else:
            source = text_in_memory(text)
        notes += source.notes
        if len(source.files) > 1 and settings.documents is None:
            notes.append(
                "the validation split is the end of the last files; -s text.documents=files "
                "shuffles the files and splits between them"
            )
        stamps = source.file_stamps()
    except MissingTextError:
        noted = key or cache.read_index(spec)
        cached = cache.load(noted) if noted else None
        if cached is None:
            raise
        name = Path(settings.path).name if settings.path else BUILT_IN
        notes.append(f"the text {name} is missing; its cached tokens are used")
        return _corpus(settings, cached, name, notes)
    current = cache.read_index(spec, stamps) if source.files else None
    if key is None or current in (None, key):
        cached = load_or_note(current, notes) if current else None
        if cached is None:
            cached = ingest(source, settings, on_progress, notes)
            if source.files:
                cache.write_index(spec, stamps, cached.key)
        if key in (None, cached.key):
            return _corpus(settings, cached, source.name, notes)
    cached = cache.load(str(key))
    if cached is None:
        raise TextError(
            f"the text {source.name} has changed since the run was trained on it, and the cache "
            "no longer has the old one; restore the text or train a new run"
        )
    return _corpus(settings, cached, source.name, [CHANGED])


def _specification(settings: TextConfig) -> list[Any]:
    """Return what, besides the content of its files, determines a text's tokens."""
    path = settings.path
    absolute = None if path is None else os.path.abspath(os.path.expanduser(path))
    values = {name: getattr(settings, name) for name in TOKENIZATION_SETTINGS}
    values["encoding"] = codec_name(settings.encoding)
    return [absolute, *values.values()]


def _corpus(settings: TextConfig, cached: CachedText, name: str, notes: list[str]) -> Corpus:
    if settings.encoding_errors == "replace" and REPLACEMENT in cached.tokenizer.characters:
        counts = count_tokens(cached.tokens, cached.tokenizer.vocab_size)
        count = int(counts[cached.tokenizer.characters.index(REPLACEMENT)])
        note = f"bytes that do not decode, replaced by U+FFFD: {count:,}"
        many = count > MANY_REPLACED * cached.tokens.size
        notes.append(f"{note}; the encoding is probably another" if many else note)
    return Corpus(
        name=name,
        key=cached.key,
        tokenizer=cached.tokenizer,
        tokens=cached.tokens,
        val_fraction=settings.val_fraction,
        test_fraction=settings.test_fraction,
        mixture_characters=settings.mixture_characters,
        rare_count=cached.rare_count,
        documents=settings.documents,
        notes=tuple(notes),
    )


def read_text(
    path: str | os.PathLike[str],
    settings: TextConfig = TextConfig(),
    on_note: Callable[[str], object] = lambda _: None,
) -> str:
    """Return a whole text: a file, folder, glob or `-`, read like a corpus.

    Args:
        path: of the text.
        settings: its encoding, documents and suffixes.
        on_note: called with a sentence for the user on which files are read.

    Raises:
        TextError: it cannot be read or decoded, or is over 2^30 characters.
    """
    source = find_source(str(path), settings.suffixes, for_training=False)
    for note in source.notes:
        on_note(note)
    binary: list[str] | None = [] if settings.encoding == "auto" else None
    texts: list[str] = []
    size = 0
    with tempfile.SpooledTemporaryFile(MAX_MEMORY_BYTES) as spool:
        if source.is_stdin:
            # 4 bytes each, and a byte order mark
            copy_stdin(spool.write, 4 * (MAX_READ_CHARACTERS + 1))
            source = replace(source, stream=spool)
        for text in text_pieces(iter_chunks(source, binary=binary), settings):
            size += len(text)
            if size > MAX_READ_CHARACTERS:
                raise TextError(
                    f"{path} is over {MAX_READ_CHARACTERS:,} characters; give a shorter text"
                )
            texts.append(text)
    for note in describe_binary(binary or []):
        on_note(note)
    return "".join(texts)


class Place(NamedTuple):
    """Where a passage stands in the files of a text."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}, line {self.line:,}"


def find_lines(settings: TextConfig, corpus: Corpus, passages: Iterable[str]) -> dict[str, Place]:
    """Return where passages first occur in that part of a text's files that is the training split.

    The whole files are searched if the text is a list of documents, which are shuffled. Passages
    that are not found are left out: all, if the files are over 2^30 bytes or were not read as this
    corpus here, since a run's folder may name any file.
    """
    found: dict[str, Place] = {}
    missing = set(passages)
    first, last = 0, corpus.n_characters
    if not corpus.n_documents:
        first = corpus.count_characters("mixture")
        last = first + corpus.count_characters("train")
    with suppress(TextError, OSError):
        if cache.read_index(_specification(settings)) != corpus.key:
            return {}
        files = find_source(settings.path, settings.suffixes).files
        if sum(path.stat().st_size for path in files) > MAX_READ_CHARACTERS:
            return {}
        for path in files if missing else ():
            text = ""
            with suppress(TextError):  # a binary file
                text = read_text(path, settings.model_copy(update={"documents": None}))
            for passage in missing:
                start = text.find(passage, max(0, first), max(0, last))
                if start >= 0:
                    line = 1 + text.count("\n", 0, start)
                    found[passage] = Place(os.path.relpath(path), line)
            missing -= found.keys()
            first, last = first - len(text), last - len(text)
            if not missing or last <= 0:
                break
    return found
