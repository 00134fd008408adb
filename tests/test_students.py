"""Students: models that a run trains one after the other, each with the one before as teacher."""

import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import REPOSITORY, Cli, refusal
from hypothesis import given
from hypothesis import strategies as st
from shared_runs import QUICK
from starting import pace_of
from test_planner import choose, rates

from chargpt.analysis.compare import model_config
from chargpt.analysis.result import of_model
from chargpt.config import Config, load_config
from chargpt.distributed import RankGroup
from chargpt.errors import ConfigError, RunError
from chargpt.models import build_model, count_parameters
from chargpt.store.checkpoint import read_checkpoint
from chargpt.store.folder import RunFolder
from chargpt.store.verify import require_intact
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import load_corpus
from chargpt.training.deadline import Deadline, steps_of, with_max_steps, work_of
from chargpt.training.learner import Learner
from chargpt.training.planner import with_students
from chargpt.training.resume import continue_schedule
from chargpt.training.start import Request
from chargpt.training.trainer import Trainer

TEXT = REPOSITORY / "data" / "lighthouse.txt"
TWO = ("-s", "train.students=[2, 4]", "-s", "schedule.restarts=[[2, 1], [4, 1]]")
TINY = {"model.n_layer": 1, "model.n_head": 1, "model.n_embd": 32, "model.block_size": 16}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(TEXT)


def learner_of(corpus: Corpus, **values: object) -> Learner:
    config = load_config("gpt", {**TINY, "train.batch_size": 4, "dtype": "float32", **values})
    return Learner(config, corpus, RankGroup(), torch.device("cpu"))


def step(learner: Learner, number: int) -> None:
    learner.accumulate_gradients(number)
    learner.clip_gradients()
    learner.apply_update(number, 1.0)


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_a_student_starts_from_other_random_weights_with_the_averaged_ones_as_its_teacher(
    ema: float, corpus: Corpus
) -> None:
    learner = learner_of(corpus, **{"train.ema": ema, "model.dropout": 0.2})
    initial = {name: p.clone() for name, p in learner.model.state_dict().items()}
    for number in range(3):
        step(learner, number)
    expected = learner.ema_weights or learner.model.state_dict()
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    learner.start_student(1, load_config("gpt").optim)
    assert learner.teacher is not None
    taught = learner.teacher.state_dict()
    torch.manual_seed(learner.seed + 1)
    fresh = build_model(learner.model_config, corpus.tokenizer.vocab_size).state_dict()
    for name, tensor in learner.model.state_dict().items():
        torch.testing.assert_close(taught[name], expected[name], rtol=0, atol=0)
        torch.testing.assert_close(tensor, fresh[name], rtol=0, atol=0)
    assert any(not torch.equal(fresh[name], initial[name]) for name in fresh)
    assert all(not tensor.any() for name, tensor in learner.optimizer.state_dict().items())
    before = {name: tensor.clone() for name, tensor in taught.items()}
    step(learner, 3)
    assert all(torch.equal(before[name], tensor) for name, tensor in taught.items())


def test_the_objective_of_a_student_holds_its_teachers_probabilities_and_no_dropout(
    corpus: Corpus,
) -> None:
    values = {"train.teacher_weight": 0.7, "train.ngram_target_weight": 0.0, "model.dropout": 0.5}
    learner = learner_of(corpus, **values)
    for number in range(3):
        step(learner, number)
    learner.start_student(1, load_config("gpt").optim)
    step(learner, 3)  # its first logits are all zero
    batch = learner.batches.at(4)
    objective, loss = learner.objective(batch)
    assert learner.teacher is not None
    with torch.no_grad():
        probs = learner.teacher(batch[:, :-1]).softmax(dim=-1)
        log_probs = learner.model(batch[:, :-1]).log_softmax(dim=-1)
    expected = 0.3 * loss - 0.7 * (probs * log_probs).sum(dim=-1).mean()
    assert objective.item() == pytest.approx(expected.item(), rel=1e-5)
    assert learner.objective(batch)[0] == objective


def test_a_run_whose_student_has_no_time_left_ends_where_it_would_start_and_is_saved(
    corpus: Corpus, tmp_path: Path
) -> None:
    values = {"train.max_steps": 5, "train.evaluate_every": 100, "train.sample_every": 0}
    values |= {"train.batch_size": 4, "device": "cpu", "dtype": "float32"}
    trainer = Trainer(
        with_students(Config().with_values({**TINY, **values}), 2),
        corpus,
        folder=RunFolder(tmp_path / "run"),
    )
    RunFolder(tmp_path / "run").create(trainer.config, corpus.tokenizer)

    def adjusted(config: Config, step: int, _: float) -> Config:
        return with_max_steps(config, step, 6) if step == 5 else config

    pace = Mock(adjusted=adjusted)
    pace.deadline.is_over.return_value = False
    *_, last = trainer.steps(pace)
    assert (last.step, last.max_steps) == (5, 5)
    assert last.validation is not None
    saved = RunFolder(tmp_path / "run").load("latest")
    assert (saved.state.step, saved.config.train.students) == (5, ())
    assert saved.state.best_step == 5


