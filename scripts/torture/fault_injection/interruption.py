"""Processes that are killed, or asked to stop."""

import contextlib
import os
import signal
import time
from pathlib import Path
from random import Random

from chargpt.store import commit
from fault_injection.processes import Fault, run_forked
from fault_injection.tiny_run import (
    RESUME,
    STEPS,
    done,
    fresh,
    kept,
    reference,
    sums,
    train_words,
)

LINKS = 10  # kills that one run survives before it is compared with one that was left alone


def kill(work: Path, index: int, random: Random) -> str | None:
    """Kill a training process, at a random moment or inside a save; every tenth time go to the end.

    The run must then be what it would have been, bit for bit.
    """
    expected, seconds = reference(work)
    folder = work / f"killed-{index // LINKS:03}"
    if index % LINKS == 0:
        fresh(folder)
    run, saves = folder / "R", folder / "saves"
    for _ in range(20):
        if done(run):  # it was killed after its last step
            if sums(run) != expected:
                return "the run is not the one that was left alone"
            fresh(folder)
        has_checkpoint = bool(commit.committed(run / "checkpoints"))
        words = RESUME if has_checkpoint else train_words()
        if index % 2:  # under `checkpoints` nothing is touched but by saves, 87 operations each
            fault = Fault(run / "checkpoints", random.randint(1, 87 * 6))
            ended = run_forked(words, folder, fault=fault, acknowledged=saves)
        else:
            moment = random.uniform(0, seconds)

            def stab(number: int, moment: float = moment) -> None:
                time.sleep(moment)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)

            ended = run_forked(words, folder, acknowledged=saves, during=stab)
        if ended.code == -signal.SIGKILL:
            break
        if ended.code != 0:
            return f"exit {ended.code}: {ended.err[-500:]}"
        if sums(run) != expected:
            return "the resumed run is not the one that was left alone"
        fresh(folder)  # it was done before it could be killed: another one
    else:
        return "it could not be killed in 20 tries"
    if wrong := kept(run, saves):
        return wrong
    if index % LINKS == LINKS - 1 and not done(run):
        words = RESUME if commit.committed(run / "checkpoints") else train_words()
        ended = run_forked(words, folder)
        if ended.code != 0:
            return f"it could not be resumed: {ended.err[-300:]}"
    if index % LINKS == LINKS - 1 and sums(run) != expected:
        return "the resumed run is not the one that was left alone"
    return None


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def send_signal(work: Path, index: int, random: Random) -> str | None:
    """Send a signal at some moment: it saves, exits 128 + n in time, and can go on."""
    expected, seconds = reference(work)
    number = SIGNALS[index % len(SIGNALS)]
    name = signal.Signals(number).name
    for _ in range(20):
        folder = fresh(work / "signalled")
        moment = random.uniform(0.02, seconds)

        def send(process: int, moment: float = moment) -> None:
            time.sleep(moment)
            os.kill(process, number)

        ended = run_forked(train_words(), folder, acknowledged=folder / "saves", during=send)
        if ended.code != 0:  # else it was done before
            break
    saves = folder / "saves"
    lines = saves.read_text().split() if saves.exists() else []
    # before it has begun and when it has ended, the signal may find no one who minds it
    bare = not lines or lines[-1] == str(STEPS)
    if "Traceback" in ended.err or ended.code not in (128 + number, -number if bare else None):
        return f"{name}: exit {ended.code}: {ended.err[-500:]}"
    if ended.seconds > 5:
        return f"{name}: it took {ended.seconds:.1f} s"
    run = folder / "R"
    if wrong := kept(run, folder / "saves"):
        return f"{name}: {wrong}"
    if "and saved; go on with" in ended.err or not commit.committed(run / "checkpoints"):
        words = RESUME if commit.committed(run / "checkpoints") else train_words()
        ended = run_forked(words, folder)
        if ended.code != 0:
            return f"{name}: resuming failed: {ended.err[-500:]}"
    if sums(run) != expected:
        return f"{name}: another model came of it"
    return None
