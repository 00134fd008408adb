"""Export as one HTML page that holds the model and runs it in a browser.

The page (`pages/play.html`) loads nothing: the weights in half precision and the data about model
and vocabulary are data blocks in it, and `pages/worker.js` computes the model. The check here
covers the rounding of the weights; tests/test_play.py runs the page in a browser.

Shapes in this file: V = vocabulary size.
"""

import base64
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from torch import Tensor

from chargpt import __version__
from chargpt.analysis.page import encoded, render
from chargpt.analysis.predictions import SURPRISAL_BITS
from chargpt.config import NORM_EPS
from chargpt.errors import ChargptError
from chargpt.export.check import ExportCheck, Logits, compare, encode, exportable_model, logits
from chargpt.models import build_model
from chargpt.models.gpt import GPT
from chargpt.models.ngram import BIGRAM_ALPHA
from chargpt.outputs import write_new, write_output
from chargpt.store.run import Run
from chargpt.text.corpus import PairCounts
from chargpt.text.display import CONTROL_NAMES, display_text
from chargpt.text.tokenizer import TRANSITIONS

MAX_DIVERGENCE = 0.002  # in nats, by the rounding of the weights
MAX_PAIRS = 50_000  # of the bigram, the most frequent ones
PAGES = Path(__file__).parent / "pages"


class RoundedModel:
    """The run's GPT with the weights that the page holds."""

    name = "chargpt's own runtime"

    def __init__(self, run: Run, weights: dict[str, Tensor]) -> None:
        self.tokenizer = run.tokenizer
        self.model = build_model(run.config.model, run.model.vocab_size).eval()
        self.model.load_state_dict(weights)

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)

    def logits(self, tokens: list[int]) -> Logits:
        return logits(self.model, tokens)


def export_html(run: Run, path: Path, *, force: bool = False, is_new: bool = False) -> ExportCheck:
    """Write a run's model as one page, after a check of its rounded weights.

    Args:
        run: with a GPT that Qwen3's architecture can hold.
        path: of the page; a page that nobody has edited since chargpt wrote it is replaced.
        force: replace any file.
        is_new: replace no page either, unless `force`.

    Raises:
        ConfigError: the model cannot be exported, or the file is of another origin or cannot be
            written.
        OperationError: half precision changes the model too much.
    """
    weights = half_weights(exportable_model(run, "an HTML page"))
    check = compare(run, RoundedModel(run, weights), MAX_DIVERGENCE)
    write = write_new if is_new else write_output
    write(path, encoded(make_page(run, weights)), force=force)
    return check


def half_weights(model: GPT) -> dict[str, Tensor]:
    """Return the weights in half precision, by name, as the page holds them."""
    return {name: tensor.half().cpu() for name, tensor in model.state_dict().items()}


def make_page(run: Run, weights: dict[str, Tensor]) -> str:
    """Return the page as text."""
    content = b"".join(weight.numpy().tobytes() for weight in weights.values())
    name = display_text(run.folder.resolve().name, keep_spaces=True)
    return render(
        "play.html",
        script="play.js",
        folder=PAGES,
        policy="; worker-src blob:",
        title=f"Play: {name}",
        version=__version__,
        run=run,
        page_data=page_data(run, weights),
        worker=Markup((PAGES / "worker.js").read_text("utf-8")),
        weights=base64.b64encode(content).decode(),
    )


def page_data(run: Run, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Return what the page's scripts need beside the weights."""
    tokenizer = run.tokenizer
    data: dict[str, Any] = {
        "model": run.config.model.model_dump(),
        "norm_eps": NORM_EPS,
        # in the order of the data block of weights
        "tensors": [(name, weight.numel()) for name, weight in weights.items()],
        "thresholds": SURPRISAL_BITS,
        "tokenizer": json.loads(tokenizer.to_json()),
        "vocab_size": tokenizer.vocab_size,
        "bytes": list(tokenizer.bytes_),
        "transitions": TRANSITIONS,
        "first_continuation_id": tokenizer.first_continuation_id,
        "eos_token_id": tokenizer.eos_token_id if tokenizer.eos_token else None,
        "bos_text": tokenizer.bos_text,
        "prompt": run.config.sample.prompt,
        "control_names": CONTROL_NAMES,
        "counts": None,
        "bigram": None,
    }
    with suppress(ChargptError):  # the text may have been deleted
        corpus = run.corpus()
        data["bigram"] = bigram_data(corpus.pair_counts("train"))
        if not tokenizer.bos_text:
            data["counts"] = corpus.token_counts("train").tolist()
    return data


def bigram_data(pairs: PairCounts) -> dict[str, Any]:
    """Return the most frequent pairs: of each first token, the second ones and their counts."""
    rows: dict[int, list[int]] = {}
    for index in np.sort(np.argsort(-pairs.counts, kind="stable")[:MAX_PAIRS]):
        row = rows.setdefault(int(pairs.first[index]), [])
        row += (int(pairs.second[index]), int(pairs.counts[index]))
    return {"alpha": BIGRAM_ALPHA, "rows": rows}
