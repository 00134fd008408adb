"""Files of other people in a run's folders, and outputs to what is no regular file."""

import contextlib
import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

from chargpt.store.folder import RunFolder
from chargpt.store.verify import verify
from fault_injection.processes import Fault, ProcessResult, run_forked
from fault_injection.reading import BEST, MORE, digests, finished_run
from fault_injection.tiny_run import (
    TEXT,
    TINY,
    checkpoint_digests,
    empty_folder,
    train_arguments,
)

REPLACE = [
    *("train", str(TEXT), "--out", "R", "--force"),
    *(
        word
        for key, value in {**TINY, "train.max_steps": 8, "seed": 7}.items()
        if key != "text.path"
        for word in ("-s", f"{key}={value}")
    ),
]
FOLDERS = (
    *("", "checkpoints", "checkpoints/step-00000004", "checkpoints/step-00000012"),
    *("tensorboard", "mine", "data.tmp", "checkpoints/step-00000020.tmp", "text"),
)
NAMES = ("notes.txt", "draft.tmp", "config.yaml.bak", ".hidden", "model.pt", "best.json~", "x.tmp")


def foreign_files(work: Path, index: int, random: Random) -> str | None:
    """Put files into a run's folders; --force and --resume must leave each where it is.

    --force renames the run, and the files stay in it.
    """
    folder = empty_folder(work / "foreign")
    run = folder / "R"
    if index % 5 == 4:  # no run at all, but names that a run has too
        run.mkdir()
        placed = [run / random.choice(("config.yaml", "report.html", "metrics.jsonl"))]
    else:
        shutil.copytree(finished_run(work), run)
        placed = [run / random.choice(FOLDERS) / name for name in random.sample(NAMES, 2)]
    for path in placed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    resume = ["--resume" if word == "--force" else word for word in REPLACE]
    for command in (list(MORE) if index % 5 != 4 else resume, REPLACE):
        result = run_forked(command, folder)
        if "Traceback" in result.err or result.code not in (0, 2):
            return f"{placed}: exit {result.code}: {result.err[-500:]}"
        if index % 5 == 4 and result.code != 2:
            return f"{placed}: accepted as a run"
        if index % 5 != 4 and command == REPLACE:
            placed = [folder / "R.old" / path.relative_to(run) for path in placed]
        for path in placed:
            if not path.is_file() or path.read_text() != "precious":
                return f"{path.relative_to(folder)} was touched: {command[:5]}: {result.err[-300:]}"
    return None


def kill_replacement(work: Path, index: int, random: Random) -> str | None:
    """Kill `--force` at a file operation; the old run stays whole, and the next command works."""
    folder = empty_folder(work / "replaced")
    run, intact = folder / "R", finished_run(work)
    shutil.copytree(intact, run)
    expected = digests(run)
    number = index + 1 if index < 40 else random.randint(40, 200)
    result = run_forked(REPLACE, folder, fault=Fault(run, number))
    what = f"operation {number}"
    if result.code not in (0, -signal.SIGKILL):
        return f"{what}: exit {result.code}: {result.err[-500:]}"
    old = folder / "R.old" if (folder / "R.old").exists() else run
    if not expected.items() <= digests(old).items():
        return f"{what}: the old run has changed: {sorted(os.listdir(folder))}"
    if problems := verify(RunFolder(old)).problems:
        return f"{what}: {problems}"
    if index % 2:
        longer = ["train", "--resume", old.name, "-s", "train.max_steps=30"]
        if (resumed := run_forked(longer, folder)).code != 0:
            return f"{what}: resume: {resumed.err[-500:]}"
    again = run_forked(REPLACE, folder)
    if again.code != 0 or RunFolder(run).load("latest").config.seed != 7:
        return f"{what}: --force again: {again.err[-500:]}"
    kept = RunFolder(folder / "R.old").load("best")
    if kept.state.best_step != BEST or (folder / "R" / ".new").exists():
        return f"{what}: --force again: the best step of R.old is {kept.state.best_step}"
    return None