@given(
    st.integers(10, 500),
    st.integers(2, 3),
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.1, 2)), min_size=1, max_size=5),
)
def test_replanning_starts_no_student_without_time_and_keeps_past_learning_rates(
    steps: int, n_models: int, changes: list[tuple[float, float]]
) -> None:
    values = {"train.max_steps": steps, "schedule.cooldown": 0.7, "schedule.warmup": 0}
    config, done = with_students(Config().with_values(values), n_models), 0
    planned = config.train.students
    for fraction, factor in changes:
        done += math.ceil(fraction * (config.train.max_steps - done))
        if done >= config.train.max_steps:
            break
        wanted = done + max(1, round(factor * (config.train.max_steps - done)))
        new = with_max_steps(config, done, wanted)
        end, started = new.train.max_steps, new.train.students
        assert end <= wanted
        assert rates(new, done) == rates(config, done)
        assert started == planned[: len(started)]
        assert [at for at, _ in new.schedule.restarts] == [*started]
        # a student has half of its time at least, unless it had begun
        assert all(at < done or end - at >= steps / 2 for at in started)
        # and where one is left out, the model before ends as planned or with the time
        assert started == config.train.students or end == min(wanted, planned[len(started)])
        # the decay ends at zero, if it needs more than the steps that are left
        if end > done:
            assert rates(new, end)[-1] <= 1.5 / (end - max([done, *started]))
        else:  # at the step of a student
            assert end in planned
        config = new


@pytest.mark.parametrize("students", [(100, 200), (100,), ()])
def test_replanning_gives_the_last_model_no_more_than_the_epochs_of_one(
    students: tuple[int, ...], notes: list[str]
) -> None:
    restarts = [(step, 1.0) for step in students]
    last = max(students, default=0)
    values = {"train.students": students, "schedule.restarts": restarts, "schedule.warmup": 0}
    config = Config().with_values({**values, "train.max_steps": last + 60})
    seconds = iter(range(10**6))
    deadline = Deadline.from_budget(10**5, 0.0, clock=lambda: float(next(seconds)))
    pace = pace_of(deadline, config, step_limit=100)
    pace.start(config, 0)
    for step in range(1, last + 60):
        config = pace.adjusted(config, step, 1.0)
    assert config.train.max_steps == last + 100
    assert "more epochs would only over-fit" in notes[0]


def test_a_short_text_with_much_time_is_read_by_a_model_and_its_students(
    corpus: Corpus, notes: list[str]
) -> None:
    def planned(seconds: float, fixed: tuple[str, ...] = (), **values: object) -> Config:
        config = load_config("gpt", {"model.n_layer": 4, "model.n_embd": 64, **values})
        return choose(config, {"model.n_layer", *fixed}, corpus, seconds).config

    n_train = len(corpus.split("train"))
    speed = 1e10 / 200_000  # about
    one, two, three = (planned(epochs * n_train / speed) for epochs in (8, 24, 60))
    assert one.train.students == one.schedule.restarts == ()
    assert len(two.train.students) == 1
    assert len(three.train.students) == 2
    for config in (two, three):
        steps = config.train.max_steps / (1 + len(config.train.students))
        assert [at / steps for at in config.train.students] == [1, 2][: len(config.train.students)]
        assert config.train.evaluate_every <= steps
    pace = choose(load_config("gpt"), (), corpus, 3600.0)
    assert pace.step_limit == pace.config.train.students[0]
    small = {"model.n_layer": 1, "model.n_embd": 16, "model.n_head": 1}
    large = {"model.n_layer": 5, "model.n_embd": 192, "model.n_head": 3}
    for size, limit in ((small, 40.0), ({}, None), (large, 10.0)):  # the smaller over-fits less
        longest = planned(3600.0, **size)
        n_parameters = count_parameters(longest.model, corpus.tokenizer.vocab_size)
        limit = limit or 65.0 / (n_parameters / n_train) ** 0.5
        epochs = longest.train.max_steps * longest.tokens_per_step / n_train
        assert epochs == pytest.approx(3 * limit, rel=0.02)
    assert any("ends before its time, since more epochs" in note for note in notes)
    for values in (
        {"train.from_run": "elsewhere"},
        {"train.patience": 3},
        {"train.teachers": ["elsewhere"]},
    ):
        assert planned(3600.0, (), **values).train.students == ()
    assert planned(3600.0, ("train.students",)).train.students == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("train.students=[2]",), "add [2, 1] to schedule.restarts"),
        ((*TWO[1::2], "train.students=[4, 2]"), "strictly increasing"),
        ((*TWO[1::2], "train.patience=3"), "students or patience"),
        ((*TWO[1::2], "train.from_run=elsewhere"), "students or from_run"),
    ],
)
def test_students_that_cannot_be_trained_are_rejected(
    settings: tuple[str, ...], message: str, cli: Cli
) -> None:
    words = [word for setting in settings for word in ("-s", setting)]
    assert message in refusal(cli("train", TEXT, *QUICK, *words))


