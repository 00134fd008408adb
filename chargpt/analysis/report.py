"""`report.html`: all about a run on one page that opens from disk, without a network.

Every figure is measured when the page is made, on one checkpoint of the run.
"""

import math
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from markupsafe import Markup

from chargpt.analysis import guesses, memorization, plots
from chargpt.analysis.heads import LINE, attention_on_line, head_words, typical_line
from chargpt.analysis.page import render, write_page
from chargpt.analysis.result import RunScores, score_run, summarize
from chargpt.inference.baselines import NGRAM
from chargpt.inference.sampling import stream_run
from chargpt.models.gpt import GPT
from chargpt.models.ngram import ORDER
from chargpt.store.folder import REPORT, RunFolder
from chargpt.store.metrics import validation_curve
from chargpt.store.run import Run
from chargpt.text.corpus import Corpus

PASSAGE = 800  # characters
GUESSED = 30_000  # characters of the validation part that are guessed for the tables
SAMPLES, SAMPLE_LENGTH, SEED = 3, 400, 1337
MOST_SEARCHED = 20_000_000  # characters of training text that are searched for copies
LEVELS = (0.5, 1, 2, 3.5, 5, 7)  # bits from which on a character is marked, ever darker
PARTS = {
    "result": "Result",
    "curves": "Learning",
    "samples": "Samples",
    "surprise": "Surprise",
    "accuracy": "Accuracy",
    "calibration": "Calibration",
    "attention": "Attention",
    "memorization": "Copied or new",
    "again": "Again",
}


def write_report(
    run: Run,
    path: Path | None = None,
    corpus: Corpus | None = None,
    result: RunScores | None = None,
) -> Path:
    """Measure a run and write its page.

    Args:
        run: what `load_run` gives.
        path: of the page; `report.html` in the run's folder by default.
        corpus: the run's text, if it is at hand.
        result: what `score_run` returned, if it is at hand.

    Raises:
        TextError: the run's text is not to be had.
        ChargptError: the page cannot be written.
    """
    corpus = corpus or run.corpus()
    result = result or score_run(run, corpus)
    records = RunFolder(run.folder).metrics.records()
    facts: dict[str, Any] = {
        **overview(run, corpus, result, records),
        **learning(run, corpus, result, records),
        **surprise(run, corpus),
        **strengths(run, corpus),
        **looks(run, corpus),
        **copies(run, corpus),
        **origins(run),
    }
    facts["samples"] = [(f"step {r['step']:,}", r["sample"]) for r in records if "sample" in r]
    shown = {"samples": bool(facts["samples"]), "attention": bool(facts["maps"])}
    facts["parts"] = [(key, name) for key, name in PARTS.items() if shown.get(key, True)]
    page = render("report.html", script="report.js", **facts)
    return write_page(page, path or run.folder / REPORT)


