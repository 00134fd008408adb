"""Comparison of baselines, a bigram and a GPT on one text, or of existing runs."""

import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import Any

from chargpt.analysis.result import MIXTURE_LABEL, MIXTURE_SUFFIX, describe_gain, difference
from chargpt.config import Config, load_config
from chargpt.errors import ConfigError, FinishedError, TextError
from chargpt.files import exists
from chargpt.inference.evaluation import (
    BaselineLoss,
    Baselines,
    Evaluation,
    OnProgress,
    evaluate_tokens,
)
from chargpt.inference.generation import sample
from chargpt.models.ngram import NGRAM
from chargpt.store.folder import RunFolder, has_checkpoint
from chargpt.store.metrics import validation_curve
from chargpt.store.mixture import find_mixture_run
from chargpt.store.run import Run, load_run
from chargpt.text import TextProgress
from chargpt.text.corpus import Corpus, Split
from chargpt.text.prepare import prepare
from chargpt.text.source import find_text
from chargpt.text.tokenizer import Tokens
from chargpt.training.api import new_request, run_steps
from chargpt.training.budget import plan_run, with_measured_threads
from chargpt.training.deadline import Pace
from chargpt.training.mixing import try_add_mixture
from chargpt.training.resume import (
    RATES,
    changed_config,
    continue_run,
    continued_config,
    load_latest,
)
from chargpt.training.start import Request, Session, output_folder, slug, start_run

MODELS = ("bigram", "gpt")
TRAINED = " (trained)"  # ends the name of a model that `compare` trains
MAX_TOKENS = 300_000  # scored
MAX_BIGRAM_GAP = 0.1  # nats
PLUS_MINUS = "±: twice the standard error of the difference"
PLUS_MINUS_OF_SEEDS = (
    "±: half a 95% confidence interval (Student's t); differences are paired by seed"
)
# 97.5% quantiles of Student's t, by degrees of freedom from 1 on (Gosset 1908)
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
SPLIT_WORDS = {"val": "validation", "test": "test"}
SAMPLE = {"length": 300, "temperature": 0.8, "seed": 1337, "num_samples": 1}

RunSession = Callable[[str, Session], None]
# called with a unit and a label; its context yields a function of (done, total)
ShowProgress = Callable[[str, str], AbstractContextManager[OnProgress]]


def show_nothing(_unit: str, _label: str) -> AbstractContextManager[OnProgress]:
    """Show no progress."""
    return nullcontext(lambda *_: None)


@dataclass(frozen=True)
class Training:
    """A run that a comparison trains."""

    model: str  # its name in tables; runs that share one differ only in the seed
    folder: str  # name of the run's folder
    config: Config


