"""The transformer: a pre-norm decoder with the architecture of the Qwen3 family.

RMSNorm (Zhang and Sennrich 2019), rotary position embedding (Su et al. 2021; channels i and
i + D/2 form a pair), QK-norm over the head size before the rotation (Dehghani et al. 2023), SwiGLU
(Shazeer 2020), no biases, an untied output head. With its tensors renamed it is a
`Qwen3ForCausalLM`.

Simpler models, down to plain averaging, are settings of this class: `attention` (`full`,
`average`, `none`), `scale_attn_weights`, `qk_norm`, `mlp`, and the sizes.

Shapes in this file: B = batch, T = tokens given, S = T and cached tokens, C = n_embd, H = n_head,
D = C / H, V = vocabulary size.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from chargpt.config import ModelConfig
from chargpt.models import KVCache, LanguageModel, rotary_size
from chargpt.models.kernels import (
    MAX_PRODUCT_ROW_BYTES,
    Dropout,
    RMSNorm,
    apply_rotary,
    causal_mask,
    explicit_attention,
    fast_attention,
    linear,
    norm_linear,
    rotary_tables,
    split_heads_qk_norm_rope,
    swiglu,
    uniform_weights,
)

# of `init_previous_token_heads`, found by experiment; the loss depends little on any of them
PREVIOUS_TOKEN_LAYERS = 3  # layers with such heads, from the first on
SHARED_VALUE = 0.25  # of channel 0 of every embedding, in units of sqrt(C)
N_PAIRS = 8  # rotary pairs used per head, highest frequencies first
NOISE_SCALE = 0.3  # factor on the random initial weights of query and key


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of every attention layer apart from the hidden states."""

    cos: Tensor  # of the rotary angles of the given positions, (T, D)
    sin: Tensor  # the same, (T, D)
    mask: Tensor | None = None  # bool (T, S), true where a query sees a key; None for causal
    cache: KVCache | None = None  # keys and values of earlier tokens


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary embedding and QK-norm."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width = config.n_embd
        self.layer, self.n_head = layer, config.n_head
        self.scaled, self.qk_norm = config.scale_attn_weights, config.qk_norm
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        if config.qk_norm:
            self.query_norm = RMSNorm(config.head_size)
            self.key_norm = RMSNorm(config.head_size)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, norm: RMSNorm, inputs: AttentionInputs) -> Tensor:
        """Return the attention output of norm(x), (B, T, C)."""
        q, k, v = self.project(x, norm, inputs)  # (B, H, T, D) each
        if inputs.cache is not None:
            k, v = inputs.cache.append(self.layer, k, v)  # (B, H, S, D) each
        heads = fast_attention(q, k, v, scaled=self.scaled, mask=inputs.mask)  # (B, H, T, D)
        return linear(heads.transpose(1, 2).flatten(2), self.output.weight)  # (B, T, C)

    def project(
        self, x: Tensor, norm: RMSNorm, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of norm(x), (B, H, T, D) each, as attention uses them."""
        qkv = norm_linear(x, norm, self.query, self.key, self.value)  # (B, T, 3C)
        norms = (self.query_norm, self.key_norm) if self.qk_norm else None
        return split_heads_qk_norm_rope(qkv, norms, inputs.cos, inputs.sin, self.n_head)

    def weights(self, x: Tensor, norm: RMSNorm, inputs: AttentionInputs) -> Tensor:
        """Return the attention weights of norm(x), (B, H, T, T), by the explicit form."""
        return explicit_attention(*self.project(x, norm, inputs), scaled=self.scaled)[1]


class AverageAttention(nn.Module):
    """Attention with equal weights: the average of the values so far."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.n_head = layer, config.n_head
        self.value = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.output = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, norm: RMSNorm, inputs: AttentionInputs) -> Tensor:
        """Return the averaged values of norm(x), (B, T, C)."""
        v = norm_linear(x, norm, self.value)  # (B, T, C)
        v = v.view(*v.shape[:2], self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        if inputs.cache is not None:
            _, v = inputs.cache.append(self.layer, v, v)  # (B, H, S, D)
        mask = causal_mask(x.size(1), v.size(2), x.device) if inputs.mask is None else inputs.mask
        heads = uniform_weights(mask).to(v.dtype) @ v  # (B, H, T, D)
        return linear(heads.transpose(1, 2).flatten(2), self.output.weight)  # (B, T, C)

    def weights(self, x: Tensor, norm: RMSNorm, inputs: AttentionInputs) -> Tensor:
        """Return the attention weights, (B, H, T, T)."""
        weights = uniform_weights(causal_mask(x.size(1), x.size(1), x.device))  # (T, T)
        return weights.expand(x.size(0), self.n_head, -1, -1)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Return the MLP of norm(x), (B, T, C)."""
        return linear(swiglu(norm_linear(x, norm, self.gate, self.up)), self.down.weight)


class Block(nn.Module):
    """One layer: attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention: Attention | AverageAttention | None = None
        self.mlp: SwiGLU | None = None
        if config.attention != "none":
            self.attention_norm = RMSNorm(config.n_embd)
            kind = Attention if config.attention == "full" else AverageAttention
            self.attention = kind(config, layer)
        if config.mlp != "none":
            self.mlp_norm = RMSNorm(config.n_embd)
            self.mlp = SwiGLU(config.n_embd, config.mlp_width)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        if self.attention is not None:
            x = x + self.dropout(self.attention(x, self.attention_norm, inputs))
        if self.mlp is not None:
            x = x + self.dropout(self.mlp(x, self.mlp_norm))
        return x


class GPT(LanguageModel):
    """Decoder-only transformer. Its loss before training is exactly ln V."""

    cos: Tensor  # (block_size, D), or empty without full attention
    sin: Tensor  # the same

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(vocab_size, config.block_size)
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.n_embd)
        self.dropout = Dropout(config.dropout)
        blocks = [Block(config, layer) for layer in range(config.n_layer)]
        self.blocks = cast("list[Block]", nn.ModuleList(blocks))
        self.norm = RMSNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, vocab_size, bias=False)
        cos, sin = rotary_tables(config.block_size, rotary_size(config), config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        init_weights(self)

    @property
    def width(self) -> int:
        config = self.config
        mlp = 2 * config.mlp_width if config.mlp == "swiglu" else 0
        scores = 0  # of attention without a kernel that keeps them small
        if config.attention == "average":
            scores = self.block_size
        elif 4 * self.block_size <= MAX_PRODUCT_ROW_BYTES:
            scores = config.n_head * self.block_size
        return max(self.vocab_size, 3 * config.n_embd, mlp, scores)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        tokens = self.check_tokens(tokens, cache)
        inputs = self.attention_inputs(tokens.size(1), cache)
        x = self.dropout(self.embedding(tokens))  # (B, T, C)
        x = x.to(inputs.cos.dtype)  # bfloat16 under autocast
        for block in self.blocks:
            x = block(x, inputs)
        if cache is not None:
            cache.advance(tokens.size(1))
        return norm_linear(x, self.norm, self.head)  # (B, T, V)

    def attention_inputs(self, n_tokens: int, cache: KVCache | None = None) -> AttentionInputs:
        """Return the attention inputs of the next `n_tokens` tokens after those in the cache."""
        positions = slice(n_tokens) if cache is None else cache.positions(n_tokens)
        cos, sin = self.cos[positions], self.sin[positions]  # (T, D)
        if torch.is_autocast_enabled(cos.device.type):
            dtype = torch.get_autocast_dtype(cos.device.type)
            cos, sin = cos.to(dtype), sin.to(dtype)
        return AttentionInputs(cos, sin, None if cache is None else cache.mask(), cache)

    @torch.no_grad()
    def attention_weights(self, tokens: Tensor) -> list[Tensor]:
        """Return the attention weights of each layer on tokens (B, T): (B, H, T, T) each."""
        tokens = self.check_tokens(tokens)
        inputs = self.attention_inputs(tokens.size(1))
        x = self.embedding(tokens)  # (B, T, C)
        weights = []
        for block in self.blocks:
            if block.attention is not None:
                weights.append(block.attention.weights(x, block.attention_norm, inputs))
            x = block(x, inputs)
        return weights

    def first_layer_qkv(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the first layer on tokens (B, T): (B, H, T, D)."""
        block = self.blocks[0]
        assert isinstance(block.attention, Attention), "the layer has full attention"
        inputs = self.attention_inputs(tokens.size(1))
        return block.attention.project(self.embedding(tokens), block.attention_norm, inputs)

    def new_cache(self, batch_size: int, cache_type: type[KVCache] = KVCache) -> KVCache:
        """Return an empty cache; of type `StaticKVCache` for steps captured as a CUDA graph."""
        config = self.config
        size = 0 if config.attention == "none" else config.head_size
        shape = (config.n_layer, batch_size, config.n_head, self.block_size, size)
        return cache_type(shape, self.cos.dtype, self.cos.device)

    def evict_oldest_half(self, cache: KVCache) -> None:
        """Remove the older half of a full cache; rotate the other keys back to positions from 0."""
        super().evict_oldest_half(cache)
        if cache.length and self.config.attention == "full":
            n_evicted = self.block_size - cache.length
            keys = cache.keys[:, :, :, : cache.length]  # (L, B, H, length, D)
            keys.copy_(apply_rotary(keys, self.cos[n_evicted], -self.sin[n_evicted]))


def init_weights(model: GPT) -> None:
    """Initialise a GPT so that every layer is the identity and every logit is zero.

    Matrices are uniform with standard deviation 1/sqrt(inputs). The last matrix of each residual
    branch and the output head are zero, so the first loss is exactly ln V.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("output.weight", "down.weight", "head.weight")):
            nn.init.zeros_(parameter)
        elif name == "embedding.weight":
            nn.init.normal_(parameter)
        elif parameter.dim() == 2:
            bound = (3 / parameter.size(1)) ** 0.5
            nn.init.uniform_(parameter, -bound, bound)
    if model.config.attention == "full" and model.config.qk_norm:
        init_previous_token_heads(model)


@torch.no_grad()
def init_previous_token_heads(model: GPT) -> None:
    """Make head h of layer l attend at first to the token l + h + 1 positions before.

    Learning this from random weights takes hundreds of steps. Channel 0 of the embedding is set to
    one value for all tokens, and it dominates queries and keys. A query is then the same vector at
    every position, and a key is that vector rotated by l + h + 1 positions. The rotary embedding
    rotates both by their own position, so the two agree only at that distance.
    """
    config = model.config
    model.embedding.weight[:, 0] = SHARED_VALUE * config.n_embd**0.5
    half = config.head_size // 2
    n_distances = PREVIOUS_TOKEN_LAYERS + config.n_head
    cos, sin = rotary_tables(n_distances, config.head_size, config.rope_theta)
    # pairs of low frequency hardly distinguish nearby positions
    used = torch.arange(half) < N_PAIRS  # (D / 2,)
    vector = torch.cat((used, torch.zeros(half)))  # (D,)
    rotated = torch.cat((cos[:, :half] * used, sin[:, :half] * used), dim=1)  # (n_distances, D)
    for layer, block in enumerate(model.blocks[:PREVIOUS_TOKEN_LAYERS]):
        assert isinstance(block.attention, Attention), "the model has full attention"
        query, key = block.attention.query.weight, block.attention.key.weight  # (C, C) each
        query.mul_(NOISE_SCALE)
        key.mul_(NOISE_SCALE)
        query[:, 0] = vector.repeat(config.n_head)
        key[:, 0] = rotated[layer + 1 : layer + 1 + config.n_head].flatten()
