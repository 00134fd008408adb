"""The optimizer of a model: which parameter is updated by AdamW and which by Muon."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from chargpt.config import OptimConfig
from chargpt.errors import RunError
from chargpt.training.adamw import AdamW
from chargpt.training.muon import Muon

EMBEDDING_LR_FACTOR = 4  # with Muon: in each step few rows of the embedding get a gradient


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

    def step(self, step: int, factor: float) -> None:
        """Apply update `step` with every learning rate multiplied by `factor`."""
        for optimizer in self.optimizers:
            optimizer.step(step, factor)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the complete state of the optimizer."""
        return {
            n: tensor
            for optimizer in self.optimizers
            for n, tensor in optimizer.state_tensors().items()
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `state_tensors` returned.

        Raises:
            RunError: a tensor is missing or has another shape.
        """
        for name, tensor in self.state_tensors().items():
            if name not in tensors:
                raise _does_not_fit(f"it lacks {name!r}")
            if tensors[name].shape != tensor.shape:  # copy_ would broadcast it
                raise _does_not_fit(f"{name} has shape {tuple(tensors[name].shape)}")
            tensor.copy_(tensors[name])


def _does_not_fit(cause: str) -> RunError:
    return RunError(
        f"the saved optimizer does not fit this model ({cause}); resume from another checkpoint"
    )