@dataclass(frozen=True)
class Row:
    """A run of a model, or a baseline; None where a value does not apply."""

    model: str
    evaluation: Evaluation | BaselineLoss
    parameters: int | None = None
    seconds: float | None = None  # training time to the last step
    step: int | None = None  # of its checkpoint
    run: str | None = None
    seed: int | None = None

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


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds. `margin` is half its 95% confidence interval; None for one seed."""

    value: float
    margin: float | None

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "Estimate":
        """Return the mean with its 95% confidence interval (Student's t)."""
        if len(values) == 1:
            return cls(values[0], None)
        # of more than 10 values the interval is a little wider than it needs to be
        quantile = T_QUANTILES[min(len(values) - 1, len(T_QUANTILES)) - 1]
        return cls(mean(values), quantile * stdev(values) / math.sqrt(len(values)))

    def __str__(self) -> str:
        return f"{self.value:.4f}" + (f" ± {self.margin:.4f}" if self.margin is not None else "")


@dataclass(frozen=True)
class Group:
    """The rows of a model, one per seed, or that of a baseline."""

    rows: list[Row]

    @property
    def model(self) -> str:
        """Its name in tables."""
        return self.rows[0].model

    @property
    def is_run(self) -> bool:
        """Whether it is no baseline."""
        return self.rows[0].run is not None

    @property
    def nats(self) -> list[float]:
        """The losses."""
        return [row.nats_per_char for row in self.rows]

    @property
    def loss(self) -> Estimate:
        """Mean loss."""
        return Estimate.from_values(self.nats)

    @property
    def std(self) -> float | None:
        """Standard deviation of the losses over seeds (n - 1); None of one."""
        return stdev(self.nats) if len(self.rows) > 1 else None

    @property
    def seconds(self) -> float | None:
        """Mean training time; None of a baseline."""
        seconds = [row.seconds for row in self.rows if row.seconds is not None]
        return fmean(seconds) if seconds else None

    def gain_over(self, other: "Group") -> Estimate:
        """Return by how many nats the loss is lower than another's.

        The margin of one row against another is twice the standard error. Several are paired by
        seed, or each with the same baseline; if they have fewer than two seeds in common, there is
        no margin.
        """
        if len(self.rows) == len(other.rows) == 1:
            row, (reference,) = self.rows[0], other.rows
            assert isinstance(row.evaluation, Evaluation)
            return Estimate(*difference(row.evaluation, reference.evaluation))
        others = {row.seed: row.nats_per_char for row in other.rows}
        if others.keys() == {None}:  # a baseline
            others = dict.fromkeys((row.seed for row in self.rows), other.nats[0])
        paired = {row.seed: row.nats_per_char for row in self.rows if row.seed in others}
        if len(paired) < 2:
            return Estimate(other.loss.value - self.loss.value, None)
        return paired_gain([others[seed] for seed in paired], list(paired.values()))

    def describe_gain_over(self, other: "Group", name: str) -> str:
        """Return by how much the loss is lower than another's in words."""
        gain = self.gain_over(other)
        return describe_gain(gain.value, gain.margin, name)

    @property
    def margin_note(self) -> str:
        """What is after ± in its comparisons."""
        return PLUS_MINUS if len(self.rows) == 1 else PLUS_MINUS_OF_SEEDS

    def as_dict(self) -> dict[str, Any]:
        """Return mean, standard deviation and 95% interval for `--json`."""
        loss = self.loss
        return {
            "model": self.model,
            "seeds": [row.seed for row in self.rows],
            "nats_per_char": loss.value,
            "bits_per_char": loss.value / math.log(2),
            "std": self.std,
            "margin": loss.margin,
        }


def paired_gain(reference: Sequence[float], nats: Sequence[float]) -> Estimate:
    """Return the mean of `reference - nats`, paired by seed, with its 95% confidence interval."""
    return Estimate.from_values([a - b for a, b in zip(reference, nats, strict=True)])


@dataclass(repr=False)
class Comparison:
    """Rows, validation curves and samples of the compared models, and the baselines' losses.

    All rows score the same characters of a split, in spans of `span` if it is long; if the
    vocabularies differ, those at its start.
    """

    title: str
    split_characters: int  # of the split
    span: int
    max_tokens: int  # scored at most; tokens where bytes spell rare characters
    rows: list[Row] = field(default_factory=list)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)
    show_progress: ShowProgress = show_nothing
    baselines: Mapping[str, float] = field(default_factory=dict)
    curve_baselines: Mapping[str, float] = field(default_factory=dict)  # on the curves' characters
    origin: str = ""  # " of NAME" if the split has files of its own
    split: Split = "val"

    @classmethod
    def of_split(
        cls, corpus: Corpus, split: Split, span: int, max_tokens: int, show_progress: ShowProgress
    ) -> "Comparison":
        """Return a comparison without rows.

        Raises:
            TextError: the text has no such split.
        """
        if len(corpus.split(split)) < 2:
            raise TextError(
                f"{corpus.name} has no {split} split; train with --test FILE, or with "
                "-s text.test_fraction=0.1"
            )
        size, origin = corpus.count_characters(split), corpus.origin(split)
        found = cls(corpus.name, size, span, max_tokens, show_progress=show_progress)
        found.split, found.origin = split, origin
        return found

    def __repr__(self) -> str:
        losses = ", ".join(f"{row.model} {row.nats_per_char:.4f}" for row in self.rows)
        return f"Comparison({self.title!r}, nats/char: {losses})"

    def _repr_html_(self) -> str:
        """Return the table, the conclusions and the validation curves as HTML, for a notebook."""
        return str(import_module("chargpt.cli.notebook").comparison_html(self))

    @property
    def scored_on(self) -> str:
        """What the losses were measured on."""
        scored = max(each.characters for each in self.evaluations.values())
        split = f"{self.split_characters:,} {SPLIT_WORDS[self.split]} characters{self.origin}"
        return f"{scored:,} of {split}, protocol blocks"

    @property
    def groups(self) -> dict[str, Group]:
        """The rows by model."""
        groups: dict[str, Group] = {}
        for row in self.rows:
            groups.setdefault(row.model, Group([])).rows.append(row)
        return groups

    @property
    def evaluations(self) -> dict[str, Evaluation]:
        """The evaluations of the runs and their mixtures, by model."""
        found = ((row.model, row.evaluation) for row in self.rows)
        return {name: each for name, each in found if isinstance(each, Evaluation)}

    def add_baselines(
        self, baselines: Baselines, tokens: Tokens, val: Tokens, curve_tokens: int
    ) -> None:
        """Score the baselines on the tokens of the split, and on what training validated on."""
        found = baselines.evaluate(tokens, max_tokens=self.max_tokens, span=self.span)
        self.baselines = {name: each.nats_per_char for name, each in found.items()}
        self.curve_baselines = baselines.losses(val, max_tokens=curve_tokens, span=self.span)
        vocab_size = baselines.ngram.vocab_size
        parameters = {"uniform": 0, "unigram": vocab_size, "bigram": vocab_size**2}
        for name, each in found.items():
            label = name if name == "uniform" else f"{name} (counts)"
            self.rows.append(Row(label, each, parameters.get(name)))

    def add_run(
        self, name: str, curve: str, run: Run, tokens: Tokens, mixture_run: Run | None
    ) -> None:
        """Evaluate a trained run on the tokens of the split and add it under a name.

        `curve` is the name of its curve; `mixture_run`, the run with its mixture as its model, is
        another row.
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
                    tokens,
                    split=self.split,
                    max_tokens=self.max_tokens,
                    span=self.span,
                    on_progress=on_progress,
                )
            parameters = model.num_parameters() if model is run.model else None
            facts = (parameters, seconds, run.step, str(run.folder), run.config.seed)
            self.rows.append(Row(label, evaluation, *facts))
        self.curves[curve] = validation_curve(records)
        if name not in self.samples:
            self.samples[name] = sample(run, run.config.sample.model_copy(update=SAMPLE))[0]

    def train(
        self,
        trainings: Sequence[Training],
        folder: Path,
        corpus: Corpus,
        baselines: Baselines,
        tokens: Tokens,
        run_session: RunSession,
        *,
        pace: Pace | None = None,
        resume: bool = False,
    ) -> None:
        """Train the runs and evaluate each on the tokens of the split.

        Args:
            folder: of the folders of the runs.
            run_session: called with a name and a session; runs all its steps.
            pace: of the run whose config it has planned.
            resume: continue the runs that are there, and do not train what is done.
        """
        models = [training.model for training in trainings]
        shared: dict[str, object] = {}  # what the first run has measured: results depend on it
        for number, training in enumerate(trainings, 1):
            path, config, name = folder / training.folder, training.config, training.folder
            if len(trainings) > len(MODELS):
                seed = f", seed {config.seed}" if models.count(training.model) > 1 else ""
                name = f"{number} of {len(trainings)}: {training.model}{seed}"
            own_pace = pace if pace is not None and config == pace.config else None
            is_there = resume and has_checkpoint(path)
            with RunFolder(path).locked(is_new=not is_there) as place, suppress(FinishedError):
                if is_there:
                    session = resumed_session(place, config, corpus, baselines)
                else:
                    unset = {
                        k: v for k, v in shared.items() if getattr(config, k) in (None, "auto")
                    }
                    own = config.with_values(unset)
                    session = start_run(place, own, corpus, baselines, pace=own_pace)
                run_session(name, session)
            run = load_run(path, "best", config.device)
            shared = shared or {"dtype": run.config.dtype, "threads": run.config.threads}
            mixture_run = find_mixture_run(run) or try_add_mixture(run, corpus)
            is_alone = models.count(training.model) == 1
            curve = training.model if is_alone else training.folder
            self.add_run(training.model, curve, run, tokens, mixture_run)


def conclusions(result: Comparison) -> list[str]:
    """Return sentences on what differs between the models, and by how much the best is better."""
    groups = result.groups
    by_loss = sorted(groups.values(), key=lambda group: group.loss.value)
    # without mixtures, whose parameters are not counted
    alone = [group for group in by_loss if group.is_run and group.rows[0].parameters is not None]
    trained = {g.model.removesuffix(TRAINED): g for g in groups.values() if g in alone}
    steps = {name: g.rows[0].step for name, g in trained.items() if len(g.rows) == 1}
    blocks = {name: result.evaluations[g.model].block_size for name, g in trained.items()}
    sentences = [
        f"the {what} differ: {', '.join(f'{name} {n:,}' for name, n in values.items())} ({note})"
        for what, values, note in (
            ("numbers of steps", steps, "to the best checkpoint"),
            ("block sizes", blocks, "a larger one sees more context"),
        )
        if len(set(values.values())) > 1
    ]
    losses = {name: group.loss.value for name, group in groups.items()}
    if (note := undertrained(losses)) is not None:
        sentences.append(note)
    if (gpt := groups.get(f"gpt{TRAINED}")) is not None:
        bigram, ngram = (
            next(group for group in by_loss if group.model.startswith(start))
            for start in ("bigram", NGRAM)
        )
        over_bigram = gpt.describe_gain_over(bigram, "the best bigram")
        over_ngram = gpt.describe_gain_over(ngram, f"the {NGRAM}")
        sentences.append(f"the gpt is {over_bigram} and {over_ngram}")
        if (mixture := groups.get(MIXTURE_LABEL)) is not None:
            gain = mixture.describe_gain_over(gpt, "the gpt")
            sentences.append(f"{MIXTURE_LABEL}, which chargpt sample --mixture uses, is {gain}")
        return [*sentences, gpt.margin_note]
    if len(alone) < 2:
        return sentences
    # of each model, or its mixture
    best = {tuple(row.run for row in g.rows): g for g in reversed(by_loss) if g.is_run}
    with_mixtures = sorted(best.values(), key=lambda group: group.loss.value)
    kinds = {"runs": alone}
    if with_mixtures != alone:
        kinds = {"models alone": alone, "runs and their mixtures": with_mixtures}
    for name, (first, second, *_) in kinds.items():
        gain = first.describe_gain_over(second, second.model)
        sentences.append(f"{first.model} has the lowest loss of the {name}; it is {gain}")
    return [*sentences, alone[0].margin_note]


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


def trainings_of(
    config: Config,
    models: Sequence[str],
    n_seeds: int = 1,
    sweep: Mapping[str, Mapping[str, object]] = {"": {}},
) -> list[Training]:
    """Return the runs of each model with each combination of a sweep and each seed.

    Args:
        config: of the GPT; the other models share its text, steps and batch.
        models: of `MODELS`.
        n_seeds: number of seeds, from the config's own on.
        sweep: settings by dotted keys that replace those of the config, by name.

    Raises:
        ConfigError: there is no such model, or a setting is wrong.
    """
    found = []
    for kind, (name, values) in itertools.product(models, sweep.items()):
        own, folder, label = model_config(config, kind), kind, f"{kind}{TRAINED}"
        if values:
            own, label = own.with_values(values), f"{kind} {name}" if len(models) > 1 else name
            folder = re.sub(r"[^\w.=+-]+", "-", label)
        found += with_seeds(label, folder, own, n_seeds)
    return found


def with_seeds(model: str, folder: str, config: Config, n_seeds: int) -> list[Training]:
    """Return the runs of a model with consecutive seeds, from the config's own on."""
    if n_seeds == 1:
        return [Training(model, folder, config)]
    return [
        Training(model, f"{folder}-{seed}", config.with_values({"seed": seed}))
        for seed in range(config.seed, config.seed + n_seeds)
    ]


