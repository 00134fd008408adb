"""Counted n-grams, interpolated: the yardstick that a GPT must beat.

    p_k(w | h) = (max(c(h w) - D, 0) + D t(h) p_{k-1}(w | h')) / c(h)

(Kneser and Ney 1995, interpolated as in Chen and Goodman 1999, section 2.7.) h is the last k - 1
characters, h' is h without its first, t(h) is how many different characters were seen after h, and
p_0 is 1/V. c counts: of the longest grams how often each was seen, of shorter ones how many
different characters were seen before it. D = n_1 / (n_1 + 2 n_2), n_i being how many grams of that
order have c = i. D is 1/2 where n_1 or n_2 is none. A
context never seen adds nothing to the shorter one.

Grams are numbered order by order: a gram of k characters is the pair (number of its first k - 1
characters, its last one), so that finding it is one binary search, whatever the vocabulary.
Shapes in this file: N = characters, V = vocabulary, G = distinct grams of k characters,
P = distinct grams of k - 1, B = rows, T = characters of a row.
"""

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from chargpt.models.base import LanguageModel
from chargpt.models.cache import KVCache

Codes = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ORDER = 6  # beyond it, texts of a million characters gain nothing
MOST = 4_000_000  # characters that are counted: two seconds' worth
MOST_TABULATED = 50_000_000  # numbers in a table of all contexts: 200 MB
UNSEEN = -1  # the number of a gram that the text did not hold


def _weights(context: Codes, counts: Counts, contexts: int) -> tuple[Floats, Floats]:
    """Return what each gram adds, (G,), and what each context leaves to the shorter one, (P,)."""
    once, twice = (counts == 1).sum(), (counts == 2).sum()
    discount = once / (once + 2 * twice) if once and twice else 0.5
    kinds = np.bincount(context, minlength=contexts)
    whole = np.bincount(context, weights=counts, minlength=contexts)
    kept = np.divide(discount * kinds, whole, out=np.ones(contexts), where=kinds > 0)
    return (counts - discount) / whole[context], kept


def _numbered(values: Codes) -> tuple[Codes, Codes, Counts]:
    """Return the distinct values, rising, each one's place among them, and how often it occurs.

    It is `np.unique`, in a fifth of the time: each value is sorted along with its place, as one
    number, where the two fit into one.
    """
    bits = len(values).bit_length()
    if int(values.max()) < 1 << (63 - bits):
        both = values << bits | np.arange(len(values))
        both.sort()
        order, values = both & (1 << bits) - 1, both >> bits
    else:
        order = values.argsort()
        values = values[order]
    starts = np.append(True, values[1:] != values[:-1])
    places = np.empty_like(order)
    places[order] = starts.cumsum() - 1
    firsts = np.flatnonzero(starts)
    return values[firsts], places, np.diff(np.append(firsts, len(values)))


