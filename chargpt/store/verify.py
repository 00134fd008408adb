"""Whether all that a run has saved is still what was saved."""

from dataclasses import dataclass
from pathlib import Path

from chargpt.errors import ChargptError, RunError
from chargpt.models import build_model
from chargpt.store import commit
from chargpt.store.checkpoint import Checkpoint, read_checkpoint
from chargpt.store.run import RunFolder
from chargpt.store.tensors import load_weights


@dataclass(frozen=True)
class Checked:
    """One checkpoint, and what is wrong with it, if anything is."""

    folder: Path
    size: int
    problem: str | None


@dataclass(frozen=True)
class Verdict:
    """What checking a run has found.

    Attributes:
        checkpoints: each one, oldest first.
        uses: the checkpoint that `best` and `latest` lead to now; None where there is none.
        problems: whatever is damaged, a sentence each, with what is used instead.
        notes: what looks odd and harms nothing.
    """

    checkpoints: list[Checked]
    uses: dict[str, Path | None]
    problems: list[str]
    notes: list[str]


def verify(run: RunFolder) -> Verdict:
    """Check every byte of a run's checkpoints, and where its pointers lead."""
    checked = [_check(folder) for folder in commit.committed(run.checkpoints)]
    # a run that is being trained deletes its old checkpoints
    checked = [each for each in checked if each.folder.exists()]
    problems = [each.problem for each in checked if each.problem]
    uses = {}
    for pointer in ("best", "latest"):
        uses[pointer], trouble = _lead(run, pointer)
        problems += [sentence for sentence in trouble if sentence not in problems]
    notes = [
        f"{left} was left by a save that did not finish; the next save clears it away"
        for left in sorted(run.checkpoints.glob("step-*.tmp"))
    ]
    return Verdict(checked, uses, problems, notes)


def _check(folder: Path) -> Checked:
    size = 0
    try:
        size = sum(path.lstat().st_size for path in folder.iterdir())
        require_whole(read_checkpoint(folder))
    except (ChargptError, OSError) as error:
        return Checked(folder, size, str(error))
    return Checked(folder, size, None)


def require_whole(saved: Checkpoint) -> None:
    """Check that weights fit their own config.

    Raises:
        ChargptError: they do not.
    """
    model = build_model(saved.config.model, saved.tokenizer.vocab_size)
    load_weights(model, saved.model, saved.folder)
    load_weights(model, saved.raw_model, saved.folder)


def _lead(run: RunFolder, pointer: str) -> tuple[Path | None, list[str]]:
    """Return the checkpoint that a pointer's readers get, and why it is not the one named."""
    try:
        saved, skipped = run.load(pointer)
    except RunError as error:
        return None, [f"{pointer} leads to no whole checkpoint: {error}"]
    if not skipped:
        return saved.folder, []
    return saved.folder, [*skipped, f"instead of {pointer}, {saved.folder.name} is used"]
