"""Disks that fail, or are full."""

import contextlib
import errno
import os
import shutil
import time
from pathlib import Path
from random import Random

from chargpt.store import commit
from fault_injection.processes import Fault, run_forked
from fault_injection.tiny_run import (
    RESUME,
    fresh,
    kept,
    reference,
    sentences,
    sums,
    train_words,
)

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EMFILE)


def fail_files(work: Path, index: int, random: Random) -> str | None:
    """Let the Nth file operation fail, once or from there on."""
    expected, _ = reference(work)
    folder = fresh(work / "failing")
    number = index + 1 if index < 100 else random.randint(1, 2500)
    for_ever = index >= 100 and index % 2 == 1
    fault = Fault(folder / "R", number, ERRORS[index % len(ERRORS)], for_ever)
    ended = run_forked(train_words(), folder, fault=fault, acknowledged=folder / "saves")
    words = sentences(ended)
    told = ended.err.count("the disk refuses") - sum("the disk refuses" in word for word in words)
    if "Traceback" in ended.err or ended.code not in (0, 1, 2) or told > 1:
        return f"operation {number}: exit {ended.code}, told {told} times: {ended.err[-500:]}"
    if len(words) != (0 if ended.code == 0 else 1):
        return f"operation {number}: exit {ended.code} with the sentences {words}"
    if wrong := kept(folder / "R", folder / "saves"):
        return f"operation {number}: {wrong}"
    left = [str(path) for path in folder.rglob("*.tmp") if not path.name.endswith(".old.tmp")]
    if left:
        return f"operation {number}: it left {left}"
    if ended.code == 0 and sums(folder / "R") != expected:
        return f"operation {number}: another model came of it"
    return None


def small_disk(work: Path, index: int, random: Random) -> str | None:
    """Train on a file system that fills up, and go on once there is room."""
    expected, _ = reference(work)
    folder = fresh(work / "small")
    if os.system(f"mount -t tmpfs -o size=2m tmpfs {folder} 2>/dev/null") != 0:
        return "skipped: no tiny file system can be mounted here"
    try:
        ballast = folder / "ballast"
        free = random.randint(0, 60_000)

        def fill_up(_: int) -> None:
            while not (folder / "R" / "metrics.jsonl").exists():
                time.sleep(0.01)
            with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                while shutil.disk_usage(folder).free > free:
                    file.write(b"x" * 4096)

        ended = run_forked(train_words(), folder, acknowledged=folder / "saves", during=fill_up)
        if "Traceback" in ended.err or ended.code not in (0, 1) or len(sentences(ended)) > 1:
            return f"exit {ended.code}: {ended.err[-500:]}"
        if wrong := kept(folder / "R", folder / "saves"):
            return wrong
        ballast.unlink()
        if ended.code == 1:
            words = RESUME if commit.committed(folder / "R/checkpoints") else train_words()
            ended = run_forked(words, folder)
        if ended.code != 0 or sums(folder / "R") != expected:
            return f"with room again: exit {ended.code}: {ended.err[-500:]}"
    finally:
        os.system(f"umount {folder}")
    return None
