"""Metadata of a benchmark record: command, commit, hardware, date, versions."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from chargpt.analysis.doctor import describe_gpu


def provenance() -> dict[str, Any]:
    """Return the metadata of this benchmark, without absolute paths."""
    arguments = [re.sub(r"(^|:)/[^:]*/", r"\1", word) for word in sys.argv[1:]]
    script = Path(sys.argv[0]).absolute().relative_to(Path(__file__).parents[2])
    gpu = (
        {"gpu": f"{described}, CUDA {torch.version.cuda}"} if (described := describe_gpu()) else {}
    )
    return {
        "command": shlex.join(["python", str(script), *arguments]),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "hardware": f"{cpu()}, {os.cpu_count()} cores",
        **gpu,
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def commit() -> str:
    """Return $CHARGPT_COMMIT, or else the short hash of the checked-out commit."""
    if named := os.environ.get("CHARGPT_COMMIT"):
        return named
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def cpu() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_record(record: dict[str, Any], path: Path | None) -> None:
    """Print a record and write it to a file if a path is given."""
    print(json.dumps(record, indent=2))
    save_record(record, path)


def save_record(record: dict[str, Any], path: Path | None) -> None:
    """Write a record, whole or not yet, to a file if a path is given."""
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
