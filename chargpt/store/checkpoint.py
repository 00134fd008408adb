"""Checkpoints: `step-N/` directories with weights, optimizer state, config, tokenizer, progress."""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Self, TypeVar

import torch
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from chargpt.config import Config, ModelConfig, validate
from chargpt.device import require_memory
from chargpt.errors import ChargptError, DeviceError, RunError, UnreadableError
from chargpt.files import (
    Buffers,
    entry_names,
    exists,
    parse_json,
    parse_yaml,
    quoted,
    reading,
    to_json,
)
from chargpt.models import build_model, count_parameters, rotary_bytes
from chargpt.store import commit
from chargpt.store.tensors import deserialize, load_weights
from chargpt.text.tokenizer import CharTokenizer

CONFIG, TOKENIZER, STATE = "config.yaml", "tokenizer.json", "state.json"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
FILES = (CONFIG, TOKENIZER, STATE, MODEL, OPTIMIZER, commit.MANIFEST)
KEEP = "keep"  # a file of this name in a checkpoint protects it from deletion
CHECKPOINT_NAME = re.compile(r"step-[0-9]{8,18}")
UNFINISHED = re.compile(rf"{CHECKPOINT_NAME.pattern}(\.old|\.[0-9]+)?\.tmp")
MAX_TRIES = 200  # of reading a run that a training process changes faster than it can be read
MAX_METADATA_BYTES = 64_000_000  # of the config, tokenizer and state files
MAX_OPTIMIZER_COPIES = 5  # values per parameter: moments, raw weights, a teacher, and a margin
MAX_TENSOR_HEADER = 400  # bytes of a safetensors header per tensor
TENSORS_PER_LAYER, OTHER_TENSORS = 12, 8  # at most


Content = TypeVar("Content")
Count = Annotated[int, Field(ge=0, lt=10**18)]
Number = Annotated[float, Field(ge=0, lt=1e18)]


@pydantic_dataclass(frozen=True, config=ConfigDict(strict=True, allow_inf_nan=False))
class RunState:
    """Progress of a training run and the environment it ran in, as saved in `state.json`."""

    step: Count  # optimizer steps done
    seconds: Number = 0.0  # training time, interruptions left out
    best_step: Count | None = None  # of the lowest validation loss; 0: the weights at the start
    best_nats_per_char: Number | None = None  # the lowest validation loss
    evaluations_since_best: Count = 0
    stopped_early: bool = False  # whether `train.patience` ended the run
    rollbacks: Count = 0  # how often the run returned to a checkpoint after a non-finite value
    corpus_key: str | None = None  # `Corpus.key` of the training text
    text_name: str = ""  # name of the training text
    metrics_have_checksums: bool = False  # each line of the log; not of all earlier versions
    base_fingerprint: str | None = None  # of the run that `optim.l2_sp` pulls towards, in hex
    teacher_fingerprint: str | None = None  # of the runs of `train.teachers`, in hex
    threads: Count | None = None  # CPU threads of PyTorch
    world_size: Count = 1  # number of ranks
    torch: str = "unknown"  # version of PyTorch

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Return the state in `state.json`, ignoring unknown keys; ValueError if malformed."""
        try:
            tree, names = parse_json(content), {field.name for field in dataclasses.fields(cls)}
            return cls(**{name: tree[name] for name in names & tree.keys()})
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            name = ".".join(map(str, detail["loc"])) or "it"
            raise ValueError(f"{name}: {detail['msg'].lower()}") from None

    def to_json(self) -> bytes:
        """Return the content of `state.json`."""
        return to_json(dataclasses.asdict(self))


@dataclass(frozen=True)
class Checkpoint:
    """The content of one checkpoint."""

    folder: Path
    config: Config  # resolved
    tokenizer: CharTokenizer
    state: RunState
    model: dict[str, Tensor]  # the weights to evaluate: the moving average if `train.ema` is set
    # and `raw.*`, the weights to train on, and `teacher.*`, of `train.students`; empty if not read
    optimizer: dict[str, Tensor]

    @property
    def raw_weights(self) -> dict[str, Tensor]:
        """The weights to train on, without the moving average."""
        raw = {n[4:]: t for n, t in self.optimizer.items() if n.startswith("raw.")}
        return raw or self.model

    @property
    def teacher_weights(self) -> dict[str, Tensor] | None:
        """The weights of the student's teacher; None before the first student, or if not read."""
        if not (self.optimizer and self.config.model_start(self.state.step)):
            return None
        return {n[8:]: t for n, t in self.optimizer.items() if n.startswith("teacher.")}


