"""AdamW: Adam with weight decay apart from the gradient (Loshchilov and Hutter 2019, algorithm 2).

The arithmetic is torch's own fused kernel. `torch.optim.AdamW` around it imports torch's compiler,
which takes two seconds of every start.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)
EPSILON = 1e-8


class AdamW:
    """The optimizer of all that Muon does not take. Weight decay acts on matrices, never gains."""

    def __init__(self, parameters: dict[str, nn.Parameter], lr: float, weight_decay: float) -> None:
        self.parameters = parameters
        self.lr = lr
        matrices = {name: p for name, p in parameters.items() if p.dim() >= 2}
        gains = {name: p for name, p in parameters.items() if p.dim() < 2}
        self.groups = [
            (list(group), decay)
            for group, decay in ((matrices, weight_decay), (gains, 0.0))
            if group
        ]
        self.means = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.squares = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.count = torch.zeros((), device=next(iter(parameters.values())).device)

    @torch.no_grad()
    def step(self, step: int, factor: float) -> None:
        """Do update `step` (0, 1, ...) at `factor` times the learning rate."""
        self.count.fill_(step + 1)  # what the running means are corrected by
        for names, decay in self.groups:
            weights: list[Tensor] = [self.parameters[name] for name in names]
            torch._fused_adamw_(
                weights,
                [w.grad for w in weights if w.grad is not None],
                [self.means[name] for name in names],
                [self.squares[name] for name in names],
                [],
                [self.count] * len(names),
                lr=self.lr * factor,
                beta1=BETAS[0],
                beta2=BETAS[1],
                weight_decay=decay,
                eps=EPSILON,
                amsgrad=False,
                maximize=False,
            )

    def state_tensors(self) -> dict[str, Tensor]:
        """Return both running means of every parameter under its name."""
        means = {f"adamw.exp_avg.{name}": tensor for name, tensor in self.means.items()}
        return means | {f"adamw.exp_avg_sq.{name}": t for name, t in self.squares.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave; KeyError or ValueError if it does not fit."""
        copy_state(self.state_tensors(), tensors)


def copy_state(state: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy every tensor of an optimizer's state from the saved one of its name.

    Raises:
        KeyError: one is missing.
        ValueError: one is of another shape.
    """
    for name, tensor in state.items():
        if saved[name].shape != tensor.shape:  # copy_ would stretch it to fit
            raise ValueError(f"{name} has shape {tuple(saved[name].shape)}")
        tensor.copy_(saved[name])
