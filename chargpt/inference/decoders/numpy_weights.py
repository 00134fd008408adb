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
from torch import Tensor

from chargpt.models import GPT

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
    weight = {
        name.removesuffix(".weight"): tensor.float().cpu()
        for name, tensor in model.state_dict().items()
    }

    def fold_norm(norm: str, *names: str) -> Tensor:
        """Return the joint matrix after a norm with its weight folded in, (C, outputs)."""
        joint = torch.cat([weight[name] for name in names])  # (outputs, C)
        folded: Tensor = joint * (weight[norm] * root)
        return folded.mT

    layers = []
    for prefix in (f"blocks.{number}" for number in range(config.n_layer)):
        names = (f"{prefix}.attention.{name}" for name in ("query", "key", "value"))
        qkv = fold_norm(f"{prefix}.attention_norm", *names)  # (C, 3C)
        by_head = qkv.view(-1, 3, config.n_head, size)
        by_head[:, :2] = by_head[:, :2, :, pairs]
        norms = [weight[f"{prefix}.attention.{name}"] for name in ("query_norm", "key_norm")]
        qk_norm = torch.stack(norms) * size**0.5  # (2, D)
        if config.scale_attn_weights:
            qk_norm[0] *= size**-0.5
        layers.append(
            LayerWeights(
                qkv=to_numpy(qkv),
                qk_norm=to_numpy(qk_norm[:, None, pairs]),
                output=to_numpy(weight[f"{prefix}.attention.output"].mT),
                gate_up=to_numpy(
                    fold_norm(f"{prefix}.mlp_norm", f"{prefix}.mlp.gate", f"{prefix}.mlp.up")
                ),
                down=to_numpy(weight[f"{prefix}.mlp.down"].mT),
            )
        )
    return Weights(
        embedding=to_numpy(weight["embedding"]),
        layers=layers,
        head=to_numpy((weight["head"] * weight["norm"] * root).mT),
        rotary=torch.complex(model.cos.cpu(), model.sin.cpu())[:, : size // 2].numpy(),
    )


def interleave(size: int) -> Tensor:
    """Return the channels of a head with those of a rotary pair adjacent, (D,): 0, D / 2, 1, ..."""
    return torch.arange(size).view(2, -1).mT.flatten()


def to_numpy(tensor: Tensor) -> Array:
    """Return a contiguous copy."""
    array: Array = tensor.detach().float().cpu().numpy().copy(order="C")
    return array
