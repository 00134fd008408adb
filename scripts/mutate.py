"""Mutation testing of the store: change its code in every small way, and count what tests notice.

    python scripts/mutate.py [--json benchmarks/mutation.json] [--left FILE]

Needs `pip install mutmut`. It works in a clone of the repository, for some ten minutes. The changes
that no test notices are written to FILE.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from bench.record import facts, write_record

REPOSITORY = Path(__file__).parent.parent
SETTINGS = """
[mutmut]
source_paths=chargpt
only_mutate=chargpt/store/*
pytest_add_cli_args_test_selection=
    tests/test_store.py
    tests/test_refusals.py
also_copy=
    configs
    data
    scripts
"""


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--left", type=Path, default=None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "chargpt"
        subprocess.run(["git", "clone", "--quiet", REPOSITORY, copy], check=True)
        (copy / "setup.cfg").write_text(SETTINGS)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # forked processes have one thread
        start = time.monotonic()
        # one at a time: the tests of locks and signals are not to meet their like
        done = subprocess.run(
            ["mutmut", "run", "--max-children", "1"],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - start
        if done.returncode != 0:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
        subprocess.run(["mutmut", "export-cicd-stats"], cwd=copy, check=True, capture_output=True)
        found = json.loads((copy / "mutants" / "mutmut-cicd-stats.json").read_text())
        left = [] if given.left is None else survivors(copy)
    noticed = found["killed"] + found["timeout"]
    record = {
        **facts(),
        "mutants": found["total"],
        "noticed": noticed,
        "share": round(noticed / found["total"], 4),
        "seconds": round(seconds),
    }
    write_record(record, given.json)
    if given.left is not None:
        given.left.write_text("\n".join(left), encoding="utf-8")


def survivors(copy: Path) -> list[str]:
    """Return the changes that no test has noticed."""
    lines = mutmut(copy, "results").splitlines()
    names = [line.split(":")[0].strip() for line in lines if line.endswith("survived")]
    return [mutmut(copy, "show", name) for name in names]


def mutmut(copy: Path, *words: str) -> str:
    """Return what a command of mutmut's prints."""
    done = subprocess.run(["mutmut", *words], cwd=copy, capture_output=True, text=True, check=False)
    return done.stdout


if __name__ == "__main__":
    main()
