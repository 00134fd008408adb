"""The ladder from a bigram to a GPT: what each component of a transformer gains.

Each trained rung reads the same batches for the same number of steps and differs from the rung
below in one component; only the bigram, another kind of model, has its own optimizer. Beside the
rungs are n-gram baselines, and general compressors that have seen the training text.
"""

import bz2
import gzip
import lzma
import math
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from chargpt.analysis.compare import SAMPLE, RunTrainer, model_settings, train_run
from chargpt.config import Config
from chargpt.errors import ConfigError
from chargpt.inference.baselines import baselines, fit_ngram
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.inference.sampling import sample
from chargpt.models.ngram import NGramLM
from chargpt.store.folder import RunFolder
from chargpt.text.corpus import Corpus

ORDERS = (3, 4, 6, 8)  # of the n-gram baselines
SCORED = 300_000  # first characters of the validation split, which everything is scored on
MAX_KNOWN = 20_000_000  # last characters of the training split that compressors are given
# Student's t for a two-sided 95% interval, by degrees of freedom from 1 on (Gosset 1908)
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Rung:
    """A model of the ladder.

    Attributes:
        name: of the component that it adds to the rung below.
        adds: what that component is.
        values: its settings, beside those of the whole ladder.
    """

    name: str
    adds: str
    values: Mapping[str, object]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds. `margin` is half its 95% confidence interval; None for one seed."""

    value: float
    margin: float | None

    @classmethod
    def from_values(cls, values: list[float]) -> "Estimate":
        """Return the mean with Student's t interval."""
        if len(values) == 1:
            return cls(values[0], None)
        return cls(mean(values), T_95[len(values) - 2] * stdev(values) / math.sqrt(len(values)))

    def __str__(self) -> str:
        return f"{self.value:.4f}" + (f" ± {self.margin:.4f}" if self.margin is not None else "")


@dataclass(frozen=True)
class RungResult:
    """A trained rung.

    Attributes:
        rung: what was trained.
        nats: validation losses, one a seed.
        parameters: of the model.
        seconds: mean training time.
        sample: generated text.
        below: losses of the rung below, seed by seed; None of the lowest.
    """

    rung: Rung
    nats: list[float]
    parameters: int
    seconds: float
    sample: str
    below: list[float] | None

    @property
    def loss(self) -> Estimate:
        """Mean loss."""
        return Estimate.from_values(self.nats)

    @property
    def gain(self) -> Estimate | None:
        """Mean reduction of the loss over the rung below; None of the lowest."""
        return None if self.below is None else gain_over(self.below, self.nats)


def gain_over(others: list[float], nats: list[float]) -> Estimate:
    """Return the mean reduction from the first losses to the second, paired by seed."""
    return Estimate.from_values([other - own for other, own in zip(others, nats, strict=True)])


@dataclass
class Ladder:
    """Results of `run_ladder`, in nats per character of the first `SCORED` of the validation split.

    Attributes:
        title: name of the text.
        ngrams: n-gram baselines by name.
        compressed: compressors by name.
        results: trained rungs, lowest first.
    """

    title: str
    ngrams: dict[str, float] = field(default_factory=dict)
    compressed: dict[str, float] = field(default_factory=dict)
    results: list[RungResult] = field(default_factory=list)

    @property
    def attention_gain(self) -> Estimate:
        """Gain of one scaled head over the trained bigram."""
        by_name = {result.rung.name: result for result in self.results}
        return gain_over(by_name["bigram (trained)"].nats, by_name["one head, scaled"].nats)

    @property
    def whole_gain(self) -> Estimate:
        """Gain of the highest rung over the lowest."""
        return gain_over(self.results[0].nats, self.results[-1].nats)

    def as_dict(self) -> dict[str, Any]:
        """Return the results for `--json`."""

        def row(model: str, kind: str, nats: float, **more: object) -> dict[str, object]:
            loss = {"nats_per_char": nats, "bits_per_char": nats / math.log(2)}
            return {"model": model, "kind": kind, **loss, **more}

        trained = [
            row(
                result.rung.name,
                "trained",
                result.loss.value,
                margin=result.loss.margin,
                seeds=result.nats,
                gain=vars(result.gain) if result.gain else None,
                parameters=result.parameters,
                seconds=round(result.seconds, 3),
                adds=result.rung.adds,
                sample=result.sample,
            )
            for result in self.results
        ]
        return {
            "text": self.title,
            "rows": [
                *(row(name, "n-gram", nats) for name, nats in self.ngrams.items()),
                *(row(name, "compressed", nats) for name, nats in self.compressed.items()),
                *trained,
            ],
            "attention_gain": vars(self.attention_gain),
            "whole_gain": vars(self.whole_gain),
        }


