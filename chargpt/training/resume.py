"""Going on with a run: what may change, and what is told."""

import torch

from chargpt.config import Config
from chargpt.device import choose_device
from chargpt.errors import ConfigError, RunError
from chargpt.store.run import RunFolder
from chargpt.store.saved import Saved


def resume(run: RunFolder, overrides: dict[str, object]) -> tuple[Saved, Config, list[str]]:
    """Return a run's newest whole checkpoint, the config to go on with, and what to tell the user.

    Raises:
        RunError: there is nothing to go on from, or all its steps are done.
        ConfigError: an override would make it another run.
    """
    saved, notes = run.load("latest")
    allowed = (
        *("train.max_steps", "train.patience", "train.keep_last", "train.rollbacks"),
        *("optim.lr", "optim.matrix_lr", "device", "dtype"),
    )
    for key, value in overrides.items():
        if saved.config.with_values({key: value}) == saved.config:
            continue  # it says what holds already
        if key not in allowed and not key.endswith("_every"):
            raise ConfigError(
                f"{key} cannot change when a run goes on; leave it, or start a new run with --out"
            )
    config = saved.config.with_values(overrides)
    if config.optim != saved.config.optim:
        notes.append(
            f"the learning rates change at step {saved.state['step']:,}: from here on the run is "
            "not what its config alone would give"
        )
    device, _ = choose_device("auto")
    if config.device.split(":")[0] not in ("cpu", device.type) and "device" not in overrides:
        notes.append(f"{config.device} is not here, so the run goes on on {device.type}")
        config = config.with_values({"device": device.type, "dtype": "auto"})
    threads = saved.state.get("threads")
    if threads != torch.get_num_threads() and config.device == "cpu":
        notes.append(
            f"{threads} threads before, {torch.get_num_threads()} now: results may differ in the "
            f"last digits (set OMP_NUM_THREADS={threads} for the same bits)"
        )
    if saved.state.get("stopped_early") and "train.patience" not in overrides:
        raise RunError(
            f"{run.path} stopped early at step {saved.state['step']}, as its validation loss no "
            "longer fell; let it go on with -s train.patience=null"
        )
    if int(saved.state["step"]) >= config.train.max_steps:
        raise RunError(
            f"{run.path} has done all its {config.train.max_steps} steps; "
            "give it more with -s train.max_steps=N"
        )
    return saved, config, notes
