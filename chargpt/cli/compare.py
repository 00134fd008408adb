"""`chargpt compare`: baselines, a bigram and a GPT on the same text, or existing runs."""

import csv
import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from chargpt.analysis import plots
from chargpt.analysis.compare import (
    MODELS,
    PLUS_MINUS_OF_SEEDS,
    Comparison,
    ScoredSplit,
    TrainingsOf,
    compare_runs,
    conclusions,
    sweep_of,
    undertrained,
)
from chargpt.analysis.ladder import GPT, ONE_HEAD, Ladder, ladder_rungs
from chargpt.analysis.result import MIN_RISE, loss_cells
from chargpt.cli import console, options, tables
from chargpt.cli.main import catch_signals
from chargpt.cli.train import LABEL, describe_plan, run_steps
from chargpt.config import parse_override, shipped_configs, split_values
from chargpt.errors import ConfigError, Stopped
from chargpt.files import quoted, reading
from chargpt.outputs import require_new_output, require_no_link, require_output, write_new
from chargpt.store.layout import find_runs, is_run
from chargpt.text.display import one_line
from chargpt.training.start import Request, Session

MAX_SAMPLE = 150  # characters of a rung's sample
MAX_SAMPLES = 4  # printed
SPARKS = 16  # columns of a sparkline, so that its line fits 80
STDOUT = Path("-")
CSV_COLUMNS = (
    *("model", "seed", "nats_per_char", "bits_per_char", "perplexity", "parameters", "seconds"),
    *("step", "run"),
)


def compare(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT|RUN", help="A text to train on, or runs to compare."),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Configs whose models to train, by name or file; {','.join(MODELS)} by default.",
        ),
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
    plots.require_suffix(plot)
    require_output(plot or (out and plot_in(out, is_ladder=ladder)))
    if csv_ not in (None, STDOUT):
        require_new_output(csv_)
    if json_ and csv_ == STDOUT:
        raise ConfigError("--json and --csv - both print on stdout; name a file for the CSV")
    words = {word.partition("=")[0].strip(): split_values(word) for word in set_ or ()}
    swept = {
        key: {word.partition("=")[2]: parse_override(word)[1] for word in values}
        for key, values in words.items()
        if len(values) > 1
    }
    sweeps = f"-s {next(iter(swept), '')}=A,B"
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
            result = compare_runs(paths, device or "auto", console.show_progress, split)
    else:
        if len(paths) > 1:
            reject_mixed(paths, models)
        request = Request(
            path=texts[0] if texts else None,
            config=config or ("ladder" if ladder else None),
            settings=settings if device is None else {**settings, "device": device},
            budget=budget,
            out=out,
            started=console.started,
        )
        runs_of = ladder_rungs if ladder else sweep_of(request, models, swept, seeds)
        result = Ladder(split) if ladder else Comparison(split, console.show_progress)
        train(result, request, runs_of, seeds, resume=resume)
    show(result, plot, csv_, json_=json_)


def reject_mixed(paths: list[Path], models: str | None) -> None:
    """Raise for several paths of which not all are runs."""
    missing = [str(path) for path in paths if not path.exists()]
    remedy = "give one text, or only runs"
    if models and missing and set(missing) <= set(shipped_configs()):
        remedy = f"write --models {','.join([models.strip(', '), *missing])}"
    cause = f"{next(path for path in paths if not is_run(path))} is not a run"
    if missing:
        cause = f"there is no file or folder {', '.join(missing)}"
    raise ConfigError(f"{cause}; {remedy}")


def runs_in(path: Path) -> list[Path]:
    """Return the runs in a folder, such as `compare --out` makes; another path itself."""
    with reading(path):
        inside = [] if is_run(path) else [*find_runs(path, depth=1)]
    return sorted(inside) or [path]


def train(
    result: Comparison, request: Request, runs_of: TrainingsOf, n_seeds: int, *, resume: bool
) -> None:
    """Train the runs with progress bars; say how a comparison that is stopped goes on."""

    def run_session(name: str, session: Session) -> None:
        console.say(f"== {name} ==")
        if not isinstance(result, Ladder):  # whose runs differ little
            console.say(*describe_plan(session), hanging=LABEL * " ")
        run_steps(session, says_resume=False)

    loading = console.LoadingProgress()
    with catch_signals():
        try:
            result.train(request, runs_of, run_session, n_seeds, resume=resume, on_progress=loading)
        except (KeyboardInterrupt, Stopped):
            if result.folder is not None and any(find_runs(result.folder, depth=1)):
                say_stopped(result.folder, request)
            raise


def say_stopped(folder: Path, request: Request) -> None:
    """Say which commands score the runs of a stopped comparison and train the rest."""
    path = quoted(folder)
    then = "with --budget only a run of it can be resumed, by `chargpt train --resume RUN`"
    if request.budget is None:
        words = [word for word in sys.argv[1:] if word != "--resume"]
        words += ["--resume"] if request.out else ["--out", str(folder), "--resume"]
        then = f"train the rest with\n  {' '.join(map(quoted, ['chargpt', *words]))}"
    console.say(f"the runs so far are in {path}; `chargpt compare {path}` scores them; {then}")


