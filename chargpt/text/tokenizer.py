"""Characters in, token ids out, and back without loss.

A character is one Unicode code point. The vocabulary is the sorted characters of the text, and a
token's id is its place in it. Nothing is normalised: line ends, combining marks and joiners are
characters like any other. With `min_count` above 1 the rare characters share one unknown token.
"""

import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from chargpt.errors import RunError, TextError, UnknownCharacterError
from chargpt.files import write_atomically

CODE_POINTS = 0x110000
MAX_JSON_BYTES = 16_000_000  # every code point there is, escaped, takes less
REPLACEMENT = "\ufffd"
PART = 1 << 15  # characters that are encoded at once
NAMED = 5  # unknown characters that an error lists one by one

Unknown = Literal["error", "skip", "replace"]
Tokens = npt.NDArray[Any]  # token ids of any integer type
TokenIds = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.floating[Any]]
Floats = npt.NDArray[np.float64]


class CharTokenizer:
    """A vocabulary of characters, and the way between text and token ids.

    Attributes:
        characters: the known characters, sorted by code point; a token's id is its index here.
        has_unknown: whether the last id, `len(characters)`, stands for every other character.
    """

    def __init__(self, characters: str, has_unknown: bool = False) -> None:
        """Take sorted, distinct characters; `fit` finds them in a text."""
        assert characters, "a vocabulary holds at least one character"
        self.characters = characters
        self.has_unknown = has_unknown

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
        """What `replace` puts for an unknown character.

        The unknown token if there is one, else the first of U+FFFD, `?` and the space that the
        vocabulary has, else id 0.
        """
        if self.has_unknown:
            return len(self.characters)
        found = (self.characters.find(character) for character in (REPLACEMENT, "?", " "))
        return next((index for index in found if index >= 0), 0)

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
        if ((known >= 0xD800) & (known < 0xE000)).any():
            raise TextError(
                "the text decodes to lone surrogates (U+D800 to U+DFFF), which are no characters; "
                "name its true encoding with --encoding"
            )
        rare = int(np.count_nonzero(counts)) > known.size
        return cls(known.astype("<u4").tobytes().decode("utf-32-le"), has_unknown=rare)

    @cached_property
    def _ids(self) -> Tokens:
        """Id of each code point up to one past the last known; `_no_id` where there is none."""
        known = code_points(self.characters)
        no_id = self._no_id
        table = np.full(int(known[-1]) + 2, no_id, dtype=np.min_scalar_type(no_id))
        table[known] = np.arange(known.size)
        return table

    @property
    def _no_id(self) -> int:
        """The largest number of the smallest integers that hold one more than all ids."""
        return int(np.iinfo(np.min_scalar_type(self.vocab_size)).max)

    @cached_property
    def _pairs(self) -> npt.NDArray[np.uint16]:
        """Both ids, of single bytes each, for the two bytes of every 16-bit number."""
        pairs = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
        return self._ids.take(pairs, mode="clip").view(np.uint16)

    @cached_property
    def _code_points(self) -> npt.NDArray[np.uint32]:
        """Code point of each id."""
        tail = REPLACEMENT if self.has_unknown else ""
        return code_points(self.characters + tail)

    def encode(self, text: str, unknown: Unknown = "error") -> Tokens:
        """Return the ids of a text, shape (characters,), in `dtype`.

        Args:
            text: any string.
            unknown: what to do with a character outside the vocabulary: `error` raises, `skip`
                leaves it out, `replace` puts `replacement_id`. The unknown token is used by
                `replace` only, so that nothing is lost unasked.

        Raises:
            UnknownCharacterError: naming the characters, if `unknown` is "error".
        """
        size = len(text)
        ids = np.empty(size + size % 2, dtype=self._ids.dtype)
        by_pairs = text.isascii() and ids.dtype == np.uint8  # half as many look-ups
        for first in range(0, size, PART):  # a part fits into the processor's cache
            part, place = text[first : first + PART], ids[first : first + PART]
            # what lies beyond the last known code point has no id, as the table's end says
            if by_pairs:
                codes = np.frombuffer(part.encode("ascii") + b"\0"[: len(part) % 2], np.uint16)
                self._pairs.take(codes, out=place.view(np.uint16), mode="clip")
            else:
                self._ids.take(code_points(part), out=place[: len(part)], mode="clip")
        ids = ids[:size]
        if ids.size and ids.max() == self._no_id:
            missing = ids == self._no_id
            if unknown == "error":
                raise UnknownCharacterError(_describe_unknown(code_points(text)[missing]))
            if unknown == "skip":
                ids = ids[~missing]
            else:
                ids[missing] = self.replacement_id
        return ids.astype(self.dtype, copy=False)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of token ids; the unknown token becomes U+FFFD."""
        index = np.atleast_1d(np.asarray(ids)).astype(np.int64)
        assert index.size == 0 or (index.min() >= 0 and index.max() < self.vocab_size)
        return self._code_points[index].tobytes().decode("utf-32-le")

    def to_json(self) -> str:
        """Return the vocabulary as JSON (ASCII only, one line)."""
        return json.dumps(
            {
                "format": "chargpt-tokenizer",
                "version": 1,
                "characters": self.characters,
                "unknown": self.has_unknown,
            }
        )

    @classmethod
    def from_json(cls, text: str, origin: str = "tokenizer") -> Self:
        """Return the tokenizer that `to_json` described.

        Raises:
            RunError: the text is not such a description; `origin` names it in the message.
        """
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError):
            raise RunError(_broken(origin, "it is not JSON")) from None
        if not isinstance(tree, dict) or tree.get("format") != "chargpt-tokenizer":
            raise RunError(_broken(origin, "it is not a chargpt tokenizer"))
        if tree.get("version") != 1:
            raise RunError(
                f"{origin} has version {tree.get('version')!r:.20}, and this chargpt reads 1; "
                "update chargpt"
            )
        characters, has_unknown = tree.get("characters"), tree.get("unknown")
        if not isinstance(characters, str) or not isinstance(has_unknown, bool):
            raise RunError(_broken(origin, "its `characters` or `unknown` is missing"))
        codes = code_points(characters).astype(np.int64)
        if not 0 < codes.size <= CODE_POINTS or (np.diff(codes) <= 0).any():
            raise RunError(_broken(origin, "its characters are not sorted and distinct"))
        if ((codes >= 0xD800) & (codes < 0xE000)).any():
            raise RunError(_broken(origin, "it holds lone surrogates"))
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
                raise RunError(_broken(str(path), f"it is over {MAX_JSON_BYTES:,} bytes"))
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise RunError(
                f"the tokenizer {path} cannot be read ({reason}); name a complete run"
            ) from None
        except UnicodeDecodeError:
            raise RunError(_broken(str(path), "it is not UTF-8")) from None
        return cls.from_json(text, str(path))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CharTokenizer):
            return NotImplemented
        return (self.characters, self.has_unknown) == (other.characters, other.has_unknown)

    def __hash__(self) -> int:
        return hash((self.characters, self.has_unknown))

    def __repr__(self) -> str:
        shown = self.characters if len(self.characters) < 80 else self.characters[:79] + "…"
        return f"CharTokenizer({shown!r}, has_unknown={self.has_unknown})"


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """Return the code points of a text, shape (characters,)."""
    if 0 < len(text) < 1 << 29:  # numpy copies sooner than Python encodes, within its limits
        return np.array([text]).view(np.uint32)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _broken(origin: str, reason: str) -> str:
    return f"{origin} cannot be used as a tokenizer ({reason}); restore it or train again"


def name_character(code: int) -> str:
    """Return a character as people can find it: 'ж' U+0436."""
    shown = chr(code)
    return f"{shown!r} U+{code:04X}" if shown.isprintable() else f"U+{code:04X}"


def _describe_unknown(codes: npt.NDArray[np.uint32]) -> str:
    """Return the sentence for characters that the vocabulary lacks, commonest first."""
    kinds, counts = np.unique(codes, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:NAMED]
    names = ", ".join(name_character(int(code)) for code in kinds[order])
    more = f" and {kinds.size - NAMED:,} more kinds" if kinds.size > NAMED else ""
    subject = "1 character is" if codes.size == 1 else f"{codes.size:,} characters are"
    return (
        f"{subject} not in the vocabulary: {names}{more}; "
        "set text.unknown to skip or replace (--unknown skip|replace) to go on without"
    )
