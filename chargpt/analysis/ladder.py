"""The ladder from a bigram to a GPT: what each component of a transformer gains.

Each trained rung reads the same batches for the same number of steps and differs from the rung
below in one component, the last in two; only the bigram, another kind of model, has its own
optimizer. Beside the rungs are n-gram baselines, and general compressors that have seen the
training text.
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
from typing import Any

import numpy as np

from chargpt.analysis.compare import (
    MAX_TOKENS,
    Comparison,
    Estimate,
    Group,
    RunSession,
    Training,
    model_config,
    paired_gain,
    show_nothing,
    with_seeds,
)
from chargpt.config import Config
from chargpt.errors import ConfigError
from chargpt.inference.evaluation import Baselines
from chargpt.models.ngram import NGRAM_ORDER, NGramLM
from chargpt.text.corpus import Corpus, Split
from chargpt.text.tokenizer import Tokens

ORDERS = (3, 4, NGRAM_ORDER, 8)  # of the n-gram baselines
MAX_PRIMED = 20_000_000  # characters given to compressors, from the end of the training split


@dataclass(frozen=True)
class Rung:
    """A model of the ladder."""

    name: str  # as it is printed
    adds: str  # the component that this rung adds, in words
    # settings of this rung; empty for the bigram, which has a config of its own
    values: Mapping[str, object]


@dataclass(frozen=True)
class RungResult(Group):
    """A trained rung."""

    rung: Rung
    sample: str
    gain: Estimate | None  # mean reduction of the loss over the rung below; None of the lowest


@dataclass
class Ladder:
    """Results of `run_ladder`; losses in nats per character of the split."""

    title: str  # name of the text
    ngrams: dict[str, float] = field(default_factory=dict)  # baselines by name
    compressor_losses: dict[str, float] = field(default_factory=dict)  # compressors by name
    results: list[RungResult] = field(default_factory=list)  # lowest rung first
    characters: int = 0  # of the split that are scored
    split: Split = "val"
    origin: str = ""  # " of NAME" if the split has files of its own

    @property
    def attention_gain(self) -> Estimate:
        """Gain of one scaled head over the trained bigram."""
        by_name = {result.model: result for result in self.results}
        return paired_gain(by_name["bigram (trained)"].nats, by_name["one head, scaled"].nats)

    @property
    def total_gain(self) -> Estimate:
        """Gain of the highest rung over the lowest."""
        return paired_gain(self.results[0].nats, self.results[-1].nats)

    @property
    def baseline_rows(self) -> list[dict[str, Any]]:
        """The n-grams and compressors as rows for `--json`."""
        kinds = {"n-gram": self.ngrams, "compressed": self.compressor_losses}
        return [
            loss_row(name, kind, nats)
            for kind, losses in kinds.items()
            for name, nats in losses.items()
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the results for `--json`."""
        trained = [
            loss_row(
                result.model,
                "trained",
                result.loss.value,
                std=result.std,
                margin=result.loss.margin,
                nats_by_seed=result.nats,
                gain=vars(result.gain) if result.gain else None,
                parameters=result.rows[0].parameters,
                seconds=round(result.seconds or 0.0, 3),
                adds=result.rung.adds,
                sample=result.sample,
            )
            for result in self.results
        ]
        return {
            "text": self.title,
            "characters": self.characters,
            "split": self.split,
            "rows": [*self.baseline_rows, *trained],
            "attention_gain": vars(self.attention_gain),
            "total_gain": vars(self.total_gain),
        }


def loss_row(model: str, kind: str, nats: float, **more: object) -> dict[str, Any]:
    """Return a row for `--json`."""
    loss = {"nats_per_char": nats, "bits_per_char": nats / math.log(2)}
    loss["perplexity"] = math.exp(nats)
    return {"model": model, "kind": kind, **loss, **more}


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


def ladder_trainings(config: Config, n_seeds: int) -> list[Training]:
    """Return the runs of every rung up to a GPT with this config, with every seed.

    Raises:
        ConfigError: the settings are not those of such a GPT.
    """
    found = []
    for number, rung in enumerate(ladder_rungs(config), 1):
        base = config if rung.values else model_config(config, "bigram")
        found += with_seeds(rung.name, str(number), base.with_values(rung.values), n_seeds)
    return found


def run_ladder(
    config: Config,
    folder: Path,
    corpus: Corpus,
    n_seeds: int,
    run_session: RunSession,
    *,
    split: Split = "val",
    resume: bool = False,
) -> Ladder:
    """Train every rung with every seed and evaluate all under `blocks`.

    Args:
        config: of the highest rung; the others share its text, batches and steps.
        folder: of the runs; each rung and seed gets a folder.
        corpus: the text.
        n_seeds: number of seeds, from the config's own on.
        run_session: called with a name and a session; runs all its steps.
        split: of which the first MAX_TOKENS are scored, `val` or `test`.
        resume: continue the runs that are there, and do not train what is done.

    Raises:
        ChargptError: the text, a setting or the folder is unusable.
    """
    rungs, trainings = ladder_rungs(config), ladder_trainings(config, n_seeds)
    span = config.model.block_size
    comparison = Comparison.of_split(corpus, split, span, MAX_TOKENS, show_nothing)
    corpus.require_blocks(span)
    baselines, tokens = Baselines(corpus), corpus.split(split)[: MAX_TOKENS + 1]
    ladder = Ladder(
        corpus.name, ngram_losses(corpus, baselines, tokens), compressed_losses(corpus, tokens)
    )
    comparison.train(trainings, folder, corpus, baselines, tokens, run_session, resume=resume)
    groups, below = comparison.groups, None
    for rung in rungs:
        group = groups[rung.name]
        gain = paired_gain(below.nats, group.nats) if below else None
        sample = comparison.samples[rung.name]
        ladder.results.append(RungResult(group.rows, rung, sample, gain))
        below = group
    ladder.split, ladder.origin = split, comparison.origin
    ladder.characters = comparison.evaluations[rung.name].characters
    return ladder


def ngram_losses(corpus: Corpus, baselines: Baselines, tokens: Tokens) -> dict[str, float]:
    """Return the losses of the n-gram baselines, each character with all of its context."""
    losses = baselines.losses(tokens)
    for order in ORDERS:
        if order != NGRAM_ORDER:
            losses[f"{order}-gram"] = ngram_loss(corpus, order, tokens)
    names = ("unigram", "bigram", *(f"{order}-gram" for order in ORDERS))
    return {"uniform": losses["uniform"]} | {f"{name} (counts)": losses[name] for name in names}


def ngram_loss(corpus: Corpus, order: int, tokens: Tokens) -> float:
    """Return the loss of an n-gram model of the given order in nats per character."""
    model = NGramLM.fit(corpus.split("train"), corpus.tokenizer.vocab_size, 1, order)
    losses = model.losses(tokens[None])
    n_characters = corpus.tokenizer.count_characters(tokens[1:])
    return float(losses.sum(dtype=np.float64)) / n_characters


def compressed_losses(corpus: Corpus, tokens: Tokens) -> dict[str, float]:
    """Return size(training text + that of tokens) - size(training text) in nats per character."""
    decode = corpus.tokenizer.decode
    train = decode(corpus.split("train")[-MAX_PRIMED:]).encode()
    text = decode(tokens)
    both = train + text.encode()
    return {
        name: 8 * math.log(2) * (size_of(both) - size_of(train)) / len(text)
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