def name_of(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint folder's name."""
    return int(folder.name.removeprefix("step-"))


def list_checkpoints(parent: Path) -> list[Path]:
    """Return the checkpoint folders, intact or damaged, oldest first, or raise UnreadableError."""
    with reading(parent):
        names = filter(CHECKPOINT_NAME.fullmatch, entry_names(parent))
    return sorted((parent / name for name in names), key=step_of)


def last_saved(parent: Path) -> float:
    """Return when a run saved a checkpoint last, in seconds since the epoch; 0 for none."""
    times = [0.0]
    for folder in list_checkpoints(parent):
        with suppress(OSError):  # it is damaged, or being deleted
            times.append((folder / commit.MANIFEST).stat().st_mtime)
    return max(times)


def unfinished_checkpoints(parent: Path) -> list[Path]:
    """Return what saves or deletions that a crash interrupted have left."""
    return sorted(parent / name for name in entry_names(parent) if UNFINISHED.fullmatch(name))


def restore_checkpoints(parent: Path) -> None:
    """Undo a checkpoint's replacement or deletion that was killed after its first rename."""
    for path in unfinished_checkpoints(parent):
        if path.name.endswith(".old.tmp"):
            commit.restore_set_aside(path.with_name(path.name.removesuffix(".old.tmp")), FILES)


def write_checkpoint(parent: Path, step: int, files: Mapping[str, Buffers]) -> Path:
    """Commit a checkpoint and return its folder; if a write fails (OSError), nothing is left."""
    for path in unfinished_checkpoints(parent):
        commit.remove(path, FILES)
    folder = parent / name_of(step)
    commit.commit(folder, files)
    return folder


def prune_checkpoints(parent: Path, best_step: int | None, keep_last: int, newest: Path) -> None:
    """Delete old checkpoints except the last `keep_last` up to `newest`, and the best one.

    Checkpoints after `newest` were skipped as damaged; they are left for the user. Those that hold
    the file `keep`, or one that chargpt did not write, are left too. An error ends the deletion;
    the next save tries again.
    """
    with suppress(OSError, RunError):
        older = [path for path in list_checkpoints(parent) if step_of(path) <= step_of(newest)]
        for folder in older[:-keep_last]:
            if step_of(folder) != best_step:
                commit.discard(folder, FILES)


def read_checkpoint(folder: Path, *, optimizer: bool = True) -> Checkpoint:
    """Return a checkpoint's content, all of it checked.

    The config is read first: it bounds the size of the tensor files. Without `optimizer`, the
    optimizer state is left out, which only training needs.

    Raises:
        ChargptError: a file is missing, damaged, or inconsistent with the others.
    """
    config, tokenizer, state = read_metadata(folder)
    max_bytes = {MODEL: max_weight_bytes(config.model, tokenizer.vocab_size)}
    if optimizer:
        max_bytes[OPTIMIZER] = MAX_OPTIMIZER_COPIES * max_bytes[MODEL]
    n_bytes = 0
    for name, limit in max_bytes.items():
        with suppress(OSError):  # there is none, which reading it will report
            n_bytes += min(limit, (folder / name).lstat().st_size)
    # each file's bytes are in memory together with its tensors
    require_memory(2 * n_bytes + rotary_bytes(config.model), f"the checkpoint {folder}")
    tensors = {
        name: deserialize(folder / name, content)
        for name, content in commit.read(folder, max_bytes).items()
    }
    n_weights = sum(tensor.numel() for tensor in tensors[MODEL].values())
    if n_weights != count_parameters(config.model, tokenizer.vocab_size):
        # raises, naming the first tensor that differs; a forged config may ask for any size
        with torch.device("meta"):
            load_weights(build_model(config.model, tokenizer.vocab_size), tensors[MODEL], folder)
    return Checkpoint(folder, config, tokenizer, state, tensors[MODEL], tensors.get(OPTIMIZER, {}))


def max_weight_bytes(model: ModelConfig, vocab_size: int) -> int:
    """Return the largest size of a model's safetensors file, in bytes."""
    header = MAX_TENSOR_HEADER * (TENSORS_PER_LAYER * model.n_layer + OTHER_TENSORS)
    return 4 * count_parameters(model, vocab_size) + header


def read_metadata(folder: Path) -> tuple[Config, CharTokenizer, RunState]:
    """Return a checkpoint's config, tokenizer and state; ChargptError as `read_checkpoint`."""
    texts = commit.read(folder, dict.fromkeys((CONFIG, TOKENIZER, STATE), MAX_METADATA_BYTES))
    try:
        config = parse_config(texts[CONFIG], folder / CONFIG)
        tokenizer = CharTokenizer.from_json(texts[TOKENIZER].decode(), str(folder / TOKENIZER))
    except UnicodeDecodeError as error:
        raise RunError(f"{folder} is not a checkpoint ({error}); use another") from None
    try:
        state = RunState.from_json(texts[STATE])
        if state.step != step_of(folder):
            raise ValueError("it is of another step")
    except ValueError as error:
        raise RunError(f"{folder / STATE} is malformed ({error}); use another checkpoint") from None
    return config, tokenizer, state


def parse_config(content: bytes, path: Path) -> Config:
    """Return the config in a file's content, or raise ConfigError or UnicodeDecodeError."""
    tree, lines = parse_yaml(content.decode(), str(path))
    return validate(tree, str(path), lines)


def load_checkpoint(
    parent: Path, which: str, *, optimizer: bool = True
) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint and why others were skipped; see `RunFolder.load`."""
    return _first_intact(parent, which, partial(read_checkpoint, optimizer=optimizer))


def newest_metadata(parent: Path) -> tuple[Config, CharTokenizer, RunState]:
    """Return the newest intact checkpoint's config, tokenizer and state, or raise RunError."""
    return _first_intact(parent, "latest", read_metadata)[0]


def _first_intact(
    parent: Path, which: str, read: Callable[[Path], Content]
) -> tuple[Content, list[str]]:
    """Return the content of the first intact checkpoint of `_candidates`, and why others are not.

    Damage counts only if no training process has saved meanwhile and deleted what was read.
    """
    for _ in range(MAX_TRIES):
        before, content, skipped = _snapshot(parent), None, list[str]()
        for folder in _candidates(parent, which, skipped):
            try:
                content = read(folder)
                break
            except (UnreadableError, DeviceError):  # it may be intact: unreadable now, or too large
                raise
            except ChargptError as error:
                skipped.append(str(error))
        if not skipped or _snapshot(parent) == before:
            break
    if content is None:
        causes = list(dict.fromkeys(skipped))
        raise RunError("no checkpoint is intact: " * (len(causes) > 1) + "; ".join(causes))
    return content, skipped


def _snapshot(parent: Path) -> set[tuple[str, int]]:
    """Return names and inodes of the checkpoint folders, which change with every save."""
    with suppress(OSError), os.scandir(parent) as entries:
        return {(entry.name, entry.inode()) for entry in entries}
    return set()  # `list_checkpoints` says why


def _candidates(parent: Path, which: str, skipped: list[str]) -> list[Path]:
    """Return the checkpoints to try in order; add to `skipped` what hides which one is the best."""
    folders = list_checkpoints(parent)[::-1]
    if not folders and not exists(parent):
        raise RunError(f"{parent} is missing; restore it (is its disk mounted?)")
    if not folders:
        run = quoted(parent.parent)
        raise RunError(
            f"{parent.parent} holds no checkpoint yet: it is still training, or was ended before "
            f"its first one; `chargpt train TEXT --out {run}` trains it again"
        )
    if which == "latest":
        return folders
    if which != "best":
        steps = {str(step_of(folder)): folder for folder in folders}
        if which not in steps:
            raise RunError(
                f"{parent.parent} has no checkpoint {which!r}; it has best, latest and steps "
                + ", ".join(reversed(steps))
            )
        return [steps[which]]
    for folder in folders:
        try:
            best = read_metadata(folder)[2].best_step
        except UnreadableError:
            raise
        except ChargptError as error:
            skipped.append(str(error))
            continue
        # without a best step none is better than the weights at the start, and the newest is loaded
        best_folder = parent / name_of(best) if best else folders[0]
        if best_folder not in folders:
            skipped.append(f"{best_folder}, the best checkpoint, is missing")
        return sorted(folders, key=lambda folder: folder != best_folder)
    return folders
