"""Measure the time and memory to prepare a long text, and the time to resume a run of it.

    python scripts/bench/bench_text.py SEED_TEXT [--gigabytes 1] [--files N] [--kills N]
        [--json benchmarks/text.json]

Repeats SEED_TEXT with a counter in each repetition, then, in each of six new processes, prepares
it as the text of a run, flushes it to disk, which a run does before its first checkpoint, and reads
it with its checksums; in turn with the text in the page cache and evicted from it. Then `cat`
copies the text and syncs the copy to disk. The memory is that of all processes that prepare it, at
most (PSS). Then a run of one step is resumed ten times, in turn with its text in the page cache and
evicted from it: the time from the start of the command to the first batch, and to the end of the
first step.

With --files the text is so many files of 10 kB. With --kills it is also prepared by processes that
are killed at random times (SIGKILL), N in all, until one is left to finish: the files are the same.

Also measures the throughput of `CharTokenizer.encode` on one thread, for ASCII, Cyrillic and
code points above U+FFFF, and that of nanoGPT's dict look-up per character.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from record import provenance, write_record

from chargpt.text.tokenizer import CharTokenizer

PROBE = """
import json, os, sys, time
from pathlib import Path
from chargpt.config import TextConfig
from chargpt.files import sync_files
from chargpt.text.prepare import prepare, read_prepared
from chargpt.text.source import find_text
settings, folder = TextConfig(path=sys.argv[1]), Path(sys.argv[2])
start = time.perf_counter()
corpus = prepare(find_text(settings), settings, folder)
prepared = time.perf_counter()
sync_files(folder, os.listdir(folder)).result()
flushed = time.perf_counter()
read_prepared(folder, settings, corpus.tokenizer)
read = time.perf_counter()
times = {"prepare": prepared - start, "flush": flushed - prepared, "read": read - flushed}
print(json.dumps(times))
"""
RESUME = """
import gc, json, os, sys, time
from pathlib import Path
gc.set_threshold(200_000, 10, 10)  # as the command does before it imports torch
started, result = float(sys.argv.pop(1)), Path(sys.argv.pop(1))
from chargpt.cli.main import run
from chargpt.training.learner import Batches, Learner
found = {}
def timed(method, name):
    def call(*arguments):
        done = method(*arguments)
        found.setdefault(name, round(time.monotonic() - started, 2))
        if name == "first_step":
            result.write_text(json.dumps(found))
            os._exit(0)
        return done
    return call
