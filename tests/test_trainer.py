"""Training: exact resume, checkpoints, divergence, full disks, batches, and a known optimum."""

import dataclasses
import errno
import math
import os
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import Cli, refusal
from saving import failing
from starting import create_run, resume

import chargpt
from chargpt.config import Config, load_config
from chargpt.distributed import RankGroup
from chargpt.errors import DeviceError, DivergedError, OperationError, RunError, UnsavedError
from chargpt.inference.evaluation import Baselines
from chargpt.store.checkpoint import RunState
from chargpt.store.folder import RunFolder
from chargpt.store.metrics import validation_curve
from chargpt.store.run import load_run
from chargpt.store.verify import verify
from chargpt.text.corpus import Corpus, Split, block_offsets
from chargpt.training import learner
from chargpt.training import trainer as trainer_module
from chargpt.training.budget import expected_seconds
from chargpt.training.deadline import Deadline, Pace
from chargpt.training.learner import Batches, Learner, memory_remedy, training_bytes
from chargpt.training.optim import lr_factor_at
from chargpt.training.resume import continue_schedule
from chargpt.training.start import Request, StartMode, open_session
from chargpt.training.trainer import StepReport, Trainer

TINY = {
    "device": "cpu",
    "dtype": "float32",
    "model.n_layer": 2,
    "model.n_embd": 32,
    "model.block_size": 16,
    "train.max_steps": 12,
    "train.batch_size": 4,
    "train.evaluate_every": 4,
    "train.evaluation_tokens": 500,
    "train.save_every": 3,
    "train.sample_every": 0,
    "train.keep_last": 50,
}
STUDENTS = {"train.students": [4, 8], "schedule.restarts": [(4, 1.0), (8, 1.0)]}
VARIANTS: dict[str, dict[str, object]] = {
    "muon": {},
    "adamw": {"optim.name": "adamw"},
    "dropout and accumulation": {"model.dropout": 0.3, "train.micro_batches": 2},
    "ema and soft targets": {"train.ema": 0.9, "train.ngram_target_weight": 0.6},
    "float16": {"dtype": "float16", "train.micro_batches": 2},
    "cosine and bfloat16": {"schedule.kind": "cosine", "dtype": "bfloat16"},
    "average with adamw": {"train.ema": 0.9, "optim.name": "adamw"},
    "narrow": {"model.n_layer": 40, "model.n_embd": 2, "model.n_head": 1, "model.n_inner": 1},
    "students": {**STUDENTS, "model.dropout": 0.2, "train.ema": 0.9},
    "students in float16": {**STUDENTS, "dtype": "float16"},
    "bigram": {"model.kind": "bigram", "optim.name": "adamw", "train.clip_norm": None},
    "average rung": {"model.attention": "average", "model.mlp": "none", "train.patience": 50},
}


def tiny_config(**changes: object) -> Config:
    return Config().with_values(TINY | changes)


def start_trainer(config: Config, corpus: Corpus, path: Path) -> Trainer:
    trainer = Trainer(config, corpus, folder=RunFolder(path))
    RunFolder(path).create(trainer.config, corpus.tokenizer)
    return trainer


def train(
    config: Config, corpus: Corpus, path: Path, stop_at: int | None = None
) -> list[StepReport]:
    return run_steps(start_trainer(config, corpus, path), stop_at)


def run_steps(trainer: Trainer, stop_at: int | None = None) -> list[StepReport]:
    reports = []
    for report in trainer.steps():
        reports.append(report)
        if report.step == stop_at:
            trainer.save()
            break
    return reports


def resume_to_end(path: Path, corpus: Corpus) -> list[StepReport]:
    saved, config, _ = resume(RunFolder(path), {})
    return run_steps(Trainer(config, corpus, folder=RunFolder(path), saved=saved))


def weights(path: Path, name: str = "model", step: int = 12) -> bytes:
    return (path / "checkpoints" / f"step-{step:08d}" / f"{name}.safetensors").read_bytes()


def losses(path: Path) -> list[tuple[int, float, float]]:
    records = [r for r in RunFolder(path).metrics.records() if "loss" in r]
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_is_reproducible_bit_for_bit_also_when_it_was_interrupted(
    variant: str, corpus: Corpus, tmp_path: Path
) -> None:
    config = tiny_config(**VARIANTS[variant])
    train(config, corpus, tmp_path / "a")
    train(config, corpus, tmp_path / "b")
    stops = {next(iter(VARIANTS)): (0, 1, 5, 11), "students": (3, 4, 5, 8, 9)}.get(variant, (5,))
    for stop in stops:
        train(config, corpus, tmp_path / f"stop{stop}", stop_at=stop)
        resume_to_end(tmp_path / f"stop{stop}", corpus)
    for other in ("b", *(f"stop{stop}" for stop in stops)):
        for name in ("model", "optimizer"):
            assert weights(tmp_path / "a", name) == weights(tmp_path / other, name), (other, name)
        assert losses(tmp_path / "a") == losses(tmp_path / other)
    assert [step for step, *_ in losses(tmp_path / "a")] == list(range(1, 13))


