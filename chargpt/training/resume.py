"""Going on with a run: what may change, and what is told."""

import torch

from chargpt.config import Config
from chargpt.device import choose_device
from chargpt.errors import ConfigError, FinishedError
from chargpt.store.checkpoint import Checkpoint
from chargpt.store.folder import RunFolder

RATES = ("optim.lr", "optim.matrix_lr")
MAY_CHANGE = (
    *("train.max_steps", "train.patience", "train.keep_last", "train.rollbacks"),
    *(*RATES, "device", "dtype"),
)


def resume(
    run: RunFolder, wanted: dict[str, object], *, again: bool = False
) -> tuple[Checkpoint, Config, list[str]]:
    """Return a run's newest whole checkpoint, the config to go on with, and what to tell the user.

    Args:
        run: to go on with.
        wanted: settings by their dotted keys. What holds already is no change.
        again: they are those that the run was begun with: what it has made of them since holds.

    Raises:
        RunError: there is nothing to go on from.
        FinishedError: all its steps are done.
        ConfigError: a change would make it another run.
    """
    saved, notes = run.load("latest")
    changes = {k: value for k, value in wanted.items() if not _holds(saved, k, value, again)}
    for key in changes:
        if key not in MAY_CHANGE and not key.endswith("_every"):
            raise ConfigError(
                f"{key} cannot change when a run goes on; leave it, or start a new run with --out"
            )
    config = saved.config.with_values(changes)
    if config.optim != saved.config.optim:
        notes.append(
            f"the learning rates change at step {saved.state.step:,}: from here on the run is "
            "not what its config alone would give"
        )
    device, _ = choose_device("auto")
    if config.device.split(":")[0] not in ("cpu", device.type) and "device" not in changes:
        notes.append(f"{config.device} is not here, so the run goes on on {device.type}")
        config = config.with_values({"device": device.type, "dtype": "auto"})
    threads = saved.state.threads
    if threads != torch.get_num_threads() and config.device == "cpu":
        notes.append(
            f"{threads} threads before, {torch.get_num_threads()} now: results may differ in the "
            f"last digits (set OMP_NUM_THREADS={threads} for the same bits)"
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


def _holds(saved: Checkpoint, key: str, value: object, again: bool) -> bool:
    """Return whether a setting is what the run has already, or has made of it."""
    if again and value == "auto":
        return True  # what was found then is in the run's config
    if again and key in RATES and saved.state.rollbacks:
        return True
    return saved.config.with_values({key: value}) == saved.config
