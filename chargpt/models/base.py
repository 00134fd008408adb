"""The interface of every model: token ids in, logits out.

Shapes in this file: B = batch, T = tokens, V = vocabulary size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from chargpt.errors import TextError
from chargpt.models.cache import KVCache
from chargpt.text.tokenizer import Tokens


class LanguageModel(nn.Module, ABC):
    """Model of the next token at every position."""

    lookback = 0  # earlier tokens that `Mixture.forward` takes as `before`

    def __init__(self, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.block_size = block_size  # maximum context length in tokens
        self.first_continuation_id = vocab_size  # ids from here on are continuation bytes of UTF-8

    @abstractmethod
    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return logits (B, T, V) for `tokens` (B, T) of any integer type.

        With a cache, `tokens` continue the cached ones and are appended to it.

        Raises:
            TextError: the tokens are not (B, T), or exceed the block size (which limits a bigram
                model only with a cache).
        """

    def check_tokens(
        self, tokens: Tensor | Tokens, cache: KVCache | None = None, *, any_length: bool = False
    ) -> Tensor:
        """Return tokens (B, T) as an int64 tensor; raise as `forward` does."""
        if not isinstance(tokens, Tensor):
            tokens = torch.as_tensor(tokens, device=self.device)
        if tokens.dim() != 2:
            shape = tuple(tokens.shape)
            raise TextError(f"tokens of shape {shape} are not (batch, tokens): write tokens[None]")
        n_tokens = tokens.size(1) + (0 if cache is None else cache.length)
        if n_tokens > self.block_size and not any_length:
            raise TextError(
                f"{n_tokens:,} tokens exceed the block size {self.block_size:,}; give the last "
                "ones, or use chargpt.evaluate or chargpt.sample"
            )
        return tokens.long()

    @abstractmethod
    def new_cache(self, batch_size: int) -> KVCache:
        """Return an empty cache for `batch_size` sequences of up to `block_size` tokens."""

    def evict_oldest_half(self, cache: KVCache) -> None:
        """Remove the older half of a full cache; the rest is not recomputed."""
        cache.evict(self.block_size - self.block_size // 2)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(chain(self.parameters(), self.buffers())).device

    def num_parameters(self) -> int:
        """Return the number of parameters."""
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
