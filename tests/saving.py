"""Helpers that save a small checkpoint, and edit one together with its manifest."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch

from chargpt.config import Config
from chargpt.models import build_model
from chargpt.store.checkpoint import RunState
from chargpt.store.folder import RunFolder
from chargpt.text.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer.fit("hello world")
CONFIG = Config().with_values(
    {"model.n_layer": 1, "model.n_embd": 16, "model.block_size": 8, "train.keep_last": 2}
)
BEST_STEPS: dict[Path, int] = {}  # of each run, as a trainer knows it


def save(run: RunFolder, step: int, *, best: bool = False, fill: float = 0.5) -> Path:
    model = build_model(CONFIG.model, TOKENIZER.vocab_size)
    weights = {name: torch.full_like(t, fill) for name, t in model.state_dict().items()}
    for done in range(len(run.metrics.records()), min(step, 100)):
        run.metrics.append({"step": done + 1, "loss": 1.0})
    if best:
        BEST_STEPS[run.path] = step
    return run.save(
        config=CONFIG,
        tokenizer=TOKENIZER,
        state=RunState(step, best_step=BEST_STEPS.get(run.path)),
        model=weights,
        optimizer={"adamw.step": torch.tensor(float(step))},
    )


def failing(number: int) -> Mock:
    """Return a function that fails with an error of the operating system."""
    return Mock(side_effect=OSError(number, os.strerror(number)))


def failing_at(function: Callable[..., Any], number: int, *ends: str) -> Callable[..., Any]:
    """Return a function that fails, as the system does, for paths that end so."""

    def fail(path: Any, *rest: Any, **named: Any) -> Any:
        if str(path).endswith(ends):
            raise OSError(number, os.strerror(number), str(path))
        return function(path, *rest, **named)

    return fail


def flip(path: Path, bit: int) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def rewrite(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint and its entry in the manifest, as an attacker would."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = hashlib.sha256(content).hexdigest()
    manifest["files"][name] = {"size": len(content), "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest))
