"""Measure the time and memory to prepare a long text, and the time of a second start.

    python scripts/bench/bench_text.py SEED_TEXT [--gigabytes 1] [--json benchmarks/text.json]

Repeats SEED_TEXT with a counter in each repetition, then calls `load_corpus` in new processes:
three times with an empty cache (cold), three times with a full one (warm).

Also measures the throughput of `CharTokenizer.encode` on one thread, for ASCII, Cyrillic and
code points above U+FFFF, and that of nanoGPT's dict look-up per character.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from record import provenance, write_record

from chargpt.text.tokenizer import CharTokenizer

PROBE = """
import json, resource, sys, time
start = time.perf_counter()
from chargpt.config import TextConfig
from chargpt.text.prepare import load_corpus
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
corpus = load_corpus(TextConfig(path=sys.argv[1]))
ended = time.perf_counter()
# pages of a memory map count as resident, so the peak is read before the tokens are used
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": ended - began, "process": ended - start,
                  "growth_mb": (after - before) / 1000, "characters": len(corpus.tokens)}))
"""


def make_text(seed: Path, target: Path, size: int) -> None:
    """Write about `size` bytes."""
    content = seed.read_bytes()
    with open(target, "wb") as file:
        number = 0
        while file.tell() < size:
            file.write(b"Part %d.\n" % number + content)
            number += 1


def probe(text: Path, cache: Path) -> dict[str, float]:
    """Prepare the text in a new process and return its measurements."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(text)],
        env={**os.environ, "CHARGPT_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def encoding_speeds(seed: str) -> dict[str, float]:
    """Return gigacharacters per second of `encode` and of nanoGPT's way, best of some runs."""
    ascii_text = seed.encode("ascii", "replace").decode() * (20_000_000 // len(seed) + 1)
    texts = {
        "ascii": ascii_text,
        "cyrillic": ascii_text.translate({c: c + 0x3B0 for c in range(65, 123)}),
        "above U+FFFF": ascii_text.translate({c: c + 0x1D400 - 65 for c in range(65, 123)}),
    }
    speeds = {}
    for name, text in texts.items():
        tokenizer = CharTokenizer.fit(text)
        speeds[name] = len(text) / fastest(partial(tokenizer.encode, text), 7)
    table = {character: index for index, character in enumerate(sorted(set(ascii_text)))}
    sample = ascii_text[:2_000_000]
    seconds = fastest(lambda: np.array([table[c] for c in sample], dtype=np.uint16), 3)
    speeds["nanoGPT's way"] = len(sample) / seconds
    return {name: round(speed / 1e9, 3) for name, speed in speeds.items()}


def fastest(work: Callable[[], object], times: int) -> float:
    """Return the seconds of the fastest call."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text, cache = Path(folder, "long.txt"), Path(folder, "cache")
        make_text(arguments.seed, text, int(arguments.gigabytes * 1e9))
        size = text.stat().st_size
        cold = []
        for _ in range(3):
            shutil.rmtree(cache, ignore_errors=True)
            cold.append(probe(text, cache))
        warm = [probe(text, cache) for _ in range(3)]
    seconds = statistics.median(run["seconds"] for run in cold)
    result = {
        **provenance(),
        "text_bytes": size,
        "cold_mb_per_second": round(size / 1e6 / seconds, 1),
        "cold_seconds": [round(run["seconds"], 2) for run in cold],
        "memory_growth_mb": round(max(run["growth_mb"] for run in cold), 1),
        "warm_seconds": [round(run["seconds"], 3) for run in warm],
        "encode_gigacharacters_per_second": encoding_speeds(arguments.seed.read_text("utf-8")),
        "warm_process_seconds": [round(run["process"], 2) for run in warm],
    }
    write_record(result, arguments.json)


if __name__ == "__main__":
    main()
