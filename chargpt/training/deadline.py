"""The deadline of a time budget, and the pace that keeps a planned run within it.

A budget keeps time for the work after the last step. The number of steps is re-planned from the
measured step time before the learning rate begins to decay, then half way through what is left, and
so on. Updates that are done stay as they were, so the final config repeats the run without a
budget.
"""

import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from chargpt.config import Config, ScheduleConfig
from chargpt.device import ThreadTuner
from chargpt.distributed import RankGroup
from chargpt.errors import ConfigError, OperationError
from chargpt.log import logger
from chargpt.models.ngram import MAX_TOKENS
from chargpt.text.corpus import REQUIRED_SPLITS, Corpus
from chargpt.training.optim import decay_start

MIN_SECONDS = 5  # of a budget
LATE = 1.1  # of the announced time: a command that takes longer says so
MIN_STEPS = 20  # fewer are of little use
OVERRUN = 0.08  # fraction of the budget by which the first MIN_STEPS may exceed it
EPOCH_LIMIT_NOTE = (
    "training ends before its time, since more epochs would only over-fit most texts; --resume "
    "with -s train.max_steps=N trains longer"
)
TEACHER_COST = 0.25  # of a teacher's forward pass, relative to a step without one
INITIAL_FRACTION = 0.93  # of the time, for training steps before re-planning
# settings that planning and re-planning change
PLANNED_KEYS = (
    *("train.max_steps", "train.students"),
    *("schedule.cooldown", "schedule.decay_points", "schedule.restarts"),
)
REPLANNED_FRACTION = 0.95  # fraction of the remaining time that is planned for steps
MIN_REMAINING_FRACTION = 1 / 8  # of all steps: when fewer remain, their number is final
MIN_VALIDATION_SECONDS = 0.1  # shorter ones say little about the speed of scoring
# of the number of steps, and steps: smaller changes are not noted
NOTED_CHANGE, NOTED_STEPS = 0.1, 10


# time that a budget keeps for the work after the last step, in seconds
CLOSING_SECONDS = 0.75  # preparing the results table, and the exit of the process
SCORING_FRACTION = 0.04  # of the budget, for scoring, until the time of scoring is measured
SCORING_MARGIN = 1.3  # factor on the measured time of scoring
MIXTURE_SLOWDOWN = 1.3  # time of scoring with a mixture, relative to its GPT
GATE_SECONDS = 0.35  # of fitting a mixture's gate
COUNTING_SECONDS = 0.5  # of counting the n-grams of a mixture, per million tokens
MIXED_TOKENS = 32_000  # of the mixture split, and of the validation split at least
MIN_REPORT_BUDGET = 120  # shortest budget that ends with a report page
REPORT_SECONDS = 2  # of a report page, without its scoring
REPORT_TOKENS = 40_000  # that a report page scores


def parse_duration(duration: str | float) -> float:
    """Return the seconds of a duration such as 90, `90`, `30s`, `3m`, `1m30s` or `2h`.

    Raises:
        ConfigError: it is not a duration, or under `MIN_SECONDS`.
    """
    text = f"{duration:.0f}" if isinstance(duration, float) else str(duration)
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


