"""Run `chargpt` as a rank whose steps are counted; rank 1's clocks may be ahead, or it is slow.

    torchrun --nproc-per-node 2 bench_rank.py COUNTS AHEAD SLOWNESS ARGUMENTS

COUNTS is a folder, in which the file with the rank's number grows by a byte with each training
step. Rank 1's clocks are AHEAD seconds ahead, or it is stopped (SIGSTOP) for all but one
SLOWNESSth of the time.
"""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

TURN_SECONDS = 0.01  # for which a slow rank runs at a time
STOPPING = """
import os, signal, sys, time
rank = int(sys.argv[1])
while os.getppid() == rank:
    os.kill(rank, signal.SIGSTOP)
    time.sleep(float(sys.argv[2]))
    os.kill(rank, signal.SIGCONT)
    time.sleep(float(sys.argv[3]))
"""


def put_ahead(seconds: float) -> None:
    """Put the clocks ahead that chargpt compares times by."""

    def ahead(clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + seconds

    for name in ("time", "monotonic", "perf_counter"):
        setattr(time, name, ahead(getattr(time, name)))


def main() -> None:
    """Run the rank."""
    counts, slowness = Path(sys.argv[1]), float(sys.argv[3])
    rank = os.environ["RANK"]
    if rank == "1":
        stopped = TURN_SECONDS * (slowness - 1)
        turns = [str(os.getpid()), str(stopped), str(TURN_SECONDS)]
        if stopped:
            subprocess.Popen([sys.executable, "-S", "-c", STOPPING, *turns])
        put_ahead(float(sys.argv[2]))
    del sys.argv[1:4]
    gc.set_threshold(200_000, 10, 10)  # as the command does before it imports torch

    from chargpt.cli.main import run
    from chargpt.training.trainer import Trainer

    train_step = Trainer.train_step

    def counted_step(trainer: Trainer) -> Any:
        with open(counts / rank, "ab") as file:
            file.write(b".")
        return train_step(trainer)

    with mock.patch.object(Trainer, "train_step", counted_step):
        run()


if __name__ == "__main__":
    main()
