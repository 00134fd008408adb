"""Comparison of baselines, a bigram and a GPT on one text, or of existing runs."""

import itertools
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import Any, ClassVar, Literal, NamedTuple

from chargpt.analysis.result import MIXTURE_SUFFIX, describe_gain, difference
from chargpt.config import SWEPT, Config, load_config, require_settings, shipped_configs
from chargpt.distributed import world_size
from chargpt.errors import ConfigError, FinishedError, TextError
from chargpt.files import exists
from chargpt.inference.evaluation import (
    BaselineLoss,
    Baselines,
    Evaluation,
    OnProgress,
    evaluate_tokens,
    loss_values,
)
from chargpt.inference.generation import PLAIN, sample
from chargpt.log import logger
from chargpt.models.ngram import NGRAM
from chargpt.outputs import require_no_link
from chargpt.store.folder import RunFolder
from chargpt.store.layout import has_checkpoint, is_run
from chargpt.store.metrics import validation_curve
from chargpt.store.mixture import find_mixture_run
from chargpt.store.run import Run, load_run
from chargpt.text import TextProgress
from chargpt.text.corpus import Corpus, Split
from chargpt.text.prepare import prepare
from chargpt.text.source import find_text
from chargpt.text.tokenizer import Tokens
from chargpt.training.api import new_request, notebook_view, run_steps
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
from chargpt.training.trainer import StepReport

MODELS = ("bigram", "gpt")  # by default
TRAINED = " (trained)"  # ends the name of a model that `compare` trains
MAX_TOKENS = 300_000  # scored
MAX_TRAININGS = 64
# settings of `train` that a model's own config has
OWN_TRAIN_KEYS = ("ngram_target_weight", "teachers", "students")
MAX_BIGRAM_GAP = 0.1  # nats
PLUS_MINUS = "±: twice the standard error of the difference"
PLUS_MINUS_OF_SEEDS = (
    "±: half a 95% confidence interval (Student's t); differences are paired by seed"
)
# 97.5% quantiles of Student's t, by degrees of freedom from 1 on (Gosset 1908)
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
SPLIT_WORDS = {"val": "validation", "test": "test"}
SAMPLE = {"length": 300, "temperature": 0.8, "seed": 1337, "num_samples": 1, **PLAIN}

ScoredSplit = Literal["val", "test"]
RunSession = Callable[[str, Session], None]
# called with a unit and a label; its context yields a function of (done, total)
ShowProgress = Callable[[str, str], AbstractContextManager[OnProgress]]


def show_nothing(_unit: str, _label: str) -> AbstractContextManager[OnProgress]:
    """Show no progress."""
    return nullcontext(lambda *_: None)


class Training(NamedTuple):
    """A run that a comparison trains."""

    model: str  # its name in tables; runs that share one differ only in the seed
    folder: str  # name of the run's folder
    config: Config
    adds: str = ""  # of a ladder: the component that this run adds, in words


TrainingsOf = Callable[[Config], list[Training]]


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
        facts = {name: value for name, value in vars(self).items() if name != "evaluation"}
        if isinstance(self.evaluation, Evaluation):
            return self.evaluation.as_dict() | facts
        return loss_values(self.nats_per_char) | facts


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

    def describe_as_gain(self) -> str:
        """Return a gain as `0.1234 ± 0.0123 nats per character lower`."""
        margin = "" if self.margin is None else f" ± {self.margin:.4f}"
        change = "lower" if self.value >= 0 else "higher"
        return f"{abs(self.value):.4f}{margin} nats per character {change}"


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

        The margin of one row against another is twice the standard error.
        """
        evaluation = self.rows[0].evaluation
        if len(self.rows) == len(other.rows) == 1 and isinstance(evaluation, Evaluation):
            return Estimate(*difference(evaluation, other.rows[0].evaluation))
        return self.paired_gain_over(other)

    def paired_gain_over(self, other: "Group") -> Estimate:
        """Return the mean gain, paired by seed, or each seed with the same baseline.

        With fewer than two seeds in common, it has no margin.
        """
        others = {row.seed: row.nats_per_char for row in other.rows}  # a baseline's seed is None
        references = [others.get(row.seed, others.get(None)) for row in self.rows]
        pairs = zip(references, self.nats, strict=True)
        gains = [reference - nats for reference, nats in pairs if reference is not None]
        if len(gains) < 2:
            return Estimate(other.loss.value - self.loss.value, None)
        return Estimate.from_values(gains)

    def describe_gain_over(self, other: "Group", name: str) -> str:
        """Return by how much the loss is lower than another's in words."""
        gain = self.gain_over(other)
        return describe_gain(gain.value, gain.margin, name)

    def as_dict(self) -> dict[str, Any]:
        """Return mean, standard deviation and 95% interval for `--json`."""
        loss = self.loss
        return {
            "model": self.model,
            "seeds": [row.seed for row in self.rows],
            **loss_values(loss.value),
            "std": self.std,
            "margin": loss.margin,
        }


