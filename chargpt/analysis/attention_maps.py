"""Attention weights of a GPT's heads on one line of text.

Shapes in this file: H = heads, T = tokens.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from chargpt.models.gpt import GPT
from chargpt.models.gpt2 import GPT2
from chargpt.text.tokenizer import CharTokenizer, Tokens

MAX_LINE = 40  # characters of a line that is drawn
SEARCHED = 20_000  # characters that are searched for a line
MIN_VARIETY = 0.25  # different characters of a line, as a fraction of its length
MAX_MAPS = 12  # layers, and heads of a layer, that a plot has room for

Weights = npt.NDArray[np.float32]


def typical_line(tokenizer: CharTokenizer, tokens: Tokens, max_length: int) -> Tokens:
    """Return the first tokens of the first whole line that is not short, unindented and varied.

    Without one, the tokens are those of the text's start. Each is a character: byte tokens are left
    out of the start, and no line has them. The line before the first line end may be cut.
    """
    searched = tokens[:SEARCHED]
    is_character = searched < tokenizer.vocab_size - len(tokenizer.bytes_)
    is_blank = np.isin(searched, [tokenizer.characters.find(blank) for blank in " \t"])
    ends = np.flatnonzero(searched == tokenizer.characters.find("\n")).tolist()
    for before, end in itertools.pairwise(ends):
        start = before + 1 + int(np.append(is_blank[before + 1 : end], False).argmin())
        shown = slice(start, min(end, start + max_length))
        line = searched[shown]
        is_varied = len(np.unique(line)) > MIN_VARIETY * len(line)
        if len(line) >= max(1, max_length // 2) and is_varied and is_character[shown].all():
            return line
    return searched[is_character][:max_length]


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
