"""Incremental decoders: one token of N sequences in, the logits of their next tokens out.

On a CPU a GPT with full attention, QK-norm and SwiGLU is decoded by numpy, many sequences on
several threads (numpy_decoder.py). All other models run their own forward pass with a KV cache, a
GPT on CUDA as a graph. Few sequences of a small model on a GPU are launch-bound: there a timed
trial picks the faster of the two.

Shapes in this file: N = sequences, V = vocabulary size.
"""

import time
from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from chargpt.device import can_capture, capture_graph
from chargpt.errors import CaptureError
from chargpt.inference.numpy_decoder import (
    MIN_SEQUENCES,
    Array,
    NumpyDecoder,
    ParallelDecoder,
    is_supported,
)
from chargpt.log import logger
from chargpt.models import KVCache, LanguageModel, StaticKVCache
from chargpt.models.gpt import GPT
from chargpt.text.tokenizer import Tokens

MAX_CPU_WORK = 100_000_000  # parameters x sequences: beyond it the CPU is not tried beside a GPU
TRIAL_STEPS = 10  # after two, which capture a graph and load kernels

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
    for number in range(2 + TRIAL_STEPS):
        if number == 2:
            start = time.perf_counter()
        decoder.step(tokens)
    return time.perf_counter() - start
