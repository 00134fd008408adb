"""Distributed training: signals, lost ranks and links, resuming, changed world sizes."""

import contextlib
import functools
import hashlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from unittest import mock

import torch

from chargpt.store.checkpoint import list_checkpoints, step_of
from chargpt.store.folder import RunFolder
from chargpt.training.learner import Batches
from fault_injection.processes import ProcessResult, run_ranks
from fault_injection.tiny_run import (
    REPOSITORY,
    RESUME,
    TEXT,
    check_saves,
    checkpoint_digests,
    empty_folder,
    is_finished,
    train_arguments,
    wait_for,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RESUMED_STEPS = 30
WORLD_SIZES = list(itertools.product((1, 2, 4), repeat=2))
# Muon's default rates amplify the rounding errors of other summation orders beyond 1e-5
RATES: tuple[dict[str, object], ...] = (
    {"optim.name": "muon", "optim.lr": 1e-3, "optim.matrix_lr": 2.5e-3},
    {"optim.name": "adamw"},
)
TORCHRUN_LOG = re.compile(r"^[EWI]\d{4} .*\n", re.MULTILINE)
STEPS_PER_GROUP = 100  # training steps before the world size changes
LOST = "another rank has failed"
KILLS = 30  # under `--max-restarts`; in later cases without it, or a link is interrupted
HOSTS = ("10.213.0.1", "10.213.0.2")
LINK_SECONDS = 8  # for which a link is down
CUT_SECONDS = 20  # timeout of ranks whose link stays down, instead of ten minutes
PROGRAM = """
from chargpt import distributed
distributed.TIMEOUT_SECONDS = {seconds}
from chargpt.cli.main import run
run()
"""


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
    """Kill one of two ranks; `--max-restarts` must restart both, or the other must report it."""
    expected, seconds = uninterrupted_ranks(work)
    folder, rank = empty_folder(work / "lost"), index % 2
    run, delay = folder / "R", random.uniform(0, seconds / 4)

    def send_sigkill(processes: list[int]) -> None:
        wait_for(run, "checkpoints/step-????????")
        time.sleep(delay)
        os.kill(processes[rank], signal.SIGKILL)

    if index >= KILLS:
        result = run_ranks(train_arguments(), folder, while_running=send_sigkill)
        if result[rank].code == -signal.SIGKILL and not is_finished(run):
            survivor = result[1 - rank]
            if survivor.code != 1 or LOST not in survivor.err:
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
    """Resume a run with another world size: the same sequences, and losses within 1e-5.

    In the last case, at default rates, those of two ranks must be bitwise identical to those of one
    process with two micro-batches, which are summed in the same order.
    """
    if index == len(RATES) * len(WORLD_SIZES):
        alone = _train_in_groups(empty_folder(work / "single"), (1, 1), {})
        ranks = _train_in_groups(empty_folder(work / "ranks"), (2, 2), {"train.micro_batches": 1})
        return None if ranks == alone else "other losses than of micro-batches"
    sizes, rates = WORLD_SIZES[index % 9], RATES[index // 9 % 2]
    sequences, losses = _train_in_groups(empty_folder(work / "changing"), sizes, rates)
    expected, expected_losses = _train_alone(work, index // 9 % 2)
    what = f"{sizes}, {rates['optim.name']}"
    if sequences != expected:
        return f"{what}: other sequences"
    gap = max(abs(one - two) for one, two in zip(losses, expected_losses, strict=True))
    return f"{what}: losses differ by {gap}" if gap > 1e-5 else None


@functools.cache
def _train_alone(work: Path, number: int) -> tuple[set[str], list[float]]:
    return _train_in_groups(empty_folder(work / "single"), (1, 1), RATES[number])


def _train_in_groups(
    folder: Path, sizes: tuple[int, ...], rates: dict[str, object]
) -> tuple[set[str], list[float]]:
    """Train by groups of ranks in turn; return the digests of all sequences, and all losses."""
    settings = {"train.batch_size": 8, "model.dropout": 0.0, "schedule.cooldown": 0, **rates}
    with _log_sequences(folder / "sequences"):
        for number, ranks in enumerate(sizes, 1):
            arguments = RESUME if number > 1 else train_arguments(**settings)
            result = run_ranks(
                [*arguments, "-s", f"train.max_steps={number * STEPS_PER_GROUP}"], folder, ranks
            )
            assert not any(each.code for each in result), f"{sizes}: {result[0].err[-500:]}"
    records = RunFolder(folder / "R").metrics.records()
    losses = [r[key] for key in ("loss", "val_nats_per_char") for r in records if key in r]
    sequences = set((folder / "sequences").read_text().splitlines())  # of trial steps once more
    assert len(losses) > len(sizes) * STEPS_PER_GROUP < len(sequences)
    return sequences, losses


@contextlib.contextmanager
def _log_sequences(path: Path) -> Iterator[None]:
    """Append the step and digest of each training sequence of all forks to a file."""
    real = Batches.at

    def at(batches: Batches, step: int, rows: slice = slice(None)) -> torch.Tensor:
        blocks = real(batches, step, rows)
        digests = (hashlib.sha256(block.numpy().tobytes()).hexdigest() for block in blocks)
        with open(path, "a", encoding="ascii") as file:
            file.write("".join(f"{step} {digest}\n" for digest in digests))
        return blocks

    with mock.patch.object(Batches, "at", at):
        yield


def lose_host(work: Path, index: int, random: Random) -> str | None:
    """Two hosts, of which one has neither text nor run: kill a rank, or interrupt the link."""
    try:
        with _two_namespaces():
            subprocess.run(["unshare", "--mount", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "skipped: network namespaces need root, iproute2 and util-linux"
    expected, seconds = uninterrupted_ranks(work)
    folder, delay = empty_folder(work / "hosts"), random.uniform(0, seconds / 4)
    files = folder / "files"
    files.mkdir()
    shutil.copy(TEXT, files)
    run, fault = files / "R", "kill" if index < KILLS else ("down", "cut")[index % 2]
    timeout, restarts = (CUT_SECONDS, 0) if fault == "cut" else (600, 3)
    (folder / "program.py").write_text(PROGRAM.format(seconds=timeout))
    with _two_namespaces() as namespaces:
        agents = [_start_host(folder, name, host, restarts) for name, host in namespaces]
        try:
            wait_for(run, "checkpoints/step-????????")
            time.sleep(delay)
            if is_finished(run):  # the launcher of the other host would wait for this one
                fault = "none"
            elif fault == "kill":
                (rank,) = _children(agents[index % 2].pid).values()
                os.kill(rank, signal.SIGKILL)
            else:
                _ip("-n", namespaces[1][0], "link", "set", "host", "down")
            start = time.monotonic()
            if fault == "down":
                time.sleep(LINK_SECONDS)
                _ip("-n", namespaces[1][0], "link", "set", "host", "up")
            errors, codes = ["", ""], list[int]()
            if fault == "cut":  # the launchers themselves wait for minutes
                while not all(LOST in text for text in errors) and time.monotonic() - start < 60:
                    time.sleep(0.5)
                    errors = [(folder / f".stderr-{host}").read_text() for host in HOSTS]
            else:
                codes = [agent.wait(timeout=120) for agent in agents]
            waited = time.monotonic() - start
        finally:
            for agent in agents:
                for process in (*_children(agent.pid).values(), agent.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
    if fault == "none":
        return lose_host(work, index, random)
    errors = [TORCHRUN_LOG.sub("", (folder / f".stderr-{host}").read_text()) for host in HOSTS]
    what = f"{fault} after {delay:.2f} s, {waited:.1f} s, exits {codes}: {errors[0][-1500:]}"
    if fault != "cut" and ("Traceback" in "".join(errors) or any(codes)):
        return f"{what}{errors[1][-1500:]}"
    if fault == "cut":
        if waited > CUT_SECONDS + 10:
            return f"no message in time: {what}{errors[1][-1500:]}"
        run_ranks(RESUME, files)
    return None if checkpoint_digests(run) == expected else f"other weights: {what}"


@contextlib.contextmanager
def _two_namespaces() -> Iterator[list[tuple[str, str]]]:
    """Connect two network namespaces; yield their names and addresses."""
    names = [f"chargpt-{os.getpid()}-{number}" for number in (0, 1)]
    try:
        for name in names:
            _ip("netns", "add", name)
        pair = ("name", "host", "netns", names[0], "type", "veth")
        _ip("link", "add", *pair, "peer", "name", "host", "netns", names[1])
        for name, address in zip(names, HOSTS, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "host")
            for device in ("lo", "host"):
                _ip("-n", name, "link", "set", device, "up")
        yield list(zip(names, HOSTS, strict=True))
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _start_host(folder: Path, name: str, address: str, restarts: int) -> subprocess.Popen[bytes]:
    """Start torchrun in a namespace; the second one sees an empty folder and no text."""
    torchrun = f"-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --max-restarts {restarts}"
    rendezvous = f"--rdzv-backend c10d --rdzv-endpoint {HOSTS[0]}:29500 --rdzv-id hosts"
    rendezvous += f" --rdzv-conf is_host={int(address == HOSTS[0])}"
    launcher = [sys.executable, *torchrun.split(), *rendezvous.split(), "--local-addr", address]
    training = [str(folder / "program.py"), *train_arguments(**{"text.path": TEXT.name})]
    files = folder / "files"
    script = f"cd {shlex.quote(str(files))} && exec {shlex.join([*launcher, *training])}"
    enter = ["ip", "netns", "exec", name]
    if address != HOSTS[0]:
        script = f"mount -t tmpfs none {shlex.quote(str(files))} && {script}"
        enter += ["unshare", "--mount"]
    with open(folder / f".stderr-{address}", "wb") as err:
        return subprocess.Popen(
            [*enter, "sh", "-c", script],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "host"},
            stdout=subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,
        )
