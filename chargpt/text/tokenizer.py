"""Character tokenizer: text to token ids and back without loss.

A character is one Unicode code point. The vocabulary is the sorted characters of the text, and a
token's id is its index there. Nothing is normalised: line ends, combining marks and joiners are
characters like any other, and `choose_form` alone changes a text, if the vocabulary lacks them.

Characters rarer than `min_count` share one unknown token, or are spelled by byte tokens, one for
each byte of their UTF-8 form, as in SentencePiece: with those any text can be encoded. In order of
their ids, these are the ASCII bytes that are no character of the vocabulary, the first bytes of
longer forms, the continuation bytes. Every token but a continuation byte begins a character, so the
number of characters is that of these tokens.
"""

import codecs
import json
import os
import re
import reprlib
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from chargpt.errors import RunError, TextError, UnknownCharacterError, reason_of
from chargpt.files import parse_json, read_regular, write_atomically
from chargpt.log import logger
from chargpt.text.display import REPLACEMENT, display_char, display_text, sign_or_code

N_CODE_POINTS = 0x110000
MAX_JSON_BYTES = 16_000_000  # all code points, escaped, take less
MAX_KEPT = 256  # different characters of a text that keeps all of them
MIN_FREQUENCY = 1e-5  # of a character in the vocabulary of a text with more than MAX_KEPT
MAX_MARKS = 100  # in a row, of a text that is normalised
MAX_NAMED = 5  # unknown characters that a message lists one by one
ALIKE = (  # characters written for each other; the first of each is the one of most keyboards
    ("'", *"’‘‚‛‹›"),
    ('"', *"“”„‟«»"),
    ("-", *"‐‑‒–—―−"),
    ("...", "…"),
    (" ", *"\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000"),
)
CHUNK = 1 << 18  # characters encoded, or ids decoded, at once, to bound the memory; even
FORMAT, VERSION = "chargpt-tokenizer", 1

FIRST_BYTES = bytes(range(0xC2, 0xF5))  # of the UTF-8 forms of two to four bytes
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
LONGER_FORMS = (0x80, 0x800, 0x10000)  # first code points of two, three and four bytes
# Automaton of valid UTF-8 (RFC 3629, section 4): state, first and last byte, next state. State 0 is
# between characters; 1 to 3 expect so many continuation bytes; the others restrict the second byte.
TRANSITIONS = (
    (0, 0x00, 0x7F, 0),
    (0, 0xC2, 0xDF, 1),
    (0, 0xE0, 0xE0, 4),
    (0, 0xE1, 0xEC, 2),
    (0, 0xED, 0xED, 5),
    (0, 0xEE, 0xEF, 2),
    (0, 0xF0, 0xF0, 6),
    (0, 0xF1, 0xF3, 3),
    (0, 0xF4, 0xF4, 7),
    (1, 0x80, 0xBF, 0),
    (2, 0x80, 0xBF, 1),
    (3, 0x80, 0xBF, 2),
    (4, 0xA0, 0xBF, 1),
    (5, 0x80, 0x9F, 1),
    (6, 0x90, 0xBF, 2),
    (7, 0x80, 0x8F, 2),
)

UnknownPolicy = Literal["error", "skip", "replace"]
Rare = Literal["bytes", "keep", "unknown"]
Tokens = npt.NDArray[Any]  # token ids of any integer type
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class ValidTokens(NamedTuple):
    """Which tokens may come next so that sampled bytes are valid UTF-8.

    Attributes:
        allowed: whether a token may come in a state, bool of shape (states, V).
        next_state: the state after it, (states, V); 0 at the start and between characters.
    """

    allowed: npt.NDArray[np.bool_]
    next_state: Ints


