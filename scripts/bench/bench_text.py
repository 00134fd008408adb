"""Measure the time and memory to prepare a long text, and the time to read a prepared one.

    python scripts/bench/bench_text.py SEED_TEXT [--gigabytes 1] [--json benchmarks/text.json]

Repeats SEED_TEXT with a counter in each repetition, then, in each of three new processes, prepares
it as the text of a run and reads the prepared text with its checksums, as resuming does.

Also measures the throughput of `CharTokenizer.encode` on one thread, for ASCII, Cyrillic and
code points above U+FFFF, and that of nanoGPT's dict look-up per character.
"""

import argparse
import json
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
import json, resource, sys, tempfile, time
from pathlib import Path
from chargpt.config import TextConfig
from chargpt.text.prepare import prepare, read_prepared
from chargpt.text.source import find_text
settings = TextConfig(path=sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with tempfile.TemporaryDirectory() as folder:
    start = time.perf_counter()
    corpus = prepare(find_text(settings), settings, Path(folder))
    prepared = time.perf_counter()
    # pages of a memory map count as resident, so the peak is read before the tokens are used
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read_prepared(Path(folder), settings, corpus.tokenizer)
    read = time.perf_counter()
print(json.dumps({"prepare": prepared - start, "read": read - prepared,
                  "growth_mb": (after - before) / 1000}))
"""


def make_text(seed: Path, target: Path, size: int) -> None:
    """Write about `size` bytes."""
    content = seed.read_bytes()
    with open(target, "wb") as file:
        number = 0
        while file.tell() < size:
            file.write(b"Part %d.\n" % number + content)
            number += 1


def probe(text: Path) -> dict[str, float]:
    """Prepare the text in a new process, read it again, and return the measurements."""
    words = [sys.executable, "-c", PROBE, str(text)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
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
        text = Path(folder, "long.txt")
        make_text(arguments.seed, text, int(arguments.gigabytes * 1e9))
        size = text.stat().st_size
        runs = [probe(text) for _ in range(3)]
    seconds = statistics.median(run["prepare"] for run in runs)
    result = {
        **provenance(),
        "text_bytes": size,
        "prepare_mb_per_second": round(size / 1e6 / seconds, 1),
        "prepare_seconds": [round(run["prepare"], 2) for run in runs],
        "memory_growth_mb": round(max(run["growth_mb"] for run in runs), 1),
        "read_seconds": [round(run["read"], 3) for run in runs],
        "encode_gigacharacters_per_second": encoding_speeds(arguments.seed.read_text("utf-8")),
    }
    write_record(result, arguments.json)


if __name__ == "__main__":
    main()
