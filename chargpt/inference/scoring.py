"""Surprisal of each character and line of a text under a run's model, in bits.

Shapes in this file: N = characters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from chargpt.device import require_memory
from chargpt.errors import NOT_FINITE, OperationError, TextError
from chargpt.inference.evaluation import OnProgress, token_losses
from chargpt.store.run import Run
from chargpt.text.tokenizer import Floats, Tokens, UnknownPolicy

BYTES_PER_CHARACTER = 40  # of memory, measured


@dataclass(frozen=True)
class Line:
    """One line of a scored text."""

    number: int  # from 1
    text: str  # without its newline
    bits_per_char: float  # mean surprisal of its characters, including the newline


@dataclass(frozen=True)
class Scored:
    """A text and the surprisal of its characters."""

    text: str
    bits: Floats  # surprisal of each character that was not skipped, (N,)
    n_unknown: int = 0  # characters outside the vocabulary, skipped or replaced
    skipped: frozenset[str] = frozenset()  # different characters outside the vocabulary

    @property
    def bits_per_char(self) -> float:
        """Mean surprisal."""
        return float(self.bits.mean())

    def lines(self) -> list[Line]:
        """Return the lines that are not blank, in order."""
        lines, start = [], 0
        n_newline = int("\n" not in self.skipped)
        for number, line in enumerate(self.text.split("\n"), 1):
            n_skipped = sum(each in self.skipped for each in line) if self.skipped else 0
            end = min(start + len(line) - n_skipped + n_newline, len(self.bits))
            if line.strip() and end > start:
                lines.append(Line(number, line, float(self.bits[start:end].mean())))
            start = end
        return lines


def score(
    run: Run,
    text: str,
    unknown: UnknownPolicy | None = None,
    on_progress: OnProgress = lambda *_: None,
    losses_of: Callable[[Run, Tokens, OnProgress], Floats] = token_losses,
) -> Scored:
    """Return the surprisal of each character, -log2 of its probability.

    The text is scored as if the EOS token or a newline preceded it. If the vocabulary has
    neither, the first token has surprisal log2(V).

    Args:
        run: a run from `load_run`.
        text: of any length.
        unknown: policy for characters outside the vocabulary; the run's `text.unknown` by default.
        on_progress: called with the number of tokens scored, and of all.
        losses_of: returns the loss of each token but the first in nats; by `sliding` evaluation by
            default.

    Raises:
        TextError: the text is empty, or contains unknown characters.
        DeviceError: it is too long for the memory.
        OperationError: the losses are not finite.
    """
    require_memory(BYTES_PER_CHARACTER * len(text), f"a text of {len(text):,} characters")
    tokenizer = run.tokenizer
    policy = unknown or run.config.text.unknown
    tokens = tokenizer.encode(text, unknown=policy)
    if not len(tokens):
        raise TextError("there is no character to score; give a longer text")
    first = np.zeros(0)
    if tokenizer.bos_text:
        tokens = np.concatenate((tokenizer.encode(tokenizer.bos_text), tokens))
    else:
        first = np.full(1, math.log(tokenizer.vocab_size))
    rest = losses_of(run, tokens, on_progress) if len(tokens) > 1 else np.zeros(0)
    scored = tokens[len(tokens) - len(first) - len(rest) :]
    starts = np.flatnonzero(scored < tokenizer.first_continuation_id)
    bits = np.add.reduceat(np.concatenate((first, rest)), starts) / math.log(2)
    if not np.isfinite(bits).all():
        raise OperationError(NOT_FINITE)
    found = tokenizer.find_unknown(text)
    return Scored(text, bits, len(found), frozenset(found if policy == "skip" else ""))
