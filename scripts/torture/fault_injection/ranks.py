"""Processes that train together: one is lost, all are asked to stop, others go on."""

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

from chargpt.store import commit
from chargpt.store.run import RunFolder
from fault_injection.processes import Ended, run_ranks
from fault_injection.tiny_run import REPOSITORY, RESUME, done, fresh, kept, sums, train_words

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RESUMED_STEPS = 30
WORLDS = list(itertools.permutations((1, 2, 4)))
AGENTS_OWN = re.compile(r"^[EWI]\d{4} .*\n", re.MULTILINE)
PART = 5  # steps that each process group runs of a run


@functools.cache
def together(work: Path) -> tuple[list[str], float]:
    """Return the sums of a run of two ranks that nothing happened to, and its seconds."""
    folder = fresh(work / "together")
    ended = run_ranks(train_words(), folder)
    assert [each.code for each in ended] == [0, 0], ended[0].err
    return sums(folder / "R"), ended[0].seconds


def first_save(run: Path) -> None:
    """Wait until something is saved."""
    for _ in range(6000):
        if (run / "checkpoints" / "latest.json").exists():
            return
        time.sleep(0.01)
    raise AssertionError("nothing was saved in a minute")


def signal_ranks(work: Path, index: int, random: Random) -> str | None:
    """Send a signal to both ranks or to one: they save, exit 128 + n in time, and can go on."""
    expected, seconds = together(work)
    number, to = SIGNALS[index % 3], ((0, 1), (0,), (1,))[index // 3 % 3]
    what = f"{signal.Signals(number).name} to {to}"
    folder = fresh(work / "signalled")
    run, saves = folder / "R", folder / "saves"

    def send(processes: list[int]) -> None:
        first_save(run)
        time.sleep(random.uniform(0, seconds / 2))
        for rank in to:
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[rank], number)

    ended = run_ranks(train_words(), folder, acknowledged=saves, during=send)
    if wrong := _told_of(ended, run, saves):
        return f"{what}: {wrong}"
    if not done(run):
        if any(each.code not in (128 + number, 128 + signal.SIGTERM) for each in ended):
            return f"{what}: exits {[each.code for each in ended]}: {ended[0].err[-500:]}"
        if max(each.seconds for each in ended) > 5:
            return f"{what}: it took {max(each.seconds for each in ended):.1f} s"
        ended = run_ranks(RESUME, folder)
    if sums(run) != expected:
        return f"{what}: another model came of it: {ended[0].err[-500:]}"
    return None


def lose_rank(work: Path, index: int, random: Random) -> str | None:
    """Kill one of two ranks: the other says so; under `--max-restarts` both start again."""
    expected, seconds = together(work)
    folder, rank = fresh(work / "lost"), index % 2
    run, moment = folder / "R", random.uniform(0, seconds / 4)

    def stab(processes: list[int]) -> None:
        first_save(run)
        time.sleep(moment)
        os.kill(processes[rank], signal.SIGKILL)

    if index % 3 == 0:
        ended = run_ranks(train_words(), folder, during=stab)
        if ended[rank].code == -signal.SIGKILL and not done(run):
            left = ended[1 - rank]
            if left.code != 1 or "another of the processes has gone" not in left.err:
                return f"rank {rank}: the other's exit {left.code}: {left.err[-500:]}"
        if "Traceback" in ended[0].err + ended[1].err:
            return f"rank {rank}: {ended[0].err[-500:]}{ended[1].err[-500:]}"
        told = run_ranks(train_words(), folder)[0].err
    else:
        told = _restarted(folder, stab)
    if "Traceback" in told:
        return f"rank {rank}: {told[-1000:]}"
    if not any(words in told for words in ("going on with R", "has done all")):
        return f"rank {rank}: it was not started again: {told[-1000:]}"
    if sums(run) != expected:
        return f"rank {rank}: another model came of it"
    return None


