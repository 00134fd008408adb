"""From a bigram to a GPT, one idea at a time: what does each part add?

Every trained rung reads the same batches of the same text for the same number of steps, and differs
from the rung below it in the one thing that it is named after; only the bigram, another kind of
model, has its own optimizer. Beside them stand what counting reaches and what general compressors
make of the same characters once they have seen the training text.
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

from chargpt.analysis.compare import SAMPLE, contender
from chargpt.config import Config
from chargpt.errors import ConfigError
from chargpt.inference.baselines import baselines
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.inference.sampling import sample
from chargpt.models.ngram import NGramLM
from chargpt.store.folder import RunFolder
from chargpt.store.run import Run, load_run
from chargpt.text.corpus import Corpus
from chargpt.training.trainer import Trainer

ORDERS = (3, 4, 6, 8)  # of the n-grams that are counted
SCORED = 300_000  # characters of the validation part, from its start, that everything is scored on
KNOWN = 20_000_000  # characters of the training text, at its end, that compressors are given
# Student's t for a two-sided 95% interval, by degrees of freedom from 1 on (Gosset 1908)
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Watch = Callable[[str, Trainer], None]


@dataclass(frozen=True)
class Rung:
    """A model of the ladder.

    Attributes:
        name: what it has that the rung below has not.
        adds: the same as a sentence's end: "the rung adds ...".
        values: its settings, beside those of the whole ladder.
    """

    name: str
    adds: str
    values: Mapping[str, object]


@dataclass(frozen=True)
class Estimate:
    """A figure from several seeds. `margin` is half its 95% interval; None of a single one."""

    value: float
    margin: float | None

    @classmethod
    def of(cls, values: list[float]) -> "Estimate":
        """Return the mean, and Student's interval around it."""
        if len(values) == 1:
            return cls(values[0], None)
        return cls(mean(values), T_95[len(values) - 2] * stdev(values) / math.sqrt(len(values)))

    def __str__(self) -> str:
        return f"{self.value:.4f}" + (f" ± {self.margin:.4f}" if self.margin is not None else "")


@dataclass(frozen=True)
class Step:
    """A trained rung: its losses in nats per character, one a seed, and what it writes."""

    rung: Rung
    nats: list[float]
    parameters: int
    seconds: float
    sample: str
    below: list[float] | None  # the losses of the rung below, seed by seed

    @property
    def loss(self) -> Estimate:
        """The mean loss."""
        return Estimate.of(self.nats)

    @property
    def gain(self) -> Estimate | None:
        """How much lower it is than the rung below, on the same batches; None of the lowest."""
        return None if self.below is None else gain_over(self.below, self.nats)


def gain_over(others: list[float], nats: list[float]) -> Estimate:
    """Return how much lower the second losses are than the first, seed by seed."""
    return Estimate.of([other - own for other, own in zip(others, nats, strict=True)])


@dataclass
class Ladder:
    """What `climb` found. Losses are nats per character of the validation part's SCORED first."""

    title: str
    counted: dict[str, float] = field(default_factory=dict)
    compressed: dict[str, float] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    @property
    def attention_gain(self) -> Estimate:
        """What one scaled head gains over the trained bigram, on the same batches."""
        by_name = {step.rung.name: step for step in self.steps}
        return gain_over(by_name["bigram (trained)"].nats, by_name["one head, scaled"].nats)

    @property
    def whole_gain(self) -> Estimate:
        """What the topmost rung gains over the lowest."""
        return gain_over(self.steps[0].nats, self.steps[-1].nats)

    def as_dict(self) -> dict[str, Any]:
        """Return it for `--json`."""

        def row(model: str, kind: str, nats: float, **more: object) -> dict[str, object]:
            bits = nats / math.log(2)
            return {
                "model": model,
                "kind": kind,
                "nats_per_char": nats,
                "bits_per_char": bits,
                **more,
            }

        return {
            "text": self.title,
            "rows": [
                *(row(name, "counted", nats) for name, nats in self.counted.items()),
                *(row(name, "compressed", nats) for name, nats in self.compressed.items()),
                *(
                    row(
                        step.rung.name,
                        "trained",
                        step.loss.value,
                        margin=step.loss.margin,
                        seeds=step.nats,
                        gain=vars(step.gain) if step.gain else None,
                        parameters=step.parameters,
                        seconds=round(step.seconds, 3),
                        adds=step.rung.adds,
                        sample=step.sample,
                    )
                    for step in self.steps
                ),
            ],
            "attention_gain": vars(self.attention_gain),
            "whole_gain": vars(self.whole_gain),
        }


