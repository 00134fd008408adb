"""`chargpt report`: all about a run on one page."""

from chargpt.analysis.report import write_report
from chargpt.cli import console, options, runs
from chargpt.files import is_open_descriptor


def report(
    run: options.RunOrNewest = None,
    out: options.Page = None,
    checkpoint: options.Checkpoint = "best",
    device: options.Device = None,
) -> None:
    """Write a report page about a run.

    Training curves, samples, surprisal, accuracy, calibration, attention and verbatim overlap,
    in one file that loads nothing from a network.

    Examples: `chargpt report`, `chargpt report runs/novel --out novel.html`.
    """
    options.require_outputs(out)
    loaded = runs.load_named_run(run, checkpoint, device)
    with console.show_progress("section", "written") as on_progress:
        page = write_report(loaded, out, on_progress=on_progress)
    if not is_open_descriptor(page):  # whose content is the page
        console.out(str(page))