class NGramLM(LanguageModel):
    """An interpolated n-gram model. `fit` makes one from a text at once; nothing is trained."""

    table: Tensor | None

    def __init__(self, vocab_size: int, block_size: int, orders: "list[Order]") -> None:
        super().__init__(vocab_size, block_size)
        self.orders = nn.ModuleList(orders)
        self.register_buffer("table", None)

    @classmethod
    def fit(
        cls,
        tokens: npt.NDArray[Any],
        vocab_size: int,
        block_size: int,
        order: int = ORDER,
    ) -> "NGramLM":
        """Return the model that a text's (N,) ids give, in time and memory of `order` sorts of N.

        Args:
            tokens: ids below `vocab_size`, of any integer type; of more than 4,000,000, the last
                are counted.
            vocab_size: V.
            block_size: the most characters that one call will look at.
            order: the longest gram counted: so many characters, the predicted one included.
        """
        assert order >= 1, "an n-gram counts at least single characters"
        assert len(tokens), "there must be something to count"
        token = tokens[-MOST:].astype(np.int64)
        gram = np.zeros(len(token) + 1, dtype=np.int64)  # at first the empty one, everywhere
        counted: list[tuple[Codes, Counts]] = []
        for k in range(1, min(order, len(token)) + 1):
            # the last gram is followed by nothing
            codes, longer, counts = _numbered(gram[:-1] * vocab_size + token[k - 1 :])
            if counted:
                # a gram without its first character is the one that begins a place further on
                shorter = np.empty_like(codes)
                shorter[longer] = gram[1:]
                before = np.bincount(shorter, minlength=len(counted[-1][0]))
                counted[-1] = counted[-1][0], before.clip(min=1)  # the text's start has none
            counted.append((codes, counts))
            gram = longer
        parents = [1, *(len(codes) for codes, _ in counted)]
        orders = [
            Order(codes, *_weights(codes // vocab_size, counts, wide), vocab_size)
            for (codes, counts), wide in zip(counted, parents, strict=False)
        ]
        return cls(vocab_size, block_size, orders)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        steps = tokens.size(1)
        if cache is not None:
            as_keys = tokens[:, None, :, None]  # (B, 1, T, 1)
            tokens = cache.extend(0, as_keys, as_keys)[0][:, 0, :, 0]
            cache.advance(steps)
            tokens = tokens[:, -(steps + len(self.orders) - 1) :]  # what the contexts reach back to
        return self.shares(tokens)[:, -steps:].log()  # (B, T, V)

    def shares(self, tokens: Tensor) -> Tensor:
        """Return what is expected after each of (B, T) ids given all before it: (B, T, V)."""
        orders = cast("list[Order]", self.orders)
        gram = row = torch.zeros_like(tokens)  # (B, T)
        shares = self._unigram().repeat(tokens.numel(), 1) if self.table is None else None
        first_row = 1
        for k, order in enumerate(orders[1:]):
            gram = orders[k].find(self._before(gram, k), tokens)
            if shares is not None:
                order.mix(shares, gram.flatten())
            row = torch.where(gram == UNSEEN, row, gram + first_row)
            first_row += len(orders[k].codes)
        if shares is None:
            assert self.table is not None
            shares = self.table[row.flatten()]
        return shares.view(*tokens.shape, self.vocab_size)

    def tabulate(self) -> None:
        """Work out what is expected after each known context, (contexts, V), if that is not much.

        It makes `shares` several times as fast. The empty context comes first, then those of one
        character, of two, and so on.
        """
        orders = cast("list[Order]", self.orders)
        contexts = 1 + sum(len(order.codes) for order in orders[:-1])
        if contexts * self.vocab_size > MOST_TABULATED:
            return
        table = [self._unigram()]
        for k, order in enumerate(orders[1:]):
            # a context without its first character: that of its own start, and its last character
            parent, last = orders[k].codes // self.vocab_size, orders[k].last
            if k == 0:
                shorter = torch.zeros_like(last)
            else:
                shorter = orders[k - 1].find(shorter[parent], last)
            shares = table[-1][shorter]
            order.mix(shares, torch.arange(len(last), device=last.device))
            table.append(shares)
        self.table = torch.cat(table)

    def losses(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return -ln p of each character but the first of each row: (B, T + 1) to (B, T).

        It is what `forward` says, without working out the other V - 1 characters' shares.
        """
        tokens = torch.from_numpy(rows.astype(np.int64)).to(self.device)
        share = torch.full(tokens.shape, 1 / self.vocab_size, device=tokens.device)
        gram = torch.zeros_like(tokens)
        for k, order in enumerate(cast("list[Order]", self.orders)):
            before = self._before(gram, k)
            gram = order.find(before, tokens)
            share = order.mixed(share, before, gram)
        return -share[:, 1:].log().cpu().numpy()

    def _unigram(self) -> Tensor:
        """Return what is expected without any context, (1, V)."""
        first = cast("Order", self.orders[0])
        shares = first.added.new_full((1, self.vocab_size), 1 / self.vocab_size)
        first.mix(shares, first.codes.new_zeros(1))
        return shares

    @staticmethod
    def _before(gram: Tensor, k: int) -> Tensor:
        """Return, for each place, the number of the gram of k characters that ends before it."""
        first = gram.new_full((gram.size(0), 1), 0 if k == 0 else UNSEEN)
        return torch.cat((first, gram[:, :-1]), dim=1)

    def new_cache(self, batch_size: int) -> KVCache:
        """Return a cache that holds the characters themselves."""
        return KVCache(
            layers=1,
            batch_size=batch_size,
            heads=1,
            capacity=self.block_size,
            head_size=1,
            device=self.device,
            dtype=torch.int64,
        )


class Order(nn.Module):
    """All grams of k characters: what each adds to its last one's share, after which k - 1."""

    codes: Tensor  # (G,) int64, rising: number of the first k - 1 characters x V + the last
    last: Tensor  # (G,): the last character
    added: Tensor  # (G,): what the gram itself gives, (c(h w) - D) / c(h)
    starts: Tensor  # (P + 1,): those that begin with gram p are codes[starts[p] : starts[p + 1]]
    kept: Tensor  # (P,): what is left to the shorter context, or 1 if nothing followed

    def __init__(self, codes: Codes, added: Floats, kept: Floats, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        for name, values in {
            "codes": codes,
            "last": codes % vocab_size,
            "added": added.astype(np.float32),
            "starts": np.searchsorted(codes, np.arange(len(kept) + 1) * vocab_size),
            "kept": kept.astype(np.float32),
        }.items():
            self.register_buffer(name, torch.from_numpy(values))

    def find(self, before: Tensor, tokens: Tensor) -> Tensor:
        """Return the numbers of the grams (before, token), UNSEEN where there is none."""
        wanted = before * self.vocab_size + tokens
        place = torch.searchsorted(self.codes, wanted).clamp_(max=len(self.codes) - 1)
        known = (self.codes[place] == wanted) & (before != UNSEEN)
        return place.where(known, UNSEEN)

    def mixed(self, share: Tensor, before: Tensor, gram: Tensor) -> Tensor:
        """Return the share of the characters that end `gram`, from the shorter context's share."""
        kept = self.kept[before.clamp(min=0)].where(before != UNSEEN, 1.0)
        return kept * share + self.added[gram.clamp(min=0)] * (gram != UNSEEN)

    def mix(self, shares: Tensor, contexts: Tensor) -> None:
        """Mix what followed each context, (N,), into the shares of a shorter one, (N, V)."""
        context = contexts.clamp(min=0)
        first = self.starts[context]
        kinds = (self.starts[context + 1] - first) * (contexts != UNSEEN)
        shares *= self.kept[context].where(kinds > 0, 1.0)[:, None]
        # one entry for each character that followed each context
        row = torch.repeat_interleave(kinds)
        entry = torch.arange(len(row), device=row.device) + (first - kinds.cumsum(0) + kinds)[row]
        place = row * self.vocab_size + self.last[entry]
        shares.view(-1).index_add_(0, place, self.added[entry])
