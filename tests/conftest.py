"""Fixtures of all tests: small texts, what is logged, and the command line."""

import functools
import os

# Tiny models are not faster with two threads, and far slower on a busy machine. Processes that the
# tests start inherit this.
os.environ["OMP_NUM_THREADS"] = "1"

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# A suite started with `nohup` or in the background of a script ignores these signals, and so would
# the processes that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# a busy machine is no failure
settings.register_profile("chargpt", deadline=None)
settings.load_profile("chargpt")

POSIX = pytest.mark.skipif(os.name != "posix", reason="needs signals or a shell of POSIX")


def skip_on_windows(*_: Any, **__: Any) -> None:
    """Stand in for what Windows lacks, or allows only some users."""
    pytest.skip("needs pipes, links or modes of POSIX")


if os.name == "nt":
    os.mkfifo = Path.symlink_to = Path.chmod = skip_on_windows  # type: ignore
    Path.write_text = functools.partialmethod(Path.write_text, newline="")  # type: ignore

pytest_plugins = ["shared_runs"]
REPOSITORY = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
WIDTHS = {"desktop": (1200, 900), "phone": (390, 844)}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Use one worker more than cores: some tests wait for processes and clocks."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run all tests of a file in one worker, so that their runs are trained once."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


@pytest.fixture(autouse=True)
def usual_algorithms() -> Iterator[None]:
    """Undo what a deterministic run sets for the whole process."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def notes() -> Iterator[list[str]]:
    """What is logged for the user during a test."""
    from chargpt.log import collected_notes

    with collected_notes() as found:
        yield found


@pytest.fixture
def verse() -> Path:
    """The short text written for this project."""
    return REPOSITORY / "data" / "lighthouse.txt"


def start_cli(
    *words: object, cwd: Path, shell: str = "", program: str = "-m chargpt", **options: Any
) -> subprocess.Popen[str]:
    """Start `chargpt` as a process, if asked in a shell that runs a command first."""
    command = [sys.executable, *program.split(" ", 1), *map(str, words)]
    if shell and os.name != "posix":
        skip_on_windows()
    return subprocess.Popen(
        ["bash", "-c", f'{shell} exec "$@"', "bash", *command] if shell else command,
        cwd=cwd,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def run_cli(
    *words: object, cwd: Path, stdin: str | bytes | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `chargpt` as a process and return its result."""
    return subprocess.run(
        [sys.executable, "-m", "chargpt", *map(str, words)],
        cwd=cwd,
        input=stdin.decode() if isinstance(stdin, bytes) else stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "1", **environment},
    )


def run_here(*words: object, cwd: Path, **environment: str) -> None:
    """Run `chargpt` within this process, for what the tests of a file share; it must succeed."""
    from chargpt.cli.main import run

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["chargpt", *map(str, words)])
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as left:
            run()
    assert left.value.code == 0, words


def run_python(program: str, cwd: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a program of Python with arguments in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Check that a command rejected its input with one sentence; return it."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("chargpt: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


class Cli:
    """The command line within this process: faster, with the same exit codes and output."""

    def __init__(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capfd = capfd
        self.monkeypatch = monkeypatch

    def __call__(self, *words: object) -> subprocess.CompletedProcess[str]:
        from chargpt.cli.main import run

        self.capfd.readouterr()
        self.monkeypatch.setattr(sys, "argv", ["chargpt", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            run()
        printed = self.capfd.readouterr()
        code = left.value.code
        assert isinstance(code, int)
        return subprocess.CompletedProcess(list(map(str, words)), code, printed.out, printed.err)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Commands, run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return Cli(capfd, monkeypatch)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("there is no Chromium here")
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-background-networking", "--disable-component-update"],
        )
