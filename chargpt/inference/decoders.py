"""Incremental decoders: one token of N sequences in, the logits of their next tokens out.

On a CPU a GPT with full attention, QK-norm and SwiGLU is decoded by numpy, many sequences on
several threads. All other models run their own forward pass with a KV cache, a GPT on CUDA as a
graph. Few sequences of a small model on a GPU are launch-bound: there a timed trial picks the
faster of the two. An ensemble has a decoder for each of its models.

`NumpyDecoder` does the steps of models/gpt.py for one token a sequence. With about a million
multiplications a token, the overhead of each operation dominates, and numpy's is far smaller than
torch's. The layout of the weights leaves few operations:

- q, k and v are one matrix, gate and up another. RMSNorm weights, times sqrt(C), are folded into
  the matrix that follows, so that a norm only scales its input to length 1. QK-norm weights contain
  sqrt(D) and those of q also the attention scale 1 / sqrt(D).
- The channels (i, i + D / 2) of a rotary pair are adjacent in q and k, so that RoPE is one complex
  product.
- The first layer's q, k and v, which depend only on the token, are a table.

Shapes in this file: N = sequences (the axis is absent for a single sequence of `NumpyDecoder`,
which is faster), S = cached tokens, L = layers, C = n_embd, H = n_head, D = C / H, F = mlp_width,
V = vocabulary size, K = block size.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from chargpt.config import NORM_EPS
from chargpt.device import can_capture, capture_graph, lazy_zeros
from chargpt.errors import CaptureError
from chargpt.log import logger
from chargpt.models import KVCache, LanguageModel, StaticKVCache
from chargpt.models.ensemble import Ensemble, EnsembleCache
from chargpt.models.gpt import GPT, Attention
from chargpt.models.kernels import RMSNorm
from chargpt.text.tokenizer import Tokens

Array = npt.NDArray[np.float32]

MAX_CPU_WORK = 100_000_000  # parameters x sequences: beyond it the CPU is not tried beside a GPU
MIN_SEQUENCES = 32  # of a thread: with fewer, handing over the work costs more than it saves
TRIAL_STEPS = 10  # after two, which capture a graph and load kernels
MAX_SCORE = 60  # up to this attention score, sums and products of exp(score) fit into float32
ONE = np.float32(1)

_warn_once = cache(logger.warning)


class Decoder(Protocol):
    """Incremental decoder of N sequences with a KV cache.

    The cache stores at most `block_size` tokens a sequence. When it is full, the next step first
    evicts the older half; keys and values of the newer half are not recomputed (but for a GPT-2,
    whose positions are absolute). So once the block is full, every token is predicted from more
    than half a block of context.
    """

    def step(self, tokens: Tokens) -> Array:
        """Append one token a sequence, (N,); return the logits of the next ones, (N, V)."""
        ...


class ModelDecoder:
    """Decoder for any model on any device."""

    def __init__(
        self, model: LanguageModel, num_sequences: int, prefilled: KVCache | None = None
    ) -> None:
        self.model = model
        self.cache = self._new_cache(num_sequences)
        if prefilled is not None:
            self.cache.copy_from(prefilled)

    def _new_cache(self, num_sequences: int) -> KVCache:
        return self.model.new_cache(num_sequences)

    @torch.inference_mode()
    def step(self, tokens: Tokens) -> Array:
        """Append one token a sequence, (N,); return the logits of the next ones, (N, V)."""
        if self.cache.length == self.model.block_size:
            self.model.evict_oldest_half(self.cache)
        logits = self._forward(torch.from_numpy(tokens[:, None]))
        array: Array = logits.float().cpu().numpy()
        return array

    def _forward(self, column: Tensor) -> Tensor:
        """Append tokens (N, 1); return the logits of the next ones, (N, V)."""
        logits: Tensor = self.model(column.to(self.model.device), self.cache)[:, -1]
        return logits


class GraphDecoder(ModelDecoder):
    """Decoder for a GPT on CUDA, whose decode step is captured as a CUDA graph.

    A decode step of a small model is launch-bound: a graph launches all of its kernels at once. It
    replays the same operations on the same memory, hence the static cache and `self.tokens`.
    """

    model: GPT

    def __init__(self, model: GPT, num_sequences: int, prefilled: KVCache | None = None) -> None:
        super().__init__(model, num_sequences, prefilled)
        self.tokens = torch.zeros(num_sequences, 1, dtype=torch.int64, device=model.device)

    def _new_cache(self, num_sequences: int) -> KVCache:
        return self.model.new_cache(num_sequences, StaticKVCache)

    def _forward(self, column: Tensor) -> Tensor:
        self.tokens.copy_(column)
        logits = self._replay()  # captured at the first step, in the inference mode of replays
        self.cache.set_length(self.cache.length + 1)
        return logits

    @cached_property
    def _replay(self) -> Callable[[], Tensor]:
        """The decode step of `self.tokens` as a CUDA graph, or as it is if capture fails."""
        step = partial(super()._forward, self.tokens)  # does not advance the static cache
        if can_capture(self.model.device):
            try:
                return capture_graph(step, self.model.device)
            except CaptureError as error:
                _warn_once(f"sampling is slower than it could be: {error}")
        return step


class EnsembleDecoder:
    """Decoder of an ensemble: a decoder of each model, and the average of their probabilities.

    Each has a KV cache and a block size of its own. The sums are in float64, so that a probability
    far below those of other models is not lost.
    """

    def __init__(
        self, model: Ensemble, num_sequences: int, prefilled: KVCache | None, max_threads: int
    ) -> None:
        caches: Sequence[KVCache | None] = [None] * len(model.members)
        if prefilled is not None:
            assert isinstance(prefilled, EnsembleCache)
            caches = prefilled.parts
        self.members = [
            (
                build_decoder(member.model, num_sequences, cache, max_threads),
                member.ids.cpu().numpy(),
                member.is_known.cpu().numpy(),
                member.weight,
            )
            for member, cache in zip(model.members, caches, strict=True)
        ]
        self.shape = num_sequences, model.vocab_size

    def step(self, tokens: Tokens) -> Array:
        """Append one token a sequence, (N,); return log-probabilities of the next ones, (N, V)."""
        total = np.zeros(self.shape)
        for decoder, ids, is_known, weight in self.members:
            logits = decoder.step(ids[tokens]).take(ids, axis=1).astype(np.float64)
            probs = np.exp(logits - np.maximum.reduce(logits, axis=1, keepdims=True))
            probs *= is_known
            total += probs * (weight / np.add.reduce(probs, axis=1, keepdims=True))
        with np.errstate(divide="ignore"):  # a token may be known to no model
            log_probs: Array = np.log(total).astype(np.float32)
        return log_probs


def build_decoder(
    model: LanguageModel,
    num_sequences: int,
    prefilled: KVCache | None = None,
    max_threads: int = 1,
) -> Decoder:
    """Return the fastest decoder: on the model's device, or on the CPU for little work.

    Args:
        model: in evaluation mode. `NumpyDecoder` copies its weights, others read them at each step.
        num_sequences: N.
        prefilled: cache of one sequence, which every sequence continues; empty by default.
        max_threads: of the CPU; rounding depends on how many are used.
    """
    if isinstance(model, Ensemble):
        return EnsembleDecoder(model, num_sequences, prefilled, max_threads)
    candidates: list[Callable[..., Decoder]] = []
    is_on_cpu = model.device.type == "cpu"
    is_small = is_on_cpu or model.num_parameters() * num_sequences <= MAX_CPU_WORK
    if is_supported(model) and is_small:
        num_threads = min(max_threads, num_sequences // MIN_SEQUENCES)
        parallel = partial(ParallelDecoder, num_threads=num_threads)
        candidates.append(parallel if num_threads > 1 else NumpyDecoder)
    if not (is_on_cpu and candidates):
        has_graphs = isinstance(model, GPT) and can_capture(model.device)
        candidates.append(GraphDecoder if has_graphs else ModelDecoder)
    if len(candidates) > 1:
        typical = model.new_cache(1)  # from half full to full, once the block has been full
        typical.set_length(3 * model.block_size // 4)
        candidates.sort(
            key=lambda decoder: trial_seconds(decoder(model, num_sequences, typical), num_sequences)
        )
    return candidates[0](model, num_sequences, prefilled)


def trial_seconds(decoder: Decoder, num_sequences: int) -> float:
    """Return the time of a few steps."""
    tokens = np.zeros(num_sequences, np.int64)
    for _ in range(2):
        decoder.step(tokens)
    start = time.perf_counter()
    for _ in range(TRIAL_STEPS):
        decoder.step(tokens)
    return time.perf_counter() - start


def is_supported(model: LanguageModel) -> TypeGuard[GPT]:
    """Return whether `NumpyDecoder` implements a model's architecture."""
    return (
        isinstance(model, GPT)
        and model.config.attention == "full"
        and model.config.qk_norm
        and model.config.mlp == "swiglu"
    )