def test_the_loss_starts_at_ln_v_and_falls_below_the_unigram_baseline(corpus: Corpus) -> None:
    trainer = Trainer(tiny_config(**{"train.max_steps": 60, "train.batch_size": 16}), corpus)
    reports = run_steps(trainer)
    validated = {r.step: r.validation.nats_per_char for r in reports if r.validation}
    assert validated[0] == pytest.approx(math.log(corpus.tokenizer.vocab_size), rel=0.01)
    assert validated[60] < Baselines(corpus).losses(corpus.split("val"))["unigram"]


def test_dropout_differs_between_micro_batches_and_is_off_in_evaluation(corpus: Corpus) -> None:
    trainer = Trainer(tiny_config(**{"model.dropout": 0.5, "train.max_steps": 4}), corpus)
    run_steps(trainer)
    block = trainer.learner.batches.at(0)
    losses_seen = []
    for micro in (0, 1, 0):
        trainer.learner.seed_dropout(0, micro)
        losses_seen.append(trainer.learner.objective(block)[1].item())
    assert losses_seen[0] == losses_seen[2] != losses_seen[1]
    first, second = (trainer.learner.evaluate("val").nats_per_char for _ in range(2))
    assert first == second


def test_with_ema_the_saved_model_is_the_moving_average(corpus: Corpus, tmp_path: Path) -> None:
    averaged = start_trainer(tiny_config(**{"train.ema": 0.9}), corpus, tmp_path / "ema")
    run_steps(averaged)
    assert averaged.learner.ema_weights is not None
    assert not any(tensor.requires_grad for tensor in averaged.learner.ema_weights.values())
    saved = RunFolder(tmp_path / "ema").load("latest")
    name = "head.weight"
    assert not torch.equal(saved.model[name], saved.optimizer[f"raw.{name}"])
    plain = Trainer(tiny_config(), corpus)
    run_steps(plain)
    assert torch.equal(plain.model.state_dict()[name], saved.optimizer[f"raw.{name}"])


def test_patience_stops_a_run_whose_validation_loss_no_longer_falls(
    corpus: Corpus, tmp_path: Path
) -> None:
    no_learning = {"optim.lr": 1e-12, "optim.matrix_lr": 1e-12, "model.qk_norm": False}
    stopping = {"train.patience": 2, "train.evaluate_every": 1, "train.max_steps": 40}
    reports = train(tiny_config(**no_learning, **stopping), corpus, tmp_path / "run")
    assert reports[-1].step < 40
    with pytest.raises(RunError, match="patience"):
        resume(RunFolder(tmp_path / "run"), {})


def test_best_names_the_checkpoint_with_the_lowest_validation_loss(
    corpus: Corpus, tmp_path: Path
) -> None:
    high_rates = {"optim.lr": 0.5, "optim.matrix_lr": 0.5, "schedule.cooldown": 0.0}
    unclipped = {"train.evaluate_every": 1, "train.clip_norm": None}
    reports = train(tiny_config(**high_rates, **unclipped), corpus, tmp_path / "run")
    measured = {r.step: r.validation.nats_per_char for r in reports if r.validation and r.step}
    best = min(measured, key=lambda step: measured[step])
    assert best != 12
    assert load_run(tmp_path / "run", "best", "cpu").step == best


def test_a_checkpoint_worse_than_the_untrained_model_is_not_the_best(
    corpus: Corpus, tmp_path: Path
) -> None:
    rates = {"optim.lr": 20.0, "optim.matrix_lr": 20.0, "train.evaluate_every": 1}
    reports = train(tiny_config(**rates, **{"train.clip_norm": None}), corpus, tmp_path / "run")
    assert not any(report.is_best for report in reports)
    loaded = load_run(tmp_path / "run", "best", "cpu")
    assert loaded.state.best_step == 0
    assert loaded.step == 12  # the newest


def make_gradient_infinite(trainer: Trainer, step: int, times: int = 1) -> None:
    """Make the gradient of one step (counted from 0) infinite, the first `times` times."""
    real = trainer.learner.accumulate_gradients
    remaining = [times]

    def accumulate_gradients(number: int) -> torch.Tensor:
        loss = real(number)
        if number == step and remaining[0]:
            remaining[0] -= 1
            gradient = next(trainer.model.parameters()).grad
            assert gradient is not None
            gradient[0] = math.inf
        return loss

    trainer.learner.accumulate_gradients = accumulate_gradients  # type: ignore[method-assign]


def test_an_infinite_gradient_stops_the_run_before_the_update_and_names_the_remedy(
    corpus: Corpus, tmp_path: Path
) -> None:
    trainer = start_trainer(tiny_config(), corpus, tmp_path / "run")
    make_gradient_infinite(trainer, 7)
    reports = trainer.steps()
    for _ in range(8):  # the first is before any update
        next(reports)
    before = {name: p.clone() for name, p in trainer.model.state_dict().items()}
    with pytest.raises(
        DivergedError, match=r"gradient is .* step 8, .* checkpoint is step 6"
    ) as raised:
        next(reports)
    assert "-s optim.lr=" in str(raised.value)
    assert "-s train.max_rollbacks=3" in str(raised.value)
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.state_dict().items())
    resume_to_end(tmp_path / "run", corpus)
    train(tiny_config(), corpus, tmp_path / "uninterrupted")
    assert weights(tmp_path / "run") == weights(tmp_path / "uninterrupted")


