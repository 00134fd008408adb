"""Choice of the number of CPU threads by measurement."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY

from chargpt import threads as threads_module
from chargpt.config import TextConfig, load_config
from chargpt.store.run import load_run
from chargpt.text.prepare import load_corpus
from chargpt.threads import ThreadTuner, choose_threads, default_threads, measure_threads
from chargpt.training.trainer import Trainer

CPU = torch.device("cpu")
TINY = {"model.n_layer": 1, "model.n_embd": 16, "model.block_size": 16, "threads": 1}


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    default_threads.cache_clear()
    yield
    torch.set_num_threads(before)
    default_threads.cache_clear()


class Machine:
    """A clock that advances by the time of an operation, given for each number of threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
        self.now, self.seconds = 0.0, seconds
        monkeypatch.setattr(threads_module.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(threads_module.F, "silu", self.operate)

    def operate(self, x: torch.Tensor) -> torch.Tensor:
        self.now += self.seconds[torch.get_num_threads()]
        return x


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        ({4: 1.0, 2: 1.8, 1: 3.4}, 4),
        ({4: 9.0, 2: 1.8, 1: 3.4}, 2),  # another process uses one of the cores
        ({4: 9.0, 2: 3.1, 1: 3.4}, 1),  # a gain that is within the noise
        ({1: 3.4}, 1),
    ],
)
def test_the_fastest_number_of_threads_is_set(
    seconds: dict[int, float], fastest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, seconds)
    assert choose_threads(max(seconds)) == fastest == torch.get_num_threads()


def test_threads_are_chosen_again_when_the_speed_falls_and_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, {2: 1e-3, 1: 2e-3})
    torch.set_num_threads(2)
    tuner = ThreadTuner(2)
    assert tuner.update(1000.0) is None
    assert tuner.update(600.0) is None
    machine.seconds[2] = 0.1  # another process starts
    assert tuner.update(400.0) == 1
    assert tuner.update(500.0) is None
    machine.seconds[2] = 1e-3  # it ends
    assert tuner.update(500.0) is None
    machine.now += 21
    assert tuner.update(500.0) == 2


def test_the_users_number_of_threads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {2: 0.1, 1: 1e-3})
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert measure_threads(CPU) is None
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert measure_threads(torch.device("cuda")) is None
    assert torch.get_num_threads() == 2
    assert measure_threads(CPU) == torch.get_num_threads() == 1  # another process uses a core
    machine.seconds[2] = 1e-4
    assert measure_threads(CPU) == 2


def test_a_loaded_run_uses_the_fastest_threads_unless_training_has_set_them(
    monkeypatch: pytest.MonkeyPatch, verse: Path
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine = Machine(monkeypatch, {2: 0.1, 1: 1e-3})
    torch.set_num_threads(2)
    run = REPOSITORY / "tests" / "golden" / "0.1.0" / "run"
    load_run(run, device="cpu")
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    default_threads.cache_clear()
    machine.seconds[2] = 1e-4
    config = load_config().with_values({**TINY, "device": "cpu", "dtype": "float32"})
    Trainer(config, load_corpus(TextConfig(path=str(verse))))
    assert (torch.get_num_threads(), default_threads()) == (1, 2)  # later runs may use more
    load_run(run, device="cpu")
    assert torch.get_num_threads() == 1
