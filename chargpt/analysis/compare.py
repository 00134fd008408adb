"""Bigram against attention: models on one text, one split, one budget; or runs that exist."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chargpt.config import Config, load_config
from chargpt.errors import ConfigError
from chargpt.inference.baselines import NGRAM, baselines
from chargpt.inference.evaluation import Evaluation, evaluate_tokens
from chargpt.inference.sampling import sample
from chargpt.models.bigram import BigramLM
from chargpt.store.folder import RunFolder
from chargpt.store.metrics import validation_curve
from chargpt.store.run import Run, load_run
from chargpt.text.corpus import Corpus, load_corpus
from chargpt.training.trainer import Trainer

MODELS = ("bigram", "gpt")
ALPHA = 0.1  # counts added in the closed-form bigram, as in `baselines`
MAX_CHARACTERS = 300_000
DENSE_VOCABULARY = 4096  # beyond it the closed-form table is not built; its loss is the same
SAMPLE = {"length": 300, "temperature": 0.8, "seed": 1337, "num_samples": 1}


@dataclass(frozen=True)
class Row:
    """One model's line of the table. None where a figure does not apply."""

    model: str
    nats_per_char: float
    parameters: int | None = None
    seconds: float | None = None
    steps: int | None = None
    run: str | None = None
    evaluation: Evaluation | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the row under the JSON keys that every command uses."""
        base = {
            "nats_per_char": self.nats_per_char,
            "bits_per_char": self.nats_per_char / math.log(2),
            "perplexity": math.exp(self.nats_per_char),
        }
        return {
            **(self.evaluation.as_dict() if self.evaluation else base),
            "model": self.model,
            "parameters": self.parameters,
            "seconds": self.seconds,
            "steps": self.steps,
            "run": self.run,
        }


@dataclass
class Comparison:
    """What `compare` found: rows, validation curves, and a sample of each trained model."""

    title: str
    rows: list[Row] = field(default_factory=list)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)
    lines: dict[str, float] = field(default_factory=dict)

    def add_run(self, name: str, run: Run, evaluation: Evaluation) -> None:
        """Take in a finished run under a name."""
        self.rows.append(
            Row(
                name,
                evaluation.nats_per_char,
                run.model.parameter_count(),
                run.state.seconds,
                run.step,
                str(run.folder),
                evaluation,
            )
        )
        self.curves[name] = validation_curve(RunFolder(run.folder).metrics.records())
        self.samples[name] = sample(run, run.config.sample.model_copy(update=SAMPLE))[0]


def exhaust(trainer: Trainer) -> None:
    """Train to the end without a word."""
    for _ in trainer.steps():
        pass


def contender(settings: Config, model: str) -> Config:
    """Return the settings for one model: same text, steps and batch, its own update and targets.

    Raises:
        ConfigError: there is no such model.
    """
    if model not in MODELS:
        raise ConfigError(f"there is no model {model!r} to compare; there are {', '.join(MODELS)}")
    if model == settings.model.kind:
        return settings
    own = load_config(model)
    sections = ("optim", "schedule")
    values = {name: getattr(own, name).model_dump() for name in sections}
    return settings.with_values(
        {"model.kind": model, "train.ngram_target_weight": own.train.ngram_target_weight, **values}
    )


def compare(
    settings: Config,
    folder: Path,
    *,
    models: Sequence[str] = MODELS,
    watch: Callable[[str, Trainer], None] = lambda _, trainer: exhaust(trainer),
    corpus: Corpus | None = None,
) -> Comparison:
    """Train each model on the same text, split and budget, and measure all on the `full` protocol.

    Args:
        settings: the GPT's settings; the others share its text, steps and batch.
        folder: where each model's run goes, under its name.
        watch: called with a model's name and trainer; runs the trainer's steps to their end.
        corpus: the prepared text, if it is at hand.

    Raises:
        ChargptError: the text, a setting or the folder will not do.
    """
    corpus = corpus or load_corpus(settings.text)
    levels = baselines(corpus)
    comparison = Comparison(corpus.name, lines=levels)
    vocab = corpus.tokenizer.vocab_size
    comparison.rows += [
        Row("uniform", levels["uniform"], 0),
        Row("unigram (counted)", levels["unigram"], vocab),
        counted_bigram(corpus, settings, levels["bigram"]),
        Row(f"{NGRAM} (counted)", levels[NGRAM]),
    ]
    for name in models:
        wanted = contender(settings, name)
        run = RunFolder(folder / name)
        trainer = Trainer(wanted, corpus, folder=run)
        run.create(trainer.config, corpus.tokenizer, force=False)
        watch(name, trainer)
        best = load_run(run.path, "best", trainer.config.device)
        val = corpus.split("val")
        evaluation = evaluate_tokens(best.model, val, max_characters=MAX_CHARACTERS)
        comparison.add_run(f"{name} (trained)", best, evaluation)
    return comparison


def counted_bigram(corpus: Corpus, settings: Config, nats: float) -> Row:
    """Return the row of the bigram fitted in closed form from counts."""
    vocab = corpus.tokenizer.vocab_size
    start = time.perf_counter()
    evaluation = None
    if vocab <= DENSE_VOCABULARY:
        model = BigramLM.from_counts(
            corpus.pair_counts("train"), settings.model.block_size, alpha=ALPHA
        )
        evaluation = evaluate_tokens(model, corpus.split("val"), max_characters=MAX_CHARACTERS)
        nats = evaluation.nats_per_char
    seconds = round(time.perf_counter() - start, 3)
    return Row("bigram (counted)", nats, vocab * vocab, seconds, evaluation=evaluation)


def compare_runs(paths: Sequence[Path], device: str = "auto") -> Comparison:
    """Measure runs that exist, each on the validation part of its own text.

    Raises:
        ChargptError: a folder is not a run, or its text is not to be had.
    """
    comparison = Comparison("")
    corpora = {}
    for path in paths:
        run = load_run(path, "best", device)
        corpus = run.corpus()
        corpora[corpus.key] = corpus
        evaluation = evaluate_tokens(run.model, corpus.split("val"), max_characters=MAX_CHARACTERS)
        name = path.name if path.name not in comparison.curves else str(path)
        comparison.add_run(name, run, evaluation)
    comparison.title = ", ".join(sorted({corpus.name for corpus in corpora.values()}))
    if len(corpora) == 1:
        comparison.lines = baselines(corpora.popitem()[1])
    return comparison