def test_float16_skips_steps_whose_gradients_overflow_and_trains_like_float32(
    corpus: Corpus, tmp_path: Path, notes: list[str]
) -> None:
    train(tiny_config(), corpus, tmp_path / "float32")
    train(tiny_config(dtype="float16"), corpus, tmp_path / "float16")
    for one, other in zip(losses(tmp_path / "float32"), losses(tmp_path / "float16"), strict=True):
        assert other == pytest.approx(one, rel=0.03)
    assert not notes
    trainer = start_trainer(tiny_config(dtype="float16"), corpus, tmp_path / "skipping")
    scaler, n_skipped = trainer.learner.scaler, 0
    assert scaler is not None
    scaler.scale.fill_(2.0**20)
    before = list[torch.Tensor]()
    for report in trainer.steps():
        weights = [p.clone() for p in trainer.model.parameters()]
        if report.grad_norm == -1:
            n_skipped += 1
            assert all(map(torch.equal, weights, before))
        before = weights
    assert 2 <= n_skipped < 8
    assert scaler.scale == 2.0 ** (20 - n_skipped)
    records = [r for r in RunFolder(tmp_path / "skipping").metrics.records() if "loss" in r]
    assert [r["lr_factor"] == 0 == r["grad_norm"] for r in records[: n_skipped + 1]] == [
        *[True] * n_skipped,
        False,
    ]
    assert records[-1]["loss"] < records[0]["loss"] - 0.3
    assert f"steps skipped, as their gradients overflowed float16: {n_skipped};" in notes[-1]
    folder = RunFolder(tmp_path / "skipping")
    resumed = Trainer(trainer.config, corpus, folder=folder, saved=folder.load("latest"))
    assert resumed.learner.scaler is not None
    assert resumed.learner.scaler.scale == scaler.scale
    assert resumed.learner.scaler.growth_tracker == 12 - n_skipped


def test_a_step_that_is_skipped_pulls_no_weight_towards_the_base_run(
    corpus: Corpus, tmp_path: Path
) -> None:
    train(tiny_config(), corpus, tmp_path / "base")
    base_run = load_run(tmp_path / "base", "3")
    settings = {"train.from_run": str(base_run.folder), "optim.l2_sp": 0.5}
    config = tiny_config(dtype="float16", **settings)
    trained = Learner(config, corpus, RankGroup(), torch.device("cpu"), base_run=base_run)
    assert trained.scaler is not None
    for scale, is_skipped in ((2.0**6, False), (2.0**30, True), (2.0**6, False)):
        trained.scaler.scale.fill_(scale)
        before = [p.detach().clone() for p in trained.model.parameters()]
        trained.accumulate_gradients(1)
        assert (trained.clip_gradients() == -1) == is_skipped
        trained.apply_update(1, 1.0)
        assert all(map(torch.equal, before, trained.model.parameters())) == is_skipped


def test_a_gradient_of_zero_is_no_overflow_of_float16(tmp_path: Path) -> None:
    settings = TINY | {"dtype": "float16", "train.max_steps": 40}
    run = chargpt.train(text="a" * 5_000, settings=settings, out=tmp_path / "run")
    assert not any("skipped" in note for note in run.notes)


def test_float16_whose_gradients_always_overflow_ends_with_the_remedy(
    corpus: Corpus, tmp_path: Path
) -> None:
    settings = {"train.max_steps": 100, "train.max_rollbacks": 1}
    trainer = start_trainer(tiny_config(dtype="float16", **settings), corpus, tmp_path / "run")
    assert trainer.learner.scaler is not None
    trainer.learner.scaler.unscale = lambda gradients: (  # type: ignore[method-assign]
        [g.zero_() for g in gradients],
        trainer.learner.scaler.found_inf.fill_(1),
    )
    with pytest.raises(DivergedError, match=r"gradient is no longer finite at step 57.*float32$"):
        list(trainer.steps())  # from step 27, where it was saved, after those at step 30
    for scale in (0.0, math.nan, math.inf, -1.0, 1e38):
        trainer.learner.scaler.load_state_dict({"scaler.scale": torch.tensor(scale)})
        assert 0 < trainer.learner.scaler.scale <= 2**16


def test_non_finite_weights_are_not_saved(corpus: Corpus, tmp_path: Path) -> None:
    trainer = start_trainer(tiny_config(), corpus, tmp_path / "run")
    with torch.no_grad():
        next(trainer.model.parameters())[0] = math.nan
    with pytest.raises(DivergedError, match="weights are no longer finite at step 0"):
        next(trainer.steps())
    with pytest.raises(DivergedError, match="weights are no longer finite"):
        trainer.save()
    with pytest.raises(RunError, match="no checkpoint yet"):
        load_run(tmp_path / "run")


