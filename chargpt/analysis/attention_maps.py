"""Attention weights of a GPT's heads on one line of text.

Shapes in this file: H = heads, T = tokens.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from chargpt.models import GPT
from chargpt.models.gpt2 import GPT2
from chargpt.text.tokenizer import CharTokenizer, Tokens

MAX_LINE = 40  # characters of a line that is drawn
SEARCHED = 20_000  # characters that are searched for a line
MIN_VARIETY = 0.25  # different characters of a line, as a fraction of its length
MAX_MAPS = 12  # layers, and heads of a layer, that a plot has room for

Weights = npt.NDArray[np.float32]


def typical_line(
    tokenizer: CharTokenizer, tokens: Tokens, max_length: int, *, starts_line: bool = False
) -> Tokens:
    """Return the first tokens of a line that is not short, unindented and varied.

    It is the first one if the tokens are known to start a line. Otherwise it is the one of median
    length, weighted by length: in prose with short lines of code, a line of prose. Without one, the
    tokens are those of the text's start. Each is a character: byte tokens are left out of the
    start, and no line has them.
    """
    searched = tokens[:SEARCHED]
    is_character = searched < tokenizer.vocab_size - len(tokenizer.bytes_)
    is_blank = np.isin(searched, [tokenizer.characters.find(blank) for blank in " \t"])
    ends = np.flatnonzero(searched == tokenizer.characters.find("\n"))
    edges = [*([-1] if starts_line else []), *ends.tolist()]
    lines: list[Tokens] = []
    for before, end in itertools.pairwise(edges):
        start = before + 1 + int(np.append(is_blank[before + 1 : end], False).argmin())
        shown = slice(start, min(end, start + max_length))
        n_shown = len(searched[shown])
        is_short = n_shown < max(1, max_length // 2)
        is_varied = len(np.unique(searched[shown])) > MIN_VARIETY * n_shown
        if not is_short and is_varied and is_character[shown].all():
            lines.append(searched[start:end])
    if not lines:
        return searched[is_character][:max_length]
    if starts_line:
        return lines[0][:max_length]
    lines.sort(key=len)
    totals = np.cumsum([len(line) for line in lines])
    return lines[int(np.searchsorted(totals, totals[-1] / 2))][:max_length]


def attention_maps(model: GPT | GPT2, line: Tokens) -> list[Weights]:
    """Return the attention weights of the first layers and heads on (T,) tokens: (H, T, T) each."""
    model.eval()
    tokens = torch.from_numpy(line.astype(np.int64))[None].to(model.device)  # (1, T)
    layers = model.attention_weights(tokens)[:MAX_MAPS]
    return [layer[0, :MAX_MAPS].float().cpu().numpy() for layer in layers]


def describe_heads(weights: Weights) -> list[str]:
    """Return a sentence per head of (H, T, T): the distance that it attends to most, on average."""
    positions = np.arange(weights.shape[-1])
    distance = positions[:, None] - positions[None]
    considered = positions[: max(1, 3 * len(positions) // 4)]  # few rows have larger distances
    sentences = []
    for number, head in enumerate(weights, 1):
        fractions = [float(head[distance == d].mean()) for d in considered]
        best = int(np.argmax(fractions))
        names = {0: "its own position", 1: "the previous character"}
        target = names.get(best, f"{best} characters back")
        verb = "attends to" if fractions[best] >= 0.5 else "is spread out, most on"
        sentences.append(f"head {number} {verb} {target} ({fractions[best]:.0%})")
    return sentences


def describe_layers(layers: Sequence[Weights]) -> list[str]:
    """Return a sentence per layer: the distance that each head attends to most."""
    return [
        f"layer {layer}: {'; '.join(describe_heads(weights))}"
        for layer, weights in enumerate(layers, 1)
    ]
