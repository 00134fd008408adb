"""How good a model is: exact losses by three protocols, and the counted baselines beside them.

`full`     non-overlapping blocks: every character but the first is scored exactly once, the short
           last block included. This is the figure to quote.
`sliding`  a window of T characters moves by S: every character but the first is scored once, and
           with at least T - S characters of context except near the start.
`nanogpt`  the mean over 200 seeded random batches of 64 x min(T, 256): that project's habit.

Losses are float32 on the device; all sums are float64 on the CPU.
Shapes in this file: B = rows of a call, T = block size, L = characters scored in a row,
V = vocabulary, N = characters scored in all.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from chargpt.errors import ConfigError, TextError
from chargpt.models import LanguageModel
from chargpt.store.run import Run
from chargpt.text.batches import Batches
from chargpt.text.corpus import Split, read_text

Protocol = Literal["full", "sliding", "nanogpt"]
Tokens = npt.NDArray[Any]
Rows = tuple[Tokens, int]  # (B, L + 1) tokens, and how many of the L are context only

LOGITS_BYTES = 64_000_000  # what one call's logits may take
CALL_CHARACTERS = 16_384  # what one call may hold, however small the vocabulary
CPU_CALL_CHARACTERS = 4_096  # on a CPU more of them do not stay in its caches
NANOGPT_BATCHES, NANOGPT_ROWS, NANOGPT_BLOCK = 200, 64, 256


@dataclass(frozen=True)
class Evaluation:
    """A loss, and all that one must know to compare it with another.

    Attributes:
        nats_per_char: mean negative log-likelihood of a character.
        accuracy: share of characters that the model thought likeliest.
        characters: how many were scored.
        standard_error: of `nats_per_char`, robust to characters of one block resembling each
            other: sqrt(sum over blocks b of (L_b - n_b * mean)^2) / N, where L_b is the summed
            loss and n_b the number of b's characters. A single block is taken character by
            character.
        protocol: `full`, `sliding` or `nanogpt`.
        split: `train`, `val` or `test`; `all` for another text.
        block_size: T, the most characters that the model looked at.
    """

    nats_per_char: float
    accuracy: float
    characters: int
    standard_error: float
    protocol: str
    split: str
    block_size: int

    @property
    def bits_per_char(self) -> float:
        """The loss in bits."""
        return self.nats_per_char / math.log(2)

    @property
    def perplexity(self) -> float:
        """How many equally likely characters would be as hard to guess; inf beyond floats."""
        return math.exp(self.nats_per_char) if self.nats_per_char < 700 else math.inf

    def as_dict(self) -> dict[str, float | int | str]:
        """Return the figures under the names that `--json` prints."""
        return {
            "nats_per_char": self.nats_per_char,
            "bits_per_char": self.bits_per_char,
            "perplexity": self.perplexity,
            "accuracy": self.accuracy,
            "characters": self.characters,
            "standard_error": self.standard_error,
            "protocol": self.protocol,
            "split": self.split,
            "block_size": self.block_size,
        }


def evaluate(
    run: Run,
    split: Split = "val",
    protocol: Protocol = "full",
    text: str | Path | None = None,
    *,
    stride: int | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 1337,
) -> Evaluation:
    """Return how well a run predicts a split of its own text, or another text as a whole.

    Args:
        run: what `load_run` gives.
        split: `train`, `val` or `test` of the run's text; not looked at if `text` is given.
        protocol: `full`, `sliding` or `nanogpt`.
        text: path of another text; its characters outside the vocabulary follow the run's
            `text.unknown`.
        stride: S of `sliding`, 1 to T; T // 2 by default.
        dtype: torch.bfloat16 computes in mixed precision; float32 otherwise.
        seed: decides the batches of `nanogpt`.

    Raises:
        TextError: the text is missing, unreadable, too short, or holds unknown characters.
        ConfigError: the stride does not fit.
    """
    settings = run.config.text
    if text is None:
        tokens = run.corpus().split(split)
    else:
        content = read_text(text, encoding=settings.encoding)
        tokens = run.tokenizer.encode(content, unknown=settings.unknown)
    return evaluate_tokens(
        run.model,
        tokens,
        protocol=protocol,
        split=split if text is None else "all",
        stride=stride,
        dtype=dtype,
        seed=seed,
    )


def evaluate_tokens(
    model: LanguageModel,
    tokens: Tokens,
    *,
    protocol: Protocol = "full",
    split: str = "val",
    stride: int | None = None,
    max_characters: int | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 1337,
) -> Evaluation:
    """Return how well a model predicts an array of token ids.

    Args:
        model: evaluated where it is, in evaluation mode; its mode is restored.
        tokens: ids of any integer type, shape (characters,).
        protocol: see the top of this file.
        split: the name that the result carries.
        stride: S of `sliding`, 1 to T; T // 2 by default.
        max_characters: with `full`, score no more than this many, in whole blocks spread evenly.
        dtype: torch.bfloat16 computes in mixed precision; float32 otherwise.
        seed: decides the batches of `nanogpt`.

    Raises:
        TextError: there are too few characters.
        ConfigError: the stride does not fit.
    """
    block = model.block_size
    if len(tokens) < 2:
        what = "text" if split == "all" else f"{split} split"
        remedy = "set text.test_fraction" if split == "test" else "give a longer text"
        raise TextError(
            f"the {what} holds {len(tokens)} of the 2 characters that scoring takes at least; "
            f"{remedy}"
        )
    if protocol == "full":
        parts = _full(tokens, block, max_characters)
    elif protocol == "sliding":
        parts = _sliding(tokens, block, max(1, block // 2) if stride is None else stride)
    else:
        block = min(block, NANOGPT_BLOCK)
        parts = _nanogpt(tokens, block, seed)
    assert max_characters is None or protocol == "full"
    nats, accuracy, characters, error = _score(model, parts, dtype)
    return Evaluation(nats, accuracy, characters, error, protocol, split, block)


def token_losses(model: LanguageModel, tokens: Tokens) -> npt.NDArray[np.float64]:
    """Return the nats of each character but the first, as `sliding` scores: (characters - 1,).

    Args:
        model: evaluated where it is, in evaluation mode; its mode is restored.
        tokens: ids of any integer type, two at least.
    """
    block, was_training = model.block_size, model.training
    model.eval()
    try:
        return np.concatenate(
            [
                losses.flatten()
                for rows, context in _sliding(tokens, block, max(1, block // 2))
                for losses, _ in _losses(model, rows, context, None)
            ]
        )
    finally:
        model.train(was_training)


def predictions(
    model: LanguageModel,
    tokens: Tokens,
    protocol: Literal["full", "sliding"] = "full",
    max_characters: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield log-probabilities, (B, L, V), and the ids that came, (B, L), a call at a time.

    Args:
        model: used where it is; put it in evaluation mode first.
        tokens: ids of any integer type, two at least.
        protocol: which windows; see the top of this file. S of `sliding` is T // 2.
        max_characters: with `full`, no more than this many, in whole blocks spread evenly.
    """
    block = model.block_size
    if protocol == "full":
        parts = _full(tokens, block, max_characters)
    else:
        parts = _sliding(tokens, block, max(1, block // 2))
    for rows, context in parts:
        for logits, targets in _logits(model, rows, context, None):
            yield logits.log_softmax(dim=-1), targets


def _windows(tokens: Tokens, length: int) -> Tokens:
    """Return every run of length + 1 tokens as a view, (starts, L + 1): nothing is copied."""
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)


def _full(tokens: Tokens, block: int, most: int | None) -> Iterator[Rows]:
    """Cut into blocks of T inputs and a shorter last; or choose some whole ones, evenly."""
    inputs = len(tokens) - 1
    whole = inputs // block
    if most is not None and most < inputs:
        length = min(block, max(1, most))
        count = max(1, min(whole, most // block))
        chosen = (2 * np.arange(count) + 1) * whole // (2 * count)  # the middles of equal shares
        yield _windows(tokens, length)[chosen * block], 0
        return
    if whole:
        yield _windows(tokens, block)[::block], 0
    if inputs % block:
        yield tokens[None, whole * block :], 0


def _sliding(tokens: Tokens, block: int, stride: int) -> Iterator[Rows]:
    """Score a first window whole, then the last S of each next one, then what is left."""
    if not 1 <= stride <= block:
        raise ConfigError(
            f"stride {stride} does not lie between 1 and the block size; choose 1 to {block}"
        )
    inputs = len(tokens) - 1
    yield tokens[None, : block + 1], 0
    if inputs <= block:
        return
    further = _windows(tokens, block)[stride::stride]
    if len(further):
        yield further, block - stride
    rest = (inputs - block) % stride
    if rest:
        yield tokens[None, -block - 1 :], block - rest


def _nanogpt(tokens: Tokens, block: int, seed: int) -> Iterator[Rows]:
    if len(tokens) <= block:
        raise TextError(
            f"the nanogpt protocol takes blocks of {block + 1} characters, and there are "
            f"{len(tokens)}; use the protocol full"
        )
    batches = Batches(tokens, block, NANOGPT_ROWS, seed)
    for index in range(NANOGPT_BATCHES):
        yield batches.at(index).numpy(), 0


def _score(
    model: LanguageModel, parts: Iterator[Rows], dtype: torch.dtype | None
) -> tuple[float, float, int, float]:
    """Return mean loss, accuracy, characters and standard error over all rows."""
    was_training = model.training
    model.eval()
    sums, sizes, hits, squares = [], [], 0.0, 0.0
    try:
        for rows, context in parts:
            for losses, right in _losses(model, rows, context, dtype):
                sums.append(losses.sum(axis=1))
                sizes.append(np.full(len(losses), losses.shape[1]))
                hits += right.sum()
                squares += (losses**2).sum()
    finally:
        model.train(was_training)
    loss, size = np.concatenate(sums), np.concatenate(sizes)
    characters = int(size.sum())
    mean = float(loss.sum()) / characters
    variance = float(((loss - size * mean) ** 2).sum())
    if len(loss) == 1:
        variance = max(0.0, squares - characters * mean**2)
    return mean, float(hits) / characters, characters, math.sqrt(variance) / characters


def _losses(
    model: LanguageModel, rows: Tokens, context: int, dtype: torch.dtype | None
) -> Iterator[npt.NDArray[np.float64]]:
    """Yield, a call at a time, losses and ones where the guess was right: (2, B, L - context)."""
    for logits, targets in _logits(model, rows, context, dtype):
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        right = logits.argmax(dim=-1) == targets
        yield torch.stack((losses.view_as(targets), right.float())).cpu().double().numpy()


@torch.inference_mode()
def _logits(
    model: LanguageModel, rows: Tokens, context: int, dtype: torch.dtype | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, a call at a time, logits and what came: (B, L - context, V), (B, L - context)."""
    device = model.device
    length = rows.shape[1] - 1
    most = CPU_CALL_CHARACTERS if device.type == "cpu" else CALL_CHARACTERS
    fitting = min(LOGITS_BYTES // (4 * length * model.vocab_size), most // length)
    step = max(1, fitting)
    for first in range(0, len(rows), step):
        part = torch.from_numpy(rows[first : first + step].astype(np.int64)).to(device)
        with _precision(device, dtype):
            logits = model(part[:, :-1])  # (B, L, V)
        yield logits[:, context:].float(), part[:, 1 + context :]


def _precision(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    if dtype is None or dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)
