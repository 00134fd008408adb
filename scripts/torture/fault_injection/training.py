"""Runs that stop and go on, and numbers that go bad."""

import functools
import shutil
from pathlib import Path
from random import Random

import torch

from chargpt.config import Config
from chargpt.errors import DivergedError
from chargpt.store.run import RunFolder
from chargpt.text.corpus import Corpus, load_corpus
from chargpt.training.trainer import Trainer
from fault_injection.tiny_run import SAVE_EVERY, TINY, fresh

KINDS: tuple[dict[str, object], ...] = (
    {},
    {"optim.name": "adamw", "train.ema": 0.0, "schedule.kind": "cosine"},
    {"model.attention": "average", "train.clip_norm": "null", "model.dropout": 0.3},
    {"model.kind": "bigram", "train.accumulate": 1},
    {"dtype": "bfloat16", "schedule.cooldown": 0.3, "train.ngram_target_weight": 0.5},
    {"train.patience": 60, "model.mlp": "none", "model.qk_norm": False, "model.scaled": False},
)
RESUMED_STEPS = 50
BAD = (float("nan"), float("inf"))


@functools.cache
def stepwise(work: Path, kind: int) -> tuple[Corpus, Path]:
    """Return a run that was saved at each of its steps, and its text."""
    config = _stepwise_config(kind)
    corpus = load_corpus(config.text)
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
    place, bad = ("loss", "gradient", "weight")[index % 3], BAD[index // 3 % 2]
    step = random.randint(SAVE_EVERY + 1, 40)
    config = Config().with_values({**TINY, "train.max_steps": 60, "train.rollbacks": index // 30})
    corpus = load_corpus(config.text)
    run = RunFolder(fresh(work / "bad") / "R")
    trainer = Trainer(config, corpus, folder=run)
    run.create(trainer.config, corpus.tokenizer, force=False)
    _strike(trainer, step, place, bad, random.randrange(3))
    before: dict[str, torch.Tensor] = {}
    saved_before = 0
    try:
        for report in trainer.steps():
            if report.step <= step and trainer.progress.step <= step:
                before = {n: p.clone() for n, p in trainer.model.state_dict().items()}
                saved_before = trainer.saved_step or 0
        wrong = _no_return(run, step + 1) if trainer.finished else "it did not finish"
        if not config.train.rollbacks:
            wrong = "it was not noticed"
    except DivergedError as error:
        wrong = None
        after = trainer.model.state_dict()
        if place != "weight" and any(not torch.equal(after[name], before[name]) for name in before):
            wrong = "the update was made"
        saved, skipped = run.load("latest")
        if skipped or saved.state["step"] != saved_before:
            wrong = f"the last checkpoint suffered: {skipped}"
        if f"step {step + 1} " not in str(error) or "--resume" not in str(error):
            wrong = f"it says {error}"
        if config.train.rollbacks:
            wrong = f"no way back was taken: {error}"
    return f"{bad} in a {place} at step {step + 1}: {wrong}" if wrong else None


def _strike(trainer: Trainer, step: int, place: str, bad: float, number: int) -> None:
    """Let a loss, a gradient or a weight go bad at a step, once."""
    real, struck = trainer.learner.accumulate_gradients, False

    def accumulate_gradients(now: int) -> torch.Tensor:
        nonlocal struck
        strikes, struck = now == step and not struck, struck or now == step
        victim = list(trainer.model.parameters())[number]
        if strikes and place == "weight":
            with torch.no_grad():
                victim.fill_(bad)
        loss = real(now)
        if strikes and place == "gradient":
            assert victim.grad is not None
            victim.grad.view(-1)[0] = bad
        return loss + bad if strikes and place == "loss" else loss

    trainer.learner.accumulate_gradients = accumulate_gradients  # type: ignore[method-assign]


def _no_return(run: RunFolder, step: int) -> str | None:
    """Return what is wrong with the one return that the metrics should tell of."""
    returns = [r for r in run.metrics.records() if "rolled_back_from" in r]
    good = [r["rolled_back_from"] for r in returns] == [step]
    return None if good else f"the metrics say {returns}"
