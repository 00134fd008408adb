"""A model's predictions on a text: accuracy, calibration, surprisal by character.

Shapes in this file: N = tokens scored, B = rows of a forward pass, L = scored tokens of a row.
"""

import itertools
import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chargpt.inference.evaluation import block_windows, iter_logits, sliding_windows
from chargpt.models import LanguageModel
from chargpt.store.run import Run
from chargpt.text.corpus import Corpus
from chargpt.text.display import (
    CONTROL_NAMES,
    FORMATS,
    display_char,
    display_text,
    graphemes,
    sign_or_code,
)
from chargpt.text.source import RECORD_SEPARATOR
from chargpt.text.tokenizer import CharTokenizer, Tokens

TOP_K = 5  # predictions kept per character
BINS = 10  # of the calibration curve
PASSAGE = 800  # tokens whose surprisal is shown
N_PRECEDING = 20  # characters before one of high surprisal
N_HIGHEST = 8
SURPRISAL_BITS = (0.5, 1, 2, 3.5, 5, 7)  # from which on the colour becomes stronger
KINDS = {  # of characters, by the Unicode category or its first letter
    "Ll": "lower-case letters",
    "Lu": "upper-case letters",
    "L": "letters without case (Chinese, Arabic, ...)",
    "M": "combining marks",
    "N": "digits",
    "Z": "spaces",
}


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
    windows = block_windows(len(tokens) - 1, model.block_size, max_tokens)
    for logits, targets, first in iter_logits(model, tokens, windows, model.lookback):
        log_probs = logits.log_softmax(dim=-1)  # (B, L, V)
        best, predicted = log_probs.max(dim=-1)  # (B, L)
        nll = -log_probs.gather(2, targets[..., None]).squeeze(2)
        lengths = torch.arange(first + 1, first + targets.size(1) + 1).expand(targets.shape)
        columns.append((targets, lengths, nll, best.exp(), predicted == targets))
    joined = (torch.cat([x.flatten() for x in parts]).cpu() for parts in zip(*columns, strict=True))
    # on the CPU: not every device has float64
    return Predictions(*((x.double() if x.is_floating_point() else x).numpy() for x in joined))


def by_context(predictions: Predictions) -> list[Group]:
    """Group by context length: 1, 2, 3 to 4, 5 to 8, ... tokens."""
    length = predictions.context_length
    longest = int(length.max())
    highest = [2**k for k in range(longest.bit_length()) if 2**k < longest]
    members = {}
    for before, high in itertools.pairwise([0, *highest, longest]):
        name = str(high) if high == before + 1 else f"{before + 1} to {high}"
        members[name] = (length > before) & (length <= high)
    return _groups(predictions, members)


def by_kind(predictions: Predictions, tokenizer: CharTokenizer) -> list[Group]:
    """Group by the target's kind of character, the most frequent kind first."""
    others = tokenizer.vocab_size - len(tokenizer.characters)
    name = "bytes of rare characters" if tokenizer.has_bytes else "unknown token"
    kinds = np.array([*map(kind_of, tokenizer.characters), *[name] * others])
    names = kinds[predictions.targets]
    groups = _groups(predictions, {str(name): names == name for name in sorted(set(names))})
    return sorted(groups, key=lambda group: -group.characters)


def kind_of(character: str) -> str:
    """Return a character's kind by its Unicode category."""
    if character in "\n\r":
        return "line ends"
    if character == "\t":
        return "spaces"
    category = unicodedata.category(character)
    return KINDS.get(category) or KINDS.get(category[0], "punctuation and symbols")


def calibration(predictions: Predictions) -> list[Group]:
    """Group by confidence, in `BINS` equal bins."""
    bins = np.minimum((predictions.confidence * BINS).astype(int), BINS - 1)
    members = {f"{i / BINS:.0%} to {(i + 1) / BINS:.0%}": bins == i for i in range(BINS)}
    return _groups(predictions, members)


def calibration_error(groups: Iterable[Group]) -> float:
    """Return the expected calibration error, the mean |accuracy - confidence| (Guo et al. 2017)."""
    gaps = [(group.characters, abs(group.accuracy - group.confidence)) for group in groups]
    return sum(count * gap for count, gap in gaps) / sum(count for count, _ in gaps)


def _groups(predictions: Predictions, members: Mapping[str, npt.NDArray[np.bool_]]) -> list[Group]:
    """Return the groups that have characters; `members`: by name, which characters, (N,)."""
    columns = (predictions.correct, predictions.nll, predictions.confidence)
    return [
        Group(name, int(chosen.sum()), *(float(column[chosen].mean()) for column in columns))
        for name, chosen in members.items()
        if chosen.any()
    ]


