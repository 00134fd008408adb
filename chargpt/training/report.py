"""What the trainer reports after each step."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from chargpt.inference.evaluation import Evaluation


@dataclass
class StepReport:
    """The results of one step. `loss` and `grad_norm` stay on the device until they are read.

    Attributes:
        step: number of updates done.
        max_steps: planned updates in all.
        lr_factor: on the learning rates in this step.
        loss: mean over the batch, in nats per character.
        grad_norm: before clipping.
        speed: characters per second of training; 0 until it is measured.
        remaining_seconds: until the last step.
        validation: of the validation split, if it was due.
        is_best: whether that is the lowest validation loss so far.
        sample: generated text, if it was due.
        saved: folder of the checkpoint, if one was written.
        notes: sentences for the user.
    """

    step: int
    max_steps: int
    lr_factor: float = 0.0
    loss: Tensor | None = None
    grad_norm: Tensor | None = None
    speed: float = 0.0
    remaining_seconds: float | None = None
    validation: Evaluation | None = None
    is_best: bool = False
    sample: str | None = None
    saved: Path | None = None
    notes: list[str] = field(default_factory=list)
