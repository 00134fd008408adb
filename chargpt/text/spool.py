"""Characters to ids before all the characters are known, so that a text is read only once.

The start of the text is held back in memory, and its characters get their ids in sorted order. If
no other character ever appears, those ids are final. If one does, it gets the next id, and at the
end a second pass over the ids, far quicker than one over the text, puts them in order.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from chargpt.text.cache import TokenFile
from chargpt.text.source import Piece
from chargpt.text.statistics import count_tokens
from chargpt.text.tokenizer import CODE_POINTS, CharTokenizer, Tokens, code_points

HELD_BACK = 16 << 20  # characters
MAP_CHUNK = 1 << 19  # tokens

Progress = Callable[[str, int, int], None]


class Spool:
    """A growing text, as ids in a file."""

    def __init__(self, file: TokenFile, counting: bool) -> None:
        """Take an empty file, and whether counts are wanted, not just kinds: that takes long."""
        self.file, self.counting = file, counting
        self.held: list[Piece] | None = []
        self.held_size = 0
        self.segments: list[tuple[np.dtype[Any], int]] = []
        self.id_counts = np.zeros(0, dtype=np.int64)
        self._number(np.zeros(0, dtype=np.int64))

    @property
    def count(self) -> int:
        """Number of characters written."""
        return sum(count for _, count in self.segments)

    def _number(self, known: npt.NDArray[np.int64]) -> None:
        """Give code points the ids 0, 1, ... in the order given."""
        self.known = known
        self.dtype: np.dtype[Any] = np.min_scalar_type(known.size)
        self.missing = int(np.iinfo(self.dtype).max)  # stands for a code point without an id
        self.table: npt.NDArray[Any] = np.full(CODE_POINTS, self.missing, dtype=self.dtype)
        self._extend(known, 0)

    def _extend(self, codes: npt.NDArray[np.int64], first: int) -> None:
        self.table[codes] = np.arange(first, first + codes.size)
        self.ascii_table = self.table[:256].tobytes() if self.dtype == np.uint8 else b""
        if self.counting:
            room = min(self.missing, CODE_POINTS) + 1 - self.id_counts.size
            self.id_counts = np.pad(self.id_counts, (0, room))

    def add(self, piece: Piece) -> None:
        """Append a piece of the text."""
        if not piece:
            return
        if self.held is None:
            self._write(piece)
            return
        self.held.append(piece)
        self.held_size += len(piece)
        if self.held_size >= HELD_BACK:
            self.settle()

    def settle(self) -> None:
        """Write what was held back; to be called at the end of the text."""
        held, self.held = self.held or [], None
        for piece in held:
            self._ids(piece)
        if held:
            self._number(np.sort(self.known))
        for piece in held:
            self._write(piece)

    def _write(self, piece: Piece) -> None:
        kinds = self.known.size
        ids = self._ids(piece)
        if self.known.size > kinds:
            self.file.summing = False  # these ids will not be final
        self.file.write(ids)
        if self.counting:
            self.id_counts += count_tokens(ids, self.id_counts.size)
        if self.segments and self.segments[-1][0] == self.dtype:
            self.segments[-1] = (self.dtype, self.segments[-1][1] + ids.size)
        else:
            self.segments.append((self.dtype, ids.size))

    def _ids(self, piece: Piece) -> Tokens:
        """Return the ids of a piece, giving out new ones where needed."""
        if isinstance(piece, bytes) and self.ascii_table:
            translated = piece.translate(self.ascii_table)
            if self.missing not in translated:
                return np.frombuffer(translated, dtype=np.uint8)
        codes: npt.NDArray[Any]
        codes = np.frombuffer(piece, np.uint8) if isinstance(piece, bytes) else code_points(piece)
        ids = np.take(self.table, codes)
        if ids.max() == self.missing:
            new = np.unique(codes[ids == self.missing]).astype(np.int64)
            known = np.concatenate((self.known, new))
            if np.min_scalar_type(known.size) == self.dtype:
                self._extend(new, self.known.size)
                self.known = known
            else:
                self._number(known)
            ids = np.take(self.table, codes)
        return ids

    def counts(self) -> npt.NDArray[np.int64]:
        """Return how often each code point occurs (not counting: 1 or 0), shape (CODE_POINTS,)."""
        counts = np.zeros(CODE_POINTS, dtype=np.int64)
        counts[self.known] = self.id_counts[: self.known.size] if self.counting else 1
        return counts

    def unknown_count(self, tokenizer: CharTokenizer) -> int:
        """Return how many characters share the unknown token."""
        if not tokenizer.has_unknown:
            return 0
        return self.count - int(self.id_counts[self.table[code_points(tokenizer.characters)]].sum())

    def is_final(self, tokenizer: CharTokenizer) -> bool:
        """Return whether the file holds the tokenizer's ids as they should be."""
        return (
            self.file.summing
            and [dtype for dtype, _ in self.segments] == [tokenizer.dtype]
            and np.array_equal(self.known, code_points(tokenizer.characters))
        )

    def tokens(self, tokenizer: CharTokenizer, progress: Progress | None) -> Iterator[Tokens]:
        """Yield the tokenizer's ids of the whole text, a portion at a time."""
        final = self._final_ids(tokenizer)
        bytewise = final.tobytes() if final.dtype == np.uint8 and final.size == 256 else b""
        done, total = 0, self.count
        self.file.rewind()
        for dtype, left in self.segments:
            while left > 0:
                chunk = self.file.read(min(left, MAP_CHUNK) * dtype.itemsize)
                if dtype == np.uint8 and bytewise:
                    ids = np.frombuffer(chunk.translate(bytewise), dtype=np.uint8)
                else:
                    ids = np.take(final, np.frombuffer(chunk, dtype=dtype))
                yield ids
                left -= ids.size
                done += ids.size
                if progress:
                    progress("encoding", done, total)

    def _final_ids(self, tokenizer: CharTokenizer) -> Tokens:
        """Return the tokenizer's id for each id of the file."""
        final = np.zeros(max(256, self.known.size), dtype=tokenizer.dtype)
        if tokenizer.unknown_id is not None:
            final[:] = tokenizer.unknown_id
        kept = code_points(tokenizer.characters)
        final[self.table[kept]] = np.arange(kept.size)
        return final
