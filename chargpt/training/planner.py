"""Choice of model size and training length for a text, a device and a time budget.

The predicted loss comes from a scaling law with fitted coefficients, stored in `scaling_law.json`
by `scripts/fit_scaling_law.py`:

    loss = floor + a * parameters^-p + b * unique^-q            (Hoffmann et al. 2022, eq. 2)

`unique` being the unique-token equivalents of all tokens read (`unique_token_equivalents`). The
speed of each size is measured, and gives the length of its training:

    steps = 0.93 * remaining seconds * tokens per second / tokens per step

A model reads the text at most 40 times. If a text would be read often, several models are trained
in turn, each a student of the one before; large ones then read it less often.

All choices go into the config, which repeats the run without a budget. While the run trains, its
number of steps is re-planned (deadline.py).
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from chargpt.config import Config
from chargpt.device import choose_device, measure_threads, memory_limit
from chargpt.distributed import rank_variable
from chargpt.errors import DeviceError
from chargpt.log import logger
from chargpt.models import count_parameters
from chargpt.text.corpus import REQUIRED_SPLITS, Corpus
from chargpt.training.deadline import (
    EPOCH_LIMIT_NOTE,
    INITIAL_FRACTION,
    MIN_STEPS,
    TEACHER_COST,
    Deadline,
    Pace,
)
from chargpt.training.learner import training_bytes


@dataclass(frozen=True)
class Size:
    """Depth and width of a model."""

    n_layer: int
    n_embd: int


SIZES = (
    *(Size(4, 64), Size(4, 96), Size(4, 128), Size(5, 192), Size(6, 256), Size(6, 384)),
    # larger than those of the fitted runs
    *(Size(8, 512), Size(10, 512), Size(10, 640), Size(12, 640), Size(12, 768), Size(16, 1024)),
    *(Size(24, 1536), Size(24, 2048), Size(32, 2560), Size(32, 4096)),
)


# if one of them is fixed, so is the size
SIZE_KEYS = {f"model.{name}" for name in ("kind", "n_layer", "n_head", "n_embd", "n_inner")}


@dataclass(frozen=True)
class LengthPreset:
    """Settings of runs that read at least `min_tokens` tokens, repeats included."""

    min_tokens: int
    block_size: int
    cooldown: float  # fraction of the steps; the steps before it measure the speed
    evaluations: int = 6


LENGTH_PRESETS = (  # by rising `min_tokens`
    LengthPreset(0, 128, 0.6, evaluations=2),  # each takes as long as four steps
    LengthPreset(1_000_000, 256, 0.7),
    # longer than the runs that the others were found by
    LengthPreset(100_000_000, 512, 0.7),
    LengthPreset(1_000_000_000, 1024, 0.7),
)
MAX_RANK_TOKENS = 16_384  # of an update on one rank: more would leave no memory for large models
# length of training that is assumed until a speed is measured, and at least for larger sizes
INITIAL_TOKENS = 350_000


# settings found by experiment (benchmarks/LOG.md); lengths are in tokens read
TRIAL_FRACTION = 0.05  # of the time: once trials have used it, no larger size is tried
# FLOP/s of training: beside a slower GPU the CPU is tried. An H200 reaches 3.5e12 with 4 x 96, and
# two cores 0.25e12 with 4 x 128.
SLOW_GPU = 0.5e12
USABLE_MEMORY = 0.6  # fraction: the memory of a run is an estimate
SHORT_RUN = 1_000_000  # below it the law is too optimistic about larger sizes
SHORT_RUN_GAIN = 0.01  # nats that a larger size then has to gain by the law
MAX_PARAMETERS_PER_TOKEN = 12  # of the training split: the highest of the fitted runs
MIXTURE_CHARACTERS = 20_000  # to fit a mixture to; more gain nothing
MIN_BLOCK_SIZE = 8
MIN_EVALUATED = 12_000  # tokens of the validation split per evaluation
MAX_EVALUATED = 300_000
FULL_WEIGHT_DECAY_EPOCHS = 5  # from it on, weight decay is whole
MIN_WEIGHT_DECAY = 0.2  # fraction of the weight decay in runs of up to one epoch
# (repetition, dropout), where repetition = (epochs - 1) * parameters / train_tokens
DROPOUT = ((64, 0.2), (24, 0.1), (8, 0.05))
# much over-fitting (epochs * sqrt(parameters / train_tokens)), in many epochs, is better split
# between models, each a student of the one before; from these values on between two of them
MAX_MODELS, SPLIT_OVERFITTING, SPLIT_EPOCHS = 3, 30, 20
MAX_EPOCHS = 40  # of a model
MAX_OVERFITTING, MIN_EPOCHS = 65, 10  # each of several in turn ends at the former, if after these
FULL_NGRAM_WEIGHT_UNTIL = 1_200_000  # beyond it, that of soft targets falls as 1 / tokens
REPEATED_EPOCHS = 2  # from it on, at least this fraction of their weight stays:
MIN_NGRAM_FRACTION = 0.5
MIN_NGRAM_WEIGHT = 0.05  # smaller weights become 0


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
    fitted: dict[str, Any] = json.loads(Path(__file__).with_name("scaling_law.json").read_bytes())
    return fitted


def length_preset_for(n_tokens: float) -> LengthPreset:
    """Return the settings of a run over about `n_tokens` tokens."""
    return [each for each in LENGTH_PRESETS if each.min_tokens <= n_tokens][-1]


def batch_tokens(n_tokens: float) -> int:
    """Return the tokens per update that are best for a run over about `n_tokens` tokens.

    They double with every tenfold length: 1,024 below 1e5, 2,048 from there on. In time, which
    larger batches save, runs of 1.5 to 12 million tokens agree (benchmarks/LOG.md). nanochat's law,
    16,384 at 1e8 and an exponent of 0.383 instead of 0.301, was found with far longer ones.
    """
    return 1 << max(10, 6 + math.floor(math.log10(n_tokens)))


def useful_ranks(config: Config, n_tokens: float) -> int:
    """Return the sequences of the batch that is best for a run over about `n_tokens` tokens."""
    return max(1, batch_tokens(n_tokens) // config.model.block_size)


def config_of_size(
    config: Config,
    size: Size,
    n_tokens: float,
    corpus: Corpus,
    fixed_keys: Collection[str] = (),
    n_ranks: int = 1,
) -> Config:
    """Return the config of a run of this size over about `n_tokens` tokens.

    Short runs gain more from many small updates than they lose by short blocks. A batch must hold
    whole micro-batches of every rank.
    """
    preset, parts = length_preset_for(n_tokens), config.train.micro_batches * n_ranks
    tokens_per_step = min(batch_tokens(n_tokens), MAX_RANK_TOKENS * n_ranks)
    block_size = config.model.block_size
    if "model.block_size" not in fixed_keys:
        block_size = fitting_block_size(preset.block_size, corpus)
    values = {
        "model.n_layer": size.n_layer,
        "model.n_head": size.n_embd // 64,  # heads are 64 wide or more
        "model.n_embd": size.n_embd,
        "model.block_size": block_size,
        "train.batch_size": parts * max(1, tokens_per_step // block_size // parts),
    }
    return with_unless_fixed(config, values, fixed_keys)


def with_unless_fixed(
    config: Config, values: Mapping[str, object], fixed_keys: Collection[str]
) -> Config:
    """Return the config with those of the values that the user has not fixed."""
    return config.with_values({k: v for k, v in values.items() if k not in fixed_keys})


def fitting_block_size(block_size: int, corpus: Corpus) -> int:
    """Return the block size, halved until each split holds a block and one more token."""
    shortest_split = min(len(corpus.split(split)) for split in REQUIRED_SPLITS)
    while block_size > MIN_BLOCK_SIZE and block_size >= shortest_split:
        block_size //= 2
    return block_size


def length_values(
    config: Config, n_tokens: float, train_tokens: int, parameters: int
) -> dict[str, object]:
    """Return the settings that depend on the training length, for about `n_tokens` tokens."""
    preset = length_preset_for(n_tokens)
    steps = max(MIN_STEPS, int(n_tokens / config.tokens_per_step))
    # early stopping needs more evaluations than its patience
    every = math.ceil(steps / max(preset.evaluations, 2 * (config.train.patience or 0)))
    epochs = n_tokens / train_tokens
    repetition = (epochs - 1) * parameters / train_tokens
    dropout = next((p for least, p in DROPOUT if repetition >= least), 0.0)
    # soft targets soon teach all they can, but they also keep a model from over-fitting
    min_fraction = MIN_NGRAM_FRACTION if epochs >= REPEATED_EPOCHS else 0.0
    ngram_fraction = max(min_fraction, min(1.0, FULL_NGRAM_WEIGHT_UNTIL / n_tokens))
    ngram_weight = config.train.ngram_target_weight * ngram_fraction
    decay_fraction = min(1.0, max(MIN_WEIGHT_DECAY, epochs / FULL_WEIGHT_DECAY_EPOCHS))
    return {
        "train.max_steps": steps,
        "train.evaluate_every": every,
        "train.evaluation_tokens": max(MIN_EVALUATED, min(MAX_EVALUATED, int(n_tokens / 100))),
        "train.save_every": every,
        # a sample takes as long as a step
        "train.sample_every": 2 * every if steps >= 200 else 0,
        "schedule.cooldown": preset.cooldown,
        "train.ngram_target_weight": (
            round(ngram_weight, 3) if ngram_weight >= MIN_NGRAM_WEIGHT else 0.0
        ),
        "optim.weight_decay": round(config.optim.weight_decay * decay_fraction, 4),
        # the targets of a student keep it from over-fitting
        "model.dropout": 0.0 if config.train.teachers else dropout,
    }


def with_students(config: Config, n_models: int) -> Config:
    """Return the config of so many models, each a student of the one before, of its steps each."""
    steps = config.train.max_steps
    students = [steps * number for number in range(1, n_models)]
    values = {
        "train.max_steps": steps * n_models,
        "train.students": students,
        "schedule.restarts": [(step, 1.0) for step in students],
    }
    return config.with_values(values)


@dataclass(frozen=True)
class Planner:
    """Chooses model size and settings for a run that uses the time until a deadline.

    Attributes:
        config: to start from.
        corpus: the text.
        deadline: of the run; the measurements take time from it too.
        fixed_keys: dotted keys of the settings that stay as they are.
        measure: called with a config and the seconds after which one trial step is enough;
            returns tokens per second, or raises DeviceError if the memory is too small.
        n_ranks: that train together.
        memory: of a rank's device, in bytes; None: that of this machine.
        warn: called with what the user should know about the plan.
    """

    config: Config
    corpus: Corpus
    deadline: Deadline
    fixed_keys: Collection[str]
    measure: Callable[[Config, float], float]
    n_ranks: int = 1
    memory: float | None = None
    warn: Callable[[str], object] = logger.warning

    def plan(self) -> Pace:
        """Return the run of the size with the lowest predicted loss, if the size is free.

        Raises:
            DeviceError: the size, or the smallest one, does not fit into the memory.
            OperationError: the fewest useful steps would take more than twice the budget.
        """
        config = self.config
        may_choose = config.model.kind == "gpt" and config.train.from_run is None
        if size_was_chosen := may_choose and SIZE_KEYS.isdisjoint(self.fixed_keys):
            config, speed = self.best_device()
        else:
            speed = self.measure_speed(config)
        self.deadline.require(MIN_STEPS * config.tokens_per_step / speed)
        n_models, n_tokens = self.models(config, speed)
        parameters = self.parameters(config)
        values = length_values(config, n_tokens, self.train_tokens, parameters)
        runs = _fitted()["runs"]
        largest, longest = (max(run[key] for run in runs) for key in ("parameters", "characters"))
        if size_was_chosen and (parameters > 1.1 * largest or n_tokens > 1.1 * longest):
            self.warn(
                "the size and the settings are extrapolated from runs of up to "
                f"{largest / 1e6:.0f}M parameters and {longest / 1e6:.0f}M characters"
            )
        useful = useful_ranks(config, n_tokens)
        if useful < self.n_ranks:
            self.warn(
                f"{self.n_ranks:,} processes are more than the {useful:,} sequences of the "
                "batch that is best for so long a run: the others are not worth having"
            )
        max_tokens = self.max_tokens(config, n_models)
        step_limit = max(MIN_STEPS, max_tokens // config.tokens_per_step)
        config = with_unless_fixed(config, values, self.fixed_keys)
        config = with_students(config, n_models)
        planned = config.train.max_steps * config.tokens_per_step
        if n_tokens == max_tokens and planned < self.readable_tokens(speed):
            self.warn(EPOCH_LIMIT_NOTE)
        return Pace(self.deadline, config, speed, size_was_chosen, step_limit)

    @property
    def train_tokens(self) -> int:
        return len(self.corpus.split("train"))

    def max_tokens(self, config: Config, n_models: int) -> int:
        """Return how many tokens each of the models reads at most: more would only over-fit."""
        epochs = float(MAX_EPOCHS)
        if n_models > 1:
            parameters_per_token = self.parameters(config) / self.train_tokens
            limit = MAX_OVERFITTING / math.sqrt(parameters_per_token)
            epochs = min(epochs, max(MIN_EPOCHS, limit))
        return int(epochs * self.train_tokens)

    def best_device(self) -> tuple[Config, float]:
        """Return the best size and its speed on the device, or on the CPU if `auto` is a slow GPU.

        Each device has its search, and the predicted loss decides: a launch-bound GPU may be slower
        with the smallest size, and faster with a larger one, which takes it as long.
        """
        config, speed = self.best_size()
        device, cpu = (choose_device(name)[0] for name in ("auto", "cpu"))
        is_free = self.config.device == "auto" and self.n_ranks == 1 and self.memory is None
        is_slow = 6 * self.parameters(config) * speed < SLOW_GPU
        if device == cpu or not (is_free and is_slow):
            return config, speed
        values = {"device": "cpu", "threads": self.config.threads or measure_threads(cpu)}
        cpu_config, cpu_speed = replace(self, config=self.config.with_values(values)).best_size()
        loss, cpu_loss = self.loss(config, speed), self.loss(cpu_config, cpu_speed)
        if (loss, -speed) <= (cpu_loss, -cpu_speed):
            return config, speed
        unit = self.corpus.characters_per_token
        self.warn(
            f"training on the CPU: predicted loss {cpu_loss:.3f}, {unit * cpu_speed:,.0f} "
            f"characters/s; on the GPU {loss:.3f}, {unit * speed:,.0f} characters/s "
            f"(-s device={device.type} trains there)"
        )
        return cpu_config, cpu_speed

    def best_size(self) -> tuple[Config, float]:
        """Measure sizes, smallest first, while a larger one may have a lower loss.

        Before they are measured, sizes are compared at their lowest possible speeds: a model is
        slower than a smaller one by at most the ratio of their parameters. The search ends where
        the next size has no lower predicted loss even if it is slower by only that ratio's square
        root. After a trial that runs out of memory it goes on with smaller sizes than that one.
        """
        index, too_large, config = 0, len(SIZES), self.config_of_size(SIZES[0], INITIAL_TOKENS)
        speed = self.measure_speed(config)
        available = self.deadline.remaining  # after the first trial: on a GPU it loads the kernels
        while available - self.deadline.remaining <= TRIAL_FRACTION * available:
            larger = self.larger_sizes(index + 1, too_large, self.affordable_tokens(speed))
            slowdowns = [self.parameters(each) / self.parameters(config) for each in larger]
            loss = self.loss(config, speed)
            if not larger or not self.is_better(larger[0], speed / slowdowns[0] ** 0.5, loss):
                break
            lowest_speeds = [speed / slowdown for slowdown in slowdowns]
            worst_losses = list(map(self.loss, larger, lowest_speeds))
            skipped = worst_losses.index(min(worst_losses))
            candidate = larger[skipped]
            candidate_speed = self.speed_if_it_fits(candidate)
            if not candidate_speed:
                too_large = index + 1 + skipped
                continue
            if not self.is_better(candidate, candidate_speed, loss):
                break
            index, config, speed = index + 1 + skipped, candidate, candidate_speed
        # block and batch sizes follow from the length, which is known now
        resized = self.config_of_size(SIZES[index], self.models(config, speed)[1])
        resized_speed = 0.0 if resized == config else self.speed_if_it_fits(resized)
        return (resized, resized_speed) if resized_speed else (config, speed)

    def is_better(self, larger: Config, speed: float, loss: float) -> bool:
        """Return whether the law gives a larger size at this speed a lower loss than `loss`.

        In a short run it must be lower by `SHORT_RUN_GAIN`, since the law is too optimistic there.
        """
        min_gain = SHORT_RUN_GAIN if self.affordable_tokens(speed) < SHORT_RUN else 0.0
        return self.loss(larger, speed) <= loss - min_gain

    def larger_sizes(self, first: int, end: int, n_tokens: float) -> list[Config]:
        """Return the configs of the sizes `first` to `end` - 1 that suit text and memory."""
        vocab_size = self.corpus.tokenizer.vocab_size
        usable = USABLE_MEMORY * (self.memory or self.memory_here())
        n_tokens = max(INITIAL_TOKENS, n_tokens)
        configs = [self.config_of_size(size, n_tokens) for size in SIZES[first:end]]
        parts, device = self.config.train.micro_batches * self.n_ranks, self.config.device
        if device == "auto":
            device = choose_device("auto")[0].type
        return [
            each
            for each in configs
            if training_bytes(each, vocab_size, each.train.batch_size // parts, device) <= usable
            and self.parameters(each) <= MAX_PARAMETERS_PER_TOKEN * self.train_tokens
        ]

    def memory_here(self) -> float:
        """Return the memory that a rank may use on this machine, in bytes."""
        device = choose_device(self.config.device)[0]
        n_local = rank_variable("LOCAL_WORLD_SIZE", 1) if device.type == "cpu" else 1
        return memory_limit(device) / n_local

    def config_of_size(self, size: Size, n_tokens: float) -> Config:
        return config_of_size(
            self.config, size, n_tokens, self.corpus, self.fixed_keys, self.n_ranks
        )

    def parameters(self, config: Config) -> int:
        return count_parameters(config.model, self.corpus.tokenizer.vocab_size)

    def readable_tokens(self, speed: float) -> float:
        """Return how many tokens can be read in the remaining time."""
        return INITIAL_FRACTION * self.deadline.remaining * speed

    def affordable_tokens(self, speed: float) -> float:
        """Return how many tokens one model can read in the remaining time, at least 1."""
        return max(1.0, min(self.readable_tokens(speed), MAX_EPOCHS * self.train_tokens))

    def models(self, config: Config, speed: float) -> tuple[int, float]:
        """Return how many models to train one after the other, and the tokens that each reads."""
        readable = self.readable_tokens(speed)
        epochs, train = readable / self.train_tokens, config.train
        overfitting = epochs * math.sqrt(self.parameters(config) / self.train_tokens)
        n_useful = 2 * min(overfitting / SPLIT_OVERFITTING, epochs / SPLIT_EPOCHS)
        n_models = int(min(MAX_MODELS, n_useful))
        is_plain = not (train.from_run or train.teachers or train.patience)
        may_split = config.model.kind == "gpt" and "train.students" not in self.fixed_keys
        if n_models < 2 or not (may_split and is_plain):
            return 1, self.affordable_tokens(speed)
        n_tokens = readable / (n_models + TEACHER_COST * (n_models - 1))
        return n_models, min(n_tokens, self.max_tokens(config, n_models))

    def loss(self, config: Config, speed: float) -> float:
        return predicted_loss(
            self.parameters(config), self.affordable_tokens(speed), self.train_tokens
        )

    def measure_speed(self, config: Config) -> float:
        return self.measure(config, self.deadline.remaining / MIN_STEPS)

    def speed_if_it_fits(self, config: Config) -> float:
        """Return the measured speed, or 0 if the memory is too small."""
        try:
            return self.measure_speed(config)
        except DeviceError:
            if self.n_ranks > 1:  # the others wait for this rank in their trial: all have to end
                raise
            return 0.0
