"""The n-gram baselines: interpolated Kneser-Ney; a bigram, trained or from smoothed counts.

    p_k(w | h) = (max(c(h w) - d, 0) + d t(h) p_{k-1}(w | h')) / c(h)

(Kneser and Ney 1995; interpolated as in Chen and Goodman 1999, section 2.7.) h is the context of
k - 1 tokens, h' is h without its first token, t(h) is the number of distinct tokens seen after h,
and p_0 = 1/V. c is the number of occurrences for n-grams of the highest order, and for lower orders
the continuation count: the number of distinct tokens seen before the n-gram; c(h) is the sum of
c(h w) over w. The discount is
d = n_1 / (n_1 + 2 n_2), where n_i is the number of n-grams of that order with c = i, or 1/2 if n_1
or n_2 is 0. d t(h) / c(h) is the backoff weight of h; that of an unseen context is 1.

Every distinct n-gram has an id within its order k: the index of its code in the sorted codes of
that order. Its code is (id of its first k - 1 tokens) * V + (its last token), so a look-up is one
binary search for any vocabulary size.

Shapes in this file: N = tokens of the training text, V = vocabulary size, G = distinct n-grams of
order k, P = those of order k - 1, B = batch, T = tokens; of `bigram_log_probs`, N = pairs.
"""

from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from chargpt.config import MAX_BLOCK_SIZE
from chargpt.device import release_memory
from chargpt.errors import ConfigError
from chargpt.models import KVCache, LanguageModel
from chargpt.text.corpus import PairCounts
from chargpt.text.tokenizer import Floats, Ints, Tokens

NGRAM_ORDER = 6  # higher orders gain nothing on texts of a million characters
NGRAM = f"{NGRAM_ORDER}-gram"
MAX_TOKENS = 4_000_000  # counted tokens: 0.2 s of work; 2 s with thousands of characters
MAX_TABLE_ENTRIES = 50_000_000  # of the table of contexts: 200 MB
MAX_BIGRAM_VOCAB_SIZE = 20_000
BIGRAM_ALPHA = 0.1  # pseudo-count of additive smoothing
UNSEEN = -1  # id of an n-gram that the training text does not contain


class NGramLM(LanguageModel):
    """Interpolated n-gram model; `fit` estimates it from a text."""

    table: Tensor  # (contexts, V): probabilities of the first `n_tabulated` orders
    n_tabulated = 1

    def __init__(self, vocab_size: int, block_size: int, orders: "list[NGramOrder]") -> None:
        super().__init__(vocab_size, block_size)
        self.orders = cast("list[NGramOrder]", nn.ModuleList(orders))  # of order 1, 2, and so on
        unigram = torch.full((1, vocab_size), 1 / vocab_size)
        orders[0].interpolate(unigram, torch.zeros(1, dtype=torch.int64))
        self.register_buffer("table", unigram, persistent=False)

    @classmethod
    def fit(
        cls,
        tokens: Tokens,
        vocab_size: int,
        block_size: int = MAX_BLOCK_SIZE,
        order: int = NGRAM_ORDER,
    ) -> "NGramLM":
        """Return the model estimated from token ids (N,).

        Of the tokens, of any integer type, the last MAX_TOKENS are counted. `order` is the length
        of the longest n-gram, the predicted token included.
        """
        assert order >= 1, "the order is at least 1"
        assert len(tokens), "there are no tokens to count"
        codes, counts = _count_ngrams(tokens[-MAX_TOKENS:], vocab_size, order)
        n_contexts = [1, *map(len, codes[:-1])]
        orders = map(NGramOrder, codes, counts, n_contexts, [vocab_size] * len(codes))
        model = cls(vocab_size, block_size, list(orders))
        release_memory()
        return model

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        tokens = self.check_tokens(tokens, cache)
        n_tokens = tokens.size(1)
        if cache is not None:
            new = tokens[:, None, :, None]  # (B, 1, T, 1)
            tokens = cache.append(0, new, new)[0][:, 0, :, 0]  # (B, S)
            cache.advance(n_tokens)
            tokens = tokens[:, -(n_tokens + len(self.orders) - 1) :]  # the longest context
        return self.probs(tokens)[:, -n_tokens:].log()  # (B, T, V)

    def probs(self, tokens: Tensor) -> Tensor:
        """Return the probabilities (B, T, V) of the next token after each of tokens (B, T)."""
        contexts = self.contexts(tokens)
        row, first_row = torch.zeros_like(tokens), 1
        for order, context in zip(self.orders, contexts[1 : self.n_tabulated], strict=False):
            row = torch.where(context == UNSEEN, row, context + first_row)
            first_row += len(order.codes)
        probs = self.table[row.flatten()]  # (B T, V)
        for order, context in list(zip(self.orders, contexts, strict=True))[self.n_tabulated :]:
            order.interpolate(probs, context.flatten())
        return probs.view(*tokens.shape, self.vocab_size)

    def contexts(self, tokens: Tensor) -> list[Tensor]:
        """Return the ids of the k tokens that end at each of tokens (B, T), by k = 0, 1, ..."""
        found = [torch.zeros_like(tokens)]
        for k, order in enumerate(self.orders[:-1]):
            found.append(order.find(_previous(found[-1], k), tokens))
        return found

    def build_table(self) -> None:
        """Precompute the probabilities after every seen context, of as many orders as fit.

        `probs` then is several times as fast. The rows are the empty context, then all contexts of
        one token, of two, and so on.
        """
        n_contexts = np.cumsum([1, *(len(order.codes) for order in self.orders[:-1])])
        self.n_tabulated = int((n_contexts * self.vocab_size <= MAX_TABLE_ENTRIES).sum())
        table = self.table.new_empty(int(n_contexts[self.n_tabulated - 1]), self.vocab_size)
        table[0] = self.table[0]
        probs = table[:1]  # after the contexts of one length
        suffix = torch.zeros_like(self.orders[0].codes)  # ids of contexts without their first token
        for k, order in enumerate(self.orders[1 : self.n_tabulated]):
            if k > 0:
                prefix = self.orders[k].codes // self.vocab_size
                suffix = self.orders[k - 1].find(suffix[prefix], self.orders[k].last)
            longer = table[n_contexts[k] : n_contexts[k + 1]]
            probs = torch.index_select(probs, 0, suffix, out=longer)
            order.interpolate(probs, torch.arange(len(suffix), device=suffix.device))
        self.table = table

    def losses(self, rows: Tokens) -> npt.NDArray[np.float32]:
        """Return the losses of `forward`, in nats, without its logits: (B, T + 1) -> (B, T)."""
        tokens = torch.from_numpy(rows.astype(np.int64)).to(self.device)  # (B, T + 1)
        prob = torch.full(tokens.shape, 1 / self.vocab_size, device=tokens.device)
        ids = torch.zeros_like(tokens)
        for k, order in enumerate(self.orders):
            context = _previous(ids, k)
            ids = order.find(context, tokens)
            _, backoff_weight = order.context_statistics(context)
            discounted_prob = order.discounted_prob[ids.clamp(min=0)] * (ids != UNSEEN)
            prob = backoff_weight * prob + discounted_prob
        return -prob[:, 1:].log().cpu().numpy()

    def new_cache(self, batch_size: int) -> KVCache:
        """Return a cache of token ids."""
        return KVCache((1, batch_size, 1, self.block_size, 1), torch.int64, self.device)


