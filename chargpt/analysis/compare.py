"""Comparison of baselines, a bigram and a GPT on one text, or of existing runs."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chargpt.analysis.result import MIXTURE_LABEL, MIXTURE_SUFFIX, describe_difference
from chargpt.config import Config, load_config
from chargpt.errors import ConfigError
from chargpt.inference.evaluation import (
    BaselineLoss,
    Baselines,
    Evaluation,
    OnProgress,
    evaluate_tokens,
)
from chargpt.inference.generation import sample
from chargpt.models.ngram import NGRAM
from chargpt.store.folder import RunFolder
from chargpt.store.metrics import validation_curve
from chargpt.store.mixture import find_mixture_run
from chargpt.store.run import Run, load_run
from chargpt.text import TextProgress
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import prepare
from chargpt.text.source import find_text
from chargpt.text.tokenizer import Tokens
from chargpt.training.api import new_request, run_steps
from chargpt.training.budget import plan_run, with_measured_threads
from chargpt.training.deadline import Pace
from chargpt.training.mixing import try_add_mixture
from chargpt.training.start import Session, output_folder, slug, start_run

MODELS = ("bigram", "gpt")
TRAINED = " (trained)"  # ends the name of a model that `compare` trains
MAX_TOKENS = 300_000  # scored
MAX_BIGRAM_GAP = 0.1  # nats
PLUS_MINUS = "±: twice the standard error of the difference"
SAMPLE = {"length": 300, "temperature": 0.8, "seed": 1337, "num_samples": 1}

RunSession = Callable[[str, Session], None]
# called with a unit and a label; its context yields a function of (done, total)
ShowProgress = Callable[[str, str], AbstractContextManager[OnProgress]]


def show_nothing(_unit: str, _label: str) -> AbstractContextManager[OnProgress]:
    """Show no progress."""
    return nullcontext(lambda *_: None)


@dataclass(frozen=True)
class Row:
    """A model's row of the table; None where a value does not apply."""

    model: str
    evaluation: Evaluation | BaselineLoss
    parameters: int | None = None
    seconds: float | None = None  # training time to the last step
    step: int | None = None  # of its checkpoint
    run: str | None = None

    @property
    def nats_per_char(self) -> float:
        """The loss."""
        return self.evaluation.nats_per_char

    def as_dict(self) -> dict[str, Any]:
        """Return the row under the JSON keys that all commands use."""
        nats = self.nats_per_char
        loss = {
            "nats_per_char": nats,
            "bits_per_char": nats / math.log(2),
            "perplexity": math.exp(nats),
        }
        if isinstance(self.evaluation, Evaluation):
            loss = self.evaluation.as_dict()
        facts = {name: value for name, value in vars(self).items() if name != "evaluation"}
        return loss | facts


