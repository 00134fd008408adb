"""Benchmark of mixtures: the n-gram baseline, GPT, and both together, by text, budget and seed.

    python scripts/bench/bench_mixture.py TEXT [TEXT ...] [--budgets 10s 80s 3m] [--seeds 1 2 3]
        [--before CHECKOUT] [--json benchmarks/mixture-80s.json]

Each case is a whole `chargpt train --budget` process; its run is scored by `chargpt compare`, all
rows on the same characters of the validation split. `--before` also trains and scores a GPT with
the package in another checkout: for odd seeds afterwards, for even ones first. The record is
written after each case.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import provenance, save_record, write_record

CHARGPT = [sys.executable, "-m", "chargpt"]
SHOWN = ("6-gram", "gpt", "gpt + n-grams", "gpt before")


def chargpt(*words: str, checkout: Path | None = None) -> str:
    """Run a command of this package, or of the one in another checkout; return what it prints."""
    env = dict(os.environ)
    if checkout is not None:
        env["PYTHONPATH"] = str(checkout)
    done = subprocess.run([*CHARGPT, *words], check=True, capture_output=True, text=True, env=env)
    return done.stdout


def losses_of(run: Path, checkout: Path | None = None) -> dict[str, float]:
    """Return the losses of a run and its baselines in nats per character, protocol blocks."""
    compared = json.loads(chargpt("compare", str(run), "--json", checkout=checkout))
    losses: dict[str, float] = dict(compared.get("baselines", {}))
    for row in compared["rows"]:
        if row["run"] is None:  # a baseline
            continue
        name = "gpt + n-grams" if row["model"].endswith("-grams") else "gpt"
        losses[name] = row["nats_per_char"]
    return losses


def steps_of(run: Path, checkout: Path | None = None) -> int:
    """Return the number of steps of a run's best checkpoint."""
    steps: int = json.loads(chargpt("evaluate", str(run), "--json", checkout=checkout))["step"]
    return steps


def measure(text: Path, budget: str, seed: int, before: Path | None) -> dict[str, Any]:
    """Train and score one case; which version trains first alternates with the seed."""
    case: dict[str, Any] = {"text": text.stem, "budget": budget, "seed": seed}
    versions = {"": None} if before is None else {"": None, " before": before}
    with tempfile.TemporaryDirectory() as folder:
        for suffix, checkout in sorted(versions.items(), reverse=seed % 2 == 0):
            run = Path(folder) / f"run{suffix}"
            words = ["--budget", budget, "-s", f"seed={seed}", "--out", str(run)]
            start = time.perf_counter()
            chargpt("train", str(text), *words, checkout=checkout)
            case[f"seconds{suffix}"] = round(time.perf_counter() - start, 2)
            case[f"steps{suffix}"] = steps_of(run, checkout)
            losses = losses_of(run, checkout)
            shown = {"gpt before": losses["gpt"]} if checkout else losses
            case |= {name: round(shown[name], 4) for name in SHOWN if name in shown}
    return case


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean losses of each text and budget."""
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["text"], row["budget"]), []).append(row)
    return [
        {
            "text": text,
            "budget": budget,
            "seeds": len(same),
            **{
                name: round(statistics.mean(row[name] for row in same), 4)
                for name in SHOWN
                if name in same[0]
            },
        }
        for (text, budget), same in cases.items()
    ]


def main() -> None:
    """Measure every case and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--budgets", nargs="+", default=["10s", "80s", "3m"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--before", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for budget in args.budgets:
        for text in args.texts:
            for seed in args.seeds:
                rows.append(measure(text.absolute(), budget, seed, args.before))
                print(rows[-1], file=sys.stderr, flush=True)
                save_record({**provenance(), "means": means(rows), "rows": rows}, args.json)
    write_record({**provenance(), "means": means(rows), "rows": rows}, args.json)


if __name__ == "__main__":
    main()
