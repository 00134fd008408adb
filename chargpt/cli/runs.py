"""Loading the run that a command line names."""

from pathlib import Path

from chargpt.cli import console
from chargpt.store.run import Run, load_run, newest_run


def find_run(path: Path | None) -> Path:
    """Return the run named, or else the newest one, which is then printed.

    Raises:
        RunError: there is none.
    """
    if path is None:
        path = newest_run()
        console.say(f"run: {path}")
    return path


def open_run(path: Path | None, checkpoint: str, device: str | None) -> Run:
    """Load a run, or the newest one, and print which checkpoints were damaged.

    Raises:
        ChargptError: there is no such run or checkpoint, or none is intact.
    """
    run = load_run(find_run(path), checkpoint, device or "auto")
    for note in run.notes:
        console.say(note)
    return run
