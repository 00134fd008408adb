"""`chargpt evaluate`: how well a run predicts a text."""

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from chargpt.cli import console, options, runs, tables
from chargpt.cli.progress import ProgressBar
from chargpt.errors import ConfigError
from chargpt.inference import evaluation
from chargpt.inference.evaluation import Evaluation
from chargpt.inference.windows import Protocol
from chargpt.store.run import Run


def evaluate(
    run: options.RunOrNewest = None,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="Another text to measure on.")
    ] = None,
    split: Annotated[
        Literal["train", "val", "test"] | None,
        typer.Option("--split", help="Part of the run's text; val by default."),
    ] = None,
    protocol: Annotated[
        Protocol,
        typer.Option("--protocol", help="How the loss is measured."),
    ] = "full",
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride", metavar="N", min=1, help="Step of the sliding window; default half a block."
        ),
    ] = None,
    checkpoint: options.Checkpoint = "best",
    unknown: options.UnknownPolicy = None,
    json_: options.Json = False,
    device: options.Device = None,
    encoding: options.Encoding = None,
    encoding_errors: options.EncodingErrors = None,
) -> None:
    """Evaluate a run's loss on its own text or another.

    Examples: `chargpt evaluate`, `chargpt evaluate runs/novel --protocol sliding --json`,
    `chargpt evaluate runs/novel --text other.txt --unknown skip`.
    """
    if stride is not None and protocol != "sliding":
        raise ConfigError("--stride applies only to --protocol sliding; add it")
    if split is not None and text is not None:
        raise ConfigError("--text is measured as a whole; drop --split, a part of the run's text")
    split = split or "val"
    loaded = runs.load_named_run(run, checkpoint, device, choose_threads=True)
    changes = {
        "text.encoding": encoding,
        "text.encoding_errors": encoding_errors,
        "text.unknown": unknown,
    }
    wanted = {key: value for key, value in changes.items() if value is not None}
    if wanted and text is None:
        raise ConfigError(
            "--encoding, --encoding-errors and --unknown concern another text; name it with --text"
        )
    loaded = replace(loaded, config=loaded.config.with_values(wanted))
    start = time.perf_counter()
    with closing(ProgressBar(1, "character")) as bar:
        result = evaluation.evaluate(
            loaded, split, protocol, text, stride=stride, on_progress=bar.callback("scored")
        )
    seconds = time.perf_counter() - start
    console.say_unknown(result.unknown, loaded.config.text.unknown)
    name = str(text) if text else loaded.state.text
    if json_:
        facts = {
            **result.as_dict(),
            "parameters": loaded.model.parameter_count(),
            "steps": loaded.step,
            "seconds": round(seconds, 3),
            "chars_per_second": round(result.characters / seconds),
            "text": name,
            "run": str(loaded.folder),
        }
        console.out_json(facts)
        return
    part = "all of it" if text else f"{split} split"
    show(loaded, result, f"{name}, {part}", seconds)


def show(loaded: Run, result: Evaluation, title: str, seconds: float) -> None:
    """Print what was measured as a table."""
    tables.table(
        ["model", "nats/char", "bits/char", "perplexity", "accuracy", "std error"],
        [
            [
                f"{loaded.config.model.kind}, step {loaded.step:,}",
                *console.loss_cells(result.nats_per_char),
                f"{result.accuracy:.2%}",
                f"{result.standard_error:.4f}",
            ]
        ],
        title=f"{title}: protocol {result.protocol}, T = {result.block_size}",
    )
    console.out(
        f"{console.characters(result.characters)} scored in {console.duration(seconds)} "
        f"({console.short(result.characters / seconds)} characters/s) on "
        f"{next(loaded.model.parameters()).device.type}"
    )
    if result.protocol == "nanogpt":
        console.out_sentence("its random blocks overlap: the standard error is too small")
