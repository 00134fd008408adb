"""The state of a training run that a checkpoint saves beside its tensors."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from chargpt.files import parse_json, to_json

MAX_NUMBER = 1e18  # above any step count or time in seconds

TYPES: dict[str, Any] = {
    "step": int,
    "seconds": int | float,
    "best_step": int | None,
    "best_nats_per_char": int | float | None,
    "evaluations_since_best": int,
    "stopped_early": bool,
    "rollbacks": int,
    "corpus": str | None,
    "text": str,
    "threads": int | None,
    "world_size": int,
    "torch": str,
}


@dataclass(frozen=True)
class RunState:
    """Progress of a training run and the environment it ran in, as saved in `state.json`.

    Attributes:
        step: optimizer steps done.
        seconds: training time, interruptions left out.
        best_step: step of the lowest validation loss; None before the first evaluation.
        best_nats_per_char: the lowest validation loss; None before the first evaluation.
        evaluations_since_best: evaluations since then.
        stopped_early: whether `train.patience` ended the run.
        rollbacks: how often the run returned to a checkpoint after a non-finite value.
        corpus: cache key of the training text.
        text: name of the training text.
        threads: CPU threads of PyTorch.
        world_size: number of ranks.
        torch: version of PyTorch.
    """

    step: int
    seconds: float = 0.0
    best_step: int | None = None
    best_nats_per_char: float | None = None
    evaluations_since_best: int = 0
    stopped_early: bool = False
    rollbacks: int = 0
    corpus: str | None = None
    text: str = ""
    threads: int | None = None
    world_size: int = 1
    torch: str = "unknown"

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Return the state that `state.json` holds. Unknown keys are ignored.

        Raises:
            ValueError: it is not JSON, a value has the wrong type, or a number is not finite.
        """
        values = parse_json(content)
        if "step" not in values:
            raise ValueError("it has no step")
        for key, value in values.items():
            if not isinstance(value, TYPES.get(key, object)):
                raise ValueError(f"{key} has the wrong type")
            if isinstance(value, int | float) and not abs(value) < MAX_NUMBER:
                raise ValueError(f"{key} is out of range")
        return cls(**{key: value for key, value in values.items() if key in TYPES})

    def to_json(self) -> bytes:
        """Return the content of `state.json`."""
        return to_json(dataclasses.asdict(self))
