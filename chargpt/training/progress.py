"""What a step has to tell, and how far a run is."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from chargpt.inference.evaluation import Evaluation
from chargpt.store.state import RunState


@dataclass
class Report:
    """What one step did. `loss` and `grad_norm` stay on the device until someone looks."""

    step: int
    rate: float = 0.0
    loss: Tensor | None = None
    grad_norm: Tensor | None = None
    validation: Evaluation | None = None
    is_best: bool = False
    sample: str | None = None
    saved: Path | None = None
    note: str | None = None  # what the user should hear of


@dataclass
class Progress:
    """How far a run is: what a checkpoint's state keeps beside the tensors."""

    step: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_loss: float = math.inf
    evaluations_since_best: int = 0
    stopped_early: bool = False
    rollbacks: int = 0
    pending: list[tuple[int, float, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, state: RunState) -> Self:
        """Return the progress that a checkpoint's state tells of. What stopped early may go on."""
        best = state.best_nats_per_char
        return cls(
            step=state.step,
            seconds=float(state.seconds),
            best_step=state.best_step,
            best_loss=math.inf if best is None else float(best),
            evaluations_since_best=state.evaluations_since_best,
            rollbacks=state.rollbacks,
        )

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint's state keeps of it."""
        return {
            "step": self.step,
            "seconds": round(self.seconds, 3),
            "best_step": self.best_step,
            "best_nats_per_char": self.best_loss if self.best_step is not None else None,
            "evaluations_since_best": self.evaluations_since_best,
            "stopped_early": self.stopped_early,
            "rollbacks": self.rollbacks,
        }

    def note(self, step: int, loss: float, patience: int | None) -> bool:
        """Note a validation loss, and whether patience ran out; return whether it is the best."""
        if loss < self.best_loss:
            self.best_loss, self.best_step = loss, step
            self.evaluations_since_best = 0
            return True
        self.evaluations_since_best += 1
        self.stopped_early = patience is not None and self.evaluations_since_best >= patience
        return False
