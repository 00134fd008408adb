"""The ladder from a bigram to a GPT: what each component of a transformer gains.

Each trained rung reads the same batches for the same number of steps and differs from the rung
below in one component, the last in two; only the bigram, another kind of model, has its own
optimizer. Beside the rungs are n-gram baselines, and general compressors that have seen the
training text.
"""

import bz2
import gzip
import itertools
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

from chargpt.analysis.compare import MAX_TOKENS, SAMPLE, RunSession, model_config, train_run
from chargpt.config import Config
from chargpt.errors import ConfigError
from chargpt.inference.evaluation import Baselines, evaluate_tokens
from chargpt.inference.generation import sample
from chargpt.models.ngram import NGRAM_ORDER, NGramLM
from chargpt.store.folder import RunFolder
from chargpt.text.corpus import Corpus

ORDERS = (3, 4, NGRAM_ORDER, 8)  # of the n-gram baselines
MAX_PRIMED = 20_000_000  # characters given to compressors, from the end of the training split
# 97.5% quantiles of Student's t, by degrees of freedom from 1 on (Gosset 1908)
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Rung:
    """A model of the ladder."""

    name: str  # as it is printed
    adds: str  # the component that this rung adds, in words
    # settings of this rung; empty for the bigram, which has a config of its own
    values: Mapping[str, object]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds. `margin` is half its 95% confidence interval; None for one seed."""

    value: float
    margin: float | None

    @classmethod
    def from_values(cls, values: list[float]) -> "Estimate":
        """Return the mean with its 95% confidence interval (Student's t)."""
        if len(values) == 1:
            return cls(values[0], None)
        standard_error = stdev(values) / math.sqrt(len(values))
        return cls(mean(values), T_QUANTILES[len(values) - 2] * standard_error)

    def __str__(self) -> str:
        return f"{self.value:.4f}" + (f" ± {self.margin:.4f}" if self.margin is not None else "")


@dataclass(frozen=True)
class RungResult:
    """A trained rung."""

    rung: Rung
    nats: list[float]  # validation losses, one per seed
    parameters: int
    seconds: float  # mean training time
    sample: str
    gain: Estimate | None  # mean reduction of the loss over the rung below; None of the lowest

    @property
    def loss(self) -> Estimate:
        """Mean loss."""
        return Estimate.from_values(self.nats)


def paired_gain(reference: list[float], nats: list[float]) -> Estimate:
    """Return the mean of `reference - nats`, paired by seed, with its 95% confidence interval."""
    return Estimate.from_values([a - b for a, b in zip(reference, nats, strict=True)])


@dataclass
class Ladder:
    """Results of `run_ladder`; losses in nats per character of the validation split."""

    title: str  # name of the text
    ngrams: dict[str, float] = field(default_factory=dict)  # baselines by name
    compressor_losses: dict[str, float] = field(default_factory=dict)  # compressors by name
    results: list[RungResult] = field(default_factory=list)  # lowest rung first
    characters: int = 0  # of the validation split that are scored

    @property
    def attention_gain(self) -> Estimate:
        """Gain of one scaled head over the trained bigram."""
        by_name = {result.rung.name: result for result in self.results}
        return paired_gain(by_name["bigram (trained)"].nats, by_name["one head, scaled"].nats)

    @property
    def total_gain(self) -> Estimate:
        """Gain of the highest rung over the lowest."""
        return paired_gain(self.results[0].nats, self.results[-1].nats)

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
                nats_by_seed=result.nats,
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
            "characters": self.characters,
            "rows": [
                *(row(name, "n-gram", nats) for name, nats in self.ngrams.items()),
                *(row(name, "compressed", nats) for name, nats in self.compressor_losses.items()),
                *trained,
            ],
            "attention_gain": vars(self.attention_gain),
            "total_gain": vars(self.total_gain),
        }


def ladder_rungs(config: Config) -> tuple[Rung, ...]:
    """Return the rungs up to a GPT with this config.

    Raises:
        ConfigError: the settings are not those of a GPT with all components, and several heads
            and layers.
    """
    model = config.model
    has_all = model.attention == "full" and model.scale_attn_weights and model.qk_norm
    is_large = model.n_layer > 1 and model.n_head > 1
    if model.kind != "gpt" or model.mlp == "none" or not (has_all and is_large):
        raise ConfigError(
            "the ladder needs a gpt with all components, several layers and several heads; set "
            "model.n_layer and model.n_head to 2 or more, and leave model.kind, model.mlp, "
            "model.attention, model.scale_attn_weights and model.qk_norm at their defaults"
        )
    average = {
        "model.n_layer": 1,
        "model.n_head": 1,
        "model.attention": "average",
        "model.scale_attn_weights": False,
        "model.qk_norm": False,
        "model.mlp": "none",
    }
    rungs = [
        Rung("bigram (trained)", "a table of next-character logits", {}),
        Rung("causal average", "the mean of the current and past positions", average),
    ]
    for name, adds, key, value in (
        ("one head, unscaled", "causal self-attention", "attention", "full"),
        ("one head, scaled", "scores divided by sqrt(head size)", "scale_attn_weights", True),
        ("multi-head", f"{model.n_head} attention heads", "n_head", model.n_head),
        ("+ MLP", f"an MLP ({model.mlp}) after attention", "mlp", model.mlp),
        ("+ depth", f"{model.n_layer} layers", "n_layer", model.n_layer),
        ("+ QK-norm (gpt)", "QK-norm and previous-token initialisation", "qk_norm", True),
    ):
        rungs.append(Rung(name, adds, {**rungs[-1].values, f"model.{key}": value}))
    return tuple(rungs)


