"""Decoders that run a model's own forward pass with a KV cache.

Shapes in this file: N = streams, V = vocabulary size.
"""

import logging
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chargpt.device import can_capture, capture_graph
from chargpt.errors import CaptureError
from chargpt.models import GPT, LanguageModel
from chargpt.models.cache import KVCache
from chargpt.text.tokenizer import TokenIds

logger = logging.getLogger(__name__)


class ModelDecoder:
    """Decoder for any model on any device."""

    def __init__(
        self, model: LanguageModel, num_streams: int, prefilled: KVCache | None = None
    ) -> None:
        self.model = model
        self.cache = model.new_cache(num_streams)
        if prefilled is not None:
            self.cache.copy_from(prefilled)

    @torch.inference_mode()
    def step(self, tokens: TokenIds) -> npt.NDArray[np.float32]:
        """Append one token a stream, (N,); return the logits of the next ones, (N, V)."""
        if self.cache.length == self.model.block_size:
            self.model.evict_oldest_half(self.cache)
        column = torch.from_numpy(tokens[:, None]).to(self.model.device)  # (N, 1)
        return _to_numpy(self.model(column, self.cache)[:, -1])


class GraphDecoder:
    """Decoder for a GPT on CUDA, whose decode step is captured as a CUDA graph.

    A decode step of a small model is launch-bound: a graph launches all of its kernels at once. It
    replays the same operations on the same memory, hence the static cache and `self.tokens`.
    """

    def __init__(self, model: GPT, num_streams: int, prefilled: KVCache | None = None) -> None:
        self.model = model
        self.cache = model.new_static_cache(num_streams)
        if prefilled is not None:
            self.cache.copy_from(prefilled)
        self.tokens = torch.zeros(num_streams, 1, dtype=torch.int64, device=model.device)
        self.forward: Callable[[], Tensor] | None = None

    @torch.inference_mode()
    def step(self, tokens: TokenIds) -> npt.NDArray[np.float32]:
        """Append one token a stream, (N,); return the logits of the next ones, (N, V)."""
        if self.cache.length == self.model.block_size:
            self.model.evict_oldest_half(self.cache)
        self.tokens.copy_(torch.from_numpy(tokens[:, None]))
        if self.forward is None:  # captured here, under the inference mode that replays run in
            self.forward = self._capture()
        logits = self.forward()
        self.cache.set_length(self.cache.length + 1)
        return _to_numpy(logits)

    def _capture(self) -> Callable[[], Tensor]:
        """Return `_forward` as a CUDA graph, or `_forward` itself if capture fails."""
        if can_capture(self.model.device):
            try:
                return capture_graph(self._forward, self.model.device)
            except CaptureError as error:
                _warn_once(f"sampling is slower than it could be: {error}")
        return self._forward

    def _forward(self) -> Tensor:
        """Return the logits after `self.tokens`, (N, V), without advancing the cache."""
        logits: Tensor = self.model(self.tokens, self.cache)[:, -1]
        return logits


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _to_numpy(logits: Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = logits.float().cpu().numpy()
    return array
