"""Benchmark of training: loss against time beside nanoGPT, in whole interleaved processes.

    python scripts/bench/bench_train.py TEXT [--nanogpt DIR] [--recipe cpu|gpu|long] [--repeats 3]
        [--ours "--budget 10s"]... [--json benchmarks/train.json] [--plot benchmarks/train.svg]
        [--nanogpt-seconds N]

TEXT is a file. DIR is a checkout of nanoGPT; its README's recipe runs in a copy of it, and is
stopped after N seconds if they are given: its best checkpoint until then is scored. The recipe
`long` also trains nanoGPT compiled, with the layers, width, heads, block and batch size of the last
of --ours, and a learning rate that decays until N seconds after the start of the process, or after
its first step: without start and compilation. Its number of steps is computed from a trial. Each
process compiles with an empty cache. The JSON is written after every run.
Each of --ours is what follows `chargpt train TEXT -s seed=N`, N being the number of the repeat,
from 1. A time is that of a whole process, from a cold start to its end with the checkpoint saved;
scoring comes after. Both are scored by chargpt's `blocks` protocol on the same last tenth, nanoGPT
at its own block size. The plot has nanoGPT's own estimates along the way beside them.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record import provenance, save_record

SMALL = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
    "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 "
    "--dropout=0.0"
)
# for a GPU, its config as it stands
RECIPES = {"cpu": SMALL.split(), "gpu": [], "long": []}
if not torch.cuda.is_available():
    RECIPES["long"] = SMALL.split()
TRIAL_STEPS = 40  # of which half are measured
# of the time, for a trial's error and the last evaluation
USED_FRACTION = 0.95

# run with nanoGPT's folder on the path; prints the loss that our own code measures
SCORE = """
import json, sys, torch
from model import GPT, GPTConfig
from chargpt.config import TextConfig
from chargpt.device import choose_device
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.models import LanguageModel
from chargpt.text.prepare import load_corpus

class Peer(LanguageModel):
    def __init__(self, checkpoint):
        super().__init__(checkpoint["model_args"]["vocab_size"],
                         checkpoint["model_args"]["block_size"])
        self.gpt = GPT(GPTConfig(**checkpoint["model_args"]))
        # a compiled model's names have this prefix
        self.gpt.load_state_dict(
            {name.removeprefix("_orig_mod."): x for name, x in checkpoint["model"].items()})
    def forward(self, tokens, cache=None):
        return self.gpt(tokens, tokens.contiguous())[0]
    def new_cache(self, batch_size):
        raise NotImplementedError

model = Peer(torch.load(sys.argv[1], weights_only=True)).to(choose_device("auto")[0])
tokens = load_corpus(TextConfig(path=sys.argv[2])).split("val")
print(json.dumps(evaluate_tokens(model, tokens).as_dict()))
"""

# MFU of a run's training steps, measured just after it, without evaluations.
# Operations of a step: 6 a parameter (the embedding is looked up, not multiplied) and 12 L C T for
# attention, each a character (Chowdhery et al. 2022, appendix B).
SHARE = """
import json, statistics, sys, time
from chargpt.analysis.doctor import matmul_flops
from chargpt.device import synchronize
from chargpt.store.run import load_run
from chargpt.text.prepare import load_corpus
from chargpt.training.trainer import Trainer

config = load_run(sys.argv[1]).config
trainer = Trainer(config.with_values({"train.ngram_target_weight": 0.0}), load_corpus(config.text))
model, train = config.model, config.train
seconds = []
for step in range(13):
    start = time.perf_counter()
    trainer.learner.accumulate_gradients(step)
    trainer.learner.clip_gradients()
    trainer.learner.apply_update(step, 1.0)
    synchronize(trainer.device)
    seconds.append(time.perf_counter() - start)
