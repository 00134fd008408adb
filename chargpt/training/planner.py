"""Choice of model size and training length for a text, a device and a time budget.

The predicted loss comes from a scaling law with fitted coefficients, stored in `scaling_law.json`
by `scripts/fit_scaling_law.py`:

    loss = floor + a * parameters^-p + b * unique^-q            (Hoffmann et al. 2022, eq. 2)

`unique` being the unique-token equivalents of all tokens read (`unique_token_equivalents`). The
speed of each size is measured, and gives the length of its training:

    steps = 0.93 * remaining seconds * tokens per second / tokens per step, of at most 40 epochs

All choices go into the config, which repeats the run without a budget. While the run trains, its
number of steps is re-planned (deadline.py).
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from chargpt.config import Config
from chargpt.device import choose_device, memory_limit
from chargpt.errors import ConfigError
from chargpt.log import logger
from chargpt.models import count_parameters
from chargpt.text.corpus import REQUIRED_SPLITS, Corpus
from chargpt.training.deadline import (
    EPOCH_LIMIT_NOTE,
    INITIAL_FRACTION,
    MAX_EPOCHS,
    MIN_STEPS,
    Deadline,
    Plan,
)
from chargpt.training.learner import training_bytes


@dataclass(frozen=True)
class Size:
    """Depth and width of a model; its heads are 64 wide or more."""

    n_layer: int
    n_embd: int

    @property
    def n_head(self) -> int:
        """Number of heads: one per whole 64 channels."""
        return self.n_embd // 64


SIZES = (
    *(Size(4, 64), Size(4, 96), Size(4, 128), Size(5, 192), Size(6, 256), Size(6, 384)),
    *(Size(8, 512), Size(10, 640), Size(12, 768)),  # larger than those of the fitted runs
)


# if one of them is fixed, so is the size
SIZE_KEYS = {f"model.{name}" for name in ("kind", "n_layer", "n_head", "n_embd", "n_inner")}


@dataclass(frozen=True)
class LengthPreset:
    """Settings of runs that read at least `min_tokens` tokens, repeats included."""

    min_tokens: int
    block_size: int
    tokens_per_step: int  # per update
    cooldown: float  # fraction of the steps; the steps before it measure the speed
    evaluations: int = 6


LENGTH_PRESETS = (  # by rising `min_tokens`
    LengthPreset(0, 128, 1024, 0.6, evaluations=2),  # each takes as long as four steps
    LengthPreset(150_000, 128, 2048, 0.6, evaluations=2),
    LengthPreset(1_000_000, 256, 2048, 0.7),
    LengthPreset(3_000_000, 256, 4096, 0.7),
    # longer than the runs that the others were found by
    LengthPreset(100_000_000, 512, 8192, 0.7),
    LengthPreset(1_000_000_000, 1024, 16384, 0.7),
)
# length of training that is assumed until a speed is measured, and at least for larger sizes
INITIAL_TOKENS = 350_000


@dataclass(frozen=True)
class Recipe:
    """Settings found by experiment (benchmarks/LOG.md); lengths are in tokens read."""

    trial_fraction: float = 0.05  # of the time: once trials have used it, no larger size is tried
    usable_memory: float = 0.6  # fraction: the memory of a run is an estimate
    short_run: int = 1_000_000  # below it the law is too optimistic about larger sizes
    short_run_gain: float = 0.01  # nats that a larger size then has to gain by the law
    max_parameters_per_token: int = 12  # of the training split: the highest of the fitted runs
    mixture_characters: int = 20_000  # to fit a mixture to; more gain nothing
    min_block_size: int = 8
    min_evaluated: int = 12_000  # tokens of the validation split per evaluation
    max_evaluated: int = 300_000
    full_weight_decay_epochs: float = 5  # from it on, weight decay is whole
    min_weight_decay: float = 0.2  # fraction of the weight decay in runs of up to one epoch
    # (overfitting, dropout), where overfitting = epochs * sqrt(parameters / train_tokens)
    dropout: tuple[tuple[float, float], ...] = ((24, 0.2), (8, 0.1), (0, 0.0))
    full_ngram_weight_until: int = 1_200_000  # beyond it, that of soft targets falls as 1 / tokens
    repeated_epochs: float = 2  # from it on, at least this fraction of their weight stays:
    min_ngram_fraction: float = 0.5
    min_ngram_weight: float = 0.05  # smaller weights become 0


RECIPE = Recipe()


MeasureSpeed = Callable[[Config, float], float]
"""Called with a config and the seconds after which one step is enough; returns tokens/s."""


def predicted_loss(parameters: int, n_tokens: float, train_tokens: int) -> float:
    """Return the loss in nats that the scaling law expects on a text like the fitted one.

    `n_tokens` are those read in training, repeats included; `train_tokens` is the length of
    the training split.
    """
    law = _fitted()["law"]
    unique = unique_token_equivalents(parameters, n_tokens, train_tokens, law)
    loss = law["floor"] + law["a"] * parameters ** -law["p"] + law["b"] * unique ** -law["q"]
    return float(loss)


def unique_token_equivalents(
    parameters: int, n_tokens: float, train_tokens: int, law: Mapping[str, float]
) -> float:
    """Return how many unique tokens are worth as much as all tokens read, repeats included.

    Repeated tokens lose value exponentially, with R* epochs as the constant (Muennighoff et al.
    2023, eq. 5). They fit R* = 15.4 for few parameters per token; here larger models lose it
    sooner: R* = r * (train_tokens / parameters)^s, with the coefficients r and s in `law`.
    """
    r_star: float = law["r"] * (train_tokens / parameters) ** law["s"]
    repeats = max(0.0, n_tokens / train_tokens - 1)
    value = -r_star * math.expm1(-repeats / r_star)
    return max(1.0, min(n_tokens, train_tokens) * (1 + value))


@cache
def _fitted() -> dict[str, Any]:
    """Return the coefficients of the law, and the runs that it was fitted to."""
    content = (Path(__file__).parent / "scaling_law.json").read_text(encoding="utf-8")
    fitted: dict[str, Any] = json.loads(content)
    return fitted


def extrapolation(parameters: int, n_tokens: float) -> str | None:
    """Return a sentence if a run is larger or longer than those that the law was fitted to."""
    largest = max(run["parameters"] for run in _fitted()["runs"])
    longest = max(run["characters"] for run in _fitted()["runs"])
    if parameters <= 1.1 * largest and n_tokens <= 1.1 * longest:
        return None
    return (
        "the size and the settings are extrapolated from runs of up to "
        f"{largest / 1e6:.0f}M parameters and {longest / 1e6:.0f}M characters"
    )


def length_preset_for(n_tokens: float) -> LengthPreset:
    """Return the settings of a run over about `n_tokens` tokens."""
    return [each for each in LENGTH_PRESETS if each.min_tokens <= n_tokens][-1]


def size_values(
    size: Size,
    n_tokens: float,
    corpus: Corpus,
    micro_batches: int = 1,
    block_size: int | None = None,
) -> dict[str, object]:
    """Return the settings of a run of this size over about `n_tokens` tokens.

    Short runs gain more from many small updates than they lose by short blocks. A batch must hold
    whole micro-batches.
    """
    preset = length_preset_for(n_tokens)
    block_size = block_size or fitting_block_size(preset.block_size, corpus)
    return {
        "model.n_layer": size.n_layer,
        "model.n_head": size.n_head,
        "model.n_embd": size.n_embd,
        "model.block_size": block_size,
        "train.batch_size": micro_batches
        * max(1, preset.tokens_per_step // block_size // micro_batches),
    }


def fitting_block_size(block_size: int, corpus: Corpus) -> int:
    """Return the block size, halved until each split holds a block and one more token."""
    shortest_split = min(len(corpus.split(split)) for split in REQUIRED_SPLITS)
    while block_size > RECIPE.min_block_size and block_size >= shortest_split:
        block_size //= 2
    return block_size


def length_values(
    config: Config, n_tokens: float, train_tokens: int, parameters: int
) -> dict[str, object]:
    """Return the settings that depend on the training length, for about `n_tokens` tokens."""
    recipe, preset = RECIPE, length_preset_for(n_tokens)
    steps = max(MIN_STEPS, int(n_tokens / config.tokens_per_step))
    # early stopping needs more evaluations than its patience
    every = math.ceil(steps / max(preset.evaluations, 2 * (config.train.patience or 0)))
    epochs = n_tokens / train_tokens
    overfitting = epochs * math.sqrt(parameters / train_tokens)
    # soft targets soon teach all they can, but they also keep a model from over-fitting
    min_fraction = recipe.min_ngram_fraction if epochs >= recipe.repeated_epochs else 0.0
    ngram_fraction = max(min_fraction, min(1.0, recipe.full_ngram_weight_until / n_tokens))
    ngram_weight = config.train.ngram_target_weight * ngram_fraction
    weight_decay_fraction = min(
        1.0, max(recipe.min_weight_decay, epochs / recipe.full_weight_decay_epochs)
    )
    return {
        "train.max_steps": steps,
        "train.evaluate_every": every,
        "train.evaluation_tokens": max(
            recipe.min_evaluated, min(recipe.max_evaluated, int(n_tokens / 100))
        ),
        "train.save_every": every,
        # a sample takes as long as a step
        "train.sample_every": 2 * every if steps >= 200 else 0,
        "schedule.cooldown": preset.cooldown,
        "train.ngram_target_weight": (
            round(ngram_weight, 3) if ngram_weight >= recipe.min_ngram_weight else 0.0
        ),
        "optim.weight_decay": round(config.optim.weight_decay * weight_decay_fraction, 4),
        "model.dropout": next(p for least, p in recipe.dropout if overfitting >= least),
    }


def plan(
    config: Config,
    corpus: Corpus,
    deadline: Deadline,
    fixed_keys: Collection[str],
    measure: MeasureSpeed,
) -> Plan:
    """Choose model size and settings for a run that uses the time until a deadline.

    Args:
        config: to start from.
        corpus: the text.
        deadline: of the run; the measurements take time from it too.
        fixed_keys: dotted keys of the settings that stay as they are.
        measure: runs trial steps.

    Raises:
        ConfigError: `train.max_steps` is fixed too.
        OperationError: the fewest useful steps would take more than twice the budget.
    """
    if "train.max_steps" in fixed_keys:
        raise ConfigError(
            "--budget and train.max_steps both say how long to train; drop one of them"
        )
    planner = _Planner(config, corpus, deadline, fixed_keys, measure)
    train_tokens = planner.train_tokens
    may_choose = config.model.kind == "gpt" and config.train.from_run is None
    if size_was_chosen := may_choose and SIZE_KEYS.isdisjoint(fixed_keys):
        size, config, speed = planner.best_size()
        # block and batch sizes follow from the length, which is known now
        resized = planner.config_of_size(size, planner.affordable_tokens(speed), config)
        if resized != config:
            config, speed = resized, planner.measure_speed(resized)
    else:
        speed = planner.measure_speed(config)
    deadline.require(MIN_STEPS * config.tokens_per_step / speed)
    n_tokens, parameters = planner.affordable_tokens(speed), planner.parameters(config)
    values = length_values(config, n_tokens, train_tokens, parameters)
    max_tokens = MAX_EPOCHS * train_tokens
    step_limit = max(MIN_STEPS, max_tokens // config.tokens_per_step)
    if n_tokens == max_tokens:
        logger.warning(EPOCH_LIMIT_NOTE)
    if size_was_chosen and (note := extrapolation(parameters, n_tokens)):
        logger.warning(note)
    return Plan(planner.with_unless_fixed(config, values), speed, size_was_chosen, step_limit)


@dataclass(frozen=True)
class _Planner:
    """The search for the size with the lowest predicted loss; fields as the arguments of `plan`."""

    config: Config
    corpus: Corpus
    deadline: Deadline
    fixed_keys: Collection[str]
    measure: MeasureSpeed

    @property
    def train_tokens(self) -> int:
        return len(self.corpus.split("train"))

    def best_size(self) -> tuple[Size, Config, float]:
        """Measure sizes, smallest first, while a larger one may have a lower loss.

        Before they are measured, sizes are compared at their lowest possible speeds: a model is
        slower than a smaller one by at most the ratio of their parameters. The search ends where
        the next size has no lower predicted loss even if it is slower by only that ratio's square
        root.
        """
        index, config = 0, self.config_of_size(SIZES[0], INITIAL_TOKENS)
        speed = self.measure_speed(config)
        available = self.deadline.remaining  # after the first trial: on a GPU it loads the kernels
        while available - self.deadline.remaining <= RECIPE.trial_fraction * available:
            larger = self.larger_sizes(index + 1, self.affordable_tokens(speed))
            slowdowns = [self.parameters(each) / self.parameters(config) for each in larger]
            loss = self.loss(config, speed)
            if not larger or not self.is_better(larger[0], speed / slowdowns[0] ** 0.5, loss):
                break
            worst_losses = [
                self.loss(each, speed / slowdown)
                for each, slowdown in zip(larger, slowdowns, strict=True)
            ]
            skipped = worst_losses.index(min(worst_losses))
            candidate = larger[skipped]
            candidate_speed = self.measure_speed(candidate)
            if not self.is_better(candidate, candidate_speed, loss):
                break
            index, config, speed = index + 1 + skipped, candidate, candidate_speed
        return SIZES[index], config, speed

    def is_better(self, larger: Config, speed: float, loss: float) -> bool:
        """Return whether the law gives a larger size at this speed a lower loss than `loss`.

        In a short run it must be lower by `short_run_gain`, since the law is too optimistic there.
        """
        min_gain = (
            RECIPE.short_run_gain if self.affordable_tokens(speed) < RECIPE.short_run else 0.0
        )
        return self.loss(larger, speed) <= loss - min_gain

    def larger_sizes(self, first: int, n_tokens: float) -> list[Config]:
        """Return the configs of the sizes from index `first` on that suit text and memory."""
        vocab_size = self.corpus.tokenizer.vocab_size
        usable = RECIPE.usable_memory * memory_limit(choose_device(self.config.device)[0])
        configs = [
            self.config_of_size(size, max(INITIAL_TOKENS, n_tokens)) for size in SIZES[first:]
        ]
        micro_batches = self.config.train.micro_batches
        return [
            each
            for each in configs
            if training_bytes(each, vocab_size, each.train.batch_size // micro_batches) <= usable
            and self.parameters(each) <= RECIPE.max_parameters_per_token * self.train_tokens
        ]

    def config_of_size(self, size: Size, n_tokens: float, config: Config | None = None) -> Config:
        is_fixed = "model.block_size" in self.fixed_keys
        block_size = self.config.model.block_size if is_fixed else None
        micro_batches = self.config.train.micro_batches
        values = size_values(size, n_tokens, self.corpus, micro_batches, block_size)
        return self.with_unless_fixed(config or self.config, values)

    def with_unless_fixed(self, config: Config, values: dict[str, object]) -> Config:
        """Return the config with those of the values that the user has not fixed."""
        return config.with_values({k: v for k, v in values.items() if k not in self.fixed_keys})

    def parameters(self, config: Config) -> int:
        return count_parameters(config.model, self.corpus.tokenizer.vocab_size)

    def affordable_tokens(self, speed: float) -> float:
        """Return how many tokens can be read in the remaining time, at least 1."""
        readable = INITIAL_FRACTION * self.deadline.remaining * speed
        return max(1.0, min(readable, MAX_EPOCHS * self.train_tokens))

    def loss(self, config: Config, speed: float) -> float:
        return predicted_loss(
            self.parameters(config), self.affordable_tokens(speed), self.train_tokens
        )

    def measure_speed(self, config: Config) -> float:
        return self.measure(config, self.deadline.remaining / MIN_STEPS)