@dataclass
class Comparison:
    """Rows, validation curves and samples of the compared models, and the baselines' losses.

    All rows score the same characters of the validation split, in spans of `span` if it is long; if
    the vocabularies differ, those at its start.
    """

    title: str
    val_characters: int  # of the validation split
    span: int
    max_tokens: int  # scored at most; tokens where bytes spell rare characters
    rows: list[Row] = field(default_factory=list)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)
    show_progress: ShowProgress = show_nothing
    baselines: Mapping[str, float] = field(default_factory=dict)
    curve_baselines: Mapping[str, float] = field(default_factory=dict)  # on the curves' characters
    val_origin: str = ""  # " of NAME" if the validation split has files of its own

    @property
    def scored_on(self) -> str:
        """What the losses were measured on."""
        scored = max(each.characters for each in self.evaluations.values())
        val = f"{self.val_characters:,} validation characters{self.val_origin}"
        return f"{scored:,} of {val}, protocol blocks"

    @property
    def evaluations(self) -> dict[str, Evaluation]:
        """The evaluations of the runs and their mixtures, by model."""
        found = ((row.model, row.evaluation) for row in self.rows)
        return {name: each for name, each in found if isinstance(each, Evaluation)}

    def add_baselines(self, baselines: Baselines, val: Tokens, curve_tokens: int) -> None:
        """Score the baselines on the validation split, and on what training scored of it."""
        found = baselines.evaluate(val, max_tokens=self.max_tokens, span=self.span)
        self.baselines = {name: each.nats_per_char for name, each in found.items()}
        self.curve_baselines = baselines.losses(val, max_tokens=curve_tokens, span=self.span)
        vocab_size = baselines.ngram.vocab_size
        parameters = {"uniform": 0, "unigram": vocab_size, "bigram": vocab_size**2}
        for name, each in found.items():
            label = name if name == "uniform" else f"{name} (counts)"
            self.rows.append(Row(label, each, parameters.get(name)))

    def add_run(self, name: str, run: Run, val: Tokens, mixture_run: Run | None) -> None:
        """Evaluate a trained run on the validation split and add it under a name.

        `mixture_run`, the run with its mixture as its model, is another row.
        """
        records = RunFolder(run.folder).metrics.records()
        seconds = max([run.state.seconds, *(each.get("seconds", 0) for each in records)])
        models = {name: run.model}
        if mixture_run is not None:
            models[name.removesuffix(TRAINED) + MIXTURE_SUFFIX] = mixture_run.model
        for label, model in models.items():
            with self.show_progress("character", f"scored, {label}") as on_progress:
                evaluation = evaluate_tokens(
                    model,
                    val,
                    max_tokens=self.max_tokens,
                    span=self.span,
                    on_progress=on_progress,
                )
            parameters = model.num_parameters() if model is run.model else None
            row = Row(label, evaluation, parameters, seconds, run.step, str(run.folder))
            self.rows.append(row)
        self.curves[name] = validation_curve(records)
        self.samples[name] = sample(run, run.config.sample.model_copy(update=SAMPLE))[0]


def conclusions(result: Comparison) -> list[str]:
    """Return sentences on what differs between the models, and by how much the best is better."""
    evaluations, by_loss = result.evaluations, sorted(result.rows, key=lambda r: r.nats_per_char)
    trained = [row for row in result.rows if row.step and row.parameters is not None]
    steps = {row.model.removesuffix(TRAINED): row.step for row in trained}
    blocks = {row.model.removesuffix(TRAINED): evaluations[row.model].block_size for row in trained}
    sentences = [
        f"the {what} differ: {', '.join(f'{name} {n:,}' for name, n in values.items())} ({note})"
        for what, values, note in (
            ("numbers of steps", steps, "to the best checkpoint"),
            ("block sizes", blocks, "a larger one sees more context"),
        )
        if len(set(values.values())) > 1
    ]
    if (note := undertrained({row.model: row.nats_per_char for row in result.rows})) is not None:
        sentences.append(note)
    if (gpt := evaluations.get(f"gpt{TRAINED}")) is not None:
        bigram, ngram = (
            next(row.evaluation for row in by_loss if row.model.startswith(start))
            for start in ("bigram", NGRAM)
        )
        over_bigram = describe_difference(gpt, "the best bigram", bigram)
        over_ngram = describe_difference(gpt, f"the {NGRAM}", ngram)
        sentences.append(f"the gpt is {over_bigram} and {over_ngram}")
        if (mixture := evaluations.get(MIXTURE_LABEL)) is not None:
            gain = describe_difference(mixture, "the gpt", gpt)
            sentences.append(f"{MIXTURE_LABEL}, which chargpt sample --mixture uses, is {gain}")
        return [*sentences, PLUS_MINUS]
    alone = [row for row in by_loss if row.parameters is not None and row.run]
    if len(alone) < 2:
        return sentences
    best_of_run = {row.run: row for row in reversed(by_loss) if row.run}  # or its mixture
    with_mixtures = sorted(best_of_run.values(), key=lambda row: row.nats_per_char)
    groups = {"runs": alone}
    if with_mixtures != alone:
        groups = {"models alone": alone, "runs and their mixtures": with_mixtures}
    for name, (first, second, *_) in groups.items():
        difference = describe_difference(evaluations[first.model], second.model, second.evaluation)
        sentences.append(f"{first.model} has the lowest loss of the {name}; it is {difference}")
    return [*sentences, PLUS_MINUS]