def resumed_session(
    folder: RunFolder, config: Config, corpus: Corpus, baselines: Baselines
) -> Session:
    """Return the session that continues a run of a stopped comparison with this config.

    Raises:
        FinishedError: the run has no steps left.
        ChargptError: the run has another text or other settings, or is unusable.
    """
    saved, given = load_latest(folder), config.flatten()
    own = {"threads", *(RATES if saved.state.rollbacks else ())}  # that the run itself has changed
    changed = [
        key
        for key in saved.config.differing_keys(config)
        if key not in own and given[key] != "auto"
    ]
    if saved.state.corpus_key != corpus.key:
        changed.append("the text")
    if changed:
        raise ConfigError(
            f"{folder.path} differs from this comparison in {', '.join(changed)}; resume it with "
            "the same command, or name another folder with --out"
        )
    config = continued_config(saved, changed_config(saved, {}))
    return continue_run(folder, saved, config, corpus, baselines)


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
    names = [training.folder for training in trainings_of(chosen, models)]  # before any training
    deadline, pace, max_tokens = None, None, MAX_TOKENS
    if budget is not None:
        deadline, fixed_keys = request.deadline()
    with opened(request, "compare", names) as (chosen, folder, corpus):
        if deadline is not None:
            chosen, corpus, pace = plan_run(chosen, corpus, deadline, fixed_keys)
            max_tokens = chosen.train.evaluation_tokens
        return compare_trainings(
            trainings_of(chosen, models),
            folder,
            corpus,
            lambda _, session: run_steps(session, progress),
            pace=pace,
            max_tokens=max_tokens,
        )