@dataclass(frozen=True)
class Deadline:
    """When a whole training command has to end, start-up and closing work included.

    Attributes:
        seconds: the budget.
        started: when the command began, as `clock` counts.
        clock: returns the time in seconds.
        slowdown: of the start-up, by which closing work is expected to be slowed down too.
        extension: seconds added to a budget that is too short.
        scoring_seconds: kept for scoring, and for fitting a mixture.
    """

    seconds: float
    started: float
    clock: Callable[[], float] = time.perf_counter
    slowdown: float = 1.0
    extension: float = 0.0
    scoring_seconds: float = 0.0

    @classmethod
    def from_budget(
        cls,
        seconds: float,
        started: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> "Deadline":
        """Return the deadline of a budget that began at `started`, by default now."""
        started = clock() if started is None else started
        # start-up uses one core: beside busy processes it takes longer than its CPU time
        slowdown = max(1.0, (clock() - started) / time.process_time())
        return cls(seconds, started, clock, slowdown, scoring_seconds=SCORING_FRACTION * seconds)

    def shared(self, group: RankGroup) -> "Deadline":
        """Return the deadline on the clock of rank 0, which all ranks must read together."""
        started, slowdown = map(group.broadcast, (self.started, self.slowdown))
        clock = self.clock
        return replace(
            self, started=started, slowdown=slowdown, clock=lambda: group.broadcast(clock())
        )

    @property
    def has_report(self) -> bool:
        """Whether the run ends with a report page."""
        return self.seconds >= MIN_REPORT_BUDGET

    @property
    def remaining(self) -> float:
        """Seconds until the last training step has to be done."""
        closing = CLOSING_SECONDS * self.slowdown + self.scoring_seconds
        closing += REPORT_SECONDS if self.has_report else 0
        return self.seconds + self.extension - closing - (self.clock() - self.started)

    def is_over(self, step: int) -> bool:
        """Return whether training has to stop after `step` steps."""
        overrun = 0.0
        if step < MIN_STEPS:  # an extended budget has announced these steps
            overrun = self.seconds if self.extension else OVERRUN * self.seconds
        return step > 0 and self.remaining < -overrun

    def late_note(self) -> str | None:
        """Return a sentence if the command has taken longer than was announced."""
        seconds, announced = self.clock() - self.started, self.seconds + self.extension
        if seconds <= LATE * announced:
            return None
        announced = math.ceil(announced)  # as `extended_for` rounds it
        return f"this took {seconds:.0f} s instead of {announced} s"

    def require(self, seconds: float) -> None:
        """Raise an OperationError if the fewest useful steps, of `seconds`, take too long.

        A budget may be extended for them by as much again.
        """
        missing = seconds - self.remaining
        if missing > self.seconds:
            raise OperationError(
                f"a budget of {self.seconds:g} s is too short for {MIN_STEPS} steps, the fewest "
                "that are useful, at this speed; give "
                f"--budget {math.ceil(self.seconds + missing)}s"
            )

    def extended_for(self, seconds: float) -> "Deadline":
        """Return the deadline, moved to leave time for the fewest useful steps, of `seconds`.

        That it is moved is logged; it is not for a small overrun.
        """
        missing = seconds - self.remaining
        if missing <= OVERRUN * self.seconds:
            return self
        logger.warning(
            f"the budget of {self.seconds:g} s is too short on this machine now: the whole command "
            f"takes up to {math.ceil(self.seconds + missing)} s instead, for the {MIN_STEPS} steps "
            "that are the fewest useful ones"
        )
        return replace(self, extension=missing)


def mixture_seconds(
    corpus: Corpus, slowdown: float = 1.0, mixing_seconds: float = 0.0, n_tokens: int = MIXED_TOKENS
) -> float:
    """Return the expected time of counting the n-grams of a mixture and of fitting its gate.

    `mixing_seconds` is the time of a token's probabilities, which large vocabularies make long, and
    `n_tokens` how many tokens are mixed to fit the gate, and to score the validation split.
    """
    counted = min(len(corpus.split("train")), MAX_TOKENS)
    fitting = slowdown * (GATE_SECONDS + COUNTING_SECONDS * counted / 1e6)
    return fitting + SCORING_MARGIN * mixing_seconds * n_tokens


def scoring_seconds(
    deadline: Deadline,
    corpus: Corpus,
    config: Config,
    seconds_per_token: float,
    mixing_seconds: float = 0.0,
) -> float:
    """Return the time of the closing work that scores text, from the measured times of a token.

    `mixing_seconds` is as for `mixture_seconds`.
    """
    max_tokens = config.train.evaluation_tokens
    n_train, n_val = (min(max_tokens, len(corpus.split(name))) for name in REQUIRED_SPLITS)
    n_scored, fitting = n_train + n_val, 0.0
    if deadline.has_report:
        n_scored += REPORT_TOKENS
    if n_mixture := len(corpus.split("mixture")):  # a mixture is fitted to it and scored
        n_scored += n_mixture + round(MIXTURE_SLOWDOWN * n_val)
        n_mixed = n_mixture + n_val
        fitting = mixture_seconds(corpus, deadline.slowdown, mixing_seconds, n_mixed)
    if config.train.from_run is not None:  # the text of that run is scored before and after
        n_scored += 2 * max_tokens
    return SCORING_MARGIN * seconds_per_token * n_scored + fitting


@dataclass
class Pace:
    """A planned run that keeps to a deadline: its number of steps and threads follow its speed.

    Attributes:
        deadline: of the run.
        config: as planned, before any re-planning.
        speed: measured, in tokens per second.
        size_was_chosen: whether the model's size was.
        step_limit: number of steps of one model beyond which training would only over-fit.
        validation_seconds: expected of one validation.
        thread_tuner: None leaves the number of threads as it is.
    """

    deadline: Deadline
    config: Config
    speed: float
    size_was_chosen: bool
    step_limit: int
    validation_seconds: float = 0.0
    thread_tuner: ThreadTuner | None = None

    def set_time(self, now: float) -> None:
        """Let the deadline's clock stand at a time that all ranks have agreed on."""
        self.deadline = replace(self.deadline, clock=lambda: now)

    def seconds_of(self, n_steps: float) -> float:
        """Return the expected time of steps, with the validations during the fewest useful ones."""
        n_validations = math.ceil(MIN_STEPS / self.config.train.evaluate_every) + 1
        step_seconds = self.config.tokens_per_step / self.speed
        return n_steps * step_seconds + n_validations * self.validation_seconds

    def fit_plan(self) -> tuple[Config, float]:
        """Return the planned config and the expected seconds of its steps.

        A deadline that is too near for the fewest useful steps is moved, which is logged, and the
        config has so many.
        """
        self.deadline = self.deadline.extended_for(self.seconds_of(MIN_STEPS))
        config = self.config
        if self.deadline.extension:
            config = with_max_steps(config, 0, MIN_STEPS)
        seconds = self.seconds_of(work_of(config, 0, config.train.max_steps) / INITIAL_FRACTION)
        return config, min(self.deadline.remaining, seconds)

    def start(self, config: Config, step: int) -> None:
        """Begin to measure steps; call it before the first one, after `step` steps."""
        self.noted_steps = config.train.max_steps  # in the last note to the user
        self.last_step = step
        self._start_measuring(config, step)

    def _start_measuring(self, config: Config, step: int) -> None:
        """Measure the step time from now on, until the next re-planning.

        It is due after `replan_step` steps, or when as little time remains as was planned to remain
        then: a slower machine reaches the time first.
        """
        max_steps, remaining = config.train.max_steps, self.deadline.remaining
        self.measured_from = step, self.deadline.clock()
        self.replan_step = next_replan_step(config, step)
        if self.replan_step is not None:
            fraction = (max_steps - self.replan_step) / (max_steps - step)
            self.replan_remaining = fraction * remaining

    def observe_validation(self, seconds: float) -> None:
        """Reserve more time for scoring at the end if a validation took longer than before."""
        planned = self.validation_seconds
        if 0 < planned < seconds and seconds > MIN_VALIDATION_SECONDS:
            longer = self.deadline.scoring_seconds * seconds / planned
            self.deadline = replace(self.deadline, scoring_seconds=longer)
            self.validation_seconds = seconds

    def adjusted(self, config: Config, step: int, speed: float) -> Config:
        """Return the config to continue with after `step` steps.

        Changes of the number of steps since the last note are noted when they are large. `speed`,
        in characters/s, is that by which the number of threads is chosen.
        """
        replanned = self.replanned(config, step)
        if replanned is not None:
            config, old, new = replanned, self.noted_steps, replanned.train.max_steps
            if abs(new - old) >= max(NOTED_STEPS, NOTED_CHANGE * old):
                cause = f"training is {'slower' if new < old else 'faster'} than measured before"
                if new == self._last_step_of(config):
                    cause = EPOCH_LIMIT_NOTE
                logger.warning(f"re-planned: {old:,} -> {new:,} steps: {cause}")
                self.noted_steps = new
        threads = self.thread_tuner.update(speed) if self.thread_tuner and speed else None
        if threads is not None:
            logger.warning(f"continuing with threads={threads}, measured as faster now")
            config = config.with_values({"threads": threads})
        return config

    def replanned(self, config: Config, step: int) -> Config | None:
        """Return the re-planned config if re-planning is due after `step` steps, else None."""
        now, remaining = self.deadline.clock(), self.deadline.remaining
        # step 1 is a slow one, and a rollback repeats steps
        if step == 1 or step < self.last_step:
            self.measured_from = step, now
        self.last_step = step
        first, since = self.measured_from
        if self.replan_step is None or step <= first:
            return None
        if step < self.replan_step and remaining >= self.replan_remaining:
            return None
        step_seconds = (now - since) / work_of(config, first, step)
        # an extended budget ends early where it can, instead of training more steps
        seconds = remaining - self.deadline.extension
        limit = self._last_step_of(config)
        config = replanned_config(config, step, step_seconds, seconds, limit)
        self._start_measuring(config, step)
        return config

    def _last_step_of(self, config: Config) -> int:
        """Return the last step that a run of one model, or of several in turn, may have."""
        return self.step_limit + max(config.train.students, default=0)


def replanned_config(
    config: Config, step: int, step_seconds: float, seconds: float, step_limit: int = sys.maxsize
) -> Config:
    """Return the config with as many steps after `step` as the remaining time allows.

    Args:
        config: of the run so far.
        step: number of steps done.
        step_seconds: measured time of a step without a teacher, validation and saving included.
        seconds: until the last step has to be done.
        step_limit: of the number of all steps, however much time remains.
    """
    fewest = min(MIN_STEPS, config.train.max_steps) - step
    affordable = int(REPLANNED_FRACTION * seconds / step_seconds)
    n_steps = max(1, min(max(fewest, steps_of(config, step, affordable)), step_limit - step))
    return with_max_steps(config, step, step + n_steps)


def work_of(config: Config, first: int, last: int) -> float:
    """Return the time of the steps after `first` up to `last`, in steps without a teacher."""
    n_taught = max(0, last - max(first, min(config.train.students, default=last)))
    return last - first + TEACHER_COST * n_taught


def steps_of(config: Config, step: int, work: float) -> int:
    """Return how many steps after `step` have this work, see `work_of`."""
    untaught = max(0, min(config.train.students, default=sys.maxsize) - step)
    return int(min(work, untaught) + max(0.0, work - untaught) / (1 + TEACHER_COST))


def with_max_steps(config: Config, step: int, max_steps: int) -> Config:
    """Return the config with another number of steps; those done keep their learning rates.

    A decay that has not begun begins at `step`; one that has begun continues with another slope.
    Students for which less than half of their time would be left are not started.
    """
    values: dict[str, object] = {"train.max_steps": max_steps}
    schedule, students = config.schedule, config.train.students
    if students and step <= students[-1]:  # the last one has not begun
        started = [at for at in students if at < step or max_steps - at >= students[0] / 2]
        if len(started) == len(students):
            return config.with_values(values)
        end = students[len(started)]
        values = {
            "train.max_steps": end,
            "train.students": started,
            "schedule.restarts": [pair for pair in schedule.restarts if pair[0] < end],
        }
        config = config.with_values(values)
        return config if max_steps >= end else with_max_steps(config, step, max_steps)
    if not has_linear_decay(schedule):
        return config.with_values(values)
    is_before = step <= decay_start(schedule, config.train.max_steps)
    if is_before and not (schedule.decay_points or schedule.restarts):
        values["schedule.cooldown"] = (max_steps - step) / max_steps
    else:
        point = (step - 1, config.train.max_steps)
        values["schedule.decay_points"] = (*schedule.decay_points, point)
    return config.with_values(values)


def has_linear_decay(schedule: ScheduleConfig) -> bool:
    """Return whether the learning rate ends with a decay that can be re-planned."""
    return bool(schedule.restarts) or (schedule.kind == "wsd" and schedule.cooldown > 0)


def next_replan_step(config: Config, step: int) -> int | None:
    """Return the step after which to re-plan next: where the decay begins, then half way on.

    With students or other restarts it is half way from the start on.

    `step` is that of the last re-planning, 0 for none. The result is None when less than an eighth
    of the steps remains, or the schedule has no decay to re-plan, as `cosine` has none.
    """
    max_steps, schedule = config.train.max_steps, config.schedule
    if not has_linear_decay(schedule):
        return None
    begins = max(2, decay_start(schedule, max_steps))
    if step < begins and not schedule.restarts:
        return begins
    remaining = max_steps - step
    is_enough = remaining > max(1, MIN_REMAINING_FRACTION * max_steps)
    return step + remaining // 2 if is_enough else None
