"""Benchmark of time budgets beside other busy processes: punctuality, steps and loss.

A budget that is too short for the fewest useful steps announces how long training takes instead, or
is refused: then the announced seconds are those asked for, and there is no loss.

    python scripts/bench/bench_busy.py TEXT [--budgets 5s 10s 30s 150s] [--processes 0 1 2]
        [--ranks 1] [--rank-1 normal ahead slow] [--repeats 1] [--json benchmarks/busy.json]

Each case is a whole `chargpt train` command, of several ranks with `torchrun`, beside a number of
processes that loop without end. Rank 1's clocks may be a minute ahead, or it may be five times as
slow in all that it does.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from record import provenance, write_record

from chargpt.training.deadline import parse_duration

LOOP = [sys.executable, "-c", "while True: pass"]
CHARGPT = [sys.executable, "-m", "chargpt"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
RANK_1 = {"normal": ("0", "1"), "ahead": ("60", "1"), "slow": ("0", "5")}  # AHEAD and SLOWNESS


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run processes that loop without end."""
    processes = [subprocess.Popen(LOOP) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def train(text: Path, budget: str, n_processes: int, n_ranks: int, rank_1: str) -> dict[str, Any]:
    """Train once beside busy processes; return the seconds, steps, threads and loss."""
    with tempfile.TemporaryDirectory() as folder:
        run, program = Path(folder) / "run", CHARGPT
        if n_ranks > 1:
            rank = str(Path(__file__).with_name("bench_rank.py"))
            program = [*TORCHRUN, str(n_ranks), rank, folder, *RANK_1[rank_1]]
        with busy_processes(n_processes):
            start = time.perf_counter()
            command = [*program, "train", str(text), "--budget", budget, "--out", str(run)]
            done = subprocess.run(command, capture_output=True, text=True)
            seconds = time.perf_counter() - start
        steps = [path.stat().st_size for path in sorted(Path(folder).glob("[0-9]*"))]
        announced = re.search(r"takes up to (\d+) s instead|give --budget (\d+)s", done.stderr)
        asked = parse_duration(budget)
        row: dict[str, Any] = {
            "busy_processes": n_processes,
            "ranks": n_ranks,
            "rank_1": rank_1,
            "budget": budget,
            "announced": float(announced[1] or announced[2]) if announced else asked,
            "seconds": round(seconds, 2),
        }
        if done.returncode and announced and announced[2]:
            return {**row, "refused": announced[0]}
        done.check_returncode()
        command = [*CHARGPT, "evaluate", str(run), "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    result = json.loads(done.stdout)
    return {
        **row,
        "of_announced": round(seconds / row["announced"], 3),
        "steps": result["step"],
        **({"steps_of_ranks": steps} if steps else {}),
        "parameters": result["parameters"],
        "threads": config["threads"],
        "nats_per_char": round(result["nats_per_char"], 4),
    }


def main() -> None:
    """Measure every case and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--budgets", nargs="+", default=["5s", "10s", "30s", "150s"])
    parser.add_argument("--processes", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank-1", nargs="+", choices=RANK_1, default=["normal"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if args.ranks == 1 and args.rank_1 != ["normal"]:
        parser.error("a rank 1 needs --ranks 2")
    rows = []
    for n_processes, rank_1 in itertools.product(args.processes, args.rank_1):
        for budget in args.budgets * args.repeats:
            rows.append(train(args.text.absolute(), budget, n_processes, args.ranks, rank_1))
            print(rows[-1], file=sys.stderr, flush=True)
    write_record({**provenance(), "rows": rows}, args.json)


if __name__ == "__main__":
    main()
