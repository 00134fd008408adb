"""Benchmark of time and memory against text length, parameters, block size and batch size.

    python scripts/bench/bench_scale.py SEED_TEXT [--gigabytes 1] [--json benchmarks/scale.json]
        [--plot benchmarks/scale.png]

Every row is a process of its own. Texts are SEED_TEXT over and over with a counter, from 1 MB up in
tenfold steps; models train on SEED_TEXT. Time is that of one training step (the fastest of ten),
memory is what the process grew by at its peak since its imports, both on the best device here.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_text import make_text
from record import provenance, write_record

PROBE = """
import json, resource, sys, time
from chargpt.config import load_config
from chargpt.device import synchronize
from chargpt.text.prepare import load_corpus
from chargpt.training.trainer import Trainer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000

config = load_config("gpt").with_values(json.loads(sys.argv[1]))
before, start = peak(), time.perf_counter()
corpus = load_corpus(config.text)
prepared, prepared_mb = time.perf_counter() - start, peak() - before
trainer = Trainer(config, corpus)
seconds = []
for step in range(11):
    synchronize(trainer.device)
    start = time.perf_counter()
    trainer.learner.accumulate_gradients(step)
    trainer.learner.clip_gradients()
    trainer.learner.apply_update(step, 1.0)
    synchronize(trainer.device)
    seconds.append(time.perf_counter() - start)
print(json.dumps({
    "prepare_seconds": round(prepared, 3),
    "prepare_mb": round(prepared_mb, 1),
    "parameters": trainer.model.num_parameters(),
    "step_ms": round(1000 * min(seconds[1:]), 1),
    "step_mb": round(peak() - before, 1),
    "characters_per_step": config.train.batch_size * config.model.block_size,
}))
"""
SIZES = ((4, 64), (4, 128), (4, 256), (6, 384), (6, 512))  # layers, width
BLOCKS = (32, 64, 128, 256, 512, 1024)
BATCHES = (4, 8, 16, 32, 64, 128)
LABELS = {
    "text_mb": "text (MB)",
    "prepare_seconds": "preparing the text (s)",
    "prepare_mb": "preparing the text (MB)",
    "block_size": "block (characters), 2,048 a step",
    "batch_size": "batch (blocks of 128)",
    "step_ms": "a training step (ms)",
    "step_mb": "training (MB)",
}
# axis -> what its rows vary, what is drawn of them
PANELS = {
    "text": ("text_mb", "prepare_seconds", "prepare_mb"),
    "parameters": ("parameters", "step_ms", "step_mb"),
    "block": ("block_size", "step_ms", "step_mb"),
    "batch": ("batch_size", "step_ms", "step_mb"),
}


def probe(values: dict[str, Any]) -> dict[str, Any]:
    """Measure one setting in a process of its own."""
    # no counted targets: counting takes the same few seconds at any size of text
    values = {"train.ngram_target_weight": 0.0, **values}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(values)],
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def cases(seed: Path, folder: Path, largest: float) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield each axis, its value and the settings."""
    text, size = folder / "long.txt", 1e6
    while size <= largest * 1e9:
        make_text(seed, text, int(size))
        yield "text", size / 1e6, {"text.path": str(text)}
        text.unlink()
        size *= 10
    plain = {"text.path": str(seed)}
    for n_layer, width in SIZES:
        shape = {"model.n_layer": n_layer, "model.n_embd": width, "model.n_head": width // 64}
        yield "parameters", None, {**plain, **shape}
    for block in BLOCKS:  # as many characters a step in each
        shape = {"model.block_size": block, "train.batch_size": max(1, 2048 // block)}
        yield "block", block, {**plain, **shape}
    for batch in BATCHES:
        yield "batch", batch, {**plain, "train.batch_size": batch}


def draw(axes_rows: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw time and memory against each axis, beside proportional growth, on logarithmic scales."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(13, 6), layout="constrained")
    figure.suptitle("dashed: in proportion", fontsize="medium", color="#767676")
    for column, (axis, rows) in enumerate(axes_rows.items()):
        across, *drawn = PANELS[axis]
        for row, name in enumerate(drawn):
            panel = figure.add_subplot(2, len(PANELS), 1 + row * len(PANELS) + column)
            xs, ys = [r[across] for r in rows], [r[name] for r in rows]
            proportional = [ys[-1] * x / xs[-1] for x in xs]
            panel.loglog(xs, proportional, "--", color="#767676", linewidth=1)
            panel.loglog(xs, ys, "o-", color="#0072B2")
            panel.set(xlabel=LABELS.get(across, across), ylabel=LABELS[name])
            panel.set_ylim(min(ys) / 2, max(ys) * 2)
            panel.set_xticks(xs, [f"{x / 1e6:.2g}M" if x >= 1e5 else f"{x:,g}" for x in xs])
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:,g}")
            panel.minorticks_off()
            panel.grid(alpha=0.25)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {axis: [] for axis in PANELS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seed = arguments.seed.absolute()
        for axis, value, values in cases(seed, folder, arguments.gigabytes):
            found = probe(values)
            row = found if value is None else {PANELS[axis][0]: value, **found}
            rows[axis].append(row)
            print(axis, row, file=sys.stderr, flush=True)
    if arguments.plot:
        draw(rows, arguments.plot)
    write_record({**provenance(), "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
