"""`chargpt report`: all about a run on one page."""

from pathlib import Path
from typing import Annotated

import typer

from chargpt.analysis.report import write_report
from chargpt.cli import console, options, runs
from chargpt.files import is_open_descriptor, require_output


def report(
    run: options.RunOrNewest = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE", help="The page; report.html in the run by default."
        ),
    ] = None,
    checkpoint: options.Checkpoint = "best",
    device: options.Device = None,
) -> None:
    """Write a report page about a run.

    Training curves, samples, surprisal, accuracy, calibration, attention and verbatim overlap,
    in one file that loads nothing from a network.

    Examples: `chargpt report`, `chargpt report runs/novel --out novel.html`.
    """
    if out is not None:
        require_output(out)
    loaded = runs.load_named_run(run, checkpoint, device)
    with console.show_progress("section", "written") as on_progress:
        page = write_report(loaded, out, on_progress=on_progress)
    if page.is_file() and not is_open_descriptor(page):  # whose content is the page
        console.out(str(page))