def test_a_diverged_run_rolls_back_to_its_last_checkpoint_at_half_the_learning_rates(
    corpus: Corpus, tmp_path: Path, notes: list[str]
) -> None:
    points = [[5, 12], [6, 13]]
    schedule = {"schedule.cooldown": 0.9, "schedule.decay_points": points}
    config = tiny_config(**{"train.max_rollbacks": 2, **schedule})
    trainer = start_trainer(config, corpus, tmp_path / "run")
    rate = trainer.config.optim.lr
    make_gradient_infinite(trainer, 7, times=2)
    run_steps(trainer)
    assert len(notes) == 2
    assert "rolled back to step 6" in notes[0]
    rollbacks = [
        r for r in RunFolder(tmp_path / "run").metrics.records() if "rolled_back_from" in r
    ]
    # the new rates are saved with the next step
    assert [(r["step"], r["rolled_back_from"]) for r in rollbacks] == [(6, 8), (7, 8)]
    assert [r["optim.lr"] for r in rollbacks] == [rate / 2, rate / 4]
    saved = RunFolder(tmp_path / "run").load("latest")
    assert saved.state.step == 12
    assert saved.state.rollbacks == 2
    assert saved.config.optim.lr == rate / 4
    assert saved.config.schedule.decay_points == ((5, 12), (6, 13))
    assert load_config(tmp_path / "run" / "config.yaml").optim.lr == rate / 4
    once = start_trainer(tiny_config(**{"train.max_rollbacks": 1}), corpus, tmp_path / "once")
    make_gradient_infinite(once, 7, times=2)
    with pytest.raises(DivergedError):
        run_steps(once)


