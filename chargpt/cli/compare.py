"""`chargpt compare`: baselines, a bigram and a GPT on the same text, or existing runs."""

import csv
import io
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from chargpt.analysis import compare as comparison
from chargpt.analysis import plots
from chargpt.analysis.compare import Comparison, Estimate, undertrained
from chargpt.analysis.ladder import Ladder, ladder_trainings, run_ladder
from chargpt.analysis.result import MIN_RISE, loss_cells
from chargpt.cli import console, options, tables
from chargpt.cli.main import catch_signals
from chargpt.cli.train import LABEL, describe_plan, run_steps
from chargpt.config import Config, parse_override, split_values
from chargpt.errors import ConfigError, Stopped
from chargpt.files import quoted, write_output
from chargpt.store.folder import is_readable_run, is_run
from chargpt.text.corpus import Corpus
from chargpt.training.budget import plan_run
from chargpt.training.start import Request, Session

MODELS = ",".join(comparison.MODELS)
MAX_SAMPLE = 150  # characters of a rung's sample
MAX_SAMPLES = 4  # printed
MAX_TRAININGS = 64
SPARKS = 16  # columns of a sparkline, so that its line fits 80
STDOUT = Path("-")
CSV_COLUMNS = (
    *("model", "seed", "nats_per_char", "bits_per_char", "perplexity", "parameters", "seconds"),
    *("step", "run"),
)

ScoredSplit = Literal["val", "test"]