def rungs_of(settings: Config) -> tuple[Rung, ...]:
    """Return the rungs up to a GPT with these settings.

    Raises:
        ConfigError: the settings are not those of a GPT with several heads and layers.
    """
    model = settings.model
    if model.kind != "gpt" or model.n_head < 2 or model.n_layer < 2 or model.mlp == "none":
        raise ConfigError(
            "the ladder leads up to a gpt of several layers and heads with an mlp; "
            "set model.n_layer and model.n_head to 2 or more"
        )
    head = {
        "model.n_layer": 1,
        "model.n_head": 1,
        "model.attention": "full",
        "model.scaled": False,
        "model.qk_norm": False,
        "model.mlp": "none",
    }
    average = {**head, "model.attention": "average"}
    scaled = {**head, "model.scaled": True}
    heads = {**scaled, "model.n_head": model.n_head}
    mlp = {**heads, "model.mlp": model.mlp}
    deep = {**mlp, "model.n_layer": model.n_layer}
    whole = {**deep, "model.qk_norm": True}
    return (
        Rung("bigram (trained)", "the previous character", {}),
        Rung("average of the past", "the average of all earlier positions", average),
        Rung("one head, unscaled", "attention by content and position", head),
        Rung("one head, scaled", "scores divided by sqrt(head size)", scaled),
        Rung("several heads", f"{model.n_head} heads instead of one", heads),
        Rung("+ MLP", "an MLP after attention", mlp),
        Rung("+ depth", f"{model.n_layer} layers", deep),
        Rung("+ QK-norm (gpt)", "QK-norm and previous-token initialisation", whole),
    )


def run_ladder(
    settings: Config, folder: Path, corpus: Corpus, n_seeds: int, run_trainer: RunTrainer
) -> Ladder:
    """Train every rung with every seed and evaluate all under `full`.

    Args:
        settings: of the highest rung; the others share its text, batches and steps.
        folder: of the runs; each rung and seed gets a folder.
        corpus: the text.
        n_seeds: number of seeds, from the settings' own on.
        run_trainer: called with a name and a trainer; runs all its steps.

    Raises:
        ChargptError: the text, a setting or the folder is unusable.
    """
    assert 1 <= n_seeds <= len(T_95) + 1
    rungs, seeds = rungs_of(settings), range(settings.seed, settings.seed + n_seeds)
    corpus.require_blocks(settings.model.block_size)
    for number in range(1, len(rungs) + 1):
        for seed in seeds:
            RunFolder.require_free(folder / f"{number}-{seed}")
    ngram = fit_ngram(corpus)
    ladder = Ladder(corpus.name, ngram_losses(corpus, ngram), compressed_losses(corpus))
    below: list[float] | None = None
    for number, rung in enumerate(rungs, 1):
        nats, seconds = [], []
        for seed in seeds:
            base = settings if rung.values else model_settings(settings, "bigram")
            config = base.with_values({**rung.values, "seed": seed})
            path, name = folder / f"{number}-{seed}", f"{rung.name}, seed {seed}"
            run = train_run(config, path, corpus, name, run_trainer, ngram)
            evaluation = evaluate_tokens(run.model, corpus.split("val")[: SCORED + 1])
            nats.append(evaluation.nats_per_char)
            seconds.append(float(run.state.seconds))
            if seed == settings.seed:
                text = sample(run, run.config.sample.model_copy(update=SAMPLE))[0]
        parameters = run.model.parameter_count()
        ladder.results.append(RungResult(rung, nats, parameters, mean(seconds), text, below))
        below = nats
    return ladder


def ngram_losses(corpus: Corpus, ngram: NGramLM) -> dict[str, float]:
    """Return the losses of the n-gram baselines, each character with all of its context.

    Args:
        corpus: the text.
        ngram: what `fit_ngram` returned.
    """
    losses = baselines(corpus, characters=SCORED, ngram=ngram)
    named = {"uniform": losses["uniform"]}
    named |= {f"{name} (counts)": losses[name] for name in ("unigram", "bigram")}
    return named | {f"{order}-gram (counts)": ngram_loss(corpus, order) for order in ORDERS}


def ngram_loss(corpus: Corpus, order: int) -> float:
    """Return the loss of an n-gram of one order."""
    model = NGramLM.fit(corpus.split("train"), corpus.tokenizer.vocab_size, 1, order)
    losses = model.losses(corpus.split("val")[None, : SCORED + 1])
    return float(losses.mean(dtype=np.float64))


def compressed_losses(corpus: Corpus) -> dict[str, float]:
    """Return by how much the validation text lengthens each compressor's training text, as nats."""
    decode = corpus.tokenizer.decode
    known = decode(corpus.split("train")[-MAX_KNOWN:]).encode()
    val = corpus.split("val")[: SCORED + 1]
    both = known + decode(val).encode()
    return {
        name: 8 * math.log(2) * (size_of(both) - size_of(known)) / len(val)
        for name, size_of in compressors().items()
    }


def compressors() -> dict[str, Callable[[bytes], int]]:
    """Return functions from a text to its compressed size in bytes, by compressor."""
    found: dict[str, Callable[[bytes], int]] = {
        "gzip -9": lambda text: len(gzip.compress(text, 9)),
        "bzip2 -9": lambda text: len(bz2.compress(text, 9)),
        "xz -9": lambda text: len(lzma.compress(text, preset=9)),
    }
    zstd = shutil.which("zstd")
    if zstd is not None:
        command = [zstd, "-19", "--long=27", "-c", "-q"]
        found["zstd -19"] = lambda text: len(
            subprocess.run(command, input=text, capture_output=True, check=True).stdout
        )
    return found
