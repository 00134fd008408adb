"""The time of a run, from a few measured steps, and its plan for a time budget.

`planner.py` chooses; here are the threads, the mixture split and the trials.
"""

import math
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from chargpt.config import REPLANNED, Config
from chargpt.device import ThreadTuner, choose_device, default_threads, measure_threads, synchronize
from chargpt.distributed import RankGroup
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.log import logger
from chargpt.models import build_model
from chargpt.models.mixture import MIXTURE_ORDER, WORDS
from chargpt.text.corpus import MAX_MIXTURE_FRACTION, MIN_MIXTURE_CHARACTERS, Corpus
from chargpt.training.deadline import (
    INITIAL_FRACTION,
    MIN_STEPS,
    Deadline,
    Pace,
    mixture_seconds,
    scoring_seconds,
    steps_of,
)
from chargpt.training.learner import Learner, explained_memory_errors
from chargpt.training.planner import MIXTURE_CHARACTERS, Planner
from chargpt.training.trainer import Trainer

if TYPE_CHECKING:
    from chargpt.training.teachers import Teachers

MAX_MIXTURE_TIME = 0.2  # fraction of the remaining time: if fitting takes longer, no mixture
TRIAL_STEPS = 3  # that measure a size's speed
TIMED_TOKENS = 8_000  # scored to measure the speed of scoring
TIMED_ROWS = 256  # of probabilities, mixed to measure the speed of mixing
# factor on the time of the forward and backward pass: measured for the default config, the
# optimizer adds 38 ms to between 175 and 280 ms
UPDATE_OVERHEAD = 1.15
MIN_TRIAL_SECONDS = 0.05  # of trial steps: one of a bigram or on a GPU may take less than 1 ms
TRIAL_LR_FACTOR = 1e-6  # trial updates must not leave the usual range of values


def with_measured_threads(config: Config) -> Config:
    """Return the config with the number of CPU threads that is fastest now, unless it is fixed."""
    if config.threads is not None:
        return config
    return config.with_values({"threads": measure_threads(choose_device(config.device)[0])})


def plan_run(
    config: Config,
    corpus: Corpus,
    deadline: Deadline,
    fixed_keys: frozenset[str],
    group: RankGroup = RankGroup(),
) -> tuple[Config, Corpus, Pace]:
    """Plan a run for a deadline, which the ranks share, from trial steps that they run together.

    The user has set the dotted keys `fixed_keys`; if `threads` is not one of them, their number is
    measured again while the run trains.

    Returns:
        The config, the corpus with its mixture split, and what keeps the run within the deadline.

    Raises:
        ConfigError: `train.max_steps` is fixed too.
        OperationError: the fewest useful steps would take more than twice the budget.
    """
    config = config.with_values(dict.fromkeys(REPLANNED, ()))
    mixing = Trials(corpus, group).measure_mixing(config)
    config = with_mixture_split(config, corpus, deadline, fixed_keys, mixing)
    corpus = corpus.with_settings(mixture_characters=config.text.mixture_characters)
    if len(corpus.split("mixture")):
        seconds = deadline.scoring_seconds + mixture_seconds(corpus, deadline.slowdown, mixing)
        deadline = replace(deadline, scoring_seconds=seconds)
    trials = Trials(corpus, group)
    planner = Planner(config, corpus, deadline, fixed_keys, trials, group.world_size)
    if not group.is_alone:  # that of the rank with the least, so that all try the same sizes
        memory = torch.tensor([planner.memory_here()], dtype=torch.float64)
        planner = replace(planner, memory=float(group.all_gather(memory).min()))
    pace = planner.plan()
    reserve_scoring(pace, trials)
    if pace.config.threads is not None and "threads" not in fixed_keys and group.world_size == 1:
        pace.thread_tuner = ThreadTuner(default_threads())
    # before anything is trained: when a comparison comes to this run, others may have taken longer
    pace.deadline.require(pace.seconds_of(MIN_STEPS))
    return pace.config, corpus, pace


