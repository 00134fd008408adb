"""Expected cost of a run: memory from its settings, time from a few measured steps."""

import math
import time
from dataclasses import dataclass

from chargpt.config import Config
from chargpt.device import synchronize
from chargpt.models import count_parameters, rotary_bytes
from chargpt.models.kernels import MAX_PRODUCT_ROW_BYTES
from chargpt.training.learner import Learner

# factor on the time of the forward and backward pass: measured for the default config, the
# optimizer adds 38 ms to between 175 and 280 ms
UPDATE_OVERHEAD = 1.15
MIN_TRIAL_SECONDS = 0.05  # of trial steps: one of a bigram or on a GPU may take less than 1 ms
TRIAL_LR_FACTOR = 1e-6  # trial updates must not leave the usual range of values


def training_bytes(config: Config, vocab_size: int, n_sequences: int) -> int:
    """Return the approximate memory of training with micro-batches of `n_sequences`, in bytes."""
    model = config.model
    activations = 3 * vocab_size  # saved for the backward pass, values per token
    if model.kind != "bigram":
        activations += model.n_layer * (14 * model.n_embd + 5 * model.mlp_width)
        row_bytes = model.block_size * (2 if config.dtype == "bfloat16" else 4)
        if model.attention == "full" and row_bytes <= MAX_PRODUCT_ROW_BYTES:
            activations += 2 * model.n_layer * model.n_head * model.block_size  # scores, weights
    masks = model.block_size**2 if model.attention == "average" else 0
    # weights, gradients, up to two moments of the optimizer, EMA
    weights = (4 + bool(config.train.ema)) * count_parameters(model, vocab_size)
    n_values = weights + n_sequences * model.block_size * activations + masks
    return 4 * n_values + rotary_bytes(model)


@dataclass(frozen=True)
class Cost:
    """Expected cost of the remaining steps of a run."""

    parameters: int  # of the model
    steps: int
    characters: int  # that the steps read
    epochs: float  # the same in passes over the training split
    memory_bytes: int
    seconds: float  # including validation


def expected_cost(
    config: Config, learner: Learner, step: int, seconds: float | None = None
) -> Cost:
    """Return the expected cost of a run from `step` on.

    Args:
        config: of the run.
        learner: runs a few trial steps, which change nothing.
        step: number of steps done.
        seconds: expected, if known; otherwise they follow from the trial steps.
    """
    train, corpus = config.train, learner.corpus
    n_steps = train.max_steps - step
    n_tokens = n_steps * config.tokens_per_step
    if seconds is None:
        step_seconds = UPDATE_OVERHEAD * measure_step_seconds(learner, 2, update=False)
        scored = min(train.evaluation_tokens, len(corpus.split("val")))
        # a forward pass takes about a third of a step, and rank 0 evaluates alone
        evaluation = step_seconds * scored / config.tokens_per_step / 3 * learner.group.world_size
        n_evaluations = n_steps // train.evaluate_every + 2
        seconds = n_steps * step_seconds + n_evaluations * evaluation
    return Cost(
        parameters=learner.model.num_parameters(),
        steps=n_steps,
        characters=round(n_tokens * corpus.characters_per_token),
        epochs=n_tokens / len(corpus.split("train")),
        memory_bytes=training_bytes(config, corpus.tokenizer.vocab_size, learner.micro_batch_size),
        seconds=seconds,
    )


def measure_step_seconds(
    learner: Learner, n_steps: int, *, update: bool, max_seconds: float = math.inf
) -> float:
    """Return the mean time of `n_steps` trial steps or more; the first, a warm-up, is left out.

    Without `update` the weights stay as they are. If the warm-up takes over `max_seconds`, no other
    step is run, and its time is returned.
    """

    def run(number: int) -> float:
        """Return the mean time of some steps, which a GPU runs without waiting in between."""
        synchronize(learner.device)
        start = time.perf_counter()
        for step in range(number):
            learner.accumulate_gradients(step)
            learner.clip_gradients()
            if update:
                learner.apply_update(step, TRIAL_LR_FACTOR)
        synchronize(learner.device)
        return (time.perf_counter() - start) / number

    warm_up = run(1)
    if warm_up > max_seconds:
        return warm_up
    # each rank measures its own speed, but all must run as many steps
    seconds = learner.group.broadcast(run(n_steps - 1))
    if (n_steps - 1) * seconds < MIN_TRIAL_SECONDS:
        seconds = run(math.ceil(MIN_TRIAL_SECONDS / seconds))
    learner.model.zero_grad(set_to_none=True)
    return seconds
