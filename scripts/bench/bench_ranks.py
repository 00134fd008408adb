"""Benchmark of training steps: one process with two threads against two ranks with one each.

    python scripts/bench/bench_ranks.py TEXT [--repeats 3] [--json benchmarks/ranks-speed.json]

Each measurement is a whole `chargpt train` command, in turn, without validation and samples; the
characters per second are those of the steps after the tenth.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from record import provenance, write_record

from chargpt.store.folder import RunFolder

CHARGPT = ["-m", "chargpt", "train"]
WAYS = {
    "one process, two threads": [*CHARGPT, "-s", "threads=2"],
    "two ranks, one thread each": [
        *("-m", "torch.distributed.run", "--nproc-per-node=2"),
        *(*CHARGPT, "-s", "threads=1"),
    ],
}
SIZES = {"4 x 128, 16 x 128 per step": (4, 128, 128), "5 x 192, 16 x 256 per step": (5, 192, 256)}
BATCH_SIZE, STEPS, WARMUP = 16, 150, 10


def characters_per_second(text: Path, way: list[str], size: tuple[int, int, int]) -> float:
    """Train once and return the speed."""
    n_layer, n_embd, block_size = size
    settings = {
        "model.n_layer": n_layer,
        "model.n_embd": n_embd,
        "model.n_head": n_embd // 32,
        "model.block_size": block_size,
        "train.batch_size": BATCH_SIZE,
        "train.max_steps": STEPS,
        "train.evaluate_every": STEPS,
        "train.save_every": STEPS,
        "train.sample_every": 0,
        "device": "cpu",
        "dtype": "bfloat16",
    }
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = [*way, str(text), "--out", str(run)]
        words += [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        # the metrics are written every ten steps, before a validation
        ends = {r["step"]: r["seconds"] for r in RunFolder(run).metrics.records() if "loss" in r}
    return BATCH_SIZE * block_size * (STEPS - WARMUP) / float(ends[STEPS] - ends[WARMUP])


def main() -> None:
    """Measure every size and way in turn and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    speeds: dict[str, dict[str, list[int]]] = {}
    for name, size in SIZES.items():
        speeds[name] = {way: [] for way in WAYS}
        for way in [*WAYS] * arguments.repeats:
            speed = characters_per_second(arguments.text.absolute(), WAYS[way], size)
            speeds[name][way].append(round(speed))
            print(name, way, speeds[name][way], flush=True)
    write_record({**provenance(), "characters_per_second": speeds}, arguments.json)


if __name__ == "__main__":
    main()
