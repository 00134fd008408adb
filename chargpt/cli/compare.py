"""`chargpt compare`: baselines, a bigram and a GPT on the same text, or existing runs."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from chargpt.analysis import compare as comparison
from chargpt.analysis import plots
from chargpt.analysis.compare import Comparison, shared_text, undertrained
from chargpt.analysis.ladder import Estimate, Ladder, run_ladder
from chargpt.analysis.result import MIN_RISE, loss_cells
from chargpt.cli import console, options, tables
from chargpt.cli.main import catch_signals
from chargpt.cli.train import run_steps, show_plan
from chargpt.config import Config
from chargpt.errors import ConfigError, Stopped
from chargpt.store.folder import is_readable_run, is_run
from chargpt.text.corpus import Corpus
from chargpt.text.source import find_text
from chargpt.training.budget import plan_run, with_measured_threads
from chargpt.training.start import Request, Session, output_folder, slug

MODELS = ",".join(comparison.MODELS)
MAX_SAMPLE = 150  # characters of a rung's sample
SPARKS = 16  # columns of a sparkline, so that its line fits 80


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
        int,
        typer.Option(metavar="N", min=1, max=10, help="With --ladder: number of seeds per model."),
    ] = 1,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file of the plot: .svg or .png.")
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

    Examples: `chargpt compare novel.txt`, `chargpt compare novel.txt --ladder --seeds 3`,
    `chargpt compare runs/a runs/b --plot curves.png`.
    """
    if plot is not None:
        plots.require_suffix(plot)
    options.require_outputs(plot)
    if seeds > 1 and not ladder:
        raise ConfigError("--seeds applies only to --ladder; add --ladder")
    if ladder:
        cause = "does not apply to --ladder, whose models are fixed"
        options.reject({"--models": models, "--budget": budget}, cause)
    settings = options.given_settings(
        set_, seed=seed, val=val, test=test, encoding=encoding, encoding_errors=encoding_errors
    )
    paths = [path for text in texts or [] for path in runs_in(Path(text))]
    if paths and all(map(is_run, paths)):
        given = {
            "--models": models,
            "-c": config,
            "--out": out,
            "--budget": budget,
            "--ladder": ladder,
            "-s (or --seed, --val, --test, --encoding, --encoding-errors)": settings,
        }
        options.reject(given, "applies to training, and these are runs")
        paths = list({path.resolve(): path for path in paths}.values())  # each run once
        with console.say_if_slow("counting n-grams ..."):
            result = comparison.compare_runs(paths, device or "auto", console.show_progress)
        print_comparison(result, plot, json_=json_)
        return
    if len(paths) > 1:
        no_run = next(path for path in paths if not is_run(path))
        raise ConfigError(f"{no_run} is not a run; give one text, or only runs")
    request = Request(
        path=texts[0] if texts else None,
        config=config or ("ladder" if ladder else None),
        settings=settings if device is None else {**settings, "device": device},
        budget=budget,
        started=console.started,
    )
    if ladder:
        compare_rungs(with_measured_threads(request.resolved[0]), out, seeds, plot, json_=json_)
        return
    train_models(request, out, models or MODELS, plot, json_=json_)


def runs_in(path: Path) -> list[Path]:
    """Return the runs in a folder, such as `compare --out` makes; another path itself."""
    inside = [] if is_run(path) else [each for each in path.glob("*") if is_readable_run(each)]
    return sorted(inside) or [path]


@contextmanager
def text_of_runs(config: Config, out: Path | None, name: str) -> Iterator[tuple[Path, Corpus]]:
    """Yield the folder of new runs, by default runs/NAME-TEXT, and the text that they share."""
    name = f"{name}-{slug(find_text(config.text).name)}"
    with (
        catch_signals(),
        output_folder(out, name) as folder,
        shared_text(config, folder, console.LoadingProgress()) as corpus,
    ):
        yield folder, corpus


def train_models(
    request: Request, out: Path | None, models: str, plot: Path | None, *, json_: bool
) -> None:
    """Train and evaluate the models with progress bars, and print the comparison."""
    config, fixed_keys = request.resolved
    names = list(dict.fromkeys(name.strip() for name in models.split(",") if name.strip()))
    if not names:
        raise ConfigError("--models names no model; give bigram, gpt or both")
    for name in names:  # before any training
        comparison.model_config(config, name)
        if out and (out / name).exists():
            raise ConfigError(f"{out / name} exists; name another folder with --out")
    deadline, budget = None, None
    if request.budget is not None:
        deadline, fixed_keys = request.deadline()
    config = with_measured_threads(config)
    with text_of_runs(config, out, "compare") as (folder, corpus):
        path = shlex.quote(str(folder))
        max_tokens = comparison.MAX_TOKENS
        try:
            if deadline is not None:
                config, corpus, budget = plan_run(config, corpus, deadline, fixed_keys)
                max_tokens = config.train.evaluation_tokens
            result = comparison.compare_models(
                config,
                folder,
                models=names,
                run_session=run_session,
                corpus=corpus,
                budget=budget,
                max_tokens=max_tokens,
                show_progress=console.show_progress,
            )
        except (KeyboardInterrupt, Stopped):
            if any(map(is_run, folder.glob("*"))):
                console.say(f"the runs so far are in {path}; `chargpt compare {path}` scores them")
            raise
    print_comparison(result, plot or folder / "curves.svg", json_=json_)
    if budget is not None and (late := budget.deadline.late_note()) is not None:
        console.say(late)
    if not json_:
        console.out(f"the runs are in {folder}; next:")
        for name in names:
            console.out(f"  chargpt sample {shlex.quote(str(folder / name))}")


