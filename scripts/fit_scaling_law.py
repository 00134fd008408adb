"""Fit the scaling law with which `chargpt train --budget` chooses a model's size.

    python scripts/fit_scaling_law.py TEXT [--workers 2] [--device cpu] [--more | --refit]

Trains the sizes of `chargpt.training.planner.SIZES` on several numbers of characters of TEXT's
training split, up to MAX_WORK, evaluates each on a held-out tail of that split (the validation
split is never read), fits

    loss = floor + a * parameters^-p + b * unique^-q            (Hoffmann et al. 2022, eq. 2)

where `unique` are unique-token equivalents (`planner.unique_token_equivalents`), and writes runs
and coefficients to `chargpt/training/scaling_law.json`. Takes about an hour on two cores with
bfloat16. With --more, the recorded runs are kept and only missing ones are trained; with --refit,
none.

Many coefficients fit runs of this length about equally well, but differ in how large a model they
choose for far longer ones. Of those whose error is within TOLERANCE of the smallest, the fit takes
those whose compute-optimal number of characters per parameter, at LARGE parameters, is nearest to
the published 20 tokens (Hoffmann et al. 2022, table 3).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from bench.record import provenance, write_record

from chargpt.config import ModelConfig, TextConfig
from chargpt.models import count_parameters
from chargpt.text.prepare import load_corpus
from chargpt.training.planner import SIZES, unique_token_equivalents

TARGET = Path(__file__).parent.parent / "chargpt" / "training" / "scaling_law.json"
CHARACTERS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000, 4_800_000, 9_600_000)
MAX_WORK = 2.4e13  # parameters x characters of one run
LENGTH_TOLERANCE = 0.1  # a run has whole steps, so it may be shorter than requested
EXPONENTS = np.arange(0.1, 1.21, 0.05)
R_VALUES = 2.0 ** np.arange(13)
S_VALUES = np.arange(0, 5.01, 0.25)
TOLERANCE = 1.1
LARGE = 1e8
PUBLISHED_RATIO = 20

TRAIN = """
import json, sys
from chargpt.config import load_config
from chargpt.device import tune_malloc
from chargpt.models import count_parameters
from chargpt.text.prepare import load_corpus
from chargpt.training.planner import SIZES, config_of_size, length_values
from chargpt.training.trainer import Trainer

text, size, characters = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = load_config("gpt").with_values({"text.path": text, "device": sys.argv[4]})
corpus = load_corpus(config.text)
config = config_of_size(config, SIZES[size], characters, corpus)
parameters = count_parameters(config.model, corpus.tokenizer.vocab_size)
train_tokens = len(corpus.split("train"))
config = config.with_values(length_values(config, characters, train_tokens, parameters))
tune_malloc()
trainer = Trainer(config, corpus)
for report in trainer.steps():
    pass
result = trainer.learner.evaluate("val")
train, model = config.train, config.model
print(json.dumps({"n_layer": model.n_layer, "n_embd": model.n_embd, "block_size": model.block_size,
                  "parameters": parameters,
                  "characters": train.max_steps * train.batch_size * model.block_size,
                  "nats_per_char": result.nats_per_char}))
"""


def train_all(
    text: Path, jobs: list[tuple[int, int]], workers: int, device: str
) -> list[dict[str, Any]]:
    """Train every (size, characters), `workers` at a time, each on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pending, running, results = list(jobs), [], []
    while pending or running:
        while pending and len(running) < workers:
            words = [sys.executable, "-c", TRAIN, str(text), *map(str, pending.pop(0)), device]
            running.append(
                subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
            )
        done = next((process for process in running if process.poll() is not None), None)
        if done is None:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            continue
        running.remove(done)
        assert done.stdout is not None
        results.append(json.loads(done.stdout.read().splitlines()[-1]))
        print(results[-1], file=sys.stderr, flush=True)
    return sorted(results, key=lambda result: (result["parameters"], result["characters"]))


def fit(results: list[dict[str, Any]], train_tokens: int) -> dict[str, float]:
    """Return the coefficients: exponents, r and s by grid search, the rest by least squares."""
    sizes = np.array([result["parameters"] for result in results], dtype=float)
    characters = np.array([result["characters"] for result in results], dtype=float)
    losses = np.array([result["nats_per_char"] for result in results])
    laws = []
    for r, s in product(R_VALUES, S_VALUES):
        read = zip(sizes, characters, strict=True)
        unique = np.array(
            [unique_token_equivalents(n, c, train_tokens, {"r": r, "s": s}) for n, c in read]
        )
        for p, q in product(EXPONENTS, EXPONENTS):
            columns = np.stack((np.ones_like(sizes), sizes**-p, unique**-q), axis=1)
            (floor, a, b), *_ = np.linalg.lstsq(columns, losses, rcond=None)
            error = np.sqrt(((columns @ (floor, a, b) - losses) ** 2).mean())
            if min(floor, a, b) > 0:
                law = {"floor": floor, "a": a, "p": p, "b": b, "q": q, "r": r, "s": s}
                laws.append({**law, "rms_error": error})
    smallest = min(law["rms_error"] for law in laws)
    close = [law for law in laws if law["rms_error"] <= TOLERANCE * smallest]
    chosen = min(close, key=lambda law: abs(np.log(optimal_ratio(law, LARGE) / PUBLISHED_RATIO)))
    return {name: round(float(value), 5) for name, value in chosen.items()}


def optimal_ratio(law: dict[str, float], parameters: float) -> float:
    """Return the compute-optimal number of unique characters per parameter.

    At a fixed product of parameters N and characters D the loss is smallest where
    a p N^-p = b q D^-q (Hoffmann et al. 2022, eq. 4).
    """
    gain = law["a"] * law["p"] * parameters ** -law["p"]
    return float((law["b"] * law["q"] / gain) ** (1 / law["q"]) / parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--refit", action="store_true")
    arguments = parser.parse_args()
    keeps = arguments.more or arguments.refit
    recorded = json.loads(TARGET.read_text(encoding="utf-8")) if keeps else {}
    known = recorded.get("runs", [])
    jobs = []
    for number, size in enumerate(() if arguments.refit else SIZES):
        config = ModelConfig(n_layer=size.n_layer, n_head=size.n_head, n_embd=size.n_embd)
        parameters = count_parameters(config, 65)
        shape = (size.n_layer, size.n_embd)
        done = [run["characters"] for run in known if (run["n_layer"], run["n_embd"]) == shape]
        for characters in CHARACTERS:
            work = parameters * characters
            if work <= MAX_WORK and all(abs(c / characters - 1) > LENGTH_TOLERANCE for c in done):
                jobs.append((work, number, characters))
    jobs.sort(reverse=True)  # longest first, so that the workers end at about the same time
    with tempfile.TemporaryDirectory() as folder:
        content = arguments.text.read_text(encoding="utf-8")
        training = Path(folder, "training-split.txt")
        training.write_text(content[: int(0.9 * len(content))], encoding="utf-8")
        train_tokens = len(load_corpus(TextConfig(path=str(training))).split("train"))
        tasks = [job[1:] for job in jobs]
        results = train_all(training, tasks, arguments.workers, arguments.device)
    runs = sorted(known + results, key=lambda run: (run["parameters"], run["characters"]))
    law = fit(runs, train_tokens)
    record = {**provenance(), "train_characters": train_tokens, "law": law, "runs": runs}
    if arguments.refit:  # the facts of the runs stay
        record = {**recorded, "refitted": provenance(), "law": law}
    write_record(record, TARGET)


if __name__ == "__main__":
    main()
