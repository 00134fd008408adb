"""`chargpt train`: a text in, a trained model out."""

from pathlib import Path
from typing import Annotated

import typer

from chargpt.cli import console, options
from chargpt.cli.loop import run_steps, show_plan
from chargpt.cli.progress import LoadingProgress
from chargpt.cli.signals import catch_signals
from chargpt.errors import ConfigError, FinishedError
from chargpt.training.start import DEFAULT_BUDGET, Request, StartMode, open_session


def train(
    text: Annotated[
        str | None,
        typer.Argument(
            help="A file, folder (of .txt, .md and .gz files), glob, name from `chargpt data "
            "list`, or - for standard input; with --resume, a run. Without it: the built-in "
            "text; with --resume, the newest run.",
            show_default=False,
        ),
    ] = None,
    config: options.ConfigName = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="RUN", help="The run's folder; a new one in runs/ by default."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Total time, as in 30s, 3m or 1h: model size and steps are chosen to fit. "
            f"Without -c and settings of model or training: {DEFAULT_BUDGET}.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume a run; with a text and --out, start it if it has no checkpoint yet.",
        ),
    ] = False,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="Start from the weights of this run, of another text."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the run in --out, which is renamed to OUT.old.")
    ] = False,
    seed: options.Seed = None,
    json_: options.Json = False,
    device: options.Device = None,
    encoding: options.Encoding = None,
    encoding_errors: options.EncodingErrors = None,
    set_: options.Set = None,
) -> None:
    """Train a model on a text.

    Without a text: on one that comes with Python.

    Examples: `chargpt train`, `chargpt train novel.txt --budget 10m`,
    `chargpt train novel.txt -c bigram -s train.max_steps=500`, `chargpt train --resume`; a list of
    items: `chargpt train names.txt -s text.documents=lines`.
    """
    settings = options.given_settings(
        set_,
        seed=seed,
        device=device,
        encoding=encoding,
        encoding_errors=encoding_errors,
    )
    if from_ is not None:
        settings["train.from_run"] = str(from_.absolute())
    request = Request(
        path=text,
        config=config,
        settings=settings,
        budget=budget,
        out=out,
        start=start_mode(text, out, resume=resume, force=force),
        started=console.started,
    )
    what = "the checkpoint" if request.start is StartMode.RESUME else "measuring the speed"
    slow = f"reading the text and {what} ..."
    try:
        with (
            catch_signals(),
            console.say_if_slow(slow) as notice,
            open_session(request, LoadingProgress(notice.cancel)) as session,
        ):
            notice.cancel()
            show_plan(session)
            run_steps(session)
            if session.trainer.group.is_main:
                from chargpt.cli.summary import show_result  # which would delay the first step

                show_result(session, json_=json_)
            session.trainer.group.broadcast(0.0)  # other ranks wait until rank 0 has saved
    except FinishedError as error:
        if request.start is not StartMode.NEW_OR_RESUME:
            raise
        console.say(str(error))


def start_mode(text: str | None, out: Path | None, *, resume: bool, force: bool) -> StartMode:
    """Return what --resume and --force ask for."""
    if resume and force:
        raise ConfigError("--resume continues a run and --force replaces it; give one of them")
    if resume:
        has_both = text is not None and out is not None
        return StartMode.NEW_OR_RESUME if has_both else StartMode.RESUME
    return StartMode.REPLACE if force else StartMode.NEW