def run_session(name: str, session: Session) -> None:
    """Run all steps of a model with its plan and a progress bar."""
    console.say(f"== {name} ==")
    show_plan(session)
    run_steps(session)


def run_rung(name: str, session: Session) -> None:
    """Run all steps of a rung, whose plan is that of the others, with a progress bar."""
    console.say(f"== {name} ==")
    run_steps(session)


def print_comparison(result: Comparison, plot: Path | None, *, json_: bool) -> None:
    """Draw the loss curves, if a file is given, and print the comparison."""
    if plot is not None:
        plots.save(plots.loss_curves(result.curves, result.curve_baselines, result.title), plot)
    if json_:
        console.out_json(
            {
                "rows": [row.as_dict() for row in result.rows],
                "baselines": dict(result.baselines),
                "summary": comparison.conclusions(result),
                "plot": plot and str(plot),
            }
        )
        return
    print_rows(result)
    for name, text in result.samples.items():
        tables.panel(f"sample of {name}", text)
    if plot is not None:
        console.out(f"plot: {plot}")


def print_rows(result: Comparison) -> None:
    """Print the table, the gain of the GPT, and a sparkline per run."""

    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    tables.table(
        ["model", "parameters", "seconds", "nats/char", "bits/char", "perplexity"],
        [
            [
                row.model,
                cell(row.parameters, ","),
                cell(row.seconds, ",.1f"),
                *loss_cells(row.nats_per_char),
            ]
            for row in result.rows
        ],
        title=f"{result.title}: loss on {result.scored_on}",
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


def compare_rungs(
    config: Config, out: Path | None, n_seeds: int, plot: Path | None, *, json_: bool
) -> None:
    """Train the rungs with progress bars, draw them, and print the table or the JSON."""
    with text_of_runs(config, out, "ladder") as (folder, corpus):
        ladder = run_ladder(config, folder, corpus, n_seeds, run_rung)
    plot = plot or folder / "ladder.svg"
    plots.save(plots.ladder(ladder), plot)
    if json_:
        console.out_json({**ladder.as_dict(), "plot": str(plot)})
        return
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
        cells = [f"{result.parameters:,}", *loss_cells(result.loss.value)[:2]]
        margin = "-" if result.loss.margin is None else f"± {result.loss.margin:.4f}"
        rows.append([result.rung.name, *cells, margin, f"{result.seconds:.1f}"])
    tables.table(
        ["model", "parameters", "nats/char", "bits/char", "95% CI", "seconds"],
        rows,
        title=f"{ladder.title}: loss on the first {ladder.characters:,} validation characters, "
        "protocol blocks",
    )
    sentences = [
        f"{result.rung.name}: {describe_gain(result.gain)} ({result.rung.adds})"
        for result in ladder.results
        if result.gain is not None
    ]
    sentences.append(
        f"one scaled attention head: {describe_gain(ladder.attention_gain)} than the bigram; "
        f"gpt: {describe_gain(ladder.total_gain)} than the bigram"
    )
    first = ladder.results[0]
    note = undertrained({first.rung.name: first.loss.value, **ladder.ngrams})
    if note is not None:
        sentences.append(note)
    if ladder.compressor_losses:
        sentences.append(
            "compressors: the size of both splits together minus that of the training split"
        )
    if len(first.nats) > 1:
        sentences.append(
            "±: half a 95% confidence interval (Student's t); gains are paired by seed"
        )
    console.out_sentence("\n".join(sentences))
    for result in ladder.results:
        text = " / ".join(result.sample[:MAX_SAMPLE].split("\n"))
        console.out_sentence(f"-- {result.rung.name} --\n{text}")


def describe_gain(gain: Estimate) -> str:
    """Return a gain as `0.1234 ± 0.0123 nats per character lower`."""
    absolute = Estimate(abs(gain.value), gain.margin)
    return f"{absolute} nats per character {'lower' if gain.value >= 0 else 'higher'}"
