"""What a run is about to cost, from a few steps measured on this machine."""

import time
from dataclasses import dataclass

from chargpt.device import synchronize
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


def estimate(trainer: Trainer, seconds: float | None = None) -> Plan:
    """Return what the whole run will cost, from `seconds` or a few steps without updating."""
    train, model = trainer.config.train, trainer.config.model
    left = train.max_steps - trainer.progress.step
    step_seconds = _seconds_a_step(trainer) if seconds is None else 0.0
    scored = min(train.evaluate_characters, len(trainer.corpus.split("val")))
    batch_characters = train.batch_size * model.block_size
    # a forward pass is about a third of a training step on as many characters
    evaluation_seconds = step_seconds * scored / batch_characters / 3 * trainer.world.size
    evaluations = left // train.evaluate_every + 2
    parameters = trainer.model.parameter_count()
    vocab = trainer.corpus.tokenizer.vocab_size
    # roughly what a layer keeps for its backward pass, in numbers a character
    kept = model.n_layer * (14 * model.n_embd + 5 * model.mlp_width)
    per_character = (kept if model.kind == "gpt" else 0) + 3 * vocab
    activations = trainer.micro_batch * model.block_size * per_character * 4
    return Plan(
        parameters=parameters,
        steps=left,
        characters=left * batch_characters,
        epochs=left * batch_characters / len(trainer.corpus.split("train")),
        memory_bytes=parameters * 16 + activations,
        seconds=seconds or left * step_seconds + evaluations * evaluation_seconds,
    )


def _seconds_a_step(trainer: Trainer) -> float:
    """Return the time of a trial step, the first left out; model and state stay as they are."""
    seconds = 0.0
    for _ in range(2):
        synchronize(trainer.device)
        start = time.perf_counter()
        trainer.accumulate_gradients(0)
        synchronize(trainer.device)
        seconds = time.perf_counter() - start
    trainer.model.zero_grad(set_to_none=True)
    update = 1.15  # clipping and the optimizer: 38 ms beside 175 to 280 ms for the default
    return seconds * update
