"""Parity of exports: each format's runtime beside the run, on runs of different kinds.

    python scripts/bench/bench_export.py RUN [RUN ...] [--json benchmarks/export.json]

For each run and format: the largest difference of a log-probability on 64 prompts, whether the
greedy text of 200 characters is the same, and the loss of the exported model (protocol blocks) on
the first 20,000 characters of the validation split, beside that of the run. The page is measured in
Chromium, which leaves out blocks that begin within a character that bytes spell; its greedy text is
compared with that of `sample`.
"""

import argparse
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from playwright.sync_api import Playwright, sync_playwright
from record import provenance, save_record, write_record

from chargpt.export import gguf, html, huggingface, onnx
from chargpt.export.check import (
    Logits,
    Runtime,
    compare,
    encode,
    exportable_model,
    log_softmax,
    logits,
    prompts,
)
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.inference.generation import sample
from chargpt.models import build_model
from chargpt.models.gpt import GPT
from chargpt.store.run import Run, load_run

CHARACTERS = 20_000
N_GREEDY = 200  # tokens of greedy text
# starts another worker of the page
START = """([worker, pageData, weights]) => {
  window.asked = new Worker(URL.createObjectURL(new Blob([worker])));
  window.asked.postMessage({ pageData: JSON.parse(pageData), weights });
  window.askedCount = 0;
}"""
# asks that worker for a continuation; returns the records of all tokens
ASK = """([tokens, length, isNew]) => new Promise((resolve) => {
  const id = ++window.askedCount, records = [];
  window.asked.onmessage = ({ data }) => {
    if (data.id !== id) return;
    records.push(...data.batch);
    if (data.isDone) resolve(records);
  };
  const settings = { length, temperature: 0, topK: 1 << 20, seed: 1 };
  // another token first, since the worker reads again only what its cache does not share
  const other = { ...settings, id: -1, tokens: [tokens[0] ? 0 : 1], length: 0 };
  if (isNew) window.asked.postMessage(other);
  window.asked.postMessage({ ...settings, id, tokens });
})"""


