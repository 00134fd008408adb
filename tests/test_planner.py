"""Planning for a time budget: model size, number of steps, settings, and re-planning."""

import re
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from chargpt.config import Config, TextConfig, load_config
from chargpt.distributed import RankGroup
from chargpt.errors import ConfigError, OperationError
from chargpt.models import count_parameters
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import load_corpus
from chargpt.training import planner, session
from chargpt.training.budget import (
    MAX_EPOCHS,
    REPLANNING,
    Budget,
    measure_step_seconds,
    next_replan_step,
    parse_duration,
    replanned_config,
    replanning_notes,
)
from chargpt.training.cost import training_bytes
from chargpt.training.learner import Learner
from chargpt.training.planner import (
    RECIPE,
    SIZES,
    Plan,
    length_values,
    plan,
    predicted_loss,
    size_values,
    unique_token_equivalents,
)
from chargpt.training.request import Request
from chargpt.training.schedule import lr_factor_at


@pytest.fixture
def corpus(verse: Path) -> Corpus:
    return load_corpus(TextConfig(path=str(verse)))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Replace the measured speed by a formula; return the configs that were measured."""
    measured: list[Config] = []

    def speed(config: Config, corpus: Corpus, _max_seconds: float) -> float:
        measured.append(config)
        return 1e10 / count_parameters(config.model, corpus.tokenizer.vocab_size)

    monkeypatch.setattr(planner, "measure_speed", speed)
    return measured


class FixedBudget(Budget):
    """A budget whose remaining time does not pass."""

    @property
    def remaining(self) -> float:
        return self.time_left

    def __init__(self, time_left: float, fixed_keys: Collection[str] = ()) -> None:
        super().__init__(time_left if time_left > 0 else 60.0, fixed_keys)
        self.time_left = time_left


def choose(config: Config, fixed: Collection[str], corpus: Corpus, time_left: float) -> Plan:
    return plan(config, corpus, FixedBudget(time_left, fixed))


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("30", 30), ("30s", 30), ("3m", 180), ("1m30s", 90), ("2h", 7200), ("1h1m1s", 3661)],
)
def test_durations_are_parsed(written: str, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(
    "written", ["", "soon", "3 m", "-5s", "m", "1.5h", "4s", "0", "1m1h", "1h30"]
)
def test_other_texts_are_rejected_as_durations(written: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a duration|is too short"):
        parse_duration(written)


@given(st.integers(10_000, 10**8), st.integers(10_000, 10**8))
@example(10_000, 1_004_421)  # a little over an epoch
def test_the_expected_loss_falls_with_parameters_and_characters(
    parameters: int, characters: int
) -> None:
    loss = predicted_loss(parameters, characters, 10**9)  # each character is read once
    assert predicted_loss(2 * parameters, characters, 10**9) < loss
    assert predicted_loss(parameters, 2 * characters, 10**9) < loss
    repeated, longer = (predicted_loss(parameters, n * characters, 10**6) for n in (1, 2))
    rounding = 1e-12
    assert repeated >= loss - rounding  # repeated characters are worth no more
    assert longer <= repeated + rounding


def test_repeated_tokens_are_worth_less_and_least_to_a_large_model() -> None:
    text = 10**6

    def worth(parameters: int, epochs: float, **law: float) -> float:
        return unique_token_equivalents(parameters, epochs * text, text, law) / text

    assert worth(10**5, 0.5, r=3, s=0.5) == 0.5
    assert worth(10**5, 1, r=3, s=0.5) == 1
    # Muennighoff et al. 2023: R* = 15.4; four epochs are worth nearly four, forty not much more
    assert worth(10**5, 4, r=15.4, s=0) == pytest.approx(3.726, abs=0.001)
    assert worth(10**5, 1000, r=15.4, s=0) == pytest.approx(16.4)
    # half as much with four parameters a character as with one
    assert worth(10**6, 1000, r=3, s=0.5) == pytest.approx(4)
    assert worth(4 * 10**6, 1000, r=3, s=0.5) == pytest.approx(2.5)
    repeated, unique = (
        predicted_loss(4 * 10**6, 10**7, characters) for characters in (text, 10**9)
    )
    assert repeated > unique + 0.01


def test_a_longer_budget_never_chooses_a_smaller_model(
    corpus: Corpus, machine: list[Config]
) -> None:
    sizes = []
    for seconds in (15, 60, 600, 6000, 60000):
        config = choose(Config(), (), corpus, seconds).config
        sizes.append(count_parameters(config.model, corpus.tokenizer.vocab_size))
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("seconds", [8, 20])
def test_the_planned_steps_use_85_to_100_percent_of_the_time(
    seconds: float, corpus: Corpus, machine: list[Config]
) -> None:
    planned = choose(Config(), (), corpus, seconds)
    config = planned.config
    parameters = count_parameters(config.model, corpus.tokenizer.vocab_size)
    step_seconds = config.train.batch_size * config.model.block_size * parameters / 1e10
    assert 0.85 * seconds < config.train.max_steps * step_seconds < seconds
    assert planned.speed == pytest.approx(1e10 / parameters)


def test_if_the_trials_used_up_the_budget_the_fewest_steps_are_planned(
    corpus: Corpus, machine: list[Config]
) -> None:
    chosen = choose(load_config("gpt"), (), corpus, -0.5).config
    assert chosen.train.max_steps == REPLANNING.min_steps
    assert chosen.model.n_embd == SIZES[0].n_embd


def test_the_number_of_epochs_is_limited_also_in_replanning(
    corpus: Corpus, machine: list[Config]
) -> None:
    budget = FixedBudget(10**6)
    planned = plan(Config(), corpus, budget)
    config, limit = planned.config, MAX_EPOCHS * len(corpus.split("train"))
    assert limit - config.tokens_per_step < config.train.max_steps * config.tokens_per_step
    assert config.train.max_steps * config.tokens_per_step <= limit
    assert config.model.dropout > 0
    assert any("after 40 epochs" in note for note in planned.notes)
    assert not plan(Config(), corpus, FixedBudget(10)).notes

    # planned for fewer steps, on a machine that turns out a thousand times faster
    before = config.with_values({"train.max_steps": 100})
    after = replanned_config(before, 40, 1e-3, 10**6, budget.step_limit)
    assert after.train.max_steps == budget.step_limit == config.train.max_steps
    assert replanned_config(before, 40, 1e-3, 10**6).train.max_steps > 10**6
    (note,) = replanning_notes(100, after.train.max_steps, 1.0, budget.step_limit)
    assert note.startswith(f"re-planned: 100 -> {budget.step_limit:,} steps: training ends before")


@pytest.mark.parametrize("micro_batches", [1, 3, 16, 64])
def test_a_planned_batch_divides_into_micro_batches(micro_batches: int, verse: Path) -> None:
    corpus = load_corpus(TextConfig(path=str(verse)))
    batch_size = size_values(SIZES[0], 1e6, corpus, micro_batches)["train.batch_size"]
    assert batch_size == {1: 8, 3: 6, 16: 16, 64: 64}[micro_batches]


@pytest.mark.parametrize("length", [9_000, 93_000, 1_000_000])
def test_a_short_text_gets_a_small_model_however_fast_the_machine_is(
    corpus: Corpus, machine: list[Config], length: int
) -> None:
    short = replace(corpus, tokens=np.resize(corpus.tokens, length))
    config = choose(Config(), (), short, 10**6).config
    parameters = count_parameters(config.model, corpus.tokenizer.vocab_size)
    assert parameters <= 12 * length or config.model.n_embd == SIZES[0].n_embd
    assert config.model.n_embd == SIZES[0].n_embd or length > 9_000
    assert config.model.n_embd > SIZES[0].n_embd or length < 1_000_000
    measured = {each.model.n_embd for each in machine}
    assert measured == {SIZES[0].n_embd} or length > 9_000  # no time is lost on others


@pytest.mark.parametrize(("seconds", "is_tried"), [(8, False), (12, False), (30, True)])
def test_a_larger_size_is_tried_only_where_it_may_gain_enough(
    corpus: Corpus, machine: list[Config], seconds: float, is_tried: bool
) -> None:
    choose(Config(), (), replace(corpus, tokens=np.resize(corpus.tokens, 10**6)), seconds)
    assert (len({each.model.n_embd for each in machine}) > 1) == is_tried


def test_a_fast_machine_gets_a_large_model_a_long_block_and_a_word_of_caution(
    corpus: Corpus, machine: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "memory_limit", lambda _: 80 * 10**9)
    long = replace(corpus, tokens=np.broadcast_to(np.uint8(0), (10**10,)))
    planned = choose(Config(), (), long, 10**7)
    assert planned.config.model.n_embd == SIZES[-1].n_embd
    assert planned.config.model.block_size == 1024
    assert len(machine) < len(SIZES)  # sizes that must be worse were skipped
    (note,) = [note for note in planned.notes if "extrapolated" in note]
    assert "11M parameters and 10M characters" in note


def test_models_that_do_not_fit_into_the_memory_are_not_tried(
    corpus: Corpus, machine: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 3_000_000_000
    monkeypatch.setattr(planner, "memory_limit", lambda _: limit)
    long = replace(corpus, tokens=np.broadcast_to(np.uint8(0), (10**10,)))
    chosen = choose(Config(), (), long, 10**7).config
    assert SIZES[0].n_embd < chosen.model.n_embd < SIZES[-1].n_embd
    for config in (*machine, chosen):
        used = training_bytes(config, corpus.tokenizer.vocab_size, config.train.batch_size)
        assert used <= limit * RECIPE.usable_memory
    accumulating = Config().with_values({"train.micro_batches": 16})
    larger = choose(accumulating, ("train.micro_batches",), long, 10**7).config
    assert larger.model.n_embd > chosen.model.n_embd  # a micro-batch takes less


def test_the_first_trial_step_is_a_warm_up() -> None:
    class ColdLearner(Mock):
        device = torch.device("cpu")
        group = RankGroup()
        steps = 0

        def accumulate_gradients(self, step: int) -> None:
            time.sleep(0.001 if self.steps else 0.3)
            self.steps += 1

    assert 0.001 <= measure_step_seconds(ColdLearner(), 3, update=True) < 0.1


def test_longer_runs_have_less_ngram_weight_and_more_epochs_have_more_weight_decay(
    corpus: Corpus,
) -> None:
    base = load_config("gpt")
    weight, decay = base.train.ngram_target_weight, base.optim.weight_decay

    def chosen(characters: float, train_tokens: int) -> object:
        values = length_values(base, characters, train_tokens, 10**6)
        return pytest.approx((values["train.ngram_target_weight"], values["optim.weight_decay"]))

    assert chosen(500_000, 10**6) == (weight, decay / 5)
    assert chosen(1_600_000, 10**6) == (0.75 * weight, 0.32 * decay)
    assert chosen(5_000_000, 10**6) == (weight / 2, decay)
    assert chosen(30_000_000, 10**6) == (weight / 2, decay)
    assert chosen(5_000_000, 10**8) == (pytest.approx(0.24 * weight), decay / 5)
    assert chosen(30_000_000, 10**8) == (0.0, decay / 5)


def test_early_stopping_has_more_evaluations_than_its_patience() -> None:
    for patience, least in ((None, 1), (3, 6), (40, 80)):
        config = Config().with_values({"train.patience": patience})
        values = length_values(config, 2e6, 10**6, 10**6)
        steps, every = values["train.max_steps"], values["train.evaluate_every"]
        assert isinstance(steps, int)
        assert isinstance(every, int)
        assert steps / every >= 0.9 * least


def test_dropout_grows_with_epochs_and_parameters_per_character() -> None:
    def dropout(epochs: float, parameters_per_character: float) -> object:
        values = length_values(
            Config(), epochs * 10**6, 10**6, int(parameters_per_character * 10**6)
        )
        return values["model.dropout"]

    assert [dropout(epochs, 2.25) for epochs in (1, 5, 6, 15, 17)] == [0.0, 0.0, 0.1, 0.1, 0.2]
    assert [dropout(epochs, 0.25) for epochs in (1, 15, 17, 47, 50)] == [0.0, 0.0, 0.1, 0.1, 0.2]


def test_what_the_user_has_set_stays(corpus: Corpus, machine: list[Config]) -> None:
    values = {
        "train.batch_size": 4,
        "train.evaluate_every": 7,
        "model.n_embd": 32,
        "schedule.cooldown": 0.3,
    }
    planned = choose(Config().with_values(values), values, corpus, 30)
    config = planned.config
    assert (config.train.batch_size, config.train.evaluate_every) == (4, 7)
    assert (config.model.n_embd, config.model.n_layer) == (32, Config().model.n_layer)
    assert config.schedule.cooldown == 0.3
    assert len(machine) == 1
    assert not planned.size_was_chosen


def test_a_setting_that_is_no_size_leaves_the_size_to_the_plan(
    corpus: Corpus, machine: list[Config]
) -> None:
    values = {"model.dropout": 0.3, "model.qk_norm": False}
    planned = choose(Config().with_values(values), values, corpus, 30)
    without = choose(Config(), (), corpus, 30)
    assert planned.size_was_chosen
    expected = without.config.model.model_copy(update={"dropout": 0.3, "qk_norm": False})
    assert planned.config.model == expected


def test_for_a_bigram_only_the_number_of_steps_is_planned(
    corpus: Corpus, machine: list[Config]
) -> None:
    bigram = load_config("bigram")
    config = choose(bigram, {"model.kind"}, corpus, 30).config
    assert config.model.model_copy(update={"dropout": 0.0}) == bigram.model
    assert config.train.batch_size == bigram.train.batch_size
    assert config.train.ngram_target_weight == 0
    assert config.optim.weight_decay == bigram.optim.weight_decay
    assert config.train.max_steps > REPLANNING.min_steps


def test_a_budget_and_a_number_of_steps_exclude_each_other(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match=r"--budget and train\.max_steps"):
        choose(Config(), {"train.max_steps"}, corpus, 30)


def test_the_speed_of_a_config_is_measured(corpus: Corpus) -> None:
    tiny = {"model.n_layer": 1, "model.n_embd": 16, "model.block_size": 16, "train.batch_size": 2}
    assert planner.measure_speed(Config().with_values(tiny), corpus) > 0


def test_the_speed_of_a_fine_tuned_run_is_measured_without_the_other(corpus: Corpus) -> None:
    tiny = {"model.n_layer": 1, "model.n_embd": 16, "model.block_size": 16, "train.batch_size": 2}
    pulled = Config().with_values({**tiny, "train.from_run": "elsewhere", "optim.l2_sp": 0.1})
    assert planner.measure_speed(pulled, corpus) > 0


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        ([], 150),
        (["text.val_fraction=0.2", "seed=3", "threads=1", "sample.length=9"], 150),
        (["track.tensorboard=true", "train.from_run=x", "device=cpu"], 150),
        (["train.max_steps=9"], None),
        (["model.n_layer=2"], None),
        (["optim.lr=0.1"], None),
        (["schedule.warmup=1"], None),
    ],
)
def test_the_default_budget_is_for_runs_without_settings_of_training(
    overrides: list[str], seconds: float | None
) -> None:
    budget = Request(overrides=tuple(overrides)).time_budget()
    assert (budget.seconds if budget else None) == seconds


def rates(config: Config, steps: int) -> list[float]:
    return [lr_factor_at(step, config.schedule, config.train.max_steps) for step in range(steps)]


@given(
    st.integers(20, 2000),
    st.floats(0.05, 1),
    st.lists(st.tuples(st.floats(0.001, 10), st.floats(0, 1)), min_size=1, max_size=6),
    st.floats(1, 3000),
)
def test_replanning_keeps_past_learning_rates_and_ends_near_zero(
    steps: int, cooldown: float, speeds: list[tuple[float, float]], seconds: float
) -> None:
    values = {"train.max_steps": steps, "schedule.cooldown": cooldown, "schedule.warmup": 0}
    config, done = Config().with_values(values), 0
    for step_seconds, fraction in speeds:
        planned = next_replan_step(config, done)
        if planned is None or planned >= config.train.max_steps:
            break
        at = max(
            done + 1, done + round(fraction * (planned - done))
        )  # on a slow machine the planned time comes before the planned step
        new = replanned_config(config, at, step_seconds, min(seconds, 3000 * step_seconds))
        assert rates(new, at) == rates(config, at)
        remaining = new.train.max_steps - at
        fewest = min(REPLANNING.min_steps, config.train.max_steps) - at
        assert remaining <= max(1, fewest) or remaining * step_seconds <= seconds
        falling = rates(new, new.train.max_steps)[at - 1 :]
        assert falling == sorted(falling, reverse=True)
        # linearly to zero, however few steps remain
        assert falling[-1] == pytest.approx(falling[0] / len(falling), rel=0.01)
        config, done = new, at
    loaded = Config().with_values(yaml.safe_load(config.to_yaml()))
    assert loaded.schedule == config.schedule


def test_replanning_is_due_where_the_decay_begins_and_then_half_way_to_the_end() -> None:
    config = Config().with_values({"train.max_steps": 1000, "schedule.cooldown": 0.7})
    replan_steps, step = [], 0
    while (step := next_replan_step(config, step) or 0) > 0:
        replan_steps.append(step)
        remaining = (1000 - step) / 0.95 + 0.5  # as fast as planned
        config = replanned_config(config, step, 1.0, remaining)
    assert replan_steps == [300, 650, 825, 912]
    assert config.train.max_steps == 1000
    no_decay = {"schedule.kind": "cosine"}, {"schedule.cooldown": 0.0}
    assert all(next_replan_step(config.with_values(values), 0) is None for values in no_decay)


def test_every_size_has_heads_of_64_or_more() -> None:
    for size in SIZES:
        assert 64 <= size.n_embd / size.n_head < 128


def test_a_budget_that_is_too_short_for_the_fewest_steps_is_extended_and_says_so() -> None:
    budget = FixedBudget(5.0)
    assert budget.extend_for(20, step_seconds=0.2) is None  # 4 s fit into 5
    assert budget.extend_for(20, step_seconds=0.265) is None  # a punctual command may take 5.4 s
    note = budget.extend_for(20, step_seconds=0.4)
    assert note is not None
    assert "5 s is too short" in note
    assert "20 steps" in note
    assert "the whole command takes up to 8 s instead" in note  # bench_busy.py reads it
    with pytest.raises(OperationError, match=r"give --budget 20s"):
        budget.extend_for(20, step_seconds=1.0)
    note = FixedBudget(5.0).extend_for(20, step_seconds=0.2, validation_seconds=3)
    assert note is not None
    assert "up to 7 s" in note


def test_a_slow_start_tells_how_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 2.0)
    assert Budget(10.0, started=0.0, clock=lambda: 5.0).slowdown == 2.5
    assert Budget(10.0, started=0.0, clock=lambda: 1.5).slowdown == 1.0
    corpus = load_corpus(TextConfig(), text="The sea, the light.\n" * 2000)
    idle, busy = (Budget(10.0, started=0.0, clock=lambda now=now: now) for now in (2.0, 5.0))
    assert session.with_mixture_split(Config(), corpus, idle)[0].text.mixture_characters
    assert not session.with_mixture_split(Config(), corpus, busy)[0].text.mixture_characters


def test_a_budget_reserves_more_for_its_end_when_validation_gets_slower() -> None:
    budget = Budget(100.0, started=0.0, clock=lambda: 0.0)
    budget.evaluation_seconds, budget.validation_seconds = 4.0, 1.0
    before = budget.remaining
    budget.update_evaluation(0.5)
    assert budget.remaining == before
    budget.update_evaluation(3.0)
    assert budget.remaining == pytest.approx(before - 8.0)
    budget.update_evaluation(3.0)
    assert budget.remaining == pytest.approx(before - 8.0)
    budget.validation_seconds = 0.001  # of a very short split, which takes longer per character
    budget.update_evaluation(0.05)
    assert budget.remaining == pytest.approx(before - 8.0)


def test_a_command_that_took_longer_than_announced_says_so() -> None:
    now = [10.5]
    budget = Budget(10.0, started=0.0, clock=lambda: now[0])
    assert budget.late_note() is None
    now[0] = 12.0
    assert "12 s instead of 10 s" in str(budget.late_note())
    budget.extension = 2.0
    assert budget.late_note() is None
    now[0], budget.extension = 14.0, 2.3  # announced as 13 s
    assert "14 s instead of 13 s" in str(budget.late_note())


def test_an_extended_budget_has_time_for_the_steps() -> None:
    now = [0.0]
    budget = Budget(5.0, started=0.0, clock=lambda: now[0])
    now[0] = 6.0  # start-up took longer than the whole budget
    assert budget.remaining < 0
    assert budget.extend_for(20, step_seconds=0.1)
    assert budget.remaining == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (182, 4, ["re-planned: 182 -> 4 steps: training is 60 times slower than planned"]),
        (182, 150, ["re-planned: 182 -> 150 steps: training is slower than measured before"]),
        (182, 400, ["re-planned: 182 -> 400 steps: training is faster than measured before"]),
        (182, 174, []),
        (20, 29, []),  # of a very short run
        (53, 38, ["re-planned: 53 -> 38 steps: training is slower than measured before"]),
    ],
)
def test_a_changed_number_of_steps_is_noted(old: int, new: int, expected: list[str]) -> None:
    assert replanning_notes(old, new, slowdown=60 if new == 4 else 1.2) == expected


def test_a_noted_slowdown_is_that_of_a_step() -> None:
    now = [0.0]
    budget = Budget(100.0, started=0.0, clock=lambda: now[0])
    config = Config().with_values({"train.max_steps": 100, "schedule.cooldown": 0.9})
    budget.start(config, 0)
    planned, notes = budget.remaining / 100, []
    for step in range(1, 21):
        now[0] = 2.5 * planned * (step - 1)
        config = budget.adjust(config, step, 0.0, notes)
    assert any(
        re.fullmatch(r"re-planned: 100 -> \d\d steps: training is 2.5 times slower than .*", note)
        for note in notes
    ), notes


def test_a_noted_slowdown_is_that_of_all_steps_so_far() -> None:
    now = [0.0]
    budget = Budget(100.0, started=0.0, clock=lambda: now[0])
    config = Config().with_values({"train.max_steps": 1000, "schedule.cooldown": 0.5})
    budget.start(config, 0)
    planned, notes = budget.remaining / 1000, []
    for step in range(1, 900):  # the steps before the second re-planning take ten times as long
        now[0] += 10 * planned if 650 < step < 750 else planned
        config = budget.adjust(config, step, 0.0, notes)
        if step >= config.train.max_steps:
            break
    assert len(notes) == 2
    assert not any("times slower" in note for note in notes), notes


def test_an_extended_budget_gets_the_steps_that_it_has_announced() -> None:
    now = [0.0]
    budget = Budget(5.0, started=0.0, clock=lambda: now[0])
    note = budget.extend_for(20, 0.3)
    assert note is not None
    assert "for the 20 steps that are the fewest useful ones" in note
    now[0] = 5.0 + budget.extension + 4.0
    assert not budget.is_over(12)
    assert budget.is_over(20)
    now[0] += 2.0  # more than the whole budget again
    assert budget.is_over(12)


def test_an_extended_budget_ends_early_instead_of_training_more_steps() -> None:
    now = [0.0]
    budget = Budget(5.0, started=0.0, clock=lambda: now[0])
    now[0] = 4.0
    assert budget.extend_for(20, 0.2)
    config = Config().with_values({"train.max_steps": 20, "schedule.cooldown": 0.6})
    budget.start(config, 0)
    for step in range(1, 21):  # twice as fast as planned
        now[0] += 0.1
        config = budget.adjust(config, step, 0.0, [])
    assert config.train.max_steps == 20


def test_the_size_is_chosen_for_a_given_block_size(corpus: Corpus, machine: list[Config]) -> None:
    free = choose(Config(), (), corpus, 10)
    config = Config().with_values({"model.block_size": 64})
    given = choose(config, ("model.block_size",), corpus, 10)
    assert given.size_was_chosen
    assert given.config.model == free.config.model.model_copy(update={"block_size": 64})
    assert given.config.tokens_per_step == free.config.tokens_per_step


@pytest.mark.parametrize(("base_run", "remedy"), [(None, ", or a smaller model"), ("base", "")])
def test_a_model_that_is_too_large_for_its_budget_is_rejected_after_one_step(
    base_run: str | None, remedy: str, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, counted = [0.0], list[int]()
    real = Learner.accumulate_gradients

    def slow_step(self: Learner, step: int) -> Any:
        now[0] += 3.0
        counted.append(step)
        return real(self, step)

    monkeypatch.setattr(Learner, "accumulate_gradients", slow_step)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    config = Config().with_values({"model.n_layer": 1, "model.n_embd": 32, "device": "cpu"})
    config = config.with_values({"train.from_run": base_run})
    budget = Budget(10.0, {"model.n_embd"}, started=0.0, clock=lambda: now[0])
    with pytest.raises(
        OperationError, match=rf"too short for 20 steps.*give --budget \d+s{remedy}$"
    ):
        plan(config.with_values({"threads": 1, "dtype": "float32"}), corpus, budget)
    assert counted == [0]


def test_after_a_rollback_the_step_time_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []

    def record(config: Config, step: int, step_seconds: float, *rest: Any) -> Config:
        measured.append(step_seconds)
        return replanned_config(config, step, step_seconds, *rest)

    monkeypatch.setattr("chargpt.training.budget.replanned_config", record)
    now = [0.0]
    budget = Budget(100.0, started=0.0, clock=lambda: now[0])
    config = Config().with_values({"train.max_steps": 1000, "schedule.cooldown": 0.5})
    budget.start(config, 0)
    seconds = budget.remaining / 1000
    for step in (*range(1, 601), *range(510, 1000)):
        now[0] += seconds
        config = budget.replan(config, step) or config
    assert len(measured) > 2
    assert measured == pytest.approx([seconds] * len(measured))
    assert 860 < config.train.max_steps < 910


def test_small_changes_of_the_number_of_steps_are_noted_when_they_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = Budget(100.0)
    config = Config().with_values({"train.max_steps": 1000})
    budget.start(config, 0)
    notes: list[str] = []
    for new in (960, 930, 900):
        monkeypatch.setattr(
            Budget,
            "replan",
            lambda _, config, __, n=new: config.with_values({"train.max_steps": n}),
        )
        config = budget.adjust(config, 500, 0.0, notes)
    assert notes == ["re-planned: 1,000 -> 900 steps: training is slower than measured before"]


def test_the_first_20_steps_may_overrun_the_budget_a_little() -> None:
    now = [0.0]
    budget = Budget(100.0, started=0.0, clock=lambda: now[0])
    now[0] = 100.0
    assert -8 < budget.remaining < 0
    assert not budget.is_over(0)
    assert not budget.is_over(19)
    assert budget.is_over(20)
    now[0] = 104.0
    assert not budget.is_over(0)
    assert budget.is_over(1)


def test_replanning_leaves_at_least_20_steps() -> None:
    config = Config().with_values({"train.max_steps": 100})
    assert replanned_config(config, 5, step_seconds=1.0, seconds=3.0).train.max_steps == 20
    assert replanned_config(config, 50, step_seconds=1.0, seconds=3.0).train.max_steps == 52


@pytest.mark.parametrize("values", [{"schedule.cooldown": 0}, {"schedule.kind": "cosine"}])
def test_replanning_adds_no_decay_to_a_schedule_without_one(values: dict[str, object]) -> None:
    config = Config().with_values({"train.max_steps": 100, **values})
    after = replanned_config(config, 50, step_seconds=1.0, seconds=100.0)
    assert after == config.with_values({"train.max_steps": after.train.max_steps})
    assert after.train.max_steps > 100


def test_a_device_a_thousand_times_faster_than_measured_keeps_to_the_cap_on_epochs(
    verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(verse.read_text()[:1500])
    values = {
        "text.path": str(text), "device": "cpu", "dtype": "float32", "model.n_layer": 1,
        "model.n_head": 1, "model.n_embd": 16, "model.block_size": 16, "train.batch_size": 16,
        "train.sample_every": 0, "threads": 1,
    }  # fmt: skip
    clock = iter(range(10**9))
    budget = Budget(60.0, values, 0.0, clock=lambda: next(clock) / 1000)
    monkeypatch.setattr(planner, "measure_speed", lambda *_: 60.0)  # characters per second, cold
    made = session.create_run(
        load_config("gpt").with_values(values), tmp_path / "run", budget=budget
    )
    assert made.trainer.config.train.max_steps == REPLANNING.min_steps
    reports = list(made.trainer.steps(budget))
    made.folder.unlock()
    read = MAX_EPOCHS * len(made.trainer.corpus.split("train"))
    assert reports[-1].step == made.trainer.state.step == read // (16 * 16)
    assert budget.remaining > 30
    assert any("after 40 epochs" in note for r in reports for note in r.notes)