def plan_more_steps(
    config: Config, step: int, corpus: Corpus, deadline: Deadline, group: RankGroup
) -> Pace:
    """Plan how many steps more a run has time for after `step` steps; they are in `pace.config`.

    Raises:
        OperationError: the fewest useful steps would take more than twice the budget.
    """
    trials = Trials(corpus, group)
    speed = trials(config, deadline.remaining / MIN_STEPS)
    pace = Pace(deadline, config, speed, size_was_chosen=False, step_limit=sys.maxsize)
    reserve_scoring(pace, trials)
    fewest = pace.seconds_of(MIN_STEPS)
    pace.deadline.require(fewest)
    pace.deadline = pace.deadline.extended_for(fewest)
    affordable = int(INITIAL_FRACTION * pace.deadline.remaining * speed / config.tokens_per_step)
    n_steps = max(MIN_STEPS, steps_of(config, step, affordable))
    pace.config = config.with_values({"train.max_steps": step + n_steps})
    return pace


def reserve_scoring(pace: Pace, trials: "Trials") -> None:
    """Keep the measured time of scoring after the last step, for re-planning too."""
    config, corpus = pace.config, trials.corpus
    token_seconds = trials.measure_scoring(config)
    mixing_seconds = trials.measure_mixing(config)
    reserved = scoring_seconds(pace.deadline, corpus, config, token_seconds, mixing_seconds)
    pace.deadline = replace(pace.deadline, scoring_seconds=reserved)
    n_scored = min(config.train.evaluation_tokens, len(corpus.split("val")))
    pace.validation_seconds = token_seconds * n_scored / trials.group.world_size


def with_mixture_split(
    config: Config,
    corpus: Corpus,
    deadline: Deadline,
    fixed_keys: frozenset[str],
    mixing_seconds: float = 0.0,
) -> Config:
    """Return the config with a mixture split, unless the user has fixed its length.

    There is none, which is logged, if the text is too short for it, or if fitting the mixture would
    take too much of the time that is left; `mixing_seconds` is as for `mixture_seconds`.
    """
    key = "text.mixture_characters"
    if key in fixed_keys or config.model.kind != "gpt":
        return config
    seconds = mixture_seconds(corpus, deadline.slowdown, mixing_seconds)
    remaining = deadline.remaining
    with_split = corpus.with_settings(mixture_characters=MIXTURE_CHARACTERS)
    max_fraction = 2 * MAX_MIXTURE_FRACTION  # of a split that ends with a whole document
    is_short = MAX_MIXTURE_FRACTION * corpus.n_characters < MIN_MIXTURE_CHARACTERS
    if is_short or len(with_split.split("mixture")) > max_fraction * len(corpus.tokens):
        cause = "the text is too short, or its documents are too long, to leave a part out"
    elif seconds > MAX_MIXTURE_TIME * remaining:
        cause = (
            f"fitting one would take about {seconds:.1f} s, over {MAX_MIXTURE_TIME:.0%} of the "
            f"{max(0.0, remaining):.1f} s that are left; give a longer --budget"
        )
    else:
        return config.with_values({key: MIXTURE_CHARACTERS})
    logger.warning(f"without a mixture: {cause}")
    return config


