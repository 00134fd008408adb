"""Measure the peak memory of every command that reads a run, on small runs made to exhaust it.

    python scripts/torture/memory.py [--work DIR] [--only WORD] [--json benchmarks/memory.json]

Each run has at most 10 MB on disk, and settings, a vocabulary, metrics or a text that ask for far
more. Every command must stay below 2 GB and 60 s (400 s where PyTorch exports to ONNX, of 256
layers), exit with 0, 1 or 2, and print no traceback; a sampled text without end is stopped by
SIGINT (130). The exit code is 1 if a command does not.
"""

import argparse
import gzip
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY / "scripts"), str(REPOSITORY)]

# PyTorch is imported late: the peak memory of a process includes that of the one that started it

MAX_PEAK, MAX_RUN_BYTES = 2_000_000_000, 10_000_000
MAX_SECONDS, MAX_ONNX_SECONDS = 60, 400
STOP_SECONDS = 20  # after which sampling is stopped
CODES = {0, 1, 2}
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
N_CHARACTERS = 130_000
TINY: dict[str, object] = {
    "train.max_steps": 1,
    "train.batch_size": 1,
    "train.evaluation_tokens": 200,
    "train.sample_every": 0,
    "model.n_layer": 1,
    "model.n_head": 1,
    "model.n_embd": 2,
    "model.n_inner": 1,
    "model.block_size": 8,
    "text.rare": "keep",
    "device": "cpu",
    "dtype": "float32",
}
LINE = "the quick brown fox jumps over the lazy dog\n"


def build_run(
    path: Path,
    text: str,
    trained: Mapping[str, object] = MappingProxyType({}),
    changed: Mapping[str, object] = MappingProxyType({}),
) -> Path:
    """Train a run of one step, then change the settings in its checkpoint, as an attacker would."""
    import yaml

    import chargpt

    if path.exists():
        return path
    chargpt.train(text=text, settings={**TINY, **trained}, out=path)
    for config in path.glob("checkpoints/*/config.yaml"):
        tree = yaml.safe_load(config.read_text("utf-8"))
        for key, value in changed.items():
            section, name = key.split(".")
            tree[section][name] = value
        config.write_text(yaml.dump(tree), "utf-8")
        manifest = config.with_name("manifest.json")
        facts = json.loads(manifest.read_text("utf-8"))
        content = config.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        facts["files"]["config.yaml"] = {"size": len(content), "sha256": digest}
        manifest.write_text(json.dumps(facts), "utf-8")
    return path


def build_runs(work: Path) -> dict[str, Path]:
    """Return the hostile runs by name, built in a folder."""
    # without U+2581, which GGUF has for a space
    codes = [10, *range(32, 0x2580), *range(0x3000, 0xD800), *range(0x10000, 0x110000)]
    characters = "".join(map(chr, codes[:N_CHARACTERS]))
    long_block = {"model.block_size": 65_536}
    endless = {"sample.length": 10**9, "sample.num_samples": 4096}
    runs = {
        "vocabulary": build_run(
            work / "vocabulary", 2 * characters, {"text.val_fraction": 0.002}, long_block
        ),
        "mixture": build_run(
            work / "mixture",
            2 * characters,
            {"text.val_fraction": 0.01, "text.mixture_characters": 1000, "model.block_size": 512},
        ),
        "layers": build_run(
            work / "layers",
            200 * LINE,
            {"model.n_layer": 256, "model.n_embd": 24},
            {**long_block, "sample.prompt": LINE * 20, "sample.num_samples": 64},
        ),
        "activations": build_run(
            work / "activations",
            1000 * LINE,
            {"model.n_inner": 100_000, "model.attention": "average"},
            long_block,
        ),
        "rotary": build_run(
            work / "rotary",
            200 * LINE,
            {"model.n_embd": 8192, "model.attention": "none", "model.mlp": "none"},
            long_block,
        ),
        "settings": build_run(work / "settings", 200 * LINE, changed=endless),
        "metrics": build_run(work / "metrics", 200 * LINE),
    }
    with open(runs["metrics"] / "metrics.jsonl", "w", encoding="utf-8") as file:
        keys = {f"k{number}": 1 for number in range(100_000)}
        file.write(json.dumps({"step": 1, "loss": 1, **keys}) + "\n")
        for step in itertools.count(1):
            if file.tell() > 9_000_000:
                break
            file.write(f'{{"step":{step},"loss":1,"val_nats_per_char":1}}\n')
    for name, run in runs.items():
        if name != "mixture":
            (run / "mixture.safetensors").write_bytes((1 << 40).to_bytes(8, "little"))
        size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        assert size <= MAX_RUN_BYTES, (name, size)
    return runs


def build_files(work: Path) -> None:
    """Write texts, a checkpoint to import and compressed files that expand."""
    (work / "text.txt").write_text(20 * LINE, "utf-8")
    (work / "short.txt").write_text(LINE, "utf-8")
    if (work / "bomb.txt.gz").exists():
        return
    with gzip.open(work / "bomb.txt.gz", "wb") as file:
        for _ in range(1000):
            file.write(LINE.encode() * 25_000)
    (work / "ckpt.pt").write_bytes(hostile_checkpoint())
    meta = {"itos": dict(enumerate("ab")), "stoi": {}, "vocab_size": 2}
    (work / "meta.pkl").write_bytes(pickle.dumps(meta))


def hostile_checkpoint() -> bytes:
    """Return a checkpoint of PyTorch whose pickle asks for 3 GB."""
    import torch

    stream, content = io.BytesIO(), io.BytesIO()
    torch.save({}, stream)
    pickled = b"\x80\x02c__builtin__\nbytearray\nJ" + (2_000_000_000).to_bytes(4, "little")
    pickled += b"\x85R."
    with zipfile.ZipFile(stream) as old, zipfile.ZipFile(content, "w") as new:
        for entry in old.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            new.writestr(entry.filename, pickled if is_pickle else old.read(entry))
    return content.getvalue()


