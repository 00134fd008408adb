"""What of a text stands word for word in the training text: copied, or new?

Stretches of one length are found by their hash. With prefix sums P_i = sum over j < i of (t_j + 1)
B^j, all modulo 2^64, the hash of the n characters from i on is (P_{i+n} - P_i) B^{-i} (Karp and
Rabin 1987, with prefix sums in place of rolling): a few operations on arrays, for any n. So nothing
has to be indexed: the training text is gone through once, in parts, for all lengths together, and
what it holds of the texts is looked up in a small table.
Shapes in this file: N = characters of the training text, M = characters of all texts together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from chargpt.text.corpus import Corpus

LENGTHS = (4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
LEAST = 20  # characters of a stretch that counts as copied; shorter ones are common phrases
PART = 2**20  # characters of the training text at a time
TABLE_BITS = 22  # of a hash, by which nearly all that is not wanted is passed over
MOST_PLACES = 32  # of one stretch that are remembered; a run of spaces may stand in a million
BASE = 0x9E3779B97F4A7C15  # any odd number has an inverse

Tokens = npt.NDArray[Any]
Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Copy:
    """A stretch of a text that stands in the training text as well.

    Attributes:
        start: where it begins in the text.
        length: in characters.
        place: where it begins in the training text.
    """

    start: int
    length: int
    place: int


@dataclass(frozen=True)
class Memory:
    """What one text has of the training text.

    Attributes:
        longest: its longest stretch that stands there too, of LEAST characters or more. Of one
            that stands there very often, the first places alone are followed to their ends.
        copied: what is covered by such stretches, as (start, end), in order, apart.
        novel: of each length, the share of the text's stretches that do not stand there.
    """

    longest: Copy | None
    copied: list[tuple[int, int]]
    novel: dict[int, float]


@dataclass(frozen=True)
class Check:
    """What the texts of a run have of its training text, and what text that it never saw has.

    Attributes:
        texts: one each.
        held_out: as many stretches of the validation part, as long as the texts.
        training: the training part's ids.
    """

    texts: list[Memory]
    held_out: list[Memory]
    training: Tokens

    def novel(self) -> list[tuple[int, float, float]]:
        """Return (length, share that is novel in the texts, and in text never seen)."""
        rows = []
        for length in self.texts[0].novel if self.texts else ():
            ours, theirs = (
                [memory.novel[length] for memory in memories if length in memory.novel]
                for memories in (self.texts, self.held_out)
            )
            if ours and theirs:
                rows.append((length, sum(ours) / len(ours), sum(theirs) / len(theirs)))
        return rows


def check(
    corpus: Corpus, texts: Sequence[str], watch: Callable[[int, int], object] = lambda *_: None
) -> Check:
    """Return what texts that a run has written have of the text that it was trained on.

    Args:
        corpus: that text.
        texts: of its vocabulary.
        watch: told how many characters of the training text are done, and of how many.
    """
    training, unseen = corpus.split("train"), corpus.split("val")
    written = [corpus.tokenizer.encode(text, unknown="replace") for text in texts]
    held_out = []
    for number, tokens in enumerate(written):
        start = (len(unseen) - len(tokens)) * number // max(1, len(written) - 1)
        held_out.append(unseen[max(0, start) :][: len(tokens)])
    found = memorization(training, [*written, *held_out], lambda n: watch(n, len(training)))
    return Check(found[: len(written)], found[len(written) :], training)


def memorization(
    training: Tokens, texts: Sequence[Tokens], watch: Callable[[int], object] = lambda _: None
) -> list[Memory]:
    """Return for each text what it has of the training text, in one pass over that.

    Args:
        training: ids of any integer type, (N,); may be mapped from a file.
        texts: ids of the same vocabulary.
        watch: told how many of the N characters are done.
    """
    longest = max((len(text) for text in texts), default=0)
    lengths = [n for n in LENGTHS if n <= min(longest, len(training))]
    wanted = [_Wanted(texts, n) for n in lengths]
    powers, inverses = _powers(PART + (lengths[-1] if lengths else 0))
    for first in range(0, len(training) if lengths else 0, PART):
        part = training[first : first + PART + lengths[-1] - 1]
        sums = _prefix_sums(part, powers)
        for each in wanted:
            # stretches that begin in the next part are that part's
            count = min(PART, len(part) - each.length + 1)
            if count > 0:
                each.look_in(sums, inverses, first, count)
        watch(min(first + PART, len(training)))
    return [_judge(training, text, number, wanted) for number, text in enumerate(texts)]


class _Wanted:
    """All stretches of one length that the texts hold, and where the training text has them."""

    def __init__(self, texts: Sequence[Tokens], length: int) -> None:
        self.length = length
        hashes = [_hashes_of(text, length) for text in texts]
        self.ends = np.cumsum([len(each) for each in hashes])
        self.hashes, self.kinds = np.unique(np.concatenate(hashes), return_inverse=True)
        self.found = np.zeros(len(self.hashes), dtype=bool)
        self.places: list[tuple[Places, Places]] = []  # (kinds, places) of each part
        self.remembered = np.zeros(len(self.hashes), dtype=np.int64)
        self.table = np.zeros(2**TABLE_BITS, dtype=bool)
        self.table[self.hashes >> np.uint64(64 - TABLE_BITS)] = True

    def look_in(self, sums: Hashes, inverses: Hashes, first: int, count: int) -> None:
        """Look at the `count` stretches that begin in a part of the training text."""
        n = self.length
        hashes = (sums[n : n + count] - sums[:count]) * inverses[:count]
        near = np.flatnonzero(self.table[hashes >> np.uint64(64 - TABLE_BITS)])
        kinds = np.searchsorted(self.hashes, hashes[near]).clip(max=len(self.hashes) - 1)
        right = self.hashes[kinds] == hashes[near]
        kinds, near = kinds[right], near[right]
        self.found[kinds] = True
        if n >= LEAST:
            self._remember(kinds, near + first)

    def _remember(self, kinds: Places, places: Places) -> None:
        order = np.argsort(kinds, kind="stable")
        kinds, places = kinds[order], places[order]
        earlier = np.arange(len(kinds)) - np.searchsorted(kinds, kinds)  # of its kind, in this part
        few = self.remembered[kinds] + earlier < MOST_PLACES
        self.places.append((kinds[few], places[few]))
        self.remembered += np.bincount(kinds, minlength=len(self.hashes))

    def present(self, number: int) -> npt.NDArray[np.bool_]:
        """Return for each stretch of one text whether the training text has it."""
        start = self.ends[number - 1] if number else 0
        return self.found[self.kinds[start : self.ends[number]]]

    def occurrences(self, number: int) -> tuple[Places, Places]:
        """Return starts in one text and places in the training text of the stretches found."""
        start = self.ends[number - 1] if number else 0
        kinds = self.kinds[start : self.ends[number]]
        if not self.places:
            return kinds[:0], kinds[:0]
        place_kinds = np.concatenate([kinds for kinds, _ in self.places])
        places = np.concatenate([places for _, places in self.places])
        order = np.argsort(place_kinds, kind="stable")
        place_kinds, places = place_kinds[order], places[order]
        low = np.searchsorted(place_kinds, kinds, side="left")
        counts = np.searchsorted(place_kinds, kinds, side="right") - low
        starts = np.repeat(np.arange(len(kinds)), counts)
        return starts, places[
            np.arange(len(starts)) + np.repeat(low - counts.cumsum() + counts, counts)
        ]


def _judge(training: Tokens, text: Tokens, number: int, wanted: list[_Wanted]) -> Memory:
    present = {each.length: each.present(number) for each in wanted if each.length <= len(text)}
    novel = {n: 1 - float(found.mean()) for n, found in present.items()}
    covered = np.zeros(len(text) + 2, dtype=bool)
    for start in np.flatnonzero(present.get(LEAST, np.zeros(0, dtype=bool))).tolist():
        covered[start + 1 : start + 1 + LEAST] = True
    edges = np.flatnonzero(covered[1:] != covered[:-1]).tolist()
    copied = list(zip(edges[::2], edges[1::2], strict=True))
    longest = None
    for each in reversed(wanted):
        if longest is None:
            longest = _longest(training, text, *each.occurrences(number), each.length)
    return Memory(longest, copied, novel)


def _longest(
    training: Tokens, text: Tokens, starts: Places, places: Places, length: int
) -> Copy | None:
    """Return the longest of the copies that begin there and agree for `length` characters."""
    best_starts, best_places = starts, places
    while len(starts):
        best_starts, best_places = starts, places
        inside = (starts + length < len(text)) & (places + length < len(training))
        starts, places = starts[inside], places[inside]
        same = text[starts + length] == training[places + length]
        starts, places = starts[same], places[same]
        length += len(starts) > 0
    for start, place in zip(best_starts.tolist(), best_places.tolist(), strict=True):
        if np.array_equal(text[start : start + length], training[place : place + length]):
            return Copy(start, length, place)
    return None  # equal hashes of unequal stretches


def _powers(count: int) -> tuple[Hashes, Hashes]:
    """Return the powers of the base, and of its inverse, modulo 2^64."""
    both = []
    for base in (BASE, pow(BASE, -1, 2**64)):
        steps = np.full(count, base, dtype=np.uint64)
        steps[0] = 1
        both.append(np.multiply.accumulate(steps))
    return both[0], both[1]


def _prefix_sums(tokens: Tokens, powers: Hashes) -> Hashes:
    terms = (tokens.astype(np.uint64) + np.uint64(1)) * powers[: len(tokens)]
    return np.concatenate((np.zeros(1, dtype=np.uint64), np.add.accumulate(terms)))


def _hashes_of(text: Tokens, length: int) -> Hashes:
    """Return the hash of every stretch of a text."""
    if len(text) < length:
        return np.zeros(0, dtype=np.uint64)
    powers, inverses = _powers(len(text))
    sums = _prefix_sums(text, powers)
    count = len(text) - length + 1
    return (sums[length:] - sums[:-length]) * inverses[:count]
