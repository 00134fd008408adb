"""Incremental decoders: one token of N sequences in, the logits of their next tokens out.

On a CPU a GPT with full attention, QK-norm and SwiGLU is decoded by numpy (numpy_decoder.py), many
sequences on several threads (parallel_decoder.py). All other models run their own forward pass with
a KV cache, a GPT on CUDA as a graph (model_decoder.py). Few sequences of a small model on a GPU are
launch-bound: there a timed trial picks the faster of the two.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from chargpt.device import can_capture
from chargpt.inference.decoders.model_decoder import GraphDecoder, ModelDecoder
from chargpt.inference.decoders.numpy_decoder import NumpyDecoder, is_supported
from chargpt.inference.decoders.parallel_decoder import MIN_SEQUENCES, ParallelDecoder
from chargpt.models import GPT, LanguageModel
from chargpt.models.cache import KVCache
from chargpt.text.tokenizer import Tokens


class Decoder(Protocol):
    """Incremental decoder of N sequences with a KV cache.

    The cache stores at most `block_size` tokens a sequence. When it is full, the next step first
    evicts the older half; keys and values of the newer half are not recomputed (but for a GPT-2,
    whose positions are absolute). So once the block is full, every token is predicted from more
    than half a block of context.
    """

    def step(self, tokens: Tokens) -> npt.NDArray[np.float32]:
        """Append one token a sequence, (N,); return the logits of the next ones, (N, V)."""
        ...


MAX_CPU_WORK = 100_000_000  # parameters x sequences: beyond it the CPU is not tried beside a GPU
TRIAL_STEPS = 10  # after two, which capture a graph and load kernels


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
