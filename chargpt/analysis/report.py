"""`report.html`: one page about a run that opens from disk, without a network.

Losses and predictions are those of one checkpoint, computed when the page is written; training
curves and samples are from the run's metrics. The prose is in `pages/report.html`.
"""

import itertools
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chargpt import __version__
from chargpt.analysis import memorization, plots, predictions
from chargpt.analysis.explain import (
    MAX_LINE,
    AttentionMaps,
    attention_maps,
    describe_layers,
    typical_line,
)
from chargpt.analysis.page import encoded, render
from chargpt.analysis.result import MIXTURE_LABEL, RunScores, evaluate_run, summarize
from chargpt.files import quoted
from chargpt.inference.evaluation import OnProgress
from chargpt.inference.generation import PLAIN, sample
from chargpt.models.gpt import GPT
from chargpt.models.gpt2 import GPT2
from chargpt.models.ngram import NGRAM, NGRAM_ORDER
from chargpt.outputs import require_output, write_output
from chargpt.store.layout import REPORT
from chargpt.store.metrics import validation_curve
from chargpt.store.mixture import find_mixture_run
from chargpt.store.run import Run
from chargpt.text.corpus import Corpus
from chargpt.text.display import display_text, end_sign, one_line, whole_graphemes
from chargpt.text.source import STDIN

MAX_PREDICTED = 30_000  # characters of the validation split behind accuracy and calibration
N_SAMPLES, SAMPLE_LENGTH, SEED = 3, 400, 1337
N_DOCUMENTS = 40  # sampled if the text is a list of documents
MAX_TRAINING_SAMPLES = 50  # of those that training wrote, so that a long run's page stays small
PLOT_WIDTH = 5.5  # inches, narrow enough to be read on a phone
MAX_SEARCHED = 20_000_000  # characters of the training split that are searched for overlap

Values = dict[str, Any]
Records = Sequence[Mapping[str, Any]]


