"""Corrupted, forged and old checkpoints."""

import functools
import hashlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file

from chargpt.errors import ChargptError
from chargpt.store.checkpoint import Checkpoint, load_checkpoint
from chargpt.store.folder import RunFolder
from chargpt.store.run import load_run
from chargpt.store.verify import require_intact, verify
from chargpt.text.tokenizer import CharTokenizer
from fault_injection.processes import run_forked
from fault_injection.tiny_run import REPOSITORY, empty_folder, train_arguments

GOLDEN = REPOSITORY / "tests" / "golden"


@functools.cache
def intact_runs(work: Path) -> tuple[Path, Path]:
    """Return two runs of the same shape, each with one checkpoint."""
    runs = []
    for seed in (1, 2):
        folder = empty_folder(work / f"intact-{seed}")
        arguments = train_arguments(**{"seed": seed, "train.max_steps": 1})
        result = run_forked(arguments, folder)
        assert result.code == 0, result.err
        runs.append(folder / "R")
    return runs[0], runs[1]


class Canary:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def corrupt_checkpoint(work: Path, index: int, random: Random) -> str | None:
    """Corrupt one file of a run's only checkpoint; the reader must report it and run no code."""
    intact, other = intact_runs(work)
    run = work / "corrupted"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(intact, run)
    folder = run / "checkpoints" / "step-00000001"
    foreign = other / "checkpoints" / "step-00000001"
    canary = work / "canary"
    path = random.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    if index < 500:
        bit = random.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        what = f"bit {bit} of {path.name} flipped"
    elif index < 800:
        size = random.randrange(len(content))
        path.write_bytes(content[:size])
        what = f"{path.name} truncated to {size} bytes"
    elif index < 900:
        what = _remove_or_swap(random, path, folder, foreign)
    elif index < 950:
        stream = pickle.dumps(Canary(canary), protocol=random.randint(0, 5))
        what = f"{path.name} replaced by a pickle"
        path.write_bytes(stream + bytes(random.randrange(100)))
        if random.random() < 0.5 and path.name != "manifest.json":
            forge_manifest(folder)
    else:
        what = _write_hostile_content(random, folder, work)
    try:
        saved, skipped = load_checkpoint(run / "checkpoints", "latest")
        require_intact(saved)
        require_same(saved, RunFolder(intact).load("latest"))
        wrong = None if skipped else f"{what}: read without a warning"
    except ChargptError:
        wrong = None
    if canary.exists():
        return f"{what}: code was executed"
    return wrong


def require_same(one: Checkpoint, two: Checkpoint) -> None:
    """Assert that two checkpoints hold the same config, tokenizer and tensors."""
    assert one.config == two.config
    assert one.tokenizer == two.tokenizer
    for left, right in ((one.model, two.model), (one.optimizer, two.optimizer)):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


def _remove_or_swap(random: Random, path: Path, folder: Path, foreign: Path) -> str:
    kind = random.randrange(3)
    name = random.choice(["model.safetensors", "optimizer.safetensors", "tokenizer.json"])
    if kind == 0:
        path.unlink()
        return f"{path.name} missing"
    if kind == 1:
        model, optimizer = folder / "model.safetensors", folder / "optimizer.safetensors"
        weights = model.read_bytes()
        model.write_bytes(optimizer.read_bytes())
        optimizer.write_bytes(weights)
        return "weights and optimizer swapped"
    (folder / "model.safetensors").write_bytes((foreign / "model.safetensors").read_bytes())
    (folder / name).write_bytes((foreign / name).read_bytes() + b" ")
    return f"another run's weights and {name}"


def forge_manifest(folder: Path) -> None:
    """Make the manifest match the files, as an attacker would."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name != "manifest.json" and path.is_file():
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            files[path.name] = {"size": len(content), "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))


def _write_hostile_content(random: Random, folder: Path, work: Path) -> str:
    """Replace one file by hostile content with matching checksums."""
    model = folder / "model.safetensors"
    header = {"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    nested = b'{"a":' * 200_000 + b"1" + b"}" * 200_000
    contents: list[tuple[str, Callable[[], object]]] = [
        ("a header of 2^63 bytes", lambda: model.write_bytes(struct.pack("<Q", 2**63 - 1))),
        ("a header of 4 GB", lambda: model.write_bytes(struct.pack("<Q", 2**32) + b"{" * 100)),
        ("a tensor of 4 TB", lambda: model.write_bytes(_safetensors_header(header))),
        (
            "a nested header",
            lambda: model.write_bytes(struct.pack("<Q", len(nested)) + nested),
        ),
        ("a file of 1 TB", lambda: os.truncate(model, 10**12)),
        ("a deeply nested state", lambda: (folder / "state.json").write_bytes(nested)),
        ("another step", lambda: (folder / "state.json").write_text('{"step": 7}')),
        ("a step that is a string", lambda: (folder / "state.json").write_text('{"step": "1"}')),
        ("a deeply nested tokenizer", lambda: (folder / "tokenizer.json").write_bytes(nested)),
        ("another vocabulary", lambda: CharTokenizer.fit("ab").save(folder / "tokenizer.json")),
        (
            "exponential YAML aliases",
            lambda: (folder / "config.yaml").write_text(_yaml_aliases()),
        ),
        (
            "a model of 1 TB",
            lambda: _edit_config(folder, "n_embd: 16", "n_embd: 65536"),
        ),
        ("a config with 256 layers", lambda: _edit_config(folder, "n_layer: 1", "n_layer: 256")),
        ("linked weights", lambda: _replace_by_link(model, work)),
        ("a linked folder", lambda: _replace_by_link(folder, work)),
        ("a pipe", lambda: (model.unlink(), os.mkfifo(model))),
    ]
    what, write = random.choice(contents)
    write()
    if what not in ("a file of 1 TB", "a pipe", "a linked folder"):
        forge_manifest(folder)
    if random.random() < 0.2:  # or a path that leaves the folder
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"]["../../../config.yaml"] = manifest["files"].pop("config.yaml")
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return f"{what}, and a path that leaves the folder"
    return what


def _safetensors_header(header: dict[str, Any]) -> bytes:
    content = json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content


def _yaml_aliases() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(lines)


def _edit_config(folder: Path, old: str, new: str) -> None:
    path = folder / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def _replace_by_link(path: Path, work: Path) -> None:
    target = work / "link-target"
    shutil.rmtree(target, ignore_errors=True)
    target.unlink(missing_ok=True)
    shutil.move(path, target)
    path.symlink_to(target)


def golden(work: Path, index: int, _: Random) -> str | None:
    """Load a run saved by an earlier release and compare its logits with the recorded ones."""
    releases = sorted(path for path in GOLDEN.iterdir() if path.is_dir())
    release = releases[index % len(releases)]
    run = load_run(release / "run", device="cpu")
    stored = load_file(release / "logits.safetensors")
    with torch.no_grad():
        logits = run.model(stored["tokens"])
    if not torch.allclose(logits, stored["logits"], rtol=1e-5, atol=1e-5):
        return f"{release.name}: the logits differ"
    problems = verify(RunFolder(release / "run")).problems
    return f"{release.name}: {problems}" if problems else None
