"""A hundredth of all harm that `scripts/torture/torture.py` can do to a run."""

import json
import subprocess
import sys
from pathlib import Path

from conftest import REPOSITORY

ROWS = (
    "kill,fail_files,small_disk,damage,resume_at,go_bad,send_signal,"
    "bad_text,any_config,typo,round_trip,unseen_prompt,golden"
)  # what several processes suffer takes minutes


def test_runs_survive_a_hundredth_of_the_torture(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(
                sys.executable,
                "scripts/torture/torture.py",
                "--share",
                "0.01",
                "--jobs",
                "2",
                "--rows",
                ROWS,
            ),
            *("--work", tmp_path / "work", "--json", tmp_path / "torture.json"),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "torture.json").read_text())["rows"]
    assert {row["row"]: row["cases"] for row in rows}["damage"] == 10
    assert len(rows) == 13
