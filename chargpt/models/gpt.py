"""The transformer: a pre-norm decoder in the shape of the Qwen3 family.

RMSNorm with learned gains (Zhang and Sennrich 2019), rotary positions in the half-split layout
(Su et al. 2021), QK-norm over the head size before the rotation (Dehghani et al. 2023), SwiGLU
(Shazeer 2020), no biases, an output head of its own. Renaming the tensors gives a
`Qwen3ForCausalLM`, which is how other tools open a run.

A norm's gains are multiplied into the matrix after it, and matrices that read the same input are
joined, at each call: small work on weights that saves passes over activations.

The rungs between averaging and a full transformer are settings of this one class: `attention`
(`full`, `average`, `none`), `scaled`, `qk_norm`, `mlp`, and the sizes.

Shapes in this file: B = batch, T = characters given, S = characters seen with the cache,
C = n_embd, H = n_head, D = C / H, V = vocabulary.
"""

from typing import cast

import torch
from torch import Tensor, nn

from chargpt.config import ModelConfig
from chargpt.models.attention import average_weights, explicit_attention, fused_attention
from chargpt.models.base import LanguageModel
from chargpt.models.cache import KVCache
from chargpt.models.kernels import dropout, heads, linear, rotate, swiglu, unit_rms

# Of `GPT.look_back`, found by trial; none is delicate.
LOOKING = 3  # layers
SHARED = 0.25  # value of channel 0, as a share of sqrt(C)
FASTEST = 8  # pairs of channels that are turned fastest
REST = 0.3  # of what random start is left to query and key


class Gain(nn.Module):
    """The learned part of an RMSNorm: what each of its outputs is multiplied by."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Dropout(nn.Dropout):
    """Leaves a share of its input out, in training."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training and self.p else x


