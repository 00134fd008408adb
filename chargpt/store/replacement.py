"""Replacing a run (`--force`): the old one is moved aside until the new one has saved.

The folder that holds `checkpoints/` counts as the run, so that part is moved first and put back
last.
"""

import os
from contextlib import suppress
from pathlib import Path

from chargpt.files import exists
from chargpt.store.layout import (
    CHECKPOINTS,
    REPLACED,
    RUN_FILES,
    TENSORBOARD,
    delete_run_files,
    has_checkpoint_itself,
)

PARTS = (CHECKPOINTS, TENSORBOARD, *RUN_FILES)


def move_aside(run: Path) -> None:
    """Move the files of a run that has saved into its folder `.replaced`."""
    if not has_checkpoint_itself(run):
        return
    (run / REPLACED).mkdir(exist_ok=True)
    for name in PARTS:
        if exists(run / name):
            os.rename(run / name, run / REPLACED / name)


def restore(run: Path) -> None:
    """Put the old run back, unless the new one has saved; then delete the old one."""
    if not exists(run / REPLACED):
        return
    if not has_checkpoint_itself(run):
        for name in reversed(PARTS):
            if exists(run / REPLACED / name):
                delete_run_files(run, name)
                os.replace(run / REPLACED / name, run / name)
    delete_replaced(run)


def delete_replaced(run: Path) -> None:
    """Delete the old run; what cannot be deleted now is left to the next call."""
    with suppress(OSError):
        if exists(run / REPLACED):
            delete_run_files(run / REPLACED)
            (run / REPLACED).rmdir()
