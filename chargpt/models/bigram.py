"""The bigram baseline: a trained V x V table of logits, or smoothed counts of pairs.

Shapes in this file: B = batch, T = tokens, V = vocabulary size, N = pairs.
"""

import numpy as np
from torch import Tensor, nn

from chargpt.errors import ConfigError
from chargpt.models.base import KVCache, LanguageModel
from chargpt.text.corpus import PairCounts
from chargpt.text.tokenizer import Floats, Tokens

MAX_VOCAB_SIZE = 20_000
BIGRAM_ALPHA = 0.1  # pseudo-count of additive smoothing


class BigramLM(LanguageModel):
    """logits = table[token]; trained by gradient descent."""

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


def bigram_log_probs(fitted: PairCounts, first: Tokens, second: Tokens, alpha: float) -> Floats:
    """Return log((count + alpha) / (row sum + alpha V)) of tokens `second` after `first`, (N,).

    `alpha`, the pseudo-count of additive smoothing, is above 0.
    """
    vocab_size = fitted.vocab_size
    row_sums = np.bincount(fitted.first, weights=fitted.counts, minlength=vocab_size)
    # A last entry that equals no pair, for pairs beyond all fitted ones.
    codes = np.append(fitted.first * vocab_size + fitted.second, -1)
    counts = np.append(fitted.counts, 0)
    wanted = first * vocab_size + second
    index = np.searchsorted(codes[:-1], wanted)
    found = np.where(codes[index] == wanted, counts[index], 0)
    return np.log((found + alpha) / (row_sums[first] + alpha * vocab_size))