class NGramOrder(nn.Module):
    """All n-grams of one order k: given their sorted codes and counts c, (G,) each, P and V."""

    codes: Tensor  # (G,) int64, sorted: id of the first k - 1 tokens * V + the last token
    last: Tensor  # (G,) int32: the last token
    discounted_prob: Tensor  # (G,): (c(h w) - d) / c(h)
    starts: Tensor  # (P + 1,) int32: n-grams with context p are codes[starts[p] : starts[p + 1]]
    backoff_weight: Tensor  # (P,): d t(h) / c(h), or 1 if no token follows h

    def __init__(self, codes: Ints, counts: Ints, n_contexts: int, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        contexts, last = np.divmod(codes, vocab_size)
        n_once, n_twice = (counts == 1).sum(), (counts == 2).sum()
        discount = n_once / (n_once + 2 * n_twice) if n_once and n_twice else 0.5
        n_followers = np.bincount(contexts, minlength=n_contexts)
        totals = np.bincount(contexts, weights=counts, minlength=n_contexts)
        backoff_weight = np.divide(
            discount * n_followers, totals, out=np.ones(n_contexts), where=n_followers > 0
        )
        discounted_prob = (counts - discount) / totals[contexts]
        starts = np.append(0, n_followers.cumsum())
        self.register_buffer("codes", torch.from_numpy(codes))
        self.register_buffer("last", torch.from_numpy(last).int())
        self.register_buffer("discounted_prob", torch.from_numpy(discounted_prob).float())
        self.register_buffer("starts", torch.from_numpy(starts).int())
        self.register_buffer("backoff_weight", torch.from_numpy(backoff_weight).float())

    def find(self, contexts: Tensor, tokens: Tensor) -> Tensor:
        """Return the ids of the n-grams (context, token), UNSEEN where there is none."""
        wanted = contexts * self.vocab_size + tokens
        ids = torch.searchsorted(self.codes, wanted).clamp_(max=len(self.codes) - 1)
        is_seen = (self.codes[ids] == wanted) & (contexts != UNSEEN)
        return ids.where(is_seen, UNSEEN)

    def context_statistics(self, contexts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of distinct tokens seen after each context, and its backoff weight."""
        ids = contexts.clamp(min=0)
        n_followers = (self.starts[ids + 1] - self.starts[ids]) * (contexts != UNSEEN)
        return n_followers, self.backoff_weight[ids].where(n_followers > 0, 1.0)

    def interpolate(self, probs: Tensor, contexts: Tensor) -> None:
        """Update p_{k-1} of all tokens, (N, V), to p_k after contexts (N,), in place."""
        n_followers, backoff_weight = self.context_statistics(contexts)  # (N,)
        first = self.starts[contexts.clamp(min=0)]
        probs *= backoff_weight[:, None]
        # one entry for each token that follows each context
        row = torch.repeat_interleave(n_followers)
        offset = first - n_followers.cumsum(0) + n_followers  # (N,)
        entry = torch.arange(len(row), device=row.device) + offset[row]
        index = row * self.vocab_size + self.last[entry]
        probs.view(-1).index_add_(0, index, self.discounted_prob[entry])  # (N V,)


def _count_ngrams(tokens: Tokens, vocab_size: int, order: int) -> tuple[list[Ints], list[Ints]]:
    """Return the codes and the counts of the n-grams of each order up to `order`.

    Those of lower orders are prefixes of `_sorted_ngrams`.
    """
    columns, n_occurrences = _sorted_ngrams(tokens, vocab_size, order)
    is_first = np.zeros(len(n_occurrences), dtype=bool)  # of those with the same k tokens
    is_first[0] = True
    # the n-grams of order 0 are all the same
    ids, suffix = np.zeros(len(n_occurrences), np.int64), np.zeros(1, np.int64)
    codes: list[Ints] = []  # of each order
    counts: list[Ints] = []
    for column in columns:
        is_first[1:] |= column[1:] != column[:-1]
        is_ngram = is_first & (column > 0)
        at = np.flatnonzero(is_ngram)
        prefix, last = ids[at], column[at].astype(np.int64) - 1
        if codes:  # the lower order has continuation counts
            found = torch.from_numpy(suffix[prefix] * vocab_size + last)
            # ids of the n-grams without their first tokens
            suffix = torch.searchsorted(torch.from_numpy(codes[-1]), found).numpy()
            # the n-gram at the start of the text has no token before it
            counts[-1] = np.bincount(suffix, minlength=len(codes[-1])).clip(min=1)
        else:
            suffix = np.zeros_like(prefix)
        codes.append(prefix * vocab_size + last)
        counts.append(n_occurrences[at])
        ids = is_ngram.cumsum() - 1
    return codes, counts


def _sorted_ngrams(tokens: Tokens, vocab_size: int, order: int) -> tuple[list[Tokens], Ints]:
    """Return the distinct n-grams of tokens (N,), sorted, as a column per token, and their counts.

    The columns hold tokens + 1. The last tokens of the text begin n-grams that end with zeros.
    """
    n_tokens, order, n_bits = len(tokens), min(order, len(tokens)), int(vocab_size).bit_length()
    dtype = np.min_scalar_type(vocab_size)
    if n_bits * order <= 64:  # packed, they are sorted several times as fast
        packed, increased = np.zeros(n_tokens, dtype=np.uint64), tokens.astype(np.uint64)
        increased += np.uint64(1)
        for n_before in range(order):
            packed <<= np.uint64(n_bits)
            packed[: n_tokens - n_before] |= increased[n_before:]
        packed.sort()
        starts = np.flatnonzero(np.append(True, packed[1:] != packed[:-1]))
        packed, mask = packed[starts], np.uint64((1 << n_bits) - 1)
        shifts = np.arange(order, dtype=np.uint64)[::-1] * np.uint64(n_bits)
        columns = [(packed >> shift & mask).astype(dtype) for shift in shifts]
    else:
        padded = np.zeros(n_tokens + order, dtype=dtype)
        padded[:n_tokens] = tokens
        padded[:n_tokens] += 1
        keys = [padded[n_before:][:n_tokens] for n_before in range(order)]
        rows = np.lexsort(keys[::-1])  # integers of up to 16 bits by radix
        keys = [key[rows] for key in keys]
        differs = np.any([key[1:] != key[:-1] for key in keys], axis=0)
        starts = np.flatnonzero(np.append(True, differs))
        columns = [key[starts] for key in keys]
    return columns, np.diff(starts, append=n_tokens)


def _previous(ids: Tensor, k: int) -> Tensor:
    """Return ids (B, T) of n-grams of k tokens shifted right by one: the context of each token."""
    first = ids.new_full((ids.size(0), 1), 0 if k == 0 else UNSEEN)  # no token comes before
    return torch.cat((first, ids[:, :-1]), dim=1)  # (B, T)


class BigramLM(LanguageModel):
    """logits = table[token]; trained by gradient descent."""

    def __init__(self, vocab_size: int, block_size: int, init_std: float = 0.0) -> None:
        """Initialise the table from a normal distribution; with `init_std` 0 the loss is ln V.

        Raises:
            ConfigError: the vocabulary is larger than MAX_BIGRAM_VOCAB_SIZE.
        """
        if vocab_size > MAX_BIGRAM_VOCAB_SIZE:
            raise ConfigError(
                f"a bigram table for {vocab_size:,} characters would take "
                f"{vocab_size**2 * 4:,} bytes; raise text.min_count until at most "
                f"{MAX_BIGRAM_VOCAB_SIZE:,} characters are left"
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
