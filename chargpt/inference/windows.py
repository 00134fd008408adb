"""Windows of tokens that the three protocols score; `evaluation.py` describes the protocols.

Shapes in this file: B = windows, T = block size, S = stride.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from chargpt.errors import ConfigError, TextError
from chargpt.text.batches import Batches
from chargpt.text.tokenizer import Tokens

Protocol = Literal["full", "sliding", "nanogpt"]
Windows = tuple[Tokens, int]  # (B, length + 1) tokens; number of targets that are context only

NANOGPT_BATCHES, NANOGPT_ROWS, NANOGPT_BLOCK = 200, 64, 256


def protocol_windows(
    tokens: Tokens,
    block_size: int,
    protocol: Protocol,
    *,
    stride: int | None = None,
    max_characters: int | None = None,
    seed: int = 1337,
) -> Iterator[Windows]:
    """Yield the windows of a protocol; its arguments are those of `evaluate_tokens`."""
    if protocol == "full":
        return full_windows(tokens, block_size, max_characters)
    if protocol == "sliding":
        return sliding_windows(tokens, block_size, stride)
    return nanogpt_windows(tokens, block_size, seed)


def full_windows(
    tokens: Tokens, block_size: int, max_characters: int | None = None
) -> Iterator[Windows]:
    """Yield non-overlapping blocks of T inputs and a shorter last one, or whole ones of them."""
    n_inputs = len(tokens) - 1
    n_blocks = n_inputs // block_size
    if max_characters is not None and max_characters < n_inputs:
        length = min(block_size, max(1, max_characters))
        count = max(1, min(n_blocks, max_characters // block_size))
        chosen = (2 * np.arange(count) + 1) * n_blocks // (2 * count)  # middles of equal parts
        yield _all_windows(tokens, length)[chosen * block_size], 0
        return
    if n_blocks:
        yield _all_windows(tokens, block_size)[::block_size], 0
    if n_inputs % block_size:
        yield tokens[None, n_blocks * block_size :], 0


def sliding_windows(
    tokens: Tokens, block_size: int, stride: int | None = None
) -> Iterator[Windows]:
    """Yield a first window scored whole, then windows whose last S are scored, then the rest.

    Raises:
        ConfigError: the stride is not between 1 and T.
    """
    if stride is None:
        stride = max(1, block_size // 2)
    if not 1 <= stride <= block_size:
        raise ConfigError(
            f"stride {stride} is not between 1 and the block size; choose 1 to {block_size}"
        )
    n_inputs = len(tokens) - 1
    yield tokens[None, : block_size + 1], 0
    if n_inputs <= block_size:
        return
    further = _all_windows(tokens, block_size)[stride::stride]
    if len(further):
        yield further, block_size - stride
    rest = (n_inputs - block_size) % stride
    if rest:
        yield tokens[None, -block_size - 1 :], block_size - rest


def nanogpt_windows(tokens: Tokens, block_size: int, seed: int) -> Iterator[Windows]:
    """Yield seeded random batches.

    Raises:
        TextError: there are not more than T characters.
    """
    if len(tokens) <= block_size:
        raise TextError(
            f"the nanogpt protocol needs {block_size + 1} characters, and there are {len(tokens)}; "
            "use the protocol full"
        )
    batches = Batches(tokens, block_size, NANOGPT_ROWS, seed)
    for index in range(NANOGPT_BATCHES):
        yield batches.at(index).numpy(), 0


def _all_windows(tokens: Tokens, length: int) -> Tokens:
    """Return a view of the window of length + 1 tokens at every offset, (offsets, length + 1)."""
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)
