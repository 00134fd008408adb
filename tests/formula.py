"""References: logits on a text longer than the block size, and common parts of two texts."""

import copy
from unittest.mock import patch

import torch
from torch import Tensor

from chargpt.models import LanguageModel, gpt
from chargpt.models.kernels import attention_scores, rotary_tables


def first_cached_position(position: int, block_size: int) -> int:
    """Return the oldest cached position after the token at `position` is appended."""
    first = 0
    for appended in range(position + 1):
        if appended - first == block_size:
            first = appended - block_size // 2
    return first


@torch.inference_mode()
def logits_of_long_text(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Return logits (B, L, V) after each of tokens (B, L), with attention to cached tokens only.

    It is one pass over the whole text: keys and values are computed once, from the tokens that were
    cached then, and later tokens see them unchanged.
    """
    length, block = tokens.size(1), model.block_size
    positions = torch.arange(length)
    first = torch.tensor([first_cached_position(position, block) for position in range(length)])
    mask = (positions <= positions[:, None]) & (positions >= first[:, None])  # (L, L)
    if not isinstance(model, gpt.GPT):  # other models depend on the cached tokens alone
        each = [model(tokens[:, first[p] : p + 1])[:, -1] for p in range(length)]
        return torch.stack(each, dim=1)  # (B, L, V)

    def attention(q: Tensor, k: Tensor, v: Tensor, *, scaled: bool, **_: object) -> Tensor:
        scores = attention_scores(q, k, scaled=scaled).masked_fill(~mask, -torch.inf)
        return scores.softmax(dim=-1) @ v

    def average(_: Tensor) -> Tensor:
        return mask / mask.sum(dim=-1, keepdim=True)

    model = copy.deepcopy(model)
    model.block_size = length
    config = model.config
    model.cos, model.sin = rotary_tables(length, config.head_size, config.rope_theta)
    with (
        patch.object(gpt, "fast_attention", attention),
        patch.object(gpt, "uniform_weights", average),
    ):
        logits: Tensor = model(tokens)
    return logits


def longest_common(text: str, other: str) -> int:
    """Return the length of the longest part of a text that another has, by trying all."""
    parts = (text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1))
    return max((len(part) for part in parts if part in other), default=0)
