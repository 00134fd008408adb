"""Surprisal of each character and line of a text under a run's model, in bits.

Shapes in this file: N = characters.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from chargpt.device import require_memory
from chargpt.errors import NOT_FINITE, OperationError, TextError
from chargpt.inference.evaluation import OnProgress, iter_losses, sliding_windows
from chargpt.store.run import Run, as_run
from chargpt.text.corpus import document_ends
from chargpt.text.source import RECORD_SEPARATOR, as_read, require_text
from chargpt.text.tokenizer import Floats, Tokens, UnknownPolicy

BYTES_PER_CHARACTER = 40  # of memory, measured
LINE = re.compile("([^\n\r\x1e\u2028\u2029]*)(\r\n|[\n\r\x1e\u2028\u2029]|$)")

LossesOf = Callable[[Run, Tokens, OnProgress], Floats]  # the losses of all tokens but the first


@dataclass(frozen=True)
class Line:
    """One line of a scored text."""

    number: int  # from 1
    text: str  # without its newline
    bits_per_char: float  # mean surprisal of its characters, including the newline
    bits: float  # their sum
    n_skipped: int = 0  # its characters outside the vocabulary, which were not scored


@dataclass(frozen=True)
class Scored:
    """A text and the surprisal of its characters."""

    text: str  # as it was scored: of a list of lines, with a newline at its end
    bits: Floats  # surprisal of each character that was scored, (N,)
    protocol: str  # `sliding`, `documents` or `adaptive`
    n_unknown: int = 0  # characters outside the vocabulary, skipped or replaced
    skipped: frozenset[str] = frozenset()  # different characters outside the vocabulary

    @property
    def bits_per_char(self) -> float:
        """Mean surprisal."""
        return float(self.bits.mean())

    def lines(self) -> list[Line]:
        """Return the lines that are not blank, in order."""
        lines, start = [], 0
        for number, found in enumerate(LINE.finditer(self.text), 1):
            line, newline = found.groups()
            n_skipped = sum(each in self.skipped for each in line) if self.skipped else 0
            end = start + len(line) - n_skipped + sum(each not in self.skipped for each in newline)
            if self.protocol == "documents" and len(line) == n_skipped:  # that is no document
                end = start
            end = min(end, len(self.bits))
            if line.strip() and end > start:
                bits = self.bits[start:end]
                lines.append(Line(number, line, float(bits.mean()), float(bits.sum()), n_skipped))
            start = end
        return lines


def score(
    run: Run | str | Path,
    text: str,
    *,
    unknown: UnknownPolicy | None = None,
    adaptive_losses: LossesOf | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> Scored:
    """Return the surprisal of each character of a text, -log2 of its probability.

    The protocol is `sliding`, as if the EOS token or a newline preceded the text; if the vocabulary
    has neither, the first token has surprisal log2(V). In a run of `text.documents=lines` it is
    `documents`: each line is scored on its own, from its first character to the EOS token, and
    empty ones are none. Documents that a separator ends are marked as in training.

    Args:
        run: a run from `train` or `load_run`, or its folder.
        text: the text itself, of any length.
        unknown: policy for characters outside the vocabulary; the run's `text.unknown` by default.
        adaptive_losses: `chargpt.training.adaptive.adaptive_losses` for the protocol `adaptive`,
            with `with_mixture(run)` as the run.
        on_progress: called with the number of tokens scored, and of all.

    Raises:
        TextError: the text is empty, the path of a file, or contains unknown characters.
        DeviceError: it is too long for the memory.
        OperationError: the losses are not finite.
    """
    require_text(text)
    run = as_run(run)
    require_memory(BYTES_PER_CHARACTER * len(text), f"a text of {len(text):,} characters")
    tokenizer, settings = run.tokenizer, run.config.text
    policy = unknown or settings.unknown
    if settings.documents in ("lines", "files") or RECORD_SEPARATOR in text:
        # the text may be a part of one, or its documents are marked already
        newlines = "lf" if settings.documents == "lines" else settings.newlines
        settings = settings.model_copy(update={"documents": None, "newlines": newlines})
    text = tokenizer.choose_form(as_read(text, settings))
    tokens = tokenizer.encode(text, unknown=policy)
    losses_of: LossesOf = token_losses
    protocol = "sliding"
    if adaptive_losses:
        losses_of, protocol = adaptive_losses, "adaptive"
    elif tokenizer.eos_token == "\n":
        losses_of, protocol = partial(token_losses, by_document=True), "documents"
        if text[-1:] != "\n":
            text += "\n"
            tokens = np.append(tokens, tokenizer.encode("\n"))
        is_end = tokens == tokenizer.eos_token_id
        tokens = tokens[~(is_end & np.append(True, is_end[:-1]))]  # as in training
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
    skipped = frozenset(found if policy == "skip" else "")
    return Scored(text, bits, protocol, len(found), skipped)


def token_losses(
    run: Run,
    tokens: Tokens,
    on_progress: OnProgress = lambda *_: None,
    *,
    by_document: bool = False,
) -> Floats:
    """Return the loss of each token but the first in nats, (tokens - 1,), by `sliding`.

    By document, the tokens begin with the EOS token and end with one. The context of a document
    begins with the EOS token before it, as in sampling; one that is longer than a block is scored
    by `sliding`.
    """
    ends = np.array([1, len(tokens)])
    if by_document:
        ends = document_ends(tokens, run.tokenizer.eos_token_id)
    starts, lengths = ends[:-1] - 1, np.diff(ends)
    windows = []
    for length in np.unique(lengths).tolist():  # documents of equal length form batches
        firsts = starts[lengths == length, None]
        parts = sliding_windows(length, run.model.block_size)
        windows += [part._replace(starts=(firsts + part.starts).ravel()) for part in parts]
    scored = [
        (starts[:, None] + np.arange(n_unscored, length)).ravel()
        for starts, length, n_unscored in windows
    ]
    order, done = np.concatenate(scored), 0  # each token is scored once
    found = np.empty(len(order))
    for losses, _, _ in iter_losses(run.model, tokens, windows):
        found[order[done : done + losses.size]] = losses.ravel()
        done += losses.size
        on_progress(done, len(found))
    return found
