"""Whether compressed texts come back, how long they are, and how fast it goes.

    python scripts/bench/bench_compress.py RUN [--texts 200] [--json benchmarks/compress.json]

Two hundred random texts (stretches of the run's validation part, characters drawn at random, and
single characters repeated) and the whole validation part go through `compress` and `decompress`.
Beside the size of the latter: what its loss promises, and what xz and zstd make of it once they
have the training part (zstd as its dictionary; xz has none, so what it adds to the training part).
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

from chargpt.inference.coding import compress, decompress, lanes_of
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.store.run import Run, load_run

MOST = 600  # characters of a random text


def random_texts(run: Run, val: str, count: int) -> list[str]:
    """Return texts of the vocabulary, none to MOST characters long, of three kinds in turn."""
    random = np.random.default_rng(0)
    characters = list(run.tokenizer.characters)
    texts = []
    for number in range(count):
        length = int(random.integers(0, MOST + 1))
        if number % 3 == 0:
            start = int(random.integers(0, len(val) - MOST))
            texts.append(val[start : start + length])
        elif number % 3 == 1:
            texts.append("".join(random.choice(characters, length)))
        else:
            texts.append(str(random.choice(characters)) * length)
    return texts


def promised_bytes(run: Run, text: str) -> float:
    """Return what the model's `sliding` loss over the lanes says that a text takes."""
    tokens = run.tokenizer.encode(text).astype(np.int64)
    lanes = lanes_of(tokens)
    nats = 0.0
    for number, lane in enumerate(lanes):
        own = lane[: len(tokens) - number * lanes.shape[1]]
        found = evaluate_tokens(run.model, own, protocol="sliding")
        nats += found.nats_per_char * found.characters
    return nats / math.log(2) / 8


def zstd_bytes(known: bytes, text: bytes) -> int | None:
    """Return the size of a text under zstd -19 that has another one as its dictionary."""
    if shutil.which("zstd") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        dictionary = Path(folder, "known")
        dictionary.write_bytes(known)
        words = ["zstd", "-19", "--long=27", "-q", "-c", "-D", str(dictionary)]
        return len(subprocess.run(words, input=text, capture_output=True, check=True).stdout)


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    run = load_run(given.run, "best", "cpu")
    corpus = run.corpus()
    known, val = (run.tokenizer.decode(corpus.split(name)) for name in ("train", "val"))
    differences = sum(
        decompress(run, compress(run, text.encode())) != text.encode()
        for text in random_texts(run, val, given.texts)
    )
    start = time.perf_counter()
    packed = compress(run, val.encode())
    middle = time.perf_counter()
    differences += decompress(run, packed) != val.encode()
    end = time.perf_counter()
    both, alone = (len(lzma.compress(text.encode(), preset=9)) for text in (known + val, known))
    record = {
        **facts(),
        "text": corpus.name,
        "parameters": run.model.parameter_count(),
        "random_texts": given.texts,
        "differences": differences,
        "validation": {
            "characters": len(val),
            "bytes": len(packed),
            "promised_bytes": round(promised_bytes(run, val)),
            "xz_bytes": both - alone,
            "zstd_bytes": zstd_bytes(known.encode(), val.encode()),
            "compress_seconds": round(middle - start, 1),
            "decompress_seconds": round(end - middle, 1),
        },
    }
    write_record(record, given.json)


if __name__ == "__main__":
    main()
