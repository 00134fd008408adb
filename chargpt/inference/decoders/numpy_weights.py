"""Weights of a GPT in the layout of the numpy decoder.

- q, k and v are one matrix, gate and up another. RMSNorm weights, times sqrt(C), are folded into
  the matrix that follows, so that a norm only scales its input to length 1. QK-norm weights contain
  sqrt(D) and those of q also the attention scale 1 / sqrt(D).
- The channels (i, i + D / 2) of a rotary pair are adjacent in q and k, so that RoPE is one complex
  product.

Shapes in this file: C = n_embd, H = n_head, D = C / H, F = mlp_width, V = vocabulary size,
K = block size.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from chargpt.models import GPT
from chargpt.models.gpt import Attention
from chargpt.models.kernels import RMSNorm

Array = npt.NDArray[np.float32]


class LayerWeights(NamedTuple):
    """Weights of one layer."""

    qkv: Array  # (C, 3C)
    qk_norm: Array  # (2, 1, D)
    output: Array  # (C, C)
    gate_up: Array  # (C, 2F)
    down: Array  # (F, C)


class Weights(NamedTuple):
    """Weights of a GPT."""

    embedding: Array  # (V, C)
    layers: list[LayerWeights]
    head: Array  # (C, V)
    rotary: npt.NDArray[np.complex64]  # (K, D / 2), cos + i sin


@torch.no_grad()
def pack_weights(model: GPT) -> Weights:
    """Return a copy of a model's weights in the layout described at the top of this file."""
    config = model.config
    size, root = config.head_size, math.sqrt(config.n_embd)
    pairs = interleave(size)

    def fold_norm(norm: RMSNorm, *linears: nn.Linear) -> Tensor:
        """Return the joint matrix after a norm with its weight folded in, (C, outputs)."""
        joint = torch.cat([each.weight for each in linears])  # (outputs, C)
        return (joint * (norm.weight * root)).mT.cpu()

    layers = []
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, Attention), "see `is_supported`"
        assert mlp is not None
        qkv = fold_norm(block.attention_norm, attention.query, attention.key, attention.value)
        by_head = qkv.view(-1, 3, config.n_head, size)
        by_head[:, :2] = by_head[:, :2, :, pairs]
        norms = torch.stack((attention.query_norm.weight, attention.key_norm.weight)).cpu()
        qk_norm = norms * size**0.5  # (2, D)
        if config.scale_attn_weights:
            qk_norm[0] *= size**-0.5
        matrices = LayerWeights(
            qkv=to_numpy(qkv),
            qk_norm=to_numpy(qk_norm[:, None, pairs]),
            output=to_numpy(attention.output.weight.mT),
            gate_up=to_numpy(fold_norm(block.mlp_norm, mlp.gate, mlp.up)),
            down=to_numpy(mlp.down.weight.mT),
        )
        layers.append(matrices)
    return Weights(
        embedding=to_numpy(model.embedding.weight),
        layers=layers,
        head=to_numpy((model.head.weight * model.norm.weight * root).mT),
        rotary=torch.complex(model.cos.cpu(), model.sin.cpu())[:, : size // 2].numpy(),
    )


def interleave(size: int) -> Tensor:
    """Return the channels of a head with those of a rotary pair adjacent, (D,): 0, D / 2, 1, ..."""
    return torch.arange(size).view(2, -1).mT.flatten()


def to_numpy(tensor: Tensor) -> Array:
    """Return a contiguous copy."""
    array: Array = tensor.detach().float().cpu().numpy().copy(order="C")
    return array
