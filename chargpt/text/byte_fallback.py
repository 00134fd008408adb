"""Byte fallback: rare characters as the bytes of their UTF-8 form, as in SentencePiece.

A byte token stands for one byte. In order of their ids: the ASCII bytes that are no character of
the vocabulary, the first bytes of longer forms, the continuation bytes. Every token but
a continuation byte begins a character, so the number of characters is that of these tokens.

Shapes in this file: N = tokens, R = rare characters, V = vocabulary size.
"""

import numpy as np
import numpy.typing as npt

FIRST_BYTES = bytes(range(0xC2, 0xF5))  # of the forms of two to four bytes
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
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


def byte_values(characters: str) -> bytes:
    """Return the bytes of the byte tokens of a vocabulary, in order."""
    ascii_bytes = bytes(code for code in range(128) if chr(code) not in characters)
    return ascii_bytes + FIRST_BYTES + CONTINUATION_BYTES


def insert_bytes(
    ids: npt.NDArray[np.integer],
    positions: npt.NDArray[np.int64],
    characters: str,
    byte_ids: npt.NDArray[np.integer],
) -> npt.NDArray[np.integer]:
    """Return ids in which byte tokens replace those at some positions.

    Args:
        ids: shape (N,).
        positions: indices of the rare characters, sorted, (R,).
        characters: the R rare characters.
        byte_ids: id of each byte, (256,).
    """
    values = np.frombuffer(characters.encode(), dtype=np.uint8)
    lengths = np.diff(np.flatnonzero((values & 0xC0) != 0x80), append=values.size)  # bytes of each
    extra = lengths - 1
    result = np.insert(ids, np.repeat(positions, extra), 0)
    starts = positions + np.cumsum(extra) - extra
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    result[np.repeat(starts, lengths) + within] = byte_ids[values]
    return result


class ValidTokens:
    """Which tokens may come next so that sampled bytes are valid UTF-8.

    Attributes:
        allowed: whether a token may come in a state, bool of shape (states, V).
        next_state: the state after it, (states, V); 0 at the start and between characters.
    """

    def __init__(self, vocab_size: int, n_characters: int, bytes_: bytes) -> None:
        n_states = TRANSITIONS[-1][0] + 1 if bytes_ else 1
        self.allowed = np.zeros((n_states, vocab_size), dtype=np.bool_)
        self.next_state = np.zeros((n_states, vocab_size), dtype=np.int64)
        self.allowed[0, :n_characters] = True
        for token, byte in enumerate(bytes_, n_characters):
            for state, low, high, following in TRANSITIONS:
                if low <= byte <= high:
                    self.allowed[state, token] = True
                    self.next_state[state, token] = following
