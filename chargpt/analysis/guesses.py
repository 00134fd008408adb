"""What a model expected at each place of a text, and what that says about it.

Shapes in this file: N = characters scored, V = vocabulary.
"""

import math
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chargpt.inference.evaluation import iter_log_probs
from chargpt.models import LanguageModel
from chargpt.text.tokenizer import CharTokenizer

BEST = 5  # guesses that are shown of each place
BINS = 10  # of the calibration curve

Tokens = npt.NDArray[Any]


@dataclass(frozen=True)
class Guesses:
    """What a model made of a text under the protocol `full`, as arrays of shape (N,).

    Attributes:
        came: the characters' ids.
        context: how many characters the model saw before each, 1 to T.
        nats: -ln of the share that it gave to what came.
        sure: the share that it gave to its best guess.
        right: whether that guess came.
    """

    came: npt.NDArray[np.int64]
    context: npt.NDArray[np.int64]
    nats: npt.NDArray[np.float64]
    sure: npt.NDArray[np.float64]
    right: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Group:
    """Characters that have something in common: how many, and how well they were guessed.

    Attributes:
        name: what they have in common.
        characters: how many there are.
        accuracy: share of them that was the model's best guess.
        nats: mean loss.
        sure: mean share that the model gave to its best guess.
    """

    name: str
    characters: int
    accuracy: float
    nats: float
    sure: float


@dataclass(frozen=True)
class Place:
    """One character of a passage, and the model's best guesses with their shares."""

    character: str
    bits: float
    best: tuple[tuple[str, float], ...]


def guess(model: LanguageModel, tokens: Tokens, most: int) -> Guesses:
    """Return what a model expects of a text, or of `most` characters spread evenly over it."""
    came, context, nats, sure, right = [], [], [], [], []
    model.eval()
    for shares, targets in iter_log_probs(model, tokens, "full", most):
        best, guessed = shares.max(dim=-1)  # (B, L)
        own = shares.gather(2, targets[..., None]).squeeze(2)
        came.append(targets.flatten())
        context.append(torch.arange(1, targets.size(1) + 1).repeat(len(targets)))
        nats.append(-own.flatten())
        sure.append(best.exp().flatten())
        right.append((guessed == targets).flatten())
    columns = (torch.cat(column).cpu() for column in (came, context, nats, sure, right))
    ids, seen, losses, shares_of_best, hits = columns
    return Guesses(
        ids.numpy(),
        seen.numpy(),
        losses.double().numpy(),
        shares_of_best.double().numpy(),
        hits.numpy(),
    )


def by_context(found: Guesses) -> list[Group]:
    """Return how well it did with 1, 2, 3 to 4, 5 to 8, ... characters before."""
    groups, low, high, last = [], 1, 1, int(found.context.max())
    while low <= last:
        name = f"{low}" if low == min(high, last) else f"{low} to {min(high, last)}"
        groups.append((name, (found.context >= low) & (found.context <= high)))
        low, high = high + 1, 2 * high
    return _groups(found, groups)


def by_kind(found: Guesses, tokenizer: CharTokenizer) -> list[Group]:
    """Return how well it did on each kind of character, the most frequent first."""
    kinds = np.array([*map(kind_of, tokenizer.characters), "unknown to the vocabulary"])
    names = kinds[found.came]
    groups = _groups(found, [(str(name), names == name) for name in sorted(set(names))])
    return sorted(groups, key=lambda group: -group.characters)


def kind_of(character: str) -> str:
    """Return what kind of character one is, by its Unicode category."""
    category = unicodedata.category(character)
    if character in "\n\r":
        return "line ends"
    if category in ("Ll", "Lu"):
        return {"Ll": "small letters", "Lu": "capitals"}[category]
    if category.startswith(("L", "M")):
        return "other letters"
    if category.startswith("N"):
        return "digits"
    if category.startswith("Z") or character == "\t":
        return "spaces"
    return "punctuation and signs"


def calibration(found: Guesses) -> list[Group]:
    """Return how often its best guess came, by how sure it was of it."""
    bins = np.minimum((found.sure * BINS).astype(int), BINS - 1)
    return _groups(
        found, [(f"{i / BINS:.0%} to {(i + 1) / BINS:.0%}", bins == i) for i in range(BINS)]
    )


def calibration_error(groups: Iterable[Group]) -> float:
    """Return the expected calibration error: the mean |accuracy - sureness| (Guo et al. 2017)."""
    weighed = [(g.characters, abs(g.accuracy - g.sure)) for g in groups]
    return sum(count * gap for count, gap in weighed) / sum(count for count, _ in weighed)


def _groups(found: Guesses, members: Iterable[tuple[str, npt.NDArray[np.bool_]]]) -> list[Group]:
    return [
        Group(
            name,
            int(chosen.sum()),
            float(found.right[chosen].mean()),
            float(found.nats[chosen].mean()),
            float(found.sure[chosen].mean()),
        )
        for name, chosen in members
        if chosen.any()
    ]


def passage(
    model: LanguageModel, tokenizer: CharTokenizer, tokens: Tokens, characters: int
) -> list[Place]:
    """Return the first characters of a text, but the very first, with the model's best guesses.

    Each is guessed from all before it, or from half a block at least.
    """
    places = []
    model.eval()
    for shares, targets in iter_log_probs(model, tokens[: characters + 1], "sliding"):
        own = shares.gather(2, targets[..., None]).squeeze(2)
        best = shares.topk(min(BEST, shares.size(2)), dim=-1)
        rows = zip(
            targets.flatten().tolist(),
            own.flatten().tolist(),
            best.indices.flatten(0, 1).tolist(),
            best.values.exp().flatten(0, 1).tolist(),
            strict=True,
        )
        for came, log_share, ids, values in rows:
            words = [tokenizer.decode(np.array([i])) for i in ids]
            places.append(
                Place(
                    tokenizer.decode(np.array([came])),
                    -log_share / math.log(2),
                    tuple(zip(words, values, strict=True)),
                )
            )
    return places
