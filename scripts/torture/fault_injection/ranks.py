"""Distributed training: signals, lost ranks, resuming, changed world sizes."""

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from chargpt.store.checkpoint import list_checkpoints, step_of
from chargpt.store.folder import RunFolder
from fault_injection.processes import ProcessResult, run_ranks
from fault_injection.tiny_run import (
    REPOSITORY,
    RESUME,
    check_saves,
    checkpoint_digests,
    empty_folder,
    is_finished,
    train_arguments,
    wait_for,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RESUMED_STEPS = 30
WORLD_SIZES = list(itertools.permutations((1, 2, 4)))
TORCHRUN_LOG = re.compile(r"^[EWI]\d{4} .*\n", re.MULTILINE)
STEPS_PER_GROUP = 5  # training steps before the world size changes


@functools.cache
def uninterrupted_ranks(work: Path) -> tuple[list[str], float]:
    """Return the checkpoint digests and the duration (s) of an uninterrupted run of two ranks."""
    folder = empty_folder(work / "uninterrupted-ranks")
    result = run_ranks(train_arguments(), folder)
    assert [each.code for each in result] == [0, 0], result[0].err
    return checkpoint_digests(folder / "R"), result[0].seconds


def signal_ranks(work: Path, index: int, random: Random) -> str | None:
    """Send a signal to one or both ranks; they must save, exit 128 + n in 5 s, and resume."""
    expected, seconds = uninterrupted_ranks(work)
    number, to = SIGNALS[index % 3], ((0, 1), (0,), (1,))[index // 3 % 3]
    what = f"{signal.Signals(number).name} to {to}"
    folder = empty_folder(work / "signalled")
    run, saves = folder / "R", folder / "saves"

    def send(processes: list[int]) -> None:
        wait_for(run, "checkpoints/step-????????")
        time.sleep(random.uniform(0, seconds / 2))
        for rank in to:
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[rank], number)

    result = run_ranks(train_arguments(), folder, save_log=saves, while_running=send)
    if wrong := _check_ranks(result, run, saves):
        return f"{what}: {wrong}"
    if not is_finished(run):
        if any(each.code not in (128 + number, 128 + signal.SIGTERM) for each in result):
            return f"{what}: exits {[each.code for each in result]}: {result[0].err[-500:]}"
        if max(each.seconds for each in result) > 5:
            return f"{what}: it took {max(each.seconds for each in result):.1f} s"
        result = run_ranks(RESUME, folder)
    if checkpoint_digests(run) != expected:
        return f"{what}: not the weights of the uninterrupted run: {result[0].err[-500:]}"
    return None


def lose_rank(work: Path, index: int, random: Random) -> str | None:
    """Kill one of two ranks; the other must report it, `--max-restarts` must restart both."""
    expected, seconds = uninterrupted_ranks(work)
    folder, rank = empty_folder(work / "lost"), index % 2
    run, delay = folder / "R", random.uniform(0, seconds / 4)

    def send_sigkill(processes: list[int]) -> None:
        wait_for(run, "checkpoints/step-????????")
        time.sleep(delay)
        os.kill(processes[rank], signal.SIGKILL)

    if index % 3 == 0:
        result = run_ranks(train_arguments(), folder, while_running=send_sigkill)
        if result[rank].code == -signal.SIGKILL and not is_finished(run):
            survivor = result[1 - rank]
            if survivor.code != 1 or "another rank has failed" not in survivor.err:
                return f"rank {rank}: the other's exit {survivor.code}: {survivor.err[-500:]}"
        if "Traceback" in result[0].err + result[1].err:
            return f"rank {rank}: {result[0].err[-500:]}{result[1].err[-500:]}"
        output = run_ranks(train_arguments(), folder)[0].err
    else:
        output = _run_torchrun(folder, send_sigkill)
    if "Traceback" in output:
        return f"rank {rank}: {output[-1000:]}"
    if not any(text in output for text in ("resuming R", "has done all")):
        return f"rank {rank}: it was not restarted: {output[-1000:]}"
    if checkpoint_digests(run) != expected:
        return f"rank {rank}: not the weights of the uninterrupted run"
    return None


def _run_torchrun(folder: Path, send_sigkill: Callable[[list[int]], None]) -> str:
    """Train under torchrun with restarts; return the stderr of the ranks."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with open(folder / ".stderr", "w+") as err:
        agent = subprocess.Popen(
            [sys.executable, "-m", *torchrun, "-m", "chargpt", *train_arguments()],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,
        )
        try:
            while len(ranks := _children(agent.pid)) < 2:
                time.sleep(0.05)
            send_sigkill([ranks[0], ranks[1]])
            code = agent.wait(timeout=120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
        err.seek(0)
        output = err.read()
    assert code == 0, f"exit {code}: {output[-2000:]}"
    return TORCHRUN_LOG.sub("", output)


def _children(agent: int) -> dict[int, int]:
    """Return the process ids of the ranks that a torchrun agent has started, by rank."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == agent:
                facts = (stat.parent / "environ").read_bytes().split(b"\0")
                ranks = [int(fact[5:]) for fact in facts if fact.startswith(b"RANK=")]
                found |= {rank: int(stat.parent.name) for rank in ranks}
    return found


def _check_ranks(result: list[ProcessResult], run: Path, saves: Path) -> str | None:
    for each in result:
        if "Traceback" in each.err:
            return f"exit {each.code}: {each.err[-500:]}"
    return check_saves(run, saves)


@functools.cache
def run_saved_at_every_step(work: Path) -> Path:
    """Return a run of two ranks with a checkpoint at each step."""
    folder = empty_folder(work / "every-step")
    changes = {"train.save_every": 1, "train.keep_last": RESUMED_STEPS}
    result = run_ranks(train_arguments(**{"train.max_steps": RESUMED_STEPS, **changes}), folder)
    assert result[0].code == 0, result[0].err
    return folder / "R"


def resume_ranks(work: Path, index: int, _: Random) -> str | None:
    """Resume a run of two ranks from one step; the result must be bitwise identical."""
    whole, step = run_saved_at_every_step(work), index % (RESUMED_STEPS - 1) + 1
    folder = empty_folder(work / "resumed")
    run = folder / "R"
    shutil.copytree(whole, run)
    for path in list_checkpoints(run / "checkpoints"):
        if step_of(path) > step:
            shutil.rmtree(path)
    result = run_ranks(RESUME, folder)
    if [each.code for each in result] != [0, 0]:
        return f"step {step}: {result[0].err[-500:]}"
    lines = [[{**r, "seconds": 0} for r in RunFolder(p).metrics.records()] for p in (run, whole)]
    if checkpoint_digests(run) != checkpoint_digests(whole) or lines[0] != lines[1]:
        return f"step {step}: not the weights of the uninterrupted run"
    return None


def change_world_size(work: Path, index: int, _: Random) -> str | None:
    """Resume a run with other world sizes; losses must agree within 1e-5."""
    worlds, optimizer = WORLD_SIZES[index % 6], ("muon", "adamw")[index // 6 % 2]
    settings = {"optim.name": optimizer, "train.batch_size": 8, "model.dropout": 0.0}
    settings |= {
        "dtype": "float32",
        "schedule.cooldown": 0,
        "train.evaluate_every": STEPS_PER_GROUP,
    }
    losses = []
    for name, sizes in (("single", (1, 1, 1)), ("changing", worlds)):
        folder = empty_folder(work / name)
        for number, ranks in enumerate(sizes, 1):
            arguments = RESUME if number > 1 else train_arguments(**settings)
            result = run_ranks(
                [*arguments, "-s", f"train.max_steps={number * STEPS_PER_GROUP}"], folder, ranks
            )
            if any(each.code for each in result):
                return f"{worlds}, {optimizer}: {result[0].err[-500:]}"
        records = RunFolder(folder / "R").metrics.records()
        losses.append([r["loss"] for r in records if "loss" in r])
        losses[-1] += [r["val_nats_per_char"] for r in records if "val_nats_per_char" in r]
    gap = max(abs(one - two) for one, two in zip(*losses, strict=True))
    if gap > 1e-5 or len(losses[0]) < 3 * STEPS_PER_GROUP:
        return f"{worlds}, {optimizer}: losses differ by {gap}"
    return None
