"""Whether planted copies are found in a long text, how fast, and in how much memory.

    python scripts/bench/bench_memorization.py SEED_TEXT [--megabytes 100] [--json FILE]

The long text, mapped from a file, is made of SEED_TEXT's words in random order. Each of 100 texts
holds one copy of 20 to 500 characters of it, among random characters.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from record import facts, write_record

from chargpt.analysis.memorization import find_overlap

TEXTS, SHORTEST, LONGEST, AROUND = 100, 20, 500, 200


def long_text(seed: Path, size: int, target: Path) -> npt.NDArray[np.uint8]:
    """Write at least so many bytes of a text's words in random order; return them mapped."""
    words = seed.read_bytes().split()
    random = np.random.default_rng(0)
    with open(target, "wb") as file:
        while file.tell() < size:
            picks = random.integers(0, len(words), 100_000).tolist()
            file.write(b" ".join(words[pick] for pick in picks) + b" ")
    return np.memmap(target, dtype=np.uint8, mode="r")


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=Path)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    training = long_text(given.seed, given.megabytes * 10**6, Path(folder.name, "text"))
    random = np.random.default_rng(1)
    texts, planted = [], []
    for _ in range(TEXTS):
        length = int(random.integers(SHORTEST, LONGEST + 1))
        place = int(random.integers(0, len(training) - length))
        before, after = (random.integers(128, 256, AROUND, dtype=np.uint8) for _ in range(2))
        texts.append(np.concatenate((before, training[place : place + length], after)))
        planted.append(length)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    found = find_overlap(training, texts)
    seconds = time.perf_counter() - start
    growth_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    right = sum(
        memory.longest is not None
        and (memory.longest.start, memory.longest.length) == (AROUND, length)
        for memory, length in zip(found, planted, strict=True)
    )
    record = {
        **facts(),
        "characters": len(training),
        "planted": TEXTS,
        "found": right,
        "seconds": round(seconds, 1),
        "growth_mb": round(growth_kb / 1000),
    }
    write_record(record, given.json)


if __name__ == "__main__":
    main()
