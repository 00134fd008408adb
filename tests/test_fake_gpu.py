"""Device placement, results and host-device syncs, on a fake GPU."""

import errno
import gc
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fake_gpu import (
    CPU,
    GPU,
    FakeGraph,
    enable_graphs,
    fake_gpu_device,
    slow_first_calls,
    syncs,
)
from noise import noisy_model
from typer.testing import CliRunner

import chargpt.device
from chargpt.analysis import doctor
from chargpt.cli.main import app
from chargpt.config import Config, SampleConfig, TextConfig, load_config
from chargpt.errors import OperationError
from chargpt.inference import decoders
from chargpt.inference.decoders import (
    GraphDecoder,
    ModelDecoder,
    NumpyDecoder,
    build_decoder,
    model_decoder,
)
from chargpt.inference.generation import stream_pieces
from chargpt.models import kernels
from chargpt.models.gpt import GPT
from chargpt.models.ngram import NGramLM
from chargpt.store import run
from chargpt.store.folder import RunFolder
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import load_corpus
from chargpt.text.tokenizer import CharTokenizer
from chargpt.training import budget as budget_module
from chargpt.training import planner, resume, session, trainer
from chargpt.training.budget import Budget, Reserve, measure_step_seconds
from chargpt.training.trainer import METRICS_EVERY, StepReport, Trainer

TINY = {
    "model.n_layer": 1, "model.n_embd": 64, "model.block_size": 32, "train.batch_size": 8,
    "train.max_steps": 25, "train.evaluate_every": 25, "train.save_every": 25,
    "train.sample_every": 0, "dtype": "float32",
}  # fmt: skip


