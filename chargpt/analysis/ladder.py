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
from collections.abc import Callable
from typing import Any

import numpy as np

from chargpt.analysis.compare import (
    MAX_TOKENS,
    SPLIT_WORDS,
    Comparison,
    Estimate,
    Group,
    Row,
    Training,
    model_config,
)
from chargpt.config import Config
from chargpt.errors import ConfigError
from chargpt.inference.evaluation import BaselineLoss, Baselines, loss_values
from chargpt.models.ngram import NGRAM_ORDER, NGramLM
from chargpt.text.corpus import Corpus
from chargpt.text.tokenizer import Tokens

ORDERS = (3, 4, NGRAM_ORDER, 8)  # of the n-gram baselines
BIGRAM, ONE_HEAD, GPT = "bigram (trained)", "one head, scaled", "+ QK-norm (gpt)"  # rungs
MAX_PRIMED = 20_000_000  # characters given to compressors, from the end of the training split


class Ladder(Comparison):
    """A comparison of the rungs, n-gram baselines of several orders and compressors.

    The first MAX_TOKENS of the split are scored: compressors read a text from its start.
    """

    name = "ladder"
    has_mixtures = False
    n_first = MAX_TOKENS + 1

    @property
    def gains(self) -> dict[str, Estimate]:
        """Mean reduction of the loss over the rung below, by rung but the lowest."""
        rungs = [group for group in self.groups.values() if group.is_run]
        pairs = itertools.pairwise(rungs)
        return {rung.model: rung.paired_gain_over(below) for below, rung in pairs}

    def gain_over_bigram(self, name: str) -> Estimate:
        """Return by how much the loss of a rung is lower than that of the lowest."""
        groups = self.groups
        return groups[name].paired_gain_over(groups[BIGRAM])

    @staticmethod
    def kind_of(group: Group) -> str:
        """Return whether a row is `trained`, an `n-gram` or `compressed`."""
        if group.is_run:
            return "trained"
        return "compressed" if group.model in compressors() else "n-gram"

    def add_baselines(self, corpus: Corpus, baselines: Baselines, tokens: Tokens) -> None:
        """Add the n-grams and the compressors as rows, and say what was scored."""
        self.characters = corpus.tokenizer.count_characters(tokens[1:])
        words = f"{SPLIT_WORDS[self.split]} characters{corpus.origin(self.split)}"
        self.scored_on = f"the first {self.characters:,} {words}, protocol blocks"
        losses = ngram_losses(corpus, baselines, tokens) | compressed_losses(corpus, tokens)
        no_blocks = np.empty((2, 0))
        self.rows += [Row(name, BaselineLoss(nats, no_blocks)) for name, nats in losses.items()]

    def as_dict(self) -> dict[str, Any]:
        """Return the results for `--json`."""
        rows, adds, gains = [], {each.model: each.adds for each in self.trainings}, self.gains
        for name, group in self.groups.items():
            row = {"model": name, "kind": self.kind_of(group), **loss_values(group.loss.value)}
            if group.is_run:
                row |= group.as_dict() | {
                    "nats_by_seed": group.nats,
                    "gain": vars(gains[name]) if name in gains else None,
                    "parameters": group.rows[0].parameters,
                    "seconds": round(group.seconds or 0.0, 3),
                    "adds": adds[name],
                    "sample": self.samples[name],
                }
            rows.append(row)
        return {
            "text": self.title,
            "characters": self.characters,
            "split": self.split,
            "rows": rows,
            "attention_gain": vars(self.gain_over_bigram(ONE_HEAD)),
            "total_gain": vars(self.gain_over_bigram(GPT)),
        }


def ladder_rungs(config: Config) -> list[Training]:
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
    components = (  # name, what it adds, its setting, without and with it
        ("one head, unscaled", "causal self-attention", "attention", "average", "full"),
        (ONE_HEAD, "scores divided by sqrt(head size)", "scale_attn_weights", False, True),
        ("multi-head", f"{model.n_head} attention heads", "n_head", 1, model.n_head),
        ("+ MLP", f"an MLP ({model.mlp}) after attention", "mlp", "none", model.mlp),
        ("+ depth", f"{model.n_layer} layers", "n_layer", 1, model.n_layer),
        (GPT, "QK-norm and previous-token initialisation", "qk_norm", False, True),
    )
    own = config.with_values({f"model.{key}": without for _, _, key, without, _ in components})
    table, mean = "a table of next-character logits", "the mean of the current and past positions"
    rungs = [
        Training(BIGRAM, "1", model_config(config, "bigram"), table),
        Training("causal average", "2", own, mean),
    ]
    for number, (name, adds, key, _, value) in enumerate(components, 3):
        own = own.with_values({f"model.{key}": value})
        rungs.append(Training(name, str(number), own, adds))
    return rungs


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
