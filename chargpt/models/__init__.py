"""The interface of every model, token ids in, logits out; its KV cache; and `build_model`.

`build_model` makes every trainable model from its config, and imports the class that it builds.

Shapes in this file: B = batch, T = new tokens, V = vocabulary size, L = layers, H = heads,
S = cached tokens including the new ones, K = capacity, D = head size.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from chargpt.config import ModelConfig
from chargpt.device import lazy_zeros, require_memory
from chargpt.errors import TextError
from chargpt.text.tokenizer import Tokens

Shape = tuple[int, int, int, int, int]  # L, B, H, K, D
MAX_PASS_BYTES = 256_000_000  # of the widest activation of a forward pass


class KVCache:
    """Keys and values of every layer, (L, B, H, K, D) each, written in place.

    `length` is the number of stored tokens, at most `capacity`. `tokens` are the latest token ids,
    (B, any number): all of them for a GPT-2, which recomputes its keys after an eviction, the last
    `LOOKBACK` for a mixture; none for other models.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate an empty cache of shape (L, B, H, K, D); DeviceError if memory is too small."""
        n_bytes = 2 * math.prod(shape) * dtype.itemsize
        require_memory(n_bytes, f"a KV cache of {shape[1]:,} x {shape[3]:,} tokens", device)
        self.keys, self.values = (_zeros(shape, dtype, device) for _ in range(2))
        self.tokens = torch.zeros(shape[1], 0, dtype=torch.int64, device=device)
        self.capacity = shape[3]
        self.length = 0

    def positions(self, n_tokens: int) -> slice | Tensor:
        """Return the index of the next `n_tokens` positions."""
        return slice(self.length, self.length + n_tokens)

    def mask(self) -> Tensor | None:
        """Return which of the keys that `append` returns are visible, (T, S); None for causal."""
        return None

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, H, T, D); return all stored ones of the layer, (B, H, S, D)."""
        end = self.length + keys.size(2)
        assert end <= self.capacity, f"{end} tokens exceed the cache's capacity {self.capacity}"
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, n_tokens: int) -> None:
        """Add `n_tokens` to the length, after every layer has appended them."""
        self.set_length(self.length + n_tokens)

    def set_length(self, length: int) -> None:
        """Set the number of stored tokens."""
        self.length = length

    def copy_from(self, other: "KVCache") -> None:
        """Copy the tokens of another cache of the same capacity, whose batch may be 1."""
        for own, stored in ((self.keys, other.keys), (self.values, other.values)):
            own[:, :, :, : other.length] = stored[:, :, :, : other.length]
        self.tokens = other.tokens.expand(self.keys.size(1), -1)
        self.set_length(other.length)

    def reorder(self, sequences: Tensor, first: int = 0) -> None:
        """Replace sequence n by a copy of sequence `sequences[n]`, (B,), as beam search does.

        Args:
            first: position before which all sequences have the same tokens.
        """
        own = slice(first, self.length)
        for stored in (self.keys, self.values):  # (L, B, H, K, D)
            stored[:, :, :, own] = stored[:, :, :, own].index_select(1, sequences)
        self.tokens = self.tokens.index_select(0, sequences)