def commands(run: str = "RUN") -> Iterator[str]:
    """Yield the words of every command that reads a run."""
    yield f"chargpt verify {run}"
    yield "chargpt runs ."
    yield f"chargpt sample {run} --seed 1"
    yield f"chargpt sample {run} --seed 1 -n 100 --num-samples 64 --json"
    yield f"chargpt sample {run} --seed 1 -n 50 --top-k 5 --num-samples 64"
    yield f"chargpt sample {run} --seed 1 -n 50 --only abc"
    yield f"chargpt sample {run} --seed 1 -n 50 --no-copy 20 --overlap"
    yield f"chargpt sample {run} --before text.txt --after short.txt -n 20 --candidates 2"
    yield f"chargpt sample {run} {run} -n 20 --seed 1"
    yield f"chargpt sample {run} --mixture -n 20"
    yield f"chargpt sample {run} --interactive --plain -n 20"
    yield f"chargpt evaluate {run}"
    yield f"chargpt evaluate {run} --protocol sliding --max-characters 200"
    yield f"chargpt evaluate {run} --text text.txt"
    yield f"chargpt score {run} text.txt"
    yield f"chargpt score {run} text.txt --adaptive"
    yield f"chargpt score {run} text.txt --with {run}"
    yield f"chargpt compress {run} text.txt out/{run}.cgpt"
    yield f"chargpt decompress {run} out/{run}.cgpt out/{run}.txt"
    yield f"chargpt explain {run}"
    yield f"chargpt report {run} --out out/{run}.html"
    yield f"chargpt compare {run} {run}"
    yield f"chargpt play {run} --out out/{run}-page.html"
    for kind in ("hf", "gguf", "onnx", "html"):
        yield f"chargpt export {kind} {run} out/{run}-{kind}"
    yield f"chargpt import hf out/{run}-hf out/{run}-copy"
    yield f"chargpt train --resume {run} -s train.max_steps=2"
    yield f"chargpt train text.txt --from {run} --out out/{run}-tuned -s train.max_steps=1"


def other_commands() -> Iterator[str]:
    """Yield commands that read other files of a stranger."""
    for command in ("evaluate RUN --text", "score RUN", "sample RUN --prompt-file"):
        yield f"chargpt {command} bomb.txt.gz"
    yield "chargpt compress RUN bomb.txt.gz out/bomb.cgpt"
    yield "chargpt data info bomb.txt.gz"
    yield "chargpt explain bomb.txt.gz"
    yield "chargpt import nanogpt ckpt.pt out/imported --meta meta.pkl"
    yield "chargpt evaluate RUN --text /proc/kmsg"
    yield "chargpt evaluate RUN --text /dev/zero"


def resident_bytes(pid: int) -> int:
    """Return the memory of a process, or 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0


def measure(words: str, run: str, work: Path) -> dict[str, Any]:
    """Run a command; return its exit code, peak memory in MB, seconds, and what is wrong."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as err:
        child = subprocess.Popen(
            [sys.executable, "-m", *words.replace("RUN", run).split()],
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        longest = MAX_ONNX_SECONDS if "export onnx" in words else MAX_SECONDS
        limit: float = STOP_SECONDS if words.startswith("chargpt sample") else longest
        is_stopped = False
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            seconds = time.perf_counter() - start
            if pid:
                break
            if resident_bytes(child.pid) > 2 * MAX_PEAK:  # which is noted, and the machine stays up
                child.kill()
            if seconds > limit:
                child.send_signal(signal.SIGKILL if is_stopped else signal.SIGINT)
                is_stopped, limit = True, seconds + 30  # it prints what there is
            time.sleep(0.02)
        child.returncode = code = os.waitstatus_to_exitcode(status)
        err.seek(0)
        messages = err.read()
    peak = 1024 * usage.ru_maxrss
    problems = []
    allowed = {130} if is_stopped and words.startswith("chargpt sample") else CODES
    if code not in allowed:
        problems.append(f"exit code {code}")
    if "Traceback" in messages:
        problems.append("traceback")
    if peak > MAX_PEAK:
        problems.append("memory")
    if seconds > longest:
        problems.append("time")
    last = [line for line in messages.splitlines() if line.startswith("chargpt: ")][-1:]
    return {
        "command": words,
        "run": run,
        "code": code,
        "peak_mb": round(peak / 1e6),
        "seconds": round(seconds, 1),
        "problems": problems,
        "message": "".join(last).replace(f"{work}/", "")[:300] if code not in (0, 130) else "",
    }


def main() -> None:
    """Build the runs and measure every command on each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--only", default="", help="commands that hold this word")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    work = (args.work or Path(tempfile.mkdtemp(prefix="memory-"))).absolute()
    work.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work / "out", ignore_errors=True)
    (work / "out").mkdir()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        runs = pool.submit(build_runs, work).result()
        pool.submit(build_files, work).result()
    listed = [(words, run) for run in runs for words in commands()]
    results = []
    for words, run in [*listed, *((words, "metrics") for words in other_commands())]:
        if args.only in f"{run} {words}":
            results.append(result := measure(words, run, work))
            print(
                f"{result['peak_mb']:6,} MB {result['seconds']:5.1f} s  {result['code']:4} "
                f"{run}: {words}  {', '.join(result['problems'])}  {result['message']}",
                flush=True,
            )
    from bench.record import provenance, save_record

    save_record({**provenance(), "results": results}, args.json)
    sys.exit(any(result["problems"] for result in results))


if __name__ == "__main__":
    main()
