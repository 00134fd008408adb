"""A time budget: its deadline, the measured speed of training, and the re-planning of the run.

The number of steps is re-planned from the measured step time before the learning rate begins to
decay, then half way through what is left, and so on. Updates that are done stay as they were, so
the final config repeats the run without a budget.
"""

import math
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from chargpt.config import Config
from chargpt.device import synchronize
from chargpt.errors import ConfigError, OperationError
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.models import LanguageModel
from chargpt.models.ngram import MAX_TOKENS
from chargpt.text.corpus import REQUIRED_SPLITS, Corpus
from chargpt.threads import ThreadTuner
from chargpt.training.learner import Learner
from chargpt.training.schedule import decay_start

MIN_SECONDS = 5
MIN_TRIAL_SECONDS = 0.05  # of trial steps: one of a bigram or on a GPU may take less than 1 ms
MAX_EPOCHS = 40  # of a plan; more over-fit
EPOCH_LIMIT_NOTE = (
    f"training ends before its time, after {MAX_EPOCHS} epochs, since more would only over-fit "
    "most texts; chargpt train --resume with -s train.max_steps=N trains longer"
)
LATE = 1.1  # of the announced time: a command that takes longer says so
TRIAL_LR_FACTOR = 1e-6  # trial updates must not leave the usual range of values


@dataclass(frozen=True)
class Reserve:
    """Time that a budget keeps for the work after the last step."""

    seconds: float = 0.75  # preparing the results table, and the exit of the process
    fraction: float = 0.04  # of the budget, for scoring, until the time of scoring is measured
    min_report_budget: float = 120  # seconds: shortest budget that ends with a report page
    report_seconds: float = 2  # of a report page, without its scoring
    report_tokens: int = 40_000  # that a report page scores
    timed_tokens: int = 8_000  # scored to measure the speed of scoring
    gate_seconds: float = 0.35  # of fitting a mixture's gate
    counting_seconds: float = 0.5  # of counting the n-grams of a mixture, per million tokens
    mixture_fraction: float = 0.2  # of the remaining time: if fitting takes longer, no mixture
    margin: float = 1.3  # factor on the measured time of scoring
    min_validation_seconds: float = 0.1  # shorter ones say little about the speed of scoring
    mixture_slowdown: float = 1.3  # time of scoring with a mixture, relative to its GPT


@dataclass(frozen=True)
class Replanning:
    """Constants of re-planning."""

    replanned_fraction: float = 0.95  # fraction of the remaining time that is planned for steps
    min_fraction: float = 1 / 8  # of all steps: when fewer remain, their number is final
    min_steps: int = 20  # fewer are of little use
    overrun: float = 0.08  # fraction of the budget by which the first `min_steps` may exceed it
    # of the number of steps, and steps: smaller changes are not noted
    noted_change: float = 0.1
    noted_steps: int = 10
    # slowdown from which a note gives the factor; some is normal: trial steps have no validation
    noted_slowdown: float = 2.0


RESERVE, REPLANNING = Reserve(), Replanning()


