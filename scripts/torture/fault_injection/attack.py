"""Runs from strangers: links in a run's folder, flipped bits, folders that move."""

import functools
import hashlib
import os
import re
import shutil
import time
from pathlib import Path
from random import Random
from typing import Any

import torch

from chargpt.errors import ChargptError
from chargpt.inference.generation import sample
from chargpt.inference.scoring import score
from chargpt.log import collected_notes
from chargpt.store.mixture import with_mixture
from chargpt.store.run import load_run, open_run
from chargpt.store.verify import verify
from fault_injection.processes import ProcessResult, run_forked
from fault_injection.reading import digests, saving_process
from fault_injection.tiny_run import (
    TEXT,
    check_rejection,
    empty_folder,
    train_arguments,
    wait_for,
)

KINDS = ("to a file", "to a folder", "dangling", "to itself", "to the same in another run", "pipe")
OUTPUTS = ("out.html", "out.gguf", "out.svg", "packed", "unpacked", "out.onnx")
PASSAGE = "The light turned, and the sea was"


@functools.cache
def full_run(work: Path) -> Path:
    """Return a run with all that a run can have."""
    folder = empty_folder(work / "full-run")
    changes = {
        "train.max_steps": 24,
        "train.evaluate_every": 8,
        "train.save_every": 8,
        "train.sample_every": 12,
        "text.mixture_characters": 2000,
        "text.documents": "lines",
        "model.block_size": 8,
        "track.tensorboard": True,
    }
    commands = (
        train_arguments(**changes),
        ["report", "R"],
        ["play", "R", "--no-open"],
        ["compress", "R", str(TEXT), "packed", "--keep", "--checkpoint", "latest"],
    )
    for command in commands:
        result = run_forked(command, folder)
        assert result.code == 0, (command, result.err)
    (folder / "packed").unlink()
    names = {path.name for path in (folder / "R").rglob("*")}
    assert {"mixture.safetensors", "report.html", "play.html", "tensorboard", "keep"} <= names
    return folder / "R"


@functools.cache
def places(run: Path) -> list[str]:
    """Return the path of each file and folder of a run, and of what a killed process leaves."""
    step = sorted((run / "checkpoints").glob("step-*"))[-1].name
    left = (
        *(".new", ".new/text", ".new/checkpoints", ".metrics.jsonl.0123456789ab.tmp"),
        *("checkpoints/latest.json", f"checkpoints/{step}.4711.tmp"),
        *(f"checkpoints/{step}.old.tmp", "checkpoints/step-00000999", "text/journal.jsonl"),
    )
    return sorted(str(path.relative_to(run)) for path in run.rglob("*")) + list(left)


COMMANDS = (
    ["train", "--resume", "R"],
    train_arguments(),
    ["train", str(TEXT), "--out", "R", "--force"],
    ["train", str(TEXT), "--from", "R", "--out", "other"],
    ["sample", "R", "-n", "5"],
    ["sample", "R", "--before", "The", "--after", "sea"],
    ["evaluate", "R", "--mixture"],
    ["score", "R", str(TEXT)],
    ["verify", "R"],
    ["report", "R"],
    ["explain", "R"],
    ["compress", "R", str(TEXT), "packed", "--keep"],
    ["decompress", "R", str(TEXT), "unpacked"],
    ["play", "R", "--no-open"],
    ["export", "html", "R", "out.html"],
    ["export", "gguf", "R", "out.gguf"],
    ["export", "hf", "R", "out-hf"],
    ["compare", "R", "R"],
    ["config", "--run", "R"],
    ["runs", "."],
)


def links(work: Path, index: int, _: Random) -> str | None:
    """Put a link in place of a part of a run; every command says so, and nothing is followed."""
    intact = full_run(work)
    found = places(intact)
    place, kind = found[index % len(found)], KINDS[index // len(found) % len(KINDS)]
    folder = empty_folder(work / "links")
    run, victim = folder / "R", folder / "victim"
    shutil.copytree(intact, run)
    shutil.copytree(intact, victim / "run")
    (victim / "mine").write_text("precious")
    path = run / place
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        targets = {
            "to a file": victim / "mine",
            "to a folder": victim,
            "dangling": victim / "nothing",
            "to itself": path,
            "to the same in another run": victim / "run" / place,
        }
        path.symlink_to(targets[kind])
    before, own = _snapshot(victim), _snapshot(run)
    for command in COMMANDS:
        what = f"{place} as a link {kind}: {' '.join(command[:4])}"
        result = run_forked(command, folder, seconds=30)
        if wrong := _answer_to_link(command, result, place):
            return f"{what}: {wrong}"
        if _snapshot(victim) != before:
            return f"{what}: what the link names was changed"
        if _snapshot(run) != own:
            return f"{what}: the run was changed"
        if left := [name for name in (*OUTPUTS, "out-hf", "other") if (folder / name).exists()]:
            return f"{what}: {left} was left"
    return None


def _answer_to_link(command: list[str], result: ProcessResult, place: str) -> str | None:
    """Return what is wrong with the answer of a command to a run that holds a link."""
    if command[0] == "runs":
        is_right = result.code in (0, 2) and "Traceback" not in result.err
        return None if is_right else f"exit {result.code}: {result.err[-300:]}"
    if wrong := check_rejection(result):
        return wrong
    name = place.partition("/")[0]
    return None if name in result.err else f"{name} is not named: {result.err[-300:]}"


def _snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of change of everything below a folder, by path."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        if path.name != ".lock" and not (path == folder and folder.name == "R"):
            found[str(path)] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def bit_flips(work: Path, index: int, random: Random) -> str | None:
    """Flip a bit of any file of a run; all that reads it says so, or gives the same numbers."""
    intact = full_run(work)
    expected = intact_numbers(intact)
    folder = empty_folder(work / "flipped")
    run = folder / "R"
    shutil.copytree(intact, run)
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)
    path = files[index % len(files)]
    content = bytearray(path.read_bytes())
    bit = random.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    what = f"{path.relative_to(run)}, bit {bit}"
    for name, value in numbers(run).items():
        if value is not None and value != expected[name]:
            return f"{what}: other {name}, without a word: {value!r:.200}, {expected[name]!r:.200}"
    checked = verify(open_run(run))
    is_seen = bool(checked.problems or checked.notes != verify(open_run(intact)).notes)
    is_page = path.name in ("report.html", "play.html")
    return f"{what}: verify does not see it" if is_page and not is_seen else None


