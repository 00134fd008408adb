"""Metadata of a benchmark record: command, commit, hardware, date, versions."""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def facts() -> dict[str, Any]:
    """Return the metadata of this benchmark, without absolute paths."""
    arguments = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    script = Path(sys.argv[0]).absolute().relative_to(Path(__file__).parents[2])
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "command": shlex.join(["python", str(script), *arguments]),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "hardware": f"{cpu()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def cpu() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_record(record: dict[str, Any], path: Path | None) -> None:
    """Print a record and write it to a file if a path is given."""
    content = json.dumps(record, indent=2) + "\n"
    print(content, end="")
    if path is not None:
        path.write_text(content, encoding="utf-8")
