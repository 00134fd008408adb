"""What the trainer reports after each step."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from chargpt.inference.evaluation import Evaluation


@dataclass
class StepReport:
    """The results of one step. `loss` and `grad_norm` stay on the device until they are read."""

    step: int  # number of updates done
    max_steps: int  # planned updates in all
    lr_factor: float = 0.0  # on the learning rates in this step
    loss: Tensor | None = None  # mean over the batch, in nats per character
    grad_norm: Tensor | None = None  # before clipping
    speed: float = 0.0  # characters per second of training; 0 until it is measured
    remaining_seconds: float | None = None  # until the last step
    validation: Evaluation | None = None  # of the validation split, if it was due
    is_best: bool = False  # whether that is the lowest validation loss so far
    sample: str | None = None  # generated text, if it was due
    saved: Path | None = None  # folder of the checkpoint, if one was written (not in background)
    notes: list[str] = field(default_factory=list)  # sentences for the user
