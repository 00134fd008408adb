"""Benchmark of sampling: characters per second for one and many sequences, beside others.

    python scripts/bench/bench_sample.py [--nanogpt DIR] [--llama] [--repeats 3]
        [--length N] [--json benchmarks/sample.json]

The model is that of the config `gpt`: 4 layers, width 128, 65 characters, block size 128; for
64 sequences also the block size 64 of nanoGPT's small CPU model. Weights are random, because speed
does not depend on them. `--llama` also runs the exported model (f32) in llama.cpp, which evicts
half of its context when that is full, as chargpt does. Every measurement is a process of its own,
on this machine's best device for chargpt and on the CPU for the others. The first 20 characters are
a warm-up and not timed. `--length` shortens chargpt's sequences to N characters.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import provenance, save_record

CHARGPT = """
import sys, time
import torch
from chargpt.config import ModelConfig, SampleConfig
from chargpt.device import choose_device
from chargpt.inference.generation import stream_pieces
from chargpt.models import build_model
from chargpt.text.tokenizer import CharTokenizer

sequences, length, block_size = map(int, sys.argv[1:])
torch.manual_seed(0)
model = build_model(ModelConfig(n_layer=4, n_head=2, n_embd=128, block_size=block_size), 65)
torch.nn.init.normal_(model.head.weight, std=0.02)
model.to(choose_device("auto")[0])
tokenizer = CharTokenizer("".join(map(chr, range(40, 105))))
options = SampleConfig(length=20 + length, num_samples=sequences, seed=1)
pieces = stream_pieces(model, tokenizer, tokenizer.encode("0"), options)
for _ in range(20):
    next(pieces)
start = time.perf_counter()
count = sum(1 for _ in pieces)
print(count * sequences / (time.perf_counter() - start))
"""
NANOGPT = """
import sys, time
import torch
from model import GPT, GPTConfig

sequences, length, block_size = map(int, sys.argv[1:])
torch.manual_seed(0)
config = GPTConfig(block_size=block_size, vocab_size=65, n_layer=4, n_head=4, n_embd=128,
                   dropout=0.0, bias=False)
model = GPT(config).eval()
prompt = torch.zeros(sequences, 1, dtype=torch.long)
with torch.no_grad():
    model.generate(prompt, 20, temperature=0.8, top_k=200)
    start = time.perf_counter()
    model.generate(prompt, length, temperature=0.8, top_k=200)
print(sequences * length / (time.perf_counter() - start))
"""
LLAMA = """
import sys, tempfile, time
from pathlib import Path
import torch
from chargpt.config import Config
from chargpt.export.gguf import LlamaRuntime, write_gguf
from chargpt.models import build_model
from chargpt.store.run import Run
from chargpt.store.checkpoint import RunState
from chargpt.text.tokenizer import CharTokenizer

threads, length, block_size = map(int, sys.argv[1:])
torch.manual_seed(0)
config = Config().with_values(
    {"model.n_layer": 4, "model.n_head": 2, "model.n_embd": 128, "model.block_size": block_size}
)
model = build_model(config.model, 65)
torch.nn.init.normal_(model.head.weight, std=0.02)
tokenizer = CharTokenizer("".join(map(chr, range(40, 105))))
run = Run(Path("run"), config, tokenizer, model, 1, RunState(1))
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.gguf"
    write_gguf(path, run, model, "f32")
    reader = LlamaRuntime(path, threads, is_exact=False)

def complete(length):
    answer = reader.post(
        "completion", prompt=[0], n_predict=length, temperature=0.8, top_k=0, top_p=1, min_p=0
    )
    assert answer["tokens_predicted"] == length, answer["stop_type"]

complete(20)
start = time.perf_counter()
complete(length)
print(length / (time.perf_counter() - start))
"""
CASES = {  # sequences, characters of each, block size
    "1 sequence, 2,000 characters": (1, 2_000, 128),
    "1 sequence": (1, 20_000, 128),
    "16 sequences": (16, 5_000, 128),
    "64 sequences": (64, 2_000, 128),
    "64 sequences, block 64": (64, 2_000, 64),
}
NANOGPT_CASES = {"nanoGPT, 1 sequence": (1, 500, 64), "nanoGPT, 64 sequences": (64, 100, 64)}
LLAMA_CASES = {  # threads, characters, block size: llama.cpp has no smaller context
    "1 sequence, 2,000 characters, block 256": (1, 2_000, 256),
    "llama.cpp, 1 sequence, 1 thread": (1, 2_000, 256),
    "llama.cpp, 1 sequence, 2 threads": (2, 2_000, 256),
}


def measure(program: str, case: tuple[int, int, int], nanogpt: Path | None = None) -> float:
    """Run a program in a process of its own; return its characters per second.

    Args:
        program: CHARGPT, NANOGPT or LLAMA.
        case: sequences (of llama.cpp threads), characters of each, block size.
        nanogpt: nanoGPT's checkout, to import from.
    """
    paths = [str(nanogpt), *sys.path[1:]] if nanogpt else sys.path[1:]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, case)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure every case in turn and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--llama", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--length", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    nanogpt = arguments.nanogpt.absolute() if arguments.nanogpt else None
    speeds: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        for name, (sequences, length, block_size) in CASES.items():
            case = (sequences, min(length, arguments.length), block_size)
            speeds.setdefault(name, []).append(measure(CHARGPT, case))
            save_record(record_of(speeds), arguments.json)
        for name, case in LLAMA_CASES.items() if arguments.llama else ():
            program = LLAMA if name.startswith("llama.cpp") else CHARGPT
            speeds.setdefault(name, []).append(measure(program, case))
            save_record(record_of(speeds), arguments.json)
        for name, case in NANOGPT_CASES.items() if nanogpt else ():
            speeds.setdefault(name, []).append(measure(NANOGPT, case, nanogpt))
            save_record(record_of(speeds), arguments.json)
    print(json.dumps(record_of(speeds), indent=2))


def record_of(speeds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the record of the measurements so far."""
    medians = {name: round(statistics.median(values)) for name, values in speeds.items()}
    record = {
        **provenance(),
        "characters_per_second": medians,
        "all": {name: [round(value) for value in values] for name, values in speeds.items()},
    }
    peers = {name: f"nanoGPT, {name.partition(',')[0]}" for name in medians}
    times = {
        name: round(medians[name] / medians[peer], 1)
        for name, peer in peers.items()
        if peer in medians
    }
    return record | {"times_nanogpt": times} if times else record


if __name__ == "__main__":
    main()
