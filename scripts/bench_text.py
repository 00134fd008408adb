"""How fast a long text is prepared, in how much memory, and how fast a second start is.

    python scripts/bench_text.py SEED_TEXT [--gigabytes 1] [--json benchmarks/text.json]

Makes a text by repeating SEED_TEXT with changes (a counter in each repetition, so that no two are
alike), then runs `prepare` in fresh processes: three times cold, three times warm.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from record import facts, write_record

PROBE = """
import json, resource, sys, time
start = time.perf_counter()
from chargpt.config import TextConfig
from chargpt.text.corpus import prepare
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
corpus = prepare(TextConfig(path=sys.argv[1]))
ended = time.perf_counter()
# a mapped file's pages count as resident, so the peak is read before anything looks at the tokens
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
    """Prepare the text in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(text)],
        env={**os.environ, "CHARGPT_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


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
        **facts(),
        "text_bytes": size,
        "cold_mb_per_second": round(size / 1e6 / seconds, 1),
        "cold_seconds": [round(run["seconds"], 2) for run in cold],
        "memory_growth_mb": round(max(run["growth_mb"] for run in cold), 1),
        "warm_seconds": [round(run["seconds"], 3) for run in warm],
        "warm_process_seconds": [round(run["process"], 2) for run in warm],
    }
    write_record(result, arguments.json)


if __name__ == "__main__":
    main()
