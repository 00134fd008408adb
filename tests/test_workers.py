"""Streams that processes of their own draw: the same texts, and no process outlives its use."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, run_cli
from noise import noisy_model

from chargpt.config import SampleConfig
from chargpt.errors import WorkError
from chargpt.inference import workers
from chargpt.inference.decoder import weights_of
from chargpt.inference.sampling import stream
from chargpt.inference.workers import Job, drawn_by_workers, processes_for
from chargpt.text.tokenizer import CharTokenizer

LETTERS = CharTokenizer("abcdefghijk")


@pytest.fixture
def started(monkeypatch):
    """The processes that are started, of which every use of three streams takes two."""
    found = []
    start = workers._Worker.__init__

    def noted(self, streams):
        start(self, streams)
        found.append(self.process)

    monkeypatch.setattr(workers._Worker, "__init__", noted)
    monkeypatch.setattr(workers, "WORTH", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return found


def drawing(model=None, prompt="", streams=None, tokenizer=LETTERS, **options):
    chosen = SampleConfig(
        **{"length": 40, "seed": 5, "temperature": 1.0, "num_samples": 3} | options
    )
    model = model or noisy_model(tokenizer.vocab_size)
    return stream(model, tokenizer, tokenizer.encode(prompt), chosen, streams=streams)


def has_ended(worker):
    return worker.poll() is not None and worker.stdout.closed


@pytest.mark.parametrize("prompt", ["", "abc", "abcabcabcabcabcabc"])
@pytest.mark.parametrize(
    "options",
    [
        {"seed": 2**63 - 1},
        {"streams": [7, 2, 5, 4096]},
        {"temperature": 0},
        {"top_k": 3, "top_p": 0.7, "min_p": 0.1, "temperature": 3.0},
        {"tokenizer": CharTokenizer("abcdefghij", has_unknown=True)},
        {"stop": ("a", "bc", "\udcff")},
    ],
)
def test_processes_write_the_same_texts(prompt, options, started, monkeypatch):
    apart = list(drawing(prompt=prompt, **options))
    assert len(started) == 2
    assert all(map(has_ended, started))
    monkeypatch.setattr(workers, "WORTH", 1e99)
    assert list(drawing(prompt=prompt, **options)) == apart
    assert len(started) == 2


def test_a_job_comes_back_from_its_bytes():
    model = noisy_model()
    held = np.ones((2, 2, 5, 8), np.float32)
    options = SampleConfig(seed=1, prompt="ж" * 10_000_000, stop=("\n",), top_p=0.5)
    job = Job(weights_of(model), held, 2 * held, np.arange(11.0), options, None)
    content = job.pack()
    assert len(content) < 100_000
    back = Job.unpack(content)
    assert back.unknown_id is None
    assert back.options == options.model_copy(update={"prompt": "", "stop": ()})  # not needed there
    for ours, theirs in ((job, back), (job.weights, back.weights)):
        arrays = {
            name: value for name, value in vars(ours).items() if isinstance(value, np.ndarray)
        }
        assert arrays
        for name, array in arrays.items():
            assert np.array_equal(array, vars(theirs)[name])
            assert array.dtype == vars(theirs)[name].dtype


@pytest.mark.parametrize(
    ("parameters", "streams", "length", "cores", "processes"),
    [
        (800_000, 64, 1000, 2, 2),
        (800_000, 64, 1000, 16, 2),  # work for two seconds
        (800_000, 64, 5000, 16, 12),
        (800_000, 64, 50_000, 16, 16),
        (800_000, 3, 5_000_000, 16, 3),
        (800_000, 1, 5_000_000, 16, 1),
        (800_000, 64, 100, 16, 1),
        (800_000, 4096, 5000, 999, 64),
        (10_650_000, 64, 1000, 16, 16),  # the field's usual largest
        (30_000_000, 64, 1000, 16, 1),
    ],
)
def test_a_process_is_started_for_each_seconds_work(parameters, streams, length, cores, processes):
    assert processes_for(parameters, streams, length, cores) == processes


def test_one_thread_draws_alone(started, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert len(list(drawing())) == 40
    assert not started


def test_numbers_that_are_not_finite_are_told_as_by_one_process(started):
    model = noisy_model()
    with torch.no_grad():
        model.embedding.weight[10] = float("nan")  # of k
    with pytest.raises(WorkError, match=r"^the model's predictions are not finite numbers"):
        list(drawing(model, "a", length=500))
    assert all(map(has_ended, started))


def test_a_process_that_is_killed_is_told_and_the_others_end(started):
    pieces = drawing(length=100_000)
    next(pieces)
    started[1].kill()
    with pytest.raises(WorkError, match=r"lost \(exit code -?\d+\); set OMP_NUM_THREADS=1"):
        list(pieces)
    assert all(map(has_ended, started))


def test_a_process_that_cannot_start_is_told(started, monkeypatch, tmp_path):
    (tmp_path / "numpy.py").write_text("print('x' * 10**6, file=__import__('sys').stderr); gone()")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkError, match=r"lost \(exit code 1, NameError: .*'gone'.*\); set OMP"):
        list(drawing())
    assert all(map(has_ended, started))


def test_a_machine_that_starts_no_more_processes_is_told(started, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(WorkError, match=r"could be started .*\); set OMP_NUM_THREADS=1"):
        list(drawing())


def test_whoever_stops_listening_ends_the_processes(started):
    pieces = drawing(length=100_000)
    next(pieces)
    assert not any(map(has_ended, started))
    pieces.close()
    assert all(map(has_ended, started))


def test_workers_need_no_torch():
    code = "import sys, chargpt.inference.workers; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "numpy" in done.stdout.split()
    assert "torch" not in done.stdout.split()


def test_the_first_process_takes_the_first_streams(started):
    job = Job(
        weights_of(noisy_model()),
        *np.zeros((2, 2, 2, 0, 8), np.float32),
        np.zeros(11),
        SampleConfig(length=3, seed=1),
        None,
    )
    apart = np.stack(list(drawn_by_workers(job, [4, 5, 9], 2)))
    assert np.array_equal(apart, np.stack(list(job.draw([4, 5, 9]))))
    assert [json.loads(process.args[-1]) for process in started] == [[4, 5], [9]]


def workers_of(process):
    """Return the worker processes that a process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:  # it has ended
            continue
        if b"chargpt.inference.workers" in words and int(parent) == process.pid:
            found.append(folder)
    return found


def wait_until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="no /proc")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_no_process_outlives_a_command_that_is_ended(name, verse, tmp_path):
    number = getattr(signal, name)
    sizes = ("n_layer=1", "n_embd=8", "n_head=1", "block_size=16")
    settings = [f"--set=model.{size}" for size in sizes]
    done = run_cli(
        "train", verse, "--out", "run", "-s", "train.max_steps=2", *settings, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    command = subprocess.Popen(
        [sys.executable, "-m", "chargpt", "sample", "run", "--num-samples=9", "--length=10000000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "2"},
        start_new_session=True,
    )
    wait_until(lambda: len(workers_of(command)) == 2 or command.poll() is not None)
    at_work = workers_of(command)
    os.killpg(command.pid, number)  # as a terminal does
    out, error = command.communicate(timeout=60)
    assert command.returncode in (-number, 128 + number), error
    assert not out
    assert "Traceback" not in error
    wait_until(lambda: not any(folder.exists() for folder in at_work))
