"""Resuming from every step, and non-finite losses, gradients and weights."""

import functools
import shutil
from pathlib import Path
from random import Random

import torch

from chargpt.config import Config
from chargpt.errors import DivergedError
from chargpt.store.checkpoint import load_checkpoint
from chargpt.store.folder import RunFolder
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import load_corpus
from chargpt.training.trainer import Trainer
from fault_injection.tiny_run import SAVE_EVERY, TINY, empty_folder

SETTINGS: tuple[dict[str, object], ...] = (
    {},
    {"optim.name": "adamw", "train.ema": 0.0, "schedule.kind": "cosine"},
    {"model.attention": "average", "train.clip_norm": "null", "model.dropout": 0.3},
    {"model.kind": "bigram", "train.micro_batches": 1},
    {"dtype": "bfloat16", "schedule.cooldown": 0.3, "train.ngram_target_weight": 0.5},
    {
        "train.patience": 60,
        "model.mlp": "none",
        "model.qk_norm": False,
        "model.scale_attn_weights": False,
    },
)
RESUMED_STEPS = 50
NON_FINITE = (float("nan"), float("inf"))


@functools.cache
def run_saved_at_every_step(work: Path, kind: int) -> tuple[Corpus, Path]:
    """Return a corpus and a run on it with a checkpoint at each step."""
    config = _stepwise_config(kind)
    corpus = load_corpus(config.text)
    run = RunFolder(empty_folder(work / f"every-step-{kind}") / "R")
    trainer = Trainer(config, corpus, folder=run)
    run.create(trainer.config, corpus.tokenizer)
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
        **SETTINGS[kind],
    }
    return Config().with_values({k: None if v == "null" else v for k, v in settings.items()})


def resume_at(work: Path, index: int, _: Random) -> str | None:
    """Resume one kind of run from one step; the result must be bitwise identical."""
    kind, step = index % len(SETTINGS), index // len(SETTINGS) % RESUMED_STEPS
    corpus, run = run_saved_at_every_step(work, kind)
    copy = empty_folder(work / "resumed") / "R"
    if step == 0:
        folder, saved = RunFolder(copy), None
    else:
        saved = RunFolder(run).load(str(step))
        (copy / "checkpoints").mkdir(parents=True)
        shutil.copy(run / "metrics.jsonl", copy)
        folder = RunFolder(copy)
    config = (saved.config if saved else _stepwise_config(kind)).with_values(
        {"train.save_every": RESUMED_STEPS, "train.keep_last": 1}
    )
    trainer = Trainer(config, corpus, folder=folder, saved=saved)
    if saved is None:
        folder.create(trainer.config, corpus.tokenizer)
    for _report in trainer.steps():
        pass
    ours, theirs = folder.load("latest"), RunFolder(run).load("latest")
    for one, two in ((ours.model, theirs.model), (ours.optimizer, theirs.optimizer)):
        differing = [name for name in two if not torch.equal(one[name], two[name])]
        if differing or one.keys() != two.keys():
            return f"{SETTINGS[kind]} from step {step}: {differing[:3]} differ"
    lines = [[{**r, "seconds": 0} for r in RunFolder(p).metrics.records()] for p in (copy, run)]
    if lines[0] != lines[1]:
        return f"{SETTINGS[kind]} from step {step}: the metrics differ"
    facts = ("best_step", "best_nats_per_char", "evaluations_since_best", "stopped_early")
    if any(getattr(ours.state, fact) != getattr(theirs.state, fact) for fact in facts):
        return f"{SETTINGS[kind]} from step {step}: the state differs"
    return None


def non_finite(work: Path, index: int, random: Random) -> str | None:
    """Inject NaN or infinity into a loss, gradient or weight; no update may include it."""
    target, value = ("loss", "gradient", "weight")[index % 3], NON_FINITE[index // 3 % 2]
    step = random.randint(SAVE_EVERY + 1, 40)
    config = Config().with_values(
        {**TINY, "train.max_steps": 60, "train.max_rollbacks": index // 30}
    )
    corpus = load_corpus(config.text)
    run = RunFolder(empty_folder(work / "non-finite") / "R")
    trainer = Trainer(config, corpus, folder=run)
    run.create(trainer.config, corpus.tokenizer)
    _inject(trainer, step, target, value, random.randrange(3))
    before: dict[str, torch.Tensor] = {}
    saved_before = 0
    try:
        for report in trainer.steps():
            if report.step <= step and trainer.state.step <= step:
                before = {n: p.clone() for n, p in trainer.model.state_dict().items()}
                saved_before = trainer.writer.saved_step or 0
        wrong = _check_rollback(run, step + 1) if trainer.finished else "training did not finish"
        if not config.train.max_rollbacks:
            wrong = "it was not detected"
    except DivergedError as error:
        wrong = None
        after = trainer.model.state_dict()
        changed = any(not torch.equal(after[name], before[name]) for name in before)
        if changed and target != "weight":
            wrong = "the update was applied"
        saved, skipped = load_checkpoint(run.checkpoints, "latest")
        if skipped or saved.state.step != saved_before:
            wrong = f"the last checkpoint changed: {skipped}"
        if f"step {step + 1}," not in str(error) or "--resume" not in str(error):
            wrong = f"the message is {error}"
        if config.train.max_rollbacks:
            wrong = f"no rollback: {error}"
    return f"{value} in a {target} at step {step + 1}: {wrong}" if wrong else None


def _inject(trainer: Trainer, step: int, target: str, value: float, number: int) -> None:
    """Replace a loss, gradient or weight by a non-finite value once, at a step."""
    real, injected = trainer.learner.accumulate_gradients, False

    def accumulate_gradients(current: int) -> torch.Tensor:
        nonlocal injected
        active, injected = current == step and not injected, injected or current == step
        parameter = list(trainer.model.parameters())[number]
        if active and target == "weight":
            with torch.no_grad():
                parameter.fill_(value)
        loss = real(current)
        if active and target == "gradient":
            assert parameter.grad is not None
            parameter.grad.view(-1)[0] = value
        return loss + value if active and target == "loss" else loss

    trainer.learner.accumulate_gradients = accumulate_gradients  # type: ignore[method-assign]


def _check_rollback(run: RunFolder, step: int) -> str | None:
    """Return an error unless the metrics record exactly one rollback, from the given step."""
    rollbacks = [r for r in run.metrics.records() if "rolled_back_from" in r]
    good = [r["rolled_back_from"] for r in rollbacks] == [step]
    return None if good else f"the metrics record {rollbacks}"
