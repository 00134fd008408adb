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

from chargpt.errors import ChargptError
from chargpt.store.folder import RunFolder
from chargpt.store.run import load_run, open_run
from chargpt.store.verify import verify
from fault_injection.processes import Fault, ProcessResult, run_forked
from fault_injection.reading import MORE, finished_run
from fault_injection.tiny_run import TEXT, TINY, empty_folder

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
    *("tensorboard", "mine", "data.tmp", "checkpoints/step-00000020.tmp", ".replaced"),
)
NAMES = ("notes.txt", "draft.tmp", "config.yaml.bak", ".hidden", "model.pt", "best.json~", "x.tmp")


def foreign_files(work: Path, index: int, random: Random) -> str | None:
    """Put files into a run's folders; --force and --resume must leave each where it is."""
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
    resume = [*REPLACE[:-2], "--resume"]
    resume.remove("--force")
    commands = (REPLACE, list(MORE)) if index % 5 != 4 else (REPLACE, resume)
    for command in commands:
        result = run_forked(command, folder)
        if "Traceback" in result.err or result.code not in (0, 2):
            return f"{placed}: exit {result.code}: {result.err[-500:]}"
        for path in placed:
            if not path.is_file() or path.read_text() != "precious":
                return (
                    f"{path.relative_to(folder)} was touched by {command[-1]}: {result.err[-300:]}"
                )
    return None


def kill_replacement(work: Path, index: int, random: Random) -> str | None:
    """Kill `--force` at a file operation; the run must load, resume, and be replaceable."""
    folder = empty_folder(work / "replaced")
    run = folder / "R"
    shutil.copytree(finished_run(work), run)
    number = index + 1 if index < 30 else random.randint(30, 200)
    result = run_forked(REPLACE, folder, fault=Fault(run, number))
    if result.code not in (0, -signal.SIGKILL):
        return f"operation {number}: exit {result.code}: {result.err[-500:]}"
    try:
        loaded = load_run(run, device="cpu")
        problems = [] if loaded.step else ["step 0"]
        problems += [p for p in verify(open_run(run)).problems if "metrics" not in p]
    except ChargptError as error:
        problems = [str(error)]
    if problems:
        return f"operation {number}: {problems}"
    resumed = run_forked(["train", "--resume", "R", "-s", "train.max_steps=30"], folder)
    if resumed.code != 0:
        return f"operation {number}: resume: {resumed.err[-500:]}"
    again = run_forked(REPLACE, folder)
    if again.code != 0 or RunFolder(run).load("latest").config.seed != 7:
        return f"operation {number}: --force again: {again.err[-500:]}"
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
    size = target.stat().st_size
    target.write_bytes(target.read_bytes()[:4000])
    _run(command, folder)
    mode = stat.S_IMODE(target.stat().st_mode)
    return None if mode == 0o600 and target.stat().st_size == size else f"mode {mode:o}"


def _to_foreign_file(folder: Path, target: Path, command: list[str]) -> str | None:
    target.write_text("a novel")
    with contextlib.suppress(ValueError):
        command = [word for word in command if word != "--force"]
    _run(command, folder, code=2)
    return None if target.read_text() == "a novel" else "it was overwritten"