Batches.at = timed(Batches.at, "first_batch")
Learner.apply_update = timed(Learner.apply_update, "first_step")
run()
"""
STATES = ("cached", "evicted")


def make_text(seed: Path, target: Path, size: int) -> None:
    """Write about `size` bytes."""
    content = seed.read_bytes()
    with open(target, "wb") as file:
        number = 0
        while file.tell() < size:
            file.write(b"Part %d.\n" % number + content)
            number += 1


def make_files(seed: Path, folder: Path, number: int) -> None:
    """Write files of 10 kB, a thousand to a folder."""
    content = seed.read_bytes()
    for index in range(number):
        path = folder / f"{index // 1000}" / f"{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        start = index * 7919 % (len(content) - 10_000)
        path.write_bytes(content[start : start + 10_000])


def start_probe(text: Path, folder: Path) -> "subprocess.Popen[str]":
    """Start a process that prepares the text in a folder and reads it again."""
    words = [sys.executable, "-c", PROBE, str(text), str(folder)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def probe(text: Path, folder: Path) -> dict[str, float]:
    """Prepare the text in a new process, read it again, and return the measurements."""
    process, peak = start_probe(text, folder), 0.0
    while process.poll() is None:
        peak = max(peak, memory_mb(process.pid))
        time.sleep(0.2)
    assert process.stdout is not None
    result: dict[str, float] = json.loads(process.stdout.read())
    # pages of the map of the prepared text, which is read at the end, are not counted
    return {**result, "memory_mb": peak}


def memory_mb(pid: int) -> float:
    """Return the memory of a process and its children, without pages of mapped files."""
    total = 0
    children = Path(f"/proc/{pid}/task/{pid}/children")
    with suppress(OSError):
        for each in (pid, *children.read_text().split()):
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            fields = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
            total += int(fields["Pss"]) - int(fields.get("Pss_File", 0))
    return total / 1000


def files_of(path: Path) -> list[Path]:
    """Return a file, or the files of a folder."""
    return [each for each in [path, *path.rglob("*")] if each.is_file()]


def read_or_evict(text: Path, state: str) -> None:
    """Read files into the page cache, or evict them from it, and make sure of it."""
    os.sync()  # only what is on disk can be evicted
    for path in files_of(text):
        with open(path, "rb") as file:
            if state == "evicted":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 24):
                    pass
    words = ["find", str(text), "-type", "f", "-exec", "fincore", "-bno", "RES", "{}", "+"]
    found = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
    fraction = sum(map(int, found)) / sum(path.stat().st_size for path in files_of(text))
    assert fraction < 0.05 if state == "evicted" else fraction > 0.95, f"{state}: {fraction:.2f}"


def copy_seconds(text: Path, target: Path) -> float:
    """Return the seconds in which `cat` copies files and syncs the copy to disk."""
    start = time.perf_counter()
    find = ["find", str(text), "-type", "f", "-exec", "cat", "{}", "+"]
    with open(target, "wb") as file:
        subprocess.run(find, stdout=file, check=True)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    target.unlink()
    return round(seconds, 2)


def resume(run: Path) -> dict[str, float]:
    """Resume a run of one step; return the seconds to the first batch and the first step."""
    result = run.with_suffix(".json")
    words = [sys.executable, "-c", RESUME, str(time.monotonic()), str(result)]
    words += ["train", "--resume", str(run), "-s", "train.max_steps=2"]
    subprocess.run(words, check=True, capture_output=True)
    found: dict[str, float] = json.loads(result.read_text())
    return found


def prepare_with_kills(text: Path, folder: Path, kills: int, seconds: float) -> int:
    """Prepare a text, which takes `seconds`, with up to so many kills; return their number."""
    random = Random(1)
    for number in range(kills):
        process = start_probe(text, folder)
        try:
            process.wait(random.uniform(1, max(2, seconds / 7)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        else:
            return number
    assert start_probe(text, folder).wait() == 0
    return kills


def digest(folder: Path) -> str:
    """Return the SHA-256 of the files of a prepared text."""
    found = hashlib.sha256()
    for name in ("tokens.bin", "meta.json"):
        with open(folder / name, "rb") as file:
            while chunk := file.read(1 << 20):
                found.update(chunk)
    return found.hexdigest()


def encoding_speeds(seed: str) -> dict[str, float]:
    """Return gigacharacters per second of `encode` and of nanoGPT's way, best of some runs."""
    ascii_text = seed.encode("ascii", "replace").decode() * (20_000_000 // len(seed) + 1)
    texts = {
        "ascii": ascii_text,
        "cyrillic": ascii_text.translate({c: c + 0x3B0 for c in range(65, 123)}),
        "above U+FFFF": ascii_text.translate({c: c + 0x1D400 - 65 for c in range(65, 123)}),
    }
    speeds = {}
    for name, text in texts.items():
        tokenizer = CharTokenizer.fit(text)
        speeds[name] = len(text) / fastest(partial(tokenizer.encode, text), 7)
    table = {character: index for index, character in enumerate(sorted(set(ascii_text)))}
    sample = ascii_text[:2_000_000]
    seconds = fastest(lambda: np.array([table[c] for c in sample], dtype=np.uint16), 3)
    speeds["nanoGPT's way"] = len(sample) / seconds
    return {name: round(speed / 1e9, 3) for name, speed in speeds.items()}


def fastest(work: Callable[[], object], times: int) -> float:
    """Return the seconds of the fastest call."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--files", type=int)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        text, folder = Path(temporary, "long.txt"), Path(temporary, "prepared")
        if arguments.files:
            text = text.with_suffix("")
            make_files(arguments.seed, text, arguments.files)
        else:
            make_text(arguments.seed, text, int(arguments.gigabytes * 1e9))
        size = sum(path.stat().st_size for path in files_of(text))
        found: dict[str, list[dict[str, float]]] = {state: [] for state in STATES}
        for state in STATES * 3:
            shutil.rmtree(folder, ignore_errors=True)
            read_or_evict(text, state)
            found[state].append(probe(text, folder))
            print(state, found[state][-1], flush=True)
        runs = [run for state in STATES for run in found[state]]
        medians = {s: statistics.median(run["prepare"] for run in found[s]) for s in STATES}
        seconds = medians["cached"]
        killed = {}
        if arguments.kills:
            expected = digest(folder)
            shutil.rmtree(folder)
            kills = prepare_with_kills(text, folder, arguments.kills, seconds)
            killed = {"kills": kills, "same_files": digest(folder) == expected}
        shutil.rmtree(folder)
        copies = {}
        for state in STATES:
            read_or_evict(text, state)
            copies[state] = copy_seconds(text, Path(temporary, "copy"))
        run = Path(temporary, "run")
        words = ["-m", "chargpt", "train", str(text), "--out", str(run)]
        words += ["-s", "train.max_steps=1", "-s", "device=cpu"]
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        resumed: dict[str, list[dict[str, float]]] = {state: [] for state in STATES}
        for state in STATES * 5:
            read_or_evict(run / "text", state)
            resumed[state].append(resume(run))
            print(state, resumed[state][-1], flush=True)
    result = {
        **provenance(),
        "text_bytes": size,
        "files": arguments.files or 1,
        "prepare_mb_per_second": {s: round(size / 1e6 / medians[s], 1) for s in STATES},
        "prepare_seconds": {s: [round(run["prepare"], 2) for run in found[s]] for s in STATES},
        "copy_seconds": copies,
        "memory_mb": round(max(run["memory_mb"] for run in runs), 1),
        "flush_seconds": [round(run["flush"], 2) for run in runs],
        "read_seconds": [round(run["read"], 3) for run in runs],
        **killed,
        "resume_seconds": resumed,
        "encode_gigacharacters_per_second": encoding_speeds(arguments.seed.read_text("utf-8")),
    }
    write_record(result, arguments.json)


if __name__ == "__main__":
    main()
