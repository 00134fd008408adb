"""Comparison of models trained on one text with one budget, or of existing runs."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chargpt.config import Config, load_config
from chargpt.errors import ConfigError
from chargpt.inference.baselines import BIGRAM_ALPHA, NGRAM, baselines, fit_ngram
from chargpt.inference.evaluation import Evaluation, evaluate_tokens
from chargpt.inference.sampling import sample
from chargpt.models.bigram import BigramLM
from chargpt.store.folder import RunFolder
from chargpt.store.metrics import validation_curve
from chargpt.store.run import Run, load_run
from chargpt.text.corpus import Corpus, load_corpus
from chargpt.training.trainer import Trainer

MODELS = ("bigram", "gpt")
MAX_CHARACTERS = 300_000  # scored of the validation split
MAX_DENSE_VOCAB = 4096  # above it the V x V table of the bigram is not built; its loss is the same
SAMPLE = {"length": 300, "temperature": 0.8, "seed": 1337, "num_samples": 1}

RunTrainer = Callable[[str, Trainer], None]


@dataclass(frozen=True)
class Row:
    """One model's row of the table; None where a column does not apply."""

    model: str
    nats_per_char: float
    parameters: int | None = None
    seconds: float | None = None
    steps: int | None = None
    run: str | None = None
    evaluation: Evaluation | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the row for `--json`."""
        losses = {
            "nats_per_char": self.nats_per_char,
            "bits_per_char": self.nats_per_char / math.log(2),
            "perplexity": math.exp(self.nats_per_char),
        }
        return {
            **(self.evaluation.as_dict() if self.evaluation else losses),
            "model": self.model,
            "parameters": self.parameters,
            "seconds": self.seconds,
            "steps": self.steps,
            "run": self.run,
        }


@dataclass
class Comparison:
    """Result of `compare`.

    Attributes:
        title: name of the text.
        rows: baselines and models.
        curves: (step, validation loss) of each trained model.
        samples: a generated text of each trained model.
        baselines: losses of the baselines in nats per character.
    """

    title: str
    rows: list[Row] = field(default_factory=list)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)
    baselines: dict[str, float] = field(default_factory=dict)

    def add_run(self, name: str, run: Run, corpus: Corpus) -> None:
        """Evaluate a finished run on a corpus's validation split and add it under a name."""
        val = corpus.split("val")
        evaluation = evaluate_tokens(run.model, val, max_characters=MAX_CHARACTERS)
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


def run_silently(_: str, trainer: Trainer) -> None:
    """Run a trainer's steps without output."""
    for _report in trainer.steps():
        pass


def model_settings(settings: Config, model: str) -> Config:
    """Return settings for another model: the same text, steps and batches, its own optimizer.

    Raises:
        ConfigError: the model is unknown.
    """
    if model not in MODELS:
        raise ConfigError(f"unknown model {model!r}; use {', '.join(MODELS)}")
    if model == settings.model.kind:
        return settings
    own = load_config(model)
    values = {name: getattr(own, name).model_dump() for name in ("optim", "schedule")}
    return settings.with_values(
        {"model.kind": model, "train.ngram_target_weight": own.train.ngram_target_weight, **values}
    )


def compare(
    settings: Config,
    folder: Path,
    *,
    models: Sequence[str] = MODELS,
    run_trainer: RunTrainer = run_silently,
    corpus: Corpus | None = None,
) -> Comparison:
    """Train each model on the same text, split and budget; evaluate all with protocol `full`.

    Args:
        settings: of the GPT; the other models share its text, steps and batches.
        folder: parent of the run folders, which are named after the models.
        models: names of the models to train.
        run_trainer: called with a model's name and trainer; runs all of its steps.
        corpus: what `load_corpus(settings.text)` returned; loaded here by default.

    Raises:
        ChargptError: the text, a setting or the folder is not usable.
    """
    corpus = corpus or load_corpus(settings.text)
    ngram = fit_ngram(corpus)
    nats = baselines(corpus, ngram=ngram)
    comparison = Comparison(corpus.name, baselines=nats)
    comparison.rows += [
        Row("uniform", nats["uniform"], 0),
        Row("unigram (counts)", nats["unigram"], corpus.tokenizer.vocab_size),
        bigram_row(corpus, settings.model.block_size, nats["bigram"]),
        Row(f"{NGRAM} (counts)", nats[NGRAM]),
    ]
    for name in models:
        run = RunFolder(folder / name)
        trainer = Trainer(model_settings(settings, name), corpus, folder=run, ngram=ngram)
        run.create(trainer.config, corpus.tokenizer, force=False)
        run_trainer(name, trainer)
        best = load_run(run.path, "best", trainer.config.device)
        comparison.add_run(f"{name} (trained)", best, corpus)
    return comparison


def bigram_row(corpus: Corpus, block_size: int, nats: float) -> Row:
    """Return the row of the bigram estimated from counts."""
    vocab_size = corpus.tokenizer.vocab_size
    start = time.perf_counter()
    evaluation = None
    if vocab_size <= MAX_DENSE_VOCAB:
        model = BigramLM.from_counts(corpus.pair_counts("train"), block_size, alpha=BIGRAM_ALPHA)
        evaluation = evaluate_tokens(model, corpus.split("val"), max_characters=MAX_CHARACTERS)
        nats = evaluation.nats_per_char
    seconds = round(time.perf_counter() - start, 3)
    return Row("bigram (counts)", nats, vocab_size**2, seconds, evaluation=evaluation)


def compare_runs(paths: Sequence[Path], device: str = "auto") -> Comparison:
    """Evaluate existing runs, each on the validation split of its own text.

    Raises:
        ChargptError: a folder is not a run, or its text is missing.
    """
    comparison = Comparison("")
    corpora = {}
    for path in paths:
        run = load_run(path, "best", device)
        corpus = run.corpus()
        corpora[corpus.key] = corpus
        name = path.name if path.name not in comparison.curves else str(path)
        comparison.add_run(name, run, corpus)
    comparison.title = ", ".join(sorted({corpus.name for corpus in corpora.values()}))
    if len(corpora) == 1:
        comparison.baselines = baselines(corpora.popitem()[1])
    return comparison
