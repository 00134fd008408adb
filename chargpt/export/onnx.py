"""Export to an ONNX file with a KV cache, for onnxruntime and other programs.

    tokens (B, T) int64, past_keys and past_values (L, B, H, S, D)
    -> logits (B, T, V), keys and values (L, B, H, S + T, D)

B, T and S may change from call to call; S is 0 at first, and S + T at most the block size. The
metadata of the file hold the tokenizer, as `tokenizer.json` of a run, and the block size.

Shapes in this file: B = batch, T = tokens, S = cached tokens, L = layers, H = heads, D = head size,
V = vocabulary size.
"""

import logging
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from chargpt.errors import ConfigError
from chargpt.export.check import ExportCheck, Logits, encode, write_checked
from chargpt.models import KVCache
from chargpt.models.gpt import GPT, AttentionInputs
from chargpt.models.kernels import norm_linear
from chargpt.store.run import Run
from chargpt.text.tokenizer import CharTokenizer

MAX_BYTES = 2_000_000_000  # of weights, of which a protocol buffer can hold 2 GB
MAX_OPTIMIZED_LAYERS = 32  # the exporter's time to optimise grows with their square
INPUTS, OUTPUTS = ("tokens", "past_keys", "past_values"), ("logits", "keys", "values")


def export_onnx(run: Run, path: Path, *, force: bool | None = None) -> ExportCheck | None:
    """Write a run's GPT as an ONNX file, in float32, and check it with onnxruntime.

    A file at `path` is replaced only with `force`.

    Raises:
        ConfigError: a package is missing, the model is of another kind or too large, or a file is
            there.
        OperationError: the export differs from the run.
        OSError: it cannot be written.
    """
    if 4 * run.model.num_parameters() > MAX_BYTES:
        raise ConfigError(
            f"an ONNX file holds at most {MAX_BYTES / 1e9:.0f} GB of weights, and these are more; "
            "use `chargpt export hf`"
        )
    return write_checked(run, path, "ONNX", write_onnx, "onnxruntime", OnnxRuntime, force=force)


class GrowingCache(KVCache):
    """KV cache that returns longer tensors instead of writing in place, so that S is free."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Begin with keys and values (L, B, H, S, D); there is no buffer to allocate."""
        self.past = keys, values
        self.length = keys.size(3)
        self.layers: list[tuple[Tensor, Tensor]] = []  # keys and values, (B, H, S + T, D)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        past_keys, past_values = self.past
        joined = torch.cat((past_keys[layer], keys), 2), torch.cat((past_values[layer], values), 2)
        self.layers.append(joined)
        return joined


class CachedGPT(nn.Module):
    """GPT with the KV cache as inputs and outputs, (L, B, H, S, D) and (L, B, H, S + T, D)."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, past_keys: Tensor, past_values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        model, cache = self.model, GrowingCache(past_keys, past_values)
        end = cache.length + tokens.size(1)
        key_positions = torch.arange(end, device=tokens.device)  # (S + T,)
        positions = key_positions[cache.length :]  # (T,)
        mask = key_positions <= positions[:, None]  # (T, S + T)
        inputs = AttentionInputs(model.cos[positions], model.sin[positions], mask, cache)
        x = model.embedding(tokens)  # (B, T, n_embd)
        for block in model.blocks:
            x = block(x, inputs)
        keys, values = zip(*cache.layers, strict=True)
        logits = norm_linear(x, model.norm, model.head)  # (B, T, V)
        return logits, torch.stack(keys), torch.stack(values)


def write_onnx(path: Path, run: Run, model: GPT) -> None:
    """Write a model as an ONNX file, with tokenizer and block size as metadata."""
    import_module("onnxscript")  # which the exporter needs
    config = model.config
    # any sizes but 0 and 1, which the exporter takes for constants; no tensor may be given twice
    past = model.cos.new_zeros(config.n_layer, 2, config.n_head, 3, config.head_size)
    example = torch.zeros(2, 4, dtype=torch.int64, device=model.device), past, past.clone()
    batch, length, cached = Dim("batch"), Dim("length"), Dim("cached")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is missing
    with warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(
            CachedGPT(model).eval(),
            example,
            input_names=INPUTS,
            output_names=OUTPUTS,
            dynamic_shapes=({0: batch, 1: length}, {1: batch, 3: cached}, {1: batch, 3: cached}),
            dynamo=True,
            verbose=False,
            optimize=config.n_layer <= MAX_OPTIMIZED_LAYERS,
        )
    assert program is not None
    ir: Any = import_module("onnx_ir")
    # the exporter adds stack traces with paths of this machine
    import_module("onnx_ir.passes.common").ClearMetadataAndDocStringPass()(program.model)
    program.model.metadata_props["tokenizer"] = run.tokenizer.to_json()
    program.model.metadata_props["block_size"] = str(config.block_size)
    ir.save(program.model, path)


class OnnxRuntime:
    """The file as onnxruntime opens it."""

    def __init__(self, path: Path) -> None:
        onnxruntime: Any = import_module("onnxruntime")
        self.name = f"onnxruntime {onnxruntime.__version__}"
        self.session = onnxruntime.InferenceSession(str(path))
        metadata = self.session.get_modelmeta().custom_metadata_map
        self.tokenizer = CharTokenizer.from_json(metadata["tokenizer"], str(path))

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)

    def logits(self, tokens: list[int]) -> Logits:
        """Return logits (T, V), computed in two parts, the second with the cache of the first."""
        layers, _, heads, _, size = self.session.get_inputs()[1].shape
        keys = values = np.zeros((layers, 1, heads, 0, size), np.float32)
        middle, found = len(tokens) // 2, []
        for part in filter(None, (tokens[:middle], tokens[middle:])):
            given = dict(zip(INPUTS, (np.array([part], np.int64), keys, values), strict=True))
            logits, keys, values = self.session.run(None, given)
            found.append(logits[0])
        return np.concatenate(found)
