"""Two ranks train to the losses of one process, and only rank 0 prints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, Cli, refusal

from chargpt.config import TextConfig, load_config
from chargpt.distributed import RankGroup
from chargpt.errors import ConfigError
from chargpt.text.prepare import load_corpus
from chargpt.training.learner import Learner

SETTINGS = (
    "-s train.max_steps=8 -s train.batch_size=8 -s train.micro_batches=2 -s train.evaluate_every=4 "
    "-s model.n_layer=1 -s model.n_embd=32 -s model.block_size=16 -s dtype=float32 "
    "-s train.sample_every=0 --device cpu"
).split()
STUDENT = "-s", "train.students=[5]", "-s", "schedule.restarts=[[5, 1]]"


# the command line on a rank whose clock is a minute ahead of the one before, and which is slow;
# each rank writes the numbers of steps that it has done and planned
SKEWED = """
import os, time
from pathlib import Path

rank, real_time = int(os.environ["RANK"]), time.perf_counter
time.perf_counter = lambda: real_time() + 60 * rank
from chargpt.cli.main import run
from chargpt.training.trainer import Trainer

real_steps, real_step = Trainer.steps, Trainer.train_step

def steps(trainer, *args):
    yield from real_steps(trainer, *args)
    Path(f"steps-{rank}").write_text(f"{trainer.state.step} {trainer.config.train.max_steps}")

def train_step(trainer):
    time.sleep(0.02 * rank)
    return real_step(trainer)

Trainer.steps, Trainer.train_step = steps, train_step
run()
"""


# the command line with CUDA graphs captured on the CPU, without rank 1 if its capture is to fail;
# each rank writes how often it has replayed one
CAPTURED = """
import atexit, os, pytest, sys
from pathlib import Path
from test_fake_gpu import FakeGraph, enable_graphs

rank = os.environ["RANK"]
enable_graphs(pytest.MonkeyPatch())
if sys.argv.pop(1) == "failed" and rank == "1":
    del FakeGraph.__torch_dispatch__
atexit.register(lambda: Path("replays-" + rank).write_text(str(FakeGraph.replays)))
from chargpt.cli.main import run
run()
"""


def torchrun(
    *args: object, cwd: Path, program: tuple[object, ...] = ("-m", "chargpt")
) -> subprocess.CompletedProcess[str]:
    launcher = "-m torch.distributed.run --standalone --nproc-per-node=2".split()
    return subprocess.run(
        [sys.executable, *launcher, *map(str, (*program, *args))],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests"))),
            "OMP_NUM_THREADS": "1",
        },
    )


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r["loss"] for r in records if "loss" in r] + [
        r["val_nats_per_char"] for r in records if "val_nats_per_char" in r
    ]


@pytest.mark.parametrize("capture", ["none", "captured", "failed"])
def test_two_ranks_train_to_the_losses_of_one_process(
    capture: str, verse: Path, tmp_path: Path, cli: Cli
) -> None:
    args: tuple[object, ...] = ("train", verse, *SETTINGS, *STUDENT)
    program: tuple[object, ...] = ("-m", "chargpt")
    if capture != "none":
        (tmp_path / "captured.py").write_text(CAPTURED)
        args, program = (*args, "-s", "train.micro_batches=1"), ("captured.py", capture)
    alone = cli(*args, "--out", "alone")
    assert alone.returncode == 0, alone.stderr
    together = torchrun(*args, "--out", "together", cwd=tmp_path, program=program)
    assert together.returncode == 0, together.stderr
    one, two = losses(tmp_path / "alone"), losses(tmp_path / "together")
    assert len(one) == len(two) == 8 + 4
    assert two == pytest.approx(one, abs=1e-5)
    assert together.stderr.count("vocab ") == 1  # only rank 0 prints
    assert "x 2 processes" in together.stderr
    assert together.stdout.count("perplexity") == 1
    assert "Warning" not in together.stderr
    # the note that both ranks train without
    assert together.stderr.count("capture failed on another rank") == (capture == "failed")
    replays = [int(path.read_text()) for path in sorted(tmp_path.glob("replays-*"))]
    if capture == "captured":
        assert min(replays) >= 2 * 8  # gradients and update of each step
    elif capture == "failed":
        assert replays == [2, 0]  # which check the graphs of rank 0


@pytest.mark.slow
def test_the_ranks_keep_a_budget_by_the_clock_of_rank_0(verse: Path, tmp_path: Path) -> None:
    script = tmp_path / "skewed.py"
    script.write_text(SKEWED)
    model = "-s model.n_layer=1 -s model.n_embd=32 -s dtype=float32 --device cpu".split()
    # beside other tests the start takes many seconds
    budget = (*model, "--budget", "15s", "--out", "run")
    done = torchrun("train", verse, *budget, cwd=tmp_path, program=(script,))
    assert done.returncode == 0, done.stderr
    assert "budget  15 s: " in done.stderr
    steps = {(tmp_path / f"steps-{rank}").read_text() for rank in (0, 1)}
    assert len(steps) == 1
    n_steps, max_steps = map(int, steps.pop().split())
    assert n_steps == max_steps >= 20
    state = json.loads(next((tmp_path / "run/checkpoints").glob("*/state.json")).read_text())
    assert state["world_size"] == 2


# rank 1 as on a host of its own, without the text and the run
HOST = """
import os
os.chdir(os.environ["RANK"])
os.environ["LOCAL_RANK"] = "0"
from chargpt.store import mirror
if os.environ["RANK"] == "1":
    mirror._facts = lambda folder: {}
