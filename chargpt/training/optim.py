"""The optimizer of a model: which parameter is updated by AdamW and which by Muon."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from chargpt.config import OptimConfig
from chargpt.errors import RunError
from chargpt.training.muon import Muon

EMBEDDING_LR_FACTOR = 4  # with Muon; measured
BETAS = (0.9, 0.95)
EPSILON = 1e-8


class AdamW:
    """AdamW for named parameters; weight decay applies to matrices, not to norm weights.

    Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2) by torch's fused
    kernel. `torch.optim.AdamW` is avoided: it imports torch's compiler, which takes two seconds.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], lr: float, weight_decay: float) -> None:
        self.parameters = parameters
        self.lr = lr
        matrices = [name for name, p in parameters.items() if p.dim() >= 2]
        vectors = [name for name, p in parameters.items() if p.dim() < 2]
        groups = ((matrices, weight_decay), (vectors, 0.0))
        self.groups = [(names, decay) for names, decay in groups if names]
        self.exp_avg = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.step_tensor = torch.zeros((), device=next(iter(parameters.values())).device)

    @torch.no_grad()
    def step(self, step: int | Tensor, factor: float | Tensor) -> None:
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

    def state_dict(self) -> dict[str, Tensor]:
        """Return both moments of every parameter under its name."""
        first = {f"adamw.exp_avg.{name}": tensor for name, tensor in self.exp_avg.items()}
        return first | {f"adamw.exp_avg_sq.{name}": t for name, t in self.exp_avg_sq.items()}


class Optimizer:
    """AdamW for all parameters, or Muon for the matrices of the blocks and AdamW for the rest.

    Weights and state are float32; Muon's products run in `dtype`.
    """

    def __init__(
        self, model: nn.Module, config: OptimConfig, dtype: torch.dtype = torch.float32
    ) -> None:
        named = dict(model.named_parameters())
        hidden = {}
        if config.name == "muon":
            hidden = {n: p for n, p in named.items() if n.startswith("blocks.") and p.dim() == 2}
        others = {name: p for name, p in named.items() if name not in hidden}
        self.optimizers: list[AdamW | Muon] = []
        if hidden:
            embedding = {"embedding.weight": others.pop("embedding.weight")}
            rate = EMBEDDING_LR_FACTOR * config.lr
            self.optimizers.append(AdamW(embedding, rate, config.weight_decay))
            self.optimizers.append(Muon(hidden, config.matrix_lr, config.weight_decay, dtype))
        self.optimizers.append(AdamW(others, config.lr, config.weight_decay))

    def step(self, step: int | Tensor, factor: float | Tensor) -> None:
        """Apply update `step` with every learning rate multiplied by `factor`.

        In a CUDA graph both are tensors on the device, since numbers would be constants there.
        """
        for optimizer in self.optimizers:
            optimizer.step(step, factor)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the complete state of the optimizer."""
        return {
            n: tensor
            for optimizer in self.optimizers
            for n, tensor in optimizer.state_dict().items()
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned.

        Raises:
            RunError: a tensor is missing or has another shape.
        """
        for name, tensor in self.state_dict().items():
            if name not in tensors:
                raise _does_not_fit(f"it lacks {name!r}")
            if tensors[name].shape != tensor.shape:  # copy_ would broadcast it
                raise _does_not_fit(f"{name} has shape {tuple(tensors[name].shape)}")
            tensor.copy_(tensors[name])


def _does_not_fit(cause: str) -> RunError:
    return RunError(
        f"the saved optimizer does not fit this model ({cause}); resume from another checkpoint"
    )
