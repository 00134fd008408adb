"""Parity of exports: each format's reader beside the run, on runs of different kinds.

    python scripts/bench/bench_export.py RUN [RUN ...] [--json benchmarks/export.json]

For each run and format: the largest difference of a log-probability on 64 prompts, whether the
greedy text of 200 characters is the same, and the loss of the exported model (protocol full) on the
first 20,000 characters of the validation split, beside that of the run.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from record import facts, save_record, write_record

from chargpt.export import gguf, html, huggingface, onnx
from chargpt.export.check import (
    Reader,
    check_export,
    exportable_model,
    greedy,
    greedy_prompts,
    log_softmax,
    prompts,
)
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.models import build_model
from chargpt.store.run import Run, load_run

CHARACTERS = 20_000


@contextmanager
def open_export(kind: str, run: Run, folder: Path) -> Iterator[Reader]:
    """Export a run, and open what was written."""
    model = exportable_model(run, kind)
    if kind == "hf":
        huggingface.export_huggingface(run, folder / "hf")
        yield huggingface.TransformersReader(folder / "hf")
    elif kind.startswith("gguf"):
        path, precision = folder / "model.gguf", kind.partition(" ")[2]
        gguf.export_gguf(run, path, precision)
        # llama.cpp wants room for one more token than the block that is scored
        size = model.block_size + 1
        longer = build_model(model.config.model_copy(update={"block_size": size}), model.vocab_size)
        longer.load_state_dict(model.state_dict())
        gguf.write_gguf(path, run, longer, precision)
        yield gguf.LlamaReader(path, model.vocab_size, size, threads=2)
    elif kind == "onnx":
        onnx.export_onnx(run, folder / "model.onnx")
        yield onnx.OnnxReader(folder / "model.onnx", model)
    else:
        html.export_html(run, folder / "model.html")
        yield html.PageReader((folder / "model.html").read_text(encoding="utf-8"))


def full_loss(reader: Reader, run: Run, tokens: list[int]) -> float:
    """Return the loss of protocol full in nats per character, from the reader's logits."""
    size, losses = run.model.block_size, []
    for start in range(0, len(tokens) - 1, size):
        block = tokens[start : start + size]
        targets = tokens[start + 1 : start + 1 + size]
        found = log_softmax(reader.logits(block[: len(targets)])[-len(targets) :])
        while len(found) < len(targets):  # of a reader of single positions
            before = log_softmax(reader.logits(block[: len(targets) - len(found)]))
            found = np.concatenate((before, found))
        losses.append(-found[np.arange(len(targets)), targets])
    characters = run.tokenizer.count_characters(np.array(tokens[1:]))
    return float(np.concatenate(losses).sum() / characters)


def measure(run: Run, kind: str) -> dict[str, Any]:
    """Return the row of one run and format."""
    tokens = run.corpus().split("val")[: CHARACTERS + 1]
    ours = evaluate_tokens(run.model, tokens).nats_per_char
    with tempfile.TemporaryDirectory() as folder, open_export(kind, run, Path(folder)) as reader:
        found = check_export(run, reader, is_exact=False)
        same = all(
            reader.greedy(prompt, length) == greedy(run.model, prompt, length)
            for prompt, length in greedy_prompts(run, prompts(run))
        )
        loss = full_loss(reader, run, tokens.tolist())
    return {
        "run": run.folder.name,
        "parameters": run.model.parameter_count(),
        "format": kind,
        "reader": reader.name,
        "difference": float(f"{found.difference:.1e}"),
        "greedy": same,
        "loss": round(loss, 6),
        "loss of the run": round(ours, 6),
    }


def main() -> None:
    """Measure every case and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument(
        "--formats", nargs="+", default=["hf", "gguf f32", "gguf q8_0", "onnx", "html"]
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for path in args.runs:
        run = load_run(path, device="cpu")
        for kind in args.formats:
            rows.append(measure(run, kind))
            print(rows[-1], file=sys.stderr, flush=True)
            save_record({**facts(), "rows": rows}, args.json)
    write_record({**facts(), "rows": rows}, args.json)


if __name__ == "__main__":
    main()