def _zeros(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, on a CPU those of `lazy_zeros`."""
    if device.type == "cpu" and dtype == torch.float32:
        return torch.from_numpy(lazy_zeros(shape))
    return torch.zeros(shape, dtype=dtype, device=device)


class StaticKVCache(KVCache):
    """KV cache whose decode step can be captured as a CUDA graph.

    A graph replays the same operations on the same memory. So the position of the next token is a
    tensor on the device, and attention reads all K keys under a mask. `forward` does not advance
    this cache: the caller does, outside of the graph, with `set_length(length + 1)`.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # equal to `length`
        self.columns = torch.arange(self.capacity, device=device)  # (K,)

    def positions(self, n_tokens: int) -> Tensor:
        assert n_tokens == 1, "a static cache takes one token a step"
        return self.position

    def mask(self) -> Tensor:
        return (self.columns <= self.position)[None]  # (1, K)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, H, 1, D) at `position`; return the layer's buffers, S = K."""
        buffers = self.keys[layer], self.values[layer]  # (B, H, K, D) each
        for buffer, new in zip(buffers, (keys, values), strict=True):
            buffer.index_copy_(2, self.position, new.to(buffer.dtype))
        return buffers

    def advance(self, n_tokens: int) -> None:
        """Do nothing: a captured step must not change the position."""

    def set_length(self, length: int) -> None:
        """Set the number of stored tokens, without a host-device sync."""
        self.length = length
        self.position.fill_(length)


class LanguageModel(nn.Module, ABC):
    """Model of the next token at every position."""

    lookback = 0  # earlier tokens that `Mixture.forward` takes as `before`

    def __init__(self, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.block_size = block_size  # maximum context length in tokens
        self.first_continuation_id = vocab_size  # ids from here on are continuation bytes of UTF-8

    @abstractmethod
    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return logits (B, T, V) for `tokens` (B, T) of any integer type.

        With a cache, `tokens` continue the cached ones and are appended to it.

        Raises:
            TextError: the tokens are not (B, T), or exceed the block size (which limits a bigram
                model only with a cache).
        """

    def check_tokens(
        self, tokens: Tensor | Tokens, cache: KVCache | None = None, *, any_length: bool = False
    ) -> Tensor:
        """Return tokens (B, T) as an int64 tensor; raise as `forward` does."""
        if not isinstance(tokens, Tensor):
            tokens = torch.as_tensor(tokens, device=self.device)
        if tokens.dim() != 2:
            shape = tuple(tokens.shape)
            raise TextError(f"tokens of shape {shape} are not (batch, tokens): write tokens[None]")
        n_tokens = tokens.size(1) + (0 if cache is None else cache.length)
        if n_tokens > self.block_size and not any_length:
            raise TextError(
                f"{n_tokens:,} tokens exceed the block size {self.block_size:,}; give the last "
                "ones, or use chargpt.evaluate or chargpt.sample"
            )
        return tokens.long()

    @abstractmethod
    def new_cache(self, batch_size: int) -> KVCache:
        """Return an empty cache for `batch_size` sequences of up to `block_size` tokens."""

    def evict_oldest_half(self, cache: KVCache) -> None:
        """Remove the older half of a full cache; the rest is not recomputed."""
        assert cache.length == self.block_size
        cache.set_length(self.block_size // 2)
        for stored in (cache.keys, cache.values):
            stored[:, :, :, : cache.length] = stored[:, :, :, self.block_size - cache.length :]

    @property
    def width(self) -> int:
        """Number of values per token of the widest activation, the logits included."""
        return self.vocab_size

    def max_tokens_per_pass(self, width: int = 0) -> int:
        """Return how many tokens, each of at least `width` values, fit into MAX_PASS_BYTES."""
        return max(1, MAX_PASS_BYTES // (4 * max(self.width, width)))

    def iter_parts(self, tokens: Tensor, cache: KVCache) -> Iterator[Tensor]:
        """Yield the logits (B, T', V) of consecutive parts of tokens (B, T), in bounded memory."""
        # each token has a row of the mask
        n_tokens = self.max_tokens_per_pass(self.block_size) // len(tokens)
        for part in torch.split(tokens, max(1, n_tokens), dim=1):
            yield self(part, cache)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(chain(self.parameters(), self.buffers())).device

    def num_parameters(self) -> int:
        """Return the number of parameters."""
        return sum(p.numel() for p in self.parameters())


@contextmanager
def eval_mode(model: LanguageModel) -> Iterator[None]:
    """Put a model into evaluation mode, and restore its mode afterwards."""
    if not model.training:  # going through its modules takes as long as a decode step
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()


def count_parameters(config: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters that `build_model` would allocate."""
    if config.kind == "bigram":
        return vocab_size**2
    width = config.n_embd
    if config.kind == "gpt2":
        layer = 12 * width**2 + 13 * width  # matrices; biases and norms
        return config.n_layer * layer + (vocab_size + config.block_size + 2) * width
    layer = 0
    if config.attention == "full":
        layer += width + 4 * width**2  # norm; query, key, value, output
        layer += 2 * (width // config.n_head) * config.qk_norm
    elif config.attention == "average":
        layer += width + 2 * width**2  # norm; value, output
    if config.mlp == "swiglu":
        layer += width + 3 * width * config.mlp_width  # norm; gate, up, down
    return config.n_layer * layer + width + 2 * vocab_size * width  # norm; embedding, head


def rotary_size(config: ModelConfig) -> int:
    """Return the width of the rotary tables, 0 without queries and keys to rotate."""
    return config.head_size if config.attention == "full" else 0


def rotary_bytes(config: ModelConfig) -> int:
    """Return the peak memory of computing a model's rotary tables, in bytes."""
    entry_bytes = 8 + 8 + 4 + 4  # angles and one table in float64, two tables in float32
    return entry_bytes * config.block_size * rotary_size(config) * (config.kind == "gpt")


def build_model(config: ModelConfig, vocab_size: int) -> LanguageModel:
    """Return an untrained model for `vocab_size` tokens, on the CPU, in float32.

    Raises:
        ConfigError: it is a bigram model of more than `ngram.MAX_BIGRAM_VOCAB_SIZE` tokens.
    """
    if config.kind == "bigram":
        from chargpt.models.ngram import BigramLM

        return BigramLM(vocab_size, config.block_size)
    if config.kind == "gpt2":
        from chargpt.models.gpt2 import GPT2

        return GPT2(config, vocab_size)
    from chargpt.models.gpt import GPT

    return GPT(config, vocab_size)