def run_ladder(
    config: Config, folder: Path, corpus: Corpus, n_seeds: int, run_session: RunSession
) -> Ladder:
    """Train every rung with every seed and evaluate all under `blocks`.

    Args:
        config: of the highest rung; the others share its text, batches and steps.
        folder: of the runs; each rung and seed gets a folder.
        corpus: the text.
        n_seeds: number of seeds, from the config's own on.
        run_session: called with a name and a session; runs all its steps.

    Raises:
        ChargptError: the text, a setting or the folder is unusable.
    """
    rungs, seeds = ladder_rungs(config), range(config.seed, config.seed + n_seeds)
    corpus.require_blocks(config.model.block_size)
    for number, seed in itertools.product(range(1, len(rungs) + 1), seeds):
        RunFolder(folder / f"{number}-{seed}").require_unused()
    baselines = Baselines(corpus)
    ladder = Ladder(corpus.name, ngram_losses(corpus, baselines), compressed_losses(corpus))
    for number, rung in enumerate(rungs, 1):
        nats, seconds = [], []
        for seed in seeds:
            base = config if rung.values else model_config(config, "bigram")
            rung_config = base.with_values({**rung.values, "seed": seed})
            path = folder / f"{number}-{seed}"
            name = f"{number} of {len(rungs)}: {rung.name}, seed {seed}"
            run = train_run(path, rung_config, corpus, baselines, name, run_session)
            evaluation = evaluate_tokens(run.model, corpus.split("val")[: MAX_TOKENS + 1])
            nats.append(evaluation.nats_per_char)
            seconds.append(float(run.state.seconds))
            if seed == config.seed:
                text = sample(run, run.config.sample.model_copy(update=SAMPLE))[0]
        parameters, ladder.characters = run.model.num_parameters(), evaluation.characters
        gain = paired_gain(ladder.results[-1].nats, nats) if ladder.results else None
        ladder.results.append(RungResult(rung, nats, parameters, mean(seconds), text, gain))
    return ladder


def ngram_losses(corpus: Corpus, baselines: Baselines) -> dict[str, float]:
    """Return the losses of the n-gram baselines, each character with all of its context."""
    losses = baselines.losses(corpus.split("val")[: MAX_TOKENS + 1])
    for order in ORDERS:
        if order != NGRAM_ORDER:
            losses[f"{order}-gram"] = ngram_loss(corpus, order)
    names = ("unigram", "bigram", *(f"{order}-gram" for order in ORDERS))
    return {"uniform": losses["uniform"]} | {f"{name} (counts)": losses[name] for name in names}


def ngram_loss(corpus: Corpus, order: int) -> float:
    """Return the loss of an n-gram model of the given order in nats per character."""
    model = NGramLM.fit(corpus.split("train"), corpus.tokenizer.vocab_size, 1, order)
    losses = model.losses(corpus.split("val")[None, : MAX_TOKENS + 1])
    n_characters = corpus.tokenizer.count_characters(corpus.split("val")[1 : MAX_TOKENS + 1])
    return float(losses.sum(dtype=np.float64)) / n_characters


def compressed_losses(corpus: Corpus) -> dict[str, float]:
    """Return size(training + validation text) - size(training text) in nats per character."""
    decode = corpus.tokenizer.decode
    train = decode(corpus.split("train")[-MAX_PRIMED:]).encode()
    val = corpus.split("val")[: MAX_TOKENS + 1]
    val_text = decode(val)
    both = train + val_text.encode()
    return {
        name: 8 * math.log(2) * (size_of(both) - size_of(train)) / len(val_text)
        for name, size_of in compressors().items()
    }


def compressors() -> dict[str, Callable[[bytes], int]]:
    """Return functions from a text to its compressed size in bytes, by compressor."""
    sizes: dict[str, Callable[[bytes], int]] = {
        "gzip -9": lambda text: len(gzip.compress(text, 9)),
        "bzip2 -9": lambda text: len(bz2.compress(text, 9)),
        "xz -9": lambda text: len(lzma.compress(text, preset=9)),
    }
    zstd = shutil.which("zstd")
    if zstd is not None:
        command = [zstd, "-19", "--long=27", "-c", "-q"]
        sizes["zstd -19"] = lambda text: len(
            subprocess.run(command, input=text, capture_output=True, check=True).stdout
        )
    return sizes