def test_a_plan_names_students_and_a_teacher_that_is_damaged_is_noticed(cli: Cli) -> None:
    done = cli("train", TEXT, *QUICK, *TWO, "--out", "run")
    assert "epochs, of a model and then 2 students in turn)" in done.stderr
    folder = Path("run/checkpoints/step-00000006")
    saved = read_checkpoint(folder)
    require_intact(saved)
    require_intact(replace(saved, optimizer={}))  # as of an imported run
    assert saved.teacher_weights is not None
    del saved.optimizer[f"teacher.{next(iter(saved.teacher_weights))}"]
    with pytest.raises(RunError, match="do not match its config"):
        require_intact(saved)
    learner = learner_of(load_corpus(TEXT), **{"model.n_embd": 16})
    with pytest.raises(RunError, match="do not match its config"):
        learner.restore(saved, saved.config.optim)


@pytest.mark.parametrize(("best_step", "first", "last"), [(4, 0, 4), (5, 5, 8), (12, 9, 12)])
def test_a_summary_is_of_the_steps_of_the_best_model(best_step: int, first: int, last: int) -> None:
    values = {"train.students": [4, 8], "schedule.restarts": [(4, 1.0), (8, 1.0)]}
    run = Mock(step=best_step, config=Config().with_values(values))
    records = [{"step": number, "loss": 1.0} for number in range(13)]
    assert of_model(run, records) == records[first : last + 1]


@given(st.integers(0, 3000), st.floats(0, 5000))
def test_the_steps_of_some_work_take_that_work(step: int, work: float) -> None:
    config = with_students(Config().with_values({"train.max_steps": 1000}), 3)
    n_steps = steps_of(config, step, work)
    assert work_of(config, step, step + n_steps) <= work + 1e-6
    assert work_of(config, step, step + n_steps + 1) > work - 1e-6


@pytest.mark.parametrize(
    ("max_steps", "students", "end"),
    [(2000, (400, 800), 2000), (1000, (400, 800), 1000), (900, (400,), 800), (420, (), 400)],
)
def test_a_resume_with_fewer_steps_starts_no_student_without_time(
    max_steps: int, students: tuple[int, ...], end: int, tmp_path: Path
) -> None:
    values = {"train.max_steps": 400, "schedule.warmup": 0}
    before = with_students(Config().with_values(values), 3)
    after = before.with_values({"train.max_steps": max_steps})
    resumed = continue_schedule(before, after, 200)
    assert (resumed.train.students, resumed.train.max_steps) == (students, end)
    assert rates(resumed, end)[-1] < 0.01
    file = tmp_path / "config.yaml"
    file.write_text(before.to_yaml())
    assert load_config(file, {"train.max_steps": max_steps}).train.students == ()
    assert load_config(file).train.students == (400, 800)


def test_each_model_is_validated_and_saved_at_its_end_and_its_averages_are_its_own(
    corpus: Corpus, tmp_path: Path
) -> None:
    values = {"train.max_steps": 5, "train.evaluate_every": 4, "train.save_every": 4}
    values |= {"train.batch_size": 4, "device": "cpu", "dtype": "float32", "train.ema": 0.9}
    config = with_students(Config().with_values({**TINY, **values, "train.sample_every": 0}), 2)
    trainer = Trainer(config, corpus, folder=RunFolder(tmp_path / "run"))
    RunFolder(tmp_path / "run").create(trainer.config, corpus.tokenizer)
    n_bytes = trainer.checkpoint_bytes()
    update, seen = trainer.learner.apply_update, list[int]()
    trainer.learner.apply_update = lambda step, rate: (seen.append(step), update(step, rate))
    reports = [*trainer.steps()]
    assert [r.step for r in reports if r.validation] == [0, 4, 5, 9, 10]
    assert seen == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert RunFolder(tmp_path / "run").load("latest").state.step == 10
    assert (tmp_path / "run" / "checkpoints" / "step-00000009").is_dir()
    assert n_bytes == trainer.checkpoint_bytes()


def test_replanning_counts_the_forward_pass_of_a_teacher_once() -> None:
    config = with_students(Config().with_values({"train.max_steps": 100}), 2)
    now = [0.0]
    pace = pace_of(Deadline.from_budget(1000, 0.0, lambda: now[0]), config)
    pace.start(config, 100)
    now[0] += 50 * 1.25
    new = pace.replanned(config, 150)
    assert new is not None
    expected = 0.95 * pace.deadline.remaining / 1.25  # as fast as the student's steps so far
    assert new.train.max_steps - 150 == pytest.approx(expected, abs=1)


def test_a_budget_plans_the_students_of_a_config_again_and_takes_none_from_the_user(
    tmp_path: Path,
) -> None:
    values = {"train.students": (2,), "schedule.restarts": ((2, 1.0),)}
    (tmp_path / "config.yaml").write_text(Config().with_values(values).to_yaml())
    request = Request(config=str(tmp_path / "config.yaml"), budget="20s")
    assert "train.students" not in request.deadline()[1]
    with pytest.raises(ConfigError, match="students itself"):
        Request(settings=values, budget="20s").deadline()
    assert model_config(Config().with_values(values), "bigram").train.students == ()
