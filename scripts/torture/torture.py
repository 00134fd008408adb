"""Harm training runs in every way that a disk, a system, a user or an enemy can.

    python scripts/torture/torture.py [--share 1.0] [--rows kill,damage] [--seed 0]
        [--jobs 2] [--work DIR] [--json benchmarks/torture.json]

Every case is decided by the seed and its number. What is done is noted in DIR, so that a torture
that was stopped goes on where it was when it is started again with the same DIR. It needs `fork`,
so Linux or macOS. The exit code is 1 if any case failed.
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

# forked processes must not find another's threads; and tiny models are no faster on two
os.environ["OMP_NUM_THREADS"] = "1"
REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(REPOSITORY / "scripts"), str(REPOSITORY)]


@dataclass(frozen=True)
class Row:
    """One kind of harm, in a module of `harm`, done so often, and what passing all claims."""

    module: str
    name: str
    count: int
    claim: str


ROWS = (
    Row(
        "interruption",
        "kill",
        200,
        "kill -9: no acknowledged save is lost, the resumed run has the same bits",
    ),
    Row("disk", "fail_files", 200, "a failing file operation: earlier saves intact, one sentence"),
    Row("disk", "small_disk", 10, "a file system that fills up: told, kept, gone on with"),
    Row(
        "corruption", "damage", 1000, "damaged and hostile checkpoints: refused aloud, no code run"
    ),
    Row("training", "resume_at", 300, "resumed at every step of six kinds of run: the same bits"),
    Row("training", "go_bad", 60, "NaN and infinity: stopped before the update, or rolled back"),
    Row("interruption", "send_signal", 60, "INT, TERM and HUP: saved, exit 128 + n within 5 s"),
    Row("ranks", "resume_ranks", 30, "two processes resumed at every step: the same bits"),
    Row("ranks", "change_world", 12, "1, 2 and 4 processes in turn: losses within 1e-5"),
    Row("ranks", "signal_ranks", 60, "signals to one or both of two processes: as to one alone"),
    Row("ranks", "lose_rank", 30, "one of two killed under --max-restarts: completes, same bits"),
    Row("inputs", "bad_text", 150, "texts that are none: one sentence, exit 2"),
    Row("inputs", "any_config", 10_000, "any settings: taken or refused in words"),
    Row("inputs", "typo", 100, "misspelt settings: the right one suggested"),
    Row("inputs", "round_trip", 10_000, "fit, encode, decode, save, load: the text comes back"),
    Row("inputs", "unseen_prompt", 500, "prompts of unseen characters: refused, or as asked"),
    Row("corruption", "golden", 1, "runs that earlier releases saved: the same logits"),
)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the full counts")
    parser.add_argument("--rows", type=lambda names: names.split(","), default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="rows done at once")
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    work = (given.work or Path(tempfile.mkdtemp(prefix="torture-"))).absolute()
    work.mkdir(parents=True, exist_ok=True)
    os.environ["CHARGPT_CACHE"] = str(work / "cache")
    rows = [row for row in ROWS if given.rows is None or row.name in given.rows]
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, fresh, initializer=heed_signals) as pool:
        done = [pool.submit(torture, row, given.share, given.seed, work) for row in rows]
        results = [future.result() for future in done]
    failed = sum(len(result["failed"]) for result in results)
    if given.json is not None:
        from bench.record import facts

        report = {**facts(), "share": given.share, "seed": given.seed, "rows": results}
        given.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if failed else 0)


def heed_signals() -> None:
    """Take signals as a process does that was started by hand, even where ours are ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def torture(row: Row, share: float, seed: int, work: Path) -> dict[str, Any]:
    """Do a share of a row's cases, but for those done already; return the summary."""
    case = getattr(importlib.import_module(f"fault_injection.{row.module}"), row.name)
    place = work / row.name
    place.mkdir(exist_ok=True)
    notes = place / "cases.jsonl"
    done = {}
    if notes.exists():
        done = {n["case"]: n for n in map(json.loads, notes.read_text().splitlines())}
    count = max(1, round(row.count * share))
    # a share is a random one, so that it holds cases of all kinds
    chosen = sorted(Random(f"{seed}/{row.name}").sample(range(row.count), count))
    if row.name == "kill":
        chosen = list(range(count))  # each goes on with what the one before has left
    start = time.monotonic()
    for index in chosen:
        if index in done:
            continue
        began = time.monotonic()
        try:
            wrong = case(place, index, Random(f"{seed}/{row.name}/{index}"))
        except Exception:  # what nobody foresaw is what this is here to find
            wrong = traceback.format_exc()
        done[index] = {"case": index, "wrong": wrong, "seconds": round(time.monotonic() - began, 3)}
        with open(notes, "a", encoding="utf-8") as file:
            file.write(json.dumps(done[index]) + "\n")
        if sys.stderr.isatty() or time.monotonic() - start > 30:
            start = time.monotonic()
            print(f"{row.name}: case {index + 1} of {row.count}", file=sys.stderr)
    taken = [done[index] for index in chosen]
    skipped = [n for n in taken if (n["wrong"] or "").startswith("skipped")]
    failed = [n for n in taken if n["wrong"] and n not in skipped]
    seconds = round(sum(n["seconds"] for n in taken), 1)
    passed = len(taken) - len(failed) - len(skipped)
    print(f"{row.name:14} {passed:6,} of {len(taken):6,} passed in {seconds:7.1f} s: {row.claim}")
    for note in (*failed[:5], *skipped[:1]):
        print(f"    case {note['case']}: {note['wrong']}")
    return {
        "row": row.name,
        "claim": row.claim,
        "cases": len(taken),
        "passed": passed,
        "skipped": len(skipped),
        "failed": failed,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
