"""Loading the run that a command line names."""

from pathlib import Path
from typing import cast

from chargpt.cli import console
from chargpt.errors import ConfigError
from chargpt.store.run import Run, load_run, newest_run
from chargpt.text.tokenizer import Unknown


def open_run(path: Path | None, checkpoint: str, device: str | None) -> Run:
    """Return a run, or the newest one, and print which checkpoints were damaged.

    Raises:
        ChargptError: there is no such run or checkpoint, or none is intact.
    """
    run = load_run(path or newest_run(), checkpoint, device or "auto")
    for note in run.notes:
        console.say(note)
    return run


def unknown_policy(word: str | None) -> Unknown | None:
    """Return the value of --unknown; None leaves it to the run.

    Raises:
        ConfigError: it is not one of the three.
    """
    if word not in (None, "error", "skip", "replace"):
        raise ConfigError(f"--unknown {word} is none of error, skip, replace")
    return cast("Unknown | None", word)