def write_report(
    run: Run,
    path: Path | None = None,
    corpus: Corpus | None = None,
    scores: RunScores | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> Path:
    """Evaluate a run and write its page.

    Args:
        run: what `load_run` returned.
        path: of the page; `report.html` in the run's folder by default.
        corpus: the run's text, if it is loaded.
        scores: what `evaluate_run` returned, if already known.
        on_progress: called with the number of sections done, and of all.

    Raises:
        TextError: the run's text is not available.
        ChargptError: the page cannot be written.
    """
    require_output(path or run.folder / REPORT)
    corpus = corpus or run.corpus()
    scores = scores or evaluate_run(run, corpus, mixture_run=find_mixture_run(run))
    records = run.records()
    values: Values = {
        **result(run, corpus, scores, records),
        **curves(run, corpus, scores, records),
        "samples": training_samples(records),
        "eos_token": run.tokenizer.eos_token,
        "document_end": end_sign("document", run.tokenizer.eos_token),
        **reproduction(run),
    }
    slow = (predictions.surprisal, accuracy_and_calibration, attention, overlap)
    for number, section in enumerate(slow, 1):
        values |= section(run, corpus)
        on_progress(number, len(slow))
    page = encoded(render("report.html", script="report.js", **values))
    path = path or run.writable_folder().path / REPORT
    write_output(path, page)
    return path


def result(run: Run, corpus: Corpus, scores: RunScores, records: Records) -> Values:
    """Return what was trained, its losses beside the baselines, and the summary."""
    rows, val = scores.rows(run.config.model.kind), scores.evaluations["val"]
    return {
        "title": one_line(f"{run.config.model.kind} on {corpus.name}"),
        "version": __version__,
        "block_size": val.block_size,
        "scored": scores.scored_on,
        "ngram": NGRAM,
        "mixture_label": MIXTURE_LABEL,
        "ngram_context": NGRAM_ORDER - 1,
        "cards": [
            ("text", f"{corpus.n_characters:,} characters"),
            ("vocabulary", corpus.tokenizer.describe()),
            ("model", f"{run.model.num_parameters():,} parameters"),
            ("checkpoint", f"step {run.step:,}, {run.state.seconds:,.0f} s"),
            ("validation loss", f"{val.nats_per_char:.4f} nats/char"),
            ("bits per character", f"{val.bits_per_char:.4f} bits/char"),
            ("next-character accuracy", f"{val.accuracy:.1%}"),
            ("standard error", f"{val.standard_error:.4f} nats"),
        ],
        "summary": summarize(run, scores, records),
        "losses": rows,
        "highlighted": [i for i, row in enumerate(rows) if row[0].endswith("(trained)")],
    }


def curves(run: Run, corpus: Corpus, scores: RunScores, records: Records) -> Values:
    """Return the curves of loss, learning rate, gradient norm and speed; none without metrics."""
    if not records:
        return {"loss_curves": None}
    train = run.config.train
    validation = validation_curve(records)
    training = plots.smoothed([(r["step"], r["loss"]) for r in records if "loss" in r])
    lines = {name: scores.baseline_losses[name] for name in ("bigram", NGRAM)}
    measured = {"validation": validation, "training": training}
    losses = plots.loss_curves(measured, lines, corpus.name, PLOT_WIDTH)
    optimization = plots.optimization_curves(
        records, run.config.tokens_per_step * corpus.characters_per_token
    )
    last = validation[-1][1] if validation else scores.evaluations["val"].nats_per_char
    return {
        "loss_curves": plots.inline(losses, "loss"),
        "last_validation": last,
        "lines": list(lines.items()),
        "evaluated": f"{train.evaluation_tokens:,}",
        "optimization": plots.inline(optimization, "optimization"),
    }


def training_samples(records: Records) -> list[tuple[str, str]]:
    """Return step and text of the samples written during training: the last, and others evenly."""
    samples = [(f"step {r['step']:,}", r["sample"]) for r in records if "sample" in r]
    every = math.ceil(len(samples) / MAX_TRAINING_SAMPLES) or 1
    return samples[::-every][::-1]


def accuracy_and_calibration(run: Run, corpus: Corpus) -> Values:
    """Return accuracy by context and by kind of character, and the calibration."""
    found = predictions.predict(run.model, corpus.split("val"), MAX_PREDICTED)
    groups = predictions.calibration(found)
    return {
        "by_context": predictions.by_context(found),
        "by_kind": predictions.by_kind(found, run.tokenizer),
        "calibration": plots.inline(plots.calibration(groups), "confidence"),
        "calibration_error": predictions.calibration_error(groups),
        "confidence_gap": float(found.confidence.mean() - found.correct.mean()),
        "predicted": f"{len(found.targets):,}",
        "unit": "token" if run.tokenizer.has_bytes else "character",
    }


def attention(run: Run, corpus: Corpus) -> Values:
    """Return a plot of each head's attention weights on a part of the validation split."""
    if not isinstance(run.model, GPT | GPT2):
        return {"maps": []}
    max_length = min(MAX_LINE, run.model.block_size)
    line = typical_line(run.tokenizer, corpus.split("val"), max_length)
    if not line.size:  # of a split without a known character
        return {"maps": []}
    text, layers = run.tokenizer.decode(line), attention_maps(run.model, line)
    maps: list[AttentionMaps] = []
    for caption, weights in zip(describe_layers(layers), layers, strict=True):
        titles = [f"head {head}" for head in range(1, len(weights) + 1)]
        maps.append(AttentionMaps(text, weights, titles, caption, f"layer{len(maps) + 1}"))
    return {"maps": maps}


def overlap(run: Run, corpus: Corpus) -> Values:
    """Return samples with their verbatim overlap with the training split.

    Documents are also matched as a whole: most are shorter than a verbatim match. They are
    paragraphs of one box.
    """
    if len(corpus.split("train")) > MAX_SEARCHED:
        return {"overlap": None}
    eos_token = run.tokenizer.eos_token
    number = N_DOCUMENTS if eos_token else N_SAMPLES
    settings = {"length": SAMPLE_LENGTH, "num_samples": number, "prompt": "", "stop": ()}
    texts = sample(run, seed=SEED, **{**PLAIN, **settings})
    finished = [text for text in texts if text.is_document]
    found = memorization.measure_overlap(corpus, texts, finished)
    parts = []
    for text, each in zip(texts, found.texts, strict=True):
        spans = [(0, len(text))] if text in found.copied else whole_graphemes(text, each.spans)
        parts.append(split_at(text, spans))
    boxes = [[each] for each in parts]
    if eos_token:
        ends = [end_sign(text.ended, eos_token) for text in texts]
        boxes = [[[*each, (end, False)] for each, end in zip(parts, ends, strict=True)]]
    longest = found.longest_matches()[:1]
    return {
        "overlap": found,
        "n_sampled": number,
        "n_finished": len(finished),
        "n_new": sum(text not in found.known for text in finished),
        "n_copied": sum(text in found.copied for text in finished),
        "kind": run.config.model.kind,
        "sample_length": SAMPLE_LENGTH,
        "temperature": run.config.sample.temperature,
        "min_match": memorization.MIN_MATCH,
        "longest": [(match.length, display_text(match.text)) for match in longest],
        "place": longest and corpus.place_of(longest[0].position),
        "n_val": corpus.count_characters("val"),
        "boxes": boxes,  # each of paragraphs, of parts with whether they are matches
    }


def split_at(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[str, bool]]:
    """Return the parts of a text in order, each with whether it is a verbatim match."""
    edges = [0, *itertools.chain.from_iterable(spans), len(text)]
    parts = enumerate(itertools.pairwise(edges))
    return [(text[start:end], number % 2 == 1) for number, (start, end) in parts]


def reproduction(run: Run) -> Values:
    """Return the command that repeats the run, its environment and its config."""
    state, config = run.state, run.config
    text = ["TEXT"] if config.text.path == STDIN else []  # which the config cannot name
    command = " ".join(map(quoted, ["chargpt", "train", *text, "-c", run.folder / "config.yaml"]))
    is_imported = config.model.kind == "gpt2" and config.train.from_run is None
    return {
        "command": "it was trained by another program" if is_imported else f"{command} --out COPY",
        "environment": [
            ["torch", state.torch],
            ["device", f"{config.device}, {config.dtype}"],
            ["threads", str(state.threads or "unknown")],
            ["processes", str(state.world_size)],
            ["text", one_line(state.text_name)],
            ["key of the text", state.corpus_key or ""],
            ["checkpoint", run.checkpoint],
            ["this page", f"chargpt {__version__}, Python {platform.python_version()}"],
            ["platform of this page", platform.platform()],
        ],
        "config": config.to_yaml(),
    }
