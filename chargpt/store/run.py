"""The run folder: one training, one folder, and the one way back to a model.

runs/<name>/config.yaml  tokenizer.json  metrics.jsonl  report.html  checkpoints/
"""

import errno
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from torch import Tensor

from chargpt.config import Config
from chargpt.device import choose_device
from chargpt.errors import ChargptError, RunError, TextError
from chargpt.files import write_atomically
from chargpt.models import LanguageModel, build_model
from chargpt.store import commit
from chargpt.store.checkpoint import (
    CONFIG,
    MODEL,
    OPTIMIZER,
    STATE,
    TOKENIZER,
    Checkpoint,
    read_checkpoint,
)
from chargpt.store.metrics import MetricsLog
from chargpt.store.state import RunState
from chargpt.store.tensors import load_weights, serialize
from chargpt.text.corpus import Corpus, is_cached, load_corpus
from chargpt.text.tokenizer import CharTokenizer

METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"
REPORT, TENSORBOARD = "report.html", "tensorboard"
LOCK = ".lock"
OWN = (
    CONFIG,
    TOKENIZER,
    METRICS,
    CHECKPOINTS,
    REPORT,
    TENSORBOARD,
    LOCK,
)  # all that a run makes in its folder
OWN_CHECKPOINTS = re.compile(r"step-[0-9]{8,18}(\.old)?(\.tmp)?|(latest|best)\.json|\..*\.tmp")


@dataclass(frozen=True)
class Run:
    """A trained model with all that is needed to use it.

    Attributes:
        folder: the run's folder.
        config: resolved.
        tokenizer: of the training text.
        model: in evaluation mode.
        step: of the checkpoint.
        state: saved with the checkpoint.
        notes: sentences for the user: which checkpoints were damaged and not used.
        checkpoint: name of the checkpoint's folder.
    """

    folder: Path
    config: Config
    tokenizer: CharTokenizer
    model: LanguageModel
    step: int
    state: RunState
    notes: tuple[str, ...] = ()
    checkpoint: str = ""

    def corpus(self) -> Corpus:
        """Return the text that the run was trained on, from its place or from the cache.

        Raises:
            TextError: it is not to be had any more.
        """
        key = self.state.corpus
        if self.config.text.path == "-" and not is_cached(key):
            raise TextError(
                f"{self.folder} was trained on standard input, and the cache no longer has that "
                "text; name a text where the command takes one, or train on a file"
            )
        corpus = load_corpus(self.config.text, key=key)
        if corpus.tokenizer != self.tokenizer:
            raise TextError(
                f"the text {corpus.name} is not the one that {self.folder} was trained on; "
                "restore it"
            )
        return corpus


