"""Every command on real texts, and every user error as one sentence with an exit code."""

import gzip
import io
import json
import math
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Cli, refusal, run_cli, run_here, run_python

from chargpt.analysis import compare as comparison
from chargpt.analysis.compare import Comparison, Row, compare_runs
from chargpt.analysis.result import MIXTURE_SUFFIX, loss_cells
from chargpt.cli.compare import print_rows
from chargpt.cli.main import COMMANDS, HELP_COLUMNS, HELP_PAGES
from chargpt.cli.sample import say_repetition
from chargpt.config import SampleConfig, load_config
from chargpt.inference.baselines import Baselines
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.store.checkpoint import list_checkpoints
from chargpt.store.folder import RunFolder
from chargpt.store.run import load_run
from chargpt.store.verify import verify

QUICK = (
    "-s train.max_steps=6 -s train.batch_size=4 -s train.evaluate_every=3 -s train.save_every=3 "
    "-s train.evaluation_tokens=300 -s train.sample_every=6 -s model.n_layer=1 "
    "-s model.n_embd=16 -s model.block_size=16 -s sample.length=40 --device cpu -s dtype=float32"
).split()
RARE = ("-s", "text.min_count=20")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a small run once for all the tests that only read it."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copy(REPOSITORY / "data" / "lighthouse.txt", folder / "novel.txt")
    args = [word.replace("max_steps=6", "max_steps=40") for word in QUICK]
    run_here("train", "novel.txt", *args, "--out", "run", cwd=folder)
    return folder / "run"


# -- help -------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["sample", "-h"]])
def test_help_imports_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    code = (
        f"import sys; sys.argv = ['chargpt', *{words}]\n"
        "from chargpt.cli.main import run\n"
        "try: run()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'yaml', 'matplotlib'} & set(sys.modules)))"
    )
    done = run_python(code, tmp_path)
    assert done.stdout.rstrip().endswith("[]")
    assert f"Usage: {' '.join(['chargpt', *words[:-1]])} " in done.stdout


def test_help_names_every_command(cli: Cli) -> None:
    printed = cli("--help").stdout
    for command in (
        *("train", "sample", "evaluate", "compare", "score", "compress", "decompress"),
        *("explain", "report", "verify", "doctor", "data"),
    ):
        assert f"  {command} " in printed
    assert "..." not in printed.split("Commands:")[1]


