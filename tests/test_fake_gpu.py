"""What only a GPU has: host-device syncs, CUDA graphs, checkpoints saved in the background.

On torch's `meta` device tensors have no values: whatever would synchronise raises, and so do most
operations that mix devices. CUDA graphs are captured on the CPU.
"""

import contextlib
import re
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from noise import noisy_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chargpt.analysis import doctor
from chargpt.config import Config, load_config
from chargpt.errors import CaptureError
from chargpt.inference import decoders
from chargpt.inference.decoders import GraphDecoder, ModelDecoder, NumpyDecoder, build_decoder
from chargpt.models.gpt import GPT
from chargpt.store.folder import RunFolder
from chargpt.text.corpus import Corpus
from chargpt.training import learner, optim, planner, trainer
from chargpt.training.budget import Trials
from chargpt.training.deadline import Deadline
from chargpt.training.trainer import METRICS_EVERY, Trainer

CPU, META = torch.device("cpu"), torch.device("meta")
# they return a value, or a shape that depends on values
SYNCHRONISING = re.compile("_local_scalar_dense|masked_select|nonzero|repeat_interleave")
TINY = {
    "model.n_layer": 1, "model.n_embd": 64, "model.block_size": 32, "train.batch_size": 8,
    "train.max_steps": 60, "train.evaluate_every": 60, "train.save_every": 60,
    "train.sample_every": 0, "dtype": "float32", "device": "cpu",
}  # fmt: skip


class FakeGraph(TorchDispatchMode):
    """A CUDA graph on the CPU: a replay repeats the operations in the memory of the capture."""

    replays = 0

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if SYNCHRONISING.search(str(function)):
            raise RuntimeError(f"{function}: operation not permitted when stream is capturing")
        result = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        FakeGraph.replays += 1
        for function, args, kwargs, result in self.operations:
            repeated = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(repeated), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)


def enable_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture `FakeGraph`s with a fake `torch.cuda`."""
    cuda = MagicMock(CUDAGraph=FakeGraph, default_generators=[MagicMock()])
    cuda.current_device.return_value = 0

    def graph(graph: FakeGraph, *, stream: object) -> FakeGraph:
        assert stream is cuda.stream.call_args.args[0], "libraries warm up stream by stream"
        return graph

    cuda.graph = graph
    names = "CUDAGraph Stream default_generators device current_device current_stream set_stream"
    for name in (*names.split(), "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    for module in (learner, decoders, doctor):
        monkeypatch.setattr(module, "can_capture", lambda device: True)
    monkeypatch.setattr(FakeGraph, "replays", 0)


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a trainer and a planner choose the device without values."""
    for module in (trainer, planner):
        monkeypatch.setattr(module, "choose_device", lambda name: (META, "fake"))
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)


def make_trainer(corpus: Corpus, folder: RunFolder | None = None, **values: object) -> Trainer:
    made = Trainer(load_config("gpt").with_values({**TINY, **values}), corpus, folder=folder)
    if folder is not None:
        folder.create(made.config, corpus.tokenizer)
    return made


def train(training: Trainer, n_steps: int) -> list[float]:
    """Return the losses and the norms of the gradients of some steps."""
    reports = [training.train_step() for _ in range(n_steps)]
    return [float(x) for each in reports for x in (each.loss, each.grad_norm) if x is not None]


@pytest.mark.usefixtures("meta")
def test_training_synchronises_only_to_write_metrics(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"model.dropout": 0.1, "train.micro_batches": 2, "train.ema": 0.9}
    training = make_trainer(corpus, device="mps", **values)  # with both optimizers
    batch, ngram = training.learner.batches.at(0), training.learner.ngram
    assert ngram is not None
    assert ngram.table is not None
    assert batch.device == ngram.table.device == META  # both are resident
    for _ in range(METRICS_EVERY - 1):
        training.train_step()
    with pytest.raises(NotImplementedError, match="no data"):
        training.train_step()
    monkeypatch.setattr(trainer, "METRICS_SECONDS", 1000.0)  # since the last write
    for _ in range(METRICS_EVERY):
        training.train_step()


