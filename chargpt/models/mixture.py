"""Mixture of a GPT and n-gram models: each knows what the other does not.

    p(w | h) = g_0(h) p_GPT(w | h) + sum_k g_k(h) p_k(w | h)

p_k is the n-gram model interpolated up to order k (ngram.py); beyond its highest order, p_k is the
word-context model with 0, 1 or 2 words before the current one. The weights g are computed by small
networks, the gate: a mixture of experts (Jacobs et al. 1991), or interpolation weights that depend
on the context and are fitted to held-out text (Jelinek and Mercer 1980). Its inputs say how much
the n-gram models know of the context, how certain the GPT is, and how much of the text the GPT
sees.

The word-context model counts the next token after the current word so far and the words before:

    p_m(w | h) = (max(c(h_m w) - d, 0) + d t(h_m) p_{m-1}(w | h)) / c(h_m)

h_m is the current word so far with the m words before it, m = 0, 1, 2, and p_{-1} is the n-gram
model of order `BACKOFF_ORDER`; c, d and t are as in ngram.py, c being the number of occurrences.
Unlike that of an n-gram, a context is as long as its words, and leaves out the tokens between them
(a skipping model: Goodman 2001, section 4; the word model of compressors such as PAQ).

All that a context depends on lies within the last `LOOKBACK` tokens. So a text has the same
contexts in decoding and in evaluation, wherever the tokens before a window are given.

Shapes in this file: N = tokens of the training text, B = batch, T = tokens, V = vocabulary size,
K = number of orders of both n-gram models.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chargpt.device import release_memory
from chargpt.models import KVCache, LanguageModel
from chargpt.models.gpt import GPT
from chargpt.models.ngram import MAX_TOKENS, UNSEEN, NGramLM, NGramOrder
from chargpt.text.tokenizer import CharTokenizer, Ints, Tokens

Bools = npt.NDArray[np.bool_]

MIXTURE_ORDER = 8  # of the n-gram model: higher ones gain nothing
NETWORKS = 3  # of the gate
HIDDEN = 16  # units of each
WORDS = 2  # before the current one, in the longest context
BACKOFF_ORDER = 5  # of the n-gram model
LOOKBACK = 32
NO_TOKEN = -1  # before the start of a text
MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
INVERSE = pow(MULTIPLIER, -1, 1 << 64)
CHUNK = 1 << 18  # tokens hashed at once
CACHED_BYTES = 1 << 20  # of probabilities


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
        release_memory()  # counting takes the most memory of a run
        self.tokens = np.array(tokens[-MAX_TOKENS:])
        with ThreadPoolExecutor(1) as pool:  # numpy sorts without Python's lock
            words = pool.submit(WordContextModel, self.tokens, self.vocab_size, self.in_words)
            ngram = NGramLM.fit(self.tokens, self.vocab_size, self.block_size, self.order)
        self.ngram = ngram.to(self.gpt.device)
        self.word_model = words.result().to(self.gpt.device)

    @property
    def orders(self) -> list[NGramOrder]:
        """The orders of both n-gram models, K in all."""
        return [*self.ngram.orders, *self.word_model.orders]

    @property
    def width(self) -> int:
        return max(self.gpt.width, 4 * self.vocab_size)  # several probabilities of each token

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
            parts = list[Tensor]()
            for ids, weight, part in self.split(contexts, weights, log_probs):
                mixed = weight[:, :1] * part.exp()
                for k, probs in enumerate(self.iter_probs(ids), 1):
                    mixed += weight[:, k : k + 1] * probs
                parts.append(mixed.log())
            return torch.cat(parts).view_as(log_probs)

    def contexts(self, tokens: Tensor, before: Tensor | None = None) -> list[Tensor]:
        """Return the contexts of each order, (B, T); the arguments are those of `forward`."""
        longer = tokens if before is None else torch.cat((before, tokens), dim=1)
        found = self.ngram.contexts(longer) + self.word_model.contexts(longer)
        return [ids[:, -tokens.size(1) :] for ids in found]

    def split(self, contexts: Sequence[Tensor], *others: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield contexts, (B, T) each, and other tensors (B, T, ...) in parts, (B T, ...).

        On a CPU the probabilities of a part stay in its caches while the orders change them.
        """
        n_rows = contexts[0].numel()
        if self.device.type == "cpu":
            n_rows = max(1, min(n_rows, CACHED_BYTES // (4 * self.vocab_size)))
        of_contexts = zip(*(torch.split(ids.flatten(), n_rows) for ids in contexts), strict=True)
        of_others = (torch.split(each.flatten(0, 1), n_rows) for each in others)
        yield from zip(of_contexts, *of_others, strict=True)

    def iter_probs(self, contexts: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the probabilities (..., V) of each order, in tensors that are changed in place.

        The contexts are of the shape (...).
        """
        n_orders = len(self.ngram.orders)
        # after the empty context, (tokens, V)
        probs = lower = self.ngram.table[contexts[0].flatten()]
        for k, (order, ids) in enumerate(zip(self.orders, contexts, strict=True), 1):
            if k == n_orders + 1:
                probs = lower
            if k > 1:
                order.interpolate(probs, ids.flatten())
            if k == min(BACKOFF_ORDER, n_orders):
                lower = probs.clone()
            yield probs.view(*ids.shape, self.vocab_size)

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
        for order, ids in zip(self.orders[1:], contexts[1:], strict=True):
            n_followers, backoff_weight = order.context_statistics(ids)
            inputs += [n_followers.log1p(), backoff_weight]
        return torch.stack(inputs, dim=-1)

    def new_cache(self, batch_size: int) -> KVCache:
        return self.gpt.new_cache(batch_size)

    def evict_oldest_half(self, cache: KVCache) -> None:
        self.gpt.evict_oldest_half(cache)


def word_token_mask(tokenizer: CharTokenizer) -> Bools:
    """Return which tokens are part of words, (V,): letters, marks, digits, `_`, bytes, unknown."""
    is_part = [
        character.isalnum() or character == "_" or unicodedata.category(character)[0] == "M"
        for character in tokenizer.characters
    ]
    return np.pad(is_part, (0, tokenizer.vocab_size - len(is_part)), constant_values=True)


class WordContextModel(nn.Module):
    """Word-context model of a training text (N,), given which tokens are part of words, (V,)."""

    def __init__(self, tokens: Tokens, vocab_size: int, in_words: Bools) -> None:
        super().__init__()
        self.in_words = in_words
        self.hashes: list[Ints] = []  # sorted, of the seen contexts of each m
        orders = []
        all_codes = [np.empty(len(tokens) - 1, dtype=np.int64) for _ in range(1 + WORDS)]
        for start in range(0, len(tokens) - 1, CHUNK):
            chunk = tokens[None, max(0, start - LOOKBACK) : start + CHUNK].astype(np.int64)
            followers = tokens[start + 1 : start + CHUNK + 1]
            for codes, hashes in zip(all_codes, hash_contexts(chunk, in_words), strict=True):
                hashes = hashes[0, min(start, LOOKBACK) :][: len(followers)]
                codes[start : start + CHUNK] = hashes * vocab_size + followers
        while all_codes:
            codes = all_codes.pop(0)
            codes.sort()
            starts = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
            counts = np.diff(starts, append=len(codes))
            codes = codes[starts]
            contexts = codes // vocab_size
            is_first = np.append(True, contexts[1:] != contexts[:-1])
            self.hashes.append(contexts[is_first])
            codes = (is_first.cumsum() - 1) * vocab_size + codes % vocab_size
            del starts, contexts
            orders.append(NGramOrder(codes, counts, len(self.hashes[-1]), vocab_size))
        self.orders = cast("list[NGramOrder]", nn.ModuleList(orders))  # of the contexts of each m
        release_memory()

    def contexts(self, tokens: Tensor) -> list[Tensor]:
        """Return the ids of the contexts that end at each of tokens (B, T), by m, or UNSEEN."""
        found = []
        all_hashes = hash_contexts(tokens.cpu().numpy(), self.in_words)
        for known, hashes in zip(self.hashes, all_hashes, strict=True):
            ids = np.searchsorted(known, hashes).clip(max=len(known) - 1)
            ids = np.where(known[ids] == hashes, ids, UNSEEN)
            found.append(torch.from_numpy(ids).to(tokens.device))
        return found


def hash_contexts(tokens: Ints, in_words: Bools) -> list[Ints]:
    """Return the hashes of the contexts that end at each token, by m, (B, T) each.

    They are below 2^63 / V, so that hash * V + token fits into int64. The hash of a sequence is a
    polynomial in MULTIPLIER modulo 2^64 with its tokens (ids or NO_TOKEN) as coefficients: a
    difference of two prefix sums, times a power.
    """
    length = tokens.shape[1]
    index = np.broadcast_to(np.arange(length), tokens.shape)
    powers = np.full(length, MULTIPLIER, dtype=np.uint64).cumprod()
    inverses = np.full(length, INVERSE, dtype=np.uint64).cumprod()
    coefficients = (tokens + 1).astype(np.uint64)
    sums = np.pad((coefficients * inverses).cumsum(axis=1), ((0, 0), (1, 0)))  # (B, T + 1)

    def at(values: npt.NDArray[Any], places: Ints) -> npt.NDArray[Any]:
        return np.take_along_axis(values, places.clip(min=0), axis=1)

    def scrambled(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return a permutation of all hashes that is not linear, so that sums do not coincide."""
        hashes = hashes * np.uint64(MULTIPLIER)
        return (hashes ^ hashes >> np.uint64(32)) * np.uint64(MULTIPLIER)

    is_word = in_words[tokens] & (tokens != NO_TOKEN)
    begins = is_word & ~np.pad(is_word, ((0, 0), (1, 0)))[:, :-1]
    # of the latest word at or before each token; -1 if there is none
    start = np.maximum.accumulate(np.where(begins, index, -1), axis=1)
    end = np.maximum.accumulate(np.where(is_word, index, -1), axis=1)
    oldest = index - LOOKBACK + 1
    first = np.where(is_word, start, index)  # another token is a context of its own
    words = (sums[:, 1:] - at(sums, np.maximum(first, oldest))) * powers  # up to each token
    contexts = [words]
    for _ in range(WORDS):
        last = np.where(first > 0, at(end, first - 1), -1)  # of the word before
        first = np.where(last >= 0, at(start, last), -1)
        is_near = (last >= 0) & (first >= oldest)
        contexts.append(scrambled(contexts[-1]) + np.where(is_near, at(words, last), 0))
    shift = np.uint64(1 + len(in_words).bit_length())
    return [(scrambled(hashes) >> shift).astype(np.int64) for hashes in contexts]
