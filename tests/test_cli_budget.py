"""`chargpt train` under a time budget."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Cli
from shared_runs import QUICK
from starting import create_run, pace_of

from chargpt.cli.console import short
from chargpt.cli.report import show_result
from chargpt.cli.train import StepView, describe_model, describe_plan, run_steps
from chargpt.config import Config, ModelConfig, TextConfig, load_config, parse_override
from chargpt.device import ThreadTuner
from chargpt.files import dump_yaml
from chargpt.store.folder import RunFolder
from chargpt.store.listing import summarize
from chargpt.store.run import load_run
from chargpt.text.prepare import load_corpus
from chargpt.training import deadline as deadline_module
from chargpt.training import trainer as trainer_module
from chargpt.training.budget import TIMED_TOKENS, Trials
from chargpt.training.deadline import CLOSING_SECONDS, Deadline, Pace, mixture_seconds
from chargpt.training.optim import lr_factor_at
from chargpt.training.planner import Planner
from chargpt.training.start import Session

TINY = (
    "device=cpu",
    "model.n_layer=1",
    "model.n_embd=16",
    "model.block_size=16",
    "train.batch_size=4",
    "train.sample_every=0",
)
STEPS = ("train.max_steps=6", "train.evaluate_every=3", "train.save_every=3")


def tiny(verse: Path, *settings: str) -> Config:
    options = dict(map(parse_override, (*TINY, *settings)))
    return load_config("gpt", {"text.path": verse, **options})


def end_after(created: Session, step: int) -> Pace:
    """Let the time of a run end after a step, without re-planning before."""
    trainer = created.trainer
    deadline = Deadline(1e3, 0.0, lambda: 0.0 if trainer.state.step < step else 2e3)
    created.pace = pace_of(deadline)
    created.pace.replanned = lambda *_: None  # type: ignore[method-assign]
    return created.pace


def test_the_bar_does_not_show_the_loss_of_the_untrained_model(verse: Path, tmp_path: Path) -> None:
    created = create_run(tiny(verse, *STEPS), tmp_path / "run")
    view = StepView(created)
    losses = {}
    for report in created.reports():
        view.show(report)
        if report.validation is not None:
            losses[report.step] = report.validation.nats_per_char
    assert list(losses) == [0, 3, 6]
    assert view.validation == [losses[3], losses[6]]


@pytest.mark.parametrize(("every", "save_every"), [(3, 3), (100, 3), (100, 1)])
def test_at_the_deadline_the_run_is_evaluated_saved_and_stops(
    verse: Path, tmp_path: Path, notes: list[str], every: int, save_every: int
) -> None:
    config = tiny(verse, "schedule.cooldown=0.5", *STEPS, f"train.evaluate_every={every}")
    config = config.with_values({"train.save_every": save_every})
    created = create_run(config, tmp_path / "run")
    trainer = created.trainer
    end_after(created, 5)
    run_steps(created)
    message = " ".join(notes)
    assert "the machine slowed down: stopped at step 5" in message
    assert "give a longer budget" in message
    step = trainer.state.step
    assert step == 5 < trainer.config.train.max_steps
    assert load_run(tmp_path / "run", "latest").step == step
    assert trainer.state.best_step == load_run(tmp_path / "run").step == step
    assert load_run(tmp_path / "run").state.best_step == step
    assert load_config(tmp_path / "run" / "config.yaml") == trainer.config


@pytest.mark.parametrize("every", [39, 100])
def test_a_run_that_the_deadline_ends_after_nearly_all_steps_is_finished(
    verse: Path, tmp_path: Path, notes: list[str], every: int
) -> None:
    config = tiny(verse, "schedule.cooldown=0.5", f"train.evaluate_every={every}")
    created = create_run(config.with_values({"train.max_steps": 40}), tmp_path / "run")
    end_after(created, 39)
    run_steps(created)
    assert not any("slowed down" in note for note in notes)
    run = load_run(tmp_path / "run")  # the best, whose checkpoint may have been saved twice
    assert not run.notes
    assert run.state.best_step == run.step == 39 == run.config.train.max_steps
    assert summarize(tmp_path / "run").status == "finished"
    factors = [
        [lr_factor_at(step, each.schedule, each.train.max_steps) for step in range(39)]
        for each in (config.with_values({"train.max_steps": 40}), run.config)
    ]
    assert factors[0] == factors[1]


def test_interrupting_the_closing_table_says_that_all_steps_are_saved(
    verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("chargpt.cli.report.load_run", interrupted)
    settings = [word for setting in (*TINY, *STEPS) for word in ("-s", setting)]
    done = cli("train", verse, *settings, "--out", "mine")
    assert done.returncode == 130
    assert "the run is saved in mine, " in done.stderr
    assert load_run(Path("mine"), "latest").step == 6


def test_a_budget_that_has_run_out_before_the_first_step_still_trains_one(
    verse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    created = create_run(tiny(verse, *STEPS), tmp_path / "run")
    created.pace = pace_of(Deadline(5.0, 0.0, lambda: 100.0))
    run_steps(created)
    assert created.trainer.state.step == 1
    show_result(created)
    printed = capsys.readouterr()
    assert "this took 100 s instead of 5 s" in printed.err
    assert "trained to step 1 in" in printed.out
    assert load_run(tmp_path / "run", "latest").step == 1


def test_threads_that_became_faster_are_used_and_recorded(
    verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    created = create_run(tiny(verse, *STEPS, "schedule.cooldown=0"), tmp_path / "run")
    monkeypatch.setattr(trainer_module, "SPEED_SECONDS", 0.0)
    tuner = ThreadTuner(4)
    monkeypatch.setattr(tuner, "update", lambda speed: 3 if speed else None)
    created.pace = pace_of(Deadline.from_budget(1000.0), thread_tuner=tuner)
    run_steps(created)
    assert any("continuing with threads=3" in note for note in notes)
    assert load_config(tmp_path / "run" / "config.yaml").threads == 3
    assert load_run(tmp_path / "run", "latest").config.threads == 3


@pytest.mark.parametrize(("before", "after"), [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0)])
def test_a_budget_is_met_when_the_step_time_changes(
    before: float, after: float, verse: Path, tmp_path: Path, notes: list[str]
) -> None:
    seconds, changes_at = 200.0, 75
    max_steps = f"train.max_steps={int(0.9 * seconds / before)}"
    created = create_run(tiny(verse, "schedule.cooldown=0.7", max_steps), tmp_path / "run")
    trainer, clock = created.trainer, SimpleNamespace(now=0.0)
    advance = trainer.train_step

    def timed_advance() -> Any:
        clock.now += before if clock.now < changes_at else after
        return advance()

    trainer.train_step = timed_advance  # type: ignore[method-assign]
    deadline = Deadline.from_budget(seconds, 0.0, lambda: clock.now)
    created.pace, until = pace_of(deadline), deadline.remaining
    run_steps(created)
    assert 0.9 * until < clock.now <= until < seconds
    assert trainer.finished, "the run stopped before its last step"
    assert not any("slowed down" in note for note in notes)
    assert load_config(tmp_path / "run" / "config.yaml") == trainer.config


@pytest.mark.parametrize("seconds", [100.0, 300.0])
def test_a_budget_reserves_the_measured_time_of_scoring(
    seconds: float, verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_seconds, report_tokens = (2, 40_000) if seconds == 300 else (0, 0)
    monkeypatch.setattr(Trials, "__call__", lambda self, *_: 1e5)
    token_seconds = 2.0 / TIMED_TOKENS  # scoring these takes two seconds
    monkeypatch.setattr(Trials, "measure_scoring", lambda *_: token_seconds)
    monkeypatch.setattr(Trials, "measure_mixing", lambda *_: 1e-4)  # of a large vocabulary
    clock = SimpleNamespace(now=0.0)
    fixed = {word.split("=")[0] for word in (*TINY, *STEPS[1:])}
    deadline = Deadline.from_budget(seconds, 0.0, lambda: clock.now)
    created = create_run(tiny(verse, *STEPS), tmp_path / "run", deadline, fixed)
    corpus, config = created.trainer.corpus, created.trainer.config
    clock.now = 10.0
    val = len(corpus.split("val"))
    limit = config.train.evaluation_tokens
    scored = sum(min(limit, len(corpus.split(name))) for name in ("train", "val"))
    n_mixture = len(corpus.split("mixture"))
    scored += report_tokens + n_mixture + round(1.3 * min(limit, val))  # the mixture
    closing = CLOSING_SECONDS + 1.3 * token_seconds * scored + report_seconds
    closing += mixture_seconds(corpus) + 1.3 * 1e-4 * (n_mixture + min(limit, val))
    assert created.pace is not None
    assert created.pace.deadline.remaining == pytest.approx(seconds - 10 - closing)


def test_the_plan_leaves_time_for_the_mixture(
    verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    available = []

    def planned(self: Planner) -> Pace:
        available.append(self.deadline.remaining)
        return pace_of(self.deadline, self.config)

    monkeypatch.setattr(Planner, "plan", planned)
    monkeypatch.setattr(Trials, "measure_scoring", lambda *_: 1e-6)
    monkeypatch.setattr(Trials, "measure_mixing", lambda *_: 0.0)
    for name, fixed in (("with", ()), ("without", ("text.mixture_characters",))):
        deadline = Deadline.from_budget(10.0, 0.0, lambda: 0.0)
        created = create_run(tiny(verse, *STEPS), tmp_path / name, deadline, fixed)
        assert bool(len(created.trainer.corpus.split("mixture"))) == (name == "with")
    counted = 0.9 * len(verse.read_text(encoding="utf-8")) / 1e6
    expected = deadline_module.GATE_SECONDS + deadline_module.COUNTING_SECONDS * counted
    assert available[1] - available[0] == pytest.approx(expected, abs=0.001)


def test_speeds_are_in_characters_and_models_by_their_kind() -> None:
    corpus = load_corpus(TextConfig(min_count=300), text="sea é light è\n" * 200)
    assert corpus.characters_per_token < 0.9
    trainer = trainer_module.Trainer(load_config("bigram"), corpus)
    pace = pace_of(Deadline.from_budget(10.0), speed=1e6)
    shown = "\n".join(describe_plan(Session(trainer, RunFolder(Path("run")), None, 1.0, pace)))
    assert f"{1e6 * corpus.characters_per_token:,.0f} characters/s" in shown
    assert f"{trainer.model.num_parameters():,} parameters" in shown
    assert f"= {short(round(650 * 8192 * corpus.characters_per_token))} characters (" in shown
    report = trainer_module.StepReport(50, 100)
    trainer.speed_since = 0, time.perf_counter() - 1000
    trainer._measure_speed(report)
    n_characters = 50 * trainer.config.tokens_per_step * corpus.characters_per_token
    assert report.speed == pytest.approx(n_characters / 1000, rel=0.01)
    assert trainer.speed_since[0] == 50  # the next one is measured from here on
    assert describe_model(ModelConfig(kind="gpt2")).startswith("gpt2 4 layers")


@pytest.mark.slow
def test_the_config_of_a_run_with_a_budget_reproduces_its_losses(verse: Path, cli: Cli) -> None:
    small = ["-s", "model.n_layer=1", "-s", "model.n_embd=16", "-s", "model.block_size=16"]
    done = cli("train", verse, "--budget", "10s", "--out", "timed", "--device", "cpu", *small)
    assert done.returncode == 0, done.stderr
    assert "budget  10 s: " in done.stderr
    config = load_config("timed/config.yaml")
    assert config.text.documents is None  # not `auto`: it was decided
    assert config.train.max_steps > 20
    assert 0 < config.schedule.cooldown < 1
    again = cli("train", verse, "-c", "timed/config.yaml", "--out", "again")
    assert again.returncode == 0, again.stderr
    # the first run may have been stopped early on a slow machine: compare the steps that it did
    timed, repeated = (
        {record["step"]: record["loss"] for record in folder.metrics.records() if "loss" in record}
        for folder in (RunFolder(Path("timed")), RunFolder(Path("again")))
    )
    assert len(timed) > 20
    assert {step: repeated[step] for step in timed} == timed


@pytest.mark.slow
def test_a_run_is_resumed_for_a_budget(verse: Path, cli: Cli) -> None:
    assert cli("train", verse, *QUICK, "-s", "schedule.restarts=[[2, 0.3]]", "-o", "run")
    before = load_run("run").config
    start = time.perf_counter()
    done = cli("train", "--resume", "run", "--budget", "6s")
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 12
    assert "budget  6.0 s: " in done.stderr
    after = load_run("run", "latest")
    assert after.step >= before.train.max_steps + 20
    for step in range(before.train.max_steps):  # the config still repeats the run
        old, new = (
            lr_factor_at(step, each.schedule, each.train.max_steps)
            for each in (before, after.config)
        )
        assert new == old


def test_another_number_of_steps_drops_what_was_re_planned(tmp_path: Path) -> None:
    planned = {"train.max_steps": 80, "schedule.restarts": [[70, 0.1]]}
    config = Config().with_values({**planned, "schedule.decay_points": [[20, 60]]})
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(config.model_dump(mode="json")))
    for max_steps in (80, 60, 100):
        changed = load_config(file, {"train.max_steps": max_steps})
        schedule = config.schedule if max_steps == 80 else Config().schedule
        assert (changed.train.max_steps, changed.schedule) == (max_steps, schedule)
    points = load_config(file, {"train.max_steps": 60, "schedule.decay_points": [[9, 50]]})
    assert points.schedule.decay_points == ((9, 50),)
