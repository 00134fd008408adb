"""Benchmark of compression: losslessness, size and speed.

    python scripts/bench/bench_compress.py RUN [--texts 200] [--json benchmarks/compress.json]

Random texts (passages of the run's validation split, uniformly random characters, and repetitions
of one character) and the whole validation split are compressed and decompressed. The record
compares the size of the latter with the size that its loss implies, and with xz and zstd given the
training split (zstd as its dictionary; for xz, which has none, the increase in the size of both).
"""

import argparse
import lzma
import math
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from record import facts, write_record

from chargpt.inference.coding import compress, decompress, split_into_lanes
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.store.run import Run, load_run

MAX_CHARACTERS = 600  # of a random text


def random_texts(run: Run, val: str, count: int) -> list[str]:
    """Return texts of 0 to MAX_CHARACTERS characters, of three kinds in turn."""
    random = np.random.default_rng(0)
    characters = list(run.tokenizer.characters)
    texts = []
    for number in range(count):
        length = int(random.integers(0, MAX_CHARACTERS + 1))
        if number % 3 == 0:
            start = int(random.integers(0, len(val) - MAX_CHARACTERS))
            texts.append(val[start : start + length])
        elif number % 3 == 1:
            texts.append("".join(random.choice(characters, length)))
        else:
            texts.append(str(random.choice(characters)) * length)
    return texts


def expected_bytes(run: Run, text: str) -> float:
    """Return the compressed size that the `sliding` loss over the lanes implies."""
    tokens = run.tokenizer.encode(text).astype(np.int64)
    lanes = split_into_lanes(tokens)
    nats = 0.0
    for number, lane in enumerate(lanes):
        own = lane[: len(tokens) - number * lanes.shape[1]]
        result = evaluate_tokens(run.model, own, protocol="sliding")
        nats += result.nats_per_char * result.characters
    return nats / math.log(2) / 8


def zstd_bytes(dictionary: bytes, text: bytes) -> int | None:
    """Return the size of a text compressed by zstd -19 with a dictionary."""
    if shutil.which("zstd") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dictionary")
        path.write_bytes(dictionary)
        command = ["zstd", "-19", "--long=27", "-q", "-c", "-D", str(path)]
        return len(subprocess.run(command, input=text, capture_output=True, check=True).stdout)


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    run = load_run(arguments.run, "best", "cpu")
    corpus = run.corpus()
    train, val = (run.tokenizer.decode(corpus.split(name)) for name in ("train", "val"))
    differences = sum(
        decompress(run, compress(run, text.encode())) != text.encode()
        for text in random_texts(run, val, arguments.texts)
    )
    start = time.perf_counter()
    packed = compress(run, val.encode())
    middle = time.perf_counter()
    differences += decompress(run, packed) != val.encode()
    end = time.perf_counter()
    both, alone = (len(lzma.compress(text.encode(), preset=9)) for text in (train + val, train))
    record = {
        **facts(),
        "text": corpus.name,
        "parameters": run.model.parameter_count(),
        "random_texts": arguments.texts,
        "differences": differences,
        "validation": {
            "characters": len(val),
            "bytes": len(packed),
            "expected_bytes": round(expected_bytes(run, val)),
            "xz_bytes": both - alone,
            "zstd_bytes": zstd_bytes(train.encode(), val.encode()),
            "compress_seconds": round(middle - start, 1),
            "decompress_seconds": round(end - middle, 1),
        },
    }
    write_record(record, arguments.json)


if __name__ == "__main__":
    main()