def mixture_seconds(corpus: Corpus, slowdown: float = 1.0) -> float:
    """Return the expected time of counting the n-grams of a mixture and of fitting its gate."""
    counted = min(len(corpus.split("train")), MAX_TOKENS)
    return slowdown * (RESERVE.gate_seconds + RESERVE.counting_seconds * counted / 1e6)


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as `90`, `30s`, `3m`, `1m30s` or `2h`.

    Raises:
        ConfigError: it is not a duration, or under `MIN_SECONDS`.
    """
    match = re.fullmatch(r"(?:(\d{1,4})h)?(?:(\d{1,6})m)?(?:(\d{1,8})s)?|(\d{1,8})", text.strip())
    if not match or not any(match.groups()):
        raise ConfigError(
            f"the time {text!r:.40} is not a duration; write it like 30s, 3m, 1m30s or 2h"
        )
    hours, minutes, seconds, bare = (int(part or 0) for part in match.groups())
    total = 3600 * hours + 60 * minutes + seconds + bare
    if total < MIN_SECONDS:
        raise ConfigError(f"{text} is too short to train in; give {MIN_SECONDS}s or more")
    return total


class Budget:
    """A time budget for a whole training command, start-up and closing work included.

    Args:
        seconds: the budget.
        fixed_keys: dotted config keys that the user has set and planning must not change.
        started: when the command began, as `clock` counts; now by default.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        seconds: float,
        fixed_keys: Collection[str] = (),
        started: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds = seconds
        self.fixed_keys = frozenset(fixed_keys)
        self.clock = clock
        self.started = clock() if started is None else started
        # start-up uses one core: beside busy processes it takes longer than its CPU time
        self.slowdown = max(1.0, (clock() - self.started) / time.process_time())
        self.extension = 0.0  # seconds, where the budget is too short
        self.step_limit: int | None = None  # more would only over-fit; set by planning
        self.size_is_set = False  # by the user, who may choose a smaller model; set by planning
        self.evaluation_seconds = RESERVE.fraction * seconds
        self.validation_seconds = 0.0  # of one validation in training; measured later
        self.replan_step: int | None = None
        self.noted_steps = 0  # number of steps in the last note to the user
        self.planned_step_seconds = math.nan  # of a step; measured later
        self.replan_remaining = 0.0  # seconds remaining when re-planning is due
        self.thread_tuner: ThreadTuner | None = None
        # step and time that the last, and the first, measurement begins at: step 1 is a slow one
        self.measured_from = self.started_from = (1, math.nan)
        self.last_step = 0  # that `replan` was asked about

    @property
    def has_report(self) -> bool:
        """Whether the run ends with a report page."""
        return self.seconds >= RESERVE.min_report_budget

    @property
    def remaining(self) -> float:
        """Seconds until the last training step has to be done."""
        closing = RESERVE.seconds * self.slowdown + self.evaluation_seconds
        closing += RESERVE.report_seconds if self.has_report else 0
        return self.seconds + self.extension - closing - (self.clock() - self.started)

    def is_over(self, step: int) -> bool:
        """Return whether training has to stop after `step` steps."""
        overrun = 0.0
        if step < REPLANNING.min_steps:  # an extended budget has announced these steps
            overrun = self.seconds if self.extension else REPLANNING.overrun * self.seconds
        return step > 0 and self.remaining < -overrun

    def extend_for(
        self, n_steps: int, step_seconds: float, validation_seconds: float = 0.0
    ) -> str | None:
        """Extend a budget in which `n_steps` steps do not fit; return a note about it.

        Raises:
            OperationError: as `require_time_for` does.
        """
        missing = self.require_time_for(n_steps, step_seconds, validation_seconds)
        if missing <= REPLANNING.overrun * self.seconds:
            return None
        self.extension = missing
        return (
            f"the budget of {self.seconds:g} s is too short on this machine now: the whole command "
            f"takes up to {math.ceil(self.seconds + missing)} s instead, for the {n_steps} steps "
            "that are the fewest useful ones"
        )

    def require_time_for(
        self, n_steps: int, step_seconds: float, validation_seconds: float = 0.0
    ) -> float:
        """Return the seconds that `n_steps` steps and validations lack; negative if they fit.

        Raises:
            OperationError: they lack more than the whole budget again.
        """
        missing = n_steps * step_seconds + validation_seconds - self.remaining
        if missing > self.seconds:
            smaller = ", or a smaller model" if self.size_is_set else ""
            raise OperationError(
                f"a budget of {self.seconds:g} s is too short for {n_steps} steps, the fewest that "
                "are useful, on this machine now; give "
                f"--budget {math.ceil(self.seconds + missing)}s{smaller}"
            )
        return missing

    def measure_evaluation(self, model: LanguageModel, corpus: Corpus, config: Config) -> None:
        """Measure how long the final evaluations take and reserve that time."""
        max_tokens = config.train.evaluation_tokens
        splits = [corpus.split(split) for split in REQUIRED_SPLITS]
        # a short split is repeated: the time of a single forward pass says little about a long text
        tokens = np.resize(splits[-1][: RESERVE.timed_tokens + 1], RESERVE.timed_tokens + 1)
        # the first call is a warm-up: a GPU loads its kernels
        for n_timed in (model.block_size, RESERVE.timed_tokens):
            start = self.clock()
            timed = evaluate_tokens(model, tokens, max_tokens=n_timed)
        per_character = (self.clock() - start) / timed.characters
        per_token = per_character * corpus.characters_per_token
        self.validation_seconds = per_token * min(max_tokens, len(splits[-1]))
        n_scored = sum(min(max_tokens, len(tokens)) for tokens in splits)
        n_scored += RESERVE.report_tokens if self.has_report else 0
        n_mixture = len(corpus.split("mixture"))
        if n_mixture:  # a mixture is fitted to it and scored
            n_scored += n_mixture
            n_scored += round(RESERVE.mixture_slowdown * min(max_tokens, len(splits[-1])))
        if config.train.from_run is not None:  # the text of that run is scored before and after
            n_scored += 2 * max_tokens
        self.evaluation_seconds = RESERVE.margin * per_token * n_scored
        self.evaluation_seconds += mixture_seconds(corpus, self.slowdown) if n_mixture else 0.0

    def update_evaluation(self, validation_seconds: float) -> None:
        """Reserve more time for the final evaluations if a validation took longer than before."""
        planned = self.validation_seconds
        if 0 < planned < validation_seconds and validation_seconds > RESERVE.min_validation_seconds:
            self.evaluation_seconds *= validation_seconds / self.validation_seconds
            self.validation_seconds = validation_seconds

    def late_note(self) -> str | None:
        """Return a sentence if the command has taken longer than was announced."""
        seconds, announced = self.clock() - self.started, self.seconds + self.extension
        if seconds <= LATE * announced:
            return None
        announced = math.ceil(announced)  # as `extend_for` rounds it
        return f"this took {seconds:.0f} s instead of {announced} s: the machine slowed down"

    def start(self, config: Config, step: int) -> None:
        """Begin to measure steps; call it before the first one."""
        self.measured_from = self.started_from = max(1, step), self.clock()
        self.noted_steps = config.train.max_steps
        self.planned_step_seconds = self.remaining / max(1, config.train.max_steps - step)
        self._schedule_replanning(config, step, 0)

    def adjust(self, config: Config, step: int, speed: float, notes: list[str]) -> Config:
        """Return the config to continue with after `step` steps; add sentences to `notes`."""
        replanned = self.replan(config, step)
        if replanned is not None:
            config, steps = replanned, replanned.train.max_steps
            first, since = self.started_from
            slowdown = (self.clock() - since) / (step - first) / self.planned_step_seconds
            if found := replanning_notes(self.noted_steps, steps, slowdown, self.step_limit):
                notes += found
                self.noted_steps = steps
        threads = self.thread_tuner.update(speed) if self.thread_tuner and speed else None
        if threads is not None:
            unit = "thread" if threads == 1 else "threads"
            notes.append(f"continuing with {threads} CPU {unit}: measured as faster now")
            config = config.with_values({"threads": threads})
        return config

    def replan(self, config: Config, step: int) -> Config | None:
        """Return the re-planned config if re-planning is due after `step` steps, else None.

        It is due at its step, or when the time planned for that step has come: a slower machine
        reaches the time first.
        """
        now, remaining = self.clock(), self.remaining
        first, since = self.measured_from
        if step == 1 or step < self.last_step:  # a rollback repeats steps
            first, since = self.measured_from = self.started_from = step, now
        self.last_step = step
        if self.replan_step is None or step <= first:
            return None
        if step < self.replan_step and remaining >= self.replan_remaining:
            return None
        step_seconds = (now - since) / (step - first)
        # an extended budget ends early where it can, instead of training more steps
        seconds = remaining - self.extension
        config = replanned_config(config, step, step_seconds, seconds, self.step_limit)
        self.measured_from = step, now
        self._schedule_replanning(config, step, step)
        return config

    def _schedule_replanning(self, config: Config, step: int, last_replan_step: int) -> None:
        """Set when to re-plan next, as a step and as a remaining time."""
        self.replan_step = next_replan_step(config, last_replan_step)
        if self.replan_step is not None:
            max_steps = config.train.max_steps
            fraction = (max_steps - self.replan_step) / (max_steps - step)
            self.replan_remaining = self.remaining * fraction