def score_passage(
    model: LanguageModel, tokenizer: CharTokenizer, tokens: Tokens
) -> list[ScoredCharacter]:
    """Return the characters of a text's tokens but the first, with their predictions.

    The protocol is `sliding`: each has all earlier ones as context, or at least half a block. A
    character of several byte tokens has the sum of their bits and the predictions of the first.
    """
    scored = []
    bits, predicted = 0.0, tuple[tuple[str, float], ...]()
    read = tokenizer.decode_stream()
    read(int(tokens[0]))
    windows = sliding_windows(len(tokens) - 1, model.block_size)
    for logits, targets, _ in iter_logits(model, tokens, windows):
        log_probs = logits.log_softmax(dim=-1)  # (B, L, V)
        top = log_probs.topk(min(TOP_K, log_probs.size(2)), dim=-1)
        target_log_probs = log_probs.gather(2, targets[..., None]).squeeze(2)
        columns = (targets, target_log_probs, top.indices, top.values.exp())
        rows = (column.flatten(0, 1).tolist() for column in columns)
        for target, log_prob, ids, probs in zip(*rows, strict=True):
            bits -= log_prob / math.log(2)
            predicted = predicted or tuple(zip(map(tokenizer.token_text, ids), probs, strict=True))
            if character := read(target):
                scored.append(ScoredCharacter(character, bits, predicted))
                bits, predicted = 0.0, ()
    return scored


def surprisal(run: Run, corpus: Corpus) -> dict[str, Any]:
    """Return a validation passage by graphemes, and the predictions of each one's characters."""
    # the EOS token, which has no prediction, precedes the first document
    before = run.tokenizer.encode(run.tokenizer.eos_token)
    tokens = np.concatenate((before, corpus.split("val")[: PASSAGE + 1]))[: PASSAGE + 1]
    scored = score_passage(run.model, run.tokenizer, tokens)
    text = "".join(each.character for each in scored)
    spans = graphemes(text)
    return {
        "passage": [display_grapheme(text[start:end], scored[start:end]) for start, end in spans],
        "passage_length": len(scored),
        "passage_bits": sum(each.bits for each in scored) / len(scored),
        "top_k": len(scored[0].top),
        "predictions": [[describe(each) for each in scored[start:end]] for start, end in spans],
        "longest_grapheme": max(end - start for start, end in spans),
        "highest": highest_surprisal(text, scored, spans),
    }


def display_grapheme(grapheme: str, scored: list[ScoredCharacter]) -> dict[str, Any]:
    """Return how a grapheme is displayed: its colour is that of its highest surprisal."""
    bits = max(each.bits for each in scored)
    is_format = FORMATS.fullmatch(grapheme)  # which the page names
    return {
        "text": grapheme if is_format else display_text(grapheme, keep_spaces=True),
        # its visible sign stands before the line break
        "ends_line": grapheme in ("\n", RECORD_SEPARATOR),
        "level": sum(bits >= level for level in SURPRISAL_BITS),
    }


def describe(scored: ScoredCharacter) -> list[Any]:
    """Return a character's name, its surprisal in bits, and the most likely characters."""
    top = [[name_of(character), round(prob, 4)] for character, prob in scored.top]
    return [name_of(scored.character), round(scored.bits, 3), top]


def highest_surprisal(
    text: str, scored: list[ScoredCharacter], spans: list[tuple[int, int]]
) -> list[list[Any]]:
    """Return the rows of a table: context, character, bits and the most likely characters.

    `spans` are the graphemes of the text.
    """
    start_of = [start for start, end in spans for _ in range(start, end)]
    return [
        [
            display_text(text[start_of[max(0, i - N_PRECEDING)] : i]),
            display_char(scored[i].character),
            f"{scored[i].bits:.1f}",
            [(display_char(c), f"{prob:.0%}") for c, prob in scored[i].top[:3]],
        ]
        for i in sorted(range(len(scored)), key=lambda i: -scored[i].bits)[:N_HIGHEST]
    ]


def name_of(character: str) -> str:
    """Return a character as it is named in a sentence."""
    names = {" ": "space", "\n": "line end", "\t": "tab"}
    if character in names:
        return names[character]
    is_control = character < " " and character != RECORD_SEPARATOR
    return CONTROL_NAMES[ord(character)] if is_control else sign_or_code(character)
