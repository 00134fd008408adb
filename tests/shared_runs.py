"""Runs that are trained once for each worker of pytest, for tests that only read or copy them."""

import shutil
from pathlib import Path

import pytest
from conftest import REPOSITORY, run_here

import chargpt
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import load_corpus

# a run of 6 steps, as words of the command line
QUICK = (
    "-s train.max_steps=6 -s train.batch_size=4 -s train.evaluate_every=3 -s train.save_every=3 "
    "-s train.evaluation_tokens=300 -s train.sample_every=0 -s model.n_layer=1 "
    "-s model.n_embd=16 -s model.block_size=16 -s sample.length=40 --device cpu -s dtype=float32"
).split()
RARE = ("-s", "text.min_count=20")
EVALUATION_KEYS = {
    "nats_per_char", "bits_per_char", "perplexity", "accuracy", "characters", "standard_error",
    "protocol", "split", "block_size", "parameters", "step", "evaluation_seconds",
    "chars_per_second", "text", "run", "n_unknown", "of_characters",
}  # fmt: skip
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


@pytest.fixture
def corpus(verse: Path) -> Corpus:
    """The verse, as it is trained on."""
    return load_corpus(verse)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of 40 steps on novel.txt beside it, the verse; do not write into it."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copy(REPOSITORY / "data" / "lighthouse.txt", folder / "novel.txt")
    args = [word.replace("max_steps=6", "max_steps=40") for word in QUICK]
    run_here("train", "novel.txt", *args, "--out", "run", cwd=folder)
    return folder / "run"


@pytest.fixture(scope="session")
def mixed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of 40 steps on the verse, with its mixture; do not write into it."""
    folder = tmp_path_factory.mktemp("mixed") / "run"
    text = REPOSITORY / "data" / "lighthouse.txt"
    chargpt.train(text, settings=MIXED_SETTINGS, out=folder)
    return folder