class Outputs(NamedTuple):
    """What is printed or written."""

    plot: Path | None
    csv: Path | None
    json: bool

    @property
    def has_table(self) -> bool:
        """Whether the table is printed: stdout is not that of the JSON or the CSV."""
        return not self.json and self.csv != STDOUT

    def write_csv(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows with the keys of `--json`, if a file is given."""
        if self.csv is None:
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        if self.csv == STDOUT:
            console.out_text(text.getvalue())
        else:
            write_output(self.csv, text.getvalue().encode())


def compare(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT|RUN", help="A text to train on, or runs to compare."),
    ] = None,
    models: Annotated[
        str | None, typer.Option(metavar="NAMES", help=f"Models to train; {MODELS} by default.")
    ] = None,
    config: options.ConfigName = None,
    out: options.RunsOut = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Total time, as in 30s or 3m: the gpt's size and all models' steps fit it.",
        ),
    ] = None,
    ladder: Annotated[
        bool,
        typer.Option(
            "--ladder",
            help="Train a ladder of models from a bigram to a GPT, adding one component at a time.",
        ),
    ] = False,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, max=10, help="Number of seeds for each model.")
    ] = 1,
    split: Annotated[
        ScoredSplit, typer.Option(help="Which split is scored; checkpoints are chosen by val.")
    ] = "val",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the comparison in --out where it stopped.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file of the plot: .svg or .png.")
    ] = None,
    csv_: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write a row for each run as CSV; - is stdout."),
    ] = None,
    json_: options.Json = False,
    seed: options.Seed = None,
    device: options.Device = None,
    val: options.Val = None,
    test: options.Test = None,
    encoding: options.Encoding = None,
    encoding_errors: options.EncodingErrors = None,
    set_: options.Set = None,
) -> None:
    """Train and compare baselines and a GPT on the same text.

    Without a text: on one that comes with Python.

    Several values of a setting, as in -s optim.lr=0.01,0.02, are a sweep: each combination is
    trained.

    Examples: `chargpt compare novel.txt`, `chargpt compare novel.txt --ladder --seeds 3`,
    `chargpt compare novel.txt -s optim.lr=0.01,0.02 --csv a.csv`, `chargpt compare runs/a runs/b`.
    """
    if plot is not None:
        plots.require_suffix(plot)
    options.require_outputs(plot, csv_)
    outputs = Outputs(plot, csv_, json_)
    if json_ and csv_ == STDOUT:
        raise ConfigError("--json and --csv - both print on stdout; name a file for the CSV")
    words = {word.partition("=")[0].strip(): split_values(word) for word in set_ or ()}
    swept = [key for key, values in words.items() if len(values) > 1]
    sweeps = f"-s {swept[0]}=A,B" if swept else ""
    if ladder:
        cause = "does not apply to --ladder, whose models are fixed"
        options.reject({"--models": models, "--budget": budget, sweeps: swept}, cause)
    if budget is not None:
        cause = "does not apply to --budget, which plans one gpt for the time of one command"
        options.reject({"--seeds": seeds > 1, "--resume": resume, sweeps: swept}, cause)
    settings = options.given_settings(
        [values[0] for values in words.values()],
        seed=seed,
        val=val,
        test=test,
        encoding=encoding,
        encoding_errors=encoding_errors,
    )
    paths = [path for text in texts or [] for path in runs_in(Path(text))]
    if paths and all(map(is_run, paths)):
        given = {
            "--models": models,
            "-c": config,
            "--out": out,
            "--budget": budget,
            "--ladder": ladder,
            "--seeds": seeds > 1,
            "--resume": resume,
            "-s (or --seed, --val, --test, --encoding, --encoding-errors)": settings,
        }
        options.reject(given, "applies to training, and these are runs")
        paths = list({path.resolve(): path for path in paths}.values())  # each run once
        with console.say_if_slow("counting n-grams ..."):
            result = comparison.compare_runs(paths, device or "auto", console.show_progress, split)
        print_comparison(result, outputs)
        return
    if len(paths) > 1:
        no_run = next(path for path in paths if not is_run(path))
        raise ConfigError(f"{no_run} is not a run; give one text, or only runs")
    request = Request(
        path=texts[0] if texts else None,
        config=config or ("ladder" if ladder else None),
        settings=settings if device is None else {**settings, "device": device},
        budget=budget,
        out=out,
        started=console.started,
    )
    runs = TextRuns(request, seeds, split, resume)
    if ladder:
        compare_rungs(runs, outputs)
    else:
        train_models(runs, models, {key: words[key] for key in swept}, outputs)


def runs_in(path: Path) -> list[Path]:
    """Return the runs in a folder, such as `compare --out` makes; another path itself."""
    inside = [] if is_run(path) else [each for each in path.glob("*") if is_readable_run(each)]
    return sorted(inside) or [path]


class TextRuns(NamedTuple):
    """Runs to train on one text: what is asked for."""

    request: Request
    n_seeds: int
    split: ScoredSplit
    resume: bool

    @contextmanager
    def open(self, name: str, names: Sequence[str]) -> Iterator[tuple[Config, Path, Corpus]]:
        """Yield what `comparison.opened` does; say how a comparison that is stopped goes on."""
        with (
            catch_signals(),
            comparison.opened(
                self.request, name, names, console.LoadingProgress(), resume=self.resume
            ) as (config, folder, corpus),
        ):
            try:
                yield config, folder, corpus
            except (KeyboardInterrupt, Stopped):
                if any(map(is_run, folder.glob("*"))):
                    self._say_stopped(folder)
                raise

    def _say_stopped(self, folder: Path) -> None:
        path = quoted(folder)
        then = "with --budget only a run of it can be resumed, by `chargpt train --resume RUN`"
        if self.request.budget is None:
            words = [word for word in sys.argv[1:] if word != "--resume"]
            words += ["--resume"] if self.request.out else ["--out", str(folder), "--resume"]
            then = f"train the rest with\n  {' '.join(map(quoted, ['chargpt', *words]))}"
        console.say(f"the runs so far are in {path}; `chargpt compare {path}` scores them; {then}")


def train_models(
    runs: TextRuns, models: str | None, swept: Mapping[str, list[str]], outputs: Outputs
) -> None:
    """Train and evaluate the models with progress bars, and print the comparison.

    `swept` has several `KEY=VALUE` by key.
    """
    request, budget = runs.request, None
    config, fixed_keys = request.resolved
    kinds = [config.model.kind] if swept and models is None else (models or MODELS).split(",")
    kinds = list(dict.fromkeys(kind.strip() for kind in kinds if kind.strip()))
    if not kinds:
        raise ConfigError("--models names no model; give bigram, gpt or both")
    n_trainings = math.prod(map(len, swept.values())) * len(kinds) * runs.n_seeds
    if n_trainings > MAX_TRAININGS:
        raise ConfigError(
            f"these are {n_trainings:,} trainings, and a comparison has at most {MAX_TRAININGS}; "
            "give fewer values, models or seeds"
        )
    sweep = {  # by a name without sections, such as `lr=0.01`
        " ".join(word.partition(".")[2] for word in words): dict(map(parse_override, words))
        for words in itertools.product(*swept.values())
    }
    trainings_of = partial(comparison.trainings_of, models=kinds, n_seeds=runs.n_seeds, sweep=sweep)
    names = [training.folder for training in trainings_of(config)]  # before any training
    deadline = None
    if request.budget is not None:
        deadline, fixed_keys = request.deadline()
    with runs.open("compare", names) as (config, folder, corpus):
        max_tokens = comparison.MAX_TOKENS
        if deadline is not None:
            config, corpus, budget = plan_run(config, corpus, deadline, fixed_keys)
            max_tokens = config.train.evaluation_tokens
        result = comparison.compare_trainings(
            trainings_of(config),
            folder,
            corpus,
            run_session,
            pace=budget,
            max_tokens=max_tokens,
            split=runs.split,
            resume=runs.resume,
            show_progress=console.show_progress,
        )
    print_comparison(result, outputs._replace(plot=outputs.plot or folder / "curves.svg"))
    if budget is not None and (late := budget.deadline.late_note()) is not None:
        console.say(late)
    if outputs.has_table:
        console.out(f"the runs are in {folder}; next:")
        alone = [row for row in result.rows if row.run and row.parameters is not None]
        if len(alone) > len(comparison.MODELS):
            alone = [min(alone, key=lambda row: row.nats_per_char)]
        for row in alone:
            console.out(f"  chargpt sample {quoted(row.run)}")


def run_session(name: str, session: Session, *, has_plan: bool = True) -> None:
    """Run all steps of a model with a progress bar, after its plan."""
    console.say(f"== {name} ==")
    if has_plan:
        console.say(describe_plan(session), hanging=LABEL * " ")
    run_steps(session, says_resume=False)


def print_comparison(result: Comparison, outputs: Outputs) -> None:
    """Draw the loss curves and write the CSV, if files are given, and print the comparison."""
    if outputs.plot is not None:
        figure = plots.loss_curves(result.curves, result.curve_baselines, result.title)
        plots.save(figure, outputs.plot)
    outputs.write_csv(row.as_dict() for row in result.rows)
    if outputs.json:
        console.out_json(
            {
                "rows": [row.as_dict() for row in result.rows],
                "models": [each.as_dict() for each in result.groups.values() if each.is_run],
                "baselines": dict(result.baselines),
                "summary": comparison.conclusions(result),
                "plot": outputs.plot and str(outputs.plot),
            }
        )
    if not outputs.has_table:
        return
    print_rows(result)
    if len(result.samples) <= MAX_SAMPLES:
        for name, text in result.samples.items():
            tables.panel(f"sample of {name}", text)
    if outputs.plot is not None:
        console.out(f"plot: {outputs.plot}")


def print_rows(result: Comparison) -> None:
    """Print the table, the gain of the GPT, and a sparkline per run."""
    columns, rows = table_of(result)
    tables.table(columns, rows, title=f"{result.title}: loss on {result.scored_on}")
    if "std" in columns:
        console.out_sentence(
            "seconds, nats/char: means over seeds; std: standard deviation (n - 1)"
        )
    for sentence in comparison.conclusions(result):
        console.out_sentence(sentence)
    if result.curves:
        console.out("validation during training, on all or a part of the split:")
    for name, points in result.curves.items():
        line = console.sparkline([nats for _, nats in points], sys.stdout, SPARKS)
        if points:
            (_, first), (_, last) = points[0], points[-1]
            step, lowest = min(points, key=lambda point: point[1])
            rise = f", last {last:.3f}" if last > lowest + MIN_RISE else ""
            console.out(f"{name:18} {line} {first:.3f} -> {lowest:.3f} at step {step:,}{rise}")


def table_of(result: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the columns and the rows of the table; of several seeds their means and deviations."""

    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    groups = result.groups.values()
    columns = ["model", "parameters", "seconds", "nats/char", "bits/char", "perplexity"]
    rows = [
        [
            group.model,
            cell(group.rows[0].parameters, ","),
            cell(group.seconds, ",.1f"),
            *loss_cells(group.loss.value),
        ]
        for group in groups
    ]
    if any(len(group.rows) > 1 for group in groups):  # names fit in 80 columns without perplexity
        columns[-2:] = ["std", columns[-2]]
        for row, group in zip(rows, groups, strict=True):
            row[-2:] = [cell(group.std, ".4f"), row[-2]]
    return columns, rows


def compare_rungs(runs: TextRuns, outputs: Outputs) -> None:
    """Train the rungs with progress bars, draw them, and print the table or the JSON."""
    trainings = ladder_trainings(runs.request.resolved[0], runs.n_seeds)
    with runs.open("ladder", [training.folder for training in trainings]) as (config, folder, text):
        run = partial(run_session, has_plan=False)  # which is that of all rungs
        ladder = run_ladder(
            config, folder, text, runs.n_seeds, run, split=runs.split, resume=runs.resume
        )
    plot = outputs.plot or folder / "ladder.svg"
    plots.save(plots.ladder(ladder), plot)
    rows = (row.as_dict() for result in ladder.results for row in result.rows)
    outputs.write_csv(itertools.chain(ladder.baseline_rows, rows))
    if outputs.json:
        console.out_json({**ladder.as_dict(), "plot": str(plot)})
    if outputs.has_table:
        print_ladder(ladder)
        console.out(f"plot: {plot}")


def print_ladder(ladder: Ladder) -> None:
    """Print the ladder as a table, the gain of each rung, and its sample."""
    rows = [
        [name, "-", *loss_cells(nats)[:2], "-", "-"]
        for losses in (ladder.ngrams, ladder.compressor_losses)
        for name, nats in losses.items()
    ]
    for result in ladder.results:
        cells = [f"{result.rows[0].parameters:,}", *loss_cells(result.loss.value)[:2]]
        margin = "-" if result.loss.margin is None else f"± {result.loss.margin:.4f}"
        rows.append([result.model, *cells, margin, f"{result.seconds:.1f}"])
    words = comparison.SPLIT_WORDS[ladder.split]
    tables.table(
        ["model", "parameters", "nats/char", "bits/char", "95% CI", "seconds"],
        rows,
        title=f"{ladder.title}: loss on the first {ladder.characters:,} {words} "
        f"characters{ladder.origin}, protocol blocks",
    )
    sentences = [
        f"{result.model}: {describe_gain(result.gain)} ({result.rung.adds})"
        for result in ladder.results
        if result.gain is not None
    ]
    sentences.append(
        f"one scaled attention head: {describe_gain(ladder.attention_gain)} than the bigram; "
        f"gpt: {describe_gain(ladder.total_gain)} than the bigram"
    )
    first = ladder.results[0]
    note = undertrained({first.model: first.loss.value, **ladder.ngrams})
    if note is not None:
        sentences.append(note)
    if ladder.compressor_losses:
        sentences.append(
            "compressors: the size of both splits together minus that of the training split"
        )
    if len(first.nats) > 1:
        sentences.append(comparison.PLUS_MINUS_OF_SEEDS)
    console.out_sentence("\n".join(sentences))
    for result in ladder.results:
        text = " / ".join(result.sample[:MAX_SAMPLE].split("\n"))
        console.out_sentence(f"-- {result.model} --\n{text}")


def describe_gain(gain: Estimate) -> str:
    """Return a gain as `0.1234 ± 0.0123 nats per character lower`."""
    absolute = Estimate(abs(gain.value), gain.margin)
    return f"{absolute} nats per character {'lower' if gain.value >= 0 else 'higher'}"
