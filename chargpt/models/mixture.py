"""Mixture of a GPT and n-gram models: each knows what the other does not.

    p(w | h) = g_0(h) p_GPT(w | h) + sum_k g_k(h) p_k(w | h)

p_k is the n-gram model interpolated up to order k (ngram.py); beyond its highest order, p_k is the
word-context model with 0, 1 or 2 words before the current one (word_context.py). The weights g are
computed by small networks, the gate: a mixture of experts (Jacobs et al. 1991), or interpolation
weights that depend on the context and are fitted to held-out text (Jelinek and Mercer 1980). Its
inputs say how much the n-gram models know of the context, how certain the GPT is, and how much of
the text the GPT sees.

Shapes in this file: B = batch, T = tokens, V = vocabulary size, K = number of orders of both
n-gram models.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chargpt.models import KVCache, LanguageModel
from chargpt.models.gpt import GPT
from chargpt.models.ngram import MAX_TOKENS, NGramLM
from chargpt.models.word_context import (
    BACKOFF_ORDER,
    LOOKBACK,
    WORDS,
    WordContextModel,
    word_token_mask,
)
from chargpt.text.tokenizer import CharTokenizer, Tokens

MIXTURE_ORDER = 8  # of the n-gram model: higher ones gain nothing
NETWORKS = 3  # of the gate
HIDDEN = 16  # units of each


class Gate(nn.Module):
    """Weights of a mixture's components: the mean over several networks.

    The mean is better than each of them (Hansen and Salamon 1990). `order` is that of the n-gram
    model.
    """

    def __init__(self, order: int = MIXTURE_ORDER) -> None:
        super().__init__()
        n_orders = order + WORDS + 1  # K
        self.hidden = nn.Linear(1 + 2 * n_orders, NETWORKS * HIDDEN)
        self.output = nn.Parameter(torch.zeros(NETWORKS, HIDDEN, 1 + n_orders))
        self.bias = nn.Parameter(torch.zeros(NETWORKS, 1 + n_orders))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the weights (..., 1 + K) for inputs (..., 1 + 2 K)."""
        return self.logits(inputs).softmax(dim=-1).mean(dim=-2)

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits of the weights by each network, (..., NETWORKS, 1 + K)."""
        hidden = F.silu(self.hidden(inputs)).view(*inputs.shape[:-1], NETWORKS, HIDDEN)
        return torch.einsum("...nh,nhk->...nk", hidden, self.output) + self.bias


class Mixture(LanguageModel):
    """A GPT, n-gram models, and the gate that weighs them; `fit_mixture` fits it.

    Its logits are log-probabilities. The n-grams of up to `order` tokens may look at tokens before
    the block. They are counted in the last MAX_TOKENS of `tokens`, at least `order`. The tokenizer
    says which tokens are part of words.
    """

    lookback = LOOKBACK

    def __init__(
        self, gpt: GPT, tokens: Tokens, tokenizer: CharTokenizer, order: int = MIXTURE_ORDER
    ) -> None:
        super().__init__(gpt.vocab_size, gpt.block_size)
        self.gpt, self.in_words, self.order = gpt, word_token_mask(tokenizer), order
        self.first_continuation_id = gpt.first_continuation_id
        self.fit_counts(tokens)
        self.gate = Gate(order)

    def fit_counts(self, tokens: Tokens) -> None:
        """Estimate the n-gram models from the last MAX_TOKENS token ids."""
        self.tokens = np.array(tokens[-MAX_TOKENS:])
        with ThreadPoolExecutor(1) as pool:  # numpy sorts without Python's lock
            words = pool.submit(WordContextModel, self.tokens, self.vocab_size, self.in_words)
            ngram = NGramLM.fit(self.tokens, self.vocab_size, self.block_size, self.order)
        self.ngram = ngram.to(self.gpt.device)
        self.word_model = words.result().to(self.gpt.device)

    def forward(
        self, tokens: Tensor, cache: KVCache | None = None, before: Tensor | None = None
    ) -> Tensor:
        """Return log-probabilities (B, T, V), as `LanguageModel.forward` does.

        Without a cache, `before` (B, lookback) are the tokens before the first one, -1 for none.
        """
        tokens = self.check_tokens(tokens, cache)
        if cache is not None:
            before = cache.tokens
            cache.tokens = torch.cat((before, tokens), dim=1)[:, -LOOKBACK:]
        contexts = self.contexts(tokens, before)
        position = 0 if cache is None else cache.length
        logits = self.gpt(tokens, cache)  # (B, T, V)
        with torch.autocast(tokens.device.type, enabled=False):
            log_probs = logits.float().log_softmax(dim=-1)
            weights = self.gate(self.gate_inputs(log_probs, contexts, position))  # (B, T, 1 + K)
            mixed: Tensor = weights[..., :1] * log_probs.exp()
            for k, probs in enumerate(self.iter_probs(contexts), 1):
                mixed += weights[..., k : k + 1] * probs
            return mixed.log()

    def contexts(self, tokens: Tensor, before: Tensor | None = None) -> list[Tensor]:
        """Return the contexts of each order, (B, T); the arguments are those of `forward`."""
        longer = tokens if before is None else torch.cat((before, tokens), dim=1)
        found = self.ngram.contexts(longer) + self.word_model.contexts(longer)
        return [ids[:, -tokens.size(1) :] for ids in found]

    def iter_probs(self, contexts: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the probabilities (B, T, V) of each order: one tensor, changed in place."""
        n_orders = len(self.ngram.orders)
        for k, probs in enumerate(self.ngram.iter_probs(contexts[:n_orders]), 1):
            if k == min(BACKOFF_ORDER, n_orders):
                lower = probs.clone()
            yield probs
        yield from self.word_model.iter_probs(lower, contexts[n_orders:])

    def gate_inputs(
        self, log_probs: Tensor, contexts: Sequence[Tensor], position: int = 0
    ) -> Tensor:
        """Return the inputs of the gate, (B, T, 1 + 2 K).

        They are 1 / the number of tokens that the GPT sees (`position` before the first one), the
        entropy of its distribution and its highest log-probability, and for each order but the
        first log(1 + number of distinct tokens seen after the context) and the backoff weight.
        The arguments are the GPT's log-probabilities, (B, T, V), and the contexts, (B, T) each.
        """
        seen = torch.arange(1, 1 + log_probs.size(1), device=log_probs.device) + position  # (T,)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        inputs = [seen.reciprocal().expand_as(entropy), entropy, log_probs.amax(dim=-1)]
        orders = self.ngram.orders + self.word_model.orders
        for order, ids in zip(orders[1:], contexts[1:], strict=True):
            n_followers, backoff_weight = order.context_statistics(ids)
            inputs += [n_followers.log1p(), backoff_weight]
        return torch.stack(inputs, dim=-1)

    def new_cache(self, batch_size: int) -> KVCache:
        return self.gpt.new_cache(batch_size)

    def evict_oldest_half(self, cache: KVCache) -> None:
        self.gpt.evict_oldest_half(cache)
