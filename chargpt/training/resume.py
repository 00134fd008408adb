"""Resuming a run: which settings may change, and notes for the user."""

import os

import torch

from chargpt.config import Config
from chargpt.device import choose_device
from chargpt.errors import ConfigError, FinishedError
from chargpt.store.checkpoint import Checkpoint
from chargpt.store.folder import RunFolder
from chargpt.training.schedule import lr_factor_at

MIN_RATE_RISE = 1.5  # factor of the learning rates from which a rise is noted
RATES = ("optim.lr", "optim.matrix_lr")
MAY_CHANGE = (
    *("train.max_steps", "train.patience", "train.keep_last", "train.rollbacks"),
    *(*RATES, "device", "dtype", "threads"),
)


def resume(
    run: RunFolder, changes: dict[str, object], *, same_command: bool = False
) -> tuple[Checkpoint, Config, list[str]]:
    """Return a run's latest intact checkpoint, the config to continue with, and notes.

    Args:
        run: to continue.
        changes: settings by dotted keys; values that the run has already are ignored.
        same_command: whether they are what started the run. What the run has made of them since,
            such as its device or the rates after a rollback, is then no change either.

    Raises:
        RunError: there is no intact checkpoint.
        FinishedError: all steps are done.
        ConfigError: a change would make it another run.
    """
    saved, notes = run.load("latest")
    changes = {
        key: value
        for key, value in changes.items()
        if not _is_unchanged(saved, key, value, same_command)
    }
    for key in changes:
        if key not in MAY_CHANGE and not key.endswith("_every"):
            raise ConfigError(
                f"{key} cannot change when a run is resumed; leave it, or start a new run with "
                "--out"
            )
    config = saved.config.with_values(changes)
    if config.optim != saved.config.optim:
        notes.append(
            f"the learning rates change at step {saved.state.step:,}: the run can no longer be "
            "reproduced from its config alone"
        )
    step, max_steps = saved.state.step, saved.config.train.max_steps
    before = lr_factor_at(max(0, step - 1), saved.config.schedule, max_steps)
    now = lr_factor_at(step, config.schedule, config.train.max_steps)
    if config.train.max_steps != max_steps and now > MIN_RATE_RISE * before:
        notes.append(
            f"the learning rates rise to {now:.0%} of their peak at step {step:,}: the "
            "loss rises too before it falls"
        )
    device, _ = choose_device("auto")
    if config.device.split(":")[0] not in ("cpu", device.type) and "device" not in changes:
        notes.append(f"{config.device} is not available, so the run continues on {device.type}")
        config = config.with_values({"device": device.type, "dtype": "auto"})
    if (config.threads or 0) > (os.cpu_count() or 1):
        config = config.with_values({"threads": None})  # saved on a machine with more cores
    threads = config.threads or torch.get_num_threads()
    if saved.state.threads != threads and config.device == "cpu":
        notes.append(
            f"{saved.state.threads} threads before, {threads} now: results may differ in the last "
            f"digits (-s threads={saved.state.threads} for the same bits)"
        )
    if saved.state.stopped_early and "train.patience" not in changes:
        raise FinishedError(
            f"{run.path} stopped early at step {saved.state.step}, as its validation loss no "
            "longer fell; let it go on with -s train.patience=null"
        )
    if saved.state.step >= config.train.max_steps:
        raise FinishedError(
            f"{run.path} has done all its {config.train.max_steps} steps; "
            "give it more with -s train.max_steps=N"
        )
    return saved, config, notes


def _is_unchanged(saved: Checkpoint, key: str, value: object, same_command: bool) -> bool:
    """Return whether the run has this setting already, or has resolved it to another value."""
    if same_command and value == "auto":
        return True
    if same_command and key in RATES and saved.state.rollbacks:
        return True
    return saved.config.with_values({key: value}) == saved.config
