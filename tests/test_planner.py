"""Planning for a time budget: model size, number of steps, settings, and re-planning."""

import math
import time
import weakref
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
from starting import create_run, pace_of

from chargpt.config import Config, TextConfig, load_config, parse_override
from chargpt.distributed import RankGroup
from chargpt.errors import ConfigError, DeviceError, OperationError
from chargpt.models import count_parameters
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import load_corpus
from chargpt.training import budget, planner
from chargpt.training import deadline as deadline_module
from chargpt.training.budget import Trials, measure_step_seconds, with_mixture_split
from chargpt.training.deadline import (
    MIN_STEPS,
    Deadline,
    Pace,
    next_replan_step,
    parse_duration,
    replanned_config,
)
from chargpt.training.learner import Learner, training_bytes
from chargpt.training.optim import lr_factor_at
from chargpt.training.planner import (
    MAX_EPOCHS,
    SIZES,
    USABLE_MEMORY,
    Planner,
    batch_tokens,
    config_of_size,
    length_values,
    predicted_loss,
    unique_token_equivalents,
)
from chargpt.training.start import Request


class Machine:
    """A machine whose speed is a formula.

    Attributes:
        measured: the configs that were measured.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.measured: list[Config] = []

    def __call__(self, config: Config, _max_seconds: float) -> float:
        self.measured.append(config)
        return 1e10 / count_parameters(config.model, self.vocab_size)


def fixed_deadline(time_left: float) -> Deadline:
    """Return a deadline whose remaining time does not pass."""
    seconds = time_left if time_left > 0 else 60.0
    deadline = Deadline(seconds, 0.0, lambda: 0.0)
    return replace(deadline, started=time_left - deadline.remaining)


def deadline_of(seconds: float, now: list[float]) -> Deadline:
    """Return the deadline of a budget that begins at 0, by a clock that a test sets."""
    return Deadline.from_budget(seconds, 0.0, lambda: now[0])


def fake_gpu(name: str) -> tuple[torch.device, str]:
    return torch.device("cpu" if name == "cpu" else "meta"), ""


def choose(
    config: Config,
    fixed: Collection[str],
    corpus: Corpus,
    time_left: float,
    machine: Machine | None = None,
) -> Pace:
    machine = machine or Machine(corpus.tokenizer.vocab_size)
    return Planner(config, corpus, fixed_deadline(time_left), fixed, machine).plan()


def test_durations_are_parsed() -> None:
    written = ("30", 30, 29.9, "30s", "3m", "1m30s", "2h", "1h1m1s")
    assert [*map(parse_duration, written)] == [30, 30, 30, 30, 180, 90, 7200, 3661]


@pytest.mark.parametrize(
    "written",
    ["", "soon", "3 m", "-5s", "m", "1.5h", "4s", "0", "1m1h", "1h30", math.nan, math.inf, [30]],
)
def test_other_values_are_rejected_as_durations(written: Any) -> None:
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


def test_a_longer_budget_never_chooses_a_smaller_model(corpus: Corpus) -> None:
    sizes = []
    for seconds in (15, 60, 600, 6000, 60000):
        config = choose(Config(), (), corpus, seconds).config
        sizes.append(count_parameters(config.model, corpus.tokenizer.vocab_size))
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("seconds", [8, 20])
def test_the_planned_steps_use_85_to_100_percent_of_the_time(
    seconds: float, corpus: Corpus
) -> None:
    planned = choose(Config(), (), corpus, seconds)
    config = planned.config
    parameters = count_parameters(config.model, corpus.tokenizer.vocab_size)
    step_seconds = config.train.batch_size * config.model.block_size * parameters / 1e10
    n_steps = config.train.max_steps
    if seconds == 20:  # students, whose steps take a quarter longer
        n_steps += 0.25 * (n_steps - config.train.students[0])
    assert 0.85 * seconds < n_steps * step_seconds < seconds
    assert planned.speed == pytest.approx(1e10 / parameters)


def test_if_the_trials_used_up_the_budget_the_fewest_steps_are_planned(corpus: Corpus) -> None:
    chosen = choose(load_config("gpt"), (), corpus, -0.5).config
    assert chosen.train.max_steps == MIN_STEPS
    assert chosen.model.n_embd == SIZES[0].n_embd


def test_the_number_of_epochs_is_limited(corpus: Corpus, notes: list[str]) -> None:
    config = choose(Config(), (), corpus, 10**6).config
    n_train = len(corpus.split("train"))
    parameters = count_parameters(config.model, corpus.tokenizer.vocab_size)
    limit = 65 / (parameters / n_train) ** 0.5 * n_train  # that of large models of a short text
    assert limit < MAX_EPOCHS * n_train
    steps = config.train.students[0]
    assert limit - config.tokens_per_step < steps * config.tokens_per_step <= limit
    assert config.train.students == (steps, 2 * steps)
    assert config.train.max_steps == 3 * steps
    assert config.model.dropout > 0
    assert any("ends before its time, since more epochs" in note for note in notes)
    notes.clear()
    choose(Config(), (), corpus, 10)
    assert not notes


@pytest.mark.parametrize(("seconds", "ends_early"), [(1.0, False), (2.0, True)])
def test_a_plan_of_the_fewest_steps_ends_early_only_if_it_leaves_time(
    seconds: float, ends_early: bool, verse: Path, notes: list[str]
) -> None:
    short = load_corpus(text=verse.read_text(encoding="utf-8")[:500])
    notes.clear()
    assert choose(Config(), (), short, seconds).config.train.max_steps == 3 * MIN_STEPS
    assert any("ends before its time" in note for note in notes) == ends_early


@pytest.mark.parametrize("micro_batches", [1, 3, 16, 64])
def test_a_planned_batch_divides_into_micro_batches(micro_batches: int, corpus: Corpus) -> None:
    given = {"train.micro_batches": micro_batches, "train.batch_size": micro_batches}
    config = config_of_size(Config().with_values(given), SIZES[0], 1e6, corpus)
    assert config.train.batch_size == {1: 16, 3: 15, 16: 16, 64: 64}[micro_batches]


@pytest.mark.parametrize(("n_ranks", "batch_size"), [(1, 16), (2, 16), (3, 15), (8, 16), (20, 20)])
def test_a_planned_batch_divides_over_the_ranks_and_useless_ones_are_named(
    n_ranks: int, batch_size: int, corpus: Corpus, notes: list[str]
) -> None:
    machine = Machine(corpus.tokenizer.vocab_size)
    planner = Planner(Config(), corpus, fixed_deadline(60), (), machine, n_ranks)
    assert planner.plan().config.train.batch_size == batch_size
    useless = "20 processes are more than the 16 sequences of the batch"
    assert any(useless in note for note in notes) == (n_ranks == 20)


def test_the_batch_doubles_with_every_tenfold_length() -> None:
    found = [*map(batch_tokens, (10, 99_999, 1e5, 1e6, 9.9e6, 1e8))]
    assert found == [1024, 1024, 2048, 4096, 4096, 1 << 14]


def test_a_rank_updates_with_at_most_16384_tokens(corpus: Corpus) -> None:
    for n_ranks in (1, 2, 8):
        config = config_of_size(Config(), SIZES[0], 1e10, corpus, (), n_ranks)
        assert config.tokens_per_step == min(16_384 * n_ranks, 65_536)


@pytest.mark.parametrize("length", [9_000, 93_000, 1_000_000])
def test_a_short_text_gets_a_small_model_however_fast_the_machine_is(
    corpus: Corpus, length: int
) -> None:
    machine = Machine(corpus.tokenizer.vocab_size)
    short = replace(corpus, tokens=np.resize(corpus.tokens, length))
    config = choose(Config(), (), short, 10**6, machine).config
    parameters = count_parameters(config.model, corpus.tokenizer.vocab_size)
    assert parameters <= 12 * length or config.model.n_embd == SIZES[0].n_embd
    assert config.model.n_embd == SIZES[0].n_embd or length > 9_000
    assert config.model.n_embd > SIZES[0].n_embd or length < 1_000_000
    measured = {each.model.n_embd for each in machine.measured}
    assert measured == {SIZES[0].n_embd} or length > 9_000  # no time is lost on others


@pytest.mark.parametrize(("seconds", "is_tried"), [(8, False), (12, False), (30, True)])
def test_a_larger_size_is_tried_only_where_it_may_gain_enough(
    corpus: Corpus, seconds: float, is_tried: bool
) -> None:
    machine = Machine(corpus.tokenizer.vocab_size)
    longer = replace(corpus, tokens=np.resize(corpus.tokens, 10**6))
    choose(Config(), (), longer, seconds, machine)
    assert (len({each.model.n_embd for each in machine.measured}) > 1) == is_tried


def test_a_fast_machine_gets_a_large_model_a_long_block_and_a_word_of_caution(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    machine = Machine(corpus.tokenizer.vocab_size)
    monkeypatch.setattr(planner, "memory_limit", lambda _: 80 * 10**9)
    long = replace(corpus, tokens=np.broadcast_to(np.uint8(0), (10**10,)))
    planned = choose(Config(), (), long, 10**7, machine)
    assert planned.config.model.n_embd == 768
    assert planned.config.model.block_size == 1024
    assert len(machine.measured) < len(SIZES)  # sizes that must be worse were skipped
    (note,) = [note for note in notes if "extrapolated" in note]
    assert "11M parameters and 10M characters" in note


def test_models_that_do_not_fit_into_the_memory_are_not_tried(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(corpus.tokenizer.vocab_size)
    limit = 3_000_000_000
    monkeypatch.setattr(planner, "memory_limit", lambda _: limit)
    long = replace(corpus, tokens=np.broadcast_to(np.uint8(0), (10**10,)))
    chosen = choose(Config(), (), long, 10**7, machine).config
    assert SIZES[0].n_embd < chosen.model.n_embd < SIZES[-1].n_embd
    for config in (*machine.measured, chosen):
        used = training_bytes(config, corpus.tokenizer.vocab_size, config.train.batch_size)
        assert used <= limit * USABLE_MEMORY
    accumulating = Config().with_values({"train.micro_batches": 16})
    larger = choose(accumulating, ("train.micro_batches",), long, 10**7).config
    assert larger.model.n_embd > chosen.model.n_embd  # a micro-batch takes less


def test_on_a_gpu_that_is_chosen_by_itself_no_attention_scores_are_counted(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = replace(corpus, tokens=np.broadcast_to(np.uint8(0), (10**10,)))
    config = Config().with_values({"train.batch_size": 64})
    sizes = []
    for device in ("cpu", "cuda"):
        chosen = torch.device(device), ""
        monkeypatch.setattr(planner, "choose_device", lambda _, chosen=chosen: chosen)
        monkeypatch.setattr(planner, "memory_limit", lambda _: 2e9)
        found = Planner(config, long, fixed_deadline(100), {"train.batch_size"}, Machine(65))
        sizes.append(len(found.larger_sizes(0, len(SIZES), 1e6)))
    assert sizes[0] < sizes[1]


def test_ranks_plan_for_the_memory_of_the_one_that_has_least(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = Mock(side_effect=StopIteration)
    monkeypatch.setattr(Planner, "plan", lambda planner: planned(planner.memory))
    monkeypatch.setattr(Planner, "memory_here", lambda planner: 8e9)
    monkeypatch.setattr(RankGroup, "broadcast", lambda group, number: number)
    monkeypatch.setattr(RankGroup, "all_gather", lambda group, part: torch.cat((part, part / 2)))
    with pytest.raises(StopIteration):
        budget.plan_run(Config(), corpus, fixed_deadline(60), frozenset(), RankGroup(0, 2))
    planned.assert_called_once_with(4e9)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        MemoryError(),
    ],
)
def test_the_search_ends_with_the_largest_size_whose_trial_does_not_run_out_of_memory(
    error: Exception, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, widest = weakref.WeakSet[Learner](), [96]

    def seconds(learner: Learner, *_: Any, **__: Any) -> float:
        assert not alive  # the memory of the trial before is free
        alive.add(learner)
        if learner.model.config.n_embd > widest[0]:
            raise type(error)(*error.args)
        return 1e-4

    monkeypatch.setattr(budget, "measure_step_seconds", seconds)
    long = replace(corpus, tokens=np.resize(corpus.tokens, 10**6))
    config = Config().with_values({"device": "cpu", "train.batch_size": 16, "threads": 1})
    planned, _, pace = budget.plan_run(config, long, fixed_deadline(60), frozenset({"threads"}))
    assert planned.model.n_embd == 96
    assert pace.speed == planned.tokens_per_step / 1e-4
    widest[0] = 0
    for fixed in ((), ("model.n_embd",)):
        with pytest.raises(DeviceError, match=r"enough memory .*; give -s train.micro_batches=2 "):
            budget.plan_run(config, long, fixed_deadline(60), frozenset(fixed))
    trial = Mock(side_effect=[1e6, DeviceError("too large")])
    with pytest.raises(DeviceError, match="too large"):  # on one of several ranks
        Planner(config, long, fixed_deadline(60), (), trial, n_ranks=2).plan()


def test_the_first_trial_step_is_a_warm_up_that_on_a_gpu_tells_nothing_about_the_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget, "synchronize", lambda _: None)

    class ColdLearner(Mock):
        device = torch.device("cpu")
        group = RankGroup()
        steps = 0

        def accumulate_gradients(self, step: int) -> None:
            time.sleep(0.001 if self.steps else 0.3)
            self.steps += 1

    assert 0.001 <= measure_step_seconds(ColdLearner(), 3, update=True) < 0.1
    assert measure_step_seconds(ColdLearner(), 3, update=True, max_seconds=0.1) >= 0.3
    gpu = ColdLearner(device=torch.device("meta"))
    assert 0.001 <= measure_step_seconds(gpu, 3, update=True, max_seconds=0.1) < 0.1


@pytest.mark.parametrize(
    ("launch_seconds", "flops", "values", "n_ranks", "device", "is_tried"),
    [
        (0.0, 2e10, {}, 1, "cpu", True),
        (0.08, 0.8e12, {}, 1, "auto", True),  # the CPU is faster with the smallest size only
        (0.001, 1e14, {}, 1, "auto", False),
        (0.0, 2e10, {"device": "cuda"}, 1, "cuda", False),
        (0.0, 2e10, {}, 2, "auto", False),
    ],
)
def test_beside_a_slow_gpu_the_cpu_is_tried_and_trains_if_its_predicted_loss_is_lower(
    launch_seconds: float,
    flops: float,
    values: dict[str, object],
    n_ranks: int,
    device: str,
    is_tried: bool,
    corpus: Corpus,
    monkeypatch: pytest.MonkeyPatch,
    notes: list[str],
) -> None:
    measured = []

    def speed(config: Config, _: float) -> float:
        measured.append(config)
        on_cpu = config.device == "cpu"
        per_token = 6 * count_parameters(config.model, corpus.tokenizer.vocab_size)
        per_token /= 2e11 if on_cpu else flops
        return 1 / (per_token + (not on_cpu) * launch_seconds / config.tokens_per_step)

    monkeypatch.setattr(planner, "choose_device", fake_gpu)
    monkeypatch.setattr(planner, "measure_threads", lambda _: 3)
    long = replace(corpus, tokens=np.resize(corpus.tokens, 10**6))
    config = Config().with_values(values)
    chosen = Planner(config, long, fixed_deadline(60), (), speed, n_ranks).plan().config
    assert (chosen.device, chosen.threads) == (device, 3 if device == "cpu" else None)
    assert any(each.device == "cpu" for each in measured) == is_tried
    assert any("-s device=meta trains there" in note for note in notes) == (device == "cpu")


def test_a_run_that_a_slow_gpu_leaves_to_the_cpu_is_one_of_the_cpu(
    verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Trials.__call__

    def speed(trials: Trials, config: Config, seconds: float) -> float:
        return real(trials, config, seconds) * (0.01 if config.device == "auto" else 1)

    monkeypatch.setattr(planner, "choose_device", fake_gpu)
    monkeypatch.setattr(Trials, "__call__", speed)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = Config().with_values({"text.path": str(verse)})
    session = create_run(config, tmp_path / "run", Deadline.from_budget(20))
    saved = load_config(tmp_path / "run" / "config.yaml")
    assert (saved.device, saved.threads) == ("cpu", torch.get_num_threads())
    assert session.pace is not None
    assert session.pace.thread_tuner is not None


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
        assert steps / every >= 0.9 * least


def test_dropout_grows_with_epochs_after_the_first_and_parameters_per_character() -> None:
    def dropout(epochs: float, parameters_per_character: float) -> object:
        values = length_values(
            Config(), epochs * 10**6, 10**6, int(parameters_per_character * 10**6)
        )
        return values["model.dropout"]

    of_large = [dropout(epochs, 2.0) for epochs in (0.5, 1, 4, 5, 12, 13, 32, 33)]
    assert of_large == [0.0, 0.0, 0.0, 0.05, 0.05, 0.1, 0.1, 0.2]
    of_small = [dropout(epochs, 0.25) for epochs in (1, 32, 33, 96, 97, 256, 257)]
    assert of_small == [0.0, 0.0, 0.05, 0.05, 0.1, 0.1, 0.2]
    assert dropout(1, 12) == 0.0  # nothing is read twice


def test_what_the_user_has_set_stays(corpus: Corpus) -> None:
    values = {"train.batch_size": 4, "train.evaluate_every": 7, "schedule.cooldown": 0.3}
    values |= {"model.n_embd": 32}
    planned = choose(Config().with_values(values), values, corpus, 30)
    expected = {**values, "model.n_layer": Config().model.n_layer}
    assert planned.config.flatten().items() >= expected.items()
    assert not planned.size_was_chosen


@pytest.mark.parametrize("values", [{"dropout": 0.3, "qk_norm": False}, {"block_size": 64}])
def test_a_setting_that_is_no_size_leaves_the_size_to_the_plan(
    values: dict[str, object], corpus: Corpus
) -> None:
    given = {f"model.{key}": value for key, value in values.items()}
    planned = choose(Config().with_values(given), given, corpus, 10)
    free = choose(Config(), (), corpus, 10)
    assert planned.size_was_chosen
    assert planned.config.model == free.config.model.model_copy(update=values)
    assert planned.config.tokens_per_step == free.config.tokens_per_step


def test_for_a_bigram_only_the_number_of_steps_is_planned(corpus: Corpus) -> None:
    bigram = load_config("bigram")
    config = choose(bigram, {"model.kind"}, corpus, 30).config
    assert config.model.model_copy(update={"dropout": 0.0}) == bigram.model
    assert config.train.batch_size == bigram.train.batch_size
    assert config.train.ngram_target_weight == 0
    assert config.optim.weight_decay == bigram.optim.weight_decay
    assert config.train.max_steps > MIN_STEPS


@pytest.mark.parametrize("extra", [{}, {"train.from_run": "elsewhere", "optim.l2_sp": 0.1}])
def test_the_speed_of_a_config_is_measured_without_a_base_run(
    extra: dict[str, object], corpus: Corpus
) -> None:
    tiny = {"model.n_layer": 1, "model.n_embd": 16, "model.block_size": 16, "train.batch_size": 2}
    assert Trials(corpus)(Config().with_values(tiny | extra)) > 0


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
    deadline, _ = Request(settings=dict(map(parse_override, overrides))).deadline()
    assert (deadline.seconds if deadline else None) == seconds


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
        fewest = min(MIN_STEPS, config.train.max_steps) - at
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


def test_a_budget_that_is_too_short_for_the_fewest_steps_is_extended_and_says_so(
    notes: list[str],
) -> None:
    deadline = fixed_deadline(5.0)
    for needed in (4.0, 5.3):  # a punctual command may take 5.4 s
        assert deadline.extended_for(needed) is deadline
    assert deadline.extended_for(8.0).remaining == pytest.approx(8.0)
    (note,) = notes
    assert "5 s is too short" in note
    assert "the whole command takes up to 8 s instead" in note  # bench_busy.py reads it
    late = deadline_of(5.0, [6.0])  # start-up took longer than the whole budget
    assert late.remaining < 0
    assert late.extended_for(2.0).remaining == pytest.approx(2.0)
    deadline.require(8.0)
    with pytest.raises(OperationError, match=r"give --budget 20s$"):
        deadline.require(20.0)


def test_a_slow_start_tells_how_busy_the_machine_is(
    monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 2.0)
    assert deadline_of(10.0, [5.0]).slowdown == 2.5
    assert deadline_of(10.0, [1.5]).slowdown == 1.0
    corpus = load_corpus(TextConfig(), text="The sea, the light.\n" * 2000)
    idle, busy = (deadline_of(10.0, [now]) for now in (2.0, 5.0))
    nothing = frozenset[str]()
    assert with_mixture_split(Config(), corpus, idle, nothing).text.mixture_characters
    assert not notes
    assert not with_mixture_split(Config(), corpus, busy, nothing).text.mixture_characters
    assert "without a mixture: fitting one would take" in notes[0]


def test_a_budget_reserves_more_for_its_end_when_validation_gets_slower() -> None:
    deadline = replace(deadline_of(100.0, [0.0]), scoring_seconds=4.0)
    pace, before = pace_of(deadline, validation_seconds=1.0), deadline.remaining
    pace.observe_validation(0.5)
    assert pace.deadline.remaining == before
    for _ in range(2):
        pace.observe_validation(3.0)
        assert pace.deadline.remaining == pytest.approx(before - 8.0)
    pace.validation_seconds = 0.001  # of a very short split, which takes longer per character
    pace.observe_validation(0.05)
    assert pace.deadline.remaining == pytest.approx(before - 8.0)


def test_a_command_that_took_longer_than_announced_says_so() -> None:
    now = [10.5]
    deadline = deadline_of(10.0, now)
    assert deadline.late_note() is None
    now[0] = 12.0
    assert "12 s instead of 10 s" in str(deadline.late_note())
    assert replace(deadline, extension=2.0).late_note() is None
    now[0] = 14.0
    assert "14 s instead of 13 s" in str(replace(deadline, extension=2.3).late_note())


def started(deadline: Deadline, **values: object) -> tuple[Pace, Config]:
    """Return a pace that has begun to measure a run with these settings."""
    config = Config().with_values(values)
    pace = pace_of(deadline)
    pace.start(config, 0)
    return pace, config


def test_an_extended_budget_ends_early_instead_of_training_more_steps() -> None:
    now = [0.0]
    deadline = deadline_of(5.0, now)
    now[0] = 4.0
    deadline = deadline.extended_for(4.0)
    pace, config = started(deadline, **{"train.max_steps": 20, "schedule.cooldown": 0.6})
    for step in range(1, 21):  # twice as fast as planned
        now[0] += 0.1
        config = pace.adjusted(config, step, 0.0)
    assert config.train.max_steps == 20


def test_a_model_that_is_too_large_for_its_budget_is_rejected_after_one_step(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
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
    config = config.with_values({"threads": 1, "dtype": "float32"})
    deadline = deadline_of(10.0, now)
    with pytest.raises(OperationError, match=r"too short for 20 steps.*give --budget \d+s$"):
        Planner(config, corpus, deadline, {"model.n_embd"}, Trials(corpus)).plan()
    assert counted == [0]


def test_after_a_rollback_the_step_time_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []

    def record(config: Config, step: int, step_seconds: float, *rest: Any) -> Config:
        measured.append(step_seconds)
        return replanned_config(config, step, step_seconds, *rest)

    monkeypatch.setattr(deadline_module, "replanned_config", record)
    now = [0.0]
    values = {"train.max_steps": 1000, "schedule.cooldown": 0.5}
    pace, config = started(deadline_of(100.0, now), **values)
    seconds = pace.deadline.remaining / 1000
    for step in (*range(1, 601), *range(510, 1000)):
        now[0] += seconds
        config = pace.replanned(config, step) or config
    assert len(measured) > 2
    assert measured == pytest.approx([seconds] * len(measured))
    assert 860 < config.train.max_steps < 910


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        ([182, 150], "182 -> 150 steps: training is slower than measured before"),
        ([182, 400], "182 -> 400 steps: training is faster than measured before"),
        ([182, 174], ""),
        ([20, 29], ""),  # of a very short run
        ([53, 38], "53 -> 38 steps: training is slower than measured before"),
        ([1000, 960, 930, 900], "1,000 -> 900 steps: training is slower than measured before"),
    ],
)
def test_large_changes_of_the_number_of_steps_are_noted_and_small_ones_that_add_up(
    planned: list[int], expected: str, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    pace, config = started(Deadline.from_budget(100.0), **{"train.max_steps": planned[0]})
    for new in planned[1:]:
        changed = config.with_values({"train.max_steps": new})
        monkeypatch.setattr(pace, "replanned", lambda *_, changed=changed: changed)
        config = pace.adjusted(config, 500, 0.0)
    assert "; ".join(notes) == (expected and f"re-planned: {expected}")


@pytest.mark.parametrize(
    ("needed", "late", "last_steps"),
    [
        (0.0, 0.0, (19, 20)),
        (0.0, 4.0, (0, 1)),  # the first 20 steps may overrun a budget a little
        (110.0, 90.0, (19, 20)),  # an extended one by all of it again: it has announced them
        (110.0, 101.0, (0, 1)),
    ],
)
def test_the_first_20_steps_may_overrun_the_budget(
    needed: float, late: float, last_steps: tuple[int, int]
) -> None:
    now = [0.0]
    deadline = deadline_of(100.0, now).extended_for(needed)
    now[0] = 100.0 + deadline.extension + late
    assert deadline.remaining < 0
    assert [deadline.is_over(step) for step in last_steps] == [False, True]


def test_a_plan_that_other_runs_have_delayed_is_trained_for_the_fewest_steps(
    notes: list[str],
) -> None:
    now, config = [0.0], Config().with_values({"train.max_steps": 500})
    pace = pace_of(deadline_of(6.0, now), config, speed=config.tokens_per_step / 0.1)
    now[0] = 30.0
    fitted, seconds = pace.fit_plan()
    assert fitted.train.max_steps == MIN_STEPS
    assert seconds == pytest.approx(pace.deadline.remaining) == 2.0
    assert "the whole command takes up to" in notes[0]


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
    verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(verse.read_text()[:1500])
    values = {
        "text.path": str(text), "device": "cpu", "dtype": "float32", "model.n_layer": 1,
        "model.n_head": 1, "model.n_embd": 16, "model.block_size": 16, "train.batch_size": 16,
        "train.sample_every": 0, "threads": 1,
    }  # fmt: skip
    clock = iter(range(10**9))
    deadline = Deadline.from_budget(60.0, 0.0, clock=lambda: next(clock) / 1000)
    # characters per second, cold
    monkeypatch.setattr(Trials, "__call__", lambda self, *_: 60.0)
    monkeypatch.setattr(Trials, "measure_scoring", lambda *_: 1e-6)
    made = create_run(load_config("gpt").with_values(values), tmp_path / "run", deadline, values)
    assert made.trainer.config.train.max_steps == MIN_STEPS
    last = list(made.reports())[-1]
    read = MAX_EPOCHS * len(made.trainer.corpus.split("train"))
    assert last.step == made.trainer.state.step == read // (16 * 16)
    assert deadline.remaining > 30
    assert any("ends before its time, since more epochs" in note for note in notes)
