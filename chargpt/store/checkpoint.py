"""Checkpoints: `step-N/` directories with weights, optimizer state, config, tokenizer, progress."""

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from chargpt.config import Config, ModelConfig, validate
from chargpt.device import require_memory
from chargpt.errors import RunError
from chargpt.files import Buffers, entry_names, exists, parse_yaml
from chargpt.models import build_model, count_parameters, rotary_bytes
from chargpt.store import commit
from chargpt.store.state import RunState
from chargpt.store.tensors import deserialize, load_weights
from chargpt.text.tokenizer import CharTokenizer

CONFIG, TOKENIZER, STATE = "config.yaml", "tokenizer.json", "state.json"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
FILES = (CONFIG, TOKENIZER, STATE, MODEL, OPTIMIZER, commit.MANIFEST)
KEEP = "keep"  # a file of this name in a checkpoint protects it from deletion
UNFINISHED = re.compile(rf"{commit.CHECKPOINT_NAME.pattern}(\.old|\.[0-9]+)?\.tmp")
MAX_METADATA_BYTES = 64_000_000  # of the config, tokenizer and state files
MAX_OPTIMIZER_COPIES = 4  # optimizer values per parameter: moments and raw weights, and a margin
MAX_TENSOR_HEADER = 400  # bytes of a safetensors header per tensor
TENSORS_PER_LAYER, OTHER_TENSORS = 12, 8  # at most


@dataclass(frozen=True)
class Checkpoint:
    """The content of one checkpoint."""

    folder: Path
    config: Config  # resolved
    tokenizer: CharTokenizer
    state: RunState
    model: dict[str, Tensor]  # the weights to evaluate: the moving average if `train.ema` is set
    optimizer: dict[str, Tensor]  # and `raw.*`, the weights to train on; empty if not read

    @property
    def raw_weights(self) -> dict[str, Tensor]:
        """The weights to train on, without the moving average."""
        raw = {n[4:]: t for n, t in self.optimizer.items() if n.startswith("raw.")}
        return raw or self.model


def name_of(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint folder's name."""
    return int(folder.name.removeprefix("step-"))


def list_checkpoints(parent: Path) -> list[Path]:
    """Return the committed checkpoint folders, oldest first, or raise UnreadableError."""
    try:
        folders = [
            parent / name for name in entry_names(parent) if commit.CHECKPOINT_NAME.fullmatch(name)
        ]
        return sorted((f for f in folders if exists(f / commit.MANIFEST)), key=step_of)
    except OSError as error:
        raise commit.read_error(parent, error) from None


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
    commit.commit(folder, files, {"step": step})
    return folder


def prune_checkpoints(
    parent: Path, protected: Collection[str], keep_last: int, newest: Path
) -> None:
    """Delete old checkpoints except the last `keep_last` up to `newest`, and the `protected` ones.

    Checkpoints after `newest` were skipped as damaged; they are left for the user. Those that hold
    the file `keep`, or one that chargpt did not write, are left too. An error ends the deletion;
    the next save tries again.
    """
    with suppress(OSError, RunError):
        older = [path for path in list_checkpoints(parent) if step_of(path) <= step_of(newest)]
        for folder in older[:-keep_last]:
            if folder.name not in protected and set(entry_names(folder)) <= set(FILES):
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
    sizes = [min(limit, _file_size(folder / name)) for name, limit in max_bytes.items()]
    # each file's bytes are in memory together with its tensors
    require_memory(2 * sum(sizes) + rotary_bytes(config.model), f"the checkpoint {folder}")
    tensors = {
        name: deserialize(folder / name, content)
        for name, content in commit.read(folder, max_bytes, {"step": state.step}).items()
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


def _file_size(path: Path) -> int:
    """Return the size of a file; 0 if there is none, which reading it will report."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def read_metadata(folder: Path) -> tuple[Config, CharTokenizer, RunState]:
    """Return a checkpoint's config, tokenizer and state; ChargptError as `read_checkpoint`."""
    step = step_of(folder)
    max_bytes = dict.fromkeys((CONFIG, TOKENIZER, STATE), MAX_METADATA_BYTES)
    texts = commit.read(folder, max_bytes, {"step": step})
    try:
        config = parse_config(texts[CONFIG], folder / CONFIG)
        tokenizer = CharTokenizer.from_json(texts[TOKENIZER].decode(), str(folder / TOKENIZER))
    except UnicodeDecodeError as error:
        raise RunError(f"{folder} is not a checkpoint ({error}); use another") from None
    try:
        state = RunState.from_json(texts[STATE])
        if state.step != step:
            raise ValueError("it is of another step")
    except ValueError as error:
        raise RunError(f"{folder / STATE} is malformed ({error}); use another checkpoint") from None
    return config, tokenizer, state


def parse_config(content: bytes, path: Path) -> Config:
    """Return the config in a file's content, or raise ConfigError or UnicodeDecodeError."""
    tree, lines = parse_yaml(content.decode(), str(path))
    return validate(tree, str(path), lines)
