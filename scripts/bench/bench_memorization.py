"""Recall, time and memory of the verbatim-overlap search on a long text with planted matches.

    python scripts/bench/bench_memorization.py SEED_TEXT [--megabytes 100] [--json FILE]

The long text, memory-mapped, consists of SEED_TEXT's words in random order. Each of 100 texts
contains one passage of 20 to 500 characters of it, between random characters.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from record import provenance, write_record

from chargpt.analysis.memorization import find_overlap

N_TEXTS, MIN_LENGTH, MAX_LENGTH, PADDING = 100, 20, 500, 200


def write_shuffled_words(seed: Path, size: int, target: Path) -> npt.NDArray[np.uint8]:
    """Write at least `size` bytes of a text's words in random order; return them memory-mapped."""
    words = seed.read_bytes().split()
    rng = np.random.default_rng(0)
    with open(target, "wb") as file:
        while file.tell() < size:
            picks = rng.integers(0, len(words), 100_000).tolist()
            file.write(b" ".join(words[pick] for pick in picks) + b" ")
    return np.memmap(target, dtype=np.uint8, mode="r")


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=Path)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    training = write_shuffled_words(args.seed, args.megabytes * 10**6, Path(folder.name, "text"))
    rng = np.random.default_rng(1)
    texts, planted = [], []
    for _ in range(N_TEXTS):
        length = int(rng.integers(MIN_LENGTH, MAX_LENGTH + 1))
        start = int(rng.integers(0, len(training) - length))
        before, after = (rng.integers(128, 256, PADDING, dtype=np.uint8) for _ in range(2))
        texts.append(np.concatenate((before, training[start : start + length], after)))
        planted.append(length)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    overlaps = find_overlap(training, texts)
    seconds = time.perf_counter() - begin
    growth_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    n_found = sum(
        overlap.longest is not None
        and (overlap.longest.start, overlap.longest.length) == (PADDING, length)
        for overlap, length in zip(overlaps, planted, strict=True)
    )
    record = {
        **provenance(),
        "characters": len(training),
        "planted": N_TEXTS,
        "found": n_found,
        "seconds": round(seconds, 1),
        "growth_mb": round(growth_kb / 1000),
    }
    write_record(record, args.json)


if __name__ == "__main__":
    main()
