"""Hostile names and texts in what is printed, and locales and encodings."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from chargpt.store.folder import RunFolder
from chargpt.text.tokenizer import CharTokenizer
from fault_injection.corruption import forge_manifest
from fault_injection.processes import ProcessResult, run_forked
from fault_injection.reading import finished_run
from fault_injection.tiny_run import REPOSITORY, TEXT, TINY, empty_folder

RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SEQUENCES = (
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\x1b]8;;http://x\x1b\\",
    "a\rb",
    "\x07\x08",
    "\x1bP",
    "[/b]",
)


def hostile_string(work: Path, index: int, random: Random) -> str | None:
    """Put an escape sequence into a name; no output may contain it."""
    sequence = SEQUENCES[index % len(SEQUENCES)] + random.choice(("", "x", "\u202e", "ж"))
    places: tuple[Callable[[Path, str], list[list[str]]], ...] = (
        _run_name,
        _text_name,
        _name_in_folder,
        _state_text,
        _tensor_name,
        _config_key,
        _metrics_sample,
        _prompt,
        _options,
        _vocabulary,
    )
    place = places[index // len(SEQUENCES) % len(places)]
    folder = empty_folder(work / "hostile")
    shutil.copytree(finished_run(work), folder / "R")
    for command in place(folder, sequence):
        result = run_forked(command, folder)
        what = f"{place.__name__} {sequence!r}: {command}"
        if "Traceback" in result.err:
            return f"{what}: {result.err[-500:]}"
        for stream in (result.out, result.err):
            if found := RAW.search(stream):
                return f"{what}: raw {found[0]!r} in {stream[max(0, found.start() - 80) :][:200]!r}"
        if (wrong := _check_json(result, command)) is not None:
            return f"{what}: {wrong}"
    return None


def _check_json(result: ProcessResult, command: list[str]) -> str | None:
    if "--json" in command and result.code == 0:
        try:
            json.loads(result.out)
        except ValueError:
            return f"invalid JSON: {result.out[:200]!r}"
    return None


def _about(run: str) -> list[list[str]]:
    return [
        ["evaluate", run, "--json"],
        ["evaluate", run],
        ["verify", run],
        ["verify", run, "--json"],
        ["runs", "."],
        ["runs", ".", "--json"],
        ["sample", run, "-n", "5", "--json"],
        ["report", run],
    ]


def _run_name(folder: Path, sequence: str) -> list[list[str]]:
    name = "R" + sequence.replace("/", "")
    (folder / "R").rename(folder / name)
    return [*_about(name), ["train", "--resume", name], ["sample", f"{name}?"]]


def _text_name(folder: Path, sequence: str) -> list[list[str]]:
    name = f"t{sequence.replace('/', '')}.txt"
    shutil.copy(TEXT, folder / name)
    tiny = [w for k, v in TINY.items() if k != "text.path" for w in ("-s", f"{k}={v}")]
    return [
        ["train", name, *tiny, "-s", "train.max_steps=2", "--out", "new"],
        *_about("new"),
        ["evaluate", "R", "--text", name],
        ["score", "R", name],
        ["data", "info", name],
        ["explain", name],
        ["compress", "R", name, "packed"],
        ["train", f"{name}x"],
    ]


def _name_in_folder(folder: Path, sequence: str) -> list[list[str]]:
    (folder / "texts").mkdir()
    name = f"t{sequence.replace('/', '')}.txt"
    (folder / "texts" / name).write_bytes(b"some words\xff")
    return [["data", "info", "texts"], ["evaluate", "R", "--text", "texts"]]


def _state_text(folder: Path, sequence: str) -> list[list[str]]:
    checkpoints = folder / "R" / "checkpoints"
    for step in checkpoints.glob("step-*"):
        state = json.loads((step / "state.json").read_text())
        (step / "state.json").write_text(json.dumps({**state, "text": sequence, "torch": sequence}))
        forge_manifest(step)
    return _about("R")


def _tensor_name(folder: Path, sequence: str) -> list[list[str]]:
    run = RunFolder(folder / "R")
    saved = run.load("latest")
    model = {**saved.model, sequence: torch.zeros(3)}
    run.save(
        config=saved.config,
        tokenizer=saved.tokenizer,
        state=replace(saved.state, best_step=saved.state.step),
        model=model,
        optimizer={sequence: torch.full((2,), torch.nan)},
    )
    return _about("R")


def _config_key(folder: Path, sequence: str) -> list[list[str]]:
    quoted = json.dumps(sequence)
    (folder / "own.yaml").write_text(f"{quoted}: 1\ntrain:\n  {quoted}: 2\n  max_steps: {quoted}\n")
    for step in (folder / "R" / "checkpoints").glob("step-*"):
        (step / "config.yaml").write_text((folder / "own.yaml").read_text())
        forge_manifest(step)
    return [
        ["train", str(TEXT), "-c", "own.yaml"],
        ["config", "-c", "own.yaml"],
        ["train", str(TEXT), "-s", f"train.{sequence}=1"],
        *_about("R"),
    ]


def _metrics_sample(folder: Path, sequence: str) -> list[list[str]]:
    with open(folder / "R" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 3, "sample": sequence, sequence: 1.0}) + "\n")
    return [*_about("R"), ["train", "--resume", "R", "-s", "train.max_steps=18"]]


def _prompt(folder: Path, sequence: str) -> list[list[str]]:
    (folder / "prompt").write_text(sequence)
    return [
        ["sample", "R", "-p", sequence, "-n", "5", "--json", "--unknown", "skip"],
        ["sample", "R", "-p", sequence, "-n", "5"],
        ["sample", "R", "--prompt-file", "prompt", "-n", "5"],
        ["score", "R", "prompt", "--json"],
        ["score", "R", "prompt", "--per-line"],
    ]


def _options(folder: Path, sequence: str) -> list[list[str]]:
    return [
        ["sample", "R", "--checkpoint", sequence],
        ["sample", sequence],
        ["train", str(TEXT), "--budget", sequence],
        ["train", str(TEXT), "--encoding", sequence],
        ["train", str(TEXT), "-s", sequence],
        ["explain", "R", "--section", sequence],
        ["data", "get", sequence],
        ["sample", "R", f"--{sequence}"],
        [sequence],
        ["config", sequence],
    ]


def _vocabulary(folder: Path, sequence: str) -> list[list[str]]:
    text = (TEXT.read_text(encoding="utf-8") + sequence) * 2
    (folder / "t.txt").write_text(text, encoding="utf-8")
    assert set(sequence) <= set(CharTokenizer.fit(text).characters)
    tiny = [w for k, v in TINY.items() if k != "text.path" for w in ("-s", f"{k}={v}")]
    return [
        ["train", "t.txt", *tiny, "-s", "train.max_steps=4", "--out", "new"],
        ["data", "info", "t.txt"],
        ["data", "info", "t.txt", "--json"],
        ["explain", "t.txt"],
        ["explain", "new", "--json"],
        ["score", "new", "t.txt"],
        ["sample", "new", "-p", sequence, "-n", "40", "--json"],
    ]


def encoding(work: Path, index: int, random: Random) -> str | None:
    """Use Cyrillic texts and names under a locale; each command is right or says what to do."""
    folder = empty_folder(work / "locales")
    environments: tuple[dict[str, str], ...] = (
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
        {"PYTHONIOENCODING": "koi8-r"},
        {"PYTHONIOENCODING": "utf-16"},
    )
    environment = environments[index % len(environments)]
    names = ("повесть.txt".encode(), b"t\xff.txt", "😀.txt".encode(), b"plain.txt")
    name = names[index // len(environments) % len(names)]
    verse = "Буря мглою небо кроет, вихри снежные крутя; " * 60
    with open(os.path.join(os.fsencode(folder), name), "wb") as file:
        file.write(verse.encode())
    tiny = [w for k, v in TINY.items() if k != "text.path" for w in ("-s", f"{k}={v}")]
    command = ["train", name, *tiny, "-s", "train.max_steps=4", "--out", "R"]
    done = _chargpt(command, folder, environment)
    if done.returncode != 0:
        return _check_sentence(done)
    for arguments in (
        ["sample", "R", "-n", "9", "--seed", "1", "--json"],
        ["sample", "R", "-n", "9", "--seed", "1"],
        ["evaluate", "R", "--json"],
        ["report", "R"],
        ["train", "--resume", "R", "-s", "train.max_steps=6"],
    ):
        done = _chargpt(arguments, folder, environment)
        if done.returncode != 0 and (wrong := _check_sentence(done)):
            return f"{arguments}: {wrong}"
        if arguments[0] == "sample" and b"?" in done.stdout:
            return f"{arguments}: a character was lost: {done.stdout!r}"
        if "--json" in arguments and done.returncode == 0:
            text = done.stdout.decode(environment.get("PYTHONIOENCODING", "utf-8"))
            if arguments[0] == "sample" and not set(json.loads(text)["samples"][0]) <= set(verse):
                return f"{arguments}: a character was lost: {text!r}"
    return None


def _chargpt(
    arguments: list[str | bytes] | list[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "chargpt", *arguments],
        cwd=folder,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        timeout=60,
        check=False,
    )


def _check_sentence(done: subprocess.CompletedProcess[bytes]) -> str | None:
    """Return an error unless a command failed with code 2 and one sentence."""
    said = done.stderr.decode("ascii", errors="replace")
    if done.returncode != 2 or "Traceback" in said:
        return f"exit {done.returncode}: {said[-500:]}"
    return None
