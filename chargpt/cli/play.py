"""`chargpt play`: a run's model as a page."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from chargpt.cli import console, options
from chargpt.cli.export import load, write
from chargpt.export.html import export_html
from chargpt.files import is_open_descriptor, require_output
from chargpt.store.folder import PLAY


def play(
    run: options.RunOrNewest = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE", help="The page; play.html in the run by default."
        ),
    ] = None,
    is_open: Annotated[
        bool, typer.Option("--open/--no-open", help="Whether to open the page.")
    ] = True,
    checkpoint: options.Checkpoint = "best",
) -> None:
    """Open a run's model as a page in the browser.

    One file that holds the model and runs it without a network: text is continued as you write,
    with the surprisal, the predictions and the attention of every character.

    Examples: `chargpt play`, `chargpt play runs/novel --out novel.html`.
    """
    if out is not None:
        require_output(out)
    loaded = load(run, checkpoint)
    page = out or loaded.folder / PLAY
    write(export_html, loaded, page)
    if page.is_file() and not is_open_descriptor(page):
        address = page.absolute().as_uri()
        if is_open and not webbrowser.open(address):
            console.say(f"no browser opened; open {address} in one")
