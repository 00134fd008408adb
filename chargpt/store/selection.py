"""Which checkpoint of a run is loaded, and which one instead if it is damaged."""

from contextlib import suppress
from pathlib import Path

from chargpt.config import Config
from chargpt.errors import ChargptError, DeviceError, RunError, UnreadableError
from chargpt.files import entry_names, read_regular
from chargpt.store import commit
from chargpt.store.checkpoint import (
    Checkpoint,
    list_checkpoints,
    read_checkpoint,
    read_metadata,
    step_of,
)
from chargpt.store.layout import CHECKPOINTS, POINTERS
from chargpt.store.state import RunState
from chargpt.text.tokenizer import CharTokenizer

MAX_TRIES = 200  # of reading a run that a training process changes faster than it can be read


def load(run: Path, which: str, *, optimizer: bool) -> tuple[Checkpoint, list[str]]:
    """Return a run's checkpoint and why others were skipped; see `RunFolder.load`."""
    for _ in range(MAX_TRIES):
        before = pointer_contents(run)
        try:
            saved, skipped = _load(run, which, optimizer=optimizer)
            if not skipped or pointer_contents(run) == before:
                return saved, skipped
        except UnreadableError:
            raise
        except RunError:
            if pointer_contents(run) == before:
                raise
    return _load(run, which, optimizer=optimizer)


def newest_metadata(run: Path) -> tuple[Config, CharTokenizer, RunState]:
    """Return the newest intact checkpoint's config, tokenizer and state, or raise RunError."""
    for folder in list_checkpoints(run / CHECKPOINTS)[::-1]:
        with suppress(ChargptError):
            return read_metadata(folder)
    raise RunError(f"{run} holds no intact checkpoint; train it first, or name another run")


def pointer_contents(run: Path) -> list[bytes | None]:
    """Return the content of the pointers, None if unreadable; `latest` changes with every save."""
    contents: list[bytes | None] = []
    for name in POINTERS:
        try:
            contents.append(read_regular(run / CHECKPOINTS / name, commit.MAX_JSON_BYTES))
        except (OSError, ValueError):
            contents.append(None)
    return contents


def _load(run: Path, which: str, *, optimizer: bool) -> tuple[Checkpoint, list[str]]:
    folders, skipped = candidates(run, which)
    for folder in folders:
        try:
            return read_checkpoint(folder, optimizer=optimizer), skipped
        except (UnreadableError, DeviceError):  # it may be intact: unreadable now, or too large
            raise
        except ChargptError as error:
            skipped.append(str(error))
    raise RunError(
        skipped[0]
        if len(skipped) == 1
        else "no checkpoint is intact: " + "; ".join(dict.fromkeys(skipped))
    )


def candidates(run: Path, which: str) -> tuple[list[Path], list[str]]:
    """Return the checkpoints to try, in order, and why the one named is not among them."""
    parent = run / CHECKPOINTS
    folders = list_checkpoints(parent)[::-1]
    if not folders:
        raise RunError(f"{run} holds no checkpoint yet; train it first, or name another run")
    if which not in ("best", "latest"):
        steps = {str(step_of(folder)): folder for folder in folders}
        if which not in steps:
            raise RunError(
                f"{run} has no checkpoint {which!r}; it has best, latest and steps "
                + ", ".join(reversed(steps))
            )
        return [steps[which]], []
    if len(folders) == 1 and f"{which}.json" not in entry_names(parent):
        return folders, []  # the process was killed in its first save, before it wrote the pointer
    named = None
    try:
        named, _ = commit.read_pointer(parent, which)
        commit.resolve_pointer(parent, which)
    except UnreadableError:
        raise
    except RunError as error:
        best = _recorded_best(run, folders) if which == "best" else []
        others = [*best, *(folder for folder in folders if folder not in best)]
        return [folder for folder in others if folder != named], [str(error)]
    return [named, *(folder for folder in folders if folder != named)], []


def _recorded_best(run: Path, folders: list[Path]) -> list[Path]:
    """Return the best checkpoint as the newest intact one knows it, if both exist."""
    try:
        _, _, state = newest_metadata(run)
    except RunError:
        return []
    return [folder for folder in folders if step_of(folder) == state.best_step]
