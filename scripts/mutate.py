"""Mutation testing of `chargpt/store/`: count the mutants that its tests kill.

    python scripts/mutate.py [--json benchmarks/mutation.json] [--survivors FILE]

Needs `pip install mutmut`. It runs in a clone of the repository for about twenty minutes. Surviving
mutants are written to FILE.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from bench.record import provenance, write_record

REPOSITORY = Path(__file__).parent.parent
SETTINGS = """
[mutmut]
source_paths=chargpt
only_mutate=chargpt/store/*
pytest_add_cli_args_test_selection=
    tests/test_store.py
    tests/test_damage.py
also_copy=
    configs
    data
    scripts
"""


def main() -> None:
    """Run mutmut in a clone and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--survivors", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "chargpt"
        subprocess.run(["git", "clone", "--quiet", REPOSITORY, copy], check=True)
        (copy / "setup.cfg").write_text(SETTINGS)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # mutmut forks, without the threads
        start = time.monotonic()
        # one at a time, because the tests of locks and signals interfere with each other
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
        stats = json.loads((copy / "mutants" / "mutmut-cicd-stats.json").read_text())
        alive = [] if args.survivors is None else survivors(copy)
    killed = stats["killed"] + stats["timeout"]
    record = {
        **provenance(),
        "mutants": stats["total"],
        "killed": killed,
        "mutation_score": round(killed / stats["total"], 4),
        "seconds": round(seconds),
    }
    write_record(record, args.json)
    if args.survivors is not None:
        args.survivors.write_text("\n".join(alive), encoding="utf-8")


def survivors(copy: Path) -> list[str]:
    """Return the diffs of the surviving mutants."""
    lines = mutmut(copy, "results").splitlines()
    names = [line.split(":")[0].strip() for line in lines if line.endswith("survived")]
    return [mutmut(copy, "show", name) for name in names]


def mutmut(copy: Path, *arguments: str) -> str:
    """Return the output of a mutmut command."""
    done = subprocess.run(
        ["mutmut", *arguments], cwd=copy, capture_output=True, text=True, check=False
    )
    return done.stdout


if __name__ == "__main__":
    main()
