"""Runs that are trained once for each worker of pytest, for tests that only read or copy them."""

from pathlib import Path

import pytest
from conftest import REPOSITORY

import chargpt

MIXED_SETTINGS = {
    "text.mixture_characters": 800,
    "train.max_steps": 40,
    "train.batch_size": 4,
    "train.evaluate_every": 20,
    "train.save_every": 20,
    "train.evaluation_tokens": 1000,
    "model.n_layer": 1,
    "model.n_embd": 32,
    "model.block_size": 32,
    "train.sample_every": 0,
    "device": "cpu",
    "dtype": "float32",
}


@pytest.fixture(scope="session")
def mixed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of 40 steps on the verse, with its mixture; do not write into it."""
    folder = tmp_path_factory.mktemp("mixed") / "run"
    text = REPOSITORY / "data" / "lighthouse.txt"
    chargpt.train(text, settings=MIXED_SETTINGS, out=folder)
    return folder
