"""Benchmark of the page of `chargpt play` in headless Chromium.

    python scripts/bench/bench_play.py [--repeats 3] [--json benchmarks/play.json]

Two models with random weights, because speed does not depend on them: that of the config `gpt`
(4 layers, width 128, block size 128), and one of 6 layers, width 384 and block size 256. Each
repeat opens the page again and lets it continue a line at temperature 1 beyond the block size.

Times, in seconds: from opening the page to the first character, with the weights' decoding, and
from asking for a continuation to its first character. Characters per second are those of a whole
continuation as the page shows it.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Browser, sync_playwright
from record import provenance, write_record

from chargpt.config import Config
from chargpt.export.html import export_html
from chargpt.models import build_model
from chargpt.models.gpt import GPT
from chargpt.store.checkpoint import RunState
from chargpt.store.run import Run
from chargpt.text.tokenizer import CharTokenizer

SIZES = {
    "4 layers, width 128, block 128": (4, 128, 2, 128),
    "6 layers, width 384, block 256": (6, 384, 6, 256),
}
LENGTH = 600
CONTINUE = """(length) => new Promise((resolve) => {
  const start = performance.now(), given = document.querySelectorAll("#view span").length;
  let first = 0;
  document.getElementById("length").value = length;
  new MutationObserver(() => {
    const count = document.querySelectorAll("#view span").length - given;
    if (count > 0 && !first) first = performance.now();
    if (count >= length) resolve({
      opening: first / 1000, first: (first - start) / 1000,
      speed: length * 1000 / (performance.now() - start),
    });
  }).observe(document.getElementById("view"), { childList: true });
  document.getElementById("continue").click();
})"""


def make_page(sizes: tuple[int, int, int, int], path: Path) -> int:
    """Write the page of a model with random weights; return its number of parameters."""
    names = ("n_layer", "n_embd", "n_head", "block_size")
    values = {f"model.{name}": size for name, size in zip(names, sizes, strict=True)}
    config = Config().with_values({**values, "sample.prompt": "THE FIRST LINE."})
    tokenizer = CharTokenizer("\n" + "".join(map(chr, range(32, 96))))
    torch.manual_seed(0)
    model = build_model(config.model, tokenizer.vocab_size).eval()
    assert isinstance(model, GPT)
    torch.nn.init.normal_(model.head.weight, std=0.02)
    export_html(Run(path.parent, config, tokenizer, model, 1, RunState(1)), path, force=True)
    return model.num_parameters()


def measure(browser: Browser, path: Path) -> dict[str, float]:
    """Open a page and return the times and the speed of a continuation."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    start = time.perf_counter()
    page.goto(path.as_uri())
    loading = time.perf_counter() - start
    opened = page.evaluate(CONTINUE, 1)
    page.locator("#status").filter(has_text="per second").wait_for()
    continued = page.evaluate(CONTINUE, LENGTH)
    page.close()
    return {
        "page_seconds": loading,
        "open_to_first_character_seconds": opened["opening"],
        "first_character_seconds": continued["first"],
        "characters_per_second": continued["speed"],
    }


def main() -> None:
    """Measure both models and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    record: dict[str, Any] = {**provenance(), "models": {}}
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        record["browser"] = f"Chromium {browser.version}, headless"
        for name, sizes in SIZES.items():
            path = Path(folder, "play.html")
            parameters = make_page(sizes, path)
            runs = [measure(browser, path) for _ in range(arguments.repeats)]
            medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            record["models"][name] = {
                "parameters": parameters,
                "page_bytes": path.stat().st_size,
                **{key: float(f"{value:.3g}") for key, value in medians.items()},
            }
    write_record(record, arguments.json)


if __name__ == "__main__":
    main()