@pytest.mark.parametrize(
    ("dtype", "dropout", "is_capturable"),
    [
        ("float32", 0.0, True),
        ("float32", 0.1, True),
        ("float32", 0.0, False),
        ("float16", 0.0, True),  # whose first gradients overflow
    ],
)
def test_training_with_cuda_graphs_or_a_failed_capture_has_the_losses_of_training_without(
    dtype: str,
    dropout: float,
    is_capturable: bool,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optim, "INITIAL_SCALE", 2.0**22)
    found = []
    for name in ("plain", "captured"):
        if name == "captured":
            enable_graphs(monkeypatch)
            if not is_capturable:  # look-ups then synchronise
                monkeypatch.setattr("chargpt.models.ngram.MAX_TABLE_ENTRIES", 0)
        folder = RunFolder(tmp_path / name)
        training = make_trainer(corpus, folder, dtype=dtype, **{"model.dropout": dropout})
        has_failed = "capture failed (aten." in str(training.learner.capture_error)
        assert has_failed == (name == "captured" and not is_capturable)
        FakeGraph.replays = 0
        found.append(train(training, 7))
        training.save()
        training.roll_back(8)
        found[-1] += train(training, 3)  # with a graph of the restored optimizer
        resumed = Trainer(training.config, corpus, saved=folder.load("7"))
        found[-1] += train(resumed, 3)
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    assert (-1 in found[0], found[0][-1] > 0) == (dtype == "float16", True)
    # gradients and update, and some that check a graph
    assert FakeGraph.replays >= 2 * 13 if is_capturable else FakeGraph.replays == 0


