"""The bigram baseline: one V x V table of logits, indexed by the last token.

Shapes in this file: B = batch, T = tokens, V = vocabulary size.
"""

import numpy as np
import torch
from torch import Tensor, nn

from chargpt.errors import ConfigError
from chargpt.models import KVCache, LanguageModel
from chargpt.text.corpus import PairCounts

MAX_VOCAB_SIZE = 20_000


class BigramLM(LanguageModel):
    """logits = table[token]; trained by gradient descent, or estimated by `from_counts`."""

    def __init__(self, vocab_size: int, block_size: int, init_std: float = 0.0) -> None:
        """Initialise the table from a normal distribution; with `init_std` 0 the loss is ln V.

        Raises:
            ConfigError: the vocabulary is larger than MAX_VOCAB_SIZE.
        """
        if vocab_size > MAX_VOCAB_SIZE:
            raise ConfigError(
                f"a bigram table for {vocab_size:,} characters would take "
                f"{vocab_size**2 * 4:,} bytes; raise text.min_count until at most "
                f"{MAX_VOCAB_SIZE:,} characters are left"
            )
        super().__init__(vocab_size, block_size)
        self.table = nn.Embedding(vocab_size, vocab_size)
        nn.init.normal_(self.table.weight, std=init_std)

    @classmethod
    def from_counts(cls, pairs: PairCounts, block_size: int, alpha: float = 1.0) -> "BigramLM":
        """Return the model with logits log((count + alpha) / (row sum + alpha V)).

        `alpha`, the pseudo-count of additive smoothing, is above 0.

        Raises:
            ConfigError: the vocabulary is larger than MAX_VOCAB_SIZE.
        """
        assert alpha > 0
        size = pairs.vocab_size
        model = cls(size, block_size)
        probs = np.full((size, size), alpha)
        probs[pairs.first, pairs.second] += pairs.counts
        probs /= probs.sum(axis=1, keepdims=True)
        with torch.no_grad():
            model.table.weight.copy_(torch.from_numpy(np.log(probs)))
        return model

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        tokens = self.check_tokens(tokens, cache, any_length=cache is None)
        if cache is not None:
            cache.advance(tokens.size(1))
        logits: Tensor = self.table(tokens)  # (B, T, V)
        return logits

    def new_cache(self, batch_size: int) -> KVCache:
        """Return a cache without layers: only its length is used."""
        weight = self.table.weight
        return KVCache((0, batch_size, 1, self.block_size, 1), weight.dtype, weight.device)
