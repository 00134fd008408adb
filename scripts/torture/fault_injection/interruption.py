"""Training processes that are killed (SIGKILL) or asked to stop (SIGINT, SIGTERM, SIGHUP)."""

import contextlib
import os
import signal
import time
from pathlib import Path
from random import Random

from chargpt.store.checkpoint import list_checkpoints
from fault_injection.processes import Fault, run_forked
from fault_injection.tiny_run import (
    RESUME,
    STEPS,
    check_saves,
    checkpoint_digests,
    empty_folder,
    is_finished,
    train_arguments,
    uninterrupted_run,
)

KILLS_PER_RUN = 10  # the run is then compared with the uninterrupted one


def sigkill(work: Path, index: int, random: Random) -> str | None:
    """Kill a training process at a random time or inside a save.

    After every tenth kill the run is resumed to its end and must equal the uninterrupted run bit
    for bit.
    """
    expected, seconds = uninterrupted_run(work)
    folder = work / f"killed-{index // KILLS_PER_RUN:03}"
    if index % KILLS_PER_RUN == 0:
        empty_folder(folder)
    run, saves = folder / "R", folder / "saves"
    for _ in range(20):
        if is_finished(run):  # killed after its last step
            if checkpoint_digests(run) != expected:
                return "the run differs from the uninterrupted one"
            empty_folder(folder)
        has_checkpoint = bool(list_checkpoints(run / "checkpoints"))
        arguments = RESUME if has_checkpoint else train_arguments()
        if index % 2:  # only saves touch `checkpoints`: 87 operations each
            fault = Fault(run / "checkpoints", random.randint(1, 87 * 6))
            result = run_forked(arguments, folder, fault=fault, save_log=saves)
        else:
            delay = random.uniform(0, seconds)

            def send_sigkill(number: int, delay: float = delay) -> None:
                time.sleep(delay)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)

            result = run_forked(arguments, folder, save_log=saves, while_running=send_sigkill)
        if result.code == -signal.SIGKILL:
            break
        if result.code != 0:
            return f"exit {result.code}: {result.err[-500:]}"
        if checkpoint_digests(run) != expected:
            return "the resumed run differs from the uninterrupted one"
        empty_folder(folder)  # it finished before the kill: retry
    else:
        return "it finished before the kill in all of 20 tries"
    if wrong := check_saves(run, saves):
        return wrong
    if index % KILLS_PER_RUN == KILLS_PER_RUN - 1 and not is_finished(run):
        arguments = RESUME if list_checkpoints(run / "checkpoints") else train_arguments()
        result = run_forked(arguments, folder)
        if result.code != 0:
            return f"resuming failed: {result.err[-300:]}"
    if index % KILLS_PER_RUN == KILLS_PER_RUN - 1 and checkpoint_digests(run) != expected:
        return "the resumed run differs from the uninterrupted one"
    return None


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def send_signal(work: Path, index: int, random: Random) -> str | None:
    """Send a signal at a random time; the run must save, exit 128 + n in 5 s, and resume."""
    expected, seconds = uninterrupted_run(work)
    number = SIGNALS[index % len(SIGNALS)]
    name = signal.Signals(number).name
    for _ in range(20):
        folder = empty_folder(work / "signalled")
        delay = random.uniform(0.02, seconds)

        def send(process: int, delay: float = delay) -> None:
            time.sleep(delay)
            os.kill(process, number)

        result = run_forked(
            train_arguments(), folder, save_log=folder / "saves", while_running=send
        )
        if result.code != 0:  # 0: it finished before the signal
            break
    saves = folder / "saves"
    lines = saves.read_text().split() if saves.exists() else []
    # before training starts and after its last step no handler is installed
    unhandled = not lines or lines[-1] == str(STEPS)
    allowed = (128 + number, -number) if unhandled else (128 + number,)
    if "Traceback" in result.err or result.code not in allowed:
        return f"{name}: exit {result.code}: {result.err[-500:]}"
    if result.seconds > 5:
        return f"{name}: it took {result.seconds:.1f} s"
    run = folder / "R"
    if wrong := check_saves(run, folder / "saves"):
        return f"{name}: {wrong}"
    if "and saved; resume with" in result.err or not list_checkpoints(run / "checkpoints"):
        arguments = RESUME if list_checkpoints(run / "checkpoints") else train_arguments()
        result = run_forked(arguments, folder)
        if result.code != 0:
            return f"{name}: resuming failed: {result.err[-500:]}"
    if checkpoint_digests(run) != expected:
        return f"{name}: the weights differ from those of the uninterrupted run"
    return None
