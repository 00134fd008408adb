"""The baseline: the next character from the last one alone, as one V x V table.

Shapes in this file: B = batch, T = characters given, V = vocabulary.
"""

import numpy as np
import torch
from torch import Tensor, nn

from chargpt.errors import ConfigError
from chargpt.models.base import LanguageModel
from chargpt.models.cache import KVCache
from chargpt.text.statistics import PairCounts

MAX_VOCABULARY = 20_000


class BigramLM(LanguageModel):
    """logits = table[token]; trained like any model, or fitted at once by `from_counts`."""

    def __init__(self, vocab_size: int, block_size: int, init_std: float = 0.0) -> None:
        """Start from a table of zeros, whose loss is ln V, or of normals of `init_std`.

        Raises:
            ConfigError: the vocabulary is too large for a table.
        """
        if vocab_size > MAX_VOCABULARY:
            raise ConfigError(
                f"a bigram table for {vocab_size:,} characters would take "
                f"{vocab_size**2 * 4:,} bytes; raise text.min_count until at most "
                f"{MAX_VOCABULARY:,} characters are left"
            )
        super().__init__(vocab_size, block_size)
        self.table = nn.Embedding(vocab_size, vocab_size)
        nn.init.normal_(self.table.weight, std=init_std)

    @classmethod
    def from_counts(cls, pairs: PairCounts, block_size: int, alpha: float = 1.0) -> "BigramLM":
        """Return the table log((count + alpha) / (row + alpha V)): the best fit to `pairs`.

        Args:
            pairs: how often each character followed each other.
            alpha: imagined count of every pair, above 0, so that nothing is impossible.

        Raises:
            ConfigError: the vocabulary is too large for a table.
        """
        assert alpha > 0
        size = pairs.vocab_size
        model = cls(size, block_size)
        counts = np.full((size, size), alpha)
        counts[pairs.first, pairs.second] += pairs.counts
        counts /= counts.sum(axis=1, keepdims=True)
        with torch.no_grad():
            model.table.weight.copy_(torch.from_numpy(np.log(counts)))
        return model

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        if cache is not None:
            cache.advance(tokens.size(1))
            assert cache.length <= cache.capacity, "more characters than the block holds"
        logits: Tensor = self.table(tokens)  # (B, T, V)
        return logits

    def new_cache(self, batch_size: int) -> KVCache:
        """Return a cache that counts characters and, having no layers, keeps none."""
        weight = self.table.weight
        return KVCache(
            layers=0,
            batch_size=batch_size,
            heads=1,
            capacity=self.block_size,
            head_size=1,
            device=weight.device,
            dtype=weight.dtype,
        )
