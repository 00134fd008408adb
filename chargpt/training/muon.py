"""Muon: momentum with orthogonalised updates (Jordan et al. 2024).

Matrices of the same shape, or its transpose, are stacked and orthogonalised by batched products,
which is much faster for many small matrices.
Shapes in this file: N = stacked matrices, R x C = their shape, R <= C.
"""

import torch
from torch import Tensor, nn

# Polar Express (Amsel et al. 2025): (a, b, c) of the iterations x <- a x + b (x x^T) x +
# c (x x^T)^2 x.
COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

MOMENTUM = 0.8  # 0.95, common with far larger batches, was worse in every run


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return U V^T of the singular value decomposition U S V^T, approximately, (N, R, C).

    Args:
        matrices: float32, (N, R, C) with R <= C.
        dtype: of the products; its rounding is far below the error of the iteration.
    """
    # the iteration needs singular values of at most 1: a margin for the rounding of `dtype`
    x: Tensor = (matrices / (matrices.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)).to(dtype)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


def as_wide(matrix: Tensor) -> Tensor:
    """Return the matrix, or its transposed view if it has more rows than columns."""
    return matrix.mT if matrix.size(0) > matrix.size(1) else matrix


class Muon:
    """Muon for named matrices; the products of the orthogonalisation run in `dtype`."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        lr: float,
        weight_decay: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.parameters = parameters
        self.lr = lr
        self.weight_decay = weight_decay
        self.dtype = dtype
        shapes: dict[torch.Size, list[str]] = {}
        for name, parameter in parameters.items():
            shapes.setdefault(as_wide(parameter).shape, []).append(name)
        self.groups = [
            (names, torch.stack([torch.zeros_like(as_wide(parameters[name])) for name in names]))
            for names in shapes.values()
        ]

    @torch.no_grad()
    def step(self, step: int | Tensor, factor: float | Tensor) -> None:
        """Apply an update at `factor` times the learning rate."""
        for names, buffer in self.groups:
            weights: list[Tensor] = [self.parameters[name] for name in names]
            gradient = torch.stack([as_wide(w.grad) for w in weights if w.grad is not None])
            buffer.lerp_(gradient, 1 - MOMENTUM)
            nesterov = gradient.lerp_(buffer, MOMENTUM)
            update = orthogonalize(nesterov, self.dtype)  # (N, R, C)
            rate = self.lr * factor
            torch._foreach_mul_(weights, 1 - rate * self.weight_decay)
            if isinstance(rate, Tensor):  # `alpha` cannot be one
                update, rate = update.mul_(rate), 1.0
            for weight, change in zip(weights, update.unbind(), strict=True):
                scale = max(1, weight.size(0) / weight.size(1)) ** 0.5
                as_wide(weight).add_(change, alpha=-rate * scale)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the momentum of every matrix under its name."""
        return {
            f"muon.momentum.{name}": row if row.shape == self.parameters[name].shape else row.mT
            for names, buffer in self.groups
            for name, row in zip(names, buffer.unbind(), strict=True)
        }
