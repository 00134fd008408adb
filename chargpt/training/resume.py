"""Resuming a run: which settings may change, and notes for the user."""

import math
import os

import torch

from chargpt.config import Config
from chargpt.device import choose_device
from chargpt.errors import ConfigError, FinishedError, RunError, TextError
from chargpt.store.checkpoint import Checkpoint
from chargpt.store.folder import RunFolder
from chargpt.text.corpus import Corpus, load_corpus
from chargpt.text.source import STDIN
from chargpt.training.schedule import decay_start, lr_factor_at

# Fraction of the peak of the learning rates when a finished run goes on: RESTART times the square
# root of (steps to come / steps done), at most MAX_RESTART.
RESTART, MAX_RESTART = 0.5, 0.5
NOTED_RISE = 1.5  # a rise of the learning rates up to this factor needs no restart or note
ENDED = 0.95  # fraction of the steps from which a decay that has begun counts as ended
RATES = ("optim.lr", "optim.matrix_lr")
MAY_CHANGE = (
    *("train.max_steps", "train.patience", "train.keep_last", "train.max_rollbacks"),
    "schedule.restarts",
    *(*RATES, "device", "dtype", "threads"),
)


def resume(
    folder: RunFolder, changes: dict[str, object], *, same_command: bool = False
) -> tuple[Checkpoint, Config, list[str]]:
    """Return a run's latest intact checkpoint, the config to continue with, and notes.

    Args:
        folder: of the run to continue.
        changes: settings by dotted keys; values that the run has already are ignored.
        same_command: whether they are the settings that started the run, given again. Those that
            the run itself has changed since, such as its device or the rates after a rollback, then
            stay as they are.

    Raises:
        RunError: there is no intact checkpoint, or the run was imported.
        FinishedError: all steps are done, or the run stopped early.
        ConfigError: a change would make it another run.
        TextError: so would another text.
    """
    saved, notes = folder.load("latest")
    if not saved.optimizer:
        raise RunError(
            f"{folder.path} was imported and has no optimizer state; start a new run from its "
            f"weights with `chargpt train TEXT --from {folder.path}`"
        )
    changes = {
        key: value
        for key, value in changes.items()
        if not _is_unchanged(saved, key, value, same_command)
    }
    for key, value in changes.items():
        if same_command and key == "text.path" and value == STDIN:
            continue  # it can be read only once: the caller reads and compares it
        if same_command and key == "text.path":
            text = saved.config.with_values({"text.path": value}).text
            require_same_text(load_corpus(text), saved)
        elif key not in MAY_CHANGE and not key.endswith("_every"):
            raise ConfigError(
                f"{key} cannot change when a run is resumed; drop it, or start a new run with --out"
            )
    config = saved.config.with_values(changes)
    if config.optim != saved.config.optim:
        notes.append(
            f"the learning rates change at step {saved.state.step:,}: the run can no longer be "
            "reproduced from its config alone"
        )
    config = continue_schedule(saved.config, config, saved.state.step, notes)
    device, _ = choose_device("auto")
    if config.device.split(":")[0] not in ("cpu", device.type) and "device" not in changes:
        notes.append(f"{config.device} is not available, so the run continues on {device.type}")
        dtype = {} if "dtype" in changes else {"dtype": "auto"}
        config = config.with_values({"device": device.type, **dtype})
    if (config.threads or 0) > (os.cpu_count() or 1):
        config = config.with_values({"threads": None})  # saved on a machine with more cores
    threads = config.threads or torch.get_num_threads()
    if saved.state.threads != threads and config.device == "cpu":
        notes.append(
            f"{saved.state.threads} threads before, {threads} now: results may differ in the last "
            f"digits (-s threads={saved.state.threads} for the same digits)"
        )
    if saved.state.stopped_early and "train.patience" not in changes:
        raise FinishedError(
            f"{folder.path} stopped early at step {saved.state.step}, as its validation loss no "
            "longer fell; let it go on with -s train.patience=null"
        )
    if saved.state.step >= config.train.max_steps:
        raise FinishedError(
            f"{folder.path} has done all its {saved.state.step} steps; "
            "give it more with -s train.max_steps=N"
        )
    return saved, config, notes


def require_same_text(corpus: Corpus, saved: Checkpoint) -> None:
    """Raise a TextError unless a text has the content that a run was trained on."""
    if corpus.key != saved.state.corpus_key:
        raise TextError(
            f"{corpus.name} is not the text that the run was trained on; name that one, or start a "
            "new run with another --out"
        )


def continue_schedule(before: Config, after: Config, step: int, notes: list[str]) -> Config:
    """Return the config with a schedule for its new number of steps.

    With `wsd`, a decay that has begun continues from its present rate to the new end, and so does
    that after a restart. At or near the end of the run the rates warm up to a fraction of their
    peak and decay again (benchmarks/LOG.md). Otherwise the rates follow the schedule for the new
    number of steps; a note says if they rise.

    Args:
        before: of the run so far.
        after: of the resumed run; returned as it is if its number of steps stays the same or its
            schedule is changed as well.
        step: number of steps done.
        notes: where a rise of the rates is noted.
    """
    old, new = before.train.max_steps, after.train.max_steps
    schedule = after.schedule
    if new <= step or new == old or schedule != before.schedule:
        return after

    def restarted(fraction: float) -> Config:
        restart = (step, max(0.001, round(fraction, 3)))
        return after.with_values({"schedule.restarts": (*schedule.restarts, restart)})

    now = lr_factor_at(step, schedule, new)
    if schedule.restarts:
        is_decaying = schedule.restarts[-1][0] < step < old
    else:
        is_decaying = schedule.kind == "wsd" and decay_start(schedule, old) < step < old
    if is_decaying and schedule.restarts:  # only the decay before them can be re-planned
        notes.append(
            "the config no longer repeats the learning rates since step "
            f"{schedule.restarts[-1][0]:,} exactly"
        )
    elif is_decaying:  # the rates of the steps done stay as they are
        points = (*schedule.decay_points, (step - 1, old))
        after = after.with_values({"schedule.decay_points": points})
    if step >= old or (is_decaying and step >= ENDED * old and new > old):
        if now <= NOTED_RISE * lr_factor_at(min(step, old - 1), schedule, old):
            return after
        fraction = min(MAX_RESTART, RESTART * math.sqrt((new - step) / step))
        notes.append(
            f"the learning rates warm up to {max(0.001, fraction):.0%} of their peak and decay "
            "again: the loss rises a little before it falls"
        )
        return restarted(fraction)
    if is_decaying:
        return restarted(lr_factor_at(step, schedule, old)) if schedule.restarts else after
    before_now = lr_factor_at(step, schedule, old)
    if now > NOTED_RISE * before_now:
        notes.append(
            f"the learning rates rise from {before_now:.0%} to {now:.0%} of their peak, as in a "
            f"run of {new:,} steps: the loss may rise a little before it falls"
        )
    return after


def _is_unchanged(saved: Checkpoint, key: str, value: object, same_command: bool) -> bool:
    """Return whether the run has this setting already, or has resolved it to another value."""
    if same_command and value == "auto":
        return True
    if same_command and key in RATES and saved.state.rollbacks:
        return True
    return saved.config.with_values({key: value}) == saved.config
