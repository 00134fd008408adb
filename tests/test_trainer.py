"""Training does what it says: exactly, resumably, and to the closed-form bigram."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from chargpt.config import Config, TextConfig, load_config
from chargpt.errors import ConfigError, DivergedError, RunError, TextError
from chargpt.inference.baselines import baselines
from chargpt.store.folder import RunFolder
from chargpt.store.run import load_run
from chargpt.text.batches import Batches
from chargpt.text.corpus import Corpus, load_corpus
from chargpt.training.cost import expected_cost
from chargpt.training.report import StepReport
from chargpt.training.resume import resume
from chargpt.training.trainer import Trainer

TINY = {
    "device": "cpu",
    "dtype": "float32",
    "model.n_layer": 2,
    "model.n_embd": 32,
    "model.block_size": 16,
    "train.max_steps": 12,
    "train.batch_size": 4,
    "train.evaluate_every": 4,
    "train.evaluate_characters": 500,
    "train.save_every": 3,
    "train.sample_every": 0,
    "train.keep_last": 50,
}
VARIANTS: dict[str, dict[str, object]] = {
    "muon": {},
    "adamw": {"optim.name": "adamw"},
    "dropout and accumulation": {"model.dropout": 0.3, "train.accumulate": 2},
    "ema and soft targets": {"train.ema": 0.9, "train.ngram_target_weight": 0.6},
    "cosine and bfloat16": {"schedule.kind": "cosine", "dtype": "bfloat16"},
    "bigram": {"model.kind": "bigram", "optim.name": "adamw", "train.clip_norm": None},
    "average rung": {"model.attention": "average", "model.mlp": "none", "train.patience": 50},
}


@pytest.fixture
def corpus(verse: Path) -> Corpus:
    return load_corpus(TextConfig(path=str(verse)))


def tiny(**changes: object) -> Config:
    return Config().with_values(TINY | changes)


def train(
    config: Config, corpus: Corpus, path: Path, stop_at: int | None = None
) -> list[StepReport]:
    trainer = Trainer(config, corpus, folder=RunFolder(path))
    RunFolder(path).create(trainer.config, corpus.tokenizer, force=False)
    return run_steps(trainer, stop_at)


def run_steps(trainer: Trainer, stop_at: int | None = None) -> list[StepReport]:
    reports = []
    for report in trainer.steps():
        reports.append(report)
        if report.step == stop_at:
            trainer.save()
            break
    return reports


def resume_and_finish(path: Path, corpus: Corpus) -> list[StepReport]:
    saved, config, _ = resume(RunFolder(path), {})
    return run_steps(Trainer(config, corpus, folder=RunFolder(path), saved=saved))


def weights(path: Path, name: str = "model", step: int = 12) -> bytes:
    return (path / "checkpoints" / f"step-{step:08d}" / f"{name}.safetensors").read_bytes()


def losses(path: Path) -> list[tuple[int, float, float]]:
    records = [r for r in RunFolder(path).metrics.records() if "loss" in r]
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_config_twice_gives_the_same_bytes_and_so_does_stopping_anywhere(
    variant: str, corpus: Corpus, tmp_path: Path
) -> None:
    config = tiny(**VARIANTS[variant])
    train(config, corpus, tmp_path / "a")
    train(config, corpus, tmp_path / "b")
    stops = (0, 1, 5, 11)
    for stop in stops:
        train(config, corpus, tmp_path / f"stop{stop}", stop_at=stop)
        resume_and_finish(tmp_path / f"stop{stop}", corpus)
    for other in ("b", *(f"stop{stop}" for stop in stops)):
        for name in ("model", "optimizer"):
            assert weights(tmp_path / "a", name) == weights(tmp_path / other, name), (other, name)
        assert losses(tmp_path / "a") == losses(tmp_path / other)
    assert [step for step, *_ in losses(tmp_path / "a")] == list(range(1, 13))


def test_another_seed_gives_another_model(corpus: Corpus, tmp_path: Path) -> None:
    train(tiny(), corpus, tmp_path / "a")
    train(tiny(seed=1), corpus, tmp_path / "b")
    assert weights(tmp_path / "a") != weights(tmp_path / "b")


def test_the_loss_starts_at_ln_v_and_falls_below_the_unigram(corpus: Corpus) -> None:
    trainer = Trainer(tiny(**{"train.max_steps": 60, "train.batch_size": 16}), corpus)
    reports = run_steps(trainer)
    assert reports[0].step == 0
    assert reports[0].validation is not None
    ln_v = math.log(corpus.tokenizer.vocab_size)
    assert reports[0].validation.nats_per_char == pytest.approx(ln_v, rel=0.01)
    assert reports[-1].validation is not None
    assert reports[-1].validation.nats_per_char < baselines(corpus)["unigram"]


def test_accumulation_changes_nothing_but_memory(corpus: Corpus) -> None:
    whole = run_steps(Trainer(tiny(), corpus))
    parts = run_steps(Trainer(tiny(**{"train.accumulate": 4}), corpus))
    for one, other in zip(whole[1:], parts[1:], strict=True):
        assert one.loss is not None
        assert other.loss is not None
        assert float(one.loss) == pytest.approx(float(other.loss), abs=1e-5)


def test_dropout_differs_between_micro_batches_and_is_off_in_evaluation(corpus: Corpus) -> None:
    trainer = Trainer(tiny(**{"model.dropout": 0.5, "train.max_steps": 4}), corpus)
    run_steps(trainer)
    block = trainer.learner.batches.at(0)
    seen = []
    for micro in (0, 1, 0):
        trainer.learner.seed_dropout(0, micro)
        seen.append(trainer.learner.objective(block)[1].item())
    assert seen[0] == seen[2] != seen[1]
    first, second = (trainer.validator.evaluate("val").nats_per_char for _ in range(2))
    assert first == second


def test_the_average_of_weights_is_what_is_evaluated_and_kept(
    corpus: Corpus, tmp_path: Path
) -> None:
    train(tiny(**{"train.ema": 0.9}), corpus, tmp_path / "ema")
    saved, _ = RunFolder(tmp_path / "ema").load("latest")
    name = "head.weight"
    assert not torch.equal(saved.model[name], saved.optimizer[f"raw.{name}"])
    plain = Trainer(tiny(), corpus)
    run_steps(plain)
    assert torch.equal(plain.model.state_dict()[name], saved.optimizer[f"raw.{name}"])


def test_patience_stops_a_run_that_no_longer_learns(corpus: Corpus, tmp_path: Path) -> None:
    hopeless = {"optim.lr": 1e-12, "optim.matrix_lr": 1e-12, "train.patience": 2}
    reports = train(
        tiny(
            **hopeless, **{"train.evaluate_every": 1, "train.max_steps": 40, "model.qk_norm": False}
        ),
        corpus,
        tmp_path / "run",
    )
    assert reports[-1].step < 40
    with pytest.raises(RunError, match="patience"):
        resume(RunFolder(tmp_path / "run"), {})


def test_the_best_checkpoint_is_never_replaced_by_a_worse_one(
    corpus: Corpus, tmp_path: Path
) -> None:
    wild = {"optim.lr": 3.0, "optim.matrix_lr": 3.0, "train.evaluate_every": 1}
    reports = train(tiny(**wild, **{"train.clip_norm": None}), corpus, tmp_path / "run")
    measured = {r.step: r.validation.nats_per_char for r in reports if r.validation and r.step}
    best = min(measured, key=lambda step: measured[step])
    assert best != 12
    loaded = load_run(tmp_path / "run", "best", "cpu")
    assert loaded.step == best


def spoil(trainer: Trainer, step: int, times: int = 1) -> None:
    """Make the gradient of one step (counted from 0) infinite, the first so many times."""
    real = trainer.learner.accumulate_gradients
    left = [times]

    def accumulate_gradients(number: int) -> torch.Tensor:
        loss = real(number)
        if number == step and left[0]:
            left[0] -= 1
            gradient = next(trainer.model.parameters()).grad
            assert gradient is not None
            gradient[0] = math.inf
        return loss

    trainer.learner.accumulate_gradients = accumulate_gradients  # type: ignore[method-assign]


def started(config: Config, corpus: Corpus, path: Path) -> Trainer:
    trainer = Trainer(config, corpus, folder=RunFolder(path))
    RunFolder(path).create(trainer.config, corpus.tokenizer, force=False)
    return trainer


def test_bad_numbers_stop_a_run_before_the_update_and_say_how_to_go_on(
    corpus: Corpus, tmp_path: Path
) -> None:
    trainer = started(tiny(), corpus, tmp_path / "run")
    spoil(trainer, 7)
    reports = trainer.steps()
    for _ in range(8):  # the first is before any update
        next(reports)
    before = {name: p.clone() for name, p in trainer.model.state_dict().items()}
    with pytest.raises(
        DivergedError, match=r"gradient is .* step 8 .* checkpoint is step 6"
    ) as said:
        next(reports)
    assert "-s optim.lr=" in str(said.value)
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.state_dict().items())
    resume_and_finish(tmp_path / "run", corpus)
    train(tiny(), corpus, tmp_path / "untouched")
    assert weights(tmp_path / "run") == weights(tmp_path / "untouched")


def test_bad_weights_are_never_saved(corpus: Corpus, tmp_path: Path) -> None:
    trainer = started(tiny(), corpus, tmp_path / "run")
    next(trainer.steps())
    with torch.no_grad():
        next(trainer.model.parameters())[0] = math.nan
    with pytest.raises(DivergedError, match="weights are no longer finite"):
        trainer.save()
    with pytest.raises(RunError, match="no checkpoint yet"):
        load_run(tmp_path / "run")


def test_a_run_can_return_by_itself_to_its_last_checkpoint_at_half_the_rates(
    corpus: Corpus, tmp_path: Path
) -> None:
    trainer = started(tiny(**{"train.rollbacks": 2}), corpus, tmp_path / "run")
    rate = trainer.config.optim.lr
    spoil(trainer, 7, times=2)
    reports = run_steps(trainer)
    notes = [note for report in reports for note in report.notes]
    assert len(notes) == 2
    assert "rolled back to step 6" in notes[0]
    returns = [r for r in RunFolder(tmp_path / "run").metrics.records() if "rolled_back_from" in r]
    # the new rates are saved with the next step
    assert [(r["step"], r["rolled_back_from"]) for r in returns] == [(6, 8), (7, 8)]
    assert [r["optim.lr"] for r in returns] == [rate / 2, rate / 4]
    saved, _ = RunFolder(tmp_path / "run").load("latest")
    assert saved.state.step == 12
    assert saved.state.rollbacks == 2
    assert saved.config.optim.lr == rate / 4
    assert load_config(tmp_path / "run" / "config.yaml").optim.lr == rate / 4
    once = started(tiny(**{"train.rollbacks": 1}), corpus, tmp_path / "once")
    spoil(once, 7, times=2)
    with pytest.raises(DivergedError):
        run_steps(once)


FULL = shutil._ntuple_diskusage(10**9, 10**9, 0)


def test_training_goes_on_through_a_disk_that_refuses_for_a_while(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = started(tiny(), corpus, tmp_path / "run")
    troubles = []
    for report in trainer.steps():
        troubles.append(trainer.writer.disk_error)
        if report.step == 4:
            monkeypatch.setattr(shutil, "disk_usage", lambda _: FULL)
        if report.step == 7:
            assert trainer.writer.saved_step == 4  # saved there as the best
            monkeypatch.undo()
    assert [trouble is not None for trouble in troubles] == [False] * 6 + [True] * 2 + [False] * 5
    train(tiny(), corpus, tmp_path / "untouched")
    assert weights(tmp_path / "run") == weights(tmp_path / "untouched")


def test_a_best_checkpoint_that_the_disk_refused_is_not_the_best_that_there_is(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = started(tiny(**{"train.evaluate_every": 2}), corpus, tmp_path / "run")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: FULL)
    seen = {}
    for report in trainer.steps():
        if report.validation:
            seen[report.step] = report.validation.nats_per_char
        if report.step == 11:
            assert trainer.state.best_step is None
            monkeypatch.undo()
    assert min(seen, key=lambda step: seen[step]) == 12  # it learns
    assert load_run(tmp_path / "run", "best", "cpu").step == 12


def test_a_changed_length_is_saved_with_the_next_step(corpus: Corpus, tmp_path: Path) -> None:
    trainer = started(tiny(**{"train.save_every": 100}), corpus, tmp_path / "run")
    for report in trainer.steps():
        if report.step == 5:
            trainer.change_config(trainer.config.with_values({"train.max_steps": 9}))
        if report.step == 6:
            break
    saved, config, _ = resume(RunFolder(tmp_path / "run"), {})
    assert (saved.state.step, config.train.max_steps) == (6, 9)


def test_a_full_disk_is_not_asked_again_before_a_save_is_due(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = {"train.save_every": 100, "train.evaluate_every": 100}
    trainer = started(tiny(**quiet), corpus, tmp_path / "run")
    asked = []
    for report in trainer.steps():
        if report.step == 4:
            monkeypatch.setattr(RunFolder, "require_space", lambda run, _: full(asked, run))
            trainer.change_config(trainer.config.with_values({"train.max_steps": 9}))
    assert len(asked) == 2  # with the step after the change, and at the end


def full(asked: list[RunFolder], run: RunFolder) -> None:
    asked.append(run)
    raise OSError(28, "No space left on device")


def test_lower_rates_for_the_rest_of_a_run_are_taken_and_told(
    corpus: Corpus, tmp_path: Path
) -> None:
    train(tiny(), corpus, tmp_path / "run", stop_at=5)
    _, config, notes = resume(RunFolder(tmp_path / "run"), {"optim.lr": 0.001})
    assert config.optim.lr == 0.001
    assert any("rates change at step 5" in note for note in notes)


def test_resume_refuses_what_would_make_it_another_run(corpus: Corpus, tmp_path: Path) -> None:
    train(tiny(), corpus, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(RunError, match="has done all its 12 steps"):
        resume(folder, {})
    with pytest.raises(ConfigError, match=r"model\.n_layer cannot change"):
        resume(folder, {"model.n_layer": 3})
    _, config, _ = resume(folder, {"train.max_steps": 20})
    assert config.train.max_steps == 20


def test_resume_tells_of_another_number_of_threads(corpus: Corpus, tmp_path: Path) -> None:
    train(tiny(), corpus, tmp_path / "run", stop_at=3)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        _, _, notes = resume(RunFolder(tmp_path / "run"), {})
    finally:
        torch.set_num_threads(threads)
    assert any(f"OMP_NUM_THREADS={threads}" in note for note in notes)


def test_a_batch_that_does_not_divide_is_refused(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match="must be divisible"):
        tiny(**{"train.batch_size": 5, "train.accumulate": 2})


def test_a_text_shorter_than_a_block_is_refused_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("forty characters in all, no more than it.")
    short = load_corpus(TextConfig(path=str(tmp_path / "short.txt")))
    with pytest.raises(TextError, match="41"):
        Trainer(tiny(), short)


def test_metrics_hold_a_line_for_every_step_and_evaluation(corpus: Corpus, tmp_path: Path) -> None:
    train(tiny(), corpus, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 13))
    assert [r["step"] for r in records if "val_nats_per_char" in r] == [0, 4, 8, 12]
    assert all(r["seconds"] >= 0 for r in records)


def test_the_plan_leaves_the_run_as_it_was(corpus: Corpus) -> None:
    trainer = Trainer(tiny(**{"model.dropout": 0.2}), corpus)
    plan = expected_cost(trainer.config, trainer.learner, 0)
    assert plan.parameters == trainer.model.parameter_count()
    assert plan.characters == 12 * 4 * 16
    assert plan.seconds > 0
    planned = run_steps(trainer)
    unplanned = run_steps(Trainer(tiny(**{"model.dropout": 0.2}), corpus))
    assert [r.loss for r in planned] == [r.loss for r in unplanned]


def test_samples_along_the_way_do_not_disturb_training(corpus: Corpus) -> None:
    quiet = run_steps(Trainer(tiny(**{"model.dropout": 0.2}), corpus))
    talking = run_steps(Trainer(tiny(**{"model.dropout": 0.2, "train.sample_every": 4}), corpus))
    assert [r.loss for r in quiet] == [r.loss for r in talking]
    samples = [r.sample for r in talking if r.sample is not None]
    assert len(samples) == 3
    assert all(len(text) == 200 for text in samples)


# -- batches ----------------------------------------------------------------------------------


def test_a_batch_is_a_pure_function_of_seed_and_step() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    one, two = Batches(tokens, 8, 16, seed=5), Batches(tokens, 8, 16, seed=5)
    for step in (3, 0, 3, 10**9):
        assert torch.equal(one.at(step), two.at(step))
    assert not torch.equal(one.at(0), one.at(1))
    assert not torch.equal(one.at(0), Batches(tokens, 8, 16, seed=6).at(0))


def test_rows_are_runs_of_the_text_and_ranks_share_one_batch() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    batches = Batches(tokens, 8, 16, seed=0)
    whole = batches.at(2)
    assert whole.shape == (16, 9)
    assert whole.dtype == torch.int64
    assert (whole.diff(dim=1) == 1).all()
    parts = [batches.at(2, slice(start, start + 4)) for start in range(0, 16, 4)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32])
def test_a_batch_gathered_where_the_tokens_are_kept_is_the_same(kind: type) -> None:
    tokens = np.random.default_rng(1).integers(0, 200, 1000).astype(kind)
    plain, resident = Batches(tokens, 8, 16, seed=5), Batches(tokens, 8, 16, seed=5)
    resident.to_device(torch.device("cpu"))
    assert resident.resident is not None
    for step, rows in ((0, slice(None)), (7, slice(4, 12))):
        assert torch.equal(plain.at(step, rows), resident.at(step, rows))


def test_offsets_cover_every_valid_start_evenly_and_no_other() -> None:
    tokens = np.zeros(13, dtype=np.uint8)
    batches = Batches(tokens, 8, 1000, seed=0)
    offsets = np.concatenate([batches.offsets_at(step) for step in range(20)])
    counts = np.bincount(offsets, minlength=5)
    assert counts.size == 5  # starts 0 to 4, the last block ending with the text
    assert counts.min() > 3700
    assert counts.max() < 4300


# -- what the notebooks' bigram comes to ------------------------------------------------------


@pytest.mark.slow
def test_the_notebook_bigram_comes_within_005_of_its_closed_form(corpus: Corpus) -> None:
    config = load_config("notebook", [f"text.path={json.dumps(corpus.name)}", "device=cpu"])
    trainer = Trainer(config, corpus)
    for _ in trainer.steps():
        pass
    trained = trainer.validator.evaluate("val").nats_per_char
    assert trained == pytest.approx(baselines(corpus)["bigram"], abs=0.05)


def test_the_shipped_bigram_comes_within_001_of_its_closed_form(corpus: Corpus) -> None:
    config = load_config("bigram", ["device=cpu", "train.sample_every=0"])
    trainer = Trainer(config, corpus)
    for _ in trainer.steps():
        pass
    trained = trainer.validator.evaluate("train").nats_per_char
    assert trained == pytest.approx(baselines(corpus, "train")["bigram"], abs=0.01)


def test_a_command_given_again_does_not_undo_what_the_run_has_made_of_it(
    corpus: Corpus, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    trainer = Trainer(tiny(**{"train.max_steps": 4}), corpus, folder=folder)
    folder.create(trainer.config, corpus.tokenizer, force=False)
    for _ in trainer.steps():
        pass
    trainer.change_config(trainer.config.with_values({"optim.lr": 0.001}))
    trainer.state = dataclasses.replace(trainer.state, rollbacks=1)
    trainer.writer.saved_step = None
    trainer.save()
    wanted = {"optim.lr": 0.002, "device": "auto", "dtype": "auto", "train.max_steps": 9}
    _, config, notes = resume(folder, wanted, same_command=True)
    assert (config.optim.lr, config.device, config.dtype) == (0.001, "cpu", "float32")
    assert config.train.max_steps == 9
    assert notes == []
    assert resume(folder, {"optim.lr": 0.002, "train.max_steps": 9})[1].optim.lr == 0.002
