"""`chargpt score`: surprisal of a text and its lines under a run."""

import sys
from typing import Annotated

import typer

from chargpt.cli import console, options, runs, tables
from chargpt.errors import MissingTextError
from chargpt.inference import scoring
from chargpt.text.prepare import read_text
from chargpt.training.adaptive import adaptive_losses

SHOWN = 3  # lines at each end of the ranking
MAX_SHOWN = 200  # characters of a line: the table cuts it where the terminal ends


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
    mixture: options.Mixture = False,
    adaptive: options.Adaptive = False,
    checkpoint: options.Checkpoint = "best",
    encoding: options.Encoding = None,
    encoding_errors: options.EncodingErrors = None,
    json_: options.Json = False,
    device: options.Device = None,
) -> None:
    """Print the surprisal of a text and its lines under a run.

    Examples: `chargpt score runs/novel chapter.txt`,
    `chargpt score runs/novel --per-line < chapter.txt | head`.
    """
    loaded = runs.load_named_run(run, checkpoint, device, mixture=mixture or adaptive)
    if text == "-" and sys.stdin is not None and sys.stdin.isatty():
        console.say("type the text; Ctrl-D ends it")
    changes = options.given_settings(encoding=encoding, encoding_errors=encoding_errors)
    settings = loaded.config.with_values({**changes, "text.documents": None}).text
    try:
        content = read_text(text, settings)
    except MissingTextError as error:
        raise MissingTextError(
            f"{error}; to score a text itself, pipe it in: echo TEXT | chargpt score {run}"
        ) from None
    runs.warn_of_own_text(loaded, text, content)
    separator = loaded.config.text.documents
    if separator not in (None, "lines", "files") and separator in content:
        console.say(
            f"scored as it stands, with the separators of documents (text.documents={separator!r}) "
            "as text; chargpt evaluate --text ends documents there, as training did"
        )
    with console.show_progress("character", "scored") as on_progress:
        scored = scoring.score(
            loaded,
            content,
            unknown=unknown,
            adaptive_losses=adaptive_losses if adaptive else None,
            on_progress=on_progress,
        )
    runs.say_unknown(loaded, loaded.tokenizer.find_unknown(content), unknown)
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
        }
        console.out_json(result)
        return
    ranked = sorted(lines, key=lambda line: -line.bits_per_char)
    if per_line:
        console.say("bits per character, bits, number and text of each line, highest first:")
        for line in ranked:
            figures = f"{line.bits_per_char:.3f}\t{line.bits:.2f}\t{line.number}"
            left_out = f"\t{line.n_skipped} left out" if line.n_skipped else ""
            console.out(f"{figures}\t{line.text}{left_out}")
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
    tables.table(header, rows, text_column=len(header) - 1)