def overview(
    run: Run, corpus: Corpus, result: RunScores, records: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what was trained on what, and what came of it."""
    config, state = run.config, run.state
    rows = result.rows(config.model.kind)
    own = result.losses["val"]
    return {
        "title": f"{config.model.kind} on {corpus.name}",
        "version": version("chargpt"),
        "block_size": own.block_size,
        "scored": f"{own.characters:,}",
        "ngram": NGRAM,
        "ngram_context": ORDER - 1,
        "cards": [
            ("text", f"{len(corpus.tokens):,} characters"),
            ("vocabulary", f"{corpus.tokenizer.vocab_size:,} characters"),
            ("model", f"{run.model.parameter_count():,} parameters"),
            ("trained", f"{run.step:,} steps, {state.seconds:,.0f} s"),
            ("validation loss", f"{own.nats_per_char:.4f} nats/char"),
            ("that is", f"{own.bits_per_char:.4f} bits/char"),
            ("next character guessed", f"{own.accuracy:.1%}"),
            ("standard error", f"{own.standard_error:.4f} nats"),
        ],
        "verdict": summarize(run, result, records),
        "losses": [
            [model, part, f"{nats:.4f}", f"{nats / math.log(2):.4f}", f"{math.exp(nats):,.2f}"]
            for model, part, nats in rows
        ],
        "ours": [index for index, row in enumerate(rows) if row[0].endswith("(trained)")],
    }


def learning(
    run: Run, corpus: Corpus, result: RunScores, records: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the curves."""
    train = run.config.train
    validation = validation_curve(records)
    last = validation[-1][1] if validation else result.losses["val"].nats_per_char
    trained = plots.thinned([(r["step"], r["loss"]) for r in records if "loss" in r])
    lines = {name: nats for name, nats in result.baselines.items() if name in ("bigram", NGRAM)}
    words = ", ".join(f"the {name} at {nats:.3f}" for name, nats in lines.items())
    figure = plots.loss_curves({"validation": validation, "training": trained}, lines, corpus.name)
    pace = plots.pace(records, train.batch_size * run.config.model.block_size)
    return {
        "curves": Markup(plots.inline(figure, "loss")),
        "curves_words": f"Loss against steps: validation ends at {last:.3f} nats per character, "
        f"beside {words}",
        "evaluated": f"{train.evaluate_characters:,}",
        "pace": Markup(plots.inline(pace, "pace")),
    }


def surprise(run: Run, corpus: Corpus) -> dict[str, Any]:
    """Return a passage of the validation part, and what the model expected at each place."""
    found = guesses.passage(run.model, run.tokenizer, corpus.split("val"), PASSAGE)
    text = "".join(place.character for place in found)
    worst = sorted(range(len(found)), key=lambda i: -found[i].bits)[:8]
    return {
        "passage": [
            {
                "character": place.character,
                "shown": shown(place.character),
                "level": sum(place.bits >= level for level in LEVELS),
            }
            for place in found
        ],
        "passage_bits": sum(place.bits for place in found) / len(found),
        "best": len(found[0].best),
        "places": [
            [
                quoted(place.character),
                round(place.bits, 3),
                [[quoted(character), round(share, 4)] for character, share in place.best],
            ]
            for place in found
        ],
        "surprises": [
            [
                "".join(map(plots.visible, text[max(0, i - 20) : i])),
                plots.visible(found[i].character),
                f"{found[i].bits:.1f}",
                ", ".join(f"{plots.visible(c)} {share:.0%}" for c, share in found[i].best[:3]),
            ]
            for i in worst
        ],
    }


def shown(character: str) -> str:
    """Return how a character stands in a passage: a line's end as a sign, before its break."""
    return character if character == " " else plots.visible(character)


def quoted(character: str) -> str:
    """Return a character as one speaks of it."""
    names = {" ": "a space", "\n": "a line's end", "\t": "a tab"}
    return names.get(character, plots.visible(character))


def strengths(run: Run, corpus: Corpus) -> dict[str, Any]:
    """Return where the model is right, and whether it knows when."""
    found = guesses.guess(run.model, corpus.split("val"), GUESSED)
    groups = guesses.calibration(found)
    error = guesses.calibration_error(groups)
    mean_gap = float(found.sure.mean() - found.right.mean())
    leaning = "too sure of itself" if mean_gap > 0 else "not sure enough"
    return {
        "by_context": guesses.by_context(found),
        "by_kind": guesses.by_kind(found, run.tokenizer),
        "calibration": Markup(plots.inline(plots.calibration(groups), "sure")),
        "calibration_words": f"The share that it gives to its best guess differs from how often "
        f"that guess comes by {error:.1%} on average (the expected calibration error, on "
        f"{len(found.came):,} characters); on the whole it is {abs(mean_gap):.1%} {leaning}.",
    }


def looks(run: Run, corpus: Corpus) -> dict[str, Any]:
    """Return pictures of what each head looks at on a line of the validation part."""
    if not isinstance(run.model, GPT):
        return {"maps": []}
    most = min(LINE, run.model.block_size)
    line = typical_line(run.tokenizer, corpus.split("val"), most)
    text, layers = run.tokenizer.decode(line), attention_on_line(run.model, line)
    maps = []
    for number, weights in enumerate(layers, 1):
        words = "; ".join(head_words(weights))
        titles = [f"head {head}" for head in range(1, len(weights) + 1)]
        figure = plots.attention(weights, text, titles)
        maps.append(
            (
                f"layer {number}: {words}",
                Markup(plots.inline(figure, f"layer{number}")),
                f"layer {number}",
            )
        )
    return {"maps": maps}


def copies(run: Run, corpus: Corpus) -> dict[str, Any]:
    """Return samples with what is copied in them marked, and how much is new."""
    if len(corpus.split("train")) > MOST_SEARCHED:
        words = "The training text is long: chargpt sample --check searches it."
        return {"copied": [words], "novel": [], "marked": []}
    settings = run.config.sample.model_copy(
        update={
            "prompt": "",
            "length": SAMPLE_LENGTH,
            "num_samples": SAMPLES,
            "seed": SEED,
            "stop": (),
        }
    )
    texts = [""] * SAMPLES
    for pieces in stream_run(run, settings):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    found = memorization.measure_overlap(corpus, texts)
    longest = [memory.longest.length for memory in found.texts if memory.longest]
    unseen = [memory.longest.length for memory in found.held_out if memory.longest]
    least = memorization.MIN_MATCH

    def most(lengths: list[int]) -> str:
        return f"{max(lengths)} characters" if lengths else f"under {least} characters"

    return {
        "copied": [
            f"{SAMPLES} samples of {SAMPLE_LENGTH} characters, at temperature "
            f"{settings.temperature:g}; what stands in the training text word for word, of "
            f"{least} characters or more, is marked. The longest such stretch: {most(longest)}; "
            f"in as much of the validation part, which it never saw: {most(unseen)}."
        ],
        "novel": [
            [str(length), f"{ours:.1%}", f"{theirs:.1%}"]
            for length, ours, theirs in found.novel()
            if length <= 2 * least
        ],
        "marked": [
            list(pieces_of(text, memory.copied))
            for text, memory in zip(texts, found.texts, strict=True)
        ],
    }


def pieces_of(text: str, copied: Sequence[tuple[int, int]]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text in order, each with whether it is copied."""
    end = 0
    for start, stop in copied:
        yield text[end:start], False
        yield text[start:stop], True
        end = stop
    yield text[end:], False


def origins(run: Run) -> dict[str, Any]:
    """Return how to make the run again, and what it was made with."""
    state, config = run.state, run.config
    return {
        "again": shlex.join(["chargpt", "train", "-c", str(run.folder / "config.yaml")])
        + " --out AGAIN",
        "environment": [
            ["torch", state.torch],
            ["device", f"{config.device}, {config.dtype}"],
            ["threads", str(state.threads or "unknown")],
            ["processes", str(state.world_size)],
            ["text", state.text],
            ["its key in the cache", state.corpus or ""],
            ["checkpoint", run.checkpoint],
            ["this page", f"chargpt {version('chargpt')}, Python {platform.python_version()}"],
            ["made on", platform.platform()],
        ],
        "config": config.to_yaml(),
    }