@dataclass(frozen=True, repr=False)
class CharTokenizer:
    """A vocabulary of characters, with the mapping between text and token ids.

    Attributes:
        characters: the known characters, sorted by code point; a token's id is its index here.
        has_unknown: whether the last id, `len(characters)`, stands for every other character.
        has_bytes: whether byte tokens spell every other character.
        eos_token: the character that ends every document, "" if the text is no list of them.
        has_crlf: whether the lines of the text end in CR LF.
    """

    characters: str
    has_unknown: bool = False
    has_bytes: bool = False
    eos_token: str = ""
    has_crlf: bool = False

    def __post_init__(self) -> None:
        if (
            (self.has_unknown and self.has_bytes)  # nothing is unknown to byte tokens
            or len(self.eos_token) > 1
            or self.eos_token not in self.characters
        ):
            raise ValueError("its fields contradict each other")
        codes = code_points(self.characters).astype(np.int64)
        if not codes.size or (np.diff(codes) <= 0).any() or _is_surrogate(codes).any():
            raise ValueError("its `characters` are not sorted and distinct characters")

    @cached_property
    def bytes_(self) -> bytes:
        """The bytes of the byte tokens, whose ids follow those of the characters."""
        if not self.has_bytes:
            return b""
        ascii_bytes = bytes(code for code in range(128) if chr(code) not in self.characters)
        return ascii_bytes + FIRST_BYTES + CONTINUATION_BYTES

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.characters) + self.has_unknown + len(self.bytes_)

    @property
    def first_continuation_id(self) -> int:
        """Ids from this one on are continuation bytes; without any, it is `vocab_size`."""
        return self.vocab_size - (len(CONTINUATION_BYTES) if self.has_bytes else 0)

    @cached_property
    def valid_tokens(self) -> ValidTokens:
        """Which tokens sampling may choose."""
        shape = (TRANSITIONS[-1][0] + 1 if self.has_bytes else 1, self.vocab_size)
        valid = ValidTokens(np.zeros(shape, np.bool_), np.zeros(shape, np.int64))
        valid.allowed[0, : len(self.characters)] = True
        for token, byte in enumerate(self.bytes_, len(self.characters)):
            for state, low, high, following in TRANSITIONS:
                if low <= byte <= high:
                    valid.allowed[state, token] = True
                    valid.next_state[state, token] = following
        return valid

    @property
    def eos_token_id(self) -> int:
        """Id of the EOS token."""
        return self.characters.index(self.eos_token)

    @property
    def bos_text(self) -> str:
        """What comes before the start of a text: the EOS token, else LF or CR if it is known."""
        return self.eos_token or next((end for end in "\n\r" if end in self.characters), "")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest of uint8, uint16 and uint32 that holds every id."""
        return np.min_scalar_type(self.vocab_size - 1)

    @cached_property
    def replacement_id(self) -> int:
        """Id that `replace` puts for an unknown character.

        The unknown token if there is one, else the first of U+FFFD, `?` and the space that the
        vocabulary has, else the first printable character, else one that is not the EOS token.
        """
        if self.has_unknown:
            return len(self.characters)
        printable = "".join(filter(str.isprintable, self.characters))
        others = self.characters.replace(self.eos_token, "")
        candidates = f"{REPLACEMENT}? {printable}{others}{self.eos_token}"
        return next(i for i in map(self.characters.find, candidates) if i >= 0)

    @classmethod
    def fit(cls, text: str, min_count: int = 1, rare: Rare = "bytes") -> Self:
        """Return the tokenizer of a text's characters.

        Args:
            min_count: count from which a character is in the vocabulary.
            rare: what the others become: byte tokens, or one unknown token; `keep` keeps all.

        Raises:
            TextError: all characters of the text are rarer than `min_count`, as if it is empty.
        """
        return cls.from_counts(np.bincount(code_points(text), minlength=1), min_count, rare)

    @classmethod
    def from_counts(
        cls,
        counts: npt.NDArray[Any],
        min_count: int = 1,
        rare: Rare = "bytes",
        eos_token: str = "",
        characters: str = "",
    ) -> Self:
        """Return the tokenizer of a text that has `counts[c]` characters of code point c.

        The other arguments and errors are those of `fit`, and characters that are never rare: the
        EOS token, and others whether the text has them or not.
        """
        is_present = counts > 0
        is_known = counts >= (1 if rare == "keep" else max(1, min_count))
        is_known[code_points(eos_token + characters)] = True
        known = np.flatnonzero(is_known)
        if not known.size:
            raise TextError(
                f"no character of the text occurs {min_count:,} times; lower text.min_count, or "
                "give a longer text"
            )
        if _is_surrogate(np.flatnonzero(is_present | is_known)).any():
            raise TextError(
                "the text decodes to lone surrogates (U+D800 to U+DFFF), which are not characters; "
                "name its true encoding with --encoding"
            )
        has_rare = bool((is_present & ~is_known).any())
        return cls(
            codes_to_text(known),
            has_rare and rare == "unknown",
            has_rare and rare == "bytes",
            eos_token,
            bool(counts.size > 13 and counts[10] == counts[13] > 0),
        )

    @classmethod
    def union(cls, tokenizers: Sequence["CharTokenizer"]) -> Self:
        """Return the union of vocabularies that have the same EOS token, or none.

        It has byte tokens if one of them has, and otherwise an unknown token if one of them has.
        """
        has_bytes = any(each.has_bytes for each in tokenizers)
        return cls(
            "".join(sorted({*"".join(each.characters for each in tokenizers)})),
            any(each.has_unknown for each in tokenizers) and not has_bytes,
            has_bytes,
            tokenizers[0].eos_token,
            all(each.has_crlf for each in tokenizers),
        )

    def ids_of_tokens(self, other: "CharTokenizer") -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return the id here of each token of another vocabulary of V tokens, (V,).

        Tokens are the same if their UTF-8 forms are, or if both are the unknown token. The second
        array, (V,), says which are known here; the others have the replacement id.
        """
        ids = {form: token for token, form in enumerate(self._forms)}
        found = [ids.get(form, -1) for form in other._forms]
        is_known = np.array(found) >= 0
        return np.where(is_known, found, self.replacement_id).astype(np.int64), is_known

    @property
    def _forms(self) -> list[bytes]:
        """UTF-8 form of each id's character, or its byte; b"" of the unknown token."""
        return [*self._utf8[:-1], b""] if self.has_unknown else self._utf8

    @cached_property
    def _ids(self) -> Tokens:
        """Id of each code point up to one past the last known; `_no_id` where there is none."""
        known = code_points(self.characters)
        table = np.full(int(known[-1]) + 2, self._no_id, dtype=np.min_scalar_type(self._no_id))
        table[known] = np.arange(known.size)
        return table

    @cached_property
    def _no_id(self) -> int:
        """The largest value of the smallest dtype that can hold `vocab_size`."""
        return int(np.iinfo(np.min_scalar_type(self.vocab_size)).max)

    @cached_property
    def _two_character_ids(self) -> npt.NDArray[np.uint16]:
        """Two one-byte ids for the two bytes of every 16-bit number."""
        pairs = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
        return self._ids.take(pairs, mode="clip").view(np.uint16)

    @cached_property
    def _id_to_code_point(self) -> npt.NDArray[np.uint32]:
        """Code point of each id that is no byte."""
        return code_points(self.characters + REPLACEMENT * self.has_unknown)

    @cached_property
    def _utf8(self) -> list[bytes]:
        """UTF-8 form of each id's character, or its byte."""
        characters = self.characters + REPLACEMENT * self.has_unknown
        return [*map(str.encode, characters), *(bytes([byte]) for byte in self.bytes_)]

    def encode(self, text: str, unknown: UnknownPolicy = "error") -> Tokens:
        """Return the ids of a text, shape (tokens,), in `dtype`.

        Args:
            unknown: what to do with a character outside the vocabulary that no bytes spell: `error`
                raises, `skip` leaves it out, `replace` puts `replacement_id`. Only `replace` uses
                the unknown token, so that no character is lost by default.

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
                pairs = np.frombuffer(chunk.encode("ascii") + b"\0"[: len(chunk) % 2], np.uint16)
                self._two_character_ids.take(pairs, out=out.view(np.uint16), mode="clip")
            else:
                self._ids.take(code_points(chunk), out=out[: len(chunk)], mode="clip")
        ids = ids[:size]
        if not ids.size or ids.max() < self._no_id:
            return ids.astype(self.dtype, copy=False)
        missing, codes = np.flatnonzero(ids == self._no_id), self._missing(text)
        is_unknown = self._is_unknown(codes)
        if is_unknown.any() and unknown == "error":
            raise UnknownCharacterError(self._describe_unknown(text))
        if is_unknown.any() and unknown == "skip":
            return self.encode(text.translate(dict.fromkeys(codes[is_unknown].tolist())))
        ids[missing[is_unknown]] = self.replacement_id
        rare, missing = codes[~is_unknown], missing[~is_unknown]
        n_further = np.searchsorted(LONGER_FORMS, rare, side="right")  # bytes after the first
        ids = np.insert(ids, np.repeat(missing, n_further), self._no_id)
        values = np.frombuffer(codes_to_text(rare).encode(), np.uint8)
        ids[ids == self._no_id] = self._byte_ids[values]
        return ids.astype(self.dtype, copy=False)

    @cached_property
    def _byte_ids(self) -> Tokens:
        """Id of each byte's token."""
        ids = np.zeros(256, dtype=self.dtype)
        ids[list(self.bytes_)] = np.arange(len(self.characters), self.vocab_size)
        return ids

    def _is_unknown(self, codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Return which of the code points outside the vocabulary cannot be encoded."""
        return _is_surrogate(codes) if self.has_bytes else np.ones(codes.shape, np.bool_)

    def find_unknown(self, text: str) -> str:
        """Return the characters of a text that cannot be encoded, in order."""
        missing = self._missing(text)
        return codes_to_text(missing[self._is_unknown(missing)])

    def _missing(self, text: str) -> npt.NDArray[np.uint32]:
        """Return the code points of a text that are no characters of the vocabulary, in order."""
        missing = [np.zeros(0, np.uint32)]
        for start in range(0, len(text), CHUNK):
            codes = code_points(text[start : start + CHUNK])
            missing.append(codes[self._ids.take(codes, mode="clip") == self._no_id])
        return np.concatenate(missing)

    def choose_form(self, text: str) -> str:
        """Return a text with the line ends of the training text, in the normal form that is known.

        That is NFC or NFD if the vocabulary lacks fewer of its characters. What is changed is
        logged, and which characters byte tokens spell.
        """
        known = [end for end in "\r\n" if end in self.characters]
        other = {"\r": "\n", "\n": "\r"}.get("".join(known))
        if self.has_crlf or (other and other in text):
            lines = re.sub("\r\n?|\n", "\r\n" if self.has_crlf else known[0], text)
            if lines != text:
                logger.info("the line ends were changed to those of the training text")
            text = lines
        if not (n_missing := self._missing(text).size):
            return text
        forms = {"": text, **normal_forms(text)}
        counts = {name: self._missing(form).size for name, form in forms.items()}
        if best := min(counts, key=counts.__getitem__):
            logger.warning(
                f"the text was converted to {best}: {counts[best]:,} of its characters are outside "
                f"the vocabulary, instead of {n_missing:,}"
            )
        missing = self._missing(forms[best])
        if spelled := codes_to_text(missing[~self._is_unknown(missing)]):
            logger.info(
                "rare in the training text, or not in it, and spelled as bytes: "
                f"{self.name_missing(spelled)}"
            )
        return forms[best]

    def name_missing(self, missing: str) -> str:
        """Return a few missing characters, and which of the vocabulary are written for them."""
        hints = []
        for character in dict.fromkeys(missing):
            group = next((group for group in ALIKE if character in group), ())
            if known := [each for each in group if not self._missing(each).size][:2]:
                names = " or ".join(map(display_text, known))
                hints.append(f"{names} for {sign_or_code(character)}")
        hint = f" (the vocabulary has {', '.join(hints)})" if hints else ""
        return name_characters(missing) + hint

    def _describe_unknown(self, text: str) -> str:
        """Return the error message for a text with characters outside the vocabulary."""
        found = self.find_unknown(text)
        forms = {"lower case": text.lower(), "upper case": text.upper(), **normal_forms(text)}
        known = (name for name, changed in forms.items() if not self.find_unknown(changed))
        remedy = "".join(f"convert it to {name}, or " for name in known)
        return (
            f"the text has characters outside the vocabulary: {self.name_missing(found)}; {remedy}"
            "leave them out or replace them with --unknown skip or replace (setting text.unknown)"
        )

    def token_counts(self, codes: Ints) -> Ints:
        """Return the number of tokens of code points of the training text, shape (codes,)."""
        is_spelled = self._ids.take(codes, mode="clip") == self._no_id
        is_spelled &= self.has_bytes
        n_further = np.searchsorted(LONGER_FORMS, codes, side="right")
        return np.where(is_spelled, 1 + n_further, 1)

    def count_characters(self, ids: Tokens) -> int:
        """Return the number of characters that tokens spell, which is that of their starts."""
        if not self.has_bytes:
            return ids.size
        chunks = (ids[i : i + CHUNK] for i in range(0, len(ids), CHUNK))
        return sum(int(np.count_nonzero(chunk < self.first_continuation_id)) for chunk in chunks)

    def token_text(self, token: int) -> str:
        """Return the character of a token; a byte token as `<0xE4>`, the unknown one as U+FFFD."""
        n_characters = len(self.characters)
        if self.has_bytes and token >= n_characters:
            return f"<0x{self.bytes_[token - n_characters]:02X}>"
        return self.decode([token])

    def decode_stream(self) -> Callable[[int], str]:
        """Return a function that is called with one token after another and returns its character.

        Of a character that byte tokens spell it returns "" until its last byte.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token: decoder.decode(self._utf8[token])

    def describe(self) -> str:
        """Return the number of characters, and of byte tokens if there are any, as a phrase."""
        n_bytes = f" and {len(self.bytes_)} bytes" if self.has_bytes else ""
        plural = "s" if len(self.characters) > 1 else ""
        return f"{len(self.characters):,} character{plural}{n_bytes}"

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of token ids; the unknown token and invalid UTF-8 become U+FFFD."""
        index = np.atleast_1d(np.asarray(ids))
        if index.dtype.kind not in "iu":
            index = index.astype(np.int64)
        assert index.size == 0 or (index.min() >= 0 and index.max() < self.vocab_size)
        parts = [index[i : i + CHUNK] for i in range(0, len(index), CHUNK)]
        if not self.has_bytes or index.max(initial=0) < len(self.characters):
            return "".join(codes_to_text(self._id_to_code_point[part]) for part in parts)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        spelled = (b"".join(map(self._utf8.__getitem__, part.tolist())) for part in parts)
        return "".join(map(decoder.decode, spelled)) + decoder.decode(b"", final=True)

    def to_json(self) -> str:
        """Return the vocabulary as JSON (ASCII only, one line)."""
        tree = {"format": FORMAT, "version": VERSION, "characters": self.characters}
        optional = {"bytes": self.has_bytes, "eos_token": self.eos_token, "crlf": self.has_crlf}
        given = {key: value for key, value in optional.items() if value}
        return json.dumps({**tree, "unknown": self.has_unknown, **given})

    @classmethod
    def from_json(cls, text: str, origin: str = "tokenizer") -> Self:
        """Return the tokenizer that `to_json` wrote; messages name `origin`.

        Raises:
            RunError: the text is not the JSON of a tokenizer.
        """
        try:
            tree = {"bytes": False, "eos_token": "", "crlf": False, **parse_json(text)}
            if tree.get("format") != FORMAT:
                raise ValueError("it is not a chargpt tokenizer")
            if tree.get("version") != VERSION:
                raise ValueError(f"this chargpt reads version {VERSION}, not its: update chargpt")
            names = ("characters", "unknown", "bytes", "eos_token", "crlf")
            fields: list[Any] = [*map(tree.get, names)]
            if [*map(type, fields)] != [str, bool, bool, str, bool]:
                raise ValueError("a field is missing or has another type")
            return cls(*fields)
        except ValueError as error:
            raise _unusable(origin, error) from None

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
            text = read_regular(Path(path), MAX_JSON_BYTES).decode()
        except (OSError, ValueError) as error:
            raise _unusable(path, error) from None
        return cls.from_json(text, str(path))

    def __repr__(self) -> str:
        return f"CharTokenizer({reprlib.repr(self.characters)}: {self.describe()})"


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """Return the code points of a text, shape (characters,)."""
    if 0 < len(text) < 1 << 29:  # the limit of numpy's strings, which are faster than a codec
        return np.array([text]).view(np.uint32)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def codes_to_text(codes: npt.NDArray[Any]) -> str:
    """Return the text of code points."""
    return str(np.ascontiguousarray(codes, dtype="<u4").data, "utf-32-le", "surrogatepass")


def _is_surrogate(codes: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return (codes >= 0xD800) & (codes < 0xE000)


def normal_forms(text: str) -> dict[str, str]:
    """Return a text in its normal forms, by their names; none if too many marks are in a row."""
    marks = {c for c in set(text) if unicodedata.combining(unicodedata.normalize("NFD", c)[0])}
    # sorting a row of marks takes time quadratic in its length
    if marks and re.search(f"[{re.escape(''.join(marks))}]{{{MAX_MARKS}}}", text):
        return {}
    return {
        "composed characters (NFC)": unicodedata.normalize("NFC", text),
        "decomposed characters (NFD)": unicodedata.normalize("NFD", text),
    }


def choose_min_count(counts: Ints) -> int:
    """Return `min_count` for a text with these counts of the code points."""
    present = counts[counts > 0]
    if present.size <= MAX_KEPT:
        return 1
    return max(1, round(MIN_FREQUENCY * float(present.sum())))


def _unusable(origin: str | os.PathLike[str], error: OSError | ValueError) -> RunError:
    return RunError(
        f"{origin} cannot be used as a tokenizer ({reason_of(error)}); restore it or train again"
    )


def name_characters(characters: str) -> str:
    """Return a few different characters with their code points, most frequent first."""
    names = [f"'{display_char(c)}' U+{ord(c):04X}" for c, _ in Counter(characters).most_common()]
    others = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + others
