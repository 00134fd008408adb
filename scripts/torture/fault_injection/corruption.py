"""Checkpoints that were damaged, forged, or saved long ago."""

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
from chargpt.store.checkpoint import Checkpoint
from chargpt.store.run import RunFolder, load_run
from chargpt.store.verify import require_whole, verify
from chargpt.text.tokenizer import CharTokenizer
from fault_injection.processes import run_forked
from fault_injection.tiny_run import REPOSITORY, fresh, train_words

GOLDEN = REPOSITORY / "tests" / "golden"


@functools.cache
def whole_runs(work: Path) -> tuple[Path, Path]:
    """Return two runs of one shape, each with one checkpoint."""
    runs = []
    for seed in (1, 2):
        folder = fresh(work / f"whole-{seed}")
        words = train_words(**{"seed": seed, "train.max_steps": 1})
        ended = run_forked(words, folder)
        assert ended.code == 0, ended.err
        runs.append(folder / "R")
    return runs[0], runs[1]


class Canary:
    """What a pickle would run, if anybody unpickled it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def damage(work: Path, index: int, random: Random) -> str | None:
    """Damage one thing of a run whose only checkpoint it is; reading must refuse it aloud."""
    whole, other = whole_runs(work)
    run = work / "damaged"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(whole, run)
    folder = run / "checkpoints" / "step-00000001"
    foreign = other / "checkpoints" / "step-00000001"
    canary = work / "canary"
    files = [*sorted(folder.iterdir()), run / "checkpoints" / "latest.json"]
    path = random.choice(files)
    content = bytearray(path.read_bytes())
    if index < 500:
        bit = random.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        what = f"bit {bit} of {path.name} flipped"
    elif index < 800:
        size = random.randrange(len(content))
        path.write_bytes(content[:size])
        what = f"{path.name} cut to {size} bytes"
    elif index < 900:
        what = _miss_or_swap(random, path, folder, foreign, run)
    elif index < 950:
        stream = pickle.dumps(Canary(canary), protocol=random.randint(0, 5))
        what = f"{path.name} a pickle"
        path.write_bytes(stream + bytes(random.randrange(100)))
        if random.random() < 0.5 and path.name not in ("manifest.json", "latest.json"):
            _forge(folder, run)
    else:
        what = _be_hostile(random, folder, run, work)
    try:
        saved, skipped = RunFolder(run).load("latest")
        require_whole(saved)
        require_same(saved, RunFolder(whole).load("latest")[0])
        wrong = None if skipped else f"{what}: read without a word"
    except ChargptError:
        wrong = None
    if canary.exists():
        return f"{what}: code was run"
    return wrong


def require_same(one: Checkpoint, two: Checkpoint) -> None:
    """Check that what was read is what was saved."""
    assert one.config == two.config
    assert one.tokenizer == two.tokenizer
    for left, right in ((one.model, two.model), (one.optimizer, two.optimizer)):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


def _miss_or_swap(random: Random, path: Path, folder: Path, foreign: Path, run: Path) -> str:
    kind = random.randrange(4)
    name = random.choice(["model.safetensors", "optimizer.safetensors", "tokenizer.json"])
    if kind == 0 and path.name != "latest.json":
        path.unlink()
        return f"{path.name} missing"
    if kind == 1:
        model, optimizer = folder / "model.safetensors", folder / "optimizer.safetensors"
        weights = model.read_bytes()
        model.write_bytes(optimizer.read_bytes())
        optimizer.write_bytes(weights)
        return "weights and optimizer swapped"
    if kind == 2:
        shutil.rmtree(folder)
        shutil.copytree(foreign, folder)
        return "another run's checkpoint in its place"
    (folder / "model.safetensors").write_bytes((foreign / "model.safetensors").read_bytes())
    (folder / name).write_bytes((foreign / name).read_bytes() + b" ")
    return f"another run's weights and {name}"


def _forge(folder: Path, run: Path) -> None:
    """Make manifest and pointer agree with what is there, as an enemy would."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name != "manifest.json" and path.is_file():
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            files[path.name] = {"size": len(content), "sha256": digest}
    manifest = json.dumps({"step": 1, "files": files})
    (folder / "manifest.json").write_text(manifest)
    digest = hashlib.sha256(manifest.encode()).hexdigest()
    pointer = {"checkpoint": folder.name, "manifest_sha256": digest}
    (run / "checkpoints" / "latest.json").write_text(json.dumps(pointer))


