"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

The update is torch's fused kernel. `torch.optim.AdamW` is avoided because it imports torch's
compiler, which takes two seconds.
"""

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)
EPSILON = 1e-8


class AdamW:
    """AdamW for named parameters; weight decay applies to matrices, not to norm weights."""

    def __init__(self, parameters: dict[str, nn.Parameter], lr: float, weight_decay: float) -> None:
        self.parameters = parameters
        self.lr = lr
        matrices = {name: p for name, p in parameters.items() if p.dim() >= 2}
        vectors = {name: p for name, p in parameters.items() if p.dim() < 2}
        self.groups = [
            (list(group), decay)
            for group, decay in ((matrices, weight_decay), (vectors, 0.0))
            if group
        ]
        self.exp_avg = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.step_tensor = torch.zeros((), device=next(iter(parameters.values())).device)

    @torch.no_grad()
    def step(self, step: int, factor: float) -> None:
        """Apply update `step` (0, 1, ...) at `factor` times the learning rate."""
        self.step_tensor.fill_(step + 1)  # for the bias correction
        for names, decay in self.groups:
            weights: list[Tensor] = [self.parameters[name] for name in names]
            torch._fused_adamw_(
                weights,
                [w.grad for w in weights if w.grad is not None],
                [self.exp_avg[name] for name in names],
                [self.exp_avg_sq[name] for name in names],
                [],
                [self.step_tensor] * len(names),
                lr=self.lr * factor,
                beta1=BETAS[0],
                beta2=BETAS[1],
                weight_decay=decay,
                eps=EPSILON,
                amsgrad=False,
                maximize=False,
            )

    def state_tensors(self) -> dict[str, Tensor]:
        """Return both moments of every parameter under its name."""
        first = {f"adamw.exp_avg.{name}": tensor for name, tensor in self.exp_avg.items()}
        return first | {f"adamw.exp_avg_sq.{name}": t for name, t in self.exp_avg_sq.items()}