@functools.cache
def intact_numbers(path: Path) -> dict[str, Any]:
    """Return what an intact run says."""
    found = numbers(path)
    assert None not in found.values(), found
    return found


@torch.inference_mode()
def numbers(path: Path) -> dict[str, Any]:
    """Return what a run says, by name; None for what was refused, or given with a warning."""

    def logits(which: str) -> object:
        return load_run(path, which, "cpu").logits(PASSAGE[:8]).tolist()

    def mixture_loss() -> object:
        mixed = with_mixture(load_run(path, device="cpu"))
        return score(mixed, PASSAGE).bits.tolist()

    def curves() -> object:
        metrics = load_run(path, device="cpu").metrics
        return {name: repr(values) for part in metrics.values() for name, values in part.items()}

    def text() -> object:
        corpus = load_run(path, device="cpu").corpus()
        return corpus.name, hashlib.sha256(corpus.tokens.tobytes()).hexdigest()

    def training() -> object:
        saved = open_run(path).load("latest")
        content = [tensor.numpy().tobytes() for _, tensor in sorted(saved.optimizer.items())]
        return saved.config.to_yaml(), saved.state, hashlib.sha256(b"".join(content)).hexdigest()

    sources: dict[str, Any] = {
        "logits of the best": lambda: logits("best"),
        "logits of the latest": lambda: logits("latest"),
        "loss of the mixture": mixture_loss,
        "sample": lambda: str(sample(load_run(path, device="cpu"), length=30, seed=1)[0]),
        "curves": curves,
        "text": text,
        "state to resume from": training,
    }
    found: dict[str, Any] = {}
    for name, source in sources.items():
        with collected_notes() as notes:
            try:
                found[name] = source()
            except ChargptError:
                found[name] = None
        if notes:
            found[name] = None
    return found


def moving_folder(work: Path, index: int, random: Random) -> str | None:
    """Rename or delete the folder of a run in training, and put another run in its place."""
    folder = empty_folder(work / "moving")
    run, moved = folder / "R", folder / "moved" / "here"
    moved.parent.mkdir()
    command = train_arguments(**{"train.max_steps": 5000, "train.save_every": 50})
    has_other, is_deleted = index % 2 == 1, index % 5 == 4
    before: dict[str, str] = {}

    def move(_: int) -> None:
        wait_for(run, "checkpoints/step-*/manifest.json")
        time.sleep(random.random() / 4)
        if is_deleted:
            while run.exists():
                shutil.rmtree(run, ignore_errors=True)
        else:
            os.rename(run, moved)
        if has_other:
            other = run_forked(train_arguments(**{"train.max_steps": 8, "seed": 5}), folder)
            assert other.code == 0, other.err
            before.update(digests(run))

    result = run_forked(command, folder, while_running=move)
    if "Traceback" in result.err or result.code != (1 if is_deleted else 2):
        return f"exit {result.code}: {result.err[-500:]}"
    if has_other and digests(run) != before:
        return "the other run was changed"
    if not has_other and run.exists():
        return f"the old folder was made again: {os.listdir(run)}"
    if is_deleted:
        moved = next(folder.glob("chargpt-*/R"))
    if f"--resume {moved.relative_to(folder)}" not in result.err.replace(f"{folder}/", ""):
        return f"the command to resume is missing: {result.err[-500:]}"
    step = int(re.findall("step ([0-9,]+)", result.err)[-1].replace(",", ""))
    resume = ["train", "--resume", str(moved), "-s", f"train.max_steps={step + 8}"]
    if is_deleted:  # and its text with it
        same = train_arguments(**{"train.max_steps": step + 8, "train.save_every": 50})
        resume = [str(moved) if word == "R" else word for word in same]
    longer = run_forked(resume, folder)
    return None if longer.code == 0 else f"resumed: exit {longer.code}: {longer.err[-500:]}"


def kept_beside_writer(work: Path, index: int, _: Random) -> str | None:
    """Compress with --keep beside a process that saves and deletes checkpoints."""
    folder = empty_folder(work / "kept")
    run = folder / "R"
    shutil.copytree(full_run(work), run)
    which = ("best", "latest")[index % 2]
    (folder / "t.txt").write_text(PASSAGE * 20)
    with saving_process(run):
        time.sleep(0.05)
        packed = run_forked(
            ["compress", "R", "t.txt", "packed", "--keep", "--checkpoint", which], folder
        )
        if packed.code != 0:
            return check_rejection(packed)
        time.sleep(0.1)
    unpacked = run_forked(["decompress", "R", "packed", "unpacked"], folder)
    if unpacked.code != 0 or (folder / "unpacked").read_text() != PASSAGE * 20:
        return f"{which}: cannot be decompressed: {unpacked.err[-500:]}"
    return None
