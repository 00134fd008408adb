"""Training steps as a user sees them: a progress bar, a time budget, and what a signal does."""

import math
import shlex
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chargpt.cli import console, options
from chargpt.cli.signals import Signals, Stopped
from chargpt.errors import ConfigError, WorkError

if TYPE_CHECKING:
    from chargpt.store.folder import RunFolder
    from chargpt.training.progress import Report
    from chargpt.training.trainer import Trainer

DEFAULT_BUDGET = "150s"  # what a bare `chargpt train` takes
REPORTED_SECONDS = 120  # a run that takes so long ends with a report, which takes a few itself
REPORT_SECONDS, REPORT_CHARACTERS = 7, 40_000  # what is scored for it comes on top
CLOSING_SECONDS, CLOSING_SHARE = 0.8, 0.04  # of a budget, for what comes after the last step
TIMED_CHARACTERS, TIMED_MARGIN = 8_000, 1.3  # to see how long scoring takes


@dataclass
class Clock:
    """A time budget, from the start of the process, and what the user has fixed besides."""

    seconds: float
    given: frozenset[str]
    scoring: float | None = None  # seconds that table and report score for, once that is known

    @classmethod
    def of(
        cls, written: str | None, config: str | None, changes: list[str] | None
    ) -> "Clock | None":
        """Return the budget that was written, or the default one where nothing else was.

        Raises:
            ConfigError: it is not a time, or several processes would have to agree on it.
        """
        from chargpt.device import world_size
        from chargpt.training.planner import seconds_of

        if written is None and config is None and not changes and world_size() == 1:
            written = DEFAULT_BUDGET
        if written is None:
            return None
        if world_size() > 1:
            raise ConfigError("--budget plans for one process; give train.max_steps instead")
        return cls(seconds_of(written), frozenset(options.given_keys(config, changes)))

    @property
    def reports(self) -> bool:
        """Whether the run ends with a report."""
        return self.seconds >= REPORTED_SECONDS

    @property
    def left(self) -> float:
        """Seconds until the last training step has to be done."""
        scoring = CLOSING_SHARE * self.seconds if self.scoring is None else self.scoring
        closing = CLOSING_SECONDS + scoring + (REPORT_SECONDS if self.reports else 0)
        return self.seconds - closing - (time.perf_counter() - console.started)

    def time_scoring(self, trainer: "Trainer") -> None:
        """Find out how long scoring will take at the end: a device may train in a faster format."""
        from chargpt.analysis.result import scored_characters
        from chargpt.inference.evaluation import evaluate_tokens
        from chargpt.text.corpus import SPLITS

        most = scored_characters(trainer.config, trainer.config.train.max_steps)
        splits = [trainer.corpus.split(split) for split in SPLITS]
        start = time.perf_counter()
        timed = evaluate_tokens(trainer.model, splits[-1], max_characters=TIMED_CHARACTERS)
        each = (time.perf_counter() - start) / timed.characters
        scored = sum(min(most, len(tokens)) for tokens in splits)
        scored += REPORT_CHARACTERS if self.reports else 0
        self.scoring = TIMED_MARGIN * each * scored


def train_to_end(
    trainer: "Trainer",
    folder: "RunFolder",
    signals: Signals,
    clock: Clock | None = None,
) -> dict[str, float]:
    """Run all steps with a progress bar; a signal saves the run and ends the process.

    Returns:
        What counting reaches on the validation split: the lines to beat.

    Raises:
        WorkError: the last thing to be saved could not be.
    """
    from chargpt.inference.baselines import baselines

    levels = baselines(trainer.corpus) if trainer.group.is_main else {}
    bar = console.Progress(trainer.config.train.max_steps, "step", initial=trainer.progress.step)
    go_on = f"go on with\n  chargpt train --resume {shlex.quote(str(folder.path))}"
    signals.patient = True
    try:
        do_steps(trainer, bar, signals, levels, clock)
    except Stopped:
        if trainer.saved_step is not None:
            console.say(f"{last_save(trainer)}; {go_on}")
        raise
    finally:
        bar.close()
    ended_by, signals.caught = signals.caught[:1], []  # another one now changes nothing
    if trainer.trouble:
        raise WorkError(f"{unsaved(trainer)}; free some space, then {go_on}")
    if ended_by:
        if trainer.finished:
            console.say(f"all steps are done and saved in {folder.path}")
        else:
            console.say(f"stopped at step {trainer.progress.step:,} and saved; {go_on}")
        raise Stopped(ended_by[0])
    signals.patient = False
    return levels


