"""Benchmark of sampling in threads: time of 16 threads against that of the same calls in turn.

    python scripts/bench/bench_threads.py [--repeats 7] [--json benchmarks/threads.json]

Each call is `chargpt.sample(run, length=N, seed=i)` with one loaded run, as in a service. The model
is that of the config `gpt`; its weights are those after 5 steps, because speed does not depend on
them. Rounds alternate between both.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from record import provenance, write_record

import chargpt

THREADS = 16
LENGTHS = (20, 200, 1_000)


def seconds(
    run: chargpt.Run, length: int, in_order: Callable[..., Iterable[str]]
) -> tuple[float, list[str]]:
    """Return the time that THREADS texts take, and the texts."""
    start = time.perf_counter()
    texts = list(in_order(lambda i: chargpt.sample(run, length=length, seed=i)[0], range(THREADS)))
    return time.perf_counter() - start, texts


def main() -> None:
    """Measure every length in turn and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(THREADS) as pool:
        settings = {"train.max_steps": 5}
        run = chargpt.train(config="gpt", settings=settings, out=Path(folder, "run"), device="cpu")
        for length in LENGTHS:
            rounds = []
            for _ in range(arguments.repeats + 1):  # the first is a warm-up
                alone, texts = seconds(run, length, map)
                together, others = seconds(run, length, pool.map)
                assert texts == others
                rounds.append((alone, together, together / alone))
            medians = map(statistics.median, zip(*rounds[1:], strict=True))
            names = ("seconds_in_turn", "seconds_of_threads", "ratio")
            results[f"{length} characters"] = {
                name: round(value, 3) for name, value in zip(names, medians, strict=True)
            }
    write_record({**provenance(), "threads": THREADS, "results": results}, arguments.json)


if __name__ == "__main__":
    main()
