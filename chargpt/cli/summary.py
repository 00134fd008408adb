"""What `chargpt train` says before the first step and after the last."""

import shlex
from typing import TYPE_CHECKING, Any

from chargpt.cli import console
from chargpt.cli.loop import REPORTED_SECONDS, Clock

if TYPE_CHECKING:
    from chargpt.store.folder import RunFolder
    from chargpt.training.trainer import Trainer


def show_plan(trainer: "Trainer", clock: Clock | None = None) -> None:
    """Say in a few lines what is about to happen. Without a budget, it measures a few steps.

    To be called on every rank.
    """
    from chargpt.training.estimate import estimate

    config, corpus = trainer.config, trainer.corpus
    plan = estimate(trainer, clock.left if clock else None)
    unknown = f", {corpus.unknown_fraction:.2%} of them unknown" if corpus.unknown_fraction else ""
    lengths = ", ".join(
        f"{len(corpus.split(name)):,} {name}"
        for name in ("train", "val", "test")
        if len(corpus.split(name))
    )
    threads = ""
    if trainer.device.type == "cpu":
        import torch

        threads = f", {torch.get_num_threads()} threads"
    ranks = f" x {trainer.group.size} processes" if trainer.group.size > 1 else ""
    console.say(
        f"text    {corpus.name}: {console.characters(len(corpus.tokens))} ({lengths}){unknown}\n"
        f"vocab   {corpus.tokenizer.vocab_size:,} characters\n"
        f"model   {describe_model(config.model)}, {plan.parameters:,} parameters\n"
        f"device  {trainer.device.type}{ranks} ({trainer.device_reason}{threads}), "
        f"{config.dtype} ({trainer.dtype_reason})\n"
        f"plan    {plan.steps:,} steps x {config.train.batch_size} blocks x "
        f"{config.model.block_size} = {console.short(plan.characters)} characters "
        f"({plan.epochs:.1f} epochs)\n"
        f"needs   about {console.size(plan.memory_bytes)} of memory and "
        f"{console.duration(plan.seconds)}"
    )


def describe_model(model: Any) -> str:
    """Return a model's settings in a few words."""
    if model.kind == "bigram":
        return "bigram table"
    heads = "1 head" if model.n_head == 1 else f"{model.n_head} heads"
    attention = {"full": heads, "average": "average", "none": "no attention"}
    return (
        f"gpt {model.n_layer} layers x {model.n_embd} wide, {attention[model.attention]}, "
        f"block {model.block_size}"
    )


def show_result(
    trainer: "Trainer", folder: "RunFolder", levels: dict[str, float], clock: Clock | None = None
) -> None:
    """Print the closing table and a verdict, make the report, and say how to go on."""
    from chargpt.analysis.result import result_of, verdict
    from chargpt.store.run import load_run

    best = load_run(folder.path, "best", trainer.device.type)
    result = result_of(best, trainer.corpus, levels)
    console.table(
        ["model", "split", "nats/char", "bits/char", "perplexity"],
        [
            [name, split, *console.loss_cells(nats)]
            for name, split, nats in result.rows(best.config.model.kind)
        ],
    )
    for sentence in verdict(best, result, folder.metrics.records()):
        console.out(sentence)
    path = shlex.quote(str(folder.path))
    step = trainer.progress.step
    console.out(
        f"trained {step:,} steps in {console.duration(trainer.progress.seconds)}; "
        f"the best checkpoint is step {best.step:,}"
    )
    reported = clock.reports if clock else trainer.progress.seconds >= REPORTED_SECONDS
    console.out(
        f"the run is in {path}; go on with any of\n"
        f"  chargpt sample {path}\n"
        f"  chargpt evaluate {path}\n"
        + ("" if reported else f"  chargpt report {path}\n")
        + f"  chargpt train --resume {path} -s train.max_steps={2 * step}"
    )
    if reported:
        from chargpt.analysis.report import write_report
        from chargpt.errors import ChargptError

        try:
            page = write_report(best, corpus=trainer.corpus, result=result)
        except (ChargptError, OSError) as error:  # the run is done and saved all the same
            console.say(f"no report: {error}; `chargpt report {path}` tries again")
        else:
            console.out(f"all about it on one page: {page}")
