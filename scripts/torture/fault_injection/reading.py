"""Reads that fail or find damage, and reads beside a process that writes."""

import errno
import functools
import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from chargpt.store.checkpoint import load_checkpoint
from chargpt.store.folder import RunFolder
from chargpt.store.metrics import VALIDATION, to_line
from chargpt.store.verify import verify
from fault_injection.processes import Fault, run_forked
from fault_injection.tiny_run import RESUME, empty_folder, error_lines, train_arguments

ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES)
BEST, BEFORE_LATEST, LATEST = 4, 12, 16
MORE = (*RESUME, "-s", f"train.max_steps={LATEST + 8}", "-s", "train.patience=null")
COMMANDS = (
    MORE,
    ("report", "R"),
    ("verify", "R"),
    ("sample", "R", "-n", "5"),
    ("evaluate", "R"),
    ("runs", "."),
)
SAME_COMMAND = tuple(
    train_arguments(
        **{"train.max_steps": LATEST + 8, "train.keep_last": 2, "train.evaluate_every": 100}
    )
)
READS_PER_CASE = 100


@functools.cache
def finished_run(work: Path) -> Path:
    """Return a run with steps 4 (never to be bettered), 12 and 16, in a folder of its own."""
    folder = empty_folder(work / "finished")
    changes = {"train.max_steps": LATEST, "train.keep_last": 2, "train.evaluate_every": 100}
    result = run_forked(train_arguments(**{**changes, "train.max_steps": BEST}), folder)
    assert result.code == 0, result.err
    _let_best_be(folder / "R", BEST)
    longer = (*RESUME, "-s", f"train.max_steps={LATEST}")
    result = run_forked(list(longer), folder)
    assert result.code == 0, result.err
    names = sorted(path.name for path in (folder / "R" / "checkpoints").glob("step-*"))
    assert names == [f"step-{step:08d}" for step in (BEST, 12, LATEST)], names
    return folder / "R"


def _let_best_be(run: Path, step: int) -> None:
    """Save a run's latest checkpoint again, with a validation loss that no other can better."""
    folder = RunFolder(run)
    saved = folder.load("latest")
    state = replace(saved.state, best_step=step, best_nats_per_char=0.0)
    folder.save(
        config=saved.config,
        tokenizer=saved.tokenizer,
        state=state,
        model=saved.model,
        optimizer=saved.optimizer,
    )
    folder.metrics.append({"step": step, VALIDATION: 0.0})


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder, by relative path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def history(run: Path, last: int = LATEST) -> list[str]:
    """Return the lines of the metrics up to a step, by default the last of the finished run."""
    path = run / "metrics.jsonl"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [line for line in lines if not _is_later(line, last)]


def _is_later(line: str, last: int) -> bool:
    try:
        return bool(json.loads(line)["step"] > last)
    except (ValueError, KeyError, TypeError):
        return False


def read_errors(work: Path, index: int, random: Random) -> str | None:
    """Fail one read of a command; the best checkpoint, the metrics and the text must survive it.

    In a quarter of the cases it is a read of the text.
    """
    intact = finished_run(work)
    folder = empty_folder(work / "reading")
    run = folder / "R"
    shutil.copytree(intact, run)
    best = run / "checkpoints" / f"step-{BEST:08d}"
    command = list(COMMANDS[index % len(COMMANDS)] if index >= 150 else MORE)
    number = index + 1 if index < 150 else random.randint(1, 150)
    under = run
    if index % 4 == 3:
        under, number = run / "text", index // 4 % 8 + 1
    fault = Fault(under, number, ERRORS[index % len(ERRORS)], reads=True)
    result = run_forked(command, folder, fault=fault)
    what = f"{command[0]}, read {number} of {under.name}"
    if "Traceback" in result.err or result.code not in (0, 1, 2):
        return f"{what}: exit {result.code}: {result.err[-700:]}"
    if len(error_lines(result)) != (0 if result.code == 0 else 1) and command[0] != "verify":
        return f"{what}: exit {result.code} with {error_lines(result)}"
    if digests(best) != digests(intact / "checkpoints" / best.name):
        return f"{what}: the best checkpoint is lost"
    if history(run) != history(intact):
        return f"{what}: the history is lost"
    if digests(run / "text") != digests(intact / "text"):
        return f"{what}: the text is lost"
    again = run_forked(list(MORE), folder)
    if again.code != 0 and "has done all its" not in again.err:
        return f"{what}: then resume: exit {again.code}: {again.err[-500:]}"
    if problems := verify(RunFolder(run)).problems:
        return f"{what}: then verify: {problems}"
    return None


