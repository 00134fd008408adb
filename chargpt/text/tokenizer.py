"""Character tokenizer: text to token ids and back without loss.

A character is one Unicode code point. The vocabulary is the sorted characters of the text, and a
token's id is its index there. Nothing is normalised: line ends, combining marks and joiners are
characters like any other. With `min_count` above 1 the rarer characters share one unknown token.
"""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from chargpt.errors import RunError, TextError, UnknownCharacterError
from chargpt.files import parse_json, write_atomically

DECODE_CHUNK = 1 << 20  # ids decoded at once, to bound the memory
CODE_POINTS = 0x110000
MAX_JSON_BYTES = 16_000_000  # all code points, escaped, take less
MAX_NAMED = 5  # unknown characters that an error lists one by one
CHUNK = 1 << 15  # characters encoded at once: small enough for a processor's cache
REPLACEMENT = "\ufffd"
FORMAT, VERSION = "chargpt-tokenizer", 1

Unknown = Literal["error", "skip", "replace"]
Tokens = npt.NDArray[Any]  # token ids of any integer type
TokenIds = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class CharTokenizer:
    """A vocabulary of characters, with the mapping between text and token ids.

    Attributes:
        characters: the known characters, sorted by code point; a token's id is its index here.
        has_unknown: whether the last id, `len(characters)`, stands for every other character.
    """

    characters: str
    has_unknown: bool = False

    def __post_init__(self) -> None:
        assert self.characters, "a vocabulary holds at least one character"

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.characters) + self.has_unknown

    @property
    def unknown_id(self) -> int | None:
        """Id of the unknown token, if there is one."""
        return len(self.characters) if self.has_unknown else None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest of uint8, uint16 and uint32 that holds every id."""
        return np.min_scalar_type(self.vocab_size - 1)

    @cached_property
    def replacement_id(self) -> int:
        """Id that `replace` puts for an unknown character.

        The unknown token if there is one, else the first of U+FFFD, `?` and the space that the
        vocabulary has, else id 0.
        """
        if self.has_unknown:
            return len(self.characters)
        indices = (self.characters.find(character) for character in (REPLACEMENT, "?", " "))
        return next((index for index in indices if index >= 0), 0)

    @classmethod
    def fit(cls, text: str, min_count: int = 1) -> Self:
        """Return the tokenizer of a text's characters.

        Raises:
            TextError: the text is empty, or all its characters are rarer than `min_count`.
        """
        return cls.from_counts(np.bincount(code_points(text), minlength=1), min_count)

    @classmethod
    def from_counts(cls, counts: npt.NDArray[Any], min_count: int = 1) -> Self:
        """Return the tokenizer of a text that has `counts[c]` characters of code point c.

        Raises:
            TextError: as `fit` does.
        """
        known = np.flatnonzero(counts >= max(1, min_count))
        if not counts.any():
            raise TextError("the text is empty; give one that holds characters")
        if not known.size:
            raise TextError(
                f"every character of the text occurs fewer than {min_count:,} times; "
                "lower text.min_count"
            )
        if _has_surrogates(known):
            raise TextError(
                "the text decodes to lone surrogates (U+D800 to U+DFFF), which are not characters; "
                "name its true encoding with --encoding"
            )
        has_unknown = int(np.count_nonzero(counts)) > known.size
        return cls(known.astype("<u4").tobytes().decode("utf-32-le"), has_unknown)

    @cached_property
    def _ids(self) -> Tokens:
        """Id of each code point up to one past the last known; `_no_id` where there is none."""
        known = code_points(self.characters)
        table = np.full(int(known[-1]) + 2, self._no_id, dtype=np.min_scalar_type(self._no_id))
        table[known] = np.arange(known.size)
        return table

    @property
    def _no_id(self) -> int:
        """The largest value of the smallest dtype that can hold `vocab_size`."""
        return int(np.iinfo(np.min_scalar_type(self.vocab_size)).max)

    @cached_property
    def _two_character_ids(self) -> npt.NDArray[np.uint16]:
        """Two one-byte ids for the two bytes of every 16-bit number."""
        pairs = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
        return self._ids.take(pairs, mode="clip").view(np.uint16)

    @cached_property
    def _code_points(self) -> npt.NDArray[np.uint32]:
        """Code point of each id."""
        return code_points(self.characters + (REPLACEMENT if self.has_unknown else ""))

    def encode(self, text: str, unknown: Unknown = "error") -> Tokens:
        """Return the ids of a text, shape (characters,), in `dtype`.

        Args:
            unknown: what to do with a character outside the vocabulary: `error` raises, `skip`
                leaves it out, `replace` puts `replacement_id`. Only `replace` uses the unknown
                token, so that no character is lost by default.

        Raises:
            UnknownCharacterError: naming the characters, if `unknown` is "error".
        """
        size = len(text)
        ids = np.empty(size + size % 2, dtype=self._ids.dtype)
        is_ascii = text.isascii() and ids.dtype == np.uint8
        for start in range(0, size, CHUNK):
            chunk, out = text[start : start + CHUNK], ids[start : start + CHUNK]
            # Code points beyond the table are clipped to its last entry, which has no id.
            if is_ascii:  # two characters a look-up
                codes = np.frombuffer(chunk.encode("ascii") + b"\0"[: len(chunk) % 2], np.uint16)
                self._two_character_ids.take(codes, out=out.view(np.uint16), mode="clip")
            else:
                self._ids.take(code_points(chunk), out=out[: len(chunk)], mode="clip")
        ids = ids[:size]
        if ids.size and ids.max() == self._no_id:
            is_unknown = ids == self._no_id
            if unknown == "error":
                raise UnknownCharacterError(_describe_unknown(code_points(text)[is_unknown]))
            if unknown == "skip":
                ids = ids[~is_unknown]
            else:
                ids[is_unknown] = self.replacement_id
        return ids.astype(self.dtype, copy=False)

    def count_unknown(self, text: str) -> int:
        """Return the number of characters of a text that are not in the vocabulary."""
        return len(text) - len(self.encode(text, "skip"))

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of token ids; the unknown token becomes U+FFFD."""
        index = np.atleast_1d(np.asarray(ids))
        if index.dtype.kind not in "iu":
            index = index.astype(np.int64)
        assert index.size == 0 or (index.min() >= 0 and index.max() < self.vocab_size)
        parts = (index[i : i + DECODE_CHUNK] for i in range(0, len(index), DECODE_CHUNK))
        return "".join(self._code_points[part].tobytes().decode("utf-32-le") for part in parts)

    def to_json(self) -> str:
        """Return the vocabulary as JSON (ASCII only, one line)."""
        tree = {"format": FORMAT, "version": VERSION}
        return json.dumps({**tree, "characters": self.characters, "unknown": self.has_unknown})

    @classmethod
    def from_json(cls, text: str, origin: str = "tokenizer") -> Self:
        """Return the tokenizer that `to_json` wrote; messages name `origin`.

        Raises:
            RunError: the text is not the JSON of a tokenizer.
        """
        try:
            tree = parse_json(text)
        except ValueError as error:
            raise _unusable(origin, str(error)) from None
        if tree.get("format") != FORMAT:
            raise _unusable(origin, "it is not a chargpt tokenizer")
        if tree.get("version") != VERSION:
            raise RunError(
                f"{origin} has version {tree.get('version')!r:.20}, and this chargpt reads "
                f"{VERSION}; update chargpt"
            )
        characters, has_unknown = tree.get("characters"), tree.get("unknown")
        if not isinstance(characters, str) or not isinstance(has_unknown, bool):
            raise _unusable(origin, "its `characters` or `unknown` is missing")
        codes = code_points(characters).astype(np.int64)
        if not 0 < codes.size <= CODE_POINTS or (np.diff(codes) <= 0).any():
            raise _unusable(origin, "its characters are not sorted and distinct")
        if _has_surrogates(codes):
            raise _unusable(origin, "it holds lone surrogates")
        return cls(characters, has_unknown)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vocabulary as JSON, atomically."""
        write_atomically(Path(path), self.to_json().encode("ascii"))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote.

        Raises:
            RunError: the file is missing, unreadable or not a tokenizer.
        """
        try:
            if os.path.getsize(path) > MAX_JSON_BYTES:
                raise _unusable(path, f"it is over {MAX_JSON_BYTES:,} bytes")
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _unusable(path, getattr(error, "strerror", None) or "it is not UTF-8") from None
        return cls.from_json(text, str(path))

    def __repr__(self) -> str:
        shown = self.characters if len(self.characters) < 80 else self.characters[:79] + "…"
        return f"CharTokenizer({shown!r}, has_unknown={self.has_unknown})"


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """Return the code points of a text, shape (characters,)."""
    if 0 < len(text) < 1 << 29:  # the limit of numpy's strings, which are faster than a codec
        return np.array([text]).view(np.uint32)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _has_surrogates(codes: npt.NDArray[np.int64]) -> bool:
    return bool(((codes >= 0xD800) & (codes < 0xE000)).any())


def _unusable(origin: str | os.PathLike[str], reason: str) -> RunError:
    return RunError(f"{origin} cannot be used as a tokenizer ({reason}); restore it or train again")


def _name_character(code: int) -> str:
    """Return a character with its code point: 'ж' U+0436."""
    shown = chr(code)
    return f"{shown!r} U+{code:04X}" if shown.isprintable() else f"U+{code:04X}"


def _describe_unknown(codes: npt.NDArray[np.uint32]) -> str:
    """Return the error message for characters outside the vocabulary, most frequent first."""
    distinct, counts = np.unique(codes, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MAX_NAMED]
    names = ", ".join(_name_character(int(code)) for code in distinct[order])
    others = f" and {distinct.size - MAX_NAMED:,} others" if distinct.size > MAX_NAMED else ""
    subject = "1 character is" if codes.size == 1 else f"{codes.size:,} characters are"
    return (
        f"{subject} not in the vocabulary: {names}{others}; "
        "leave them out or replace them with --unknown skip or replace (setting text.unknown)"
    )
