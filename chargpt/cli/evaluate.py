"""`chargpt evaluate` and `chargpt score`: how well a run predicts a text, and its lines."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from chargpt.analysis.result import MIXTURE_LABEL, loss_cells
from chargpt.cli import console, options, runs, tables
from chargpt.errors import RunError, Stopped
from chargpt.files import quoted
from chargpt.inference import evaluation, scoring
from chargpt.inference.evaluation import Evaluation, EvaluationProtocol
from chargpt.store.mixture import has_mixture
from chargpt.store.run import Run
from chargpt.text.describe import warn_of_repeats
from chargpt.text.source import read_text
from chargpt.training.adaptive import adaptive_losses

SHOWN = 3  # lines at each end of the ranking
COLUMNS = ("nats/char", "bits/char", "perplexity", "accuracy", "std error")
MAX_SHOWN = 200  # characters of a line: the table cuts it where the terminal ends


def evaluate(
    run: options.RunOrNewest = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Another text to measure on.")
    ] = None,
    split: Annotated[
        Literal["train", "val", "test"] | None,
        typer.Option(help="Part of the run's text; val by default."),
    ] = None,
    protocol: Annotated[
        EvaluationProtocol, typer.Option(help="How the loss is measured.")
    ] = "blocks",
    stride: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Tokens by which the window moves; default half a block."
        ),
    ] = None,
    max_characters: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Score at most N characters, evenly spread."),
    ] = None,
    checkpoint: options.Checkpoint = "best",
    unknown: options.UnknownOption = None,
    mixture: Annotated[
        bool | None,
        typer.Option(
            "--mixture/--no-mixture", help="Also measure the run's mixture; default: if it has one."
        ),
    ] = None,
    json_: options.Json = False,
    device: options.Device = None,
    encoding: options.RunEncoding = None,
    encoding_errors: options.EncodingErrors = None,
) -> None:
    """Evaluate a run's loss on its own text or another.

    Blocks are scored in random order; Ctrl-C prints the loss of those scored so far.

    Examples: `chargpt evaluate`, `chargpt evaluate runs/novel --protocol sliding --json`,
    `chargpt evaluate runs/novel --text other.txt --unknown skip`.
    """
    if protocol != "sliding":
        options.reject({"--stride": stride}, "applies only to --protocol sliding")
    if text is not None:
        options.reject({"--split": split}, "applies to the run's text, and --text is another")
    split = split or "val"
    wanted = options.given_settings(encoding=encoding, encoding_errors=encoding_errors)
    if text is None:
        given = {"--encoding or --encoding-errors": wanted, "--unknown": unknown}
        options.reject(given, "applies to another text of --text, and there is none")
    loaded = runs.load_named_run(run, checkpoint, device)
    tokens, found = None, ""
    if text is not None:  # read once: it may be standard input
        settings = loaded.config.with_values(wanted).text
        content = loaded.tokenizer.choose_form(read_text(text, settings))
        tokens = loaded.tokenizer.encode(content, unknown or settings.unknown)
        found = loaded.tokenizer.find_unknown(content)
        runs.warn_of_own_text(loaded, str(text), content)
    elif split == "val" and (warning := warn_of_repeats(loaded.corpus())):
        console.say(warning)

    caught: list[int] = []
    chosen = {"split": split, "protocol": protocol, "tokens": tokens, "stride": stride}
    chosen["max_characters"] = max_characters
    start, kind = time.perf_counter(), loaded.config.model.kind
    result = measure(loaded, kind, chosen, caught, found)
    seconds = time.perf_counter() - start
    measured = {f"{kind}, step {loaded.step:,}": result}
    wants_mixture = not caught and (has_mixture(loaded) if mixture is None else mixture)
    if wants_mixture and split == "train":
        console.say(f"without {MIXTURE_LABEL}: the n-grams were counted from the training split")
    elif wants_mixture:
        try:
            mixed = runs.load_run_mixture(loaded)
            measured[MIXTURE_LABEL] = measure(mixed, MIXTURE_LABEL, chosen, caught, found)
        except RunError as error:
            if mixture:
                raise
            console.say(str(error))
    runs.say_unknown(loaded, found, unknown)
    name = str(text) if text else loaded.state.text_name
    if json_:
        facts = {
            **result.as_dict(),
            "parameters": loaded.model.num_parameters(),
            "step": loaded.step,
            "evaluation_seconds": round(seconds, 3),
            "chars_per_second": round(result.characters / seconds),
            "run": str(loaded.folder),
            "text": name,
        }
        if MIXTURE_LABEL in measured:
            facts["mixture"] = measured[MIXTURE_LABEL].as_dict()
        console.out_json(facts)
    else:
        is_whole = result.characters >= (result.of_characters or 0)
        part = f"{split} split" if not text else "all of it" if is_whole else "a part of it"
        origin = f" of {result.held_out}" if result.held_out else ""
        show(loaded, measured, f"{name}, {part}{origin}", seconds)
    if caught:
        raise Stopped(caught[0])


def measure(
    run: Run, name: str, chosen: dict[str, Any], caught: list[int], unknown: str
) -> Evaluation:
    """Evaluate a run with a progress bar; a signal ends it, and is appended to `caught`.

    `unknown` are the characters of another text that the vocabulary lacks.
    """
    with runs.stoppable_progress(runs.unit_of(run), f"scored, {name}", caught) as callbacks:
        result = evaluation.evaluate(run, **callbacks, **chosen)
    if caught:
        console.say("the loss is that of the blocks scored so far, a random part of the text")
    return replace(result, n_unknown=result.n_unknown or len(unknown))


def show(run: Run, measured: Mapping[str, Evaluation], title: str, seconds: float) -> None:
    """Print what was measured of a run and its mixture: a table, and the losses of documents.

    `seconds`: that measuring the run took.
    """
    result, *_ = measured.values()
    tables.table(
        ["model", *COLUMNS],
        [[name, *cells(each)] for name, each in measured.items()],
        title=f"{title}: protocol {result.protocol}, blocks of {result.block_size}",
    )
    for name, each in measured.items():
        if each.nats_per_document is not None:
            console.out(f"{each.nats_per_document:.2f} nats/document ({name})")
    if result.nats_per_document is not None:
        sentence = "nats/document: with the documents before each as context"
        if run.config.text.documents == "lines":
            command = f"chargpt score {quoted(run.folder)} FILE"
            sentence = f"{sentence}; {command} scores each line on its own"
        console.out_sentence(sentence)
    for name, each in measured.items():
        if each.characters != result.characters:  # a signal has stopped it
            console.out_sentence(f"{scored_characters(each)} scored ({name})")
    console.out_sentence(
        f"{scored_characters(result)} scored in {console.duration(seconds)} "
        f"({console.short(result.characters / seconds)} characters/s) on {run.model.device.type}"
    )
    if result.protocol == "nanogpt":
        console.out_sentence("its random blocks overlap: the standard error is too small")


def cells(result: Evaluation) -> list[str]:
    """Return the cells of an evaluation under COLUMNS."""
    error = f"{result.standard_error:.4f}"
    return [*loss_cells(result.nats_per_char), f"{result.accuracy:.2%}", error]


def scored_characters(result: Evaluation) -> str:
    """Return `99,840 of 1,115,393 characters`, or the number alone if all were scored."""
    total = result.of_characters or result.characters
    of = f"{result.characters:,} of " if result.characters < total else ""
    return of + console.characters(total)


def score(
    run: options.RunPath,
    text: Annotated[
        str, typer.Argument(metavar="FILE", help="The text; - or nothing for standard input.")
    ] = "-",
    per_line: Annotated[
        bool,
        typer.Option(
            "--per-line",
            help="Print bits per character, bits, number and text of every line, highest first. "
            "The lines before a line are its context, but for a run of text.documents=lines, which "
            "scores each on its own.",
        ),
    ] = False,
    unknown: options.UnknownOption = None,
    with_: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="RUN", help="Another run to mix with; may be repeated."),
    ] = None,
    mix: options.Mix = None,
    mixture: options.Mixture = False,
    adaptive: options.Adaptive = False,
    checkpoint: options.Checkpoint = "best",
    encoding: options.RunEncoding = None,
    encoding_errors: options.EncodingErrors = None,
    json_: options.Json = False,
    device: options.Device = None,
) -> None:
    """Print the surprisal of a text and its lines under a run.

    Examples: `chargpt score runs/novel chapter.txt`,
    `chargpt score runs/novel --per-line < chapter.txt | head`,
    `chargpt score runs/dickens chapter.txt --with runs/austen --mix 0.3`.
    """
    if with_:
        options.reject(
            {"--adaptive": adaptive}, "lets one run learn from the text, and --with names another"
        )
    loaded = runs.load_runs(
        [run, *(with_ or [])], mix, checkpoint, device, mixture=mixture or adaptive
    )
    changes = options.given_settings(encoding=encoding, encoding_errors=encoding_errors)
    if loaded.config.text.documents in ("lines", "files"):  # the text may be a part of one
        changes |= {"text.documents": None}
    content = read_text(text, loaded.config.with_values(changes).text)
    content = loaded.tokenizer.choose_form(content)
    runs.warn_of_own_text(loaded, text, content)
    with console.show_progress(runs.unit_of(loaded), "scored") as on_progress:
        scored = scoring.score(
            loaded,
            content,
            unknown=unknown,
            adaptive_losses=adaptive_losses if adaptive else None,
            on_progress=on_progress,
        )
    runs.say_unknown(loaded, loaded.tokenizer.find_unknown(scored.text), unknown)
    lines = scored.lines()
    if json_:
        result = {
            "bits_per_char": scored.bits_per_char,
            "protocol": scored.protocol,
            "characters": len(scored.bits),
            "n_unknown": scored.n_unknown,
            "run": str(run),
            "text": text,
            "lines": [vars(line) for line in lines],
            **runs.mix_json(loaded),
        }
        console.out_json(result)
        return
    ranked = sorted(lines, key=lambda line: -line.bits_per_char)
    if per_line:
        console.say("bits per character, bits, number and text of each line, highest first:")
        for line in ranked:
            figures = f"{line.bits_per_char:.3f}\t{line.bits:.2f}\t{line.number}"
            left_out = f"\t{line.n_skipped} left out" if line.n_skipped else ""
            console.out_text(f"{figures}\t{line.text}{left_out}\n")
        return
    console.out(
        f"{console.characters(len(scored.bits))}: {scored.bits_per_char:.3f} bits per character "
        f"(protocol {scored.protocol})"
    )
    show_extremes(ranked)


def show_extremes(ranked: list[scoring.Line]) -> None:
    """Print a table of the distinct lines at both ends of the ranking."""
    distinct: dict[str, scoring.Line] = {}
    for line in ranked:
        distinct.setdefault(line.text, line)
    if len(distinct) < 2:
        return
    rows = []
    for line in distinct.values():
        text = line.text.expandtabs(4)[:MAX_SHOWN]
        left_out = f"({line.n_skipped} left out) " if line.n_skipped else ""
        rows.append([f"{line.bits_per_char:.3f}", f"{line.number:,}", left_out + text])
    if len(rows) > 2 * SHOWN:
        rows = [*rows[:SHOWN], ["...", "", ""], *rows[-SHOWN:]]
    header = ["bits/char", "line", "distinct lines by surprisal, highest first"]
    tables.table(header, rows, text_column=len(header) - 1, clean=console.text_cell)
