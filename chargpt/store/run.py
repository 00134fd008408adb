"""Loading a trained run: commands that use a model load it by `load_run`."""

import hashlib
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chargpt.config import Config
from chargpt.device import choose_device, configure, require_memory, tune_threads
from chargpt.errors import RunError, TextError, most_similar, reason_of
from chargpt.files import quoted, reading
from chargpt.log import collected_notes
from chargpt.models import LanguageModel, build_model
from chargpt.store.checkpoint import Checkpoint, RunState, last_saved, list_checkpoints
from chargpt.store.folder import RunFolder
from chargpt.store.layout import (
    CHECKPOINTS,
    find_runs,
    identity_of,
    is_readable_run,
    is_run,
    require_no_links,
)
from chargpt.store.metrics import VALIDATION
from chargpt.store.tensors import load_weights, serialize
from chargpt.text.corpus import Corpus
from chargpt.text.tokenizer import CharTokenizer, Tokens


@dataclass(frozen=True, repr=False)
class Run:
    """A trained model with all that is needed to use it."""

    folder: Path
    config: Config  # resolved
    tokenizer: CharTokenizer
    model: LanguageModel  # in evaluation mode
    step: int  # of the checkpoint
    state: RunState
    notes: tuple[str, ...] = ()  # logged while the run was trained or loaded
    checkpoint: str = ""  # name of the checkpoint's folder
    identity: tuple[int, int] | None = None  # of the folder: what `RunFolder` writes to

    def __repr__(self) -> str:
        size = f"{self.model.num_parameters():,} parameters"
        return f"Run({str(self.folder)!r}, {self.config.model.kind}, {size}, step {self.step:,})"

    def _repr_html_(self) -> str:
        """Return the main facts and the validation curve as HTML, for a notebook."""
        return str(import_module("chargpt.cli.notebook").run_html(self))

    @torch.inference_mode()
    def logits(self, text: str) -> Tensor:
        """Return the logits after each token of a text, (tokens, V), on the CPU.

        A token is a character, or a byte of a rare one. Nothing precedes the text, whereas `score`
        puts an EOS token or a newline before it.

        Raises:
            TextError: the text is empty or longer than the block size.
            UnknownCharacterError: the vocabulary lacks a character.
            DeviceError: the logits do not fit in memory.
        """
        if not isinstance(text, str):
            raise TextError(f"expected a text (it is {text!r:.100})")
        tokens = torch.from_numpy(self.tokenizer.encode(text).astype("int64"))
        if not 1 <= len(tokens) <= self.model.block_size:
            unit = "tokens" if self.tokenizer.has_bytes else "characters"
            raise TextError(
                f"the text has {len(tokens):,} {unit}, and logits are computed for 1 to "
                f"{self.model.block_size:,} (the block size); give a text of that length"
            )
        # logits of the layers' type, and in float32
        require_memory(8 * len(tokens) * self.model.vocab_size, "the logits", self.model.device)
        logits: Tensor = self.model(tokens[None].to(self.model.device))[0]  # (tokens, V)
        return logits.float().cpu()

    @property
    def metrics(self) -> dict[str, dict[str, npt.NDArray[Any]]]:
        """Curves of the training, read from the run's folder: `train` and `validation`.

        Both have arrays of equal length: `step`, `seconds` of training so far and `loss` in nats
        per character; `train` also `grad_norm`, before clipping, and `lr_factor`. Of a run of very
        many steps some are left out. What is unknown is NaN.

        Raises:
            RunError: the file cannot be read.
        """
        records = self.records()
        common = {"step": "step", "seconds": "seconds"}
        train = {**common, "loss": "loss", "grad_norm": "grad_norm", "lr_factor": "lr_factor"}
        columns = {"train": train, "validation": {**common, "loss": VALIDATION}}
        return {
            part: {
                name: np.array([row.get(key, math.nan) for row in records if keys["loss"] in row])
                for name, key in keys.items()
            }
            for part, keys in columns.items()
        }

    def records(self) -> list[dict[str, Any]]:
        """Return the records of the metrics log; raises as `MetricsLog.records`."""
        log = RunFolder(self.folder).metrics
        return log.records(requires_checksums=self.state.metrics_have_checksums)

    def fingerprint(self) -> bytes:
        """Return a hash of the model's weights and settings and of the vocabulary, 8 bytes."""
        settings = self.tokenizer.to_json() + self.config.model.model_dump_json()
        digest = hashlib.sha256(settings.encode())
        state = self.model.state_dict()
        weights = {name: each for name, each in state.items() if each.dtype == torch.float32}
        for chunk in serialize(weights):
            digest.update(chunk)
        return digest.digest()[:8]

    def corpus(self) -> Corpus:
        """Return the text that the run was trained on, which its folder holds.

        Raises:
            RunError: it has none, or a file of it is damaged.
        """
        folder = RunFolder(self.folder)
        if self.state.corpus_key is None and not folder.has_text():
            raise RunError(
                f"{self.folder} was imported without its text; name one where the command takes "
                f"it, as in `chargpt evaluate {quoted(self.folder)} --text FILE`"
            )
        return folder.read_text(self.config.text, self.tokenizer, self.state.corpus_key)

    def writable_folder(self) -> RunFolder:
        """Return the run's folder, to write to.

        Raises:
            RunError: it is no longer at its path, or a link in it would be followed.
        """
        folder = RunFolder(self.folder, self.identity)
        try:
            folder.require_own()
        except OSError as error:
            raise RunError(
                f"{self.folder} cannot be written ({reason_of(error)}); nothing was written: see "
                "what has happened to it, then try again"
            ) from None
        return folder

    def texts(self) -> list[Tokens]:
        """Return the tokens of the whole text, all splits; as `corpus` raises.

        There is one, but of a run that `mix` returned.
        """
        return [self.corpus().tokens]


