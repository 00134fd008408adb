"""Failing file operations and full disks."""

import contextlib
import errno
import os
import shutil
from pathlib import Path
from random import Random

from chargpt.store.checkpoint import list_checkpoints
from fault_injection.processes import Fault, run_forked
from fault_injection.tiny_run import (
    RESUME,
    check_saves,
    checkpoint_digests,
    empty_folder,
    error_lines,
    is_finished,
    train_arguments,
    uninterrupted_run,
    wait_for,
)

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EMFILE)


def file_errors(work: Path, index: int, random: Random) -> str | None:
    """Fail the Nth file operation with an errno, once or permanently."""
    expected, _ = uninterrupted_run(work)
    folder = empty_folder(work / "failing")
    number = index + 1 if index < 100 else random.randint(1, 2500)
    persistent = index >= 100 and index % 2 == 1
    fault = Fault(folder / "R", number, ERRORS[index % len(ERRORS)], persistent)
    result = run_forked(train_arguments(), folder, fault=fault, save_log=folder / "saves")
    errors = error_lines(result)
    warnings = result.err.count("cannot write the ")
    if "Traceback" in result.err or result.code not in (0, 1, 2) or warnings > 1:
        return f"operation {number}: exit {result.code}, {warnings} warnings: {result.err[-500:]}"
    if len(errors) != (0 if result.code == 0 else 1):
        return f"operation {number}: exit {result.code} with the errors {errors}"
    if wrong := check_saves(folder / "R", folder / "saves"):
        return f"operation {number}: {wrong}"
    left = [str(path) for path in folder.rglob("*.tmp") if not path.name.endswith(".old.tmp")]
    if left:
        return f"operation {number}: temporary files remain: {left}"
    if result.code == 0 and checkpoint_digests(folder / "R") != expected:
        return f"operation {number}: the weights differ from those of the uninterrupted run"
    return None


def disk_full(work: Path, index: int, random: Random) -> str | None:
    """Train on a file system that fills up (ENOSPC), then resume once there is space."""
    expected, _ = uninterrupted_run(work)
    folder = empty_folder(work / "full")
    if os.system(f"mount -t tmpfs -o size=70m tmpfs {folder} 2>/dev/null") != 0:
        return "skipped: cannot mount a tmpfs here"
    try:
        ballast = folder / "ballast"
        free = random.randint(0, 60_000)

        def fill_up(_: int) -> None:
            wait_for(folder / "R", "metrics.jsonl")
            with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                while (excess := shutil.disk_usage(folder).free - free) > 0:
                    file.write(bytes(min(excess, 1 << 20)))

        result = run_forked(
            train_arguments(), folder, save_log=folder / "saves", while_running=fill_up
        )
        if "Traceback" in result.err or result.code not in (0, 1) or len(error_lines(result)) > 1:
            return f"exit {result.code}: {result.err[-500:]}"
        if wrong := check_saves(folder / "R", folder / "saves"):
            return wrong
        ballast.unlink()
        if result.code == 1 and not is_finished(folder / "R"):  # else metrics are missing
            arguments = RESUME if list_checkpoints(folder / "R/checkpoints") else train_arguments()
            result = run_forked(arguments, folder)
        if checkpoint_digests(folder / "R") != expected:
            return f"with free space again: exit {result.code}: {result.err[-500:]}"
    finally:
        os.system(f"umount {folder}")
    return None
