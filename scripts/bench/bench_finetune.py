"""Benchmark of fine-tuning: a run of one text as the start for another, against runs from scratch.

    python scripts/bench/bench_finetune.py OLD:NEW [OLD:NEW ...] [--long 80s] [--short 20s]
        [--seeds 1 2 3] [--json benchmarks/finetune.json]

For each pair of texts and seed: a run of OLD for the long budget; then on NEW, from that run for
the short budget, from scratch for the short one, and from scratch for both together. Losses are
those of the validation splits in nats per character, protocol blocks, each by the run's own
vocabulary; a run is scored on the characters of OLD that it knows, whose fraction is given.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import provenance, save_record, write_record

import chargpt
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.store.run import Run
from chargpt.training.deadline import parse_duration

SCORED = 100_000  # characters of a split


def train(text: str, budget: str, seed: int, out: Path, *more: str) -> Run:
    """Train a run and return it."""
    words = ["train", text, "--budget", budget, "--seed", str(seed), "--out", str(out), *more]
    subprocess.run([sys.executable, "-m", "chargpt", *words], check=True, capture_output=True)
    return chargpt.load_run(out, device="cpu")


def loss(run: Run, text: str) -> float:
    """Return the loss on the characters of a text that a run knows."""
    tokens = run.tokenizer.encode(text, "skip")
    return round(evaluate_tokens(run.model, tokens, max_tokens=SCORED).nats_per_char, 4)


def measure(pair: str, args: argparse.Namespace, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Train and score the four runs of a pair of texts."""
    old, new = pair.split(":")
    seconds = parse_duration(args.long) + parse_duration(args.short)
    base = train(old, args.long, seed, folder / "base")
    runs = {
        "base run": base,
        f"fine-tuned, {args.short}": train(
            new, args.short, seed, folder / "tuned", "--from", str(folder / "base")
        ),
        f"from scratch, {args.short}": train(new, args.short, seed, folder / "short"),
        f"from scratch, {seconds:g}s": train(new, f"{seconds:g}s", seed, folder / "long"),
    }
    splits = {
        name: run.tokenizer.decode(run.corpus().split("val"))
        for name, run in (("old", base), ("new", runs[f"from scratch, {args.short}"]))
    }
    return [
        {
            "texts": f"{Path(old).stem}, {Path(new).stem}",
            "seed": seed,
            "run": name,
            "new": loss(run, splits["new"]),
            "new_known": round(known(run, splits["new"]), 4),
            "old": loss(run, splits["old"]),
            "old_known": round(known(run, splits["old"]), 4),
            "vocabulary": run.model.vocab_size,
            "parameters": run.model.num_parameters(),
        }
        for name, run in runs.items()
    ]


def known(run: Run, text: str) -> float:
    """Return the fraction of a text's characters that a run knows."""
    return 1 - len(run.tokenizer.find_unknown(text)) / len(text)


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean losses of each pair of texts and kind of run."""
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["texts"], row["run"]), []).append(row)
    return [
        {
            "texts": texts,
            "run": run,
            **{key: round(statistics.mean(r[key] for r in same), 4) for key in ("new", "old")},
        }
        for (texts, run), same in cases.items()
    ]


def main() -> None:
    """Measure every pair and seed, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="+")
    parser.add_argument("--long", default="80s")
    parser.add_argument("--short", default="20s")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        for pair in args.pairs:
            with tempfile.TemporaryDirectory() as folder:
                rows += measure(pair, args, seed, Path(folder))
            print(*rows[-4:], sep="\n", file=sys.stderr, flush=True)
            save_record({**provenance(), "means": means(rows), "rows": rows}, args.json)
    write_record({**provenance(), "means": means(rows), "rows": rows}, args.json)


if __name__ == "__main__":
    main()