@contextmanager
def opened(
    request: Request,
    name: str,
    names: Sequence[str],
    on_progress: TextProgress | None = None,
    *,
    resume: bool = False,
) -> Iterator[tuple[Config, Path, Corpus]]:
    """Yield the config of a comparison with its threads, its folder, by default runs/NAME-TEXT, and
    the text, whose files the runs get links to.

    `names` are those of the folders of the runs; with `resume` they may exist.
    """
    out, config = request.out, request.resolved[0]
    if resume and out is None:
        raise ConfigError("--resume continues a stopped comparison; name its folder with --out")
    paths = [out / each for each in names] if out else []
    for path in paths:
        if exists(path) and not resume:
            raise ConfigError(
                f"{path} exists; continue the comparison with --resume, or name another folder "
                "with --out"
            )
    if not any(map(has_checkpoint, paths)):  # else the others get the threads of the first run
        config = with_measured_threads(config)
    source = find_text(config.text, request.text)
    with output_folder(out, f"{name}-{slug(source.name)}") as folder:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".text-", dir=folder) as temporary:
            yield config, folder, prepare(source, config.text, Path(temporary), on_progress)


def compare_trainings(
    trainings: Sequence[Training],
    folder: Path,
    corpus: Corpus,
    run_session: RunSession,
    *,
    pace: Pace | None = None,
    max_tokens: int = MAX_TOKENS,
    split: Split = "val",
    resume: bool = False,
    show_progress: ShowProgress = show_nothing,
) -> Comparison:
    """Train runs on one text and evaluate them under `blocks`, beside the baselines.

    Args:
        split: of which at most `max_tokens` are scored, `val` or `test`.
        show_progress: of the evaluations.
        trainings, folder, run_session, pace, resume: as for `Comparison.train`.

    Raises:
        ChargptError: the text, a setting or the folder is unusable.
    """
    span = max(training.config.model.block_size for training in trainings)
    comparison = Comparison.of_split(corpus, split, span, max_tokens, show_progress)
    corpus.require_blocks(span)
    baselines, tokens = Baselines(corpus), corpus.split(split)
    curve_tokens = trainings[0].config.train.evaluation_tokens
    comparison.add_baselines(baselines, tokens, corpus.split("val"), curve_tokens)
    comparison.train(
        trainings, folder, corpus, baselines, tokens, run_session, pace=pace, resume=resume
    )
    return comparison


