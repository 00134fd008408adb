"""Loading the run that a command line names."""

from pathlib import Path

from chargpt.cli import console
from chargpt.store.run import Run, load_run, newest_run


def open_run(path: Path | None, checkpoint: str, device: str | None) -> Run:
    """Return a run, or the newest one, and print which checkpoints were damaged.

    Raises:
        ChargptError: there is no such run or checkpoint, or none is intact.
    """
    run = load_run(path or newest_run(), checkpoint, device or "auto")
    for note in run.notes:
        console.say(note)
    return run
