"""The deadline of a time budget, and the time that it keeps for the work after the last step."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from chargpt.config import Config
from chargpt.errors import ConfigError, OperationError
from chargpt.log import logger
from chargpt.models.ngram import MAX_TOKENS
from chargpt.text.corpus import REQUIRED_SPLITS, Corpus

MIN_SECONDS = 5
LATE = 1.1  # of the announced time: a command that takes longer says so
MIN_STEPS = 20  # fewer are of little use
OVERRUN = 0.08  # fraction of the budget by which the first MIN_STEPS may exceed it


@dataclass(frozen=True)
class Reserve:
    """Time that a budget keeps for the work after the last step."""

    seconds: float = 0.75  # preparing the results table, and the exit of the process
    fraction: float = 0.04  # of the budget, for scoring, until the time of scoring is measured
    min_report_budget: float = 120  # seconds: shortest budget that ends with a report page
    report_seconds: float = 2  # of a report page, without its scoring
    report_tokens: int = 40_000  # that a report page scores
    gate_seconds: float = 0.35  # of fitting a mixture's gate
    counting_seconds: float = 0.5  # of counting the n-grams of a mixture, per million tokens
    margin: float = 1.3  # factor on the measured time of scoring
    mixture_slowdown: float = 1.3  # time of scoring with a mixture, relative to its GPT


RESERVE = Reserve()


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
        return cls(seconds, started, clock, slowdown, scoring_seconds=RESERVE.fraction * seconds)

    @property
    def has_report(self) -> bool:
        """Whether the run ends with a report page."""
        return self.seconds >= RESERVE.min_report_budget

    @property
    def remaining(self) -> float:
        """Seconds until the last training step has to be done."""
        closing = RESERVE.seconds * self.slowdown + self.scoring_seconds
        closing += RESERVE.report_seconds if self.has_report else 0
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
        return f"this took {seconds:.0f} s instead of {announced} s: the machine slowed down"

    def require(self, seconds: float) -> None:
        """Raise an OperationError if the fewest useful steps, of `seconds`, take too long.

        A budget may be extended for them by as much again.
        """
        missing = seconds - self.remaining
        if missing > self.seconds:
            raise OperationError(
                f"a budget of {self.seconds:g} s is too short for {MIN_STEPS} steps, the fewest "
                "that are useful, on this machine now; give "
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


def mixture_seconds(corpus: Corpus, slowdown: float = 1.0) -> float:
    """Return the expected time of counting the n-grams of a mixture and of fitting its gate."""
    counted = min(len(corpus.split("train")), MAX_TOKENS)
    return slowdown * (RESERVE.gate_seconds + RESERVE.counting_seconds * counted / 1e6)


def scoring_seconds(
    deadline: Deadline, corpus: Corpus, config: Config, seconds_per_token: float
) -> float:
    """Return the time of the closing work that scores text, from the measured time of a token."""
    max_tokens = config.train.evaluation_tokens
    splits = [corpus.split(split) for split in REQUIRED_SPLITS]
    n_scored = sum(min(max_tokens, len(tokens)) for tokens in splits)
    n_scored += RESERVE.report_tokens if deadline.has_report else 0
    n_mixture = len(corpus.split("mixture"))
    if n_mixture:  # a mixture is fitted to it and scored
        n_scored += n_mixture
        n_scored += round(RESERVE.mixture_slowdown * min(max_tokens, len(splits[-1])))
    if config.train.from_run is not None:  # the text of that run is scored before and after
        n_scored += 2 * max_tokens
    fitting = mixture_seconds(corpus, deadline.slowdown) if n_mixture else 0.0
    return RESERVE.margin * seconds_per_token * n_scored + fitting
