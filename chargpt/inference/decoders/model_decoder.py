"""Decoders that run a model's own forward pass with a KV cache.

Shapes in this file: N = sequences, V = vocabulary size.
"""

import logging
from collections.abc import Callable
from functools import cache, cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chargpt.device import can_capture, capture_graph
from chargpt.errors import CaptureError
from chargpt.models import GPT, LanguageModel
from chargpt.models.cache import KVCache
from chargpt.text.tokenizer import Tokens

logger = logging.getLogger(__name__)


class ModelDecoder:
    """Decoder for any model on any device."""

    def __init__(
        self, model: LanguageModel, num_sequences: int, prefilled: KVCache | None = None
    ) -> None:
        self.model = model
        self.cache = self._new_cache(num_sequences)
        if prefilled is not None:
            self.cache.copy_from(prefilled)

    def _new_cache(self, num_sequences: int) -> KVCache:
        return self.model.new_cache(num_sequences)

    @torch.inference_mode()
    def step(self, tokens: Tokens) -> npt.NDArray[np.float32]:
        """Append one token a sequence, (N,); return the logits of the next ones, (N, V)."""
        if self.cache.length == self.model.block_size:
            self.model.evict_oldest_half(self.cache)
        logits = self._forward(torch.from_numpy(tokens[:, None]))
        array: npt.NDArray[np.float32] = logits.float().cpu().numpy()
        return array

    def _forward(self, column: Tensor) -> Tensor:
        """Append tokens (N, 1); return the logits of the next ones, (N, V)."""
        logits: Tensor = self.model(column.to(self.model.device), self.cache)[:, -1]
        return logits


class GraphDecoder(ModelDecoder):
    """Decoder for a GPT on CUDA, whose decode step is captured as a CUDA graph.

    A decode step of a small model is launch-bound: a graph launches all of its kernels at once. It
    replays the same operations on the same memory, hence the static cache and `self.tokens`.
    """

    model: GPT

    def __init__(self, model: GPT, num_sequences: int, prefilled: KVCache | None = None) -> None:
        super().__init__(model, num_sequences, prefilled)
        self.tokens = torch.zeros(num_sequences, 1, dtype=torch.int64, device=model.device)

    def _new_cache(self, num_sequences: int) -> KVCache:
        return self.model.new_static_cache(num_sequences)

    def _forward(self, column: Tensor) -> Tensor:
        self.tokens.copy_(column)
        logits = self._replay()  # captured at the first step, in the inference mode of replays
        self.cache.set_length(self.cache.length + 1)
        return logits

    @cached_property
    def _replay(self) -> Callable[[], Tensor]:
        """The decode step of `self.tokens` as a CUDA graph, or as it is if capture fails."""
        step = partial(super()._forward, self.tokens)  # does not advance the static cache
        if can_capture(self.model.device):
            try:
                return capture_graph(step, self.model.device)
            except CaptureError as error:
                _warn_once(f"sampling is slower than it could be: {error}")
        return step


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)