def compare_runs(
    paths: Sequence[Path],
    device: str = "auto",
    show_progress: ShowProgress = show_nothing,
    split: Split = "val",
) -> Comparison:
    """Evaluate existing runs on the split that they share, `val` or `test`.

    Runs that differ only in their seed are rows of one model. If the vocabularies differ, all runs
    score the first MAX_TOKENS of the split.

    Raises:
        ConfigError: the runs have different texts or splits.
        TextError: they have no such split.
        ChargptError: a folder is not a run, or its text is not available.
    """
    runs = [load_run(path, "best", device) for path in paths]
    corpora = [run.corpus() for run in runs]
    texts = [corpus.tokenizer.decode(corpus.split(split)) for corpus in corpora]
    name = corpora[0].name
    for path, run, text, corpus in zip(paths, runs, texts, corpora, strict=True):
        if text != texts[0]:
            keys = [k for k in run.config.differing_keys(runs[0].config) if k.startswith("text.")]
            raise ConfigError(
                f"{path} ({corpus.name}) has another {SPLIT_WORDS[split]} split than {paths[0]} "
                f"({name}), so their losses cannot be compared (other settings: "
                f"{', '.join(keys) or 'none'}); name runs of one text, or measure each with "
                "`chargpt evaluate RUN --text FILE`"
            )
    span, max_tokens = max(run.model.block_size for run in runs), MAX_TOKENS
    all_tokens = [corpus.split(split) for corpus in corpora]
    if any(corpus.tokenizer != corpora[0].tokenizer for corpus in corpora):
        # spans of tokens would begin at other characters: score the start of the split instead
        start = texts[0][: MAX_TOKENS + 1]
        all_tokens = [corpus.tokenizer.encode(start, unknown="replace") for corpus in corpora]
        max_tokens = max(map(len, all_tokens))
    comparison = Comparison.of_split(corpora[0], split, span, max_tokens, show_progress)
    curve_tokens = max(run.config.train.evaluation_tokens for run in runs)
    val = corpora[0].split("val") if split != "val" else all_tokens[0]
    comparison.add_baselines(Baselines(corpora[0]), all_tokens[0], val, curve_tokens)
    names, taken = list[str](), [row.model for row in comparison.rows]
    for path in paths:
        full = path.resolve()
        free = (name for name in (full.name, str(path)) if name not in (*names, *taken))
        names.append(next(free, str(full)))
    models = group_seeds(names, [run.config for run in runs])
    for model, own, run, tokens in zip(models, names, runs, all_tokens, strict=True):
        comparison.add_run(model, own, run, tokens, find_mixture_run(run))
    return comparison


def group_seeds(names: Sequence[str], configs: Sequence[Config]) -> list[str]:
    """Return the names of the runs' models: one for those that differ only in their seed."""
    numbers: dict[Config, list[int]] = {}
    for number, config in enumerate(configs):
        key = config.model_copy(update={"seed": 0, "threads": None})
        numbers.setdefault(key, []).append(number)
    models = list(names)
    for same in numbers.values():
        seeds = [configs[number].seed for number in same]
        if 1 < len(same) == len(set(seeds)):
            first, words = names[same[0]], f" ({len(same)} seeds)"
            short = first.removesuffix(f"-{seeds[0]}") + words  # as `compare --seeds` names it
            model = first + words if short in models else short
            for number in same:
                models[number] = model
    return models