class PageInChromium:
    """The page as Chromium opens it: what its worker answers."""

    def __init__(self, path: Path, driver: Playwright) -> None:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        self.browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        self.page = self.browser.new_page()
        self.page.goto(path.as_uri())
        content = path.read_text(encoding="utf-8")
        found = [
            re.search(rf'<script[^>]* id="{name}">(.*?)</script>', content, re.DOTALL)
            for name in ("worker", "page-data", "weights")
        ]
        self.page.evaluate(START, [each[1] for each in found if each])
        self.name = f"Chromium {self.browser.version}"

    def ask(
        self, tokens: list[int], length: int = 0, *, is_new: bool = True
    ) -> list[dict[str, Any]]:
        """Return the worker's record of each token, at most a block, and of `length` more.

        Unless `is_new`, tokens may exceed the block by those that the last call did not have, whose
        records are returned.
        """
        found: list[dict[str, Any]] = self.page.evaluate(ASK, [tokens, length, is_new])
        return found

    def is_same_greedy(self, run: Run, text: str) -> bool:
        """Return whether N_GREEDY tokens after the first ones of a text are those of `sample`."""
        text = text[: max(1, run.model.block_size // 8)]
        given = encode(run.tokenizer, text)
        found = [record["token"] for record in self.ask(given, N_GREEDY)[len(given) :]]
        ours = sample(run, prompt=text, temperature=0, length=N_GREEDY, num_samples=1, stop=())[0]
        return text + run.tokenizer.decode(found) == ours

    def measure(self, run: Run, tokens: list[int]) -> dict[str, Any]:
        """Return largest difference, whether greedy text is the same, and the loss."""
        texts = prompts(run)
        difference = 0.0
        for text in texts:
            given = encode(run.tokenizer, text)
            rows = log_softmax(logits(run.model, given))
            for row, record in zip(rows, self.ask(given)[1:], strict=False):
                # the worker reports the most likely tokens only
                for token, prob, _ in record["top"]:
                    if prob > 0:
                        difference = max(difference, abs(math.log(prob) - row[token]))
        same = all(map(partial(self.is_same_greedy, run), texts[:4]))
        size, theirs, ours, characters = run.model.block_size, 0.0, 0.0, 0
        for start in range(0, len(tokens) - 1, size):
            block = tokens[start : start + size + 1]
            if block[0] >= run.model.first_continuation_id:
                continue  # the page begins at whole characters
            records = [*self.ask(block[:-1])[1:], *self.ask(block, is_new=False)]
            assert len(records) == len(block) - 1
            theirs += sum(record["bits"] for record in records) * math.log(2)
            rows = log_softmax(logits(run.model, block[:-1]))
            ours -= rows[np.arange(len(rows)), block[1:]].sum()
            characters += run.tokenizer.count_characters(np.array(block[1:]))
        losses = {"loss": theirs / characters, "loss of the run": ours / characters}
        return {"difference": difference, "greedy": same, **losses}


@contextmanager
def open_export(kind: str, run: Run, folder: Path) -> Iterator[Runtime]:
    """Export a run, and open what was written."""
    model = exportable_model(run, kind)
    if kind == "hf":
        huggingface.export_huggingface(run, folder / "hf")
        yield huggingface.TransformersRuntime(folder / "hf")
    elif kind.startswith("gguf"):
        path, precision = folder / "model.gguf", cast("gguf.Precision", kind.partition(" ")[2])
        gguf.export_gguf(run, path, precision)
        # llama.cpp wants room for one more token than the block that is scored
        size = model.block_size + 1
        longer = build_model(model.config.model_copy(update={"block_size": size}), model.vocab_size)
        assert isinstance(longer, GPT)
        longer.load_state_dict(model.state_dict())
        gguf.write_gguf(path, run, longer, precision)
        yield gguf.LlamaRuntime(path, threads=2)
    else:
        onnx.export_onnx(run, folder / "model.onnx")
        yield onnx.OnnxRuntime(folder / "model.onnx")


def full_loss(runtime: Runtime, run: Run, tokens: list[int]) -> float:
    """Return the loss of protocol blocks in nats per character, from the runtime's logits."""
    size, losses = run.model.block_size, []
    for start in range(0, len(tokens) - 1, size):
        block = tokens[start : start + size]
        targets = tokens[start + 1 : start + 1 + size]
        found = log_softmax(runtime.logits(block[: len(targets)])[-len(targets) :])
        while len(found) < len(targets):  # of a runtime of single positions
            before = log_softmax(runtime.logits(block[: len(targets) - len(found)]))
            found = np.concatenate((before, found))
        losses.append(-found[np.arange(len(targets)), targets])
    characters = run.tokenizer.count_characters(np.array(tokens[1:]))
    return float(np.concatenate(losses).sum() / characters)


def measure(run: Run, kind: str) -> dict[str, Any]:
    """Return the row of one run and format."""
    scored = run.corpus().split("val")[: CHARACTERS + 1]
    ours, tokens = evaluate_tokens(run.model, scored).nats_per_char, scored.tolist()
    with tempfile.TemporaryDirectory() as folder:
        if kind == "html":
            path = Path(folder) / "model.html"
            html.export_html(run, path)
            with sync_playwright() as driver:
                page = PageInChromium(path, driver)
                name, found = page.name, page.measure(run, tokens)
        else:
            with open_export(kind, run, Path(folder)) as runtime:
                name, found = runtime.name, measure_runtime(runtime, run, tokens)
    return {
        "run": run.folder.name,
        "parameters": run.model.num_parameters(),
        "format": kind,
        "runtime": name,
        "difference": float(f"{found['difference']:.1e}"),
        "greedy": found["greedy"],
        "loss": round(found["loss"], 6),
        "loss of the run": round(float(found.get("loss of the run", ours)), 6),
    }


def measure_runtime(runtime: Runtime, run: Run, tokens: list[int]) -> dict[str, Any]:
    """Return largest difference, whether greedy text is the same, and the loss."""
    difference = compare(run, runtime, max_divergence=1.0).difference
    same = greedy(runtime.logits, run) == greedy(partial(logits, run.model), run)
    return {"difference": difference, "greedy": same, "loss": full_loss(runtime, run, tokens)}


def greedy(logits_of: Callable[[list[int]], Logits], run: Run) -> list[list[int]]:
    """Return prompts with their greedy continuations of at most a block, N_GREEDY tokens in all."""
    found, remaining, size = [], N_GREEDY, run.model.block_size
    for text in prompts(run):
        tokens = encode(run.tokenizer, text)[: max(1, size // 4)]
        length = min(remaining, size - len(tokens))
        for _ in range(length):
            tokens = [*tokens, int(logits_of(tokens)[-1].argmax())]
        found.append(tokens)
        remaining -= length
    return found


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
            save_record({**provenance(), "rows": rows}, args.json)
    write_record({**provenance(), "rows": rows}, args.json)


if __name__ == "__main__":
    main()