def replanned_config(
    config: Config, step: int, step_seconds: float, seconds: float, step_limit: int | None = None
) -> Config:
    """Return the config with as many steps after `step` as the remaining time allows.

    Args:
        config: of the run so far.
        step: number of steps done.
        step_seconds: measured time of a step, validation and saving included.
        seconds: until the last step has to be done.
        step_limit: of the number of all steps, however much time remains.
    """
    fewest = min(REPLANNING.min_steps, config.train.max_steps) - step
    n_steps = max(1, fewest, int(REPLANNING.replanned_fraction * seconds / step_seconds))
    if step_limit is not None:
        n_steps = min(n_steps, max(1, step_limit - step))
    return with_max_steps(config, step, step + n_steps)


def with_max_steps(config: Config, step: int, max_steps: int) -> Config:
    """Return the config with another number of steps; those done keep their learning rates.

    A decay that has not begun begins at `step`; one that has begun continues with another slope.
    """
    values: dict[str, object] = {"train.max_steps": max_steps}
    schedule = config.schedule
    if schedule.kind != "wsd" or not schedule.cooldown:
        return config.with_values(values)  # there is no decay to re-plan
    if step <= decay_start(schedule, config.train.max_steps) and not schedule.decay_points:
        values["schedule.cooldown"] = (max_steps - step) / max_steps
    else:
        point = (step - 1, config.train.max_steps)
        values["schedule.decay_points"] = (*schedule.decay_points, point)
    return config.with_values(values)