def rotary_tables(positions: int, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (T, D), of position times theta^(-2i/D), the D/2 angles twice over."""
    frequencies = theta ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


class Attention(nn.Module):
    """Causal self-attention of one layer, or the plain average of the past."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.n_head = config.n_head
        self.head_size = width // config.n_head
        self.scaled, self.qk_norm = config.scaled, config.qk_norm
        self.averages = config.attention == "average"
        if not self.averages:
            self.query = nn.Linear(width, width, bias=False)
            self.key = nn.Linear(width, width, bias=False)
            if config.qk_norm:
                self.query_norm = Gain(self.head_size)
                self.key_norm = Gain(self.head_size)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x: Tensor,
        gain: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache | None,
        layer: int,
    ) -> Tensor:
        """Mix what x (B, T, C), whose RMS is 1 and whose gains are (C,), has seen so far."""
        steps = x.size(1)
        if self.averages:
            v = linear(x, self.value.weight * gain)  # (B, T, C)
            v = v.view(*v.shape[:2], self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
            if cache is not None:
                _, v = cache.extend(layer, v, v)  # (B, H, S, D)
            mixed = average_weights(steps, v.size(2), x.device).to(v.dtype) @ v  # (B, H, T, D)
        else:
            q, k, v = self.project(x, gain, cos, sin)  # (B, H, T, D)
            if cache is not None:
                k, v = cache.extend(layer, k, v)  # (B, H, S, D)
            mixed = fused_attention(q, k, v, scaled=self.scaled)  # (B, H, T, D)
        return linear(mixed.transpose(1, 2).flatten(2), self.output.weight)  # (B, T, C)

    def project(
        self, x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, (B, H, T, D) each, as they meet."""
        joint = torch.cat((self.query.weight, self.key.weight, self.value.weight))  # (3C, C)
        return heads(linear(x, joint * gain), self.head_gains(), cos, sin, self.n_head)

    def weights(self, x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return how much each place takes from which, (B, H, T, T), by the explicit form."""
        if self.averages:
            average = average_weights(x.size(1), x.size(1), x.device)
            return average.expand(x.size(0), self.n_head, -1, -1)
        return explicit_attention(*self.project(x, gain, cos, sin), scaled=self.scaled)[1]

    def head_gains(self) -> Tensor | None:
        """Return the gains of the QK-norm, (2, D), if there is one."""
        if not self.qk_norm:
            return None
        return torch.stack((self.query_norm.weight, self.key_norm.weight))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        """Return what x (B, T, C), whose RMS is 1 and whose gains are (C,), gives rise to."""
        joint = torch.cat((self.gate.weight, self.up.weight)) * gain  # (2F, C)
        return linear(swiglu(linear(x, joint)), self.down.weight)


class Block(nn.Module):
    """One layer: look back, then think; each adds to the stream that it reads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention: Attention | None = None
        self.mlp: SwiGLU | None = None
        if config.attention != "none":
            self.attention_norm = Gain(config.n_embd)
            self.attention = Attention(config)
        if config.mlp != "none":
            self.mlp_norm = Gain(config.n_embd)
            self.mlp = SwiGLU(config.n_embd, config.mlp_width)
        self.dropout = Dropout(config.dropout)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, layer: int
    ) -> Tensor:
        if self.attention is not None:
            gain = self.attention_norm.weight
            mixed = self.attention(unit_rms(x), gain, cos, sin, cache, layer)
            x = x + self.dropout(mixed)
        if self.mlp is not None:
            x = x + self.dropout(self.mlp(unit_rms(x), self.mlp_norm.weight))
        return x


class GPT(LanguageModel):
    """The transformer. A fresh one predicts every character alike: its loss is ln V."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(vocab_size, config.block_size)
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.n_embd)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = Gain(config.n_embd)
        self.head = nn.Linear(config.n_embd, vocab_size, bias=False)
        head_size = config.n_embd // config.n_head
        cos, sin = rotary_tables(config.block_size, head_size, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """Matrices uniform with deviation 1/sqrt(inputs); what ends a branch, and the head, zero.

        Zero ends make every layer start as the identity, and the first loss exactly ln V.
        Heads that can do it start by looking at one of the last few characters.
        """
        for name, parameter in self.named_parameters():
            if name.endswith(("output.weight", "down.weight", "head.weight")):
                nn.init.zeros_(parameter)
            elif name == "embedding.weight":
                nn.init.normal_(parameter)
            elif parameter.dim() == 2:
                bound = (3 / parameter.size(1)) ** 0.5
                nn.init.uniform_(parameter, -bound, bound)
        if self.config.attention == "full" and self.config.qk_norm:
            self.look_back()

    @torch.no_grad()
    def look_back(self) -> None:
        """Make head h of layer l attend, at first, to the character l + h + 1 places before.

        Left to itself a model needs its first hundreds of steps to find out how. Channel 0 of the
        embedding is given one value for all characters. What query and key take from it outweighs
        the rest, and is the same but for an angle: that by which rotation sets those two places
        apart, so that there, and only there, query and key agree.
        """
        config = self.config
        self.embedding.weight[:, 0] = SHARED * config.n_embd**0.5
        size = config.n_embd // config.n_head
        half, farthest = size // 2, LOOKING + config.n_head
        cos, sin = rotary_tables(farthest, size, config.rope_theta)  # (places, D)
        fast = torch.arange(half) < FASTEST  # the slow pairs hardly tell places apart
        for layer, block in enumerate(cast("list[Block]", self.blocks)[:LOOKING]):
            assert block.attention is not None
            query, key = block.attention.query.weight, block.attention.key.weight
            query *= REST
            key *= REST
            for head in range(config.n_head):
                rows, back = slice(head * size, (head + 1) * size), layer + head + 1
                query[rows, 0] = torch.cat((fast, torch.zeros(half)))
                key[rows, 0] = torch.cat((cos[back, :half] * fast, sin[back, :half] * fast))

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        start = 0 if cache is None else cache.length
        steps = tokens.size(1)
        assert start + steps <= self.block_size, "more characters than the block holds"
        cos, sin = self.cos[start : start + steps], self.sin[start : start + steps]  # (T, D)
        x = self.dropout(self.embedding(tokens))  # (B, T, C)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, cache, layer)
        if cache is not None:
            cache.advance(steps)
        return linear(unit_rms(x), self.head.weight * self.norm.weight)  # (B, T, V)

    @torch.no_grad()
    def attention_weights(self, tokens: Tensor) -> list[Tensor]:
        """Return how the heads of each layer attend over (B, T) ids: (B, H, T, T) a layer.

        Each row sums to 1. Dropout, in training mode, applies to what the layers hand on. A model
        without attention gives none.
        """
        steps = tokens.size(1)
        assert steps <= self.block_size, "more characters than the block holds"
        cos, sin = self.cos[:steps], self.sin[:steps]  # (T, D)
        x = self.embedding(tokens)  # (B, T, C)
        weights = []
        for layer, block in enumerate(cast("list[Block]", self.blocks)):
            if block.attention is not None:
                gain = block.attention_norm.weight
                weights.append(block.attention.weights(unit_rms(x), gain, cos, sin))
            x = block(x, cos, sin, None, layer)
        return weights

    def new_cache(self, batch_size: int) -> KVCache:
        """Return an empty cache in the weights' own dtype, on their device."""
        weight = self.embedding.weight
        return KVCache(
            layers=self.config.n_layer,
            batch_size=batch_size,
            heads=self.config.n_head,
            capacity=self.block_size,
            head_size=self.config.n_embd // self.config.n_head,
            device=weight.device,
            dtype=weight.dtype,
        )

    def forget(self, cache: KVCache) -> None:
        """Drop the older half of a full cache; the rest counts from 0, its keys turned back."""
        super().forget(cache)
        if cache.length and self.config.attention == "full":
            dropped = self.block_size - cache.length
            keys = cache.keys[:, :, :, : cache.length]
            keys.copy_(rotate(keys, self.cos[dropped], -self.sin[dropped]))
