"""Integrity check of a run's checkpoints and other files."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from chargpt.errors import ChargptError, DeviceError, RunError
from chargpt.files import exists, read_regular
from chargpt.models import build_model
from chargpt.outputs import is_unchanged_output
from chargpt.store.checkpoint import (
    TOKENIZER,
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    read_checkpoint,
    unfinished_checkpoints,
)
from chargpt.store.folder import RunFolder
from chargpt.store.layout import MIXTURE_FILE, PLAY, REPORT
from chargpt.store.mixture import OtherCheckpointError, read_mixture
from chargpt.store.run import load_run
from chargpt.store.tensors import require_finite, require_weights
from chargpt.text.tokenizer import CharTokenizer

MAX_PAGE_BYTES = 200_000_000


@dataclass(frozen=True)
class CheckedCheckpoint:
    """The result of checking one checkpoint."""

    folder: Path
    size: int  # in bytes
    problem: str | None  # its damage in a sentence; None if it is intact


@dataclass(frozen=True)
class Verification:
    """The result of checking a run."""

    checkpoints: list[CheckedCheckpoint]  # oldest first
    loaded_by: dict[str, Path | None]  # what `best` and `latest` load now; None if none is intact
    problems: list[str]  # one sentence per damage, with the checkpoint that is used instead
    notes: list[str]  # findings that are no damage


def verify(run: RunFolder) -> Verification:
    """Check every byte of a run's checkpoints, which are loaded, and its other files."""
    checked = [_check(folder) for folder in list_checkpoints(run.checkpoints)]
    # a running training process deletes old checkpoints
    checked = [each for each in checked if exists(each.folder)]
    problems = [each.problem for each in checked if each.problem]
    loaded_by: dict[str, Path | None] = {}
    for which in ("best", "latest"):
        saved = None
        try:
            saved, found = load_checkpoint(run.checkpoints, which)
            if found:
                found.append(f"{saved.folder.name} is used instead of {which}")
        except RunError as error:
            found = [f"no intact checkpoint for {which}: {error}"]
        loaded_by[which] = saved.folder if saved else None
        problems += [sentence for sentence in found if sentence not in problems]
    notes = [
        f"{path} was left by a save that did not finish; the next save deletes it"
        for path in unfinished_checkpoints(run.checkpoints)
    ]
    if saved is not None:
        _check_files(run, saved, problems, notes)
    return Verification(checked, loaded_by, problems, notes)


def _check_files(run: RunFolder, latest: Checkpoint, problems: list[str], notes: list[str]) -> None:
    """Compare the run's other files with its checkpoints; add to problems and notes."""
    path, mixture = run.path / TOKENIZER, run.path / MIXTURE_FILE
    try:
        if (edits := run.describe_edits(latest.config)) is not None:
            notes.append(edits)
        if run.has_text():
            run.read_text(latest.config.text, latest.tokenizer, latest.state.corpus_key)
        if not exists(path):
            notes.append(f"{path} is missing; the checkpoints have their own")
        elif CharTokenizer.load(path) != latest.tokenizer:
            problems.append(f"{path} is not the tokenizer of {latest.folder.name}")
        if latest.optimizer:  # an imported run has neither an optimizer state nor metrics
            problems += run.metrics.problems(latest.state)
        for page in filter(exists, (run.path / REPORT, run.path / PLAY)):
            try:
                if not is_unchanged_output(read_regular(page, MAX_PAGE_BYTES)):
                    notes.append(f"{page} was changed, or written by an earlier version of chargpt")
            except ValueError as error:
                notes.append(f"{page} was not checked ({error})")
    except (ChargptError, OSError) as error:
        problems.append(str(error))
    try:
        if exists(mixture):
            read_mixture(load_run(run.path, device="cpu"))
        elif latest.config.text.mixture_characters:
            notes.append(f"{mixture} is missing, so the run has no mixture")
    except OtherCheckpointError as error:
        notes.append(str(error))
    except RunError as error:
        if str(error) not in problems:  # of the text, whose n-grams a mixture counts
            problems.append(str(error))


def _check(folder: Path) -> CheckedCheckpoint:
    size = 0
    try:
        size = sum(path.lstat().st_size for path in folder.iterdir())
        require_intact(read_checkpoint(folder))
    except DeviceError:  # too little memory is no damage
        raise
    except (ChargptError, OSError) as error:
        return CheckedCheckpoint(folder, size, str(error))
    return CheckedCheckpoint(folder, size, None)


def require_intact(saved: Checkpoint) -> None:
    """Check that tensors are finite, and weights of their config's shapes, else RunError."""
    with torch.device("meta"):
        model = build_model(saved.config.model, saved.tokenizer.vocab_size)
    for weights in (saved.model, saved.raw_weights, saved.teacher_weights):
        if weights is not None:
            require_weights(model, weights, saved.folder)
    require_finite(saved.optimizer, saved.folder)
    shapes = {name: tensor.shape for name, tensor in saved.model.items()}
    for name, tensor in saved.optimizer.items():
        parameter = re.sub(
            r"^(raw|teacher|adamw\.exp_avg|adamw\.exp_avg_sq|muon\.momentum)\.", "", name
        )
        if tensor.shape != shapes.get(parameter, tensor.shape):
            raise RunError(
                f"{name} in {saved.folder} has another shape than its parameter; "
                "use another checkpoint"
            )