@dataclass(repr=False)
class Comparison:
    """Rows, validation curves and samples of the compared models, and the baselines' losses.

    All rows score the same characters of a split, in spans of `span` if it is long; if the
    vocabularies differ, those at its start.
    """

    name: ClassVar[str] = "compare"  # of a new folder
    has_mixtures: ClassVar[bool] = True  # of GPT and n-gram models, as rows of their own
    n_first: ClassVar[int | None] = None  # tokens of the split, of which all are scored

    split: Split = "val"
    show_progress: ShowProgress = show_nothing  # of the evaluations
    title: str = ""  # name of the text
    scored_on: str = ""  # what the losses were measured on
    span: int = 0
    max_tokens: int = MAX_TOKENS  # scored at most; tokens where bytes spell rare characters
    folder: Path | None = None  # of the folders of the runs; None of existing ones
    trainings: Sequence[Training] = ()
    rows: list[Row] = field(default_factory=list)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)
    baselines: Mapping[str, float] = field(default_factory=dict)
    curve_baselines: Mapping[str, float] = field(default_factory=dict)  # on the curves' characters

    def __repr__(self) -> str:
        losses = ", ".join(f"{row.model} {row.nats_per_char:.4f}" for row in self.rows)
        return f"Comparison({self.title!r}, nats/char: {losses})"

    def _repr_html_(self) -> str:
        """Return the table, the conclusions and the validation curves as HTML, for a notebook."""
        return str(import_module("chargpt.cli.notebook").comparison_html(self))

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

    def as_dict(self) -> dict[str, Any]:
        """Return the results for `--json`."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "models": [group.as_dict() for group in self.groups.values() if group.is_run],
            "baselines": dict(self.baselines),
            "summary": conclusions(self),
        }

    def set_text(self, corpus: Corpus, tokens: Tokens, configs: Sequence[Config]) -> Baselines:
        """Set the text, whose tokens the runs with these configs score, and add its baselines.

        Raises:
            TextError: the text has no such split.
        """
        if len(tokens) < 2:
            raise TextError(
                f"{corpus.name} has no {self.split} split; train with --test FILE, or with "
                "-s text.test_fraction=0.1"
            )
        self.title = corpus.name
        self.span = max(config.model.block_size for config in configs)
        baselines, val = Baselines(corpus), corpus.split("val")
        n_validated = max(config.train.evaluation_tokens for config in configs)
        self.curve_baselines = baselines.losses(val, max_tokens=n_validated, span=self.span)
        self.add_baselines(corpus, baselines, tokens)
        return baselines

    def add_baselines(self, corpus: Corpus, baselines: Baselines, tokens: Tokens) -> None:
        """Score the baselines on the tokens of the split, and say what was scored."""
        found = baselines.evaluate(tokens, max_tokens=self.max_tokens, span=self.span)
        scored, of = int(found["uniform"].clusters[1].sum()), corpus.count_characters(self.split)
        words = f"{SPLIT_WORDS[self.split]} characters{corpus.origin(self.split)}"
        self.scored_on = f"{scored:,} of {of:,} {words}, protocol blocks"
        self.baselines = {name: each.nats_per_char for name, each in found.items()}
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
        records = run.records()
        steps = (each for each in records if "loss" in each)  # a sample comes after the last one
        seconds = max([run.state.seconds, *(each.get("seconds", 0) for each in steps)])
        models = {name: run.model}
        if mixture_run is not None and self.has_mixtures:
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
        request: Request,
        trainings_of: TrainingsOf,
        run_session: RunSession,
        n_seeds: int = 1,
        *,
        resume: bool = False,
        on_progress: TextProgress | None = None,
    ) -> None:
        """Train runs on one text and evaluate them under `blocks`, beside the baselines.

        Args:
            request: the text, the config, its budget, and the folder, by default one in runs/.
            trainings_of: called with a config, also the one that a budget has planned.
            run_session: called with a name and a session; runs all its steps.
            n_seeds: number of consecutive seeds of each run, from its config's own on.
            resume: continue the runs that are there, and do not train what is done.
            on_progress: called with the progress of preparing the text.

        Raises:
            ChargptError: the text, a setting or the folder is unusable.
        """
        if world_size() > 1:
            raise ConfigError("a comparison trains in one process; start it without torchrun")
        out, (config, fixed_keys) = request.out, request.resolved
        if resume and out is None:
            raise ConfigError("--resume continues a stopped comparison; name its folder with --out")
        if out is not None and out.is_file():
            raise ConfigError(f"{out} is a file; name another folder with --out")
        trainings, deadline, pace = with_seeds(trainings_of(config), n_seeds), None, None
        if request.budget is not None:
            deadline, fixed_keys = request.deadline()
        paths = [out / training.folder for training in trainings] if out else []
        for path in paths:
            require_no_link(path)
        if not resume and (taken := next(filter(exists, paths), None)) is not None:
            raise ConfigError(
                f"{taken} exists; continue the comparison with --resume, or name another folder "
                "with --out"
            )
        known, like = next(filter(has_checkpoint, paths), None), None
        if known is None:  # else the others get the threads of the first run
            config = with_measured_threads(config)
        else:  # an earlier version computed another key
            like = RunFolder(known).load("latest", optimizer=False).state.corpus_key
        source = find_text(config.text, request.text)
        with output_folder(out, f"{self.name}-{slug(source.name)}") as self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            # the runs get links to the files of the text
            with tempfile.TemporaryDirectory(prefix=".text-", dir=self.folder) as temporary:
                corpus = prepare(source, config.text, Path(temporary), on_progress, like)
                if deadline is not None:
                    config, corpus, pace = plan_run(config, corpus, deadline, fixed_keys)
                    self.max_tokens = config.train.evaluation_tokens
                self.trainings = with_seeds(trainings_of(config), n_seeds)
                self._train_runs(self.folder, corpus, run_session, pace, resume)
        if pace is not None and (late := pace.deadline.late_note()) is not None:
            logger.warning(late)

    def _train_runs(
        self, folder: Path, corpus: Corpus, run_session: RunSession, pace: Pace | None, resume: bool
    ) -> None:
        """Add the baselines, train the runs and add each; `pace`: of the config it has planned."""
        configs = [training.config for training in self.trainings]
        corpus.require_blocks(max(config.model.block_size for config in configs))
        tokens = corpus.split(self.split)[: self.n_first]
        baselines = self.set_text(corpus, tokens, configs)
        models = [training.model for training in self.trainings]
        shared: dict[str, object] = {}  # what the first run has measured: results depend on it
        for number, (model, name, config, _) in enumerate(self.trainings, 1):
            is_alone = models.count(model) == 1
            heading = name
            if len(models) > len(MODELS):
                seed = "" if is_alone else f", seed {config.seed}"
                heading = f"{number} of {len(models)}: {model}{seed}"
            is_there = resume and has_checkpoint(folder / name)
            run_folder = RunFolder(folder / name)
            with run_folder.locked(is_new=not is_there), suppress(FinishedError):
                if is_there:
                    session = resumed_session(run_folder, config, corpus, baselines)
                else:
                    own_pace = pace if pace is not None and config == pace.config else None
                    unset = {
                        k: v for k, v in shared.items() if getattr(config, k) in (None, "auto")
                    }
                    own = config.with_values(unset)
                    session = start_run(run_folder, own, corpus, baselines, pace=own_pace)
                run_session(heading, session)
            run = load_run(folder / name, "best", config.device)
            shared = shared or {"dtype": run.config.dtype, "threads": run.config.threads}
            mixture_run = find_mixture_run(run) or try_add_mixture(run, corpus)
            self.add_run(model, model if is_alone else name, run, tokens, mixture_run)


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
    sentences += undertrained(groups)
    others = [g for name, g in trained.items() if name != "bigram" and g.model.endswith(TRAINED)]
    if len(others) == 1:
        (other,) = others
        name = other.model.removesuffix(TRAINED)
        bigram = next(group for group in by_loss if group.model.startswith("bigram"))
        over_bigram = other.describe_gain_over(bigram, "the best bigram")
        over_ngram = other.describe_gain_over(groups[f"{NGRAM} (counts)"], f"the {NGRAM}")
        sentences.append(f"the {name} is {over_bigram} and {over_ngram}")
        if (mixture := groups.get(f"{name}{MIXTURE_SUFFIX}")) is not None:
            gain = mixture.describe_gain_over(other, f"the {name}")
            sentences.append(f"{mixture.model}, which chargpt sample --mixture uses, is {gain}")
    elif len(alone) > 1:
        # of each model, or its mixture
        best = {tuple(row.run for row in g.rows): g for g in reversed(by_loss) if g.is_run}
        with_mixtures = sorted(best.values(), key=lambda group: group.loss.value)
        kinds = {"runs": alone}
        if with_mixtures != alone:
            kinds = {"models alone": alone, "runs and their mixtures": with_mixtures}
        for name, (first, second, *_) in kinds.items():
            gain = first.describe_gain_over(second, second.model)
            sentences.append(f"{first.model} has the lowest loss of the {name}; it is {gain}")
    else:
        return sentences
    n_seeds = len(alone[0].rows)
    return [*sentences, PLUS_MINUS if n_seeds == 1 else PLUS_MINUS_OF_SEEDS]


def undertrained(groups: Mapping[str, Group]) -> list[str]:
    """Return a sentence if a trained bigram is much worse than that of counts."""
    trained, counts = groups.get(f"bigram{TRAINED}"), groups["bigram (counts)"].loss.value
    if trained is None or trained.loss.value <= counts + MAX_BIGRAM_GAP:
        return []
    return [
        f"the trained bigram, {trained.loss.value:.3f}, is still far from that of counts, "
        f"{counts:.3f}: train more steps, or compare with the latter"
    ]


def model_config(config: Config, name: str) -> Config:
    """Return the text, steps and batch of a config with the model and optimizer of another.

    Raises:
        ConfigError: there is no config of that name, or it is wrong.
    """
    own = load_config(name)
    values = {key: getattr(own, key).model_dump() for key in ("model", "optim", "schedule")}
    values["model"]["block_size"] = config.model.block_size
    train = own.train  # what it learns from
    values |= {f"train.{key}": getattr(train, key) for key in OWN_TRAIN_KEYS}
    return config.with_values(values)


def trainings_of(
    config: Config,
    models: Mapping[str, str | None],
    sweep: Mapping[str, Mapping[str, object]] = {"": {}},
) -> list[Training]:
    """Return a run of each model with each combination of a sweep.

    Args:
        config: of which all models share the text, steps and batch.
        models: the names or files of their configs, by the models' names; None: `config` itself.
        sweep: settings by dotted keys that replace those of the config, by name.

    Raises:
        ConfigError: there is no such config, or a setting is wrong.
    """
    found = []
    for (model, source), (name, values) in itertools.product(models.items(), sweep.items()):
        own = config if source is None else model_config(config, source)
        folder, label = model, f"{model}{TRAINED}"
        if values:
            own, label = own.with_values(values), f"{model} {name}" if len(models) > 1 else name
            folder = re.sub(r"[^\w.=+-]+", "-", label)
        found.append(Training(label, folder, own))
    return found


def sweep_of(
    request: Request,
    models: Sequence[str] | None,
    swept: Mapping[str, Mapping[str, object]],
    n_seeds: int,
) -> TrainingsOf:
    """Return the function from a config to the runs of the models with each combination of values.

    Args:
        request: of the comparison. Its config is meant by its name, or by that of its kind in
            `MODELS`.
        models: names or files of configs, a string if separated by commas; None: `MODELS`, or of a
            sweep the request's own.
        swept: the values of each swept setting by dotted key, by how they are written.
        n_seeds: number of seeds of each run.

    Raises:
        ConfigError: no model is named, two have the same name, or there are too many runs.
    """
    kind = request.resolved[0].model.kind
    own = request.config_name or kind
    if models is None:
        models = [own] if swept else MODELS
    elif isinstance(models, str):
        models = models.split(",")
    names = list(dict.fromkeys(name.strip() for name in models if name.strip()))
    if not names:
        raise ConfigError("--models names no model; give bigram, gpt or both")
    own_names = {own, request.config}
    if own_names.isdisjoint(names):
        own_names.add("bigram" if kind == "bigram" else "gpt")
    sources = {
        own if name in own_names else slug(name): None if name in own_names else name
        for name in names
    }
    if len(sources) < len(names):
        raise ConfigError(f"two of the models {', '.join(names)} have the same name; rename a file")
    for source in set(filter(None, sources.values())) - set(shipped_configs()):
        tree = load_config(source).model_dump(exclude_unset=True)
        unused = [f"{part}.{key}" for part in ("text", "train") for key in tree.get(part, ())]
        unused += ["model.block_size"] if "block_size" in tree.get("model", ()) else []
        unused = [key for key in unused if key.removeprefix("train.") not in OWN_TRAIN_KEYS]
        if unused:
            logger.warning(f"{source}: not used, since all models share them: {', '.join(unused)}")
    choices = [[(key, *each) for each in values.items()] for key, values in swept.items()]
    sweep = {  # by a name without sections, such as `lr=0.01`
        " ".join(f"{key.partition('.')[2]}={word}" for key, word, _ in chosen): {
            key: value for key, _, value in chosen
        }
        for chosen in itertools.product(*choices)
    }
    if (n_trainings := len(sweep) * len(sources) * n_seeds) > MAX_TRAININGS:
        raise ConfigError(
            f"these are {n_trainings:,} trainings, and a comparison has at most {MAX_TRAININGS}; "
            "give fewer values, models or seeds"
        )
    return partial(trainings_of, models=sources, sweep=sweep)


def with_seeds(trainings: list[Training], n_seeds: int) -> list[Training]:
    """Return each run with consecutive seeds, from its config's own on."""
    if n_seeds == 1:
        return trainings
    return [
        each._replace(
            folder=f"{each.folder}-{seed}", config=each.config.with_values({"seed": seed})
        )
        for each in trainings
        for seed in range(each.config.seed, each.config.seed + n_seeds)
    ]


