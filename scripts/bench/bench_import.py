"""Loss of a nanoGPT checkpoint by nanoGPT's own code, and of the run imported from it.

    python scripts/bench/bench_import.py --nanogpt DIR CKPT [CKPT ...]
        [--json benchmarks/import.json]

Both score the non-overlapping blocks of the validation split of nanoGPT's `data/shakespeare_char`,
which its `prepare.py` has made.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import provenance, write_record

from chargpt import evaluate
from chargpt.imports import import_nanogpt
from chargpt.store.run import load_run

NANOGPT = """
import sys
import numpy as np
import torch
from model import GPT, GPTConfig

saved = torch.load(sys.argv[1], map_location="cpu")
model = GPT(GPTConfig(**saved["model_args"])).eval()
model.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in saved["model"].items()})
tokens = torch.from_numpy(np.fromfile(sys.argv[2], dtype=np.uint16).astype(np.int64))
size, total = saved["model_args"]["block_size"], 0.0
with torch.no_grad():
    for start in range(0, len(tokens) - 1, size):
        targets = tokens[start + 1 : start + 1 + size]
        _, loss = model(tokens[None, start : start + len(targets)], targets[None])
        total += loss.item() * len(targets)
print(total / (len(tokens) - 1))
"""


def measure(nanogpt: Path, checkpoint: Path) -> dict[str, Any]:
    """Return both losses of one checkpoint."""
    data = nanogpt / "data" / "shakespeare_char"
    done = subprocess.run(
        [sys.executable, "-c", NANOGPT, checkpoint, data / "val.bin"],
        env={**os.environ, "PYTHONPATH": str(nanogpt)},
        capture_output=True,
        text=True,
        check=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        text = data / "input.txt"
        run = load_run(import_nanogpt(checkpoint, data / "meta.pkl", Path(folder) / "run", text))
        found = evaluate(run)
    model = run.config.model
    return {
        "model": f"{model.n_layer} x {model.n_embd}, block {model.block_size}",
        "steps": run.step,
        "characters": found.characters,
        "nanoGPT": float(done.stdout.split()[-1]),
        "chargpt": found.nats_per_char,
    }


def main() -> None:
    """Measure every checkpoint and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--nanogpt", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measure(args.nanogpt.absolute(), path.absolute()) for path in args.checkpoints]
    write_record({**provenance(), "rows": rows}, args.json)


if __name__ == "__main__":
    main()
