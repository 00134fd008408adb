"""`chargpt compare`: baselines, a bigram model and a GPT on one text, or existing runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from chargpt.analysis import compare as analysis
from chargpt.analysis import plots
from chargpt.analysis.compare import MODELS, Comparison
from chargpt.cli import console, options, tables
from chargpt.cli.ladder import print_ladder
from chargpt.cli.loop import run_steps
from chargpt.cli.progress import LoadingProgress
from chargpt.cli.signals import catch_signals
from chargpt.cli.summary import show_plan
from chargpt.config import Config
from chargpt.errors import ConfigError
from chargpt.store.folder import RunFolder, is_run
from chargpt.text.corpus import load_corpus
from chargpt.text.settings import build_config
from chargpt.training.cost import expected_cost
from chargpt.training.session import free_folder, slug
from chargpt.training.trainer import Trainer


def compare(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT | RUN...]", help="A text to train on, or runs to compare."),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option("--models", help="Models to train, comma-separated: bigram,gpt."),
    ] = None,
    config: options.ConfigName = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Folder of the runs.")
    ] = None,
    ladder: Annotated[
        bool,
        typer.Option("--ladder", help="From a bigram to a GPT, adding one component at a time."),
    ] = False,
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds", min=1, max=10, help="Seeds to train each model with; needs --ladder."
        ),
    ] = 1,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Picture to write: .svg or .png.")
    ] = None,
    json_: options.Json = False,
    device: options.Device = None,
    encoding: options.Encoding = None,
    set_: options.Set = None,
) -> None:
    """Train and compare baselines and a GPT on the same text.

    Examples: `chargpt compare novel.txt`, `chargpt compare novel.txt --ladder --seeds 3`,
    `chargpt compare runs/a runs/b --plot curves.png`.
    """
    if plot is not None:
        plots.require_ending(plot)
    paths = [Path(text) for text in texts or []]
    if seeds > 1 and not ladder:
        raise ConfigError("--seeds applies only to --ladder; add --ladder")
    if ladder and models is not None:
        raise ConfigError("--ladder trains a fixed list of models; drop --models")
    if ladder and (len(paths) > 1 or any(is_run(path) for path in paths)):
        raise ConfigError("--ladder needs one text; name no runs")
    if paths and all(is_run(path) for path in paths):
        folder = paths[0].parent
        comparison = analysis.compare_runs(paths, device or "auto")
    elif len(paths) > 1:
        no_run = next(path for path in paths if not is_run(path))
        raise ConfigError(f"{no_run} is not a run; name one text, or only runs")
    else:
        settings = build_config(
            texts[0] if texts else None,
            config or ("ladder" if ladder else None),
            set_ or (),
            device=device,
            encoding=encoding,
        )
        if ladder:
            print_ladder(settings, out, seeds, plot, json_=json_)
            return
        names = [name.strip() for name in (models or ",".join(MODELS)).split(",") if name.strip()]
        comparison, folder = train_models(settings, out, names)
    figure = plots.loss_curves(comparison.curves, comparison.baselines, comparison.title)
    picture = plots.save(figure, plot or folder / "curves.svg")
    if json_:
        rows = [row.as_dict() for row in comparison.rows]
        console.out(json.dumps({"rows": rows, "picture": str(picture)}, ensure_ascii=False))
        return
    print_comparison(comparison)
    console.out(f"loss curves: {picture}")


def train_models(
    settings: Config, out: Path | None, names: Sequence[str]
) -> tuple[Comparison, Path]:
    """Train models with progress bars; return their comparison and the folder of the runs."""
    corpus = load_corpus(settings.text, progress=LoadingProgress())
    folder = out or free_folder(f"compare-{slug(corpus.name)}")

    def run_trainer(name: str, trainer: Trainer) -> None:
        console.say(f"== {name} ==")
        show_plan(trainer, expected_cost(trainer.config, trainer.learner, 0))
        run_steps(trainer, RunFolder(folder / name), signals)

    with catch_signals() as signals:
        comparison = analysis.compare(
            settings, folder, models=names, run_trainer=run_trainer, corpus=corpus
        )
    return comparison, folder


def print_comparison(comparison: Comparison) -> None:
    """Print the table, the gain of attention, loss curves and samples."""
    tables.table(
        ["model", "parameters", "seconds", "nats/char", "bits/char", "perplexity"],
        [
            [
                row.model,
                "-" if row.parameters is None else f"{row.parameters:,}",
                "-" if row.seconds is None else f"{row.seconds:,.1f}",
                *console.loss_cells(row.nats_per_char),
            ]
            for row in comparison.rows
        ],
        title=f"{comparison.title}: validation loss, protocol full",
    )
    nats = {row.model: row.nats_per_char for row in comparison.rows}
    bigram, gpt = nats.get("bigram (trained)"), nats.get("gpt (trained)")
    if bigram is not None and gpt is not None:
        comparative = "better" if gpt <= bigram else "worse"
        console.out(
            f"attention is {abs(bigram - gpt):.3f} nats per character {comparative} than the bigram"
        )
    for name, points in comparison.curves.items():
        bars = console.sparkline([loss for _, loss in points])
        if bars:
            console.out(f"{name:18} {bars} {points[0][1]:.3f} -> {points[-1][1]:.3f}")
    tables.side_by_side(list(comparison.samples), list(comparison.samples.values()))
