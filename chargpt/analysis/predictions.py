"""A model's predictions on a text: accuracy, calibration, surprisal by character.

Shapes in this file: N = tokens scored, B = rows of a forward pass, L = scored tokens of a row.
"""

import math
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from chargpt.inference.evaluation import iter_log_probs
from chargpt.models import LanguageModel
from chargpt.text.tokenizer import CharTokenizer, Tokens

TOP_K = 5  # predictions kept per character
BINS = 10  # of the calibration curve


@dataclass(frozen=True)
class Predictions:
    """Predictions under the protocol `blocks`, as arrays of shape (N,)."""

    targets: npt.NDArray[np.int64]  # token ids that occurred
    context_length: npt.NDArray[np.int64]  # tokens that the model saw before each, 1 to T
    nll: npt.NDArray[np.float64]  # negative log-likelihood of the target, in nats
    confidence: npt.NDArray[np.float64]  # probability of the most likely token
    correct: npt.NDArray[np.bool_]  # whether that token was the target


@dataclass(frozen=True)
class Group:
    """Means over characters with something in common."""

    name: str  # of what they have in common
    characters: int
    accuracy: float  # fraction predicted correctly
    nats: float  # loss
    confidence: float  # probability of the most likely token


@dataclass(frozen=True)
class ScoredCharacter:
    """A character, its surprisal in bits, and the most likely characters with probabilities."""

    character: str
    bits: float
    top: tuple[tuple[str, float], ...]


def predict(model: LanguageModel, tokens: Tokens, max_tokens: int) -> Predictions:
    """Return the predictions on a text, or on `max_tokens` spread evenly over it."""
    columns: list[tuple[torch.Tensor, ...]] = []
    for log_probs, targets in iter_log_probs(model, tokens, "blocks", max_tokens):
        best, predicted = log_probs.max(dim=-1)  # (B, L)
        target_log_probs = log_probs.gather(2, targets[..., None]).squeeze(2)
        lengths = torch.arange(1, targets.size(1) + 1).repeat(len(targets))
        correct = (predicted == targets).flatten()
        nll, confidence = -target_log_probs.flatten(), best.exp().flatten()
        columns.append((targets.flatten(), lengths, nll, confidence, correct))
    targets, lengths, nll, confidence, correct = (
        torch.cat(parts).cpu() for parts in zip(*columns, strict=True)
    )
    return Predictions(
        targets.numpy(),
        lengths.numpy(),
        nll.double().numpy(),
        confidence.double().numpy(),
        correct.numpy(),
    )


def by_context(predictions: Predictions) -> list[Group]:
    """Group by context length: 1, 2, 3 to 4, 5 to 8, ... tokens."""
    length = predictions.context_length
    groups, low, high, longest = [], 1, 1, int(length.max())
    while low <= longest:
        end = min(high, longest)
        name = f"{low}" if low == end else f"{low} to {end}"
        groups.append((name, (length >= low) & (length <= high)))
        low, high = high + 1, 2 * high
    return _groups(predictions, groups)


def by_kind(predictions: Predictions, tokenizer: CharTokenizer) -> list[Group]:
    """Group by the target's kind of character, the most frequent kind first."""
    others = tokenizer.vocab_size - len(tokenizer.characters)
    name = "bytes of rare characters" if tokenizer.has_bytes else "unknown token"
    kinds = np.array([*map(kind_of, tokenizer.characters), *[name] * others])
    names = kinds[predictions.targets]
    groups = _groups(predictions, [(str(name), names == name) for name in sorted(set(names))])
    return sorted(groups, key=lambda group: -group.characters)


def kind_of(character: str) -> str:
    """Return a character's kind by its Unicode category."""
    category = unicodedata.category(character)
    if character in "\n\r":
        return "line ends"
    if category in ("Ll", "Lu"):
        return {"Ll": "lower-case letters", "Lu": "upper-case letters"}[category]
    if category.startswith("L"):
        return "letters without case (Chinese, Arabic, ...)"
    if category.startswith("M"):
        return "combining marks"
    if category.startswith("N"):
        return "digits"
    if category.startswith("Z") or character == "\t":
        return "spaces"
    return "punctuation and symbols"


def calibration(predictions: Predictions) -> list[Group]:
    """Group by confidence, in `BINS` equal bins."""
    bins = np.minimum((predictions.confidence * BINS).astype(int), BINS - 1)
    members = [(f"{i / BINS:.0%} to {(i + 1) / BINS:.0%}", bins == i) for i in range(BINS)]
    return _groups(predictions, members)


def calibration_error(groups: Iterable[Group]) -> float:
    """Return the expected calibration error, the mean |accuracy - confidence| (Guo et al. 2017)."""
    gaps = [(group.characters, abs(group.accuracy - group.confidence)) for group in groups]
    return sum(count * gap for count, gap in gaps) / sum(count for count, _ in gaps)


def _groups(
    predictions: Predictions, members: Iterable[tuple[str, npt.NDArray[np.bool_]]]
) -> list[Group]:
    return [
        Group(
            name,
            int(chosen.sum()),
            float(predictions.correct[chosen].mean()),
            float(predictions.nll[chosen].mean()),
            float(predictions.confidence[chosen].mean()),
        )
        for name, chosen in members
        if chosen.any()
    ]


def score_passage(
    model: LanguageModel, tokenizer: CharTokenizer, tokens: Tokens, n_tokens: int
) -> list[ScoredCharacter]:
    """Return the characters of a text's first tokens but the very first, with their predictions.

    The protocol is `sliding`: each has all earlier ones as context, or at least half a block. A
    character of several byte tokens has the sum of their bits and the predictions of the first.
    """
    scored = []
    bits, predicted = 0.0, tuple[tuple[str, float], ...]()
    read = tokenizer.decode_stream()
    read(int(tokens[0]))
    for log_probs, targets in iter_log_probs(model, tokens[: n_tokens + 1], "sliding"):
        target_log_probs = log_probs.gather(2, targets[..., None]).squeeze(2)
        top = log_probs.topk(min(TOP_K, log_probs.size(2)), dim=-1)
        rows = zip(
            targets.flatten().tolist(),
            target_log_probs.flatten().tolist(),
            top.indices.flatten(0, 1).tolist(),
            top.values.exp().flatten(0, 1).tolist(),
            strict=True,
        )
        for target, log_prob, ids, probs in rows:
            bits -= log_prob / math.log(2)
            predicted = predicted or tuple(zip(map(tokenizer.token_text, ids), probs, strict=True))
            if character := read(target):
                scored.append(ScoredCharacter(character, bits, predicted))
                bits, predicted = 0.0, ()
    return scored
