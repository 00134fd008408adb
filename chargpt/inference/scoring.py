"""How surprising each character and each line of a text is to a run.

Shapes in this file: N = characters.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chargpt.errors import TextError
from chargpt.inference.evaluation import token_losses
from chargpt.store.run import Run
from chargpt.text.tokenizer import Unknown

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """One line of a scored text.

    Attributes:
        number: from 1.
        text: without its end.
        bits_per_char: the mean over its characters, its end included.
    """

    number: int
    text: str
    bits_per_char: float


@dataclass(frozen=True)
class Scored:
    """A text, and how many bits each of its characters takes.

    Attributes:
        text: what was scored: characters that were skipped are not in it.
        bits: (N,).
    """

    text: str
    bits: Floats

    @property
    def bits_per_char(self) -> float:
        """The mean over all characters."""
        return float(self.bits.mean())

    def lines(self) -> list[Line]:
        """Return the lines that hold anything, in order."""
        found, start = [], 0
        for number, line in enumerate(self.text.split("\n"), 1):
            end = min(start + len(line) + 1, len(self.text))
            if line.strip():
                found.append(Line(number, line, float(self.bits[start:end].mean())))
            start = end
        return found


def score(run: Run, text: str, unknown: Unknown | None = None) -> Scored:
    """Return how surprising a text is, every character with at least half a block before it.

    The text counts as beginning after a line's end, where the vocabulary has one; else the first
    character is as surprising as any of the vocabulary.

    Args:
        run: what `load_run` gives.
        text: of any length.
        unknown: what to do with characters that the vocabulary lacks; the run's `text.unknown` by
            default.

    Raises:
        TextError: the text is empty, or holds unknown characters.
    """
    tokenizer = run.tokenizer
    tokens = tokenizer.encode(text, unknown=unknown or run.config.text.unknown)
    if not len(tokens):
        raise TextError("there is no character to score; give a text that holds some")
    first = np.zeros(0)
    if "\n" in tokenizer.characters:
        tokens = np.concatenate((tokenizer.encode("\n"), tokens))
    else:
        first = np.full(1, math.log(tokenizer.vocab_size))
    rest = token_losses(run.model, tokens) if len(tokens) > 1 else np.zeros(0)
    scored = tokens[len(tokens) - len(first) - len(rest) :]
    return Scored(tokenizer.decode(scored), np.concatenate((first, rest)) / math.log(2))