@pytest.mark.parametrize("cause", ["student", "rollback"])
def test_training_goes_on_with_ddp_and_a_note_if_a_later_capture_fails(
    cause: str,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    enable_graphs(monkeypatch)
    training = make_trainer(corpus, RunFolder(tmp_path / "run"))
    train(training, 7)
    training.save()
    failing = Mock(side_effect=CaptureError("capture failed (out of memory)"))
    monkeypatch.setattr(learner, "capture_graph", failing)
    wrapped = deepcopy(training.model)
    monkeypatch.setattr(learner.Learner, "_wrap_for_ddp", lambda _: wrapped)
    if cause == "student":
        training.learner.start_student(1, training.config.optim)
    else:
        training.roll_back(8)
    assert caplog.text.count("capture failed (out of memory): training works") == 1
    assert training.learner.ddp_model is wrapped
    replays = FakeGraph.replays
    training.learner.ddp_model = training.model
    losses = train(training, 40)[::2]
    assert losses[-1] < losses[0]
    assert FakeGraph.replays == replays


def test_teachers_with_shorter_blocks_are_captured(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "narrow")
    narrow = make_trainer(corpus, folder, **{"model.block_size": 8})
    train(narrow, 5)
    narrow.save()
    found = []
    for is_captured in (False, True):
        if is_captured:
            enable_graphs(monkeypatch)
        training = make_trainer(corpus, **{"train.teachers": [str(folder.path)]})
        assert (training.learner.captured_update is not None) == is_captured
        found.append(train(training, 5))
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_a_decoder_replays_one_cuda_graph_and_does_without_one_that_gives_another_result(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = noisy_model(block_size=8)
    enable_graphs(monkeypatch)
    assert doctor._check_graphs(CPU).value == "captured and replayed"
    assert doctor.decoding_error(CPU) < 1e-5
    assert FakeGraph.replays > 2 * 64
    plain, captured = ModelDecoder(model, 3), GraphDecoder(model, 3)
    FakeGraph.replays = 0
    for each in np.arange(60).reshape(20, 3) % 11:
        np.testing.assert_allclose(captured.step(each), plain.step(each), rtol=1e-5, atol=1e-5)
    assert FakeGraph.replays == 20 + 1  # one checks the graph
    monkeypatch.setattr(FakeGraph, "replay", lambda graph: graph.operations[-1][3].zero_())
    assert doctor._check_graphs(CPU).advice
    decoders._warn_once.cache_clear()
    for _ in range(2):
        assert GraphDecoder(model, 1).step(np.array([1])).any()
    (record,) = caplog.records  # this is said once
    assert "a replayed CUDA graph gave another result" in record.message


@pytest.mark.parametrize("fastest", [NumpyDecoder, ModelDecoder])
def test_few_sequences_of_a_small_model_are_decoded_where_a_trial_is_fastest(
    fastest: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, trial = noisy_model(), Mock(side_effect=lambda decoder, _: type(decoder) is not fastest)
    monkeypatch.setattr(GPT, "device", META)
    monkeypatch.setattr(decoders, "trial_seconds", trial)
    assert type(build_decoder(model, 2)) is fastest
    assert trial.call_count == 2
    monkeypatch.setattr(decoders, "MAX_CPU_WORK", model.num_parameters())
    assert type(build_decoder(model, 2)) is ModelDecoder
    assert trial.call_count == 2


def test_first_calls_which_load_kernels_are_not_timed(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seconds = [0.0], [9.0, 9.0] + [0.001] * decoders.TRIAL_STEPS

    def work(*_: object, **__: object) -> Mock:
        now[0] += seconds.pop(0)
        return Mock(characters=1)

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    trial = decoders.trial_seconds(Mock(step=work), 1)
    assert trial == pytest.approx(0.001 * decoders.TRIAL_STEPS)
    seconds += [9.0, 0.001]
    monkeypatch.setattr("chargpt.training.budget.evaluate_tokens", work)
    config = Config().with_values({"device": "cpu"})
    assert Trials(corpus).measure_scoring(config) == pytest.approx(0.001)


@pytest.mark.usefixtures("meta")
def test_a_slow_first_trial_does_not_use_up_the_fraction_of_time_for_trials(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seconds = [0.0], [20.0] + [0.1] * 99

    def speed(*_: object) -> float:
        now[0] += seconds.pop(0)
        return 1e9  # a launch-bound device: no model is slower than another

    monkeypatch.setattr(planner, "memory_limit", lambda _: 80 * 10**9)
    deadline = Deadline.from_budget(60.0, 0.0, lambda: now[0])
    long = replace(corpus, tokens=np.broadcast_to(np.uint8(0), (10**9,)))
    config = load_config("gpt").with_values({"device": "mps"})
    planned = planner.Planner(config, long, deadline, (), speed).plan()
    assert planned.config.model.n_embd > planner.SIZES[0].n_embd


class OffCPU(Tensor):
    """A CPU tensor that reports another device; `cpu` copies it slowly, as from a GPU."""

    device = property(lambda self: META)  # type: ignore[assignment]

    def cpu(self) -> Tensor:  # type: ignore[override]
        time.sleep(0.005)
        return self.as_subclass(Tensor).clone()


def test_training_goes_on_while_a_checkpoint_is_written(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, state_dicts = RunFolder.save, learner.Learner.state_dicts

    def slow(self: RunFolder, **values: Any) -> Path:
        time.sleep(0.5)
        return save(self, **values)

    def off_cpu(self: learner.Learner) -> Any:
        parts = state_dicts(self)
        return [{name: x.as_subclass(OffCPU) for name, x in part.items()} for part in parts]

    monkeypatch.setattr(RunFolder, "save", slow)
    monkeypatch.setattr(learner.Learner, "state_dicts", off_cpu)
    folder, steps = RunFolder(tmp_path / "run"), {"train.save_every": 5, "train.max_steps": 8}
    training, weights, saved = make_trainer(corpus, folder, **steps), {}, []
    for report in training.steps():
        saved.append(training.writer.saved_step)
        if report.step == 5:
            weights = {name: x.clone() for name, x in training.model.state_dict().items()}
    assert (saved[6], saved[8]) == (None, 8)
    torch.testing.assert_close(folder.load("5").model, weights, rtol=0, atol=0)