def _be_hostile(random: Random, folder: Path, run: Path, work: Path) -> str:
    """Put in something made to harm, all sums right."""
    model = folder / "model.safetensors"
    header = {"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    nest = b'{"a":' * 200_000 + b"1" + b"}" * 200_000
    hostile: list[tuple[str, Callable[[], object]]] = [
        ("a header of 2^63 bytes", lambda: model.write_bytes(struct.pack("<Q", 2**63 - 1))),
        ("a header of 4 GB", lambda: model.write_bytes(struct.pack("<Q", 2**32) + b"{" * 100)),
        ("a tensor of 4 TB", lambda: model.write_bytes(_tensors(header))),
        ("a header of nests", lambda: model.write_bytes(struct.pack("<Q", len(nest)) + nest)),
        ("weights of 1 TB", lambda: os.truncate(model, 10**12)),
        ("a state of nests", lambda: (folder / "state.json").write_bytes(nest)),
        ("another step", lambda: (folder / "state.json").write_text('{"step": 7}')),
        ("a step that is text", lambda: (folder / "state.json").write_text('{"step": "1"}')),
        ("a tokenizer of nests", lambda: (folder / "tokenizer.json").write_bytes(nest)),
        ("another vocabulary", lambda: CharTokenizer.fit("ab").save(folder / "tokenizer.json")),
        ("a config of aliases", lambda: (folder / "config.yaml").write_text(_aliases())),
        ("a config of terabytes", lambda: _edit_config(folder, "n_embd: 16", "n_embd: 65536")),
        ("a config of layers", lambda: _edit_config(folder, "n_layer: 1", "n_layer: 256")),
        ("weights by a link", lambda: _link(model, work)),
        ("a folder by a link", lambda: _link(folder, work)),
        ("weights by a pipe", lambda: (model.unlink(), os.mkfifo(model))),
    ]
    what, do = random.choice(hostile)
    do()
    if what not in ("weights of 1 TB", "weights by a pipe", "a folder by a link"):
        _forge(folder, run)
    paths = random.random()
    if paths < 0.2:  # or a name that climbs out
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"]["../../../config.yaml"] = manifest["files"].pop("config.yaml")
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return f"{what}, and a path that climbs out"
    return what


def _tensors(header: dict[str, Any]) -> bytes:
    content = json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content


def _aliases() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(lines)


def _edit_config(folder: Path, old: str, new: str) -> None:
    path = folder / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def _link(path: Path, work: Path) -> None:
    away = work / "away"
    shutil.rmtree(away, ignore_errors=True)
    away.unlink(missing_ok=True)
    shutil.move(path, away)
    path.symlink_to(away)


def golden(work: Path, index: int, _: Random) -> str | None:
    """Load a run that a release saved, and compare its logits with those it had then."""
    releases = sorted(path for path in GOLDEN.iterdir() if path.is_dir())
    release = releases[index % len(releases)]
    run = load_run(release / "run", device="cpu")
    stored = load_file(release / "logits.safetensors")
    with torch.no_grad():
        logits = run.model(stored["tokens"])
    if not torch.allclose(logits, stored["logits"], rtol=1e-5, atol=1e-5):
        return f"{release.name}: the logits are others"
    problems = verify(RunFolder(release / "run")).problems
    return f"{release.name}: {problems}" if problems else None
