"""Benchmark of the open vocabulary: rare characters as bytes, against a token for every character.

    python scripts/bench/bench_vocabulary.py TEXT [--budget 60s] [--seeds 1 2 3]
        [--settings text.rare=keep ""] [--json benchmarks/vocabulary.json]

Each case is a whole `chargpt train --budget` process with some settings; "" is the default. Losses
are per character over characters spread evenly over the validation split, protocol blocks, none
left out. With the last run of the default, random Unicode strings are encoded and decoded, and
samples are drawn and searched for broken characters.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import provenance, save_record, write_record

from chargpt.inference.evaluation import evaluate_tokens
from chargpt.inference.generation import sample
from chargpt.store.run import Run, load_run
from chargpt.text.display import REPLACEMENT

SCORED = 200_000  # characters
N_STRINGS, N_SAMPLES, LENGTH = 10_000, 1_000, 200


def train(text: Path, budget: str, seed: int, settings: str, folder: str) -> tuple[Run, float]:
    """Train with some settings; return the run and the seconds of the whole command."""
    words = ["train", str(text), "--budget", budget, "--seed", str(seed), "--out", folder, "--json"]
    words += [word for setting in settings.split() for word in ("-s", setting)]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "chargpt", *words], check=True, capture_output=True)
    return load_run(folder), time.perf_counter() - start


def measure(run: Run) -> dict[str, Any]:
    """Return size, speed and loss of a run."""
    corpus, config = run.corpus(), run.config
    n_tokens = run.step * config.train.batch_size * config.model.block_size
    result = evaluate_tokens(run.model, corpus.split("val"), max_tokens=SCORED)
    return {
        "vocabulary": run.model.vocab_size,
        "model": f"{config.model.n_layer} x {config.model.n_embd}",
        "parameters": run.model.num_parameters(),
        "steps": run.step,
        "chars_per_second": round(n_tokens * corpus.characters_per_token / run.state.seconds),
        "nats_per_char": round(result.nats_per_char, 4),
        "standard_error": round(result.standard_error, 4),
    }


def random_strings(count: int) -> list[str]:
    """Return strings of any code points but surrogates."""
    draw = random.Random(0)
    points = [*range(0xD800), *range(0xE000, 0x110000)]
    return ["".join(map(chr, draw.choices(points, k=draw.randrange(100)))) for _ in range(count)]


def check(run: Run) -> dict[str, int]:
    """Return how many random strings come back exactly, and how many samples are broken."""
    strings = random_strings(N_STRINGS)
    exact = sum(run.tokenizer.decode(run.tokenizer.encode(each)) == each for each in strings)
    texts = sample(run, num_samples=N_SAMPLES, length=LENGTH, seed=1, temperature=1.5, prompt="")
    known = REPLACEMENT in run.tokenizer.characters
    broken = sum(len(text) != LENGTH or (REPLACEMENT in text and not known) for text in texts)
    rare = sum(character not in run.tokenizer.characters for text in texts for character in text)
    counts = {"strings": N_STRINGS, "exact": exact, "samples": N_SAMPLES, "broken": broken}
    return {**counts, "rare_characters_sampled": rare}


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean loss and speed of each setting."""
    settings = dict.fromkeys(row["setting"] for row in rows)
    return [
        {
            "setting": setting,
            **{
                name: round(statistics.mean(r[name] for r in rows if r["setting"] == setting), 4)
                for name in ("nats_per_char", "chars_per_second")
            },
        }
        for setting in settings
    ]


def main() -> None:
    """Measure every case and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--settings", nargs="+", default=["text.rare=keep", ""])
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    checked: dict[str, int] = {}
    for seed in args.seeds:
        for setting in args.settings:
            with tempfile.TemporaryDirectory() as folder:
                run, seconds = train(args.text, args.budget, seed, setting, f"{folder}/run")
                case = {"setting": setting or "default", "seed": seed, "seconds": round(seconds, 1)}
                rows.append({**case, **measure(run)})
                if not setting and seed == args.seeds[-1]:
                    checked = check(run)
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            found = {"text": args.text.name, "bytes": args.text.stat().st_size}
            record = {**provenance(), **found, "budget": args.budget, "means": means(rows)}
            save_record({**record, "checked": checked, "rows": rows}, args.json)
    write_record({**record, "checked": checked, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
