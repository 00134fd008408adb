"""Runs that stop and go on, and numbers that go bad."""

import functools
import shutil
from pathlib import Path
from random import Random

import torch

from chargpt.config import Config
from chargpt.errors import DivergedError
from chargpt.store.run import RunFolder
from chargpt.text.corpus import Corpus, prepare
from chargpt.training.trainer import Trainer
from harm.tiny import SAVE_EVERY, TINY, fresh

KINDS: tuple[dict[str, object], ...] = (
    {},
    {"optim.name": "adamw", "train.ema": 0.0, "schedule.kind": "cosine"},
    {"model.attention": "average", "train.clip_norm": "null", "model.dropout": 0.3},
    {"model.kind": "bigram", "train.accumulate": 1},
    {"dtype": "bfloat16", "schedule.cooldown": 0.3, "train.ngram_targets": 0.5},
    {"train.patience": 60, "model.mlp": "none", "model.qk_norm": False, "model.scaled": False},
)
RESUMED_STEPS = 50


@functools.cache
def stepwise(work: Path, kind: int) -> tuple[Corpus, Path]:
    """Return a run that was saved at each of its steps, and its text."""
    config = _stepwise_config(kind)
    corpus = prepare(config.text)
    run = RunFolder(fresh(work / f"stepwise-{kind}") / "R")
    trainer = Trainer(config, corpus, folder=run)
    run.create(trainer.config, corpus.tokenizer, force=False)
    for _ in trainer.steps():
        pass
    return corpus, run.path


def _stepwise_config(kind: int) -> Config:
    settings = {
        **TINY,
        "train.max_steps": RESUMED_STEPS,
        "train.save_every": 1,
        "train.evaluate_every": 7,
        "train.keep_last": RESUMED_STEPS,
        **KINDS[kind],
    }
    return Config().with_values({k: None if v == "null" else v for k, v in settings.items()})


def resume_at(work: Path, index: int, _: Random) -> str | None:
    """Go on from one step of one kind of run: weights, optimizer and losses must be the same."""
    kind, step = index % len(KINDS), index // len(KINDS) % RESUMED_STEPS
    corpus, run = stepwise(work, kind)
    copy = fresh(work / "resumed") / "R"
    if step == 0:
        folder, saved = RunFolder(copy), None
    else:
        saved, _ = RunFolder(run).load(str(step))
        (copy / "checkpoints").mkdir(parents=True)
        shutil.copy(run / "metrics.jsonl", copy)
        folder = RunFolder(copy)
    config = (saved.config if saved else _stepwise_config(kind)).with_values(
        {"train.save_every": RESUMED_STEPS, "train.keep_last": 1}
    )
    trainer = Trainer(config, corpus, folder=folder, saved=saved)
    if saved is None:
        folder.create(trainer.config, corpus.tokenizer, force=False)
    for _report in trainer.steps():
        pass
    ours, theirs = folder.load("latest")[0], RunFolder(run).load("latest")[0]
    for one, two in ((ours.model, theirs.model), (ours.optimizer, theirs.optimizer)):
        differing = [name for name in two if not torch.equal(one[name], two[name])]
        if differing or one.keys() != two.keys():
            return f"{KINDS[kind]} from step {step}: {differing[:3]} differ"
    lines = [[{**r, "seconds": 0} for r in RunFolder(p).metrics.records()] for p in (copy, run)]
    if lines[0] != lines[1]:
        return f"{KINDS[kind]} from step {step}: the metrics differ"
    facts = ("best_step", "best_nats_per_char", "evaluations_since_best", "stopped_early")
    if any(ours.state[fact] != theirs.state[fact] for fact in facts):
        return f"{KINDS[kind]} from step {step}: the state differs"
    return None


def go_bad(work: Path, index: int, random: Random) -> str | None:
    """Put NaN or infinity into a loss, a gradient or a weight; nothing of it may be kept."""
    place, value = ("loss", "gradient", "weight")[index % 3], (float("nan"), float("inf"))
    bad, step = value[index // 3 % 2], random.randint(SAVE_EVERY + 1, 40)
    config = Config().with_values({**TINY, "train.max_steps": 60, "train.rollbacks": index // 30})
    corpus = prepare(config.text)
    run = RunFolder(fresh(work / "bad") / "R")
    trainer = Trainer(config, corpus, folder=run)
    run.create(trainer.config, corpus.tokenizer, force=False)
    real, struck = trainer.learner.accumulate_gradients, False

    def struck_gradients(number: int) -> torch.Tensor:
        nonlocal struck
        first = list(trainer.model.parameters())[random.randrange(3)]
        if number == step and not struck and place == "weight":
            struck = True
            with torch.no_grad():
                first.view(-1)[0 if place != "weight" else slice(None)] = bad
        loss = real(number)
        if number == step and not struck:
            struck = True
            if place == "loss":
                return loss + bad
            assert first.grad is not None
            first.grad.view(-1)[0] = bad
        return loss

    trainer.learner.accumulate_gradients = struck_gradients  # type: ignore[method-assign]
    before: dict[str, torch.Tensor] = {}
    saved_before = 0
    try:
        for report in trainer.steps():
            if report.step <= step and trainer.progress.step <= step:
                before = {n: p.clone() for n, p in trainer.model.state_dict().items()}
                saved_before = trainer.saved_step or 0
    except DivergedError as error:
        if config.train.rollbacks:
            return f"{bad} in a {place} at step {step + 1}: no way back was taken: {error}"
        if f"step {step + 1} " not in str(error) or "--resume" not in str(error):
            return f"{bad} in a {place} at step {step + 1}: it says {error}"
        if place != "weight" and any(
            not torch.equal(p, before[n]) for n, p in trainer.model.state_dict().items()
        ):
            return f"{bad} in a {place} at step {step + 1}: the update was made"
        saved, skipped = run.load("latest")
        if skipped or saved.state["step"] != saved_before:
            return f"{bad} in a {place} at step {step + 1}: the last checkpoint suffered: {skipped}"
        return None
    if not config.train.rollbacks:
        return f"{bad} in a {place} at step {step + 1} was not noticed"
    returns = [r for r in run.metrics.records() if "rolled_back_from" in r]
    if [r["rolled_back_from"] for r in returns] != [step + 1] or not trainer.finished:
        return f"{bad} in a {place} at step {step + 1}: the metrics say {returns}"
    return None
