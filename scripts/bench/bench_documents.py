"""Benchmark of documents: a list of names, learnt and sampled whole, beside makemore's transformer.

    python scripts/bench/bench_documents.py NAMES [--train 5000] [--budget 1m] [--samples 1000]
        [--seeds 1 2 3] [--makemore CHECKOUT] [--json benchmarks/documents.json]

NAMES holds one name a line. From its lines, shuffled, the first are trained on, the next thousand
are held out. Both models get the same time; makemore runs its default recipe with as many data
workers as it asks for and its best saved model is taken. Of the samples is counted: the
well-formed (letters only, no longer than the longest name), the new (not trained on), the distinct,
and of the new ones those that are on the rest of the list: real names that were never seen. The
loss is that of the held-out names in nats per character, line ends included.
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import provenance, save_record, write_record

import chargpt
from chargpt.training.deadline import parse_duration

HELD_OUT = 1000
MAKEMORE_TRAIN = """
import runpy, sys, types
module = types.ModuleType("torch.utils.tensorboard")
silent = types.SimpleNamespace(add_scalar=lambda *a: None, flush=lambda: None, close=lambda: None)
module.SummaryWriter = lambda **k: silent
sys.modules["torch.utils.tensorboard"] = module
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MAKEMORE_SAMPLE = """
import json, sys, types
sys.modules["torch.utils.tensorboard"] = types.ModuleType("torch.utils.tensorboard")
sys.modules["torch.utils.tensorboard"].SummaryWriter = None
folder, trained, held_out, work, count, seed = sys.argv[1:]
sys.path.insert(0, folder)
import torch
from makemore import CharDataset, ModelConfig, Transformer, generate
words, unseen = open(trained).read().split(), open(held_out).read().split()
longest, letters = max(map(len, words)), sorted(set("".join(words)))
model = Transformer(ModelConfig(vocab_size=len(letters) + 1, block_size=longest + 1))
model.load_state_dict(torch.load(work + "/model.pt"))
model.eval()
torch.manual_seed(int(seed))
with torch.inference_mode():
    rows = generate(model, torch.zeros(int(count), 1, dtype=torch.long), longest, do_sample=True)
    unseen = [word for word in unseen if len(word) <= longest and set(word) <= set(letters)]
    data = CharDataset(unseen, letters, longest)
    x, y = zip(*(data[i] for i in range(len(data))))
    loss = model(torch.stack(x), torch.stack(y))[1].item()
names = [row[: row.index(0)] if 0 in row else row for row in rows[:, 1:].tolist()]
print(json.dumps({"loss": loss, "samples": ["".join(letters[i - 1] for i in n) for n in names]}))
"""


def fractions(samples: list[str], trained: list[str], rest: set[str]) -> dict[str, float]:
    """Return which fractions of the samples are well-formed, new, distinct, all three, and real."""
    longest, letters, known = max(map(len, trained)), set("".join(trained)), set(trained)
    formed = [bool(name) and set(name) <= letters and len(name) <= longest for name in samples]
    new = [name not in known for name in samples]
    good = {name for name, ok, is_new in zip(samples, formed, new, strict=True) if ok and is_new}
    n = len(samples)
    found = {
        "well_formed": sum(formed) / n,
        "new": sum(new) / n,
        "distinct": len(set(samples)) / n,
        "all_three": len(good) / n,
        "real_of_the_new": sum(name in rest for name in good) / max(1, len(good)),
    }
    return {name: round(value, 4) for name, value in found.items()}


def run_chargpt(args: argparse.Namespace, folder: Path, seed: int) -> dict[str, Any]:
    """Train on the list with a budget, and sample."""
    command = [sys.executable, "-m", "chargpt", "train", str(folder / "names.txt"), "--json"]
    command += ["-s", "text.documents=lines", "--budget", args.budget, "--seed", str(seed)]
    command += ["--out", str(folder / f"run-{seed}")]
    subprocess.run(command, check=True, capture_output=True)
    run = chargpt.load_run(folder / f"run-{seed}", device="cpu")
    samples = chargpt.sample(run, num_samples=args.samples, temperature=1.0, seed=seed, prompt="")
    loss = chargpt.evaluate(run, path=folder / "held_out.txt").nats_per_char
    return {"loss": round(loss, 4), "samples": samples}


def run_makemore(args: argparse.Namespace, folder: Path, seed: int) -> dict[str, Any]:
    """Train makemore's transformer for the same time, and sample."""
    work = str(folder / f"makemore-{seed}")
    script = [str(args.makemore / "makemore.py"), "-i", str(folder / "names.txt"), "-o", work]
    command = [sys.executable, "-c", MAKEMORE_TRAIN, *script, "--seed", str(seed)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, capture_output=True, timeout=parse_duration(args.budget))
    files = [str(args.makemore), str(folder / "names.txt"), str(folder / "held_out.txt"), work]
    command = [sys.executable, "-c", MAKEMORE_SAMPLE, *files, str(args.samples), str(seed)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"loss": round(found["loss"], 4), "samples": found["samples"]}


def main() -> None:
    """Measure every seed and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", type=Path)
    parser.add_argument("--train", type=int, default=5000)
    parser.add_argument("--budget", default="1m")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--makemore", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = sorted(set(args.names.read_text(encoding="utf-8").split()))
    random.Random(0).shuffle(names)
    trained, held_out = names[: args.train], names[args.train :][:HELD_OUT]
    models = {"chargpt": run_chargpt} | ({"makemore": run_makemore} if args.makemore else {})
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "names.txt").write_text("\n".join(trained) + "\n", encoding="utf-8")
        (folder / "held_out.txt").write_text("\n".join(held_out) + "\n", encoding="utf-8")
        for seed in args.seeds:
            for model, measure in models.items():
                found = measure(args, folder, seed)
                samples = found.pop("samples")
                counted = fractions(samples, trained, set(names[args.train :]))
                rows.append({"model": model, "seed": seed, **found, **counted})
                rows[-1]["examples"] = samples[:10]
                print(rows[-1], file=sys.stderr, flush=True)
                save_record({**provenance(), "rows": rows}, args.json)
    means = {
        model: {
            key: round(statistics.mean(r[key] for r in rows if r["model"] == model), 4)
            for key in ("loss", "well_formed", "new", "distinct", "all_three", "real_of_the_new")
        }
        for model in models
    }
    write_record({**provenance(), "names": len(trained), "means": means, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
