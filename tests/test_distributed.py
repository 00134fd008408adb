"""Two ranks train to the losses of one process, and only rank 0 prints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, Cli

from chargpt.config import TextConfig, load_config
from chargpt.distributed import RankGroup
from chargpt.errors import ConfigError
from chargpt.text.prepare import load_corpus
from chargpt.training.learner import Learner

SETTINGS = (
    "-s train.max_steps=8 -s train.batch_size=8 -s train.micro_batches=2 -s train.evaluate_every=4 "
    "-s model.n_layer=1 -s model.n_embd=32 -s model.block_size=16 -s dtype=float32 "
    "-s train.sample_every=0 --device cpu"
).split()


def torchrun(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    launcher = "-m torch.distributed.run --standalone --nproc-per-node=2 -m chargpt".split()
    return subprocess.run(
        [sys.executable, *launcher, *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r["loss"] for r in records if "loss" in r] + [
        r["val_nats_per_char"] for r in records if "val_nats_per_char" in r
    ]


def test_two_ranks_train_to_the_losses_of_one_process(
    verse: Path, tmp_path: Path, cli: Cli
) -> None:
    alone = cli("train", verse, *SETTINGS, "--out", "alone")
    assert alone.returncode == 0, alone.stderr
    together = torchrun("train", verse, *SETTINGS, "--out", "together", cwd=tmp_path)
    assert together.returncode == 0, together.stderr
    one, two = losses(tmp_path / "alone"), losses(tmp_path / "together")
    assert len(one) == len(two) == 8 + 3
    assert two == pytest.approx(one, abs=1e-5)
    assert together.stderr.count("vocab ") == 1  # only rank 0 prints
    assert "x 2 processes" in together.stderr
    assert together.stdout.count("perplexity") == 1
    assert "Warning" not in together.stderr


def test_a_batch_that_does_not_divide_over_the_ranks_is_rejected(verse: Path) -> None:
    config = load_config("gpt", {"train.batch_size": 7})
    corpus = load_corpus(TextConfig(path=str(verse)))
    with pytest.raises(ConfigError, match="does not divide over 2 processes"):
        Learner(config, corpus, RankGroup(0, 2), torch.device("cpu"))