def show(result: Comparison, plot: Path | None, csv_: Path | None, *, json_: bool) -> None:
    """Draw the plot and write the CSV, and print the table, unless stdout is that of the data."""
    if plot is None and result.folder is not None:
        plot = plot_in(result.folder, is_ladder=isinstance(result, Ladder))
    if plot is not None:
        if isinstance(result, Ladder):
            figure = plots.ladder(result)
        else:
            figure = plots.loss_curves(result.curves, result.curve_baselines, result.title)
        plots.save(figure, plot)
    if csv_ is not None:
        write_csv(result, csv_)
    if json_:
        console.out_json({**result.as_dict(), "plot": plot and str(plot)})
    if json_ or csv_ == STDOUT:
        return
    columns, rows = table_of(result)
    tables.table(columns, rows, title=f"{result.title}: loss on {result.scored_on}")
    if "std" in columns:
        console.out_sentence(
            "seconds, nats/char: means over seeds; std: standard deviation (n - 1)"
        )
    if isinstance(result, Ladder):
        print_ladder(result)
    else:
        print_conclusions(result)
    if plot is not None:
        console.out(f"plot: {plot}")
    if result.folder is not None and not isinstance(result, Ladder):
        console.out(f"the runs are in {result.folder}; next:")
        alone = [row for row in result.rows if row.run and row.parameters is not None]
        if len(alone) > len(MODELS):
            alone = [min(alone, key=lambda row: row.nats_per_char)]
        for row in alone:
            console.out(f"  chargpt sample {quoted(row.run)}")


def plot_in(folder: Path, *, is_ladder: bool) -> Path:
    """Return the path of the plot in a comparison's folder, or raise ConfigError for a link."""
    path = folder / ("ladder.svg" if is_ladder else "curves.svg")
    require_no_link(path)
    return path


def write_csv(result: Comparison, path: Path) -> None:
    """Write a row for each run and baseline, with the keys of `--json`; names are printable."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in result.rows:
        cells = row.as_dict().items()
        writer.writerow({k: one_line(v) if isinstance(v, str) else v for k, v in cells})
    if path == STDOUT:
        console.out_text(text.getvalue())
    else:
        write_new(path, text.getvalue().encode())


def print_conclusions(result: Comparison) -> None:
    """Print the gain of the best, a sparkline per run, and samples."""
    for sentence in conclusions(result):
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
    if len(result.samples) <= MAX_SAMPLES:
        for name, text in result.samples.items():
            tables.panel(f"sample of {name}", text)


def table_of(result: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the columns and the rows of the table; of several seeds their means and deviations."""
    rows, has_seeds = [], False
    for group in result.groups.values():
        nats, bits, perplexity = loss_cells(group.loss.value)
        cells = {"nats/char": nats, "bits/char": bits, "perplexity": perplexity}
        numbers = {
            "parameters": (group.rows[0].parameters, "{:,}"),
            "seconds": (group.seconds, "{:,.1f}"),
            "std": (group.std, "{:.4f}"),
            "95% CI": (group.loss.margin, "± {:.4f}"),
        }
        for name, (value, form) in numbers.items():
            cells[name] = "-" if value is None else form.format(value)
        rows.append({"model": group.model} | cells)
        has_seeds |= len(group.rows) > 1
    columns = ["model", "parameters", "seconds", "nats/char", "bits/char", "perplexity"]
    if has_seeds:  # names fit in 80 columns without perplexity
        columns[-2:] = ["std", "bits/char"]
    if isinstance(result, Ladder):
        columns = ["model", "parameters", "nats/char", "bits/char", "95% CI", "seconds"]
    return columns, [[row[column] for column in columns] for row in rows]


def print_ladder(ladder: Ladder) -> None:
    """Print the gain of each rung, and its sample."""
    adds = {training.model: training.adds for training in ladder.trainings}
    head, gpt = (ladder.gain_over_bigram(rung).describe_as_gain() for rung in (ONE_HEAD, GPT))
    sentences = [
        *(
            f"{name}: {gain.describe_as_gain()} ({adds[name]})"
            for name, gain in ladder.gains.items()
        ),
        f"one scaled attention head: {head} than the bigram; gpt: {gpt} than the bigram",
        *undertrained(ladder.groups),
        "compressors: the size of both splits together minus that of the training split",
    ]
    if any(len(group.rows) > 1 for group in ladder.groups.values()):
        sentences.append(PLUS_MINUS_OF_SEEDS)
    console.out_sentence(*sentences)
    for name, sample in ladder.samples.items():
        text = " / ".join(sample[:MAX_SAMPLE].split("\n"))
        console.out_sentence(f"-- {name} --", text)
