"""A folder's runs, each with what its latest checkpoint says about it."""

from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from chargpt.errors import ChargptError, UnreadableError
from chargpt.files import entry_names, read_regular, reading
from chargpt.models import count_parameters
from chargpt.store.checkpoint import (
    CONFIG,
    MAX_METADATA_BYTES,
    TOKENIZER,
    last_saved,
    newest_metadata,
    parse_config,
)
from chargpt.store.layout import CHECKPOINTS, LOCK, find_runs, has_checkpoint, require_no_links
from chargpt.text.source import STDIN
from chargpt.text.tokenizer import CharTokenizer

# unreadable now: no permission, or an error of the disk
Status = Literal[
    "finished", "stopped early", "training", "unfinished", "no checkpoint", "damaged", "unreadable"
]


@dataclass(frozen=True)
class RunSummary:
    """What a run's latest checkpoint says, or its settings if it has none; None if unknown."""

    run: Path
    status: Status
    text: str | None = None  # name of the training text
    documents: str | None = None  # `text.documents`
    kind: str | None = None  # of the model
    parameters: int | None = None
    step: int | None = None  # updates done
    max_steps: int | None = None
    best_nats_per_char: float | None = None  # lowest validation loss of a checkpoint
    seconds: float | None = None  # training time
    saved: datetime | None = None  # when the latest checkpoint was saved, local time


def list_runs(parent: Path) -> list[RunSummary]:
    """Return the runs in a folder, at most two levels deep, the one saved last first.

    One without a checkpoint is as new as its settings. It logs which folders cannot be read.

    Raises:
        UnreadableError: the folder cannot be read.
    """
    with reading(parent):
        entry_names(parent)
    found = [summarize(path) for path in find_runs(parent, logs=True)]
    return sorted(found, key=_time_of, reverse=True)


def _time_of(summary: RunSummary) -> float:
    if summary.saved is not None:
        return summary.saved.timestamp()
    try:
        return (summary.run / CONFIG).stat().st_mtime
    except OSError:
        return 0.0


def summarize(path: Path) -> RunSummary:
    """Return what a run's latest checkpoint says, without reading its tensors, or its settings."""
    checkpoints, state = path / CHECKPOINTS, None
    try:
        require_no_links(path)
        is_training = is_locked(path)
        if has_checkpoint(path):
            config, tokenizer, state = newest_metadata(checkpoints)
            saved = local_time(last_saved(checkpoints))
        else:
            config = parse_config(read_regular(path / CONFIG, MAX_METADATA_BYTES), path / CONFIG)
            tokenizer = CharTokenizer.load(path / TOKENIZER)
    except (UnreadableError, OSError):
        return RunSummary(path, "unreadable")
    except (ChargptError, ValueError):
        return RunSummary(path, "damaged")
    source = config.text.path
    summary = RunSummary(
        path,
        "training" if is_training else "no checkpoint",
        text=Path(source).name if source not in (None, STDIN) else None,
        documents=config.text.documents,
        kind=config.model.kind,
        parameters=count_parameters(config.model, tokenizer.vocab_size),
        max_steps=config.train.max_steps,
    )
    if state is None:
        return summary
    progress: Status = "finished" if state.step >= config.train.max_steps else "unfinished"
    return replace(
        summary,
        status="training" if is_training else "stopped early" if state.stopped_early else progress,
        text=state.text_name,
        step=state.step,
        best_nats_per_char=state.best_nats_per_char if state.best_step else None,
        seconds=state.seconds,
        saved=saved,
    )


def local_time(seconds: float) -> datetime | None:
    """Return a time of a file; None if its year has no four digits."""
    try:
        return datetime.fromtimestamp(seconds).astimezone()
    except (ValueError, OverflowError, OSError):
        return None


def is_locked(path: Path) -> bool:
    """Return whether a process is training into a run's folder, as far as its lock says."""
    if not (path / LOCK).exists():
        return False
    try:
        with FileLock(path / LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except (OSError, NotImplementedError):  # no permission, or no locks
        return False
