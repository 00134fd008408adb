"""Three equivalent ways to average the past, which lead up to attention.

Shapes in this file: B = batch, T = positions, C = channels.
"""

import torch
from torch import Tensor

from chargpt.models.kernels import causal_mask, explicit_attention, uniform_weights


def average_by_loop(x: Tensor) -> Tensor:
    """Return the mean of each position and all earlier ones, (B, T, C), position by position."""
    return torch.stack([x[:, : t + 1].mean(dim=1) for t in range(x.size(1))], dim=1)  # (B, T, C)


def average_by_matrix(x: Tensor) -> Tensor:
    """Compute `average_by_loop` as a product with a normalised lower triangle of ones."""
    mask = causal_mask(x.size(1), x.size(1), x.device)  # (T, T)
    return uniform_weights(mask).to(x.dtype) @ x


def average_by_softmax(x: Tensor) -> Tensor:
    """Compute `average_by_loop` as attention with equal scores."""
    zeros = x.new_zeros(1, x.size(1), 1)  # (1, T, 1)
    output, _ = explicit_attention(zeros, zeros, x)
    return output
