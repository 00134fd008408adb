"""Choice of model size and training length for a text, a device and a time budget.

The expected loss comes from a scaling law with fitted coefficients, stored in `plan.json` by
`scripts/fit_plan.py`:

    loss = floor + a * parameters^-p + b * unique^-q            (Hoffmann et al. 2022, eq. 2)

`unique` being the unique-token equivalents of all tokens read (`unique_token_equivalents`). The
speed of each size is measured. All choices go into the config, which repeats the run without a
clock.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from chargpt.config import Config
from chargpt.errors import ConfigError
from chargpt.models import count_parameters
from chargpt.text.corpus import SPLITS, Corpus
from chargpt.training.budget import REPLANNING, Budget, measure_step_seconds
from chargpt.training.trainer import Trainer


@dataclass(frozen=True)
class Size:
    """Depth and width of a model; its heads are 64 wide or more."""

    n_layer: int
    n_embd: int

    @property
    def n_head(self) -> int:
        """Number of heads: one per whole 64 channels."""
        return self.n_embd // 64


SIZES = (Size(4, 64), Size(4, 96), Size(4, 128), Size(5, 192), Size(6, 256), Size(6, 384))


@dataclass(frozen=True)
class Recipe:
    """Settings as functions of the training length, found by experiment (benchmarks/LOG.md).

    Lengths are in characters read, unless they are named otherwise.
    """

    usable: float = 0.93  # fraction of the time planned for training steps before re-planning
    trial_steps: int = 3  # that measure a size's speed
    trial_fraction: float = 0.05  # of the time: once trials have used it, no larger size is tried
    max_epochs: int = 40
    short_run: int = 350_000  # below it, blocks and steps are short
    block_size: int = 256
    short_block_size: int = 128
    min_block_size: int = 8
    step_characters: int = 2048  # per update
    short_step_characters: int = 1024
    long_step_characters: int = 4096
    long_run: int = 1_000_000  # from it on, the decay takes `long_cooldown` of the steps
    very_long_run: int = 3_000_000  # from it on, an update reads `long_step_characters`
    cooldown: float = 0.6  # fraction of the steps; the steps before it measure the speed
    long_cooldown: float = 0.7
    evaluations: int = 6  # per run
    short_evaluations: int = 2  # in a short run, where each takes as long as four steps
    min_evaluated: int = 12_000  # characters of the validation split per evaluation
    max_evaluated: int = 300_000
    full_weight_decay_epochs: float = 5  # from it on, weight decay is whole
    min_weight_decay: float = 0.2  # fraction of the weight decay in runs of up to one epoch
    # (risk, dropout), where risk = epochs * sqrt(parameters per character of the text)
    dropout: tuple[tuple[float, float], ...] = ((24, 0.2), (8, 0.1), (0, 0.0))
    ngram_until: int = 1_200_000  # beyond it, the weight of soft targets falls as 1 / characters
    ngram_repeated_epochs: float = 2  # from it on, at least `ngram_repeated` of the weight stays
    ngram_repeated: float = 0.5
    min_ngram_weight: float = 0.05  # smaller weights become 0


RECIPE = Recipe()


@dataclass(frozen=True)
class Plan:
    """A planned run: its config, and the measured speed behind it in characters per second."""

    config: Config
    speed: float
    chooses_size: bool


def expected_loss(parameters: int, characters: float, text_characters: int) -> float:
    """Return the loss in nats that the scaling law expects on a text like the fitted one.

    `characters` are those read in training, repeats included; `text_characters` is the length of
    the training split.
    """
    law = _coefficients()
    unique = unique_token_equivalents(parameters, characters, text_characters, law)
    loss = law["floor"] + law["a"] * parameters ** -law["p"] + law["b"] * unique ** -law["q"]
    return float(loss)


def unique_token_equivalents(
    parameters: int, characters: float, text_characters: int, law: Mapping[str, float]
) -> float:
    """Return how many unique tokens are worth as much as all tokens read, repeats included.

    Repeated tokens lose value exponentially, with R* epochs as the constant (Muennighoff et al.
    2023, eq. 5). They fit R* = 15.4 for few parameters per token; here larger models lose it
    sooner: R* = r * (text_characters / parameters)^s, with the coefficients r and s in `law`.
    """
    r_star: float = law["r"] * (text_characters / parameters) ** law["s"]
    repeats = max(0.0, characters / text_characters - 1)
    value = r_star * (1 - math.exp(-repeats / r_star))
    return max(1.0, min(characters, text_characters) * (1 + value))


@cache
def _coefficients() -> dict[str, float]:
    content = (Path(__file__).parent / "plan.json").read_text(encoding="utf-8")
    law: dict[str, float] = json.loads(content)["law"]
    return law


def size_settings(size: Size, characters: float, corpus: Corpus) -> dict[str, object]:
    """Return the settings of a run of this size over about `characters` characters.

    Short runs gain more from many small updates than they lose by short blocks. A split must hold
    a block and one more character.
    """
    recipe = RECIPE
    is_short = characters < recipe.short_run
    block_size = recipe.short_block_size if is_short else recipe.block_size
    shortest_split = min(len(corpus.split(split)) for split in SPLITS)
    while block_size > recipe.min_block_size and block_size >= shortest_split:
        block_size //= 2
    per_step = recipe.short_step_characters if is_short else recipe.step_characters
    if characters >= recipe.very_long_run:
        per_step = recipe.long_step_characters
    return {
        "model.n_layer": size.n_layer,
        "model.n_head": size.n_head,
        "model.n_embd": size.n_embd,
        "model.block_size": block_size,
        "train.batch_size": per_step // block_size,
    }


def length_settings(
    config: Config, characters: float, text_characters: int, parameters: int
) -> dict[str, object]:
    """Return the settings that depend on the training length, for about `characters` characters."""
    recipe = RECIPE
    steps = int(characters / (config.train.batch_size * config.model.block_size))
    steps = max(REPLANNING.min_steps, steps)
    is_short = characters < recipe.short_run
    every = math.ceil(steps / (recipe.short_evaluations if is_short else recipe.evaluations))
    epochs = characters / text_characters
    risk = epochs * math.sqrt(parameters / text_characters)
    # soft targets soon teach all they can, but they also keep a model from over-fitting
    at_least = recipe.ngram_repeated if epochs >= recipe.ngram_repeated_epochs else 0.0
    ngram_fraction = max(at_least, min(1.0, recipe.ngram_until / characters))
    ngram_weight = config.train.ngram_target_weight * ngram_fraction
    decay = min(1.0, max(recipe.min_weight_decay, epochs / recipe.full_weight_decay_epochs))
    is_long = characters >= recipe.long_run
    return {
        "train.max_steps": steps,
        "train.evaluate_every": every,
        "train.evaluate_characters": max(
            recipe.min_evaluated, min(recipe.max_evaluated, int(characters / 100))
        ),
        "train.save_every": every,
        # a sample takes as long as a step
        "train.sample_every": 2 * every if steps >= 200 else 0,
        "schedule.cooldown": recipe.long_cooldown if is_long else recipe.cooldown,
        "train.ngram_target_weight": (
            round(ngram_weight, 3) if ngram_weight >= recipe.min_ngram_weight else 0.0
        ),
        "optim.weight_decay": round(config.optim.weight_decay * decay, 4),
        "model.dropout": next(p for least, p in recipe.dropout if risk >= least),
    }


def plan(config: Config, corpus: Corpus, budget: Budget) -> Plan:
    """Choose model size and settings for a run that uses the budget's remaining time.

    Keys in `budget.fixed` stay as they are. The trials here take time from the budget too.

    Raises:
        ConfigError: `train.max_steps` is fixed too.
    """
    if "train.max_steps" in budget.fixed:
        raise ConfigError(
            "--budget and train.max_steps both say how long to train; drop one of them"
        )
    return _Planner(config, corpus, budget).plan()


class _Planner:
    """The search for the size with the lowest expected loss."""

    def __init__(self, config: Config, corpus: Corpus, budget: Budget) -> None:
        self.config, self.corpus, self.budget = config, corpus, budget
        self.text_characters = len(corpus.split("train"))
        self.chooses_size = config.model.kind == "gpt" and not any(
            key.startswith("model.") for key in budget.fixed
        )

    def plan(self) -> Plan:
        if self.chooses_size:
            size, config, speed = self.best_size()
            # block and batch sizes follow from the length, which is known now
            settings = size_settings(size, self.reachable(speed), self.corpus)
            resized = self.with_free(config, settings)
            if resized != config:
                config, speed = resized, measure_speed(resized, self.corpus)
        else:
            config, speed = self.config, measure_speed(self.config, self.corpus)
        length = length_settings(
            config, self.reachable(speed), self.text_characters, self.parameters(config)
        )
        return Plan(self.with_free(config, length), speed, self.chooses_size)

    def best_size(self) -> tuple[Size, Config, float]:
        """Measure sizes, smallest first, while a larger one may have a lower loss."""
        available = self.budget.remaining
        best: tuple[float, Size, Config, float] | None = None
        for size in SIZES:
            candidate = self.with_free(self.config, size_settings(size, math.inf, self.corpus))
            if best is not None:
                # larger models are slower, but by less than their size
                ratio = self.parameters(best[2]) / self.parameters(candidate)
                if self.loss(candidate, best[3] * ratio**0.5) > best[0]:
                    break
            speed = measure_speed(candidate, self.corpus)
            loss = self.loss(candidate, speed)
            if best is not None and loss > best[0]:
                break
            best = loss, size, candidate, speed
            if available - self.budget.remaining > RECIPE.trial_fraction * available:
                break
        assert best is not None
        return best[1:]

    def with_free(self, config: Config, values: dict[str, object]) -> Config:
        """Return the config with those of the values that the user has not fixed."""
        return config.with_values({k: v for k, v in values.items() if k not in self.budget.fixed})

    def parameters(self, config: Config) -> int:
        return count_parameters(config.model, self.corpus.tokenizer.vocab_size)

    def reachable(self, speed: float) -> float:
        """Return how many characters can be read in the remaining time, at least 1."""
        readable = RECIPE.usable * self.budget.remaining * speed
        return max(1.0, min(readable, RECIPE.max_epochs * self.text_characters))

    def loss(self, config: Config, speed: float) -> float:
        return expected_loss(self.parameters(config), self.reachable(speed), self.text_characters)


def measure_speed(config: Config, corpus: Corpus) -> float:
    """Return the characters per second of trial steps, without n-gram soft targets.

    Soft targets cost a tenth or less, which re-planning takes into account.
    """
    trial = config.with_values({"train.ngram_target_weight": 0.0})
    learner = Trainer(trial, corpus).learner
    seconds = measure_step_seconds(learner, RECIPE.trial_steps, update=True)
    return config.train.batch_size * config.model.block_size / seconds