def resumed_session(
    folder: RunFolder, config: Config, corpus: Corpus, baselines: Baselines
) -> Session:
    """Return the session that continues a run of a stopped comparison with this config.

    Raises:
        FinishedError: the run has no steps left.
        ChargptError: the run has another text or other settings, or is unusable.
    """
    saved, given, parts = load_latest(folder), config.flatten(), "train.micro_batches"
    # changed by the run itself, or for want of memory
    own = {"threads", parts, "track.tensorboard", *(RATES if saved.state.rollbacks else ())}
    own.add("train.teachers")  # whose paths are absolute in the run, which knows their fingerprint
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
    more = {
        parts: max(given[parts], saved.config.train.micro_batches),
        "track.tensorboard": given["track.tensorboard"],
    }
    config = continued_config(saved, changed_config(saved, more))
    return continue_run(folder, saved, config, corpus, baselines)


def compare(
    path: Run | str | Path | Sequence[Run | str | Path] | None = None,
    *,
    text: str | None = None,
    config: str | Path | Config | None = None,
    settings: Mapping[str, object] | None = None,
    budget: str | float | None = None,
    out: str | Path | None = None,
    device: str | None = None,
    encoding: str | None = None,
    models: Sequence[str] | None = None,
    seeds: int = 1,
    split: ScoredSplit = "val",
    start: Literal["new", "resume"] = "new",
    progress: bool | None = None,
    on_report: Callable[[StepReport], object] = lambda _: None,
) -> Comparison:
    """Train baselines, a bigram and a GPT on a text and compare them, or compare existing runs.

    All are evaluated on the same characters of a split, under the protocol `blocks`.

    Args:
        path: as for `train`; or a run, or a list of runs, or their folders, of one text, to which
            `device` and `split` apply, and nothing else.
        text, config, settings, device, encoding: as for `train`; the config is that of the GPT, and
            the other models share its text, steps and batch. Several values of a setting, as in
            {"optim.lr": [0.01, 0.02]}, are a sweep: each combination is trained.
        budget: total time, in seconds or as in "3m", that the GPT's size and all models' steps fit.
        out: folder of the runs; each gets a folder with its model's name. By default a new one
            under runs/.
        models: to train: shipped configs by name, or YAML files; by default `bigram` and `gpt`, or
            of a sweep the config's own.
        seeds: number of consecutive seeds of each model.
        split: `val` or `test`; checkpoints are chosen by `val`.
        start: `resume` continues a stopped comparison in `out`.
        progress: show a progress bar of each training on stderr; in a Jupyter notebook, where it is
            the default, a widget if ipywidgets is installed, after the plan.
        on_report: as for `train`, of one training after another; once it returns True, the next
            begins.

    Raises:
        ChargptError: a text, setting, folder or run is unusable, or the runs are of several texts.
        KeyboardInterrupt: training was interrupted.
    """
    if isinstance(path, Run) or (isinstance(path, str | Path) and is_run(Path(path))):
        path = [path]
    changed = seeds > 1 or start == "resume" or None
    given = (text, config, settings, budget, out, encoding, models, changed)
    if isinstance(path, Sequence) and not isinstance(path, str):
        if not path:
            raise ConfigError("there is no run to compare; name one or more")
        if any(each is not None for each in given):
            raise ConfigError("runs are compared as they are; give only them, device= and split=")
        folders = [each.folder if isinstance(each, Run) else Path(each) for each in path]
        return compare_runs(folders, device or "auto", split=split)
    settings = require_settings(settings)
    swept = {
        key: {str(value): value for value in values}
        for key, values in settings.items()
        if key in SWEPT and isinstance(values, list | tuple) and values
    }
    if budget is not None and (swept or changed):
        raise ConfigError(
            "seeds, several values of a setting and start='resume' do not apply to a budget, which "
            "plans one gpt for the time of one call; drop the budget, and give train.max_steps"
        )
    firsts = {key: next(iter(values.values())) for key, values in swept.items()}
    request = new_request(path, text, config, settings | firsts, budget, out, device, encoding)
    comparison = Comparison(split)
    notebook = None if progress is False else notebook_view()

    def run_session(_name: str, session: Session) -> None:
        if notebook is not None:
            notebook.show_plan(session)
        run_steps(session, bool(progress or notebook), on_report)

    runs_of, resume = sweep_of(request, models, swept, seeds), start == "resume"
    comparison.train(request, runs_of, run_session, seeds, resume=resume)
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
    comparison = Comparison(split, show_progress, max_tokens=MAX_TOKENS)
    all_tokens = [corpus.split(split) for corpus in corpora]
    if any(corpus.tokenizer != corpora[0].tokenizer for corpus in corpora):
        # spans of tokens would begin at other characters: score the start of the split instead
        start = texts[0][: MAX_TOKENS + 1]
        all_tokens = [corpus.tokenizer.encode(start, unknown="replace") for corpus in corpora]
        comparison.max_tokens = max(map(len, all_tokens))
    configs = [run.config for run in runs]
    comparison.set_text(corpora[0], all_tokens[0], configs)
    names, taken = list[str](), [row.model for row in comparison.rows]
    for path in paths:
        full = path.resolve()
        free = (name for name in (full.name, str(path)) if name not in (*names, *taken))
        names.append(next(free, str(full)))
    models = group_seeds(names, configs)
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
