"""A hundredth of the cases of `scripts/torture/torture.py`, in the rows that are fast."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

ROWS = (
    "sigkill,corrupt_checkpoint,resume_at,non_finite,invalid_text,random_config,misspelled_key,"
    "round_trip,unseen_characters,golden,damaged_text,kill_start,kill_replacement"
)  # .ci/run has all of them


@pytest.mark.slow
def test_runs_survive_a_hundredth_of_the_torture_cases(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/torture/torture.py", "--fraction", "0.01", "--jobs", "2"]
    done = subprocess.run(
        [*command, "--rows", ROWS, "--work", tmp_path, "--json", tmp_path / "torture.json"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "torture.json").read_text())["rows"]
    assert {row["row"]: row["cases"] for row in rows}["corrupt_checkpoint"] == 10
    assert len(rows) == 13