class LayerWeights(NamedTuple):
    """Weights of one layer."""

    qkv: Array  # (C, 3C)
    qk_norm: Array  # (2, 1, D)
    output: Array  # (C, C)
    gate_up: Array  # (C, 2F)
    down: Array  # (F, C)


class Weights(NamedTuple):
    """Weights of a GPT."""

    embedding: Array  # (V, C)
    layers: list[LayerWeights]
    head: Array  # (C, V)
    rotary: npt.NDArray[np.complex64]  # (K, D / 2), cos + i sin


@torch.no_grad()
def pack_weights(model: GPT) -> Weights:
    """Return a copy of a model's weights in the layout described at the top of this file."""
    config = model.config
    size, root = config.head_size, math.sqrt(config.n_embd)
    pairs = interleave(size)

    def fold_norm(norm: RMSNorm, *linears: nn.Linear) -> Tensor:
        """Return the joint matrix after a norm with its weight folded in, (C, outputs)."""
        joint = torch.cat([each.weight for each in linears])  # (outputs, C)
        return (joint * (norm.weight * root)).mT.cpu()

    layers = []
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, Attention), "see `is_supported`"
        assert mlp is not None
        qkv = fold_norm(block.attention_norm, attention.query, attention.key, attention.value)
        by_head = qkv.view(-1, 3, config.n_head, size)
        by_head[:, :2] = by_head[:, :2, :, pairs]
        norms = torch.stack((attention.query_norm.weight, attention.key_norm.weight)).cpu()
        qk_norm = norms * size**0.5  # (2, D)
        if config.scale_attn_weights:
            qk_norm[0] *= size**-0.5
        matrices = LayerWeights(
            qkv=to_numpy(qkv),
            qk_norm=to_numpy(qk_norm[:, None, pairs]),
            output=to_numpy(attention.output.weight.mT),
            gate_up=to_numpy(fold_norm(block.mlp_norm, mlp.gate, mlp.up)),
            down=to_numpy(mlp.down.weight.mT),
        )
        layers.append(matrices)
    return Weights(
        embedding=to_numpy(model.embedding.weight),
        layers=layers,
        head=to_numpy((model.head.weight * model.norm.weight * root).mT),
        rotary=torch.complex(model.cos.cpu(), model.sin.cpu())[:, : size // 2].numpy(),
    )


def interleave(size: int) -> Tensor:
    """Return the channels of a head with those of a rotary pair adjacent, (D,): 0, D / 2, 1, ..."""
    return torch.arange(size).view(2, -1).mT.flatten()


def to_numpy(tensor: Tensor) -> Array:
    """Return a contiguous copy."""
    array: Array = tensor.detach().float().cpu().numpy().copy(order="C")
    return array


class NumpyDecoder:
    """CPU decoder of a GPT with full attention, QK-norm and an MLP.

    `weights` are those of another decoder of the same model; without it they are copied.
    """

    def __init__(
        self,
        model: GPT,
        num_sequences: int,
        prefilled: KVCache | None = None,
        weights: Weights | None = None,
    ) -> None:
        self.weights = weights = weights or pack_weights(model)
        self.is_batch = num_sequences > 1
        lead = (num_sequences,) if self.is_batch else ()
        self.block_size, half = weights.rotary.shape
        self.heads_shape = (*lead, 3, model.config.n_head, 2 * half)
        self.qk_eps = np.float32(2 * half * NORM_EPS)
        with np.errstate(all="ignore"):
            self.first_qkv = _norm_linear(weights.embedding, weights.layers[0].qkv)  # (V, 3C)
        # QK-norm bounds the length of q and k by their largest weight, and RoPE does not change it.
        bounds = [np.abs(layer.qk_norm).max(axis=(1, 2)).prod() for layer in weights.layers]
        self.may_overflow = not np.max(bounds) < MAX_SCORE  # true also for NaN
        shape = (len(weights.layers), *lead, model.config.n_head, self.block_size, 2 * half)
        self.keys, self.values = lazy_zeros(shape), lazy_zeros(shape)
        self.length = 0  # cached tokens of each sequence, at most the block size
        if prefilled is not None:
            self._copy_cache(prefilled)

    @np.errstate(all="ignore")  # exp(-gate) may overflow to inf, which gives the right limit
    def step(self, tokens: Tokens) -> Array:
        """Append one token a sequence, (N,); return the logits of the next ones, (N, V)."""
        if self.length == self.block_size:
            self._evict_oldest_half()
        token: Any = tokens if self.is_batch else int(tokens[0])
        x = self.weights.embedding.take(token, axis=0)  # (N, C)
        for index, layer in enumerate(self.weights.layers):
            qkv = _norm_linear(x, layer.qkv) if index else self.first_qkv.take(token, axis=0)
            heads = self._split_heads_qk_norm_rope(qkv, layer.qk_norm)  # (N, 3, H, D)
            x += self._attention(heads, index).reshape(x.shape).dot(layer.output)
            x += _swiglu(_norm_linear(x, layer.gate_up)).dot(layer.down)
        self.length += 1
        logits = _norm_linear(x, self.weights.head)
        return logits if self.is_batch else logits[None]

    def _split_heads_qk_norm_rope(self, qkv: Array, qk_norm: Array) -> Array:
        """Return q, k and v by head, (N, 3, H, D), q and k normalised and rotated."""
        heads = qkv.reshape(self.heads_shape)
        qk = heads[..., :2, :, :]  # (N, 2, H, D)
        norms = np.vecdot(qk, qk)
        norms += self.qk_eps
        np.sqrt(norms, out=norms)
        qk /= norms[..., None]
        qk *= qk_norm
        pairs = qk.view(np.complex64)  # (N, 2, H, D / 2)
        pairs *= self.weights.rotary[self.length]
        return heads

    def _attention(self, heads: Array, layer: int) -> Array:
        """Cache the keys and values of a layer; return its attention output, (N, H, D)."""
        end = self.length + 1
        keys, values = self.keys[layer], self.values[layer]  # (N, H, K, D)
        keys[..., self.length, :] = heads[..., 1, :, :]
        values[..., self.length, :] = heads[..., 2, :, :]
        scores = np.matvec(keys[..., :end, :], heads[..., 0, :, :])  # (N, H, S)
        if self.may_overflow:
            scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        output: Array = np.vecmat(scores, values[..., :end, :])  # (N, H, D)
        output /= np.add.reduce(scores, axis=-1, keepdims=True)
        return output

    def _evict_oldest_half(self) -> None:
        """Remove the older half of the cache; rotate the other keys back to positions from 0."""
        self.length = self.block_size // 2
        n_evicted = self.block_size - self.length
        if self.length:
            for cached in (self.keys, self.values):
                cached[..., : self.length, :] = cached[..., n_evicted:, :]
            pairs = self.keys[..., : self.length, :].view(np.complex64)
            pairs *= self.weights.rotary[n_evicted].conj()

    def _copy_cache(self, cache: KVCache) -> None:
        """Copy the keys and values of one sequence into the cache of every sequence."""
        self.length = cache.length
        pairs = interleave(cache.keys.size(-1))
        for cached, stored in ((self.keys, cache.keys), (self.values, cache.values)):
            new = stored[:, :, :, : self.length].cpu()  # (L, 1, H, S, D)
            new = new[..., pairs] if cached is self.keys else new
            layers = new.detach().float().numpy()
            cached[..., : self.length, :] = layers if self.is_batch else layers[:, 0]


def _norm_linear(x: Array, matrix: Array) -> Array:
    """Return x (..., C), each row scaled to length 1, times a matrix (C, outputs)."""
    if x.ndim == 1:
        unit = x / math.sqrt(x.dot(x) + len(x) * NORM_EPS)
    else:
        norms = np.vecdot(x, x)
        norms += np.float32(x.shape[-1] * NORM_EPS)
        np.sqrt(norms, out=norms)
        unit = x / norms[..., None]
    product: Array = unit.dot(matrix)
    return product


def _swiglu(gate_up: Array) -> Array:
    """Return silu(gate) * up, (N, F), of both, (N, 2F), which are overwritten."""
    width = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :width], gate_up[..., width:]
    up *= gate
    np.negative(gate, out=gate)
    np.exp(gate, out=gate)
    gate += ONE
    hidden: Array = up / gate
    return hidden


class ParallelDecoder:
    """CPU decoder of a GPT that divides N sequences evenly over threads.

    numpy releases Python's lock in its larger operations. Threads of the BLAS would share the work
    too, but they spin while they wait for each other: beside a busy process a step takes thirty
    times as long.
    """

    def __init__(
        self, model: GPT, num_sequences: int, prefilled: KVCache | None = None, *, num_threads: int
    ) -> None:
        parts = np.array_split(np.arange(num_sequences), num_threads)
        weights = pack_weights(model)
        self.decoders = [NumpyDecoder(model, len(part), prefilled, weights) for part in parts]
        self.pool = ThreadPoolExecutor(num_threads)

    def step(self, tokens: Tokens) -> Array:
        """Append one token a sequence, (N,); return the logits of the next ones, (N, V)."""
        parts = np.array_split(tokens, len(self.decoders))
        return np.concatenate(list(self.pool.map(NumpyDecoder.step, self.decoders, parts)))
