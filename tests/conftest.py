"""What every test shares: a cache of its own, small texts, and the command line as a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the user's cache out of the tests, and the tests out of it."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CHARGPT_CACHE", str(folder))
    return folder


@pytest.fixture
def verse() -> Path:
    """The short text written for this project."""
    return REPOSITORY / "data" / "lighthouse.txt"


def run_cli(
    *words: object, cwd: Path, stdin: str | bytes | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `chargpt` as a process of its own and return what it printed."""
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


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Check that a command refused its input as it should, and return its one sentence."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("chargpt: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]
