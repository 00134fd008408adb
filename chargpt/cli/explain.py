"""`chargpt explain`: attention step by step on a text and a run."""

import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from chargpt import __version__
from chargpt.analysis import explain as explanation
from chargpt.analysis import plots
from chargpt.analysis.explain import AttentionMaps, Section, Subject, Table, choose_subject
from chargpt.analysis.page import encoded, render
from chargpt.cli import console, options, runs, tables
from chargpt.errors import ConfigError, RunError
from chargpt.outputs import is_open_descriptor, require_output, write_output
from chargpt.store.layout import is_run
from chargpt.text.catalog import resolve_settings
from chargpt.text.display import one_line
from chargpt.text.prepare import load_corpus

MAX_WIDTH = 79  # columns of a paragraph


def explain(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|RUN",
            help="A text file, or a run. Without it: the newest run; if there is none, the "
            "built-in text.",
        ),
    ] = None,
    section: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="One section; may be repeated.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the sections as a page.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the attention of a run: .svg or .png.")
    ] = None,
    checkpoint: options.Checkpoint = "best",
    json_: options.Json = False,
    device: options.Device = None,
    encoding: options.Encoding = None,
    encoding_errors: options.EncodingErrors = None,
    set_: options.Set = None,
) -> None:
    """Explain attention step by step on your own text and run.

    Sections: averaging, queries, mask, scaling, attention.

    Examples: `chargpt explain novel.txt`, `chargpt explain runs/novel --plot attention.png`,
    `chargpt explain runs/novel --section scaling --json`.
    """
    require_output(plot)
    require_output(html)
    plots.require_suffix(plot)
    settings = options.given_settings(set_, encoding=encoding, encoding_errors=encoding_errors)
    subject = find_subject(what, checkpoint, device, settings)
    if plot is not None and (subject.run is None or "attention" not in (section or ["attention"])):
        raise ConfigError(
            "--plot draws the section attention of a trained gpt; name the run of one, and with "
            "--section that section too"
        )
    sections = explanation.explain(subject, section or ())
    maps = [part for each in sections for part in each.parts if isinstance(part, AttentionMaps)]
    if plot is not None:
        plots.save(plots.attention(maps[0].weights, maps[0].text, maps[0].titles), plot)
    if html is not None:
        title = one_line(f"Attention, on {subject.corpus.name}")
        page = render("explain.html", title=title, version=__version__, sections=sections)
        write_output(html, encoded(page))
        if is_open_descriptor(html):  # stdout holds the page
            return
    if json_:
        content = [{"name": s.name, "title": s.title, **s.data} for s in sections]
        console.out_json({"sections": content})
        return
    print_sections(sections)
    if maps and plot is None and html is None:
        console.out("as plots: --plot attention.png, or --html attention.html")
    for path in filter(None, (plot, html)):
        console.out(f"written: {path}")


def find_subject(
    what: str | None, checkpoint: str, device: str | None, settings: dict[str, object]
) -> Subject:
    """Return what to explain: the run or text named, else the newest run, else a text."""
    path = Path(what) if what else None
    if path is None:
        with suppress(RunError):
            path = runs.find_run(None)
    if path is not None and is_run(path):
        given = {"-s, --encoding or --encoding-errors": settings}
        options.reject(given, f"applies to a text, and {path} is a run")
        run = runs.load_named_run(path, checkpoint, device)
        subject = choose_subject(run.corpus(), run)
        if subject.run is None:
            console.say(f"{path} has no queries and keys: an untrained gpt is shown on its text")
        return subject
    chosen = checkpoint if checkpoint != "best" else None
    options.reject({"--checkpoint": chosen, "--device": device}, "applies to a run, not a text")
    config, _ = resolve_settings(what, None, settings)
    corpus = load_corpus(config.text, on_progress=console.LoadingProgress())
    return choose_subject(corpus, None)


def print_sections(sections: list[Section]) -> None:
    """Print the sections; attention maps are left out."""
    for number, section in enumerate(sections, 1):
        console.out_sentence(f"{number}. {section.title}", "")
        for part in section.parts:
            if isinstance(part, Table):
                tables.table(part.columns, part.rows, title=part.caption)
            elif isinstance(part, str):
                width = min(MAX_WIDTH, console.terminal_width(sys.stdout))
                lines = textwrap.wrap(part, width, break_long_words=False, break_on_hyphens=False)
                console.out_sentence(*lines, "")
