"""Incremental decoders: one token of N streams in, the logits of their next tokens out.

On a CPU a GPT with full attention, QK-norm and SwiGLU is decoded by numpy (numpy_decoder.py). All
other models run their own forward pass with a KV cache, a GPT on CUDA as a graph
(model_decoder.py).
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from chargpt.inference.decoders.model_decoder import GraphDecoder, ModelDecoder
from chargpt.inference.decoders.numpy_decoder import NumpyDecoder, is_supported
from chargpt.models import GPT, LanguageModel
from chargpt.models.cache import KVCache
from chargpt.text.tokenizer import TokenIds


class Decoder(Protocol):
    """Incremental decoder of N streams with a KV cache.

    The cache stores at most `block_size` tokens a stream. When it is full, the next step first
    evicts the older half; keys and values of the newer half are not recomputed. So once the block
    is full, every token is predicted from more than half a block of context.
    """

    def step(self, tokens: TokenIds) -> npt.NDArray[np.float32]:
        """Append one token a stream, (N,); return the logits of the next ones, (N, V)."""
        ...


def build_decoder(
    model: LanguageModel, num_streams: int, prefilled: KVCache | None = None
) -> Decoder:
    """Return the fastest decoder for a model on its device.

    Args:
        model: any model, in evaluation mode. `NumpyDecoder` copies its weights; the other decoders
            read them at each step.
        num_streams: N.
        prefilled: cache of one sequence, which every stream continues; empty by default.
    """
    if is_supported(model):
        return NumpyDecoder(model, num_streams, prefilled)
    if isinstance(model, GPT) and model.device.type == "cuda":
        return GraphDecoder(model, num_streams, prefilled)
    return ModelDecoder(model, num_streams, prefilled)
