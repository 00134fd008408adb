"""Mixture of a GPT and n-gram counts: both know what the other does not.

    p(w | h) = g_0(h) p_GPT(w | h) + sum_k g_k(h) p_k(w | h)

p_k is the n-gram model interpolated up to order k (ngram.py). The weights g are the softmax of a
small network, the gate: a mixture of experts (Jacobs et al. 1991), or interpolation weights that
depend on the context and are fitted to held-out text (Jelinek and Mercer 1980). Its inputs say how
much the counts know of the context and how certain the GPT is.

Shapes in this file: B = batch, T = tokens, V = vocabulary size, K = n-gram orders.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from chargpt.models.base import LanguageModel
from chargpt.models.cache import KVCache
from chargpt.models.gpt import GPT
from chargpt.models.ngram import MAX_TOKENS, NGramLM
from chargpt.text.tokenizer import Tokens

ORDER = 8  # of the n-gram model: higher ones gain nothing
HIDDEN = 16  # units of the gate


class MixtureCache(KVCache):
    """KV cache of the GPT, and the n-gram contexts of the last token, (B, 1) each."""

    contexts: Sequence[Tensor] | None = None

    def copy_from(self, other: KVCache) -> None:
        super().copy_from(other)
        if isinstance(other, MixtureCache) and other.contexts is not None:
            batch_size = self.keys.size(1)
            self.contexts = [ids.expand(batch_size, 1) for ids in other.contexts]


class Mixture(LanguageModel):
    """A GPT, an n-gram model, and the gate that weighs them; `fit_mixture` fits it.

    Its logits are log-probabilities. The n-gram model's context may begin before the block.

    Attributes:
        tokens: those that the n-gram model was estimated from.
    """

    def __init__(self, gpt: GPT, tokens: Tokens, order: int = ORDER) -> None:
        super().__init__(gpt.vocab_size, gpt.block_size)
        self.gpt, self.order = gpt, order
        self.first_continuation = gpt.first_continuation
        self.count(tokens)
        n_orders = len(self.ngram.orders)
        self.lookback = max(0, n_orders - 2)
        self.gate = nn.Sequential(
            nn.Linear(2 * n_orders, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 1 + n_orders)
        )

    def count(self, tokens: Tokens) -> None:
        """Estimate the n-gram model from the last MAX_TOKENS token ids."""
        self.tokens = np.array(tokens[-MAX_TOKENS:])
        ngram = NGramLM.fit(self.tokens, self.vocab_size, self.block_size, self.order)
        self.ngram = ngram.to(self.gpt.device)

    def forward(
        self, tokens: Tensor, cache: KVCache | None = None, before: Tensor | None = None
    ) -> Tensor:
        """Return log-probabilities (B, T, V), as `LanguageModel.forward` does.

        Without a cache, `before` (B, lookback) are the tokens before the first one, -1 for none.
        """
        tokens = self.check_tokens(tokens, cache)
        if isinstance(cache, MixtureCache):
            contexts = self.ngram.contexts(tokens, cache.contexts)
            cache.contexts = [ids[:, -1:] for ids in contexts]
        else:
            longer = tokens if before is None else torch.cat((before, tokens), dim=1)
            contexts = [ids[:, -tokens.size(1) :] for ids in self.ngram.contexts(longer)]
        logits = self.gpt(tokens, cache)  # (B, T, V)
        with torch.autocast(tokens.device.type, enabled=False):
            return self.mix(logits.float().log_softmax(dim=-1), contexts)

    def mix(self, log_probs: Tensor, contexts: Sequence[Tensor]) -> Tensor:
        """Return the mixture's log-probabilities (B, T, V).

        Args:
            log_probs: of the GPT, (B, T, V).
            contexts: of the n-gram model, (B, T) each.
        """
        weights = self.gate(self.gate_inputs(log_probs, contexts)).softmax(dim=-1)  # (B, T, 1 + K)
        mixed: Tensor = weights[..., :1] * log_probs.exp()
        for k, probs in enumerate(self.ngram.iter_probs(contexts), 1):
            mixed += weights[..., k : k + 1] * probs
        return mixed.log()

    def gate_inputs(self, log_probs: Tensor, contexts: Sequence[Tensor]) -> Tensor:
        """Return the inputs of the gate, (B, T, 2 K).

        They are entropy and maximum of the GPT's log-probabilities, and for each order but the
        first the log of the number of distinct tokens seen after the context, and its backoff
        weight.
        """
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        inputs = [entropy, log_probs.amax(dim=-1)]
        for order, ids in zip(self.ngram.ordered()[1:], contexts[1:], strict=True):
            n_followers, backoff_weight = order.describe(ids)
            inputs += [n_followers.log1p(), backoff_weight]
        return torch.stack(inputs, dim=-1)

    def new_cache(self, batch_size: int) -> KVCache:
        keys = self.gpt.new_cache(batch_size).keys
        n_layer, _, n_head, capacity, size = keys.shape
        return MixtureCache((n_layer, batch_size, n_head, capacity, size), keys.dtype, keys.device)

    def evict_oldest_half(self, cache: KVCache) -> None:
        self.gpt.evict_oldest_half(cache)
