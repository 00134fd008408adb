"""What a run is about to cost: in memory from its settings, in time from a few steps measured."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chargpt.config import Config
from chargpt.device import synchronize
from chargpt.models import count_parameters, rotary_bytes
from chargpt.models.attention import MAX_PRODUCT_ROW_BYTES

if TYPE_CHECKING:
    from chargpt.training.trainer import Trainer


@dataclass(frozen=True)
class Plan:
    """What a run is about to cost."""

    parameters: int
    steps: int
    characters: int
    epochs: float
    memory_bytes: int
    seconds: float


def memory_bytes(config: Config, vocab_size: int, sequences: int) -> int:
    """Return roughly how much memory training takes.

    Args:
        config: of the run.
        vocab_size: of its tokenizer.
        sequences: that go through the model at once, on one device.
    """
    model = config.model
    kept = 3 * vocab_size  # numbers a character that the backward pass needs again
    if model.kind == "gpt":
        kept += model.n_layer * (14 * model.n_embd + 5 * model.mlp_width)
        if model.attention == "full" and model.block_size <= MAX_PRODUCT_ROW_BYTES:
            kept += 2 * model.n_layer * model.n_head * model.block_size  # scores and weights
    masks = model.block_size**2 if model.attention == "average" else 0
    # weights, gradients, and two numbers of the optimizer's for each
    parameters = (4 + bool(config.train.ema)) * count_parameters(model, vocab_size)
    numbers = parameters + sequences * model.block_size * kept + masks
    return 4 * numbers + rotary_bytes(model)


def estimate(trainer: "Trainer", seconds: float | None = None) -> Plan:
    """Return what the whole run will cost, from `seconds` or a few steps without updating."""
    train, model = trainer.config.train, trainer.config.model
    left = train.max_steps - trainer.progress.step
    step_seconds = _seconds_a_step(trainer) if seconds is None else 0.0
    scored = min(train.evaluate_characters, len(trainer.corpus.split("val")))
    batch_characters = train.batch_size * model.block_size
    # a forward pass is about a third of a training step on as many characters
    evaluation_seconds = step_seconds * scored / batch_characters / 3 * trainer.group.size
    evaluations = left // train.evaluate_every + 2
    return Plan(
        parameters=trainer.model.parameter_count(),
        steps=left,
        characters=left * batch_characters,
        epochs=left * batch_characters / len(trainer.corpus.split("train")),
        memory_bytes=memory_bytes(
            trainer.config, trainer.corpus.tokenizer.vocab_size, trainer.learner.micro_batch
        ),
        seconds=seconds or left * step_seconds + evaluations * evaluation_seconds,
    )


def _seconds_a_step(trainer: "Trainer") -> float:
    """Return the time of a trial step, the first left out; model and state stay as they are."""
    seconds = 0.0
    for _ in range(2):
        synchronize(trainer.device)
        start = time.perf_counter()
        trainer.learner.accumulate_gradients(0)
        synchronize(trainer.device)
        seconds = time.perf_counter() - start
    trainer.model.zero_grad(set_to_none=True)
    update = 1.15  # clipping and the optimizer: 38 ms beside 175 to 280 ms for the default
    return seconds * update
