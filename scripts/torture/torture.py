"""Torture test: run chargpt under fault injection, signals, corruption and invalid input.

    python scripts/torture/torture.py [--fraction 1.0] [--rows sigkill,file_errors] [--seed 0]
        [--jobs 2] [--work DIR] [--json benchmarks/torture.json]

Each case is determined by the seed and its index. Results are logged in DIR, so that an interrupted
torture test continues when it is started again with the same DIR. It needs `fork` (Linux or macOS).
The exit code is 1 if any case failed.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

# a fork does not copy threads, and tiny models are not faster with two
os.environ["OMP_NUM_THREADS"] = "1"
REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(REPOSITORY / "scripts"), str(REPOSITORY)]

from bench.record import provenance  # noqa: E402  found through the path above


@dataclass(frozen=True)
class Row:
    """A test function of a module of `fault_injection`, its number of cases, what it verifies."""

    module: str
    name: str
    count: int
    claim: str


ROWS = (
    Row(
        "interruption",
        "sigkill",
        200,
        "SIGKILL: no completed save lost, bitwise identical on resume",
    ),
    Row("disk", "file_errors", 200, "failing file operation: earlier saves intact, one message"),
    Row("disk", "disk_full", 10, "full file system (ENOSPC): reported, saves intact, resumable"),
    Row("corruption", "corrupt_checkpoint", 1000, "corrupted or hostile checkpoints: rejected"),
    Row("reading", "read_errors", 300, "a read, stat or open that fails once: nothing is lost"),
    Row(
        "reading",
        "damaged_file",
        300,
        "a file damaged, then resume: best checkpoint, metrics remain",
    ),
    Row("reading", "damaged_text", 70, "the text of a run damaged: one sentence, all else remains"),
    Row(
        "reading",
        "read_beside_writer",
        50,
        "100 reads beside a saving run: no intact save called damaged",
    ),
    Row("ownership", "foreign_files", 50, "foreign files under --force and --resume: untouched"),
    Row("ownership", "kill_start", 80, "SIGKILL while a run is created: the same command works"),
    Row("ownership", "kill_replacement", 50, "SIGKILL during --force: the old run stays whole"),
    Row("ownership", "special_target", 20, "outputs to devices, links, pipes: written through"),
    Row("attack", "links", 228, "a link or pipe in a run's folder: every command refuses it"),
    Row("attack", "bit_flips", 1000, "a bit of any file flipped: seen, or the same numbers"),
    Row("attack", "moving_folder", 20, "a run renamed or deleted in training: saved, others whole"),
    Row("attack", "kept_beside_writer", 50, "compress --keep beside a training: decompresses"),
    Row("strings", "hostile_string", 200, "escape sequences in every name: none is printed"),
    Row("strings", "encoding", 40, "locales and encodings: correct, or a one-sentence error"),
    Row(
        "training",
        "resume_at",
        300,
        "resume from every step of six kinds of run: bitwise identical",
    ),
    Row("training", "non_finite", 60, "NaN or infinity: stop before the update, or roll back"),
    Row("interruption", "send_signal", 60, "INT, TERM, HUP: saved, exit 128 + signal within 5 s"),
    Row("ranks", "resume_ranks", 30, "two ranks resumed from every step: bitwise identical"),
    Row("ranks", "change_world_size", 19, "world sizes 1, 2, 4, resumed as 1, 2, 4: within 1e-5"),
    Row("ranks", "signal_ranks", 60, "signals to one or both of two ranks: saved, as for one"),
    Row("ranks", "lose_rank", 40, "a rank killed, 30 under --max-restarts: bitwise identical"),
    Row("ranks", "lose_host", 36, "one of two hosts' ranks killed, a link cut: bitwise identical"),
    Row("inputs", "invalid_text", 150, "unusable texts: a one-sentence error, exit code 2"),
    Row("inputs", "random_config", 10_000, "random configs: accepted, or rejected with a message"),
    Row("inputs", "misspelled_key", 100, "misspelled config keys: the correct key suggested"),
    Row("inputs", "round_trip", 10_000, "tokenizer round trip: fit, encode, decode, save, load"),
    Row(
        "inputs",
        "unseen_characters",
        500,
        "unseen characters in prompts: treated as --unknown says",
    ),
    Row("corruption", "golden", 1, "runs saved by earlier releases: same logits"),
)


def main() -> None:
    """Run the rows that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fraction", type=float, default=1.0, help="fraction of the cases")
    parser.add_argument("--rows", type=lambda names: names.split(","), default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="rows run in parallel")
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    work = (args.work or Path(tempfile.mkdtemp(prefix="torture-"))).absolute()
    work.mkdir(parents=True, exist_ok=True)
    rows = [row for row in ROWS if args.rows is None or row.name in args.rows]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, spawn, initializer=restore_signal_handlers) as pool:
        futures = [pool.submit(run_row, row, args.fraction, args.seed, work) for row in rows]
        results = [future.result() for future in futures]
    failed = sum(len(result["failed"]) for result in results)
    if args.json is not None:
        report = {**provenance(), "fraction": args.fraction, "seed": args.seed, "rows": results}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if failed else 0)


def restore_signal_handlers() -> None:
    """Restore the default handlers, which a parent such as nohup may have disabled."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def run_row(row: Row, fraction: float, seed: int, work: Path) -> dict[str, Any]:
    """Run a fraction of a row's cases, except those already in its log; return the summary."""
    case = getattr(importlib.import_module(f"fault_injection.{row.module}"), row.name)
    folder = work / row.name
    folder.mkdir(exist_ok=True)
    log = folder / "cases.jsonl"
    results = {}
    if log.exists():
        results = {entry["case"]: entry for entry in map(json.loads, log.read_text().splitlines())}
    selected = select_cases(row, fraction, seed)
    last_progress = time.monotonic()
    for index in selected:
        if index in results:
            continue
        start = time.monotonic()
        try:
            error = case(folder, index, Random(f"{seed}/{row.name}/{index}"))
        except Exception:  # an unexpected exception is a failed case
            error = traceback.format_exc()
        seconds = round(time.monotonic() - start, 3)
        results[index] = {"case": index, "error": error, "seconds": seconds}
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps(results[index]) + "\n")
        if sys.stderr.isatty() or time.monotonic() - last_progress > 30:
            last_progress = time.monotonic()
            print(f"{row.name}: case {index + 1} of {row.count}", file=sys.stderr)
    return summarize(row, [results[index] for index in selected])


def select_cases(row: Row, fraction: float, seed: int) -> list[int]:
    """Return the indices of a random fraction of a row's cases, at least one."""
    count = max(1, round(row.count * fraction))
    if row.name == "sigkill":  # each case resumes the run that the previous one killed
        return list(range(count))
    return sorted(Random(f"{seed}/{row.name}").sample(range(row.count), count))


def summarize(row: Row, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Print and return the number of passed, skipped and failed cases."""
    skipped = [entry for entry in results if (entry["error"] or "").startswith("skipped")]
    failed = [entry for entry in results if entry["error"] and entry not in skipped]
    seconds = round(sum(entry["seconds"] for entry in results), 1)
    passed = len(results) - len(failed) - len(skipped)
    print(f"{row.name:18} {passed:6,} of {len(results):6,} passed in {seconds:7.1f} s: {row.claim}")
    for entry in (*failed[:5], *skipped[:1]):
        print(f"    case {entry['case']}: {entry['error']}")
    return {
        "row": row.name,
        "claim": row.claim,
        "cases": len(results),
        "passed": passed,
        "skipped": len(skipped),
        "failed": failed,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
