"""Signals and failing disks while `chargpt train` runs as a process of its own."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import run_cli, start_cli
from shared_runs import QUICK
from typer.testing import CliRunner

from chargpt.cli.main import app, catch_signals
from chargpt.errors import Stopped
from chargpt.store.checkpoint import list_checkpoints
from chargpt.store.folder import RunFolder
from chargpt.store.run import load_run
from chargpt.store.verify import verify
from chargpt.training.start import Session, start_run

pty = pytest.importorskip("pty", reason="needs terminals and signals of POSIX")
LONG = [word.replace("max_steps=6", "max_steps=100000") for word in QUICK]
STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def kill_started_processes() -> Iterator[None]:
    yield
    while STARTED:
        STARTED.pop().kill()


def start_training(*args: object, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """Start a long training run and wait for its first checkpoint."""
    process = start_cli("train", *args, "--out", "run", cwd=cwd, **options)
    STARTED.append(process)
    deadline = time.monotonic() + 60
    while not list_checkpoints(cwd / "run" / "checkpoints"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_run_unless_it_is_a_hangup_that_the_run_ignores(
    number: signal.Signals, verse: Path, tmp_path: Path
) -> None:
    process = start_training(
        verse,
        *LONG,
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
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
    process = start_training(verse, *LONG, *changes, cwd=tmp_path)
    assert process.stderr is not None
    time.sleep(0.5)  # the save ends
    process.send_signal(signal.SIGTERM)
    while "stopping after this step" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    message = process.stderr.read()
    assert process.wait(timeout=30) == 130
    assert re.search(
        r"^stopped without saving; the last checkpoint is step \d+; resume with", message
    )
    assert "Traceback" not in message
    assert not verify(RunFolder(tmp_path / "run")).problems


def test_a_closed_terminal_leaves_a_saved_run(verse: Path, tmp_path: Path) -> None:
    terminal, other_end = pty.openpty()
    process = start_training(
        verse,
        *LONG,
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
    frequent = "from chargpt.cli import main, console; console.PLAIN_LINE_SECONDS = 0.1; "
    program = f"-c {frequent}main.run()"
    process = start_training(verse, *LONG, cwd=tmp_path, program=program)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("step "):
        assert process.poll() is None
    process.stderr.close()
    time.sleep(1)  # lines every tenth of a second
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM


def test_a_failed_save_is_announced_once_while_training_continues(
    verse: Path, tmp_path: Path
) -> None:
    larger = ("-s", "model.n_embd=64", "-s", "model.n_layer=2", "--out", "run")
    process = start_cli("train", verse, *QUICK, *larger, cwd=tmp_path, shell="ulimit -f 100;")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in err
    announced = [line for line in err.splitlines() if "File too large" in line]
    assert len(announced) == 2  # once during training, once at the end
    assert "training continues" in announced[0]
    assert announced[1].startswith("chargpt: cannot save step 6")
    assert len(RunFolder(tmp_path / "run").metrics.records()) > 6
    assert not list(tmp_path.rglob("*.tmp"))


FULL_AT_THE_END = """-c import errno, os
from chargpt.cli import main
from chargpt.store.folder import RunFolder
save = RunFolder.save
def save_unless_full(run, **content):
    if content["state"].step == 6 and str(run.path) == "run" and os.path.exists("full"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return save(run, **content)
RunFolder.save = save_unless_full
main.run()"""


def test_without_a_terminal_a_full_disk_sends_the_last_step_to_the_temporary_folder(
    verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    words = ("train", verse, *QUICK, "--out", "run")
    process = start_cli(*words, cwd=tmp_path, program=FULL_AT_THE_END, stdin=subprocess.DEVNULL)
    _, err = process.communicate(timeout=60)
    [copy] = (tmp_path / "temporary").glob("chargpt-*/run")
    assert (process.returncode, "Traceback" in err) == (1, False)
    assert "cannot save step 6 of run (No space left on device); it is saved in" in err
    assert err.endswith(f"  chargpt sample {copy}\n")
    assert load_run(copy, "best", "cpu").step == load_run(copy, "latest", "cpu").step == 6
    assert not verify(RunFolder(copy)).problems
    more = run_cli("train", "--resume", copy, "-s", "train.max_steps=8", cwd=tmp_path)
    assert (more.returncode, load_run(copy, "latest", "cpu").step) == (0, 8)
    assert [step.name for step in list_checkpoints(tmp_path / "run/checkpoints")][-1][-1] == "3"


@pytest.mark.parametrize(("answer", "code"), [(b"\n", 0), (b"q\n", 1), (b"\x03", 1)])
def test_on_a_terminal_the_weights_wait_until_the_full_disk_has_space(
    answer: bytes, code: int, verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    terminal, other_end = pty.openpty()
    process = start_cli(
        *("train", verse, *QUICK, "--out", "run"),
        cwd=tmp_path,
        program=FULL_AT_THE_END,
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        preexec_fn=lambda: os.login_tty(0),
    )
    STARTED.append(process)
    os.close(other_end)
    shown, n_asked = b"", 0
    with suppress(OSError):  # Linux's way to say that the other end is closed
        while chunk := os.read(terminal, 4096):
            shown += chunk
            if shown.count(b"temporary folder") > n_asked:
                n_asked += 1
                if n_asked == 2 and code == 0:
                    (tmp_path / "full").unlink()
                os.write(terminal, b"\n" if n_asked == 1 else answer)
    os.close(terminal)
    assert (process.wait(timeout=30), n_asked) == (code, 2), shown
    [path] = [tmp_path / "run"] if code == 0 else tmp_path.glob("chargpt-*/run")
    assert load_run(path, device="cpu").step == 6


class SignalOnDeletion:
    """Sends a signal while Python deletes it, when the exceptions of handlers are ignored."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_whose_exception_python_ignores_still_ends_the_command() -> None:
    reached = []

    def command() -> None:
        with catch_signals():
            SignalOnDeletion()
            reached.append("the end")

    with pytest.raises(Stopped) as stopped:
        command()
    assert reached
    assert stopped.value.number == signal.SIGTERM


def test_such_a_signal_before_the_first_step_still_saves_the_run(
    verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_and_signal(*words: Any, **options: Any) -> Session:
        created = start_run(*words, **options)
        SignalOnDeletion()
        return created

    monkeypatch.setattr("chargpt.training.start.start_run", create_and_signal)
    with pytest.raises(Stopped) as stopped:
        CliRunner().invoke(app, ["train", str(verse), *QUICK, "--out", str(tmp_path / "run")])
    assert stopped.value.number == signal.SIGTERM
    assert load_run(tmp_path / "run", device="cpu").step < 3