def kill_start(work: Path, index: int, _: Random) -> str | None:
    """Kill the preparation of a text and the creation of its run; the same command then works."""
    folder = empty_folder(work / "started")
    run, number = folder / "R", index // 2 + 1
    changes: dict[str, object] = {"train.max_steps": 8}
    if index % 2:
        changes |= {"text.documents": "lines", "model.block_size": 8}
    command = train_arguments(**changes)
    result = run_forked(command, folder, fault=Fault(run, number))
    if result.code not in (0, -signal.SIGKILL):
        return f"operation {number}: exit {result.code}: {result.err[-500:]}"
    again = run_forked(command, folder)
    if again.code != 0 and "has done all its" not in again.err:
        return f"operation {number}: the same command: {again.err[-500:]}"
    if problems := verify(RunFolder(run)).problems:
        return f"operation {number}: {problems}"
    whole = run_forked([word if word != "R" else "whole" for word in command], folder)
    if whole.code != 0 or checkpoint_digests(run) != checkpoint_digests(folder / "whole"):
        return f"operation {number}: not the weights of an uninterrupted run"
    if digests(run).keys() != digests(folder / "whole").keys():
        return f"operation {number}: files remain: {sorted(digests(run))}"
    return None


def special_target(work: Path, index: int, _: Random) -> str | None:
    """Write a page, a picture, or a compressed file to a device, a link, a pipe, another's file."""
    folder = empty_folder(work / "targets")
    shutil.copytree(finished_run(work), folder / "R")
    target = folder / "target.svg"
    commands = (
        ["report", "R", "--out", "target.svg"],
        ["explain", "R", "--html", "target.svg"],
        ["compress", "R", str(TEXT), "target.svg", "--force"],
        ["explain", "R", "--plot", "target.svg"],
    )
    command = commands[index % 4]
    kinds: tuple[tuple[str, Callable[[Path, Path, list[str]], str | None]], ...] = (
        ("a device", _to_device),
        ("a link", _to_link),
        ("a pipe", _to_pipe),
        ("a private file", _to_private_file),
        ("another's file", _to_foreign_file),
    )
    what, check = kinds[index // 4 % 5]
    wrong = check(folder, target, command)
    return f"{command[0]} to {what}: {wrong}" if wrong else None


def _run(command: list[str], folder: Path, code: int = 0) -> ProcessResult:
    result = run_forked(command, folder)
    assert result.code == code, result.err[-500:]
    assert "Traceback" not in result.err, result.err[-500:]
    return result


def _to_device(folder: Path, target: Path, command: list[str]) -> str | None:
    try:
        os.mknod(target, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null
    except PermissionError:
        return "skipped: only root makes devices"
    _run(command, folder)
    return None if stat.S_ISCHR(target.stat().st_mode) else "the device was replaced"


def _to_link(folder: Path, target: Path, command: list[str]) -> str | None:
    (folder / "elsewhere").mkdir()
    target.symlink_to(folder / "elsewhere" / "result")
    _run(command, folder)
    if not target.is_symlink() or not (folder / "elsewhere" / "result").stat().st_size:
        return "the link was replaced"
    return None


def _to_pipe(folder: Path, target: Path, command: list[str]) -> str | None:
    os.mkfifo(target)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(target.read_bytes()), daemon=True)
    reader.start()
    _run(command, folder)
    reader.join(10)
    return None if received and received[0] else "nothing came through the pipe"


def _to_private_file(folder: Path, target: Path, command: list[str]) -> str | None:
    _run(command, folder)
    target.chmod(0o600)
    before = target.stat()
    _run(command, folder)
    after = target.stat()
    if after.st_ino == before.st_ino:
        return "it was not written again"
    mode = stat.S_IMODE(after.st_mode)
    return None if mode == 0o600 and after.st_size == before.st_size else f"mode {mode:o}"


def _to_foreign_file(folder: Path, target: Path, command: list[str]) -> str | None:
    target.write_text("a novel")
    with contextlib.suppress(ValueError):
        command = [word for word in command if word != "--force"]
    _run(command, folder, code=2)
    return None if target.read_text() == "a novel" else "it was overwritten"