def newest_run(parent: Path = Path("runs")) -> Path:
    """Return the run under `parent`, at most two levels deep, that saved last; RunError if none."""
    found = []
    for path in find_runs(parent):
        with suppress(RunError):  # it cannot be read, or holds a link
            require_no_links(path)
            if list_checkpoints(path / CHECKPOINTS):
                found.append((last_saved(path / CHECKPOINTS), path))
    if not found:
        raise RunError(f"there is no run under {parent}/ yet; train one with `chargpt train`")
    return max(found)[1]


def open_run(path: str | Path) -> RunFolder:
    """Return a run's folder, or raise RunError, also if it holds a link that would be followed."""
    path = Path(path)
    with reading(path):
        if path.is_file():
            folder = path.parent if is_run(path.parent) else Path("runs", path.stem)
            raise RunError(
                f"{path} is a file, not a run; name the run's folder, such as {folder}, and the "
                "text after it where the command takes one"
            )
        if is_run(path):
            require_no_links(path)
            return RunFolder(path, identity_of(path))
    what = "there is no folder" if not path.exists() else "there is no run in"
    near = most_similar(path.name, [p.name for p in path.parent.glob("*")])
    inside = [p for p in sorted(path.glob("*")) if is_readable_run(p)]
    if inside:
        raise RunError(f"{path} is a folder of runs; name one of them, such as {inside[0]}")
    hint = f"did you mean {path.parent / near}?" if near and not path.exists() else ""
    for meant in (Path("runs", path.name), Path("runs", path)):
        hint = f"did you mean {meant}?" if is_run(meant) else hint
    raise RunError(f"{what} {path}; {hint or 'train one with `chargpt train`, or name another'}")


def as_run(run: Run | str | Path) -> Run:
    """Return a run; of a folder, the run with its best checkpoint, as `load_run` does."""
    if not isinstance(run, Run | str | Path):
        raise RunError(f"expected a run or the path of its folder (it is {run!r:.100})")
    return run if isinstance(run, Run) else load_run(run)


def load_run(path: str | Path, checkpoint: str = "best", device: str = "auto") -> Run:
    """Return a trained model from its run folder.

    Args:
        path: the run's folder.
        checkpoint: `best`, `latest`, or a step's number.
        device: `auto`, `cpu`, `cuda`, `cuda:N`, `xpu`, `xpu:N` or `mps`.

    Raises:
        RunError: there is no such run or checkpoint, or it is damaged.
        DeviceError: the device is not available.
    """
    folder = open_run(path)
    with collected_notes() as notes:
        saved = folder.load(checkpoint, optimizer=False)
    run = run_of(saved, device)
    return replace(run, folder=folder.path, identity=folder.identity, notes=tuple(notes))


def run_of(saved: Checkpoint, device: str = "auto") -> Run:
    """Return the trained model of a checkpoint, or raise DeviceError."""
    target, _ = choose_device(device)
    configure(target)
    if target.type == "cpu":
        tune_threads(target)
    model = build_model(saved.config.model, saved.tokenizer.vocab_size)
    model.first_continuation_id = saved.tokenizer.first_continuation_id
    load_weights(model, saved.model, saved.folder)
    return Run(
        folder=saved.folder.parent.parent,
        config=saved.config,
        tokenizer=saved.tokenizer,
        model=model.to(target).eval(),
        step=saved.state.step,
        state=saved.state,
        checkpoint=saved.folder.name,
    )