def replanning_notes(
    old: int, new: int, slowdown: float, step_limit: int | None = None
) -> list[str]:
    """Return a sentence about a large change of the number of steps since the last note, or none.

    A step takes `slowdown` times as long as planned; `step_limit` is that of `replanned_config`.
    """
    if abs(new - old) < max(REPLANNING.noted_steps, REPLANNING.noted_change * old):
        return []
    if new == step_limit:
        return [f"re-planned: {old:,} -> {new:,} steps: {EPOCH_LIMIT_NOTE}"]
    cause = f"{'slower' if new < old else 'faster'} than measured before"
    if new < old and slowdown >= REPLANNING.noted_slowdown:
        factor = f"{slowdown:.1f}" if slowdown < 9.95 else f"{slowdown:.0f}"
        cause = f"{factor} times slower than planned"
    return [f"re-planned: {old:,} -> {new:,} steps: training is {cause}"]


def next_replan_step(config: Config, step: int) -> int | None:
    """Return the step after which to re-plan next: where the decay begins, then half way on.

    `step` is that of the last re-planning, 0 for none. The result is None when few steps remain,
    or the schedule has no decay to re-plan.
    """
    max_steps = config.train.max_steps
    if config.schedule.kind != "wsd" or not config.schedule.cooldown:
        return None
    if step == 0:
        return max(2, decay_start(config.schedule, max_steps))
    remaining = max_steps - step
    is_enough = remaining > max(1, REPLANNING.min_fraction * max_steps)
    return step + remaining // 2 if is_enough else None


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
