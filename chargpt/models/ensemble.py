"""Ensemble of models: linear interpolation of their next-token probabilities, with fixed weights.

    p(w | h) = sum_k weight_k p_k(w | h)    (Jelinek and Mercer 1980)

The vocabulary is the union of the models' own. A token that a model lacks has probability 0 in it,
and stands as its replacement token in its context. A token that the union lacks, as an unknown
token may be, is left out of the model's distribution.

Each model keeps its own block size: one with a shorter block evicts while a longer one does not.

Shapes in this file: B = batch, T = tokens, V = vocabulary size of the union, K = models.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from chargpt.models import KVCache, LanguageModel
from chargpt.text.tokenizer import CharTokenizer


class EnsembleCache(KVCache):
    """The caches of an ensemble's models. Its own keys and values only have their number."""

    def __init__(self, parts: Sequence[KVCache]) -> None:
        self.parts = parts
        # without memory: whoever plans memory asks for the number of stored values
        n_values = sum(part.keys.numel() for part in parts)
        self.keys = self.values = torch.empty(n_values, device="meta")
        self.tokens = parts[0].tokens[:, :0]
        self.capacity = max(part.capacity for part in parts)
        self.length = 0

    def copy_from(self, other: KVCache) -> None:
        assert isinstance(other, EnsembleCache)
        for part, source in zip(self.parts, other.parts, strict=True):
            part.copy_from(source)
        self.set_length(other.length)

    def reorder(self, sequences: Tensor, first: int = 0) -> None:
        """Replace each sequence by another, as `KVCache.reorder` does, at all positions."""
        for part in self.parts:  # one with a shorter block has evicted other positions
            part.reorder(sequences)


class Member(nn.Module):
    """A model of an ensemble, with the tokens of the union as its own.

    Attributes:
        ids: its token id for each token of the union, (V,); its replacement token for unknown ones.
        is_known: whether it has the token, (V,).
    """

    ids: Tensor
    is_known: Tensor

    def __init__(
        self, model: LanguageModel, own: CharTokenizer, union: CharTokenizer, weight: float
    ) -> None:
        super().__init__()
        self.model, self.weight = model, weight
        ids, is_known = own.ids_of_tokens(union)
        self.register_buffer("ids", torch.from_numpy(ids).to(model.device))
        self.register_buffer("is_known", torch.from_numpy(is_known).to(model.device))

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return log(weight * probability), (B, T, V), after tokens of the union, (B, T)."""
        logits = self._own_logits(self.ids[tokens.to(self.ids.device)], cache)[..., self.ids]
        log_probs = logits.float().masked_fill(~self.is_known, -math.inf).log_softmax(dim=-1)
        return log_probs + math.log(self.weight)

    def _own_logits(self, tokens: Tensor, cache: KVCache | None) -> Tensor:
        """Return the model's logits; of more tokens than a block, as decoding them gives."""
        block_size, parts = self.model.block_size, []
        if cache is None:
            if tokens.size(1) <= block_size:
                return cast("Tensor", self.model(tokens))
            cache = self.model.new_cache(tokens.size(0))
        while tokens.size(1):
            if cache.length == block_size:
                self.model.evict_oldest_half(cache)
            n_tokens = block_size - cache.length
            parts.append(self.model(tokens[:, :n_tokens], cache))
            tokens = tokens[:, n_tokens:]
        return torch.cat(parts, dim=1)


class Ensemble(LanguageModel):
    """Models whose next-token probabilities are averaged with weights; its logits are their log.

    Args:
        models: at least two.
        tokenizers: of each model; all with the same EOS token, or none.
        weights: of each model, above 0, with a sum of 1.

    Attributes:
        tokenizer: of the union of the vocabularies.
    """

    def __init__(
        self,
        models: Sequence[LanguageModel],
        tokenizers: Sequence[CharTokenizer],
        weights: Sequence[float],
    ) -> None:
        union = CharTokenizer.union(tokenizers)
        super().__init__(union.vocab_size, max(model.block_size for model in models))
        self.tokenizer, self.first_continuation_id = union, union.first_continuation_id
        triples = zip(models, tokenizers, weights, strict=True)
        members = [Member(model, own, union, weight) for model, own, weight in triples]
        self.members = cast("list[Member]", nn.ModuleList(members))

    @property
    def width(self) -> int:
        return self.vocab_size + sum(member.model.width for member in self.members)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        tokens = self.check_tokens(tokens, cache)
        assert cache is None or isinstance(cache, EnsembleCache)
        caches = [None] * len(self.members) if cache is None else cache.parts
        log_probs = [
            member(tokens, part).to(self.device)
            for member, part in zip(self.members, caches, strict=True)
        ]
        if cache is not None:
            cache.advance(tokens.size(1))
        return torch.stack(log_probs).logsumexp(dim=0)  # (K, B, T, V) -> (B, T, V)

    def new_cache(self, batch_size: int) -> EnsembleCache:
        return EnsembleCache([member.model.new_cache(batch_size) for member in self.members])

    def evict_oldest_half(self, cache: KVCache) -> None:
        """Make room for half a block; each model evicts on its own when its cache is full."""
        assert cache.length == self.block_size
        cache.set_length(self.block_size // 2)
