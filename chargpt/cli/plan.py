"""`chargpt plan`: what a budget would train, before any training."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from chargpt.cli import console, options, tables
from chargpt.cli.main import catch_signals
from chargpt.cli.train import LABEL, describe_model, describe_plan
from chargpt.errors import ConfigError
from chargpt.text.corpus import Corpus
from chargpt.text.source import MAX_TEXT_BYTES
from chargpt.training.performance import (
    GPUS,
    HOST_GPUS,
    LAYER_SECONDS,
    UTILISATION,
    Gpu,
    PlannedRun,
    ScaledCorpus,
    launch_seconds,
    n_worth_having,
    plan_on_gpus,
    planned_run,
    sample_corpus,
)
from chargpt.training.start import DEFAULT_BUDGET, Request, open_session

MIN_CHARACTERS, MAX_CHARACTERS = 1000, 1e15
DEFAULT_GPU = "h100"


def plan(
    text: Annotated[
        str | None,
        typer.Argument(
            help="A file, folder, glob or name. Without it: the text that comes with Python.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Total time, as in 30s, 3m or 1h.")
    ] = DEFAULT_BUDGET,
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=100_000,
            help="Plan on paper, for up to N GPUs. Without it: for this machine, from measured "
            "steps.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"Their kind: {', '.join(GPUS)}; {DEFAULT_GPU} by default."
        ),
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            help="Bandwidth of the slowest link between them; by default that of hosts with "
            f"{HOST_GPUS} GPUs of this kind.",
        ),
    ] = None,
    characters: Annotated[
        float | None,
        typer.Option(
            metavar="N", help="Plan for a text of N characters, as in 1e12, like this one."
        ),
    ] = None,
    config: options.ConfigName = None,
    json_: options.Json = False,
    set_: options.Set = None,
) -> None:
    """Print what a time budget would train, without training it.

    With --gpus the step time is computed, not measured. A table shows how many GPUs are worth
    having.

    Examples: `chargpt plan novel.txt --budget 10m`, `chargpt plan novel.txt --budget 1h --gpus 64`,
    `chargpt plan --characters 1e12 --budget 168h --gpus 1000 --gpu h200`.
    """
    request = Request(
        path=text, config=config, settings=options.given_settings(set_), budget=budget
    )
    if (kind := request.resolved[0].model.kind) != "gpt":
        raise ConfigError(
            f"the scaling law predicts the loss of model.kind=gpt, not of {kind}; drop it"
        )
    if gpus is None:
        given = {"--gpu": gpu, "--link": link, "--characters": characters}
        options.reject(given, "applies to a plan on paper, with --gpus N")
        plan_here(request, json_=json_)
        return
    card = given_gpu(gpu or DEFAULT_GPU, link)
    if characters is not None and not MIN_CHARACTERS <= characters <= MAX_CHARACTERS:
        raise ConfigError(
            f"--characters {characters:g} is not from {MIN_CHARACTERS:,} to {MAX_CHARACTERS:.0e}; "
            "correct it"
        )
    (deadline, fixed_keys), settings = request.deadline(), request.resolved[0]
    assert deadline is not None, "there is a budget"
    corpus = sample_corpus(settings.text, characters)
    numbers = [2**power for power in range(gpus.bit_length()) if 2**power < gpus]
    runs = [
        plan_on_gpus(settings, corpus, deadline.seconds, fixed_keys, card, number)
        for number in (*numbers, gpus)
    ]
    n_useful = n_worth_having(runs)
    notes = [verdict(runs, n_useful)] if gpus > 1 else []
    notes += [*runs[-1].notes, *limits(corpus, card)]
    if json_:
        found = {"gpu": card.name, "runs": [as_json(run) for run in runs]}
        console.out_json({**found, "gpus_worth_having": runs[n_useful - 1].gpus, "notes": notes})
        return
    print_plan(corpus, card, runs)
    for note in notes:
        console.out_sentence(f"note: {note}")


def plan_here(request: Request, *, json_: bool) -> None:
    """Print the plan of `train` on this machine, by a session that ends before its first step."""
    with (
        tempfile.TemporaryDirectory(prefix="chargpt-") as folder,
        catch_signals(),
        console.say_if_slow("reading the text ..."),
        open_session(
            replace(request, out=Path(folder, "run"), started=console.started),
            console.LoadingProgress(),
        ) as session,
    ):
        assert session.pace is not None, "there is a budget"
        trainer, speed = session.trainer, session.pace.speed
        run = planned_run(trainer.config, trainer.corpus, speed, trainer.group.world_size)
        if json_:
            console.out_json(as_json(run))
            return
        console.out_sentence(*describe_plan(session), hanging=LABEL * " ")
        console.out_sentence(describe_loss(run))


def given_gpu(name: str, link: float | None) -> Gpu:
    """Return the card of that name, with another bandwidth, in GB/s, if one is given."""
    if (card := GPUS.get(name.lower())) is None:
        raise ConfigError(f"--gpu {name:.40} is not known; it is one of {', '.join(GPUS)}")
    if link is None:
        return card
    if not 0 < link < float("inf"):
        raise ConfigError(f"--link {link:g} is not a bandwidth in GB/s; give a number above 0")
    return replace(card, link=1e9 * link, network=1e9 * link)


def as_json(run: PlannedRun) -> dict[str, Any]:
    """Return a planned run, its config as the settings that differ between plans."""
    model, train = run.config.model, run.config.train
    return {
        **{key: value for key, value in vars(run).items() if key not in ("config", "notes")},
        **{key: getattr(model, key) for key in ("n_layer", "n_head", "n_embd", "block_size")},
        "batch_size": train.batch_size,
        "max_steps": train.max_steps,
        "seconds": run.seconds,
    }


def describe_loss(run: PlannedRun) -> str:
    """Return the predicted loss, and where the prediction comes from."""
    return (
        f"loss    {run.nats_per_character:.4f} nats/char, predicted for a text like Tiny "
        "Shakespeare, on which the scaling law was fitted"
    )


def print_plan(corpus: Corpus, card: Gpu, runs: list[PlannedRun]) -> None:
    """Print the plan for the most GPUs, and a table of fewer and more."""
    run, about = runs[-1], "about " if isinstance(corpus, ScaledCorpus) else ""
    model, train = run.config.model, run.config.train
    sent = (
        f", {1000 * run.communication_seconds:,.2f} ms of it to send "
        f"{console.size(run.communication_bytes)} from each GPU at "
        f"{console.size(card.bandwidth(run.gpus))}/s"
    )
    console.out_sentence(
        f"text    {corpus.name}: {about}{console.short(run.characters / run.epochs)} characters to "
        "train on",
        f"vocab   {corpus.tokenizer.describe()}",
        f"model   {describe_model(model)}, {run.parameters:,} parameters",
        f"device  {run.gpus:,} x {card.name}: {console.size(run.memory_bytes)} of "
        f"{console.size(card.memory)} of memory each",
        f"plan    {train.max_steps:,} steps x {train.batch_size:,} sequences x {model.block_size} "
        f"tokens = {console.short(run.characters)} characters ({console.short(run.epochs)} epochs"
        f"{f' of {n + 1} models in turn' if (n := len(train.students)) else ''}) "
        f"in {console.duration(run.seconds)}",
        f"step    {1000 * run.step_seconds:,.2f} ms{sent if run.gpus > 1 else ''}",
        f"{describe_loss(run)}",
        hanging=LABEL * " ",
    )
    if len(runs) == 1:
        return
    tables.table(
        ["GPUs", "parameters", "batch", "characters", "time", "ms/step", "link", "nats/char"],
        [
            [
                f"{each.gpus:,}",
                console.short(each.parameters),
                f"{each.config.train.batch_size:,}",
                console.short(each.characters),
                console.duration(each.seconds),
                f"{1000 * each.step_seconds:,.2f}",
                f"{each.communication_seconds / each.step_seconds:.0%}",
                f"{each.nats_per_character:.4f}" if each.gpus <= each.useful_gpus else "-",
            ]
            for each in runs
        ],
    )


def verdict(runs: list[PlannedRun], n_useful: int) -> str:
    """Return how many of the GPUs are worth having, and why more are not."""
    last, cause = runs[n_useful - 1], "each doubling computes at least 1.2 times as fast"
    if n_useful < len(runs):
        more = runs[n_useful]
        cause = (
            f"{more.gpus:,} compute only {more.speed / last.speed:.2f} times as fast, with "
            f"{launch_seconds(more.config) / more.step_seconds:.0%} of a step for kernel launches "
            f"and {more.communication_seconds / more.step_seconds:.0%} for communication"
        )
        if more.gpus > more.useful_gpus:
            cause = (
                f"{more.gpus:,} are more than the {more.useful_gpus:,} sequences of the batch that "
                "is best"
            )
    verb = "is" if last.gpus == 1 else "are"
    return f"{last.gpus:,} of the {runs[-1].gpus:,} GPUs {verb} worth having: {cause}"


def limits(corpus: Corpus, card: Gpu) -> list[str]:
    """Return what a plan on paper takes for granted, and what it leaves out."""
    found = [
        f"assumed: a step, in CUDA graphs and without soft targets, takes {1000 * LAYER_SECONDS:g} "
        f"ms per layer and computes at {UTILISATION:.0%} of {card.flops / 1e12:,.0f} TFLOP/s, as "
        "those of an H200 did within a fifth; the start of the command takes no time",
        f"assumed: gradients and updates are exchanged at {console.size(card.link)}/s in a host of "
        f"{HOST_GPUS} GPUs and at {console.size(card.network)}/s between hosts, after the backward "
        "pass",
    ]
    if len(corpus.split("train")) > MAX_TEXT_BYTES:
        found.append(f"train reads no text of over {MAX_TEXT_BYTES / 1e9:,.0f} GB: give it a part")
    return found
