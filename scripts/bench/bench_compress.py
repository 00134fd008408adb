"""Benchmark of compression: losslessness, size and speed.

    python scripts/bench/bench_compress.py RUN [RUN ...] [--texts 200] [--json FILE]

Random texts (passages of the run's validation split, uniformly random characters, and repetitions
of one character) and the whole validation split are compressed and decompressed: by the GPT, and if
the run has one by its mixture, plain and adaptive. The record compares the size of the validation
split with the size that the GPT's loss implies, and with what other compressors add to the
compressed training split for it: xz, zstd (the training split as its dictionary), and where they
are installed zpaq -m5 and 7z's PPMd. Their models grow with the length of their input, so the
training split alone is padded to the length of both.
"""

import argparse
import lzma
import math
import shutil
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from record import provenance, write_record

from chargpt.inference.coding import compress, decompress, split_into_lanes
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.store.mixture import has_mixture, with_mixture
from chargpt.store.run import Run, load_run
from chargpt.training.adaptive import AdaptiveDecoder

MAX_CHARACTERS = 600  # of a random text
OTHERS = {
    "zpaq -m5": ["zpaq", "add", "ARCHIVE", "FILE", "-m5"],
    "PPMd": ["7z", "a", "-m0=PPMd:o=6:mem=256m", "ARCHIVE", "FILE"],
}


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


def added_bytes(command: list[str], train: bytes, val: bytes) -> tuple[int, float] | None:
    """Return the bytes that a text adds to the archive of another, and the seconds for both.

    None if the program is missing. Of the command's words, ARCHIVE and FILE are replaced.
    """
    if shutil.which(command[0]) is None:
        return None
    sizes = []
    with tempfile.TemporaryDirectory() as folder:
        for name, content in (("alone", train + b"a" * len(val)), ("both", train + val)):
            path, archive = Path(folder, name), Path(folder, f"{name}.{command[0]}")
            path.write_bytes(content)
            words = {"ARCHIVE": str(archive), "FILE": str(path)}
            start = time.perf_counter()
            subprocess.run([words.get(w, w) for w in command], check=True, capture_output=True)
            seconds = time.perf_counter() - start
            sizes.append(archive.stat().st_size)
    return sizes[1] - sizes[0], seconds


def measure(run: Run, text: str, adaptive: bool) -> dict[str, Any]:
    """Compress and decompress a text; return size and times."""
    decoder = partial(AdaptiveDecoder, run) if adaptive else None
    start = time.perf_counter()
    packed = compress(run, text.encode(), adaptive=decoder)
    middle = time.perf_counter()
    is_equal = decompress(run, packed, adaptive=decoder) == text.encode()
    end = time.perf_counter()
    return {
        "bytes": len(packed),
        "nats_per_char": round(8 * len(packed) * math.log(2) / len(text), 4),
        "comes_back_equal": is_equal,
        "compress_seconds": round(middle - start, 1),
        "decompress_seconds": round(end - middle, 1),
    }


def measure_run(path: Path, n_texts: int) -> dict[str, Any]:
    """Measure one run, its mixture, and the other compressors."""
    run = load_run(path, "best", "cpu")
    corpus = run.corpus()
    train, val = (run.tokenizer.decode(corpus.split(name)) for name in ("train", "val"))
    differences = sum(
        decompress(run, compress(run, text.encode())) != text.encode()
        for text in random_texts(run, val, n_texts)
    )
    ours = {"gpt": measure(run, val, adaptive=False)}
    if has_mixture(run):
        mixed = with_mixture(run)
        ours |= {name: measure(mixed, val, name == "adaptive") for name in ("mixture", "adaptive")}
    both, alone = (len(lzma.compress(text.encode(), preset=9)) for text in (train + val, train))
    others: dict[str, Any] = {"xz": both - alone, "zstd": zstd_bytes(train.encode(), val.encode())}
    for name, command in OTHERS.items():
        if (found := added_bytes(command, train.encode(), val.encode())) is not None:
            others[name] = {"bytes": found[0], "seconds": round(found[1], 1)}
    return {
        "text": corpus.name,
        "parameters": run.model.num_parameters(),
        "training_seconds": round(run.state.seconds, 1),
        "random_texts": n_texts,
        "differences": differences,
        "validation_characters": len(val),
        "expected_bytes": round(expected_bytes(run, val)),
        "ours": ours,
        "others": others,
    }


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs = [measure_run(path, arguments.texts) for path in arguments.runs]
    write_record({**provenance(), "runs": runs}, arguments.json)


if __name__ == "__main__":
    main()
