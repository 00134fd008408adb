"""Import of a Hugging Face folder that `chargpt export hf` wrote."""

from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from chargpt.config import Config, validate
from chargpt.device import require_memory
from chargpt.errors import RunError
from chargpt.export.huggingface import ORIGIN, WEIGHTS, qwen3_name
from chargpt.files import read_json, read_regular, require_new
from chargpt.models import build_model, count_parameters, rotary_bytes
from chargpt.store.checkpoint import RunState, max_weight_bytes
from chargpt.store.folder import RunFolder
from chargpt.store.tensors import load_weights
from chargpt.text.tokenizer import CharTokenizer

MAX_JSON_BYTES = 64_000_000


def import_huggingface(folder: Path, out: Path) -> Path:
    """Make a run of a folder that `export_huggingface` wrote; return the run's folder.

    The run has the weights, settings and progress of the one exported, and no optimizer state.

    Raises:
        ChargptError: the folder is not such an export, or `out` is in use.
        OSError: the run cannot be written.
    """
    require_new(out)
    try:
        config, tokenizer, state = read_origin(folder / ORIGIN)
        tensors = read_weights(folder / WEIGHTS, config, tokenizer.vocab_size)
    except (KeyError, AttributeError, TypeError, ValueError, OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise RunError(
            f"{folder} is not a folder that `chargpt export hf` wrote ({cause:.200}); name another"
        ) from None
    model = build_model(config.model, tokenizer.vocab_size)
    ours = {qwen3_name(name): name for name in model.state_dict()}
    load_weights(model, {ours.get(name, name): tensor for name, tensor in tensors.items()}, folder)
    with RunFolder(out).locked(is_new=True) as run:
        run.create_from_weights(config, tokenizer, state, model.state_dict())
    return out


def read_origin(path: Path) -> tuple[Config, CharTokenizer, RunState]:
    """Return config, tokenizer and state of the run that was exported."""
    origin = read_json(path, MAX_JSON_BYTES)
    config = validate(origin["config"], str(path))
    if config.model.kind != "gpt":
        raise ValueError("it holds no GPT")
    tokenizer = CharTokenizer.from_json(origin["tokenizer"], str(path))
    return config, tokenizer, RunState.from_json(origin["state"].encode())


def read_weights(path: Path, config: Config, vocab_size: int) -> dict[str, Tensor]:
    """Return the weights, under their names there; ValueError if their number is another."""
    # all that the settings allow, but no more than there is to read
    limit = max_weight_bytes(config.model, vocab_size)
    size = min(limit, path.lstat().st_size)
    require_memory(2 * size + rotary_bytes(config.model), "the model")
    tensors = safetensors.torch.load(read_regular(path, limit))
    n_weights = sum(tensor.numel() for tensor in tensors.values())
    # before memory is taken for the model
    if n_weights != count_parameters(config.model, vocab_size):
        raise ValueError(f"its settings do not match its {n_weights:,} weights")
    return tensors