def _restarted(folder: Path, stab: Callable[[list[int]], None]) -> str:
    """Train under torchrun, which starts both ranks again; return what they said."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with open(folder / ".stderr", "w+") as err:
        agent = subprocess.Popen(
            [sys.executable, "-m", *torchrun, "-m", "chargpt", *train_words()],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,
        )
        try:
            while len(ranks := _children(agent.pid)) < 2:
                time.sleep(0.05)
            stab([ranks[0], ranks[1]])
            code = agent.wait(timeout=120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
        err.seek(0)
        said = err.read()
    assert code == 0, f"exit {code}: {said[-2000:]}"
    return AGENTS_OWN.sub("", said)


def _children(agent: int) -> dict[int, int]:
    """Return the processes that an agent has started, by their rank."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == agent:
                facts = (stat.parent / "environ").read_bytes().split(b"\0")
                ranks = [int(fact[5:]) for fact in facts if fact.startswith(b"RANK=")]
                found |= {rank: int(stat.parent.name) for rank in ranks}
    return found


def _told_of(ended: list[Ended], run: Path, saves: Path) -> str | None:
    for each in ended:
        if "Traceback" in each.err:
            return f"exit {each.code}: {each.err[-500:]}"
    return kept(run, saves)


@functools.cache
def stepwise(work: Path) -> Path:
    """Return a run of two ranks that was saved at each of its steps."""
    folder = fresh(work / "stepwise")
    changes = {"train.save_every": 1, "train.keep_last": RESUMED_STEPS}
    ended = run_ranks(train_words(**{"train.max_steps": RESUMED_STEPS, **changes}), folder)
    assert ended[0].code == 0, ended[0].err
    return folder / "R"


def resume_ranks(work: Path, index: int, _: Random) -> str | None:
    """Go on from one step of a run of two ranks: the same bits."""
    whole, step = stepwise(work), index % (RESUMED_STEPS - 1) + 1
    folder = fresh(work / "resumed")
    run = folder / "R"
    shutil.copytree(whole, run)
    for path in commit.committed(run / "checkpoints"):
        if commit.step_of(path) > step:
            shutil.rmtree(path)
    commit.write_pointer(run / "checkpoints", "latest", run / "checkpoints" / f"step-{step:08}")
    ended = run_ranks(RESUME, folder)
    if [each.code for each in ended] != [0, 0]:
        return f"step {step}: {ended[0].err[-500:]}"
    lines = [[{**r, "seconds": 0} for r in RunFolder(p).metrics.records()] for p in (run, whole)]
    if sums(run) != sums(whole) or lines[0] != lines[1]:
        return f"step {step}: another model came of it"
    return None


def change_world(work: Path, index: int, _: Random) -> str | None:
    """Let a run go on among more or fewer processes: the same samples, losses within 1e-5."""
    worlds, optimizer = WORLDS[index % 6], ("muon", "adamw")[index // 6 % 2]
    settings = {"optim.name": optimizer, "train.batch_size": 8, "model.dropout": 0.0}
    settings |= {"dtype": "float32", "schedule.cooldown": 0, "train.evaluate_every": PART}
    losses = []
    for name, sizes in (("alone", (1, 1, 1)), ("changing", worlds)):
        folder = fresh(work / name)
        for number, ranks in enumerate(sizes, 1):
            words = RESUME if number > 1 else train_words(**settings)
            ended = run_ranks([*words, "-s", f"train.max_steps={number * PART}"], folder, ranks)
            if any(each.code for each in ended):
                return f"{worlds}, {optimizer}: {ended[0].err[-500:]}"
        records = RunFolder(folder / "R").metrics.records()
        losses.append([r["loss"] for r in records if "loss" in r])
        losses[-1] += [r["val_nats_per_char"] for r in records if "val_nats_per_char" in r]
    gap = max(abs(one - two) for one, two in zip(*losses, strict=True))
    if gap > 1e-5 or len(losses[0]) < 3 * PART:
        return f"{worlds}, {optimizer}: losses differ by {gap}"
    return None
