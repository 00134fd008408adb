"""CPU decoder of many sequences: numpy decoders of a part of them each, on threads of their own.

numpy releases Python's lock in its larger operations. Threads of the BLAS would share the work too,
but they spin while they wait for each other: beside a busy process a step takes thirty times as
long.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from chargpt.inference.decoders.numpy_decoder import NumpyDecoder
from chargpt.inference.decoders.numpy_weights import Array, pack_weights
from chargpt.models import GPT
from chargpt.models.cache import KVCache
from chargpt.text.tokenizer import Tokens

MIN_SEQUENCES = 32  # of a thread: with fewer, handing over the work costs more than it saves


class ParallelDecoder:
    """CPU decoder of a GPT that divides N sequences evenly over threads."""

    def __init__(
        self, model: GPT, num_sequences: int, prefilled: KVCache | None = None, *, num_threads: int
    ) -> None:
        parts = np.array_split(np.arange(num_sequences), num_threads)
        self.starts = [int(part[0]) for part in parts[1:]]
        weights = pack_weights(model)
        self.decoders = [NumpyDecoder(model, len(part), prefilled, weights) for part in parts]
        self.pool = ThreadPoolExecutor(num_threads)

    def step(self, tokens: Tokens) -> Array:
        """Append one token a sequence, (N,); return the logits of the next ones, (N, V)."""
        parts = np.split(tokens, self.starts)
        return np.concatenate(list(self.pool.map(NumpyDecoder.step, self.decoders, parts)))
