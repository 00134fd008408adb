"""Windows of tokens that the three protocols score; `evaluation.py` describes the protocols.

Shapes in this file: B = windows, T = block size, S = stride.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from chargpt.errors import ConfigError, TextError
from chargpt.text.batches import Batches
from chargpt.text.tokenizer import Ints, Tokens

EvaluationProtocol = Literal["blocks", "sliding", "nanogpt"]


class Windows(NamedTuple):
    """Windows of equal length."""

    rows: Tokens  # (B, lookback + length + 1)
    n_unscored: int = 0  # leading targets that are not scored
    lookback: int = 0  # tokens before the window, for n-gram models; -1 stands for none


COPIED_ROWS = 4096  # at once; windows with tokens before them overlap, so they are copied
NANOGPT_EVAL_ITERS, NANOGPT_BATCH_SIZE, NANOGPT_BLOCK = 200, 64, 256


def block_windows(
    tokens: Tokens,
    block_size: int,
    max_tokens: int | None = None,
    span: int | None = None,
    lookback: int = 0,
) -> Iterator[Windows]:
    """Yield blocks of T inputs, not overlapping, the last one shorter, or those of `even_spans`.

    Each has `lookback` tokens before it.
    """
    n_inputs = len(tokens) - 1
    starts, length = even_spans(n_inputs, span or block_size, max_tokens)
    if length < n_inputs:
        rows = gather_rows(tokens, starts - lookback, lookback + length)
        for first in range(0, length, block_size):
            yield Windows(rows[:, first : first + lookback + block_size + 1], 0, lookback)
        return
    n_blocks = n_inputs // block_size
    if n_blocks and not lookback:
        yield Windows(sliding_window_view(tokens, block_size + 1)[::block_size])
    elif n_blocks:
        starts = np.arange(n_blocks) * block_size - lookback
        for chunk in np.split(starts, range(COPIED_ROWS, n_blocks, COPIED_ROWS)):
            yield Windows(gather_rows(tokens, chunk, lookback + block_size), 0, lookback)
    if n_inputs % block_size:
        start = n_blocks * block_size - lookback
        yield Windows(gather_rows(tokens, np.array([start]), len(tokens) - 1 - start), 0, lookback)


def even_spans(n_inputs: int, span: int, max_tokens: int | None) -> tuple[Ints, int]:
    """Return the first input of each scored span, shape (spans,), and the length of the spans.

    Either one span of all inputs, or evenly spread spans of at most `span` inputs, in all
    `max_tokens` at most.
    """
    if max_tokens is None or max_tokens >= n_inputs:
        return np.zeros(1, dtype=np.int64), n_inputs
    n_spans = n_inputs // span
    count = max(1, min(n_spans, max_tokens // span))
    middles = (2 * np.arange(count) + 1) * n_spans // (2 * count)  # of equal parts
    return middles * span, min(span, max(1, max_tokens))


def sliding_windows(
    tokens: Tokens, block_size: int, stride: int | None = None
) -> Iterator[Windows]:
    """Yield a first window scored whole, then windows whose last S targets are scored.

    Remaining targets are scored in one more window, aligned to the end. S is max(1, T // 2) by
    default.

    Raises:
        ConfigError: the stride is not between 1 and T.
    """
    stride = max(1, block_size // 2) if stride is None else stride
    if not 1 <= stride <= block_size:
        raise ConfigError(
            f"stride {stride} is not between 1 and the block size; choose 1 to {block_size}"
        )
    yield Windows(tokens[None, : block_size + 1])
    n_further = len(tokens) - 1 - block_size
    if n_further >= stride:
        further = sliding_window_view(tokens, block_size + 1)[stride::stride]
        yield Windows(further, block_size - stride)
    if n_further > 0 and (rest := n_further % stride):
        yield Windows(tokens[None, -block_size - 1 :], block_size - rest)


def nanogpt_windows(tokens: Tokens, block_size: int, seed: int) -> Iterator[Windows]:
    """Yield seeded random batches.

    Raises:
        TextError: there are not more than T characters.
    """
    if len(tokens) <= block_size:
        raise TextError(
            f"the nanogpt protocol needs {block_size + 1} characters, and there are {len(tokens)}; "
            "use the protocol blocks"
        )
    batches = Batches(tokens, block_size, NANOGPT_BATCH_SIZE, seed)
    for index in range(NANOGPT_EVAL_ITERS):
        yield Windows(batches.at(index).numpy())


def gather_rows(tokens: Tokens, starts: Ints, length: int) -> Ints:
    """Return length + 1 tokens from each start, (spans, length + 1); -1 before the first token."""
    index = starts[:, None] + np.arange(length + 1)
    return np.where(index < 0, -1, tokens[index.clip(min=0)].astype(np.int64))
