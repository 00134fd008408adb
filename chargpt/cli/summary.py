"""What `chargpt train` says before the first step and after the last."""

import shlex
from typing import TYPE_CHECKING, Any

from chargpt.cli import console
from chargpt.cli.loop import Clock

if TYPE_CHECKING:
    from chargpt.store.run import RunFolder
    from chargpt.text.corpus import Split
    from chargpt.training.trainer import Trainer

SPLITS: "tuple[Split, ...]" = ("train", "val")
# characters scored for the closing table: of those trained on, but so many at least and at most
CLOSING_SHARE, CLOSING_LEAST, CLOSING_MOST = 1 / 20, 20_000, 300_000
WAVERING = 0.02  # nats by which evaluations differ without any over-fitting


def show_plan(trainer: "Trainer", clock: Clock | None = None) -> None:
    """Say in a few lines what is about to happen. Without a budget, it measures a few steps.

    To be called on every rank.
    """
    from chargpt.training.estimate import estimate

    config, corpus = trainer.config, trainer.corpus
    plan = estimate(trainer, clock.left if clock else None)
    unknown = f", {corpus.unknown_share:.2%} of them unknown" if corpus.unknown_share else ""
    lengths = ", ".join(
        f"{len(corpus.split(name)):,} {name}"
        for name in ("train", "val", "test")
        if len(corpus.split(name))
    )
    threads = ""
    if trainer.device.type == "cpu":
        import torch

        threads = f", {torch.get_num_threads()} threads"
    ranks = f" x {trainer.world.size} processes" if trainer.world.size > 1 else ""
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


def show_result(trainer: "Trainer", folder: "RunFolder", levels: dict[str, float]) -> None:
    """Print the closing table, a word on over-fitting, and the commands to go on with."""
    from chargpt.inference.evaluation import evaluate_tokens
    from chargpt.store.run import load_run

    best = load_run(folder.path, "best", trainer.device.type)
    corpus = trainer.corpus
    rows = [[name, "val", *console.loss_cells(nats)] for name, nats in levels.items()]
    losses = {}
    train = trainer.config.train
    trained = train.max_steps * train.batch_size * trainer.config.model.block_size
    scored = min(CLOSING_MOST, max(CLOSING_LEAST, int(CLOSING_SHARE * trained)))
    for split in SPLITS:
        result = evaluate_tokens(
            best.model,
            corpus.split(split),
            split=split,
            max_characters=scored,
            dtype=trainer.dtype,
        )
        losses[split] = result.nats_per_char
        name = trainer.config.model.kind
        rows.append([f"{name} (trained)", split, *console.loss_cells(result.nats_per_char)])
    console.table(["model", "split", "nats/char", "bits/char", "perplexity"], rows)
    for sentence in verdict(trainer, levels, losses["train"], losses["val"]):
        console.out(sentence)
    path = shlex.quote(str(folder.path))
    step = trainer.progress.step
    console.out(
        f"trained {step:,} steps in {console.duration(trainer.progress.seconds)}; "
        f"the best checkpoint is step {best.step:,}\n"
        f"the run is in {path}; go on with any of\n"
        f"  chargpt sample {path}\n"
        f"  chargpt evaluate {path}\n"
        f"  chargpt train --resume {path} -s train.max_steps={2 * step}"
    )


def verdict(
    trainer: "Trainer", levels: dict[str, float], train_loss: float, val_loss: float
) -> list[str]:
    """Return in plain words whether the model beat counting, and whether it over-fitted."""
    from chargpt.inference.evaluation import NGRAM

    sentences = []
    progress = trainer.progress
    records = trainer.folder.metrics.records() if trainer.folder else []
    seen = [(r["step"], r["val_nats_per_char"]) for r in records if "val_nats_per_char" in r]
    last = seen[-1][1] if seen else val_loss
    if trainer.config.model.kind == "gpt":
        gains = [
            f"{abs(gain):.3f} nats {'better' if gain > 0 else 'worse'} than the {name}"
            for name, gain in ((n, levels[n] - val_loss) for n in ("bigram", NGRAM))
        ]
        sentences.append(f"Attention is {' and '.join(gains)} on text it has not seen.")
    if progress.best_step is not None and last > progress.best_loss + WAVERING:
        sentences.append(
            f"It over-fitted: validation was best at step {progress.best_step:,} "
            f"({progress.best_loss:.3f} nats) and has risen since (to {last:.3f}), so that "
            "checkpoint is the one used; more text, model.dropout or fewer steps would help."
        )
    elif val_loss - train_loss > 0.3:
        sentences.append(
            f"It does {val_loss - train_loss:.2f} nats better on the text it trained on: it has "
            "begun to memorise; more text or model.dropout would help."
        )
    if progress.stopped_early:
        sentences.append(
            f"It stopped early: {progress.evaluations_since_best} evaluations brought nothing new."
        )
    return sentences