def test_the_help_pages_are_those_of_the_commands(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    page = import_module("write_help_pages").page
    commands = [command for command in COMMANDS if command.name != "data"]
    assert {path.stem for path in HELP_PAGES.iterdir()} == {command.name for command in commands}
    for command in commands:
        written = (HELP_PAGES / f"{command.name}.txt").read_text(encoding="utf-8")
        # versions of typer break lines differently
        assert written.split() == page(command).split(), "run scripts/write_help_pages.py"
        assert max(map(len, written.splitlines())) <= HELP_COLUMNS
        assert "-\n" not in written  # an option or a word that is broken
        assert cli(command.name, "--help").stdout.split() == written.split()
    monkeypatch.setattr("chargpt.cli.console.terminal_size", lambda _: (60, 24))
    assert cli("train", "--help").stdout.split() == page(COMMANDS[0]).split()


@pytest.mark.parametrize(
    "command",
    ["train", "sample", "evaluate", "compare", "data list", "data get", "data info"],
)
def test_every_command_has_an_example_in_its_help(command: str, cli: Cli) -> None:
    done = cli(*command.split(), "--help")
    assert done.returncode == 0
    assert f"chargpt {command}" in done.stdout.split("Example")[1]


def test_no_arguments_show_the_help_and_version_is_printed(cli: Cli) -> None:
    assert "Commands:" in cli().stdout
    assert cli("--version").stdout.startswith("chargpt 0.")


# -- train ------------------------------------------------------------------------------------


def test_train_prints_its_plan_and_a_table_of_losses(verse: Path, cli: Cli) -> None:
    done = cli("train", verse, *QUICK)
    assert done.returncode == 0, done.stderr
    for word in ("text ", "vocab ", "model ", "device ", "plan ", "needs ", "epochs", "cpu"):
        assert word in done.stderr, word
    for row in ("uniform", "unigram", "bigram", "gpt (trained)", "nats/char", "perplexity"):
        assert row in done.stdout, row
    assert "chargpt sample runs/lighthouse-gpt" in done.stdout
    assert "-- sample at step 6 --" in done.stderr
    assert load_run("runs/lighthouse-gpt").step in (3, 6)


def test_the_commands_that_train_prints_succeed(verse: Path, cli: Cli) -> None:
    done = cli("train", verse, *QUICK)
    commands = [line.split() for line in done.stdout.splitlines() if line.startswith("  chargpt")]
    assert len(commands) == 4
    for _, *args in commands:
        assert cli(*args).returncode == 0
    assert RunFolder(Path("runs/lighthouse-gpt")).load("latest").state.step == 12


def weights(run: str) -> bytes:
    """Return the weights of a run's newest checkpoint."""
    return (max(Path(run, "checkpoints").iterdir()) / "model.safetensors").read_bytes()


def test_a_second_run_never_overwrites_the_first(verse: Path, cli: Cli) -> None:
    assert cli("train", verse, *QUICK, "--out", "mine").returncode == 0
    before = weights("mine")
    refused = refusal(cli("train", verse, *QUICK, "--out", "mine"))
    assert "--resume" in refused
    assert "--force" in refused
    assert weights("mine") == before
    assert cli("train", verse, *QUICK, "-s", "seed=9", "--out", "mine", "--force").returncode == 0
    assert weights("mine") != before
    for name in ("runs/lighthouse-gpt", "runs/lighthouse-gpt-2"):
        assert cli("train", verse, *QUICK).returncode == 0
        assert Path(name).is_dir()


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(verse: Path, cli: Cli) -> None:
    cli("train", verse, *QUICK, "--out", "whole")
    shorter = [w.replace("max_steps=6", "max_steps=3") for w in QUICK]
    shorter += ["-s", "schedule.cooldown=0"]
    whole = [*QUICK, "-s", "schedule.cooldown=0"]
    cli("train", verse, *whole, "--out", "whole", "--force")
    cli("train", verse, *shorter, "--out", "parts")
    done = cli("train", "--resume", "parts", "-s", "train.max_steps=6")
    assert done.returncode == 0, done.stderr
    assert "resuming parts from step 3" in done.stderr
    assert re.search(r"trained 6 steps in \S+ s, those before --resume included", done.stdout)
    model = "checkpoints/step-00000006/model.safetensors"
    assert Path("whole", model).read_bytes() == Path("parts", model).read_bytes()


def test_resume_uses_the_newest_run_and_rejects_settings_that_cannot_change(
    verse: Path, cli: Cli
) -> None:
    assert "no run under runs" in refusal(cli("train", "--resume"))
    cli("train", verse, *QUICK)
    assert "has done all its 6 steps" in refusal(cli("train", "--resume"))
    assert "drop -c" in refusal(cli("train", "--resume", "-c", "gpt"))
    for args in (("--resume", "--force"), (verse, "--out", "x", "--resume", "--force")):
        assert "give one of them" in refusal(cli("train", *args))
    assert "seed cannot change" in refusal(cli("train", "--resume", "-s", "seed=3"))


def test_decompress_restores_a_compressed_text(verse: Path, cli: Cli) -> None:
    cli("train", verse, *QUICK, "--out", "mine")
    part = verse.read_bytes()[:3000].decode(errors="ignore").encode()
    Path("part.txt").write_bytes(part)
    done = cli("compress", "mine", "part.txt", "part.cgpt")
    assert done.returncode == 0, done.stderr
    size = Path("part.cgpt").stat().st_size
    assert f"{len(part):,} bytes -> {size:,} bytes" in done.stdout
    assert "bits per character, with 34 bytes of header; xz -9: " in done.stdout
    assert "a passage of part.txt is in the text that the run was trained on" in done.stderr
    assert "is the text that the run was trained on" in cli("compress", "mine", verse, "all").stderr
    assert cli("decompress", "mine", "part.cgpt", "back.txt").returncode == 0
    assert Path("back.txt").read_bytes() == part
    assert "--force" in refusal(cli("decompress", "mine", "part.cgpt", "back.txt"))
    assert cli("decompress", "mine", "part.cgpt", "back.txt", "--force").returncode == 0
    assert "name another file" in refusal(cli("compress", "mine", "none.txt", "x.cgpt"))
    cli("train", verse, *QUICK, "--out", "other", "-s", "seed=5")
    assert "another model" in refusal(cli("decompress", "other", "part.cgpt", "x.txt"))
    assert not Path("x.txt").exists()


def test_an_argument_too_many_gets_the_remedy_that_fits_it(cli: Cli) -> None:
    message = refusal(cli("train", "novel.txt", "--resume", "runs/novel"))
    assert "(runs/novel); --resume takes no value: `chargpt train --resume RUN` resumes" in message
    assert "needs quotes" not in message
    assert "No such command 'resume'; `chargpt train --resume RUN`" in refusal(cli("resume", "a"))
    for name in ("a.txt", "b.txt"):
        Path(name).write_text("the sea\n")
    assert "needs quotes" in refusal(cli("train", "a.txt", "b.txt"))
    message = refusal(cli("train", "a.txt", "--budget", "5", "minutes", "--config", "b.txt"))
    assert "(minutes); see `chargpt train --help`" in message
    assert "(a.txt); --text FILE names another" in refusal(cli("evaluate", "runs/a", "a.txt"))
    assert "(a.txt); see `chargpt sample" in refusal(cli("sample", "runs/a", "a.txt"))


def test_the_same_command_with_resume_starts_a_run_and_continues_it(verse: Path, cli: Cli) -> None:
    args = ["train", verse, *QUICK, "-s", "schedule.cooldown=0", "--out", "mine", "--resume"]
    begun = cli(*[str(word).replace("max_steps=6", "max_steps=3") for word in args])
    assert begun.returncode == 0, begun.stderr
    done = cli(*args, "--device", "auto")
    assert "resuming mine from step 3" in done.stderr
    assert done.returncode == 0, done.stderr
    assert cli("train", verse, *args[2:-3], "--out", "whole").returncode == 0
    model = "checkpoints/step-00000006/model.safetensors"
    assert Path("whole", model).read_bytes() == Path("mine", model).read_bytes()
    again = cli(*args)
    assert again.returncode == 0
    assert "has done all its 6 steps" in again.stderr


def test_standard_input_resumes_a_run_of_the_same_text(
    verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(text: object, steps: int, content: bytes = b"") -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        words = [word.replace("max_steps=6", f"max_steps={steps}") for word in QUICK]
        return cli("train", text, *words, "--out", "mine", "--resume")

    assert train(verse, 6).returncode == 0
    done = train("-", 8, verse.read_bytes())
    assert done.returncode == 0, done.stderr
    assert "resuming mine from step 6" in done.stderr
    done = train("-", 9, b"another text " * 500)
    assert "is not the text that the run was trained on" in refusal(done)


def test_resume_rejects_another_text_or_setting_than_the_run_has(verse: Path, cli: Cli) -> None:
    args = ["train", verse, *QUICK, "--out", "mine", "--resume"]
    assert cli(*args).returncode == 0
    shutil.copy(verse, "moved.txt")
    assert "has done all its 6 steps" in cli("train", "moved.txt", *args[2:]).stderr
    Path("other.txt").write_text(verse.read_text() + "!")
    assert "other.txt is not the text" in refusal(cli("train", "other.txt", *args[2:]))
    for more, key in (
        (("-s", "seed=9"), "seed"),
        (("-c", "bigram"), "model.kind"),
        (("--encoding", "latin-1"), "text.encoding"),
    ):
        assert f"{key} cannot change" in refusal(cli(*args, *more))


@pytest.mark.parametrize("kind", ["no manifests", "other files", "a link"])
def test_resume_never_replaces_files_that_it_cannot_resume(
    kind: str, verse: Path, cli: Cli, tmp_path: Path
) -> None:
    args = ["train", verse, *QUICK, "--out", "mine", "--resume"]
    checkpoints = Path("mine/checkpoints")
    if kind == "no manifests":
        assert cli(*args).returncode == 0
        for manifest in Path("mine").rglob("manifest.json"):
            manifest.unlink()
    elif kind == "other files":
        checkpoints.mkdir(parents=True)
        Path("mine/config.yaml").write_text("theirs: true")
        (checkpoints / "epoch10.pt").write_bytes(b"precious")
    else:
        assert cli(*args).returncode == 0
        checkpoints.rename("scratch")
        checkpoints.symlink_to(tmp_path / "not-mounted")
    before = sorted(Path("mine").rglob("*"))
    refusal(cli(*args))
    assert sorted(Path("mine").rglob("*")) == before


def test_resume_restarts_a_run_without_a_checkpoint(verse: Path, cli: Cli) -> None:
    args = ["train", verse, *QUICK, "--out", "mine", "--resume"]
    assert cli(*args).returncode == 0
    for left in Path("mine/checkpoints").iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    Path("mine/checkpoints/step-00000003.tmp").mkdir()
    assert cli(*args).returncode == 0


@pytest.mark.slow
def test_the_config_of_a_run_with_a_budget_reproduces_its_losses(verse: Path, cli: Cli) -> None:
    small = ["-s", "model.n_layer=1", "-s", "model.n_embd=16", "-s", "model.block_size=16"]
    done = cli("train", verse, "--budget", "10s", "--out", "timed", "--device", "cpu", *small)
    assert done.returncode == 0, done.stderr
    assert "budget  10 s: " in done.stderr
    config = load_config("timed/config.yaml")
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


def test_a_budget_is_rejected_with_max_steps_several_processes_or_resume(
    verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = cli("train", verse, "--budget", "30s", "-s", "train.max_steps=5")
    assert "--budget and train.max_steps" in refusal(steps)
    assert "is not a duration" in refusal(cli("train", verse, "--budget", "soon"))
    message = refusal(cli("train", "--resume", "--budget", "30s"))
    assert "drop --budget (--resume with a text" in message
    assert not Path("runs").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "plans for one process" in refusal(cli("train", verse, "--budget", "30s"))


def test_a_run_whose_text_has_changed_resumes_with_its_own_and_says_so(
    verse: Path, cli: Cli
) -> None:
    shutil.copy(verse, "novel.txt")
    cli("train", "novel.txt", *QUICK)
    before = json.loads(cli("evaluate", "--json").stdout)["nats_per_char"]
    Path("novel.txt").write_text("Quite another text, xyz. " * 400)
    assert json.loads(cli("evaluate", "--json").stdout)["nats_per_char"] == before
    done = cli("train", "--resume", "-s", "train.max_steps=8")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "has changed" in line]
    assert line == (
        "novel.txt has changed since the run began, and the run keeps its own copy; `chargpt train "
        "TEXT --from runs/novel-gpt` trains on the new text"
    )


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def kill_started_processes() -> Iterator[None]:
    yield
    while STARTED:
        STARTED.pop().kill()


def start_training(
    *args: object, cwd: Path, program: Sequence[str] = ("-m", "chargpt"), **streams: Any
) -> subprocess.Popen[str]:
    """Start a long training run and wait for its first checkpoint."""
    process = subprocess.Popen(
        [sys.executable, *program, "train", *map(str, args)],
        cwd=cwd,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )
    STARTED.append(process)
    deadline = time.monotonic() + 60
    while not list_checkpoints(cwd / "run" / "checkpoints"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


LONG = [word.replace("max_steps=6", "max_steps=100000") for word in QUICK]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_the_run_and_prints_how_to_resume(
    number: signal.Signals, verse: Path, tmp_path: Path
) -> None:
    process = start_training(verse, *LONG, "--out", "run", cwd=tmp_path)
    process.send_signal(number)
    _, message = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "chargpt train --resume run" in message
    assert "Traceback" not in message
    step = RunFolder(tmp_path / "run").load("latest").state.step
    assert f"stopped at step {step:,}" in message


def test_a_second_interrupt_stops_at_once_and_leaves_an_intact_checkpoint(
    verse: Path, tmp_path: Path
) -> None:
    # signals are noticed between micro-batches, so there are many of them in a step
    slow = ["model.n_embd=256", "model.block_size=128", "train.batch_size=64"]
    slow += ["train.micro_batches=64", "train.save_every=1"]
    changes = [word for setting in slow for word in ("-s", setting)]
    process = start_training(verse, *LONG, *changes, "--out", "run", cwd=tmp_path)
    assert process.stderr is not None
    time.sleep(0.5)  # the save ends
    process.send_signal(signal.SIGTERM)
    while "stopping after this step" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    message = process.stderr.read()
    assert process.wait(timeout=30) == 130
    assert "the last checkpoint is step" in message
    assert "Traceback" not in message
    assert not verify(RunFolder(tmp_path / "run")).problems


def test_a_run_that_ignores_hangups_continues_after_sighup(verse: Path, tmp_path: Path) -> None:
    process = start_training(
        verse,
        *LONG,
        "--out",
        "run",
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_closed_terminal_leaves_a_saved_run(verse: Path, tmp_path: Path) -> None:
    terminal, other_end = pty.openpty()
    process = start_training(
        verse,
        *LONG,
        "--out",
        "run",
        cwd=tmp_path,
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        start_new_session=True,
    )
    os.close(other_end)
    os.close(terminal)  # every write fails from now on
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=30) == 128 + signal.SIGHUP
    assert not verify(RunFolder(tmp_path / "run")).problems


def test_training_continues_after_stderr_is_closed(verse: Path, tmp_path: Path) -> None:
    frequent = "from chargpt.cli import main, progress; progress.PLAIN_LINE_SECONDS = 0.1; "
    program = ("-c", f"{frequent}main.run()")
    process = start_training(verse, *LONG, "--out", "run", cwd=tmp_path, program=program)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("step "):
        assert process.poll() is None
    process.stderr.close()
    time.sleep(1)  # lines every tenth of a second
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM


def test_a_run_in_use_by_another_process_is_rejected(verse: Path, tmp_path: Path, cli: Cli) -> None:
    first = start_training(verse, *LONG, "-s", "train.save_every=5", "--out", "run", cwd=tmp_path)
    try:
        for args in (["--resume", "run"], [verse, *QUICK, "--out", "run", "--force"]):
            message = refusal(cli("train", *args))
            assert "another process is training into run" in message
    finally:
        first.kill()
        first.communicate()
    step = RunFolder(tmp_path / "run").load("latest").state.step
    args = ("--resume", "run", "-s", f"train.max_steps={step + 3}")
    assert cli("train", *args).returncode == 0


def test_a_failed_save_is_announced_once_while_training_continues(
    verse: Path, tmp_path: Path
) -> None:
    args = " ".join(QUICK)
    command = (
        f"ulimit -f 100; exec {sys.executable} -m chargpt train {verse} {args} "
        "-s model.n_embd=64 -s model.n_layer=2 --out run"
    )
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=60,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    announced = [line for line in done.stderr.splitlines() if "File too large" in line]
    assert len(announced) == 2  # once during training, once at the end
    assert "training continues" in announced[0]
    assert announced[1].startswith("chargpt: cannot save step 6")
    assert len(RunFolder(tmp_path / "run").metrics.records()) > 6
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_run_that_does_not_fit_on_the_disk_is_rejected_before_it_starts(
    verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10))
    message = refusal(cli("train", verse, *QUICK, "--out", "run"))
    assert "of disk for 4 checkpoints" in message
    assert not Path("run").exists()


def test_settings_that_need_terabytes_are_rejected_before_allocation(verse: Path, cli: Cli) -> None:
    for args in (
        ["model.n_embd=65536", "model.n_head=2"],
        ["train.batch_size=1000000000"],
        ["model.attention=average", "model.n_layer=200", "model.n_embd=20000"],
    ):
        changes = [word for setting in args for word in ("-s", setting)]
        message = refusal(cli("train", verse, *QUICK, *changes))
        assert re.search("GB of memory|parameters", message)


def test_an_unexpected_exception_prints_a_traceback_and_how_to_report_it(
    verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("chargpt.training.learner.Learner.clip_gradients", broken)
    done = cli("train", verse, *QUICK)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError: oops" in done.stderr
    assert "please report it" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 GB")]
)
def test_out_of_memory_is_reported_in_one_sentence(
    error: Exception, verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr("chargpt.training.learner.Learner.clip_gradients", full)
    done = cli("train", verse, *QUICK)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "there is not enough memory" in done.stderr


def test_verify_names_the_damaged_file_and_the_checkpoint_used_instead(
    verse: Path, cli: Cli
) -> None:
    assert cli("train", verse, *QUICK, "-s", "train.save_every=2", "--out", "run").returncode == 0
    intact = cli("verify", "run")
    assert intact.returncode == 0
    assert "every byte matches its SHA-256" in intact.stdout
    path = Path("run/checkpoints/step-00000006/model.safetensors")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    damaged = cli("verify", "run")
    assert damaged.returncode == 1
    shown = " ".join(damaged.stdout.split())
    assert "model.safetensors has changed since it was saved" in shown
    assert "step-00000004 is used instead of latest" in shown
    report = json.loads(cli("verify", "run", "--json").stdout)
    assert report["intact"] is False
    assert report["loaded_by"]["latest"] == "step-00000004"
    states = {row["checkpoint"]: row["problem"] is None for row in report["checkpoints"]}
    assert states["step-00000004"]
    assert not states["step-00000006"]


def test_an_ascii_terminal_gets_a_table(trained: Path, tmp_path: Path, cli: Cli) -> None:
    cli("data", "info", trained.parent / "novel.txt")
    done = run_cli(
        "evaluate", trained, cwd=tmp_path, PYTHONUTF8="0", PYTHONIOENCODING="ascii", LC_ALL="C"
    )
    assert done.returncode == 0, done.stderr
    assert "nats/char" in done.stdout


def test_train_without_a_text_uses_the_embedded_one(cli: Cli) -> None:
    done = cli("train", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "python-docs" in done.stderr
    assert Path("runs/python-docs-gpt").is_dir()


def test_long_runs_of_one_character_are_said_with_what_repeats_less(
    cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("a.txt").write_text("a" * 2000 + "\nb")
    cli("train", "a.txt", "-c", "bigram", "-s", "train.max_steps=60", "--out", "run")
    for number in ("1", "3"):
        done = cli("sample", "run", "-n", "60", "--temperature", "0", "--num-samples", number)
        message = f"samples with a long run of one character: {number} of {number}; a higher"
        assert message in done.stderr, done.stdout
    settings = SampleConfig(prompt="x" * 90)
    texts = ["ab" * 60, "x" * 90 + "ab" * 50 + "c" * 50, "x" * 90 + "a" + "b" * 39]
    say_repetition(texts, settings)  # 50 of 150 and 39 of 40 in a row
    assert capfd.readouterr().err == ""
    say_repetition([*texts, "x" * 90 + "ab" * 49 + "c" * 51], settings)
    assert "1 of 4" in capfd.readouterr().err


def test_over_fitting_is_reported_with_its_best_step(cli: Cli) -> None:
    import random

    source = random.Random(0)
    Path("noise.txt").write_text("".join(source.choice("aaaaaabbc ") for _ in range(2500)))
    args = [w.replace("max_steps=6", "max_steps=120") for w in QUICK]
    args += ["-s", "model.n_embd=64", "-s", "model.n_layer=2", "-s", "train.batch_size=16"]
    args += ["-s", "train.evaluate_every=10", "-s", "schedule.cooldown=0"]
    done = cli("train", "noise.txt", *args)
    assert "It over-fits: the validation loss was lowest at step" in done.stdout
    step = int(done.stdout.split("lowest at step ")[1].split(" ")[0])
    assert load_run("runs/noise-gpt").step == step


# -- encodings and scripts --------------------------------------------------------------------

TEXTS: dict[str, bytes] = {
    "windows line ends": b"Zeile eins\r\nZeile zwei\r\n" * 100,
    "a byte order mark": b"\xef\xbb\xbf" + b"It was a dark and stormy night. " * 50,
    "utf-16": ("Der Fluß war breit und kühl.\n" * 60).encode("utf-16"),
    "cyrillic": ("Все счастливые семьи похожи друг на друга.\n" * 60).encode(),
    "chinese": ("天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏\n" * 60).encode(),
    "emoji with joiners": ("a 👩‍👩‍👧 family 👨🏽‍🚀 and a flag 🏳️‍🌈\n" * 60).encode(),
    "one line": b"no line end at all, " * 5000,
    "gzip": gzip.compress(b"To be, or not to be, that is the question. " * 60),
}


@pytest.mark.parametrize("name", TEXTS)
def test_common_encodings_and_scripts_train(name: str, cli: Cli) -> None:
    path = Path("text.txt.gz" if name == "gzip" else "text.txt")
    path.write_bytes(TEXTS[name])
    done = cli("train", path, *QUICK)
    assert done.returncode == 0, done.stderr
    tokens = load_run(next(Path("runs").iterdir())).tokenizer.characters
    assert "\ufeff" not in tokens
    assert ("\r" in tokens) == (name == "windows line ends")


BAD_TEXTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "forty characters": (b"It is only forty characters, and no more", "40"),
    "binary": (bytes(range(256)) * 40, "byte"),
    "nul bytes": (b"text\x00" * 500, "--encoding"),
    "a windows byte": (b"caf\xe9 and \x92quotes\x92 " * 200, "offset 3"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_unusable_texts_are_rejected_with_one_sentence(name: str, cli: Cli) -> None:
    content, word = BAD_TEXTS[name]
    Path("bad.txt").write_bytes(content)
    assert word in refusal(cli("train", "bad.txt", "--device", "cpu"))
    assert not Path("runs").exists()


def test_an_encoding_can_be_named(cli: Cli) -> None:
    Path("old.txt").write_bytes("“Café” – naïve\n".encode("cp1252") * 100)
    assert cli("train", "old.txt", "--encoding", "cp1252", *QUICK).returncode == 0
    assert "é" in load_run("runs/old-gpt").tokenizer.characters


def test_a_missing_text_suggests_a_similar_name(cli: Cli) -> None:
    Path("novel.txt").write_text("x")
    assert "novel.txt" in refusal(cli("train", "novle.txt"))
    assert "data get tinyshakespeare" in refusal(cli("train", "tinyshakespeare"))


def test_standard_input_is_a_text(verse: Path, tmp_path: Path) -> None:
    done = run_cli("train", "-", *QUICK, cwd=tmp_path, stdin=verse.read_text())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "standard-input-gpt").is_dir()


def test_a_closed_standard_input_is_rejected(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # as Python does for `<&-`
    assert "standard input is closed" in refusal(cli("data", "info", "-"))


# -- settings ---------------------------------------------------------------------------------


def test_invalid_settings_are_rejected_with_the_right_key(verse: Path, cli: Cli) -> None:
    for args, right in (
        (["-s", "train.max_step=5"], "train.max_steps"),
        (["-s", "max_steps=5"], "train.max_steps"),
        (["-s", "nonsense"], "section.key=value"),
        (["-s", "train.batch_size=0"], "train.batch_size"),
        (["-c", "gtp"], "gpt"),
        (["--device", "tpu"], "auto, cpu, cuda"),
        (["--frobnicate"], "--help"),
    ):
        assert right in refusal(cli("train", verse, *args)), args
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_budget_takes_precedence_over_the_steps_of_a_config(verse: Path, cli: Cli) -> None:
    Path("mine.yaml").write_text("train: {max_steps: 5000}\nmodel: {kind: bigram}")
    command = ("train", verse, "--budget", "5s", "-c", "mine.yaml", "--out", "run")
    done = cli(*command)
    assert done.returncode == 0, done.stderr
    planned = load_run("run").config.train.max_steps
    assert planned != 5000
    assert cli(*command, "--resume").returncode == 0
    assert load_run("run").config.train.max_steps == planned


def test_a_yaml_file_configures_a_run(verse: Path, cli: Cli) -> None:
    Path("mine.yaml").write_text("model: {kind: bigram}\noptim: {name: adamw, lr: 1e-1}\n")
    assert cli("train", verse, "-c", "mine.yaml", *QUICK).returncode == 0
    config = load_run("runs/lighthouse-bigram").config
    assert config.optim.lr == 0.1
    assert config.text.path == str(verse)
    assert config.device == "cpu"


# -- sample -----------------------------------------------------------------------------------


def test_sample_prints_the_prompt_and_its_continuation(trained: Path, cli: Cli) -> None:
    done = cli("sample", trained, "--prompt", "The ", "--length", "50", "--seed", "1")
    assert done.returncode == 0
    assert done.stdout.startswith("The ")
    assert len(done.stdout) == 4 + 50 + 1
    again = cli("sample", trained, "--prompt", "The ", "--length", "50", "--seed", "1")
    assert again.stdout == done.stdout


def test_control_characters_of_a_sample_are_replaced_on_a_terminal_only(
    tmp_path: Path, cli: Cli
) -> None:
    Path("odd.txt").write_text("red \x1b[31m and back \x1b[0m\r\n" * 200, newline="")
    assert cli("train", "odd.txt", *QUICK, "--out", "run").returncode == 0
    args = ["sample", "run", "--prompt", "\x1b[31m", "--length", "200", "--seed", "1"]
    args += ["--temperature", "2"]
    assert cli(*args).stdout.count("\x1b") > 1
    terminal, other_end = pty.openpty()
    subprocess.run(
        [sys.executable, "-m", "chargpt", *args],
        stdout=other_end,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "1"},
        check=True,
    )
    shown = os.read(terminal, 10_000)
    os.close(terminal)
    os.close(other_end)
    assert b"\x1b" not in shown
    assert "\N{SYMBOL FOR ESCAPE}[31m".encode() in shown


def test_the_first_of_several_samples_equals_a_single_sample(trained: Path, cli: Cli) -> None:
    args = ["sample", trained, "--length", "40", "--seed", "5", "--json"]
    many = json.loads(cli(*args, "--num-samples", "3").stdout)
    one = json.loads(cli(*args).stdout)
    assert many["samples"][0] == one["samples"][0]
    assert len(set(many["samples"])) == 3
    assert cli("sample", trained, "--num-samples", "2").stdout.count("-- sample") == 2


def test_a_prompt_comes_from_a_file_or_standard_input(
    trained: Path, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "prompt.txt").write_text("The keeper")
    from_file = cli("sample", trained, "--prompt-file", "prompt.txt", "--seed", 1, "--length", 9)
    (tmp_path / "line.txt").write_text("The keeper\n")
    ended = cli("sample", trained, "--prompt-file", "line.txt", "--length", 9)
    assert "the prompt ends with a line end" in ended.stderr
    assert "line end" not in from_file.stderr
    from_stdin = run_cli(
        "sample",
        trained,
        "--prompt-file",
        "-",
        "--seed",
        1,
        "--length",
        9,
        cwd=tmp_path,
        stdin="The keeper",
    )
    assert from_file.stdout == from_stdin.stdout
    assert from_file.stdout.startswith("The keeper")


def test_an_escape_in_a_prompt_is_said_to_be_none(trained: Path, cli: Cli) -> None:
    escaped = cli("sample", trained, "-p", r"a\nb", "-n", "5", "--unknown", "skip")
    assert "are two characters each" in escaped.stderr
    assert "two characters" not in cli("sample", trained, "-p", "a\nb", "-n", "5").stderr
    assert "the prompt is a dash; --prompt-file -" in cli("sample", trained, "-p", "-").stderr


def test_of_a_long_prompt_the_last_block_is_read(trained: Path, cli: Cli) -> None:
    block_size = load_run(trained, device="cpu").model.block_size
    done = cli("sample", trained, "-p", "a" * (block_size + 1), "-n", "1", "--seed", "1")
    said = f"the prompt has {block_size + 1:,} characters; the model reads the last {block_size:,}"
    assert said in done.stderr
    assert said[:10] not in cli("sample", trained, "-p", "a" * block_size, "-n", "1").stderr


def test_a_long_prompt_is_measured_in_tokens_where_bytes_spell_characters(
    trained: Path, cli: Cli
) -> None:
    assert cli("train", trained.parent / "novel.txt", *QUICK, "--out", "r", *RARE).returncode == 0
    done = cli("sample", "r", "-p", "漢字" * 4, "-n", "1")
    assert "the prompt has 24 tokens; the model reads the last 16" in done.stderr


def test_unknown_prompt_characters_follow_the_policy(trained: Path, cli: Cli) -> None:
    args = ["sample", trained, "--prompt", "The ж", "--length", "5", "--device", "cpu"]
    assert "U+0436" in refusal(cli(*args))
    skipped = cli(*args, "--unknown", "skip")
    assert "1 character outside the vocabulary ('ж' U+0436): left out" in skipped.stderr
    assert skipped.stdout.startswith("The ")
    assert len(skipped.stdout) == len("The ") + 5 + 1
    replaced = cli(*args, "--unknown", "replace")
    assert "ж" not in replaced.stdout
    assert len(replaced.stdout) == len("The ж") + 5 + 1
    assert "'guess' is not one of 'error', 'skip', 'replace'" in refusal(
        cli(*args, "--unknown", "guess")
    )


def test_invalid_sampling_settings_are_rejected(trained: Path, cli: Cli) -> None:
    assert "'--top-p': expected a number from 0 to 1" in refusal(
        cli("sample", trained, "--top-p", "1.5")
    )
    both = refusal(cli("sample", trained, "--top-p", "0", "--num-samples", "5000"))
    assert "--top-p: expected greater than 0" in both
    assert "--num-samples: expected at most 4096" in both
    assert "give one" in refusal(cli("sample", trained, "--prompt", "a", "--prompt-file", "b"))
    assert "no run under" in refusal(cli("sample"))
    assert "there is no folder" in refusal(cli("sample", "nowhere"))


def test_a_closed_output_pipe_is_no_error(trained: Path, tmp_path: Path) -> None:
    command = f"{sys.executable} -m chargpt sample {trained} --length 5000 | head -c 20"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=60,
    )
    assert done.stderr == ""
    assert len(done.stdout) == 20


# -- evaluate ---------------------------------------------------------------------------------

KEYS = {
    "nats_per_char", "bits_per_char", "perplexity", "accuracy", "characters", "standard_error",
    "protocol", "split", "block_size", "parameters", "step", "evaluation_seconds",
    "chars_per_second", "text", "run", "n_unknown",
}  # fmt: skip


@pytest.mark.parametrize("protocol", ["blocks", "sliding", "nanogpt"])
def test_evaluate_prints_one_json_object_with_the_documented_keys(
    protocol: str, trained: Path, cli: Cli
) -> None:
    facts = json.loads(cli("evaluate", trained, "--protocol", protocol, "--json").stdout)
    assert set(facts) == KEYS
    assert facts["protocol"] == protocol
    assert facts["bits_per_char"] == pytest.approx(facts["nats_per_char"] / math.log(2))
    assert 1 < facts["nats_per_char"] < 4.5


def test_evaluate_prints_protocol_split_and_block_size(trained: Path, cli: Cli) -> None:
    shown = cli("evaluate", trained, "--split", "train").stdout
    assert "train split: protocol blocks, blocks of 16" in shown
    assert "characters scored" in shown
    assert "text.test_fraction" in refusal(cli("evaluate", trained, "--split", "test"))


def test_another_text_can_be_evaluated(trained: Path, cli: Cli) -> None:
    Path("other.txt").write_text("The light, the sea, the night. Ж" * 20)
    assert "U+0416" in refusal(cli("evaluate", trained, "--text", "other.txt"))
    done = cli("evaluate", trained, "--text", "other.txt", "--unknown", "skip", "--json")
    assert json.loads(done.stdout)["characters"] == 31 * 20 - 1
    assert "name it with --text" in refusal(cli("evaluate", trained, "--unknown", "skip"))
    both = ("--text", "other.txt", "--split", "train")
    assert "--text is measured as a whole" in refusal(cli("evaluate", trained, *both))


def test_the_files_that_are_read_of_a_folder_are_printed(trained: Path, cli: Cli) -> None:
    for name in ("a.txt", "b.txt", "c.h"):
        Path("held", name).parent.mkdir(exist_ok=True)
        Path("held", name).write_text("the sea\n")
    for words in (("evaluate", trained, "--text", "held"), ("score", trained, "held")):
        done = cli(*words)
        assert "files read of held/: 2, which end in .txt" in done.stderr
        assert ("lines are numbered through all files" in done.stderr) == (words[0] == "score")
    assert "lines are numbered" not in cli("score", trained, "held/a.txt").stderr


def test_a_passage_of_the_training_text_is_named_as_such(cli: Cli, verse: Path) -> None:
    text = verse.read_text(encoding="utf-8")
    cli("train", verse, *QUICK, "--out", "mine")
    run = load_run(Path("mine"))
    start = len(text) - len(run.corpus().split("val"))
    for name, content, is_own in (
        ("excerpt.txt", text[1000:2000], True),
        ("val.txt", text[start + 10 : start + 900], False),
        ("short.txt", text[1000:1100], False),
        ("changed.txt", text[1000:1500].replace("e", "a"), False),
    ):
        Path(name).write_text(content)
        warning = f"a passage of {name} is in the text that the run was trained on"
        assert (warning in cli("score", "mine", name).stderr) == is_own, name
        assert (warning in cli("evaluate", "mine", "--text", name).stderr) == is_own, name


def test_unknown_characters_are_counted_and_named(trained: Path, cli: Cli) -> None:
    Path("other.txt").write_text("the sea Ω and Ж the light\n" * 10)
    for command, text in (("evaluate", ["--text", "other.txt"]), ("score", ["other.txt"])):
        for policy, done in (("skip", "left out"), ("replace", "replaced by '")):
            result = cli(command, trained, *text, "--unknown", policy, "--json")
            assert json.loads(result.stdout)["n_unknown"] == 20
            names = "('Ω' U+03A9, 'Ж' U+0416)"
            assert f"20 characters outside the vocabulary {names}: {done}" in result.stderr


def test_compress_leaves_out_unknown_characters_only_if_asked(trained: Path, cli: Cli) -> None:
    Path("other.txt").write_text("the sea Ω and the light\n" * 10)
    message = refusal(cli("compress", trained, "other.txt", "packed"))
    assert "--unknown skip or replace" in message  # what it advises works
    done = cli("compress", trained, "other.txt", "packed", "--unknown", "skip")
    assert "10 characters outside the vocabulary ('Ω' U+03A9): left out" in done.stderr
    assert "xz" not in done.stdout  # which would compress the characters left out too
    size, bits = Path("packed").stat().st_size, float(done.stdout.split(": ")[1].split()[0])
    assert bits == pytest.approx(8 * size / 230, abs=1e-3)
    assert cli("decompress", trained, "packed", "back.txt").returncode == 0
    assert Path("back.txt").read_text() == "the sea  and the light\n" * 10


def test_each_advice_can_be_followed(trained: Path, verse: Path, cli: Cli) -> None:
    Path("both/gpt").mkdir(parents=True)
    message = refusal(cli("compare", verse, *QUICK, "--out", "both"))
    assert message.endswith("both/gpt exists; name another folder with --out")
    assert "there is no folder nowhere" in refusal(cli("compress", trained, verse, "nowhere/x"))
    assert "only to --protocol sliding" in refusal(cli("evaluate", trained, "--stride", "3"))
    parent = trained.parent
    assert f"such as {trained}" in refusal(cli("sample", parent))
    assert f"did you mean {trained}?" in refusal(cli("sample", parent / "ru"))
    shutil.copytree(trained, "runs/one")
    for wrong in ("one", "run/one"):
        assert "did you mean runs/one?" in refusal(cli("sample", wrong))
    Path("mine").mkdir()
    Path("mine/notes.md").write_text("my own")
    message = refusal(cli("train", verse, *QUICK, "--out", "mine"))
    assert "holds 'notes.md', which no run writes; name another folder" in message
    done = refusal(cli("train", "--resume", trained, "-s", "train.max_steps=30"))
    assert "has done all its 40 steps" in done


def test_bytes_that_do_not_decode_are_replaced_if_asked(verse: Path, cli: Cli) -> None:
    Path("old.txt").write_bytes(verse.read_bytes() + b"caf\xe9")
    offset = len(verse.read_bytes()) + 3
    message = refusal(cli("train", "old.txt", *QUICK))
    assert f"byte 0xE9 at offset {offset:,}" in message
    assert "--encoding-errors replace" in message
    done = cli("train", "old.txt", *QUICK, "--encoding-errors", "replace", "-o", "run")
    assert "bytes that do not decode, replaced by U+FFFD: 1" in done.stderr
    assert cli("evaluate", "run", "--text", "old.txt").returncode == 0


def test_the_plan_gives_reasons_only_for_what_was_chosen(verse: Path, cli: Cli) -> None:
    said = cli("train", verse, *QUICK, "-o", "mine").stderr
    assert "device  cpu (1 thread), float32\n" in said
    resumed = cli("train", "--resume", "mine", "-s", "train.max_steps=7").stderr
    assert "device  cpu (1 thread), float32\n" in resumed


def test_train_prints_its_result_as_json(verse: Path, cli: Cli) -> None:
    whole = ("-s", "train.evaluation_tokens=30000")
    done = cli("train", verse, *QUICK, *whole, "--seed", "4", "-o", "mine", "--json")
    report = json.loads(done.stdout)
    assert report["run"] == "mine"
    assert report["step"] == 6
    assert set(report["losses"]) == {"train", "val"}
    again = json.loads(cli("evaluate", "mine", "--json").stdout)
    assert report["losses"]["val"]["nats_per_char"] == pytest.approx(again["nats_per_char"])
    assert load_config("mine/config.yaml").seed == 4


def test_several_samples_on_a_terminal_show_their_seed(
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    args = ("sample", trained, "--num-samples", "2", "-n", "9")
    done = cli(*args)
    seed = re.search(r"--seed (\d+) gives the same text", done.stderr)
    assert seed is not None
    again = cli(*args, "--seed", seed[1])
    assert again.stdout == done.stdout
    assert "--seed" not in again.stderr


def test_the_short_options_are_those_of_other_programs(trained: Path, cli: Cli) -> None:
    short = cli("sample", trained, "-p", "The", "-n", "20", "--seed", "1").stdout
    long = cli("sample", trained, "--prompt", "The", "--length", "20", "--seed", "1").stdout
    assert short == long
    assert len(short) == len("The") + 20 + 1
    for words, expected in (
        (("-n", "abc"), "'-n' / '--length': expected an integer of 1 or more; see"),
        (("-n", "0"), "'-n' / '--length': expected a number of 1 or more; see"),
        (("--top-p", "x"), "'--top-p': expected a number from 0 to 1; see"),
        (("--seed", str(2**63)), "--seed: expected less than 2^63 (it is 9"),
        (("--num-samples", "5000"), "expected at most 4096 (it is 5000)"),
    ):
        assert expected in refusal(cli("sample", trained, *words))


# -- compare ----------------------------------------------------------------------------------


def test_an_interrupted_comparison_names_the_runs_that_it_has(
    verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("chargpt.analysis.compare.prepare", interrupted)
        done = cli("compare", verse, *QUICK, "--out", "none")
        assert (done.returncode, "the runs so far" in done.stderr) == (130, False)
    with monkeypatch.context() as patch:
        patch.setattr("chargpt.analysis.compare.try_add_mixture", interrupted)
        done = cli("compare", verse, *QUICK, "--out", "both")
        assert done.returncode == 130
    assert "`chargpt compare both` scores them" in done.stderr
    assert cli("compare", "both").returncode == 0


def test_compare_trains_and_compares_bigram_and_gpt(verse: Path, cli: Cli) -> None:
    done = cli("compare", verse, *QUICK, "--out", "both")
    assert done.returncode == 0, done.stderr
    for word in (
        "uniform", "unigram (counts)", "bigram (counts)", "bigram (trained)", "gpt (trained)",
        "parameters", "the gpt is", "best bigram", "plot: both/curves.svg",
    ):  # fmt: skip
        assert word in done.stdout, word
    picture = Path("both/curves.svg").read_text()
    assert "gpt (trained)" in picture
    assert "bigram (trained)" in picture
    again = cli("compare", "both/bigram", "both/gpt")
    assert "6-gram (counts)" in again.stdout
    assert re.search(
        r"(gpt|bigram) has the lowest loss of the runs; it is .*"
        r"(better than|not distinguishable from) (bigram|gpt)",
        again.stdout.replace("\n", " "),
    )
    again = cli("compare", "both/bigram", "both/gpt", "--json", "--plot", "two.png")
    rows = json.loads(again.stdout)["rows"]
    assert [row["model"] for row in rows if row["run"]] == ["bigram", "gpt"]
    assert KEYS - {"chars_per_second", "evaluation_seconds", "text"} <= set(rows[-1])
    assert Path("two.png").read_bytes().startswith(b"\x89PNG")


def test_a_comparison_names_other_block_sizes_and_draws_the_baselines_of_the_curves(
    trained: Path, cli: Cli
) -> None:
    text = trained.parent / "novel.txt"
    settings = ("-s", "model.block_size=8")
    assert cli("train", text, *QUICK, *settings, "--out", "short").returncode == 0
    result = compare_runs([trained, Path("short")], "cpu")
    (long, short) = (load_run(path).model.block_size for path in (trained, "short"))
    sentences = comparison.conclusions(result)
    assert any(f"{trained.name} {long}, short {short} (a larger" in each for each in sentences)
    clusters = [each.clusters for each in result.evaluations.values()]
    assert clusters[0].shape == clusters[1].shape  # by spans of the longer one: paired
    assert result.curve_baselines.keys() == result.baselines.keys()
    assert result.curve_baselines != result.baselines
    printed = json.loads(cli("compare", trained, "short", "--json").stdout)
    assert printed["summary"] == sentences
    # of models trained on one text, the mixture is named beside its GPT
    gpt, mixture = result.rows[-2:]
    rows = [replace(gpt, model="gpt (trained)"), replace(mixture, model="gpt + n-grams")]
    named = comparison.conclusions(replace(result, rows=[*result.rows[:-2], *rows]))
    assert any(each.startswith("gpt + n-grams, which chargpt sample --mix") for each in named)


def test_compare_trains_within_a_budget(verse: Path, cli: Cli) -> None:
    done = cli("compare", verse, "--budget", "6s", "--seed", "3", "-o", "both", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["model"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["gpt (trained)"]["nats_per_char"] < rows["unigram (counts)"]["nats_per_char"]
    config = load_config("both/gpt/config.yaml")
    assert config.seed == 3
    assert config.train.max_steps != load_config("gpt").train.max_steps  # planned
    ladder = cli("compare", verse, "--ladder", "--budget", "6s")
    assert "drop --budget" in refusal(ladder)


@pytest.mark.parametrize(
    ("command", "words", "cause"),
    [
        ("compare", ["--budget", "1m"], "--budget applies to training, and these are runs"),
        (
            "compare",
            ["-s", "model.n_layer=2"],
            "-s (or --seed, --encoding, --encoding-errors) applies to training",
        ),
        ("explain", ["--encoding", "latin-1"], "--encoding-errors applies to a text, and"),
        ("sample", ["--encoding", "latin-1"], "--encoding is that of a --prompt-file"),
    ],
)
def test_options_that_do_not_apply_to_runs_are_rejected(
    command: str, words: list[str], cause: str, trained: Path, cli: Cli
) -> None:
    assert cause in refusal(cli(command, trained, *words))


def test_compared_runs_score_the_same_characters(
    verse: Path, trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = [word.replace("block_size=16", "block_size=64") for word in QUICK]
    assert cli("train", trained.parent / "novel.txt", *longer, "--out", "longer").returncode == 0
    monkeypatch.setattr(comparison, "MAX_TOKENS", 1000)
    shown = []

    @contextmanager
    def show_progress(_unit: str, label: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: shown.append((label, done, total))

    result = compare_runs([trained, Path("longer")], "cpu", show_progress)
    assert shown[-1][:2] == ("scored, longer", 960)
    assert shown[0][0] == f"scored, {trained.name}"
    assert {each.characters for each in result.evaluations.values()} == {960}
    assert result.scored_on == "960 of 2,844 validation characters, protocol blocks"


def test_runs_of_different_vocabularies_score_the_same_start_of_the_split(
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = trained.parent / "novel.txt"
    assert cli("data", "info", text).returncode == 0
    rare = ("-s", "text.min_count=20", "--out", "rare")
    assert cli("train", text, *QUICK, *rare).returncode == 0
    monkeypatch.setattr(comparison, "MAX_TOKENS", 1000)
    result = compare_runs([trained, Path("rare")], "cpu")
    assert load_run("rare").tokenizer != load_run(trained).tokenizer
    assert {each.characters for each in result.evaluations.values()} == {1000}
    monkeypatch.chdir("rare")
    rows = json.loads(cli("compare", ".", trained, "--json").stdout)["rows"]
    assert [row["model"] for row in rows if row["run"]] == ["rare", trained.name]


def test_comparing_runs_writes_no_picture_unless_asked(trained: Path, cli: Cli) -> None:
    cli("data", "info", trained.parent / "novel.txt")
    before = sorted(trained.parent.rglob("*"))
    report = json.loads(cli("compare", trained, "--json").stdout)
    assert report["plot"] is None
    assert report["baselines"]["6-gram"] < report["baselines"]["uniform"]
    assert sorted(trained.parent.rglob("*")) == before


def test_runs_of_different_texts_are_not_compared(verse: Path, trained: Path, cli: Cli) -> None:
    cli("data", "info", trained.parent / "novel.txt")
    Path("other.txt").write_text("another text altogether. " * 200)
    assert cli("train", "other.txt", *QUICK, "--out", "other").returncode == 0
    message = refusal(cli("compare", trained, "other"))
    assert "another validation split" in message
    assert "name runs of one text" in message
    assert "by another" not in message


def test_runs_of_one_text_with_other_splits_name_the_setting(trained: Path, cli: Cli) -> None:
    text = trained.parent / "novel.txt"
    cli("data", "info", text)
    other = ("-s", "text.val_fraction=0.2", "--seed", "7", "--out", "other")
    assert cli("train", text, *QUICK, *other).returncode == 0
    message = refusal(cli("compare", trained, "other"))
    assert "than " in message
    assert ", by another text.val_fraction, so their losses" in message


def test_compare_takes_a_folder_of_runs_and_compares_each_run_once(
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = trained.parent / "novel.txt"
    cli("data", "info", text)
    for name, seed in (("a", "1"), ("b", "2")):
        assert cli("train", text, *QUICK, "--seed", seed, "-o", f"runs/{name}").returncode == 0
    RunFolder(Path("runs/a")).metrics.append({"step": 7, "loss": 9.0, "seconds": 1234.5})
    report = json.loads(cli("compare", "runs", "runs/a", "runs/../runs/b", "--json").stdout)
    in_runs = [row for row in report["rows"] if row["run"]]
    assert [row["model"] for row in in_runs] == ["a", "b"]
    assert in_runs[0]["seconds"] == 1234.5, "steps after the best checkpoint take time too"
    a, b = (load_run(f"runs/{name}") for name in "ab")
    tokens = a.corpus().split("val")
    of_a, of_b = (evaluate_tokens(run.model, tokens) for run in (a, b))
    rows = [
        Row(f"a{MIXTURE_SUFFIX}", replace(of_a, nats_per_char=of_a.nats_per_char - 1), run="a"),
        Row("a", of_a, 1, run="a"),
        Row("b", of_b, 1, run="b"),
        Row("bigram (counts)", Baselines(a.corpus()).evaluate(tokens)["bigram"]),
    ]
    printed: list[str] = []
    monkeypatch.setattr("chargpt.cli.console.out_sentence", printed.append)
    curves = {"a": [(0, 4.0), (5, 2.0), (9, 2.5)], "b": [(0, 4.0), (5, 2.0), (9, 2.01)]}
    print_rows(Comparison("text", 10, 5, 10, rows, curves))
    of_models, of_all = [each for each in printed if "has the lowest loss" in each]
    assert " has the lowest loss of the models alone; " in of_models
    assert of_all.startswith(f"a{MIXTURE_SUFFIX} has the lowest loss of the runs and their ")
    assert " b " in f"{of_all} ".replace("(", " ")
    shown = [line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines()[-2:]]
    at_best = "4.000 -> 2.000 at step 5"  # the checkpoint that the table scores
    assert shown == [["a", f"{at_best}, last 2.500"], ["b", at_best]]


def test_a_diverged_run_is_reported_as_such(verse: Path, cli: Cli) -> None:
    args = [w.replace("max_steps=6", "max_steps=30") for w in QUICK]
    args += ["-s", "optim.lr=3", "-s", "optim.matrix_lr=0.8"]
    done = cli("train", verse, *args, "-s", "schedule.cooldown=0", "--out", "diverged")
    assert done.returncode == 0, done.stderr
    assert "The training diverged" in done.stdout
    assert "no checkpoint is better than the untrained model" in done.stdout
    # at most the defaults
    assert "lower learning rates, such as -s optim.lr=0.02 -s optim.matrix_lr=0.05" in done.stdout
    assert "over-fits" not in done.stdout


def test_compare_rejects_unknown_models_mixed_arguments_and_picture_formats(
    verse: Path, trained: Path, cli: Cli
) -> None:
    assert "bigram, gpt" in refusal(cli("compare", verse, "--models", "bigram,lstm", *QUICK))
    assert "is not a run" in refusal(cli("compare", trained, verse))
    assert ".svg or .png" in refusal(cli("compare", trained, "--plot", "x.jpg"))


# -- data -------------------------------------------------------------------------------------


def test_data_info_describes_a_text_and_warns_about_training_on_it(verse: Path, cli: Cli) -> None:
    shown = cli("data", "info", verse).stdout
    for word in ("characters", "vocabulary", "most frequent", "bigram entropy", "bits/character"):
        assert word in shown
    Path("tiny.txt").write_text("too little text\n" * 3)
    assert "note: " in cli("data", "info", "tiny.txt").stdout
    facts = json.loads(cli("data", "info", "tiny.txt", "--json").stdout)
    assert facts["characters"] == 48
    for words, label in (((), "least frequent"), (RARE, "least frequent in the vocabulary")):
        done = cli("data", "info", verse, *words)
        names = [line[1:23].strip() for line in done.stdout.splitlines()]
        rows = " ".join(filter(None, names))
        assert f" {label} not in the vocabulary " in rows, "nothing is left out of a whole text"


def test_data_list_and_get_use_the_names_of_the_catalog(cli: Cli) -> None:
    assert "tinyshakespeare" in cli("data", "list").stdout
    assert "did you mean tinyshakespeare" in refusal(cli("data", "get", "tinyshakespere"))
    assert "built in" in refusal(cli("data", "get", "python-docs"))


def test_commands_on_texts_import_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; sys.argv = ['chargpt', 'data', 'list']\n"
        "from chargpt.cli.main import run\n"
        "try:\n    run()\nexcept SystemExit:\n    print('torch' in sys.modules)\n"
    )
    assert run_python(program, tmp_path).stdout.endswith("False\n")


def test_only_the_main_command_offers_completion(cli: Cli) -> None:
    assert "--install-completion" in cli("--help").stdout
    assert "--install-completion" not in cli("data", "--help").stdout


def test_help_of_the_data_commands_is_not_cut_off(cli: Cli) -> None:
    assert "..." not in cli("data", "--help").stdout.split("Commands:")[1]


def test_a_huge_perplexity_is_shown_in_few_digits() -> None:
    assert loss_cells(math.log(65)) == ["4.1744", "6.0224", "65.00"]
    assert loss_cells(146.184)[2] == "3.1e+63"
    assert loss_cells(5000.0)[2] == "1.0e+304"


def test_commands_name_the_run_that_they_took(trained: Path, cli: Cli) -> None:
    cli("data", "info", trained.parent / "novel.txt")
    shutil.copytree(trained, "runs/mine")
    for args in (("sample", "--length", "5"), ("evaluate",), ("verify",), ("explain",)):
        done = cli(*args)
        assert done.returncode == 0, done.stderr
        assert "run: runs/mine" in done.stderr
        assert "run: " not in cli(args[0], "runs/mine", *args[1:]).stderr


def test_help_of_sample_shows_the_defaults(cli: Cli) -> None:
    text = " ".join(cli("sample", "--help").stdout.split())
    assert "Characters to sample; 500 by default." in text
    assert "0: always the most probable character (greedy); 0.8 by default." in text
