"""The one interface of every model: token ids in, logits out.

Shapes in this file: B = batch, T = characters given, V = vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from chargpt.models.cache import KVCache


class LanguageModel(nn.Module, ABC):
    """Predicts the next character at every position.

    Attributes:
        vocab_size: V, the number of tokens.
        block_size: the most characters that one call may look at.
    """

    def __init__(self, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.block_size = block_size

    @abstractmethod
    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return logits (B, T, V) for int64 `tokens` (B, T).

        With a cache, `tokens` continue what the cache holds, and the cache takes them in.
        """

    @abstractmethod
    def new_cache(self, batch_size: int) -> KVCache:
        """Return an empty cache for `batch_size` texts of up to `block_size` characters."""

    def forget(self, cache: KVCache) -> None:
        """Drop the older half of a full cache; the rest of it stays as it was worked out."""
        cache.drop(self.block_size - self.block_size // 2)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(chain(self.parameters(), self.buffers())).device

    def parameter_count(self) -> int:
        """Return the number of trained numbers."""
        return sum(p.numel() for p in self.parameters())


@contextmanager
def eval_mode(model: LanguageModel) -> Iterator[None]:
    """Put a model into evaluation mode, and restore its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