def damaged_file(work: Path, index: int, random: Random) -> str | None:
    """Damage one file of a run, then resume it; what was intact must remain."""
    intact = finished_run(work)
    folder = empty_folder(work / "damaged")
    run = folder / "R"
    shutil.copytree(intact, run)
    best = run / "checkpoints" / f"step-{BEST:08d}"
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != ".lock")
    path = files[index % len(files)]
    content = bytearray(path.read_bytes())
    kind = ("bit flipped", "removed", "truncated")[index // len(files) % 3]
    if kind == "removed":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(content[: random.randrange(len(content))])
    else:
        bit = random.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
    what = f"{path.relative_to(run)} {kind}"
    # without an intact latest checkpoint, the steps since the one before are repeated
    last = BEFORE_LATEST if path.parent.name == f"step-{LATEST:08d}" else LATEST
    before, kept = digests(best), set(history(run, last))
    result = run_forked(list(MORE), folder)
    if "Traceback" in result.err or result.code not in (0, 2):
        return f"{what}: exit {result.code}: {result.err[-700:]}"
    if not best.is_dir() or digests(best) != before:
        return f"{what}: the best checkpoint was changed"
    if not kept <= set(history(run, last)):
        return f"{what}: the history was changed"
    if result.code == 0 and best not in path.parents:
        loaded = RunFolder(run).load("best").folder.name
        if loaded != best.name:
            return f"{what}: the best is {loaded}"
    return None


def damaged_text(work: Path, index: int, random: Random) -> str | None:
    """Damage the text of a run; commands say so in one sentence, and all else remains."""
    intact = finished_run(work)
    folder = empty_folder(work / "damaged-text")
    run = folder / "R"
    shutil.copytree(intact, run)
    what = _damage_text(run / "text", index, random)
    before = digests(run)
    for command in (MORE, SAME_COMMAND, ("evaluate", "R"), ("explain", "R"), ("verify", "R")):
        result = run_forked(list(command), folder)
        expected = 1 if command[0] == "verify" and "pipe" not in what else 2
        if "Traceback" in result.err or result.code != expected:
            return f"{what}: {command[0]}: exit {result.code}: {result.err[-500:]}"
        said = [line for line in (result.out + result.err).splitlines() if "R/text" in line]
        if len(said) != 1 or not re.search("damaged|a pipe or a device", said[0]):
            return f"{what}: {command[0]} does not name the damage: {result.err[-500:]}"
        if digests(run) != before:
            return f"{what}: {command[0]} changed a file"
    sampled = run_forked(["sample", "R", "-n", "5"], folder)
    if sampled.code != (2 if "pipe" in what else 0):
        return f"{what}: then sample: {sampled.err[-500:]}"
    shutil.rmtree(run / "text")
    shutil.copytree(intact / "text", run / "text")
    again = run_forked(list(MORE), folder)
    return f"{what}: restored: {again.err[-500:]}" if again.code else None


def _damage_text(text: Path, index: int, random: Random) -> str:
    """Damage a file of a run's text, or put what is no file in its place; say how."""
    path = sorted(text.iterdir())[index % 2]
    content = bytearray(path.read_bytes())
    kind = ("bit flipped", "cut", "removed", "emptied", "longer", "a folder", "a pipe")[
        index // 2 % 7
    ]
    if kind == "bit flipped":
        bit = random.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
    elif kind == "cut":
        content = content[: random.randrange(len(content))]
    elif kind == "emptied":
        content = bytearray()
    elif kind == "longer":
        content += random.randbytes(random.randint(1, 99))
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind != "removed":
        path.write_bytes(content)
    return f"{path.name}: {kind}"


@contextmanager
def saving_process(run: Path) -> Iterator[None]:
    """Save a checkpoint of the next step again and again in a fork; every third is the best."""
    pid = os.fork()
    if pid == 0:
        try:
            folder = RunFolder(run)
            saved = folder.load("latest")
            first = saved.state.step // 3 * 3 + 3
            for step in range(first, 10**6):
                folder.save(
                    config=saved.config,
                    tokenizer=saved.tokenizer,
                    state=replace(saved.state, step=step, best_step=step - step % 3),
                    model=saved.model,
                    optimizer=saved.optimizer,
                )
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def read_beside_writer(work: Path, index: int, _: Random) -> str | None:
    """Load the best, load the latest, and verify, while another process saves at every step."""
    folder = empty_folder(work / "beside")
    run = folder / "R"
    shutil.copytree(finished_run(work), run)
    metrics = run / "metrics.jsonl"
    records = ({"step": step, "loss": 1.0, VALIDATION: 0.0} for step in range(1, 20_000))
    metrics.write_text("".join(map(to_line, records)))
    reader = RunFolder(run)
    with saving_process(run):
        for number in range(READS_PER_CASE):
            if number % 4 == 3:
                found = verify(reader).problems
            else:
                which = "best" if number % 2 else "latest"
                found = load_checkpoint(run / "checkpoints", which)[1]
            if found:
                return f"read {number} of case {index}: {found}"
    return None