class Trials:
    """Measures configs on a text; the planner calls it for each size that it considers.

    What it returns is rank 0's measurement, on every rank.
    """

    def __init__(self, corpus: Corpus, group: RankGroup = RankGroup()) -> None:
        self.corpus, self.group = corpus, group
        self.teachers: Teachers | None = None  # those of the config, once loaded

    def __call__(self, config: Config, max_seconds: float = math.inf) -> float:
        """Return the tokens per second of trial steps, without n-gram soft targets.

        Soft targets cost a tenth or less, which re-planning takes into account. If one step takes
        over `max_seconds`, it is the only one.

        Raises:
            DeviceError: there is not enough memory.
        """
        fresh = {"train.ngram_target_weight": 0.0, "train.from_run": None, "optim.l2_sp": 0.0}
        torch.cuda.empty_cache()  # CUDA graphs take memory beside torch's
        config = config.with_values(fresh)
        with explained_memory_errors(config, self.corpus, self.group):
            learner = Trainer(config, self.corpus, group=self.group, teachers=self.teachers).learner
            self.teachers = learner.teachers
            seconds = measure_step_seconds(
                learner, TRIAL_STEPS, update=True, max_seconds=max_seconds
            )
            learner.unwrap_ddp()
        return config.tokens_per_step / seconds

    def measure_scoring(self, config: Config) -> float:
        """Return the seconds per token of scoring with a model of these sizes."""
        tokenizer = self.corpus.tokenizer
        model = build_model(config.model, tokenizer.vocab_size)
        model.first_continuation_id = tokenizer.first_continuation_id
        model.to(choose_device(config.device)[0])
        # a short split is repeated: a single forward pass says little about the time of many
        val = self.corpus.split("val")
        tokens = np.resize(val[: TIMED_TOKENS + 1], TIMED_TOKENS + 1)
        # the first call is a warm-up: a GPU loads its kernels
        for n_timed in (model.block_size, TIMED_TOKENS):
            start = time.perf_counter()
            timed = evaluate_tokens(model, tokens, max_tokens=n_timed)
        per_character = (time.perf_counter() - start) / timed.characters
        return self.group.broadcast(per_character * self.corpus.characters_per_token)

    def measure_mixing(self, config: Config) -> float:
        """Return the seconds per token of adding up the probabilities of a mixture's components."""
        device = choose_device(config.device)[0]
        weight = torch.full((TIMED_ROWS, 1), 0.5, device=device)
        log_probs = torch.zeros(TIMED_ROWS, self.corpus.tokenizer.vocab_size, device=device)
        for n_components in (1, MIXTURE_ORDER + WORDS + 1):  # the first is a warm-up
            synchronize(device)
            start = time.perf_counter()
            probs, mixed = log_probs.exp(), weight * log_probs.log_softmax(dim=-1).exp()
            for _ in range(n_components):
                probs *= weight
                mixed += weight * probs
            torch.cat([mixed.log()])
        synchronize(device)
        return self.group.broadcast((time.perf_counter() - start) / TIMED_ROWS)


def expected_seconds(trainer: Trainer) -> float:
    """Return the expected time of a run's remaining steps, validation included.

    It follows from a few trial steps, which change nothing.
    """
    train, tokens_per_step = trainer.config.train, trainer.config.tokens_per_step
    n_steps = train.max_steps - trainer.state.step
    step_seconds = UPDATE_OVERHEAD * measure_step_seconds(trainer.learner, 2, update=False)
    scored = min(train.evaluation_tokens, len(trainer.corpus.split("val")))
    # a forward pass takes about a third of a step
    evaluation = step_seconds * scored / tokens_per_step / 3
    return n_steps * step_seconds + (n_steps // train.evaluate_every + 2) * evaluation


def measure_step_seconds(
    learner: Learner, n_steps: int, *, update: bool, max_seconds: float = math.inf
) -> float:
    """Return rank 0's mean time of `n_steps` trial steps or more, without the first, a warm-up.

    Without `update` the weights stay as they are. If the warm-up takes over `max_seconds`, its time
    is returned, or on a GPU, where it loads kernels, that of one more step.
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
        return learner.group.broadcast((time.perf_counter() - start) / number)

    warm_up = run(1)
    if warm_up > max_seconds:
        return warm_up if learner.device.type == "cpu" else run(1)
    seconds = run(n_steps - 1)
    if (n_steps - 1) * seconds < MIN_TRIAL_SECONDS:
        seconds = run(math.ceil(MIN_TRIAL_SECONDS / seconds))
    learner.model.zero_grad(set_to_none=True)
    return seconds