def undertrained(losses: Mapping[str, float]) -> str | None:
    """Return a sentence if a trained bigram is much worse than that of counts, losses by name."""
    trained, counts = losses.get(f"bigram{TRAINED}"), losses["bigram (counts)"]
    if trained is None or trained <= counts + MAX_BIGRAM_GAP:
        return None
    return (
        f"the trained bigram, {trained:.3f}, is still far from that of counts, {counts:.3f}: "
        "train more steps, or compare with the latter"
    )


def model_config(config: Config, kind: str) -> Config:
    """Return the config of one model: the given text, steps and batch, its own optimizer.

    Raises:
        ConfigError: there is no such model.
    """
    if kind not in MODELS:
        raise ConfigError(f"there is no model {kind!r} to compare; there are {', '.join(MODELS)}")
    if kind == config.model.kind:
        return config
    own = load_config(kind)
    values = {name: getattr(own, name).model_dump() for name in ("optim", "schedule")}
    weight = {"train.ngram_target_weight": own.train.ngram_target_weight}
    return config.with_values({"model.kind": kind, **weight, **values})


def train_run(
    path: Path,
    config: Config,
    corpus: Corpus,
    baselines: Baselines,
    name: str,
    run_session: RunSession,
    budget: Pace | None = None,
) -> Run:
    """Train a new run and return its best checkpoint; arguments are those of `start_run`."""
    with RunFolder(path).locked(is_new=True) as folder:
        session = start_run(folder, config, corpus, baselines, pace=budget)
        run_session(name, session)
    return load_run(path, "best", session.trainer.config.device)


def compare(
    path: str | Path | Sequence[Run | str | Path] | None = None,
    *,
    text: str | None = None,
    config: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
    budget: str | float | None = None,
    out: str | Path | None = None,
    device: str | None = None,
    encoding: str | None = None,
    models: Sequence[str] = MODELS,
    progress: bool = False,
) -> Comparison:
    """Train baselines, a bigram and a GPT on a text and compare them, or compare existing runs.

    All are evaluated on the same characters of the validation split, under the protocol `blocks`.

    Args:
        path: as for `train`; or a list of runs or their folders, of one text, to which `device`
            applies, and nothing else.
        text, config, settings, device, encoding: as for `train`; the config is that of the GPT, and
            the other models share its text, steps and batch.
        budget: total time, in seconds or as in "3m", that the GPT's size and all models' steps fit.
        out: folder of the runs; each gets a folder with its model's name. By default a new one
            under runs/.
        models: to train, of `bigram` and `gpt`.
        progress: show a progress bar of each training on stderr.

    Raises:
        ChargptError: a text, setting, folder or run is unusable, or the runs are of several texts.
        KeyboardInterrupt: training was interrupted.
    """
    given = (text, config, settings, budget, out, encoding)
    if isinstance(path, Sequence) and not isinstance(path, str):
        if not path:
            raise ConfigError("there is no run to compare; name one or more")
        if any(each is not None for each in given):
            raise ConfigError("existing runs are compared as they are; give only them and device=")
        folders = [each.folder if isinstance(each, Run) else Path(each) for each in path]
        return compare_runs(folders, device or "auto")
    request = new_request(path, text, config, settings, budget, out, device, encoding)
    chosen, fixed_keys = request.resolved
    deadline, pace, max_tokens = None, None, MAX_TOKENS
    if budget is not None:
        deadline, fixed_keys = request.deadline()
    for name in models:
        model_config(chosen, name)
        if request.out is not None and (request.out / name).exists():
            raise ConfigError(f"{request.out / name} exists; name another folder with --out")
    chosen = with_measured_threads(chosen)
    name = f"compare-{slug(find_text(chosen.text, text).name)}"
    with (
        output_folder(request.out, name) as folder,
        shared_text(chosen, folder, text=text) as corpus,
    ):
        if deadline is not None:
            chosen, corpus, pace = plan_run(chosen, corpus, deadline, fixed_keys)
            max_tokens = chosen.train.evaluation_tokens
        return compare_models(
            chosen,
            folder,
            models=models,
            run_session=lambda _, session: run_steps(session, progress),
            corpus=corpus,
            budget=pace,
            max_tokens=max_tokens,
        )


