"""Characters a second when sampling: one stream and many, beside nanoGPT's `generate`.

    python scripts/bench/bench_sample.py [--nanogpt DIR] [--repeats 3]
        [--json benchmarks/sample.json]

The model is the default's: 4 layers, 128 wide, 65 characters, block 128, and for many streams also
the block of 64 that nanoGPT's README gives its model of that size; filled with noise, since speed
does not depend on what was learnt. Each measurement is a process of its own, in turn, on this
machine's best device for chargpt and on the CPU for nanoGPT. The first 20 characters, which warm
everything up, do not count; how long they take stands beside, since long work is done by compiled
steps, which the first process has to compile (nothing kept from before is used) and the others to
load.
What threads have drawn ahead by then, two rounds at most, does count: 1% of the many streams' text.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from record import facts, write_record

OURS = """
import sys, time
import torch
from chargpt.config import ModelConfig, SampleConfig
from chargpt.device import choose_device
from chargpt.inference.sampling import stream
from chargpt.models import build_model
from chargpt.text.tokenizer import CharTokenizer

streams, length, block = map(int, sys.argv[1:])
torch.manual_seed(0)
model = build_model(ModelConfig(n_layer=4, n_head=2, n_embd=128, block_size=block), 65)
torch.nn.init.normal_(model.head.weight, std=0.02)
model.to(choose_device("auto")[0])
tokenizer = CharTokenizer("".join(map(chr, range(40, 105))))
options = SampleConfig(length=length, num_samples=streams, seed=1)
begin = time.perf_counter()
pieces = stream(model, tokenizer, tokenizer.encode("0"), options)
for _ in range(20):
    next(pieces)
start = time.perf_counter()
count = sum(1 for _ in pieces)
print(count * streams / (time.perf_counter() - start), start - begin)
"""
PEER = """
import sys, time
import torch
from model import GPT, GPTConfig

streams, length, block = map(int, sys.argv[1:])
torch.manual_seed(0)
config = GPTConfig(block_size=block, vocab_size=65, n_layer=4, n_head=4, n_embd=128, dropout=0.0,
                   bias=False)
model = GPT(config).eval()
start = torch.zeros(streams, 1, dtype=torch.long)
begin = time.perf_counter()
with torch.no_grad():
    model.generate(start, 20, temperature=0.8, top_k=200)
    warm = time.perf_counter()
    model.generate(start, length, temperature=0.8, top_k=200)
print(streams * length / (time.perf_counter() - warm), warm - begin)
"""


def measure(
    program: str, streams: int, length: int, block: int, kept: str, folder: Path | None = None
) -> tuple[float, float]:
    """Return one process's characters a second, and the seconds that its first 20 took.

    Args:
        program: the process's code; the next three are its arguments.
        streams: drawn together.
        length: characters of each.
        block: the model's block size.
        kept: the folder of what was compiled.
        folder: nanoGPT's checkout.
    """
    paths = [str(folder), *sys.path[1:]] if folder else sys.path[1:]
    done = subprocess.run(
        [sys.executable, "-c", program, str(streams), str(length), str(block)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NUMBA_CACHE_DIR": kept},
    )
    speed, first = map(float, done.stdout.splitlines()[-1].split())
    return speed, first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cases = {
        "1 stream, 2,000 characters": (OURS, 1, 2000, 128),
        "1 stream": (OURS, 1, 100_000, 128),
        "16 streams": (OURS, 16, 20_000, 128),
        "64 streams": (OURS, 64, 10_000, 128),
        "64 streams, block 64": (OURS, 64, 10_000, 64),
    }
    folder = arguments.nanogpt.absolute() if arguments.nanogpt else None
    if folder:
        cases["nanoGPT, 1 stream"] = (PEER, 1, 500, 64)
        cases["nanoGPT, 64 streams"] = (PEER, 64, 100, 64)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as kept:
        for _ in range(arguments.repeats):
            for name, case in cases.items():
                found[name].append(measure(*case, kept, folder))
    medians = {
        name: round(statistics.median(speed for speed, _ in runs)) for name, runs in found.items()
    }
    record = {
        **facts(),
        "characters_per_second": medians,
        "all": {name: [round(speed) for speed, _ in runs] for name, runs in found.items()},
        "seconds_to_the_first_20": {
            name: [round(first, 3) for _, first in runs] for name, runs in found.items()
        },
    }
    if folder:
        record["times_nanogpt"] = {
            name: round(medians[name] / medians[f"nanoGPT, {name.partition(',')[0]}"], 1)
            for name in list(cases)[:-2]
            if name != "16 streams"
        }
    write_record(record, arguments.json)


if __name__ == "__main__":
    main()