def do_steps(
    trainer: "Trainer",
    bar: console.Progress,
    signals: Signals,
    levels: dict[str, float],
    clock: Clock | None,
) -> None:
    """Go through the steps, showing each, until all are done, time is up or a signal came."""
    from chargpt.training.planner import next_refit, refit

    validation: list[float] = []
    began, fitted, told = math.nan, 1, False  # the first step is slower than any other
    refit_at = next_refit(trainer.config, 0) if clock else None
    refit_left = _planned_left(clock, trainer, refit_at)
    characters = trainer.config.train.batch_size * trainer.config.model.block_size
    looked, counted = time.perf_counter(), trainer.progress.step
    for report in trainer.steps():
        if report.validation is not None:
            validation.append(report.validation.nats_per_char)
        detail = None
        if bar.wants_detail() and report.loss is not None:
            now = time.perf_counter()
            speed = (report.step - counted) * characters / (now - looked)
            looked, counted = now, report.step
            detail = _detail(report, validation, levels, speed)
        bar.move_to(report.step, detail)
        if report.sample is not None:
            bar.write(f"-- sample at step {report.step:,} --")
            bar.write(console.printable(report.sample).strip("\n"))
        if report.note is not None:
            bar.write(report.note)
        if trainer.trouble and not told:
            bar.write(f"{unsaved(trainer)}; training goes on: free some space")
            told = True
        if report.step == 1:
            began = time.perf_counter()
        if clock is not None and not trainer.finished:
            now, left = time.perf_counter(), clock.left
            if left < 0:
                trainer.conclude()
                stopped = f"stopped at step {report.step:,} of {bar.total:,}"
                bar.write(f"the machine slowed down: {stopped}")
                return
            if refit_at and (report.step >= refit_at or left < refit_left) and report.step > fitted:
                seconds = (now - began) / (report.step - fitted)
                trainer.change_config(refit(trainer.config, report.step, seconds, left))
                bar.change_total(trainer.config.train.max_steps)
                began, fitted = now, report.step
                refit_at = next_refit(trainer.config, fitted)
                refit_left = _planned_left(clock, trainer, refit_at)
        if trainer.group.all_reduce_any(bool(signals.caught)) and not trainer.finished:
            trainer.save()
            signals.caught = signals.caught or [signal.SIGTERM]  # it was another process's
            return


def _planned_left(clock: Clock | None, trainer: "Trainer", step: int | None) -> float:
    """Return how many seconds are to be left at a later step if each takes as long as the others.

    A machine that slows down comes to that time before it comes to that step.
    """
    if clock is None or step is None:
        return 0.0
    steps = trainer.config.train.max_steps
    return clock.left * (steps - step) / (steps - trainer.progress.step)


def unsaved(trainer: "Trainer") -> str:
    """Return what the disk refused, and what there is instead, in words."""
    step, last = trainer.progress.step, last_save(trainer)
    return f"the disk refuses what step {step:,} is to save ({trainer.trouble}); {last}"


def last_save(trainer: "Trainer") -> str:
    """Return which checkpoint there is, in words."""
    if trainer.saved_step is None:
        return "there is no checkpoint yet"
    return f"the last checkpoint is step {trainer.saved_step:,}"


def _detail(
    report: "Report", validation: list[float], levels: dict[str, float], speed: float
) -> str:
    from chargpt.inference.baselines import NGRAM

    assert report.loss is not None
    # short enough for a terminal of 80 columns, the bar included
    words = [f"loss {float(report.loss):.2f}"]
    if validation:
        words.append(f"val {validation[-1]:.3f}{console.sparkline(validation, 5)}")
    # the next line to beat
    beaten = validation[-1] if validation else math.inf
    name = next((name for name in ("bigram", NGRAM) if levels[name] < beaten), NGRAM)
    words.append(f"{name} {levels[name]:.3f}")
    words.append(f"{console.short(speed)} chars/s")
    return " ".join(words)