@pytest.fixture
def corpus(verse: Path) -> Corpus:
    return load_corpus(TextConfig(path=str(verse)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The fake GPU, under the name `mps` in configs."""
    monkeypatch.setattr(doctor, "GPU_MATRIX_SIZE", 64)

    def choose(name: str) -> tuple[torch.device, str]:
        return (CPU if name == "cpu" else GPU), "fake"

    for module in (chargpt.device, doctor, run, planner, trainer, session, resume):
        monkeypatch.setattr(module, "choose_device", choose)
    with fake_gpu_device(monkeypatch) as device:
        yield device


def trainer_on(device: str, corpus: Corpus, **values: object) -> Trainer:
    return Trainer(load_config("gpt").with_values({**TINY, "device": device, **values}), corpus)


def figures(report: StepReport) -> list[float]:
    loss = [] if report.loss is None else [report.loss.item()]
    return loss + ([report.validation.nats_per_char] if report.validation else [])


def test_an_operation_on_two_devices_is_rejected(gpu: torch.device) -> None:
    with pytest.raises(AssertionError, match="two devices"):
        torch.ones(2, device=gpu) + torch.ones(2)
    assert not syncs
    assert (torch.ones(2, device=gpu) + 1).sum().item() == 4
    assert len(syncs) == 1


@pytest.mark.parametrize(
    "values",
    [
        {"train.micro_batches": 2, "train.ema": 0.9, "train.sample_every": 15},
        {"optim.name": "adamw", "train.ngram_target_weight": 0.0, "model.attention": "average"},
    ],
)
def test_training_gives_the_losses_and_samples_of_the_cpu(
    values: dict[str, object], corpus: Corpus, gpu: torch.device
) -> None:
    values |= {"train.max_steps": 15, "train.evaluate_every": 15}
    runs = [trainer_on(device, corpus, **values) for device in ("cpu", "mps")]
    assert [each.model.device.type for each in runs] == ["cpu", "gpu"]
    for on_cpu, on_gpu in zip(*(each.steps() for each in runs), strict=True):
        assert on_cpu.sample == on_gpu.sample
        assert figures(on_gpu) == pytest.approx(figures(on_cpu), abs=1e-4)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_training_synchronises_only_to_write_metrics(
    optimizer: str, corpus: Corpus, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "METRICS_SECONDS", 0.0)
    training = trainer_on("mps", corpus, **{"optim.name": optimizer, "model.dropout": 0.1})
    training.learner.ngram  # noqa: B018 - fitted before: fitting synchronises
    synced = []
    for step in range(1, 25):
        syncs.clear()
        training.train_step()
        synced += [step] * len(syncs)
    assert synced == [METRICS_EVERY, 2 * METRICS_EVERY]
    monkeypatch.setattr(trainer, "METRICS_SECONDS", 1000.0)  # since the last write
    syncs.clear()
    far = dict.fromkeys(("max_steps", "evaluate_every", "save_every"), 1000)
    training.config = training.config.with_values({f"train.{key}": n for key, n in far.items()})
    for _ in range(2 * METRICS_EVERY):
        training.train_step()
    assert not syncs


@pytest.mark.parametrize("values", [{}, {"model.dropout": 0.1, "train.ngram_target_weight": 0.0}])
def test_training_replays_two_cuda_graphs_with_the_losses_of_the_cpu(
    values: dict[str, object], corpus: Corpus, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    enable_graphs(monkeypatch)
    values |= {"train.max_steps": 10}
    on_cpu, on_gpu = (trainer_on(device, corpus, **values) for device in ("cpu", "mps"))
    monkeypatch.setattr(kernels, "uses_custom_autograd", lambda _: False)  # same dropout masks
    assert on_gpu.learner.capture_error is None
    before = FakeGraph.replays
    for one, other in zip(on_cpu.steps(), on_gpu.steps(), strict=True):
        assert figures(other) == pytest.approx(figures(one), abs=1e-4)
    assert FakeGraph.replays - before == 2 * 10  # gradients and update


def test_a_resumed_run_and_a_rolled_back_one_replay_graphs_of_the_restored_optimizer(
    corpus: Corpus, tmp_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    enable_graphs(monkeypatch)
    losses = {}
    for device in ("cpu", "mps"):
        folder = RunFolder(tmp_path / device)
        values = {"train.max_steps": 12, "train.save_every": 4}
        config = trainer_on(device, corpus, **values).config
        first = Trainer(config, corpus, folder=folder)
        folder.create(first.config, corpus.tokenizer)
        for _ in range(5):
            first.train_step()
        first.roll_back(5)
        rolled_back = [figures(first.train_step()) for _ in range(2)]
        first.save()
        resumed = Trainer(config, corpus, saved=folder.load("latest"))
        before = FakeGraph.replays
        losses[device] = [*rolled_back, *(figures(resumed.train_step()) for _ in range(2))]
        assert FakeGraph.replays - before == (4 if device == "mps" else 0)
        folder.unlock()
    for one, other in zip(losses["cpu"], losses["mps"], strict=True):
        assert other == pytest.approx(one, abs=1e-4)


def test_the_ngram_table_is_built_before_it_is_moved(
    corpus: Corpus, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, build = [], NGramLM.build_table

    def recorded(model: NGramLM) -> None:
        devices.append(model.device)
        build(model)

    monkeypatch.setattr(NGramLM, "build_table", recorded)
    ngram = trainer_on("mps", corpus).learner.ngram
    assert ngram is not None
    assert ngram.table is not None
    assert (devices, ngram.table.device) == ([CPU], gpu)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_trial_model_is_freed_at_once(
    device: str, corpus: Corpus, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    enable_graphs(monkeypatch)
    learner = trainer_on(device, corpus).learner
    learner.accumulate_gradients(0)
    freed = weakref.ref(learner.model)
    gc.disable()
    try:
        del learner
        assert freed() is None
    finally:
        gc.enable()


def test_a_failed_capture_is_reported_and_training_goes_on(
    verse: Path, tmp_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = enable_graphs(monkeypatch)
    stream, (generator,) = cuda.current_stream(), cuda.default_generators
    monkeypatch.setattr("chargpt.models.ngram.MAX_TABLE_ENTRIES", 0)  # look-ups then synchronise
    short = {**TINY, "train.max_steps": 8}
    settings = load_config("gpt").with_values({**short, "device": "mps", "text.path": str(verse)})
    made = session.create_run(settings, tmp_path / "run")
    made.folder.unlock()
    (note,) = [note for note in made.notes if "CUDA graph" in note]
    assert "capture failed (aten." in note
    assert cuda.current_stream() is stream
    assert not generator.is_capturing
    assert FakeGraph.replays == 0
    on_cpu = trainer_on("cpu", made.trainer.corpus, **{"train.max_steps": 8})
    for one, other in zip(on_cpu.steps(), made.trainer.steps(), strict=True):
        assert figures(other) == pytest.approx(figures(one), abs=1e-4)


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_sampling_replays_one_cuda_graph_with_the_text_of_the_cpu(
    num_sequences: int, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    enable_graphs(monkeypatch)
    ids = np.arange(20 * num_sequences).reshape(20, num_sequences) % 11
    on_cpu, on_gpu = (
        GraphDecoder(cast("GPT", noisy_model(block_size=8).to(device)), num_sequences)
        for device in (CPU, gpu)
    )
    for each in ids:
        np.testing.assert_allclose(on_gpu.step(each), on_cpu.step(each), rtol=1e-5, atol=1e-5)
    assert FakeGraph.replays == len(ids) + 1  # one checks the graph


@pytest.mark.parametrize("fastest", [NumpyDecoder, ModelDecoder, GraphDecoder])
def test_few_streams_of_a_small_model_are_decoded_where_it_is_fastest(
    fastest: type, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fastest is GraphDecoder:
        enable_graphs(monkeypatch)
    model, prompt = noisy_model(block_size=8), torch.tensor([[1, 2, 3]])
    prefilled = []
    for device in (CPU, gpu):
        model.to(device)
        prefilled.append(model.new_cache(1))
        model(prompt.to(device), prefilled[-1])
    on_cpu = build_decoder(noisy_model(block_size=8), 2, prefilled[0])
    tried, lengths = [], []

    def seconds(decoder: object, num_sequences: int) -> float:
        tried.append(type(decoder))
        lengths.append(getattr(decoder, "cache", decoder).length)  # type: ignore[attr-defined]
        decoder.step(np.array([5, 6]))  # type: ignore[attr-defined]
        return 0.1 if isinstance(decoder, fastest) else 0.2

    monkeypatch.setattr(decoders, "trial_seconds", seconds)
    chosen = build_decoder(model, 2, prefilled[1])
    assert type(chosen) is fastest
    assert tried == [NumpyDecoder, GraphDecoder if fastest is GraphDecoder else ModelDecoder]
    assert lengths == [6, 6]  # of 8
    for token in range(10):  # the trials left nothing behind
        tokens = np.array([token, 10 - token])
        np.testing.assert_allclose(chosen.step(tokens), on_cpu.step(tokens), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(decoders, "MAX_CPU_WORK", model.num_parameters())
    tried.clear()
    assert type(build_decoder(model, 2)) is not NumpyDecoder
    assert not tried


def test_a_trial_leaves_out_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cold:
        n_steps = 0

        def step(self, tokens: Any) -> Any:
            time.sleep(0.2 if self.n_steps < 2 else 0.001)
            self.n_steps += 1

    assert decoders.TRIAL_STEPS * 0.001 <= decoders.trial_seconds(Cold(), 1) < 0.2


def test_sampling_without_a_graph_says_so(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    enable_graphs(monkeypatch)
    monkeypatch.setattr(FakeGraph, "replay", lambda _: None)  # gives another result
    model_decoder._warn_once.cache_clear()
    for _ in range(2):
        decoder = GraphDecoder(cast("GPT", noisy_model().to(gpu)), 1)
        for token in (1, 2):
            decoder.step(np.array([token]))
    assert "slower than it could be: a replayed CUDA graph gave another result" in caplog.text
    assert len(caplog.records) == 1


def test_doctor_says_whether_graphs_can_be_captured(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "MIN_MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "_check_gradient", lambda *_: doctor.Check("gradient", ""))

    def found() -> doctor.Check:
        (check,) = [check for check in doctor.run_checks("mps") if check.name == "CUDA graphs"]
        return check

    enable_graphs(monkeypatch)
    assert (found().value, found().advice) == ("captured and replayed", "")
    monkeypatch.setattr(FakeGraph, "replay", lambda _: None)
    assert found().value == "a replayed CUDA graph gave another result"
    assert found().advice


def test_gradients_equal_those_on_the_cpu(gpu: torch.device) -> None:
    assert doctor.gradient_error(gpu, torch.float32) < doctor.TOLERANCE[torch.float32]


@pytest.mark.parametrize("num_samples", [1, 3])
def test_sampling_gives_the_text_of_the_cpu_with_one_sync_per_character(
    num_samples: int, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "MAX_CPU_WORK", 0)
    tokenizer = CharTokenizer("abcdefghijk")
    options = SampleConfig(length=40, seed=1, num_samples=num_samples)
    texts = [
        list(stream_pieces(noisy_model().to(device), tokenizer, tokenizer.encode("a"), options))
        for device in (CPU, gpu)
    ]
    assert texts[0] == texts[1]
    assert len(syncs) == options.length


def test_the_captured_decode_step_gives_the_same_logits(gpu: torch.device) -> None:
    ids = np.arange(20).reshape(10, 2) % 11
    logits = []
    for device in (CPU, gpu):
        model = cast("GPT", noisy_model(block_size=4).to(device))
        decoder = GraphDecoder(model, 2)
        syncs.clear()
        logits.append(np.stack([decoder.step(each) for each in ids]))
    assert len(syncs) == len(ids)
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["full", "average"])
def test_cached_logits_and_attention_weights_equal_those_on_the_cpu(
    attention: Literal["full", "average"], gpu: torch.device
) -> None:
    tokens = torch.arange(9).view(1, 9)
    results = []
    for device in (CPU, gpu):
        model = noisy_model(attention=attention).to(device)
        cache = model.new_cache(1)
        pieces = [model(piece.to(device), cache) for piece in tokens.split([4, 5], dim=1)]
        weights = model.attention_weights(tokens.to(device))
        assert all(each.device == device for each in (*pieces, *weights))
        results.append([each.cpu() for each in (*pieces, *weights)])
    torch.testing.assert_close(*results)


def test_ngram_probabilities_equal_those_on_the_cpu(corpus: Corpus, gpu: torch.device) -> None:
    tokens = torch.from_numpy(corpus.split("val")[:200].astype("int64"))[None]
    model = NGramLM.fit(corpus.split("train"), corpus.tokenizer.vocab_size, 256)
    on_cpu = model.probs(tokens)
    model.to(gpu)
    assert torch.equal(model.probs(tokens.to(gpu)).cpu(), on_cpu)
    model.build_table()
    assert model.table is not None
    syncs.clear()
    probs = model.probs(tokens.to(gpu))
    assert not syncs
    assert torch.equal(probs.cpu(), on_cpu)


@pytest.mark.slow
def test_every_command_except_compression_computes_on_the_device(
    verse: Path, tmp_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("novel.txt").write_text(verse.read_text())
    Path("line.txt").write_text(verse.read_text()[:50])
    values = {**TINY, "device": "mps", "sample.length": 30}
    settings = [f"--set={key}={value}" for key, value in values.items()]
    for command in (
        ["train", "novel.txt", "--out", "gpt", *settings],
        ["train", "novel.txt", "--out", "bigram", "-s", "model.kind=bigram", *settings],
        ["sample", "gpt", "--length", "20", "--overlap"],
        ["evaluate", "gpt", "--protocol", "sliding"],
        ["score", "gpt", "line.txt"],
        ["explain", "gpt"],
        ["report", "gpt"],
        ["compare", "gpt", "bigram"],
        ["compress", "gpt", "line.txt", "line.cgpt"],
        ["decompress", "gpt", "line.cgpt", "back.txt"],
        ["doctor"],
    ):  # fmt: skip
        syncs.clear()
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, (command, done.output, done.exception)
        # compression runs on the CPU, so that any machine can decompress
        assert bool(syncs) == ("compress" not in command[0]), command


@pytest.mark.slow
def test_slow_first_calls_are_not_measured(
    corpus: Corpus, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = 0.5  # seconds of each of about a hundred operations
    monkeypatch.setattr(budget_module, "RESERVE", Reserve(timed_tokens=500))
    clock = slow_first_calls(monkeypatch, cold)
    training = trainer_on("mps", corpus)
    step_seconds = measure_step_seconds(training.learner, 3, update=True)
    assert clock.now > 50 * cold
    assert step_seconds < cold
    clock = slow_first_calls(monkeypatch, cold)
    budget = Budget(1000.0, clock=lambda: clock.now)
    budget.measure_evaluation(training.model, corpus, training.config)
    assert clock.now > 10 * cold
    assert budget.evaluation_seconds < cold


def test_a_slow_first_trial_does_not_use_up_the_share_of_time_for_trials(
    corpus: Corpus, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, trials = [0.0], []

    def speed(config: Config, *_: object) -> float:
        now[0] += 0.1 if trials else 20.0
        trials.append(config)
        return 1e9  # a launch-bound device: no model is slower than another

    monkeypatch.setattr(planner, "measure_speed", speed)
    monkeypatch.setattr(planner, "memory_limit", lambda _: 80 * 10**9)
    budget = Budget(60.0, started=0.0, clock=lambda: now[0])
    long = replace(corpus, tokens=np.broadcast_to(np.uint8(0), (10**9,)))
    planned = planner.plan(load_config("gpt").with_values({"device": "mps"}), long, budget)
    assert len(trials) > 1
    assert planned.config.model.n_embd > planner.SIZES[0].n_embd


def saving_run(
    verse: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> Trainer:
    """Return a trainer with a folder, whose saves take longer than a step."""
    save = RunFolder.save

    def slow(self: RunFolder, **values: Any) -> Path:
        time.sleep(0.5)
        path = save(self, **values)
        events.append(f"saved {values['state'].step}")
        return path

    monkeypatch.setattr(RunFolder, "save", slow)
    values = {"device": "mps", "text.path": str(verse), "train.save_every": 5, "train.max_steps": 8}
    made = session.create_run(load_config("gpt").with_values({**TINY, **values}), folder)
    made.folder.unlock()
    return made.trainer


def test_training_goes_on_while_a_checkpoint_is_written(
    verse: Path, tmp_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    training = saving_run(verse, tmp_path / "run", monkeypatch, events)
    weights = None
    for report in training.steps():
        events.append(f"step {report.step}")
        if report.step == 5:
            weights = {name: x.cpu().clone() for name, x in training.model.state_dict().items()}
    assert events.index("saved 5") > events.index("step 6")
    assert events[-2:] == ["saved 8", "step 8"]
    saved, _ = training.folder.load("5")
    assert weights is not None
    torch.testing.assert_close(saved.model, weights, rtol=0, atol=0)


def test_a_best_checkpoint_that_could_not_be_written_in_the_background_is_not_the_best(
    verse: Path, tmp_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = saving_run(verse, tmp_path / "run", monkeypatch, [])
    first = next(training.steps()).validation
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(RunFolder, "save", Mock(side_effect=full))
    reports: list[StepReport] = []
    with pytest.raises(OperationError, match="No space left on device"):
        reports.extend(training.steps())
    assert reports[-1].is_best
    assert training.writer.disk_error == "No space left on device"
    assert first is not None
    assert (training.state.best_step, training.state.best_nats_per_char) == (
        0,
        first.nats_per_char,
    )