class RunFolder:
    """The paths of one run on disk, and the writing of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self.metrics = MetricsLog(path / METRICS)
        self._lock = FileLock(path / LOCK)

    @staticmethod
    def require_free(path: Path, *, begun: bool = False) -> None:
        """Check that a new run at `path` would overwrite nothing.

        Args:
            path: where the run is to be.
            begun: whether what a run leaves there before its first save may be overwritten.

        Raises:
            RunError: something stands there.
            OSError: the folder cannot be read.
        """
        if not path.exists() and not path.is_symlink():
            return
        if not path.is_dir():
            raise RunError(f"{path} is a file; name another folder with --out")
        if begun:
            foreign = _not_of_a_run(path)
            if foreign is None and not has_checkpoint(path):
                return
        elif all(p.name == LOCK for p in path.iterdir()):
            return
        raise RunError(
            f"{path} exists; continue it with --resume, replace it with --force, "
            "or name another folder with --out"
        )

    def create(
        self, config: Config, tokenizer: CharTokenizer, *, force: bool = False, begun: bool = False
    ) -> "RunFolder":
        """Make this a new run's folder, locked; return it.

        Args:
            config: resolved.
            tokenizer: of its text.
            force: replace the run that is there.
            begun: replace what a run leaves there before its first save.

        Raises:
            RunError: something else stands there already, or it cannot be made.
        """
        path, new = self.path, not self.path.exists()
        try:
            if not force:
                self.require_free(path, begun=begun)
            elif foreign := _not_of_a_run(path):
                raise RunError(
                    f"{path} holds {foreign!r}, which is not a run's, so --force leaves it "
                    "alone; move that away, or name another folder"
                )
            path.mkdir(parents=True, exist_ok=True)
            self.lock()
            if not force:
                self.require_free(path, begun=begun)  # another process may have been here meanwhile
            for old in path.iterdir():
                if old.name != LOCK:
                    shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
            self.checkpoints.mkdir()
            write_atomically(path / TOKENIZER, tokenizer.to_json().encode())
            self.write_config(config)
        except OSError as error:
            if new:
                shutil.rmtree(path, ignore_errors=True)  # half a run would only be in the way
            raise self._unwritable(error) from None
        return self

    def _unwritable(self, error: OSError) -> RunError:
        return RunError(
            f"{self.path} cannot be written ({error.strerror}); name another folder with --out"
        )

    def lock(self) -> None:
        """Keep others from training into this folder, until `unlock` or this process's end.

        Raises:
            RunError: another one is training into it.
            OSError: the folder cannot be written.
        """
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RunError(
                f"another process is training into {self.path}; wait for it or stop it, or name "
                "another folder with --out"
            ) from None

    def unlock(self) -> None:
        """Let other processes train into this folder again."""
        self._lock.release()

    def require_space(self, wanted: int) -> None:
        """Check that so many bytes fit on the disk.

        Raises:
            OSError: they do not (ENOSPC).
        """
        folder = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        free = shutil.disk_usage(folder).free
        if free < wanted:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def write_config(self, config: Config) -> None:
        """Record the resolved settings."""
        write_atomically(self.path / CONFIG, config.to_yaml().encode())

    def save(
        self,
        *,
        config: Config,
        tokenizer: CharTokenizer,
        state: RunState,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        is_best: bool,
    ) -> Path:
        """Commit a checkpoint of `state.step`, move the pointers, then prune.

        Raises:
            OSError: the disk refused; the checkpoints before are as they were.
        """
        files = {
            MODEL: serialize(model),
            OPTIMIZER: serialize(optimizer),
            CONFIG: [config.to_yaml().encode()],
            TOKENIZER: [tokenizer.to_json().encode()],
            STATE: [state.to_json()],
        }
        self.require_space(sum(len(chunk) for chunks in files.values() for chunk in chunks))
        folder = commit.commit(self.checkpoints, state.step, files)
        # `latest` last: what dies before it is done again, the pointing to the best included
        if is_best or state.best_step is None:  # before anything was measured: the newest
            commit.write_pointer(self.checkpoints, "best", folder)
        commit.write_pointer(self.checkpoints, "latest", folder)
        try:
            best = [commit.resolve_pointer(self.checkpoints, "best")]
        except RunError:
            best = []
        commit.prune(self.checkpoints, best, config.train.keep_last, folder)
        return folder

    def load(self, which: str, *, optimizer: bool = True) -> tuple[Checkpoint, list[str]]:
        """Return a checkpoint, every byte checked; a damaged one gives way to the newest whole one.

        Args:
            which: `best`, `latest`, or a step's number, which nothing else stands in for.
            optimizer: whether to read what only training needs.

        Returns:
            What was saved, and one sentence for each checkpoint that was skipped.

        Raises:
            RunError: no checkpoint can be trusted.
        """
        candidates, skipped = self._candidates(which)
        for folder in candidates:
            try:
                return read_checkpoint(folder, optimizer=optimizer), skipped
            except ChargptError as error:
                skipped.append(str(error))
        raise RunError(
            skipped[0] if len(skipped) == 1 else "no checkpoint is whole: " + "; ".join(skipped)
        )

    def _candidates(self, which: str) -> tuple[list[Path], list[str]]:
        """Return the checkpoints that may be read, the first choice first, and who is left out."""
        folders = commit.committed(self.checkpoints)[::-1]
        if not folders:
            raise RunError(
                f"{self.path} holds no checkpoint yet; train it first, or name another run"
            )
        if which not in ("best", "latest"):
            steps = {str(commit.step_of(folder)): folder for folder in folders}
            if which not in steps:
                raise RunError(
                    f"{self.path} has no checkpoint {which!r}; it has best, latest and steps "
                    + ", ".join(reversed(steps))
                )
            return [steps[which]], []
        try:
            named, _ = commit.read_pointer(self.checkpoints, which)
        except RunError as error:
            return folders, [str(error)]
        others = [folder for folder in folders if folder != named]
        try:
            return [commit.resolve_pointer(self.checkpoints, which), *others], []
        except RunError as error:
            return others, [str(error)]


def _not_of_a_run(path: Path) -> str | None:
    """Return the name of something in a folder that no run makes, or None."""
    if not path.exists():
        return None
    for old in path.iterdir():
        if old.name not in OWN and not old.name.endswith(".tmp"):
            return old.name
    checkpoints = path / CHECKPOINTS
    if checkpoints.is_symlink() or (checkpoints.exists() and not checkpoints.is_dir()):
        return CHECKPOINTS
    for old in checkpoints.iterdir() if checkpoints.exists() else ():
        if not OWN_CHECKPOINTS.fullmatch(old.name):
            return f"{CHECKPOINTS}/{old.name}"
    return None


def is_run(path: Path) -> bool:
    """Return whether a folder is a run."""
    return (path / CONFIG).is_file()


def has_checkpoint(path: Path) -> bool:
    """Return whether anything was saved of a run, be it damaged by now."""
    checkpoints = path / CHECKPOINTS
    if checkpoints.is_symlink():
        return True  # to a disk that may not be there just now
    return checkpoints.is_dir() and any(
        commit.NAME.fullmatch(name) for name in os.listdir(checkpoints)
    )


def newest_run(parent: Path = Path("runs")) -> Path:
    """Return the run under `parent` whose checkpoints changed last.

    Raises:
        RunError: there is none.
    """
    found = [
        (pointer.stat().st_mtime_ns, pointer.parent.parent)
        for depth in ("*", "*/*")
        for pointer in parent.glob(f"{depth}/{CHECKPOINTS}/latest.json")
    ]
    if not found:
        raise RunError(f"there is no run under {parent}/ yet; train one with `chargpt train`")
    return max(found)[1]


def open_run(path: str | Path) -> RunFolder:
    """Return an existing run's folder.

    Raises:
        RunError: it is not a run.
    """
    path = Path(path)
    if not is_run(path):
        what = "there is no folder" if not path.exists() else "there is no run in"
        raise RunError(f"{what} {path}; train one with `chargpt train`, or name another")
    return RunFolder(path)


def load_run(path: str | Path, checkpoint: str = "best", device: str = "auto") -> Run:
    """Return a trained model from its run folder: the one way back from disk.

    Args:
        path: the run's folder.
        checkpoint: `best`, `latest`, or a step's number.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.

    Raises:
        RunError: there is no such run or checkpoint, or it is damaged.
        DeviceError: the device is not there.
    """
    run = open_run(path)
    saved, skipped = run.load(checkpoint, optimizer=False)
    target, _ = choose_device(device)
    model = build_model(saved.config.model, saved.tokenizer.vocab_size)
    load_weights(model, saved.model, saved.folder)
    return Run(
        run.path,
        saved.config,
        saved.tokenizer,
        model.to(target).eval(),
        saved.state.step,
        saved.state,
        tuple(skipped),
        saved.folder.name,
    )