"""
APART = HOST + "from chargpt.cli.main import run; run()"


@pytest.mark.slow
def test_a_host_without_the_text_and_the_run_gets_them_from_rank_0(
    verse: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    for folder in (tmp_path / "0", tmp_path / "1", temporary):
        folder.mkdir()
    (tmp_path / "0" / "data").mkdir()
    for name in ("text.txt", "data/tinyshakespeare.txt"):
        (tmp_path / "0" / name).write_bytes(verse.read_bytes())
    (tmp_path / "apart.py").write_text(APART)
    monkeypatch.setenv("TMPDIR", str(temporary))
    more = ("train", "--resume", "run", "-s", "train.max_steps=12")
    tuned = ("train", "tinyshakespeare", *SETTINGS, "--from", "run", "--out", "tuned")
    for words in (("train", "text.txt", *SETTINGS, "--out", "run"), more, tuned):
        done = torchrun(*words, cwd=tmp_path, program=("apart.py",))
        assert done.returncode == 0, done.stderr
    alone = tmp_path / "alone"
    assert cli("train", verse, *SETTINGS, "--out", alone).returncode == 0
    assert cli(*(alone if word == "run" else word for word in more)).returncode == 0
    assert losses(tmp_path / "0" / "run") == pytest.approx(losses(alone), abs=1e-5)
    assert not list((tmp_path / "1").iterdir())
    assert not list(temporary.glob("chargpt-*"))


# the Python interface, which returns the run on every rank
RESUMED = f"""{HOST}
import chargpt
run = chargpt.train(out="run", start="resume", settings={{"train.max_steps": 12}})
open("../step-" + os.environ["RANK"], "w").write(f"{{run.step}} {{run.folder}}")
"""


@pytest.mark.slow
def test_every_rank_gets_the_run_that_was_resumed(verse: Path, tmp_path: Path, cli: Cli) -> None:
    assert cli("train", verse, *SETTINGS, "--out", tmp_path / "0" / "run").returncode == 0
    (tmp_path / "1").mkdir()
    (tmp_path / "resumed.py").write_text(RESUMED)
    done = torchrun(cwd=tmp_path, program=("resumed.py",))
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"step-{rank}").read_text() for rank in (0, 1)] == ["12 run", "12 run"]


# Trainings of one program. Rank 0 comes later to each, and rank 1 loses the device, another name of
# the CPU, before the last.
SEVERAL = """
import os, sys, time, torch, chargpt
from chargpt.errors import DeviceError
from chargpt.training import resume, trainer

rank, missing = os.environ["RANK"], set()

def choose(name):
    if name in missing:
        raise DeviceError(f"device {name!r} is not available")
    return torch.device("cpu"), "why"

def train(batch_size=8, **options):
    time.sleep(0.5 * (rank == "0"))
    sizes = {"model.n_layer": 1, "model.n_embd": 32, "model.block_size": 16}
    others = {"train.max_steps": 8, "train.batch_size": batch_size, "dtype": "float32"}
    settings = sizes | others | {"threads": 1, "device": "cuda:1"}
    return chargpt.train(sys.argv[1], out="run", settings=settings, **options)

resume.choose_device = trainer.choose_device = choose
try:
    train(7)
except chargpt.ChargptError as error:
    assert "does not divide" in str(error)
train(on_report=lambda report: report.step == 3)
if rank == "1":
    missing.add("cuda:1")
train(start="new or resume")
run = train(start="new or resume")
assert not torch.distributed.is_initialized()  # the program may make one now
open("step-" + rank, "w").write(str(run.step))
"""


@pytest.mark.slow
def test_a_program_trains_several_times_also_after_an_error_and_the_loss_of_a_device(
    verse: Path, tmp_path: Path
) -> None:
    (tmp_path / "several.py").write_text(SEVERAL)
    done = torchrun(verse, cwd=tmp_path, program=("several.py",))
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"step-{rank}").read_text() for rank in (0, 1)] == ["8", "8"]


@pytest.mark.slow
def test_a_mistake_is_one_sentence_of_rank_0(tmp_path: Path) -> None:
    done = torchrun("train", "missing.txt", *SETTINGS, cwd=tmp_path)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if "chargpt: " in line]
    assert line.startswith("chargpt: there is no file ")


def test_a_comparison_of_several_processes_is_rejected(
    verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start it without torchrun" in refusal(cli("compare", verse))
    assert not Path("runs").exists()


def test_a_batch_that_does_not_divide_over_the_ranks_is_rejected(verse: Path) -> None:
    config = load_config("gpt", {"train.batch_size": 7, "dtype": "float32"})
    corpus = load_corpus(TextConfig(path=str(verse)))
    with pytest.raises(ConfigError, match="does not divide over 2 processes"):
        Learner(config, corpus, RankGroup(0, 2), torch.device("cpu"))