def compare_models(
    config: Config,
    folder: str | Path,
    *,
    models: Sequence[str] = MODELS,
    run_session: RunSession,
    corpus: Corpus | None = None,
    budget: Pace | None = None,
    max_tokens: int = MAX_TOKENS,
    show_progress: ShowProgress = show_nothing,
) -> Comparison:
    """Train each model on the same text, split and steps, and evaluate all under `blocks`.

    Args:
        config: of the GPT; the other models share its text, steps and batch.
        folder: of the runs; each gets a folder with its model's name.
        models: of `MODELS`.
        run_session: called with a model's name and session; runs all its steps.
        corpus: the text, if it is prepared.
        budget: planned for the GPT, which is fitted to it.
        max_tokens: scored of the validation split.
        show_progress: of the evaluations.

    Raises:
        ChargptError: the text, a setting or the folder is unusable.
    """
    text = nullcontext(corpus) if corpus else shared_text(config, Path(folder))
    with text as corpus:
        baselines, val = Baselines(corpus), corpus.split("val")
        n_val = corpus.count_characters("val")
        span = config.model.block_size
        comparison = Comparison(corpus.name, n_val, span, max_tokens, show_progress=show_progress)
        comparison.val_origin = corpus.origin("val")
        comparison.add_baselines(baselines, val, config.train.evaluation_tokens)
        for kind in models:
            own_config = model_config(config, kind)
            own_budget = budget if own_config is config else None
            path = Path(folder, kind)
            run = train_run(path, own_config, corpus, baselines, kind, run_session, own_budget)
            mixture_run = try_add_mixture(run, corpus)
            comparison.add_run(f"{kind}{TRAINED}", run, val, mixture_run)
    return comparison


@contextmanager
def shared_text(
    config: Config,
    folder: Path,
    on_progress: TextProgress | None = None,
    text: str | None = None,
) -> Iterator[Corpus]:
    """Prepare a text that several runs in a folder share.

    The runs get links to its files, which are deleted at the end.
    """
    source = find_text(config.text, text)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".text-", dir=folder) as temporary:
        yield prepare(source, config.text, Path(temporary), on_progress)


def compare_runs(
    paths: Sequence[Path], device: str = "auto", show_progress: ShowProgress = show_nothing
) -> Comparison:
    """Evaluate existing runs on the validation split that they share.

    If their vocabularies differ, they score its first MAX_TOKENS.

    Raises:
        ConfigError: the runs have different texts or validation splits.
        ChargptError: a folder is not a run, or its text is not available.
    """
    runs = [load_run(path, "best", device) for path in paths]
    corpora = [run.corpus() for run in runs]
    splits = [corpus.tokenizer.decode(corpus.split("val")) for corpus in corpora]
    name = corpora[0].name
    for path, run, split, corpus in zip(paths, runs, splits, corpora, strict=True):
        if split != splits[0]:
            keys = [k for k in run.config.differing_keys(runs[0].config) if k.startswith("text.")]
            raise ConfigError(
                f"{path} ({corpus.name}) has another validation split than {paths[0]} ({name}), so "
                f"their losses cannot be compared (other settings: {', '.join(keys) or 'none'}); "
                "name runs of one text, or measure each with `chargpt evaluate RUN --text FILE`"
            )
    vals, span = [corpus.split("val") for corpus in corpora], max(r.model.block_size for r in runs)
    n_val = corpora[0].count_characters("val")
    max_tokens = MAX_TOKENS
    if any(corpus.tokenizer != corpora[0].tokenizer for corpus in corpora):
        # spans of tokens would begin at other characters: score the start of the split instead
        start = splits[0][: MAX_TOKENS + 1]
        vals = [corpus.tokenizer.encode(start, unknown="replace") for corpus in corpora]
        max_tokens = max(map(len, vals))
    comparison = Comparison(name, n_val, span, max_tokens, show_progress=show_progress)
    comparison.val_origin = corpora[0].origin("val")
    curve_tokens = max(run.config.train.evaluation_tokens for run in runs)
    comparison.add_baselines(Baselines(corpora[0]), vals[0], curve_tokens)
    for path, run, val in zip(paths, runs, vals, strict=True):
        name = path.resolve().name
        comparison.add_run(
            name if name not in comparison.curves else str(path), run, val, find_mixture_run(run)
        )
    return comparison
