"""Tensors to the bytes of a safetensors file and back, and from there into a model."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from chargpt.errors import RunError
from chargpt.files import Chunks
from chargpt.models import LanguageModel


def serialize(tensors: Mapping[str, Tensor]) -> Chunks:
    """Return the bytes that `safetensors.torch.save` would, but where they lie.

    The library's own way copies all of it twice, which took as long as writing it. Here only what
    is elsewhere than in this machine's memory, or transposed, is copied. The bytes are valid until
    a tensor changes. The format: a header's length in 8 bytes, the header as JSON, filled up
    with spaces to a multiple of 8, and each tensor's bytes.
    """
    header, chunks, end = {}, [], 0
    for name, tensor in sorted(tensors.items()):
        assert tensor.dtype == torch.float32  # others would have to stand in another order
        chunk = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        start, end = end, end + len(chunk)
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
        chunks.append(chunk)
    words = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    words += b" " * (-len(words) % 8)
    return [len(words).to_bytes(8, "little") + words, *chunks]


def deserialize(path: Path, content: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file's bytes.

    Raises:
        RunError: it does not hold tensors.
    """
    try:
        return safetensors.torch.load(content)
    except (ValueError, KeyError, safetensors.SafetensorError) as error:
        raise RunError(f"{path} does not hold tensors ({error}); use another checkpoint") from None


def load_weights(model: LanguageModel, tensors: Mapping[str, Tensor], origin: Path) -> None:
    """Copy saved weights into a model of the same shape.

    Raises:
        RunError: names or shapes differ, or a weight is not a finite number.
    """
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    given = {name: tensor.shape for name, tensor in tensors.items()}
    if wanted != given:
        odd = sorted(n for n in wanted.keys() | given.keys() if wanted.get(n) != given.get(n))
        raise RunError(
            f"the weights in {origin} are not those of its config (first at {odd[0]}); "
            "use another checkpoint"
        )
    for name, tensor in tensors.items():
        if not math.isfinite(tensor.double().abs().sum().item()):
            raise RunError(f"{name} in {origin} is not finite; use an earlier checkpoint")
    model.load_state_dict(dict(tensors))
