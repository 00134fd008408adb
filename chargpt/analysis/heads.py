"""What the heads of a GPT look at, on one line of text.

Shapes in this file: H = heads, T = characters.
"""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from chargpt.models.gpt import GPT

Weights = npt.NDArray[np.float32]


def typical_line(text: str, most: int) -> str:
    """Return the first line that is neither short nor too long to draw, or the text's start."""
    lines = (line for line in text.split("\n") if most // 2 <= len(line) <= most)
    return next(lines, text[:most])


def attention_on_line(model: GPT, tokens: Tensor) -> list[Weights]:
    """Return each layer's weights, (H, T, T), on (1, T) ids."""
    model.eval()
    found = model.attention_weights(tokens.to(model.device))
    return [layer[0].float().cpu().numpy() for layer in found]


def head_words(weights: Weights) -> list[str]:
    """Return in a few words where each head of (H, T, T) looks, on average over the rows."""
    places = np.arange(weights.shape[-1])
    back = places[:, None] - places[None]
    words = []
    for number, head in enumerate(weights, 1):
        # mean weight of those so far back, over the rows that have one
        share = [float(head[back == d].mean()) for d in places]
        farthest = int(np.argmax(share))
        where = {0: "itself", 1: "1 character back"}.get(farthest, f"{farthest} characters back")
        words.append(f"head {number} mostly {where} ({share[farthest]:.0%})")
    return words
