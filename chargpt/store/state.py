"""The state of a training run that a checkpoint saves beside its tensors."""

import dataclasses
from typing import Annotated, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from chargpt.files import to_json

Count = Annotated[int, Field(ge=0, lt=10**18)]
Number = Annotated[float, Field(ge=0, lt=1e18)]


@dataclass(frozen=True, config=ConfigDict(strict=True, allow_inf_nan=False))
class RunState:
    """Progress of a training run and the environment it ran in, as saved in `state.json`."""

    step: Count  # optimizer steps done
    seconds: Number = 0.0  # training time, interruptions left out
    best_step: Count | None = None  # of the lowest validation loss; 0: the weights at the start
    best_nats_per_char: Number | None = None  # the lowest validation loss
    evaluations_since_best: Count = 0
    stopped_early: bool = False  # whether `train.patience` ended the run
    rollbacks: Count = 0  # how often the run returned to a checkpoint after a non-finite value
    corpus_key: str | None = None  # cache key of the training text
    text_name: str = ""  # name of the training text
    threads: Count | None = None  # CPU threads of PyTorch
    world_size: Count = 1  # number of ranks
    torch: str = "unknown"  # version of PyTorch

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Return the state in `state.json`, ignoring unknown keys; ValueError if malformed."""
        try:
            return TypeAdapter(cls).validate_json(content)
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            name = ".".join(map(str, detail["loc"])) or "it"
            raise ValueError(f"{name}: {detail['msg'].lower()}") from None

    def to_json(self) -> bytes:
        """Return the content of `state.json`."""
        return to_json(dataclasses.asdict(self))
