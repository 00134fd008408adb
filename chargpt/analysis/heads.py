"""What the heads of a GPT look at, on one line of text.

Shapes in this file: H = heads, T = characters.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chargpt.models.gpt import GPT
from chargpt.text.tokenizer import CharTokenizer

LINE = 40  # characters of a line that is drawn, at most
LOOKED_THROUGH = 20_000  # characters, for a line
MOST = 12  # layers, and heads of a layer, that are looked at: more would be no picture

Tokens = npt.NDArray[Any]
Weights = npt.NDArray[np.float32]


def typical_line(tokenizer: CharTokenizer, tokens: Tokens, most: int) -> Tokens:
    """Return the first line's ids that is neither short nor too long, or the text's start."""
    start = 0
    for line in tokenizer.decode(tokens[:LOOKED_THROUGH]).split("\n"):
        if max(1, most // 2) <= len(line) <= most:
            return tokens[start : start + len(line)]
        start += len(line) + 1
    return tokens[:most]


def attention_on_line(model: GPT, line: Tokens) -> list[Weights]:
    """Return the first MOST layers' weights, (H, T, T) of MOST heads each, on (T,) ids."""
    model.eval()
    tokens = torch.from_numpy(line.astype(np.int64))[None].to(model.device)  # (1, T)
    found = model.attention_weights(tokens)[:MOST]
    return [layer[0, :MOST].float().cpu().numpy() for layer in found]


def head_words(weights: Weights) -> list[str]:
    """Return in a few words where each head of (H, T, T) looks, on average over the rows."""
    places = np.arange(weights.shape[-1])
    back = places[:, None] - places[None]
    far = places[: max(1, 3 * len(places) // 4)]  # what few rows have says little
    words = []
    for number, head in enumerate(weights, 1):
        share = [float(head[back == d].mean()) for d in far]
        best = int(np.argmax(share))
        where = {0: "at itself", 1: "1 character back"}.get(best, f"{best} characters back")
        how = "looks" if share[best] >= 0.5 else "spreads, most of all"
        words.append(f"head {number} {how} {where} ({share[best]:.0%})")
    return words
