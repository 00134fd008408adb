"""Which parameter is updated by which rule, and the optimizer's state as named tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from chargpt.config import OptimConfig
from chargpt.errors import RunError
from chargpt.training.adamw import AdamW
from chargpt.training.muon import Muon

EMBEDDING_RATE = 4  # beside Muon: few rows of the embedding have a gradient that says much


class Optimizer:
    """AdamW for all, or Muon for the blocks' matrices and AdamW for the rest.

    Weights and state are float32; Muon's matrix products run in `dtype`.
    """

    def __init__(
        self, model: nn.Module, config: OptimConfig, dtype: torch.dtype = torch.float32
    ) -> None:
        named = dict(model.named_parameters())
        hidden = {}
        if config.name == "muon":
            hidden = {n: p for n, p in named.items() if n.startswith("blocks.") and p.dim() == 2}
        others = {name: p for name, p in named.items() if name not in hidden}
        self.rules: list[AdamW | Muon] = []
        if hidden:
            embedding = {"embedding.weight": others.pop("embedding.weight")}
            rate = EMBEDDING_RATE * config.lr
            self.rules.append(AdamW(embedding, rate, config.weight_decay))
            self.rules.append(Muon(hidden, config.matrix_lr, config.weight_decay, dtype))
        self.rules.append(AdamW(others, config.lr, config.weight_decay))

    def step(self, step: int, factor: float) -> None:
        """Do update `step` with every learning rate multiplied by `factor`."""
        for rule in self.rules:
            rule.step(step, factor)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return all that a later process needs to go on exactly."""
        return {n: tensor for rule in self.rules for n, tensor in rule.state_tensors().items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave.

        Raises:
            RunError: a tensor is missing or of another shape.
        """
        try:
            for rule in self.rules:
                rule.load_tensors(tensors)
        except (KeyError, ValueError) as error:
            cause = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise RunError(
                f"the saved optimizer does not fit this model ({cause}); "
                "resume from another checkpoint"
            ) from None
