"""What `chargpt train` prints before the first step and after the last."""

import shlex

import torch

from chargpt.analysis.report import write_report
from chargpt.analysis.result import RunScores, score_run, summarize
from chargpt.cli import console, tables
from chargpt.config import ModelConfig
from chargpt.errors import ChargptError
from chargpt.inference.baselines import Baselines
from chargpt.store.run import Run, load_run
from chargpt.training.budget import RESERVE, Budget
from chargpt.training.cost import Cost
from chargpt.training.planner import Plan
from chargpt.training.session import Session
from chargpt.training.trainer import Trainer


def show_budget(plan: Plan, budget: Budget) -> None:
    """Print what a time budget has chosen, and why."""
    reason = "the size with the lowest expected loss" if plan.chooses_size else "the model as set"
    seconds = console.duration(budget.seconds)
    console.say(f"budget  {seconds}: {plan.speed:,.0f} characters/s measured; {reason}")


def show_plan(trainer: Trainer, cost: Cost) -> None:
    """Print what is about to be trained, for how long, and on what."""
    config, corpus = trainer.config, trainer.corpus
    unknown = f", {corpus.unknown_fraction:.2%} of them unknown" if corpus.unknown_fraction else ""
    lengths = ", ".join(
        f"{len(corpus.split(name)):,} {name}"
        for name in ("train", "val", "test")
        if len(corpus.split(name))
    )
    threads = f", {torch.get_num_threads()} threads" if trainer.device.type == "cpu" else ""
    ranks = f" x {trainer.group.size} processes" if trainer.group.size > 1 else ""
    console.say(
        f"text    {corpus.name}: {console.characters(len(corpus.tokens))} ({lengths}){unknown}\n"
        f"vocab   {corpus.tokenizer.vocab_size:,} characters\n"
        f"model   {describe_model(config.model)}, {cost.parameters:,} parameters\n"
        f"device  {trainer.device.type}{ranks} ({trainer.device_reason}{threads}), "
        f"{config.dtype} ({trainer.dtype_reason})\n"
        f"plan    {cost.steps:,} steps x {config.train.batch_size} sequences x "
        f"{config.model.block_size} = {console.short(cost.characters)} characters "
        f"({cost.epochs:.1f} epochs)\n"
        f"needs   about {console.size(cost.memory_bytes)} of memory and "
        f"{console.duration(cost.seconds)}"
    )


def describe_model(model: ModelConfig) -> str:
    """Return a model's settings in a few words."""
    if model.kind == "bigram":
        return "bigram table"
    heads = "1 head" if model.n_head == 1 else f"{model.n_head} heads"
    attention = {"full": heads, "average": "average", "none": "no attention"}
    return (
        f"gpt {model.n_layer} layers x {model.n_embd} wide, {attention[model.attention]}, "
        f"block {model.block_size}"
    )


def show_result(session: Session, baselines: Baselines | None) -> None:
    """Print the closing table, write the report of a long run, and name the next commands."""
    trainer, folder, budget = session.trainer, session.folder, session.budget
    best = load_run(folder.path, "best", trainer.device.type)
    scores = score_run(best, trainer.corpus, baselines)
    tables.table(
        ["model", "split", "nats/char", "bits/char", "perplexity"],
        [
            [name, split, *console.loss_cells(nats)]
            for name, split, nats in scores.rows(best.config.model.kind)
        ],
    )
    console.out(f"Losses on {scores.sample}.")
    for sentence in summarize(best, scores, folder.metrics.records()):
        console.out(sentence)
    path, step, seconds = shlex.quote(str(folder.path)), trainer.state.step, trainer.state.seconds
    best_step = f"the best checkpoint is step {best.step:,}"
    if trainer.state.best_step == 0:
        best_step = "no checkpoint is better than the untrained model"
    console.out(f"trained {step:,} steps in {console.duration(seconds)}; {best_step}")
    has_report = budget.has_report if budget else seconds >= RESERVE.report_from
    commands = [
        f"chargpt sample {path}",
        f"chargpt evaluate {path}",
        *([] if has_report else [f"chargpt report {path}"]),
        f"chargpt train --resume {path} -s train.max_steps={2 * step}",
    ]
    console.out(f"the run is in {path}; next:\n" + "\n".join(f"  {line}" for line in commands))
    if has_report:
        show_report(session, best, scores)


def show_report(session: Session, best: Run, scores: RunScores) -> None:
    """Write the report page and print where it is."""
    try:
        page = write_report(best, corpus=session.trainer.corpus, scores=scores)
    except (ChargptError, OSError) as error:  # the run itself is complete and saved
        path = shlex.quote(str(session.folder.path))
        console.say(f"no report: {error}; `chargpt report {path}` tries again")
    else:
        console.out(f"report: {page}")