multiplied = trainer.model.num_parameters() - trainer.corpus.tokenizer.vocab_size * model.n_embd
each = 6 * multiplied + 12 * model.n_layer * model.n_embd * model.block_size
done = each * train.batch_size * model.block_size / statistics.median(seconds[3:])
peak = matmul_flops(trainer.device, trainer.dtype)
size = {name: getattr(model, name) for name in ("n_layer", "n_head", "n_embd", "block_size")}
print(json.dumps({
    "matrix_gflops": peak / 1e9,
    "share_of_matrix_peak": done / peak,
    "size": {**size, "batch_size": train.batch_size},
}))
"""


def timed(words: list[str], cwd: Path, log: Path, limit: float | None = None) -> float:
    """Run a command to its end, or for at most `limit` seconds, and return its seconds."""
    with open(log, "w", encoding="utf-8") as file:
        start = time.perf_counter()
        process = subprocess.Popen(
            words,
            cwd=cwd,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(log.with_suffix(".cache"))},
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its compiler's processes
            process.wait()
            return time.perf_counter() - start
        seconds = time.perf_counter() - start
    if process.returncode:
        end_of_log = log.read_text(encoding="utf-8")[-2000:]
        raise RuntimeError(f"{shlex.join(words)} failed:\n{end_of_log}")
    return seconds


def printed(words: list[str], cwd: Path, **environment: str) -> dict[str, Any]:
    """Run a command that prints one JSON object on its last line."""
    done = subprocess.run(
        words,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_ours(
    text: Path, words: str, seed: int, folder: Path, protocols: list[str]
) -> dict[str, Any]:
    """Train once and score the run."""
    run = folder / "run"
    chargpt = [sys.executable, "-m", "chargpt"]
    train = [*chargpt, "train", str(text), "--out", str(run), "--force", "-s", f"seed={seed}"]
    train += shlex.split(words)
    seconds = timed(train, folder, folder / "log.txt")
    losses = {}
    for protocol in protocols:
        found = printed([*chargpt, "evaluate", str(run), "--json", "--protocol", protocol], folder)
        losses[protocol] = found["nats_per_char"]
    share = printed([sys.executable, "-c", SHARE, str(run)], folder)
    facts = {name: found[name] for name in ("parameters", "block_size")}
    return {"seconds": seconds, **losses, **facts, "steps": found["step"], **share}


def prepare_nanogpt(text: Path, checkout: Path, folder: Path) -> float:
    """Copy nanoGPT's checkout to a folder and prepare the text there; return its seconds."""
    shutil.copytree(checkout, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git"))
    data = folder / "data" / "shakespeare_char"
    shutil.copy(text, data / "input.txt")
    (data / "requests.py").touch()  # imported for a download that is not needed
    return timed([sys.executable, "prepare.py"], data, folder / "prepare.txt")


def run_nanogpt(text: Path, copy: Path, options: list[str], limit: float | None) -> dict[str, Any]:
    """Train once with nanoGPT's README command and more options, and score the checkpoint.

    Raises:
        RuntimeError: it failed, or saved no checkpoint within `limit` seconds.
    """
    shutil.rmtree(copy / "out-shakespeare-char", ignore_errors=True)
    words = [sys.executable, "train.py", "config/train_shakespeare_char.py", *options]
    log_path = copy / "log.txt"
    shutil.rmtree(log_path.with_suffix(".cache"), ignore_errors=True)
    try:
        training = timed(words, copy, log_path, limit)
    except RuntimeError as error:  # perhaps there is no C compiler
        print(f"{error}\nonce more without torch.compile", file=sys.stderr)
        training = timed([*words, "--compile=False"], copy, log_path, limit)
    checkpoint = copy / "out-shakespeare-char" / "ckpt.pt"
    if not checkpoint.exists():
        raise RuntimeError(f"nanoGPT saved no checkpoint within {training:.0f} s")
    score = [sys.executable, "-c", SCORE, str(checkpoint), str(text)]
    found = printed(score, copy, PYTHONPATH=os.pathsep.join([str(copy), *sys.path[1:]]))
    log = log_path.read_text()
    iterations = [int(number) for number in re.findall(r"^iter (\d+):", log, re.M)]
    result = {"seconds": training, "blocks": found["nats_per_char"], "iterations": iterations[-1]}
    return result | {"curve": curve_of(log, training)}


def same_size_options(
    copy: Path, recipe: list[str], size: dict[str, int], seconds: float
) -> dict[str, list[str]]:
    """Return options of runs of our size whose decay ends after `seconds`.

    The start and compilation count in one of them, and not in the other.
    """
    options = [*recipe, *(f"--{name}={value}" for name, value in size.items()), "--dropout=0.0"]
    options += ["--eval_iters=20", "--always_save_checkpoint=True"]
    trial = [f"--max_iters={TRIAL_STEPS}", "--log_interval=1"]
    words = [sys.executable, "train.py", "config/train_shakespeare_char.py", *options, *trial]
    whole = timed(words, copy, copy / "trial.txt")
    step = statistics.median(step_seconds((copy / "trial.txt").read_text())[TRIAL_STEPS // 2 :])
    start = whole - TRIAL_STEPS * step
    ways = {"our size": seconds - start, "our size, start not counted": seconds}
    numbers = {name: max(1, int(USED_FRACTION * left / step)) for name, left in ways.items()}
    return {
        name: [
            *options,
            *(f"--{key}={number}" for key in ("max_iters", "lr_decay_iters", "eval_interval")),
            f"--warmup_iters={min(100, number // 10)}",
        ]
        for name, number in numbers.items()
    }


def step_seconds(log: str) -> list[float]:
    """Return the time of each iteration in nanoGPT's log."""
    return [float(ms) / 1000 for ms in re.findall(r"^iter \d+: .* time ([\d.]+)ms", log, re.M)]


def curve_of(log: str, seconds: float) -> list[tuple[float, float]]:
    """Return (seconds since the start, validation loss) from nanoGPT's log of a whole process.

    An iteration's time holds the evaluation before it; what no iteration took is the start.
    """
    taken = step_seconds(log)
    curve, passed = [], seconds - sum(taken)
    iterations = iter(taken)
    for line in log.splitlines():
        if found := re.match(r"step \d+: .* val loss ([\d.]+)", line):
            curve.append((round(passed, 1), float(found[1])))
        elif line.startswith("iter "):
            passed += next(iterations)
    return curve


def draw(results: dict[str, dict[str, Any]], curve: list[tuple[float, float]], path: Path) -> None:
    """Draw loss against seconds: a point per process of ours, and nanoGPT's curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if curve:
        axes.plot(*zip(*curve[1:], strict=True), "o-", color="#D55E00", label="nanoGPT")
    ours = [result for name, result in results.items() if not name.startswith("nanoGPT")]
    medians = sorted((result["seconds"], result["blocks"]) for result in ours)
    axes.plot(*zip(*medians, strict=True), "o-", color="#0072B2", label="chargpt --budget")
    for result in ours:
        points = [(run["seconds"], run["blocks"]) for run in result["runs"]]
        axes.plot(*zip(*points, strict=True), ".", color="#0072B2", alpha=0.4)
    axes.set(xscale="log", xlabel="seconds, whole process", ylabel="validation loss (nats/char)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:g}"[0] in "2357" else "")
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians and all runs."""
    keys = [key for key in runs[0] if isinstance(runs[0][key], int | float)]
    medians = {key: round(statistics.median(run[key] for run in runs), 4) for key in keys}
    return {**medians, "runs": [{key: round(run[key], 4) for key in keys} for run in runs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--recipe", choices=RECIPES, default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ours", action="append", default=[])
    protocols = ["blocks", "sliding", "nanogpt"]
    parser.add_argument("--protocols", nargs="+", choices=protocols, default=protocols)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--nanogpt-seconds", type=float)
    arguments = parser.parse_args()
    if arguments.recipe == "long" and not (arguments.ours and arguments.nanogpt_seconds):
        parser.error("the recipe `long` needs --ours and --nanogpt-seconds")
    text = arguments.text.absolute()
    failures: list[str] = []
    size: dict[str, int] = {}
    results: dict[str, list[dict[str, Any]]] = {}
    curve: list[tuple[float, float]] = []
    record: dict[str, Any] = {}

    def add(name: str, number: int, run: dict[str, Any]) -> None:
        print(f"pair {number}: {name}: {run}", file=sys.stderr, flush=True)
        results.setdefault(name, []).append(run)
        record.update(record_of(text, results, curve))
        save_record(record, arguments.json)

    for number in range(1, arguments.repeats + 1):
        for words in arguments.ours:
            with tempfile.TemporaryDirectory() as folder:
                run = run_ours(text, words, number, Path(folder), arguments.protocols)
            size = run["size"]
            add(f"chargpt train {words}", number, run)
        if arguments.nanogpt is None:
            continue
        recipe, limit = RECIPES[arguments.recipe], arguments.nanogpt_seconds
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "nanogpt")
            preparing = prepare_nanogpt(text, arguments.nanogpt.absolute(), copy)
            runs = {"nanoGPT": (recipe, limit)}
            if arguments.recipe == "long":
                options = same_size_options(copy, recipe, size, limit)
                runs |= {f"nanoGPT, {name}": (each, None) for name, each in options.items()}
            for name, (each, seconds) in runs.items():
                try:
                    run = run_nanogpt(text, copy, each, seconds)
                except RuntimeError as error:
                    failures.append(f"{name}: {error}")
                    continue
                if name == "nanoGPT":
                    curve = curve or run["curve"]
                del run["curve"]
                add(name, number, run | {"prepare_seconds": preparing})
    if arguments.plot:
        draw(record["results"], curve, arguments.plot)
    print(json.dumps(record, indent=2))
    if failures:
        raise SystemExit("\n".join(failures))


def record_of(
    text: Path, results: dict[str, list[dict[str, Any]]], curve: list[tuple[float, float]]
) -> dict[str, Any]:
    """Return the record of the runs so far."""
    summaries = {name: summary(runs) for name, runs in results.items()}
    peer = summaries.get("nanoGPT")
    for name, result in summaries.items():
        if peer and not name.startswith("nanoGPT"):
            result["time_against_nanogpt"] = round(peer["seconds"] / result["seconds"], 2)
            result["nats_below_nanogpt"] = round(peer["blocks"] - result["blocks"], 4)
    return {**provenance(), "text": text.name, "results": summaries, "nanogpt_curve": curve}


if __name__ == "__main__":
    main()