def test_a_rollback_to_where_a_run_was_resumed_keeps_the_steps_that_were_asked_for(
    corpus: Corpus, tmp_path: Path
) -> None:
    train(tiny_config(**{"train.max_rollbacks": 1}), corpus, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    saved, config, _ = resume(folder, {"train.max_steps": 20})
    trainer = Trainer(config, corpus, folder=folder, saved=saved)
    make_gradient_infinite(trainer, 13)
    run_steps(trainer)
    assert (trainer.state.rollbacks, folder.load("latest").state.step) == (1, 20)


def test_a_rollback_undoes_a_later_re_planning_and_is_saved_at_once(
    corpus: Corpus, tmp_path: Path
) -> None:
    config = tiny_config(**{"train.max_rollbacks": 1, "schedule.cooldown": 0.5})
    trainer = start_trainer(config, corpus, tmp_path / "run")
    make_gradient_infinite(trainer, 7)
    for report in trainer.steps(should_stop=lambda _: trainer.state.rollbacks > 0):
        if report.step == 7:  # saved with step 8, which fails
            later = {"train.max_steps": 20, "schedule.decay_points": [(6, 12)]}
            trainer.change_config(trainer.config.with_values(later))
    saved = RunFolder(tmp_path / "run").load("latest")
    assert (saved.state.step, saved.state.rollbacks) == (6, 1)
    assert saved.config == config.with_values(
        {"optim.lr": config.optim.lr / 2, "optim.matrix_lr": config.optim.matrix_lr / 2}
    )


FULL = shutil._ntuple_diskusage(10**9, 10**9, 0)


def test_a_run_is_saved_every_minute_unless_saving_takes_a_hundredth_of_the_time(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rare = {"train.max_steps": 40, "train.save_every": 1000, "train.evaluate_every": 1000}
    trainer = start_trainer(tiny_config(**rare), corpus, tmp_path / "run")
    save, now, saved = trainer.writer.save, [0.0], []
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: now[0])

    def slow_save(config: Config, tokenizer: Any, state: RunState, tensors: Any) -> None:
        saved.append(state.step)
        now[0] += 0.1 if state.step < 10 else 2
        save(config, tokenizer, state, tensors)

    monkeypatch.setattr(trainer.writer, "save", slow_save)
    for report in trainer.steps():
        now[0] += 25  # seconds of each step
        if report.step == 30:  # of which two after step 30 are slow
            break
    assert saved == [3, 6, 9, 12, 20, 28]


def test_training_continues_while_the_disk_is_full_and_saves_again_afterwards(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start_trainer(tiny_config(), corpus, tmp_path / "run")
    disk_errors = []
    for report in trainer.steps():
        disk_errors.append(trainer.writer.errors.get("checkpoint"))
        if report.step == 4:
            monkeypatch.setattr(shutil, "disk_usage", lambda _: FULL)
        if report.step == 7:
            assert trainer.writer.saved_step == 4  # saved there as the best
            monkeypatch.undo()
    assert [error is not None for error in disk_errors] == [False] * 6 + [True] * 2 + [False] * 5
    train(tiny_config(), corpus, tmp_path / "uninterrupted")
    assert weights(tmp_path / "run") == weights(tmp_path / "uninterrupted")


def test_a_checkpoint_that_could_not_be_written_does_not_count_as_the_best(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start_trainer(tiny_config(**{"train.evaluate_every": 2}), corpus, tmp_path / "run")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: FULL)
    validated = {}
    for report in trainer.steps():
        if report.validation:
            validated[report.step] = report.validation.nats_per_char
        if report.step == 11:
            assert trainer.state.best_step == 0
            monkeypatch.undo()
    assert min(validated, key=lambda step: validated[step]) == 12  # the loss falls to the end
    assert load_run(tmp_path / "run", "best", "cpu").step == 12


def test_after_a_failed_save_the_next_try_is_the_next_due_save(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rare_saves = {"train.save_every": 100, "train.evaluate_every": 100}
    trainer = start_trainer(tiny_config(**rare_saves), corpus, tmp_path / "run")
    full, steps = failing(errno.ENOSPC), []

    def train_to_the_end() -> None:
        for report in trainer.steps():
            steps.append(report.step)
            if report.step == 4:
                monkeypatch.setattr(RunFolder, "require_space", full)
                trainer.change_config(trainer.config.with_values({"train.max_steps": 9}))

    with pytest.raises(OperationError, match=r"cannot save step 9 of .*; there is no checkpoint;"):
        train_to_the_end()
    assert full.call_count == 2  # with the step after the change, and at the end
    assert steps[-1] == 9  # its report is yielded
    monkeypatch.undo()
    trainer = start_trainer(tiny_config(), corpus, tmp_path / "other run")
    reports = trainer.steps()
    for _ in range(8):
        next(reports)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: FULL)
    message = r"cannot save step 12 of .*/other run .*; the last checkpoint is step 6; free some"
    with pytest.raises(OperationError, match=message):
        list(reports)


def test_metrics_that_cannot_be_written_are_named_once_and_end_the_training_as_unsaved(
    corpus: Corpus, tmp_path: Path, notes: list[str]
) -> None:
    trainer = start_trainer(tiny_config(), corpus, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.mkdir()  # root may write to a file of any mode
    with pytest.raises(
        UnsavedError, match=r"cannot write the metrics of .* \(it is not a regular file\)"
    ):
        list(trainer.steps())
    assert [note.partition(" at step")[0] for note in notes] == [
        "cannot write the metrics of the run"
    ]
    assert trainer.writer.saved_step == 12
    path.rmdir()
    assert trainer.save() is not None
    assert verify(RunFolder(tmp_path / "run")).problems == []


def test_a_requested_stop_keeps_the_plan_that_the_checkpoint_was_saved_with(
    corpus: Corpus, tmp_path: Path
) -> None:
    class Replanned(Pace):
        def adjusted(self, config: Config, step: int, speed: float) -> Config:
            return config.with_values({"train.max_steps": 100 + step})

    trainer = start_trainer(tiny_config(**{"train.save_every": 1}), corpus, tmp_path / "run")
    pace = Replanned(Deadline.from_budget(60), trainer.config, 1e5, True, 1000)
    list(trainer.steps(pace, lambda _: trainer.state.step == 5))
    run = RunFolder(tmp_path / "run")
    saved, config, notes = resume(run, {})
    assert (saved.state.step, config.train.max_steps, notes) == (5, 104, [])
    assert run.describe_edits(saved.config) is None


def test_a_run_saved_before_its_first_step_is_not_validated_again(
    corpus: Corpus, tmp_path: Path
) -> None:
    trainer = start_trainer(tiny_config(), corpus, tmp_path / "run")
    list(trainer.steps(should_stop=lambda _: True))
    assert trainer.state.step == 0
    resume_to_end(tmp_path / "run", corpus)
    curve = validation_curve(RunFolder(tmp_path / "run").metrics.records())
    assert [step for step, _ in curve] == [0, 4, 8, 12]
    train(tiny_config(), corpus, tmp_path / "uninterrupted")
    assert weights(tmp_path / "run") == weights(tmp_path / "uninterrupted")


def test_a_damaged_checkpoint_that_a_rollback_skips_is_named(
    corpus: Corpus, tmp_path: Path, notes: list[str]
) -> None:
    config = tiny_config(**{"train.max_rollbacks": 1})
    trainer = start_trainer(config, corpus, tmp_path / "run")
    make_gradient_infinite(trainer, 7)
    for report in trainer.steps():
        if report.step == 7 and not notes:
            newest = tmp_path / "run" / "checkpoints" / "step-00000006" / "model.safetensors"
            newest.write_bytes(b"damaged")
        if report.loss is None and report.step:  # or the lost time would slow the next steps down
            assert trainer.speed_since[0] == report.step == 4
    assert "step-00000006" in notes[0]
    assert notes[1] == "step-00000004 is used instead"
    assert "rolled back to step 4" in notes[2]


def factors(config: Config) -> list[float]:
    steps = config.train.max_steps
    return [lr_factor_at(step, config.schedule, steps) for step in range(steps)]


def test_a_finished_run_goes_on_with_a_short_warmup_to_a_fraction_of_its_rates(
    corpus: Corpus, tmp_path: Path
) -> None:
    train(tiny_config(), corpus, tmp_path / "run")
    saved, config, notes = resume(RunFolder(tmp_path / "run"), {"train.max_steps": 24})
    assert config.schedule.restarts == ((12, 0.5),)
    assert any("rates rise from 8% to 50% of their peak" in note for note in notes)
    assert factors(config)[:12] == factors(saved.config)  # the config still repeats the run
    assert max(factors(config)[12:]) <= 0.5
    assert factors(config)[-1] == pytest.approx(0.5 / 12)
    run_steps(Trainer(config, corpus, folder=RunFolder(tmp_path / "run"), saved=saved))
    again = resume(RunFolder(tmp_path / "run"), {"train.max_steps": 30})[1]
    assert again.schedule.restarts == ((12, 0.5), (24, 0.25))
    assert factors(again)[:24] == factors(config)
    own = {"train.max_steps": 30, "schedule.restarts": [[24, 0.1]]}
    assert resume(RunFolder(tmp_path / "run"), own)[1].schedule.restarts == ((24, 0.1),)


def test_a_resumed_run_keeps_its_number_of_threads_or_notes_another(
    corpus: Corpus, tmp_path: Path
) -> None:
    train(tiny_config(), corpus, tmp_path / "default", stop_at=3)
    threads = torch.get_num_threads()
    other = 1 if threads > 1 else 2
    n_cores = os.cpu_count() or 1
    try:
        torch.set_num_threads(threads + 1)
        _, config, notes = resume(RunFolder(tmp_path / "default"), {"threads": n_cores + 1})
        assert config.threads is None  # saved on a machine with more cores
        assert any(f"-s threads={threads} for the same digits" in note for note in notes)
        train(tiny_config(threads=other), corpus, tmp_path / "run", stop_at=3)
        torch.set_num_threads(threads)
        saved, config, notes = resume(RunFolder(tmp_path / "run"), {})
        assert saved.state.threads == config.threads == other
        if other <= n_cores:
            assert notes == []
            Trainer(config, corpus)
            assert torch.get_num_threads() == other
    finally:
        torch.set_num_threads(threads)


def test_estimating_the_time_and_sampling_do_not_change_the_run(corpus: Corpus) -> None:
    constraints = {"sample.match": "T", "sample.max_chars": 5}  # they do not show the model
    settings = {"model.dropout": 0.2, "train.sample_every": 4, **constraints}
    trainer = Trainer(tiny_config(**settings), corpus)
    assert expected_seconds(trainer) > 0
    reports = run_steps(trainer)
    plain = run_steps(Trainer(tiny_config(**{"model.dropout": 0.2}), corpus))
    assert [r.loss for r in reports] == [r.loss for r in plain]
    assert [len(r.sample) for r in reports if r.sample is not None] == [200, 200, 200]


def test_a_resumed_run_is_expected_to_be_as_fast_as_it_was(verse: Path, tmp_path: Path) -> None:
    run_steps(create_run(tiny_config(**{"text.path": str(verse)}), tmp_path / "run").trainer)
    state, settings = load_run(tmp_path / "run", "latest").state, {"train.max_steps": 36}
    request = Request(path=str(tmp_path / "run"), settings=settings, start=StartMode.RESUME)
    with open_session(request) as session:
        assert session.expected_seconds == pytest.approx(2 * state.seconds)


def test_memory_grows_with_the_block_squared_only_where_scores_are_stored() -> None:
    def activations(block_size: int, dtype: str, device: str = "cpu") -> float:
        values = {"model.block_size": block_size, "dtype": dtype, "device": device}
        config = tiny_config(**values)
        return (training_bytes(config, 65, 2) - training_bytes(config, 65, 1)) / block_size

    assert activations(256, "float32") > activations(128, "float32")
    assert activations(1024, "float32") == activations(512, "float32")
    assert activations(512, "bfloat16") > activations(256, "bfloat16")
    assert activations(512, "bfloat16", device="cuda") == activations(1024, "float32")


# -- batches ----------------------------------------------------------------------------------


def test_a_batch_is_a_pure_function_of_seed_and_step() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    one, two = Batches(tokens, 8, 16, seed=5), Batches(tokens, 8, 16, seed=5)
    for step in (3, 0, 3, 10**9):
        assert torch.equal(one.at(step), two.at(step))
    assert not torch.equal(one.at(0), one.at(1))
    assert not torch.equal(one.at(0), Batches(tokens, 8, 16, seed=6).at(0))


def test_rows_are_consecutive_tokens_and_the_ranks_slices_make_up_the_batch() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    batches = Batches(tokens, 8, 16, seed=0)
    whole = batches.at(2)
    assert whole.shape == (16, 9)
    assert whole.dtype == torch.int64
    assert (whole.diff(dim=1) == 1).all()
    parts = [batches.at(2, slice(start, start + 4)) for start in range(0, 16, 4)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32])
def test_batches_gathered_on_the_device_equal_those_gathered_in_numpy(kind: type) -> None:
    tokens = np.random.default_rng(1).integers(0, 200, 1000).astype(kind)
    plain, resident = Batches(tokens, 8, 16, seed=5), Batches(tokens, 8, 16, seed=5)
    resident.to_device(torch.device("cpu"))
    assert resident.resident is not None
    for step, rows in ((0, slice(None)), (7, slice(4, 12))):
        assert torch.equal(plain.at(step, rows), resident.at(step, rows))


def test_offsets_are_uniform_over_all_valid_starts() -> None:
    tokens = np.zeros(13, dtype=np.uint8)
    offsets = np.concatenate([block_offsets(tokens, 8, 1000, 0, step) for step in range(20)])
    counts = np.bincount(offsets, minlength=5)
    assert counts.size == 5  # starts 0 to 4, the last block ending with the text
    assert counts.min() > 3700
    assert counts.max() < 4300


# -- the trained bigram has a known optimum ---------------------------------------------------


@pytest.mark.parametrize(
    ("name", "split", "tolerance"),
    [
        ("bigram", "train", 0.01),
        pytest.param("notebook", "val", 0.05, marks=pytest.mark.slow),
    ],
)
def test_a_shipped_bigram_trains_to_the_loss_of_the_counted_bigram(
    name: str, split: Split, tolerance: float, corpus: Corpus
) -> None:
    values = {"text.path": corpus.name, "device": "cpu", "train.sample_every": 0}
    trainer = Trainer(load_config(name, values), corpus)
    run_steps(trainer)
    counted = Baselines(corpus).losses(corpus.split(split))["bigram"]
    assert trainer.learner.evaluate(split).nats_per_char == pytest.approx(counted, abs=tolerance)


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_run_of_a_missing_device_resumes_on_the_one_here_in_the_dtype_asked_for(
    device: str, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"cuda": "cpu", "cuda:1": "cuda"}[device]  # of which there is one GPU

    def choose(name: str) -> tuple[torch.device, str]:
        if name not in ("auto", here):
            raise DeviceError(f"device {name!r} is not available")
        return torch.device(here), "why"

    found = Mock(side_effect=choose)
    monkeypatch.setattr("chargpt.training.resume.choose_device", found)
    folder = RunFolder(tmp_path / "run")
    trainer = start_trainer(tiny_config(**{"train.max_steps": 4}), corpus, folder.path)
    trainer.config = trainer.config.with_values({"device": device, "dtype": "bfloat16"})
    trainer.save()
    _, config, notes = resume(folder, {})
    assert (config.device, config.dtype) == (here, "auto" if here == "cpu" else "bfloat16")
    reason = f"{device} is not available, so the run continues on {here} (why)"
    assert reason in notes
    assert resume(folder, {"dtype": "float32"})[1].dtype == "float32"
    trainer.config, trainer.config_is_unsaved = config, True
    trainer.save()  # as the resumed run does
    assert resume(folder, {"device": device}, same_command=True)[1].device == here
    assert resume(folder, {"device": device})[1].device == device  # which the trainer refuses
    found.reset_mock()
    assert resume(folder, {"device": "cpu"})[1].device == "cpu"
    assert not found.called  # which would start the driver of a GPU


def continued(before: Config, max_steps: int, step: int) -> Config:
    """Return the config of a run that is resumed at a step for another number of steps."""
    return continue_schedule(before, before.with_values({"train.max_steps": max_steps}), step)


@pytest.mark.parametrize("max_steps", [10, 30])
def test_a_decay_that_has_begun_goes_on_without_a_rise_of_the_rates(
    max_steps: int, notes: list[str]
) -> None:
    before = tiny_config(**{"schedule.cooldown": 0.8})
    after = continued(before, max_steps, 8)
    assert notes == []
    assert factors(after)[:8] == factors(before)[:8]
    assert all(a > b for a, b in pairwise(factors(after)[7:]))


@pytest.mark.parametrize(
    ("schedule", "step", "max_steps", "note"),
    [
        ({"schedule.cooldown": 0.0}, 12, 24, None),
        ({"schedule.kind": "cosine", "schedule.warmup": 0}, 8, 13, None),  # no rise to speak of
        (
            {"schedule.kind": "cosine", "schedule.warmup": 0},
            *(8, 100, "the learning rates rise from 33% to 99% of their peak"),
        ),
    ],
)
def test_runs_whose_rates_have_not_decayed_go_on_as_they_are(
    schedule: dict[str, object], step: int, max_steps: int, note: str | None, notes: list[str]
) -> None:
    before = tiny_config(**schedule)
    after = continued(before, max_steps, step)
    assert after.schedule == before.schedule
    assert [each[: len(note or "")] for each in notes] == ([note] if note else [])


def test_a_run_stopped_just_before_its_end_goes_on_like_a_finished_one(notes: list[str]) -> None:
    before = Config().with_values({"train.max_steps": 100})
    after = continued(before, 200, 97)
    assert after.schedule.restarts == ((97, 0.5),)
    assert any("to 50% of their peak" in note for note in notes)
    assert factors(after)[:97] == factors(before)[:97]  # the config still repeats the run
    assert sum(factors(after)[97:]) > 10
    assert not continued(before, 200, 90).schedule.restarts
    assert not continued(before, 99, 97).schedule.restarts


def test_a_run_extended_again_before_its_end_continues_from_its_present_rate(
    notes: list[str],
) -> None:
    before = Config().with_values({"train.max_steps": 200, "schedule.restarts": [[100, 0.5]]})
    after = continued(before, 1000, 150)
    assert factors(after)[:150] == factors(before)[:150]
    assert all(a > b for a, b in pairwise(factors(after)[149:]))
    assert factors(after)[-1] == pytest.approx(0.25 / 850, rel=0.02)
    assert notes == []
    early = continued(before, 1000, 80)  # the last restart is yet to come
    assert early == before.with_values({"train.max_steps": 1000})
    assert continued(before, 1000, 195).schedule.restarts == ((100, 0.5), (195, 0.5))


@pytest.mark.parametrize(("batch", "parts", "more"), [(8, 1, 2), (9, 1, 3), (6, 2, 6)])
def test_out_of_memory_in_training_names_the_command_that_goes_on_with_the_same_losses(
    batch: int, parts: int, more: int, verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"train.batch_size": batch, "train.micro_batches": parts}
    chargpt.train(verse, settings=TINY | sizes, out="whole")
    real = Learner.apply_update

    def full(self: Learner, step: int, lr_factor: float) -> None:
        if step == 5 and self.train_config.micro_batches < more:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        real(self, step, lr_factor)

    monkeypatch.setattr(Learner, "apply_update", full)
    call = f"train('my run', start='resume', settings={{'train.micro_batches': {more}}})"
    with pytest.raises(DeviceError, match=re.escape(call)):
        chargpt.train(verse, settings=TINY | sizes, out="my run")
    resume = ("train", "--resume", "my run", "-s", "train.max_rollbacks=1")
    setting = f"-s train.micro_batches={more}"  # with those that no checkpoint has yet
    assert f"enough memory for training; give {setting} for" in refusal(cli(*resume))
    assert cli(*resume, *setting.split()).returncode == 0
    assert load_config(Path("my run", "config.yaml")).train.max_rollbacks == 1
    whole, resumed = (np.array(losses(Path(name))) for name in ("whole", "my run"))
    np.testing.assert_allclose(resumed, whole, rtol=1e-4)


def test_a_run_that_does_not_fit_into_the_memory_names_micro_batches_that_do(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, vocab_size = tiny_config(**{"train.batch_size": 64}), corpus.tokenizer.vocab_size
    limit = training_bytes(config, vocab_size, 64 // 8)
    monkeypatch.setattr("chargpt.device.memory_limit", lambda _: limit)
    monkeypatch.setattr(learner, "memory_limit", lambda _: limit)
    with pytest.raises(DeviceError, match=r"would need .*; give -s train.micro_batches=8 for the"):
        Trainer(config, corpus)
    Trainer(config.with_values({"train.micro_batches": 8}), corpus)
    config = config.with_values({"train.batch_size": 10**18 - 11})  # a prime: none of its divisors
    cpu, gpu = (memory_remedy(config, vocab_size, 1, torch.device(each)) for each in ("cpu", "mps"))
    assert cpu == "end other programs, or make the model, its block or its batch smaller"
    assert gpu == "give -s device=cpu to train on the CPU"


def test_a_few_steps_more_of_a_very_long_run_have_a_learning_rate() -> None:
    before = Config().with_values({"train.max_steps": 3_000_000})
    schedule = continued(before, 3_000_002, 3_000_000).schedule
    assert lr_factor_at(3_000_000, schedule, 3_000_002) > 0


def test_repeating_a_command_keeps_the_rates_of_a_rollback_and_the_resolved_device(
    corpus: Corpus, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    trainer = start_trainer(tiny_config(**{"train.max_steps": 4}), corpus, folder.path)
    run_steps(trainer)
    changed = {"optim.lr": 0.001, "schedule.cooldown": 0.9}  # by a rollback, and by re-planning
    trainer.change_config(trainer.config.with_values(changed))
    trainer.state = dataclasses.replace(trainer.state, rollbacks=1)
    trainer.writer.newest = None
    trainer.save()
    request = Request(settings={"schedule.cooldown": 0.6}, budget="30s")
    given = request.repeated_settings()
    wanted = {"optim.lr": 0.002, "device": "auto", "dtype": "auto", "train.max_steps": 9, **given}
    _, config, notes = resume(folder, wanted, same_command=True)
    assert (config.optim.lr, config.device, config.dtype) == (0.001, "cpu", "float32")
    assert config.train.max_steps == 9
    assert all("of their peak" in note for note in notes)  # the run is longer now
    _, config, notes = resume(folder, {"optim.lr": 0.002, "train.max_steps": 9})
    assert config.optim.lr == 0.002  # another command may change it
    assert any("rates change at step 4" in note for note in notes)
