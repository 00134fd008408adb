"""`chargpt compare`: what attention gains over a bigram, on your text."""

import json
from pathlib import Path
from typing import Annotated

import typer

from chargpt.analysis import compare as comparison
from chargpt.analysis import plots
from chargpt.analysis.compare import Comparison
from chargpt.cli import console, options, tables
from chargpt.cli.ladder import climb_and_show
from chargpt.cli.loop import run_steps
from chargpt.cli.progress import LoadingProgress
from chargpt.cli.signals import catch_signals
from chargpt.cli.summary import show_plan
from chargpt.config import Config
from chargpt.errors import ConfigError
from chargpt.store.folder import is_run
from chargpt.text.corpus import load_corpus
from chargpt.text.settings import build_config
from chargpt.training.cost import expected_cost
from chargpt.training.session import free_folder, slug
from chargpt.training.trainer import Trainer


def compare(
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT | RUN...]", help="A text to train on, or runs to set side by side."
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option("--models", help="Models to train, with commas between: bigram,gpt."),
    ] = None,
    config: options.ConfigName = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Where the runs go.")
    ] = None,
    ladder: Annotated[
        bool,
        typer.Option("--ladder", help="From a bigram to a GPT, one idea at a time."),
    ] = False,
    seeds: Annotated[
        int,
        typer.Option("--seeds", min=1, max=10, help="With --ladder: train each rung so often."),
    ] = 1,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="The picture: .svg or .png.")
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
        raise ConfigError("--seeds says how often each rung is trained; give --ladder too")
    if ladder and models is not None:
        raise ConfigError("--ladder trains its own models; drop --models")
    if ladder:
        if len(paths) > 1 or any(is_run(path) for path in paths):
            raise ConfigError("--ladder trains on one text; give that, and no run")
        settings = build_config(
            texts[0] if texts else None,
            config or "ladder",
            set_ or (),
            device=device,
            encoding=encoding,
        )
        climb_and_show(settings, out, seeds, plot, json_=json_)
        return
    if paths and all(is_run(path) for path in paths):
        folder = paths[0].parent
        found = comparison.compare_runs(paths, device or "auto")
    elif len(paths) > 1:
        odd = next(path for path in paths if not is_run(path))
        raise ConfigError(f"{odd} is not a run; give one text, or runs only")
    else:
        settings = build_config(
            texts[0] if texts else None, config, set_ or (), device=device, encoding=encoding
        )
        found, folder = _train(settings, out, models or "bigram,gpt")
    figure = plots.loss_curves(found.curves, found.lines, found.title)
    picture = plots.save(figure, plot or folder / "curves.svg")
    if json_:
        rows = [row.as_dict() for row in found.rows]
        console.out(json.dumps({"rows": rows, "picture": str(picture)}, ensure_ascii=False))
        return
    _show(found)
    console.out(f"loss curves: {picture}")


def _train(settings: Config, out: Path | None, models: str) -> tuple[Comparison, Path]:
    corpus = load_corpus(settings.text, progress=LoadingProgress())
    folder = out or free_folder(f"compare-{slug(corpus.name)}")

    def run_trainer(name: str, trainer: Trainer) -> None:
        console.say(f"== {name} ==")
        show_plan(trainer, expected_cost(trainer.config, trainer.learner, 0))
        assert trainer.folder is not None
        run_steps(trainer, trainer.folder, signals)

    names = [name.strip() for name in models.split(",") if name.strip()]
    with catch_signals() as signals:
        return comparison.compare(
            settings, folder, models=names, watch=run_trainer, corpus=corpus
        ), folder


def _show(found: Comparison) -> None:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    tables.table(
        ["model", "parameters", "seconds", "nats/char", "bits/char", "perplexity"],
        [
            [
                row.model,
                cell(row.parameters, ","),
                cell(row.seconds, ",.1f"),
                *console.loss_cells(row.nats_per_char),
            ]
            for row in found.rows
        ],
        title=f"{found.title}: validation loss, protocol full",
    )
    trained = {row.model: row.nats_per_char for row in found.rows}
    bigram, gpt = trained.get("bigram (trained)"), trained.get("gpt (trained)")
    if bigram is not None and gpt is not None:
        verb = "gains" if gpt <= bigram else "loses"
        console.out(f"attention {verb} {abs(bigram - gpt):.3f} nats per character over the bigram")
    for name, points in found.curves.items():
        line = console.sparkline([nats for _, nats in points])
        if line:
            console.out(f"{name:18} {line} {points[0][1]:.3f} -> {points[-1][1]:.3f}")
    tables.side_by_side(list(found.samples), list(found.samples.values()))
