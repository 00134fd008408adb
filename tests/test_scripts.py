"""The scripts for a GPU, in miniature on a CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from conftest import REPOSITORY

SCRIPTS = REPOSITORY / "scripts"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHON": sys.executable}


def run(*words: object, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_measurements_for_a_first_gpu_run_on_a_cpu(verse: Path, tmp_path: Path) -> None:
    record = tmp_path / "parts.json"
    small = (
        "model.n_layer=1 model.n_embd=32 model.n_head=1 model.block_size=16 train.batch_size=2 "
        "dtype=float32"
    ).split()
    changes = [word for setting in small for word in ("-s", setting)]
    printed = run(
        *(SCRIPTS / "bench" / "bench_gpu.py", verse, "--steps", 1, "--json", record, *changes),
        *("--parts", "steps", "profile"),
        cwd=tmp_path,
    )
    assert "1 x 32, whole step (ms)" in printed
    values = json.loads(record.read_text())
    assert values["steps"]["1 x 32, characters per second"] > 0
    assert values["profile"]["eager: microseconds of a step"]
    assert values["torch"]


def test_the_gpu_suite_writes_its_record_also_when_it_is_stopped(
    verse: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        [SCRIPTS / "gpu_suite.sh", out, verse],
        env={**ENVIRONMENT, "CHARGPT_SUITE_SECONDS": "300"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while "== training" not in ((out / "gpu.txt").read_text() if out.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    found = json.loads((out / "gpu.json").read_text())
    assert found["exit_codes"]["doctor"] == "0"
    assert found["doctor"]["checks"]
    assert found["train"] is None
    assert not (out / "cache").exists()
