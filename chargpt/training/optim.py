"""Which parameter is updated by which rule, and the optimizer's state as named tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from chargpt.config import OptimConfig
from chargpt.errors import RunError
from chargpt.training.muon import Muon

BETAS = (0.9, 0.95)


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) for all, or for all but the blocks' matrices.

    Weight decay acts on matrices only, never on gains.
    """

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self.config = config
        named = dict(model.named_parameters())
        hidden = {}
        if config.name == "muon":
            hidden = {n: p for n, p in named.items() if n.startswith("blocks.") and p.dim() == 2}
        self.muon = Muon(hidden, config.matrix_lr, config.weight_decay) if hidden else None
        self.adamw_names = {name: p for name, p in named.items() if name not in hidden}
        matrices = [p for p in self.adamw_names.values() if p.dim() >= 2]
        gains = [p for p in self.adamw_names.values() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": gains, "weight_decay": 0.0},
        ]
        fused = next(iter(named.values())).device.type in ("cpu", "cuda")
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=config.lr, betas=BETAS, fused=fused
        )

    def step(self, step: int, factor: float) -> None:
        """Do update `step` with every learning rate multiplied by `factor`."""
        for group in self.adamw.param_groups:
            group["lr"] = self.config.lr * factor
        self.adamw.step()
        if self.muon is not None:
            self.muon.step(step, factor)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return all that a later process needs to go on exactly."""
        tensors = {
            f"adamw.{key}.{name}": value
            for name, parameter in self.adamw_names.items()
            for key, value in self.adamw.state[parameter].items()
        }
        return tensors | (self.muon.state_tensors() if self.muon else {})

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave.

        Raises:
            RunError: a tensor is missing or of another shape.
        """
        fused = self.adamw.defaults["fused"]
        try:
            for name, parameter in self.adamw_names.items():
                state = {}
                for key, shape in self._state_shapes(parameter).items():
                    value = tensors[f"adamw.{key}.{name}"]
                    if value.shape != shape:
                        raise ValueError(f"adamw.{key}.{name} has shape {tuple(value.shape)}")
                    device = parameter.device if key != "step" or fused else "cpu"
                    state[key] = value.to(device, torch.float32, copy=True)
                self.adamw.state[parameter] = state
            if self.muon:
                self.muon.load_tensors(tensors)
        except (KeyError, ValueError) as error:
            cause = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise RunError(
                f"the saved optimizer does not fit this model ({cause}); "
                "resume from another checkpoint"
            ) from None

    @staticmethod
    def _state_shapes(parameter: Tensor) -> dict[str, torch.Size]:
        return {
            "step": torch.Size(()),
            "exp_avg": parameter.shape,
            "exp_avg_sq": parameter.shape,
        }