def rungs_of(settings: Config) -> tuple[Rung, ...]:
    """Return the rungs that lead up to a GPT of these settings.

    Raises:
        ConfigError: the settings are not a GPT's with several heads and layers.
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
    thinking = {**heads, "model.mlp": model.mlp}
    deep = {**thinking, "model.n_layer": model.n_layer}
    whole = {**deep, "model.qk_norm": True}
    return (
        Rung("bigram (trained)", "which character follows which", {}),
        Rung("average of the past", "the plain mean of all before", average),
        Rung("one head, unscaled", "a choice, by content and place, of what to look at", head),
        Rung("one head, scaled", "scores divided by sqrt(head size)", scaled),
        Rung("several heads", f"{model.n_head} choices at a time in place of one", heads),
        Rung("+ MLP", "thinking about what was found", thinking),
        Rung("+ depth", f"{model.n_layer} layers, each looking at what the last one made", deep),
        Rung("+ QK-norm (gpt)", "even scores, and heads that start out looking back", whole),
    )


def climb(settings: Config, folder: Path, corpus: Corpus, seeds: int, watch: Watch) -> Ladder:
    """Train every rung with every seed, and measure all on the `full` protocol.

    Args:
        settings: of the topmost rung; all others share its text, batches and steps.
        folder: where the runs go, one folder for each rung and seed.
        corpus: the prepared text.
        seeds: how many; the first is the settings' own.
        watch: called with a name and a trainer; runs the trainer's steps to their end.

    Raises:
        ChargptError: the text, a setting or the folder will not do.
    """
    assert 1 <= seeds <= len(T_95) + 1
    rungs = rungs_of(settings)
    corpus.require_blocks(settings.model.block_size)
    for number in range(1, len(rungs) + 1):
        for seed in range(settings.seed, settings.seed + seeds):
            RunFolder.require_free(folder / f"{number}-{seed}")
    levels = baselines(corpus, characters=SCORED)
    ladder = Ladder(corpus.name, {"uniform": levels["uniform"]})
    for name in ("unigram", "bigram"):
        ladder.counted[f"{name} (counted)"] = levels[name]
    for order in ORDERS:
        ladder.counted[f"{order}-gram (counted)"] = counted_nats(corpus, order)
    ladder.compressed = compressed_nats(corpus)
    below: list[float] | None = None
    for number, rung in enumerate(rungs, 1):
        nats, seconds = [], []
        for seed in range(settings.seed, settings.seed + seeds):
            path = folder / f"{number}-{seed}"
            run = train_rung(settings, rung, path, corpus, seed, watch)
            found = evaluate_tokens(run.model, corpus.split("val")[: SCORED + 1])
            nats.append(found.nats_per_char)
            seconds.append(run.state.seconds)
            if seed == settings.seed:
                words = sample(run, run.config.sample.model_copy(update=SAMPLE))[0]
        size = run.model.parameter_count()
        ladder.steps.append(Step(rung, nats, size, mean(seconds), words, below))
        below = nats
    return ladder


def train_rung(
    settings: Config, rung: Rung, path: Path, corpus: Corpus, seed: int, watch: Watch
) -> Run:
    """Train one rung from one seed and return the run."""
    own = settings if rung.values else contender(settings, "bigram")
    wanted = own.with_values({**rung.values, "seed": seed})
    folder = RunFolder(path)
    trainer = Trainer(wanted, corpus, folder=folder)
    folder.create(trainer.config, corpus.tokenizer, force=False)
    watch(f"{rung.name}, seed {seed}", trainer)
    return load_run(path, "best", trainer.config.device)


def counted_nats(corpus: Corpus, order: int) -> float:
    """Return what an n-gram of that order reaches, each character with all of its context."""
    model = NGramLM.fit(corpus.split("train"), corpus.tokenizer.vocab_size, 1, order)
    losses = model.losses(corpus.split("val")[None, : SCORED + 1])
    return float(losses.mean(dtype=np.float64))


def compressed_nats(corpus: Corpus) -> dict[str, float]:
    """Return what compressors add to the training text's size for the validation text."""
    decode = corpus.tokenizer.decode
    known = decode(corpus.split("train")[-KNOWN:]).encode()
    val = corpus.split("val")[: SCORED + 1]
    both = known + decode(val).encode()
    return {
        name: 8 * math.log(2) * (pack(both) - pack(known)) / len(val)
        for name, pack in compressors().items()
    }


def compressors() -> dict[str, Callable[[bytes], int]]:
    """Return what gives the size of a text under each compressor that is here."""
    found: dict[str, Callable[[bytes], int]] = {
        "gzip -9": lambda text: len(gzip.compress(text, 9)),
        "bzip2 -9": lambda text: len(bz2.compress(text, 9)),
        "xz -9": lambda text: len(lzma.compress(text, preset=9)),
    }
    zstd = shutil.which("zstd")
    if zstd is not None:
        words = [zstd, "-19", "--long=27", "-c", "-q"]
        found["zstd -19"] = lambda text: len(
            subprocess.run(words, input=text, capture_output=True, check=True).stdout
        )
    return found
