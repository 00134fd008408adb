"""Benchmark of training: loss against time beside nanoGPT, in whole interleaved processes.

    python scripts/bench/bench_train.py TEXT --nanogpt DIR [--recipe cpu|gpu] [--pairs 3]
        [--ours "--budget 10s"]... [--json benchmarks/train.json] [--plot benchmarks/train.svg]

TEXT is a file. DIR is a checkout of nanoGPT; its README's recipe runs in a copy of it.
Each of --ours is what follows `chargpt train TEXT -s seed=N`, N being the pair's number. A time
is that of a whole process, from a cold start to its end with the checkpoint saved; scoring comes
after. Both are scored by chargpt's `full` protocol on the same last tenth, nanoGPT at its own block
size. The picture has nanoGPT's own estimates along the way beside them.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import facts, write_record

SMALL = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
    "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 "
    "--dropout=0.0"
)
RECIPES = {"cpu": SMALL.split(), "gpu": []}  # for a GPU, its config as it stands

# run with nanoGPT's folder on the path; prints the loss that our own code measures
SCORE = """
import json, sys, torch
from model import GPT, GPTConfig
from chargpt.config import TextConfig
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.models import LanguageModel
from chargpt.text.corpus import load_corpus

class Peer(LanguageModel):
    def __init__(self, checkpoint):
        super().__init__(checkpoint["model_args"]["vocab_size"],
                         checkpoint["model_args"]["block_size"])
        self.gpt = GPT(GPTConfig(**checkpoint["model_args"]))
        self.gpt.load_state_dict(checkpoint["model"])
    def forward(self, tokens, cache=None):
        return self.gpt(tokens, tokens.contiguous())[0]
    def new_cache(self, batch_size):
        raise NotImplementedError

model = Peer(torch.load(sys.argv[1], weights_only=True))
tokens = load_corpus(TextConfig(path=sys.argv[2])).split("val")
print(json.dumps(evaluate_tokens(model, tokens).as_dict()))
"""

# Share of the matrix peak that a run's training steps reach, just after it, evaluations left out.
# Operations of a step: 6 a parameter (the embedding is looked up, not multiplied) and 12 L C T for
# attention, each a character (Chowdhery et al. 2022, appendix B).
SHARE = """
import json, statistics, sys, time
from chargpt.analysis.doctor import matmul_flops
from chargpt.device import synchronize
from chargpt.store.run import load_run
from chargpt.text.corpus import load_corpus
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
multiplied = trainer.model.parameter_count() - trainer.corpus.tokenizer.vocab_size * model.n_embd
each = 6 * multiplied + 12 * model.n_layer * model.n_embd * model.block_size
done = each * train.batch_size * model.block_size / statistics.median(seconds[3:])
peak = matmul_flops(trainer.device, trainer.dtype)
print(json.dumps({"matrix_gflops": peak / 1e9, "share_of_matrix_peak": done / peak}))
"""


def timed(words: list[str], cwd: Path, log: Path) -> float:
    """Run a command to its end and return its seconds."""
    with open(log, "w", encoding="utf-8") as file:
        start = time.perf_counter()
        subprocess.run(words, cwd=cwd, stdout=file, stderr=subprocess.STDOUT, check=True)
        return time.perf_counter() - start


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
    facts = {name: found[name] for name in ("parameters", "block_size", "steps")}
    return {"seconds": seconds, **losses, **facts, **share}


def run_nanogpt(text: Path, checkout: Path, folder: Path, recipe: str) -> dict[str, Any]:
    """Prepare and train once with nanoGPT's README commands, and score the checkpoint."""
    copy = folder / "nanogpt"
    shutil.copytree(checkout, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git"))
    data = copy / "data" / "shakespeare_char"
    shutil.copy(text, data / "input.txt")
    preparing = timed([sys.executable, "prepare.py"], data, folder / "prepare.txt")
    words = ["train.py", "config/train_shakespeare_char.py", *RECIPES[recipe]]
    training = timed([sys.executable, *words], copy, folder / "log.txt")
    checkpoint = copy / "out-shakespeare-char" / "ckpt.pt"
    score = [sys.executable, "-c", SCORE, str(checkpoint), str(text)]
    found = printed(score, copy, PYTHONPATH=os.pathsep.join([str(copy), *sys.path[1:]]))
    result = {"seconds": training, "prepare_seconds": preparing, "full": found["nats_per_char"]}
    return result | {"curve": curve_of((folder / "log.txt").read_text(), training)}


def curve_of(log: str, seconds: float) -> list[tuple[float, float]]:
    """Return (seconds since the start, validation loss) from nanoGPT's log of a whole process.

    An iteration's time holds the evaluation before it; what no iteration took is the start.
    """
    taken = [float(ms) / 1000 for ms in re.findall(r"^iter \d+: .* time ([\d.]+)ms", log, re.M)]
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
    ours = [result for name, result in results.items() if name != "nanoGPT"]
    medians = sorted((result["seconds"], result["full"]) for result in ours)
    axes.plot(*zip(*medians, strict=True), "o-", color="#0072B2", label="chargpt --budget")
    for result in ours:
        points = [(run["seconds"], run["full"]) for run in result["runs"]]
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
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--ours", action="append", default=[])
    parser.add_argument("--protocols", nargs="+", default=["full", "sliding", "nanogpt"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    text = arguments.text.absolute()
    results: dict[str, list[dict[str, Any]]] = {}
    curve: list[tuple[float, float]] = []
    for number in range(arguments.pairs):
        if arguments.nanogpt:
            with tempfile.TemporaryDirectory() as folder:
                run = run_nanogpt(
                    text, arguments.nanogpt.absolute(), Path(folder), arguments.recipe
                )
            curve = curve or run.pop("curve")
            results.setdefault("nanoGPT", []).append(run)
            print(f"pair {number + 1}: nanoGPT {run}", file=sys.stderr)
        for words in arguments.ours:
            with tempfile.TemporaryDirectory() as folder:
                run = run_ours(text, words, number + 1, Path(folder), arguments.protocols)
            results.setdefault(f"chargpt train {words}", []).append(run)
            print(f"pair {number + 1}: {words}: {run}", file=sys.stderr)
    record = {**facts(), "text": text.name, "results": {n: summary(r) for n, r in results.items()}}
    peer = record["results"].get("nanoGPT")
    for name, result in record["results"].items():
        if peer and name != "nanoGPT":
            result["time_against_nanogpt"] = round(peer["seconds"] / result["seconds"], 2)
            result["nats_below_nanogpt"] = round(peer["full"] - result["full"], 4)
    record["nanogpt_curve"] = curve
    if arguments.plot:
        draw(record["results"], curve, arguments.plot)
    write_record(record, arguments.json)


if __name__ == "__main__":
    main()
