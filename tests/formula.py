"""What a model of bounded memory says of a long text, by the plain formula: the others' judge."""

import copy
from unittest.mock import patch

import torch
from torch import Tensor

from chargpt.models import LanguageModel, gpt
from chargpt.models.attention import attention_scores


def held_from(place: int, block_size: int) -> int:
    """Return the first place that is still held once the character at `place` is taken in."""
    first = 0
    for taken in range(place + 1):
        if taken - first == block_size:
            first = taken - block_size // 2
    return first


@torch.inference_mode()
def logits_of_long_text(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Return (B, L, V) after each of (B, L) characters, each layer seeing only those held.

    The whole text is one pass: what was worked out of a character, from what was held then, is what
    all later ones see of it.
    """
    length, block = tokens.size(1), model.block_size
    places = torch.arange(length)
    first = torch.tensor([held_from(place, block) for place in range(length)])
    seen = (places <= places[:, None]) & (places >= first[:, None])  # (L, L)
    if not isinstance(model, gpt.GPT):  # its layers, if any, see characters alone
        each = [model(tokens[:, first[p] : p + 1])[:, -1] for p in range(length)]
        return torch.stack(each, dim=1)

    def attention(q: Tensor, k: Tensor, v: Tensor, *, scaled: bool) -> Tensor:
        scores = attention_scores(q, k, scaled=scaled).masked_fill(~seen, -torch.inf)
        return scores.softmax(dim=-1) @ v

    def average(*_: object) -> Tensor:
        return seen / seen.sum(dim=-1, keepdim=True)

    model = copy.deepcopy(model)
    model.block_size = length
    size = model.config.n_embd // model.config.n_head
    model.cos, model.sin = gpt.rotary_tables(length, size, model.config.rope_theta)
    with (
        patch.object(gpt, "fused_attention", attention),
        patch.object(gpt, "average_weights", average),
    ):
        logits: Tensor = model(tokens)
    return logits
