"""Serialization of tensors in the safetensors format, and loading of weights into a model."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from chargpt.errors import RunError
from chargpt.files import Buffers
from chargpt.models import LanguageModel

# raised by reading a file of tensors that is not of this form
MALFORMED = (ValueError, KeyError, TypeError, RuntimeError, OverflowError, SafetensorError)


def serialize(tensors: Mapping[str, Tensor]) -> Buffers:
    """Return the bytes of `safetensors.torch.save` without copying contiguous CPU tensors.

    The library copies every tensor twice, which takes as long as writing the file. The returned
    memory views are valid until a tensor changes. Format: header length (8 bytes, little-endian),
    JSON header padded with spaces to a multiple of 8 bytes, then each tensor's bytes.

    Args:
        tensors: float32, by name.
    """
    header, chunks, end = {}, [], 0
    for name, tensor in sorted(tensors.items()):
        assert tensor.dtype == torch.float32  # the format orders tensors by element size first
        chunk = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        start, end = end, end + len(chunk)
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
        chunks.append(chunk)
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    return [len(encoded).to_bytes(8, "little") + encoded, *chunks]


def deserialize(path: Path, content: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file's bytes, or raise RunError."""
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(content)
        for name, tensor in tensors.items():
            if tensor.dtype != torch.float32:
                raise ValueError(f"{name:.80} is {tensor.dtype}, not float32")
    except MALFORMED as error:
        raise RunError(
            f"{path} is not a safetensors file ({str(error)[:200]}); use another checkpoint"
        ) from None
    return tensors


def load_weights(model: LanguageModel, tensors: Mapping[str, Tensor], origin: Path) -> None:
    """Copy saved weights into a model; RunError as `require_weights`."""
    require_weights(model, tensors, origin)
    model.load_state_dict(dict(tensors))


def require_weights(model: LanguageModel, tensors: Mapping[str, Tensor], origin: Path) -> None:
    """Raise RunError unless weights are finite and have the names and shapes of a model's."""
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    given = {name: tensor.shape for name, tensor in tensors.items()}
    if wanted != given:
        different = sorted(n for n in wanted.keys() | given.keys() if wanted.get(n) != given.get(n))
        raise RunError(
            f"the weights in {origin} do not match its config (first at {different[0]}); "
            "use another checkpoint"
        )
    require_finite(tensors, origin)


def require_finite(tensors: Mapping[str, Tensor], origin: Path) -> None:
    """Raise RunError if a value is NaN or infinite."""
    for name, tensor in tensors.items():
        if not math.isfinite(tensor.double().abs().sum().item()):
            raise RunError(f"{name} in {origin} is NaN or infinite; use an earlier checkpoint")
