"""Keeping a planned run within its deadline by re-planning its number of steps.

The number of steps is re-planned from the measured step time before the learning rate begins to
decay, then half way through what is left, and so on. Updates that are done stay as they were, so
the final config repeats the run without a budget.
"""

import math
from dataclasses import dataclass, replace

from chargpt.config import Config
from chargpt.log import logger
from chargpt.threads import ThreadTuner
from chargpt.training.deadline import MIN_STEPS, Deadline
from chargpt.training.planner import EPOCH_LIMIT_NOTE, RECIPE, Plan
from chargpt.training.schedule import decay_start

PLANNED_KEYS = ("train.max_steps", "schedule.cooldown", "schedule.decay_points")
REPLANNED_FRACTION = 0.95  # fraction of the remaining time that is planned for steps
MIN_FRACTION = 1 / 8  # of all steps: when fewer remain, their number is final
MIN_VALIDATION_SECONDS = 0.1  # shorter ones say little about the speed of scoring
# of the number of steps, and steps: smaller changes are not noted
NOTED_CHANGE, NOTED_STEPS = 0.1, 10


@dataclass(frozen=True)
class Stretch:
    """Steps whose speed is measured, from a step on until re-planning is due.

    Re-planning is due after `end` steps, or when as little time remains as was planned to remain
    then: a slower machine reaches the time first. None: it is not due any more.
    """

    step: int  # at which the measurement begins
    time: float  # by the deadline's clock
    end: int | None
    end_remaining: float  # seconds

    @classmethod
    def begin(
        cls, config: Config, step: int, last_replan_step: int, deadline: Deadline
    ) -> "Stretch":
        """Return the stretch that begins now, after `step` steps."""
        end = next_replan_step(config, last_replan_step)
        max_steps, remaining = config.train.max_steps, deadline.remaining
        fraction = 0.0 if end is None else (max_steps - end) / (max_steps - step)
        return cls(max(1, step), deadline.clock(), end, fraction * remaining)


class Pace:
    """Stops a run at its deadline and adjusts its number of steps and threads to its speed.

    Args:
        deadline: of the run.
        plan: of the run; None: its number of steps has no limit.
        validation_seconds: expected of one validation.
        thread_tuner: None leaves the number of threads as it is.
    """

    def __init__(
        self,
        deadline: Deadline,
        plan: Plan | None = None,
        *,
        validation_seconds: float = 0.0,
        thread_tuner: ThreadTuner | None = None,
    ) -> None:
        self.deadline, self.plan = deadline, plan
        self.step_limit = None if plan is None else plan.step_limit
        self.validation_seconds, self.thread_tuner = validation_seconds, thread_tuner

    def fewest_steps_seconds(self) -> tuple[float, float]:
        """Return the expected time of the fewest useful planned steps, and of their validations."""
        assert self.plan is not None
        n_validations = math.ceil(MIN_STEPS / self.plan.config.train.evaluate_every) + 1
        return MIN_STEPS * self.plan.step_seconds, n_validations * self.validation_seconds

    def fit_plan(self) -> tuple[Config, float]:
        """Return the planned config for the time that is left, and the seconds of its steps.

        A deadline that is too near for the fewest useful steps is moved, which is logged.
        """
        assert self.plan is not None
        config, step_seconds = self.plan.config, self.plan.step_seconds
        steps, validations = self.fewest_steps_seconds()
        self.deadline = self.deadline.extended_for(steps + validations)
        if self.deadline.extension:
            remaining = self.deadline.remaining - validations
            config = replanned_config(config, 0, step_seconds, remaining)
        planned_seconds = config.train.max_steps * step_seconds / RECIPE.initial_fraction
        return config, min(self.deadline.remaining, planned_seconds + validations)

    def start(self, config: Config, step: int) -> None:
        """Begin to measure steps; call it before the first one, after `step` steps."""
        self.stretch = Stretch.begin(config, step, 0, self.deadline)
        self.noted_steps = config.train.max_steps  # in the last note to the user
        self.last_step = step

    def observe_validation(self, seconds: float) -> None:
        """Reserve more time for scoring at the end if a validation took longer than before."""
        planned = self.validation_seconds
        if 0 < planned < seconds and seconds > MIN_VALIDATION_SECONDS:
            longer = self.deadline.scoring_seconds * seconds / planned
            self.deadline = replace(self.deadline, scoring_seconds=longer)
            self.validation_seconds = seconds

    def adjusted(self, config: Config, step: int, speed: float) -> Config:
        """Return the config to continue with after `step` steps at a speed in characters/s."""
        if (replanned := self.replanned(config, step)) is not None:
            config, max_steps = replanned, replanned.train.max_steps
            note = replanning_note(self.noted_steps, max_steps, self.step_limit)
            if note is not None:
                logger.warning(note)
                self.noted_steps = max_steps
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
            self.stretch = replace(self.stretch, step=step, time=now)
        self.last_step = step
        stretch = self.stretch
        if stretch.end is None or step <= stretch.step:
            return None
        if step < stretch.end and remaining >= stretch.end_remaining:
            return None
        step_seconds = (now - stretch.time) / (step - stretch.step)
        # an extended budget ends early where it can, instead of training more steps
        seconds = remaining - self.deadline.extension
        config = replanned_config(config, step, step_seconds, seconds, self.step_limit)
        self.stretch = Stretch.begin(config, step, step, self.deadline)
        return config


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
    fewest = min(MIN_STEPS, config.train.max_steps) - step
    n_steps = max(1, fewest, int(REPLANNED_FRACTION * seconds / step_seconds))
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


def replanning_note(old: int, new: int, step_limit: int | None = None) -> str | None:
    """Return a sentence about a large change of the number of steps since the last note.

    `step_limit` is that of `replanned_config`.
    """
    if abs(new - old) < max(NOTED_STEPS, NOTED_CHANGE * old):
        return None
    cause = f"training is {'slower' if new < old else 'faster'} than measured before"
    if new == step_limit:
        cause = EPOCH_LIMIT_NOTE
    return f"re-planned: {old:,} -> {new:,} steps: {cause}"


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
    is_enough = remaining > max(1, MIN_FRACTION * max_steps)
    return step + remaining // 2 if is_enough else None
