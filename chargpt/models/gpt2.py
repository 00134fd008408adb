"""GPT-2 (Radford et al. 2019), for checkpoints of nanoGPT that are imported.

It computes what nanoGPT does; its dropout and initial weights, which matter only if training
continues, are simpler. Learned positions, LayerNorm, GELU, biases, and the embedding as output
head. A checkpoint without biases has zeros.

Shapes in this file: B = batch, T = tokens given, S = T and cached tokens, C = n_embd, H = n_head,
D = C / H, V = vocabulary size.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chargpt.config import ModelConfig
from chargpt.models import KVCache, LanguageModel
from chargpt.models.kernels import explicit_attention, fast_attention

INIT_STD = 0.02


class GPT2Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.n_head = layer, config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.output = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, cache: KVCache | None) -> Tensor:
        """Return the attention output of x, (B, T, C)."""
        q, k, v = self.project(x)  # (B, H, T, D) each
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, H, S, D) each
        heads = fast_attention(q, k, v)  # (B, H, T, D)
        output: Tensor = self.output(heads.transpose(1, 2).flatten(2))  # (B, T, C)
        return output

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of x, (B, H, T, D) each."""
        by_head = self.qkv(x).view(*x.shape[:2], 3, self.n_head, -1)  # (B, T, 3, H, D)
        q, k, v = by_head.permute(2, 0, 3, 1, 4)
        return q, k, v


class GPT2MLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP of x, (B, T, C)."""
        output: Tensor = self.down(F.gelu(self.up(x)))
        return output


class GPT2Block(nn.Module):
    """One layer: attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.n_embd)
        self.attention = GPT2Attention(config, layer)
        self.mlp_norm = nn.LayerNorm(config.n_embd)
        self.mlp = GPT2MLP(config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: KVCache | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cache))
        output: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return output


class GPT2(LanguageModel):
    """Decoder-only transformer with learned positions."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(vocab_size, config.block_size)
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.n_embd)  # also the output head
        self.position = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        blocks = [GPT2Block(config, layer) for layer in range(config.n_layer)]
        self.blocks = cast("list[GPT2Block]", nn.ModuleList(blocks))
        self.norm = nn.LayerNorm(config.n_embd)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=INIT_STD)

    @property
    def width(self) -> int:
        return max(self.vocab_size, 4 * self.config.n_embd)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        tokens = self.check_tokens(tokens, cache)
        x = self.embed(tokens, 0 if cache is None else cache.length)  # (B, T, C)
        for block in self.blocks:
            x = block(x, cache)
        if cache is not None:
            cache.advance(tokens.size(1))
            cache.tokens = torch.cat((cache.tokens, tokens), dim=1)  # (B, S)
        return F.linear(self.norm(x), self.embedding.weight)  # (B, T, V)

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Return the embeddings of tokens (B, T) at positions from `start` on, (B, T, C)."""
        positions = self.position.weight[start : start + tokens.size(1)]  # (T, C)
        output: Tensor = self.dropout(self.embedding(tokens) + positions)
        return output

    @torch.no_grad()
    def attention_weights(self, tokens: Tensor) -> list[Tensor]:
        """Return the attention weights of each layer on tokens (B, T): (B, H, T, T) each."""
        x, weights = self.embed(self.check_tokens(tokens)), []
        for block in self.blocks:
            projected = block.attention.project(block.attention_norm(x))
            weights.append(explicit_attention(*projected)[1])
            x = block(x, None)
        return weights

    def first_layer_qkv(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the first layer on tokens (B, T): (B, H, T, D)."""
        block = self.blocks[0]
        return block.attention.project(block.attention_norm(self.embed(tokens)))

    def new_cache(self, batch_size: int) -> KVCache:
        config = self.config
        shape = (config.n_layer, batch_size, config.n_head, self.block_size, config.head_size)
        weight = self.position.weight
        return KVCache(shape, weight.dtype, weight.device)

    def evict_oldest_half(self, cache: KVCache) -> None:
        """Remove the older half of a full cache; compute the rest again at its new positions."""
        kept = cache.tokens[:, self.block_size - self.block_size // 2 :]
        cache.set_length(0)
        cache.tokens = kept[:, :0]
        if kept.size(1):
            for _ in self.iter_parts(kept, cache):
                ...
