"""Fit the scaling law with which `chargpt train --budget` chooses a model's size.

    python scripts/fit_scaling_law.py TEXT ... [--workers 2] [--device cpu] [--more | --refit]

Trains the sizes of `chargpt.training.planner.SIZES` on several numbers of characters of each TEXT's
training split, up to MAX_WORK, evaluates each on a held-out tail of that split (the validation
split is never read), or on VAL of a text that is written TEXT,VAL, fits

    loss = floor + scale * (a * parameters^-p + b * unique^-q)  (Hoffmann et al. 2022, eq. 2)

where `unique` are unique-token equivalents (`planner.unique_token_equivalents`), and writes runs
and coefficients to `chargpt/training/scaling_law.json`. Each text has its own floor and scale, that
of the first being 1: they do not change which size is best. Takes about an hour for each text on
two cores with bfloat16. With --more, the recorded runs are kept and only missing ones are trained;
with --refit, none.

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
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
RATIOS = np.geomspace(1e-3, 1e5, 801)  # of a to b
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

settings, size, characters = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = load_config("gpt").with_values(settings)
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
    jobs: Sequence[tuple[str, int, int]], settings: Mapping[str, dict[str, Any]], workers: int
) -> list[dict[str, Any]]:
    """Train every (text, size, characters), `workers` at a time, each on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pending, results = list(jobs), list[dict[str, Any]]()
    running = dict[subprocess.Popen[str], str]()
    while pending or running:
        while pending and len(running) < workers:
            text, *words = pending.pop(0)
            command = [sys.executable, "-c", TRAIN, json.dumps(settings[text]), *map(str, words)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            running[process] = text
        done = next((process for process in running if process.poll() is not None), None)
        if done is None:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            continue
        assert done.stdout is not None
        found = json.loads(done.stdout.read().splitlines()[-1])
        results.append({"text": running.pop(done), **found})
        print(results[-1], file=sys.stderr, flush=True)
    return results


def fit(
    runs: Sequence[Mapping[str, Any]], train_tokens: Mapping[str, int]
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the coefficients of the law, and of each text `train_characters`, floor and scale.

    Exponents, r, s and the ratio of a to b are found by grid search, the rest by least squares.
    """
    by_text = defaultdict[str, list[Mapping[str, Any]]](list)
    for run in runs:
        by_text[run["text"]].append(run)
    ratios, laws = RATIOS[:, None, None], list[dict[str, float]]()
    for r, s in product(R_VALUES, S_VALUES):
        law = {"r": float(r), "s": float(s)}
        squares = np.zeros(())  # of the errors, by ratio, p and q
        for text in train_tokens:
            x, y, losses = columns(by_text[text], train_tokens[text], law)
            x, y, losses = (each - each.mean(-1, keepdims=True) for each in (x, y, losses))
            xy = x @ y.T  # (p, q)
            slope_of = ratios * (x @ losses)[:, None] + y @ losses  # (ratios, p, q)
            size = ratios**2 * (x**2).sum(1)[:, None] + 2 * ratios * xy + (y**2).sum(1)
            squares = squares + np.where(slope_of > 0, losses @ losses - slope_of**2 / size, np.inf)
        errors = np.sqrt(squares / len(runs))
        for index in np.argwhere(errors <= TOLERANCE * errors.min()):
            ratio, p, q = RATIOS[index[0]], EXPONENTS[index[1]], EXPONENTS[index[2]]
            laws.append({**law, "p": p, "q": q, "a": ratio, "b": 1.0, "rms_error": errors[*index]})
    smallest = min(law["rms_error"] for law in laws)
    close = [law for law in laws if law["rms_error"] <= TOLERANCE * smallest]
    close.sort(key=lambda law: abs(np.log(optimal_ratio(law, LARGE) / PUBLISHED_RATIO)))
    return next(found for law in close if (found := with_floors(law, by_text, train_tokens)))


def columns(
    runs: Sequence[Mapping[str, Any]], train_tokens: int, law: Mapping[str, float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return parameters^-p and unique^-q by exponent and run, and the losses."""
    read = [(run["parameters"], run["characters"]) for run in runs]
    unique = np.array([unique_token_equivalents(n, c, train_tokens, law) for n, c in read])
    sizes, powers = np.array([n for n, _ in read], float), -EXPONENTS[:, None]
    return sizes**powers, unique**powers, np.array([run["nats_per_char"] for run in runs])


def with_floors(
    law: Mapping[str, float],
    by_text: Mapping[str, Sequence[Mapping[str, Any]]],
    train_tokens: Mapping[str, int],
) -> tuple[dict[str, float], dict[str, dict[str, float]]] | None:
    """Return the rounded law with the floor and scale of each text; None if one is negative."""
    texts = dict[str, dict[str, float]]()
    p, q = (int(np.abs(EXPONENTS - law[name]).argmin()) for name in "pq")
    for text in train_tokens:
        x, y, losses = columns(by_text[text], train_tokens[text], law)
        terms = law["a"] * x[p] + law["b"] * y[q]
        scale, floor = np.polyfit(terms, losses, 1)
        texts[text] = {"train_characters": train_tokens[text], "floor": floor, "scale": scale}
    first = next(iter(texts.values()))
    unit = first["scale"]
    for each in texts.values():
        each["floor"], each["scale"] = round(each["floor"], 5), round(each["scale"] / unit, 5)
    if min(each["floor"] for each in texts.values()) <= 0:
        return None
    scaled = {**law, "a": unit * law["a"], "b": unit * law["b"], "floor": first["floor"]}
    names = ("floor", "a", "p", "b", "q", "r", "s", "rms_error")
    return {name: round(float(scaled[name]), 5) for name in names}, texts


def optimal_ratio(law: Mapping[str, float], parameters: float) -> float:
    """Return the compute-optimal number of unique characters per parameter.

    At a fixed product of parameters N and characters D the loss is smallest where
    a p N^-p = b q D^-q (Hoffmann et al. 2022, eq. 4).
    """
    gain = law["a"] * law["p"] * parameters ** -law["p"]
    return float((law["b"] * law["q"] / gain) ** (1 / law["q"]) / parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", metavar="TEXT", nargs="*")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--refit", action="store_true")
    arguments = parser.parse_args()
    keeps = arguments.more or arguments.refit
    recorded = json.loads(TARGET.read_text(encoding="utf-8")) if keeps else {"texts": {}}
    known = recorded.get("runs", [])
    train_tokens = {text: each["train_characters"] for text, each in recorded["texts"].items()}
    jobs, settings = list[tuple[float, str, int, int]](), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for words in () if arguments.refit else arguments.texts:
            path, _, val_path = words.partition(",")
            text = Path(path).stem
            settings[text] = {"text.path": path, "device": arguments.device}
            if val_path:
                settings[text]["text.val_path"] = val_path
            else:
                content = Path(path).read_text(encoding="utf-8")
                path = settings[text]["text.path"] = str(Path(folder, f"{text}.txt"))
                Path(path).write_text(content[: int(0.9 * len(content))], encoding="utf-8")
            corpus = load_corpus(TextConfig(path=path, val_path=val_path or None))
            train_tokens[text] = len(corpus.split("train"))
            jobs += missing_jobs(text, corpus.tokenizer.vocab_size, known)
        jobs.sort(reverse=True)  # longest first, so that the workers end at about the same time
        results = train_all([job[1:] for job in jobs], settings, arguments.workers)
    runs = sorted(
        known + results, key=lambda run: (run["text"], run["parameters"], run["characters"])
    )
    law, texts = fit(runs, train_tokens)
    record = {**provenance(), "law": law, "texts": texts, "runs": runs}
    if arguments.refit:  # the facts of the runs stay
        record = {**recorded, "refitted": provenance(), "law": law, "texts": texts}
    write_record(record, TARGET)


def missing_jobs(
    text: str, vocab_size: int, known: Sequence[Mapping[str, Any]]
) -> list[tuple[float, str, int, int]]:
    """Return work, text, size and characters of the runs that are not known yet."""
    jobs = []
    for number, size in enumerate(SIZES):
        config = ModelConfig(n_layer=size.n_layer, n_head=size.n_embd // 64, n_embd=size.n_embd)
        shape = (text, size.n_layer, size.n_embd)
        done = [
            run["characters"]
            for run in known
            if (run["text"], run["n_layer"], run["n_embd"]) == shape
        ]
        for characters in CHARACTERS:
            work = float(count_parameters(config, vocab_size) * characters)
            if work <= MAX_WORK and all(abs(c / characters - 1) > LENGTH_TOLERANCE for c in done):
                jobs.append((work, text, number, characters))
    return jobs


if __name__ == "__main__":
    main()
