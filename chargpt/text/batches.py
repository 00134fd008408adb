"""Random-offset batches: a pure function of (seed, step).

Nothing is stored and nothing is consumed: any step's batch can be had at any time, by any number
of workers, each taking its rows. Shapes in this file: B = batch, T = block size.
"""

import numpy as np
import torch
from torch import Tensor


class Batches:
    """Blocks of T + 1 consecutive tokens, drawn uniformly from all places where one fits."""

    def __init__(self, tokens: np.ndarray, block_size: int, batch_size: int, seed: int) -> None:
        assert len(tokens) > block_size, "the caller checks that a block fits"
        self.tokens = tokens
        self.batch_size = batch_size
        self.seed = seed
        self.starts = len(tokens) - block_size
        self.reach = np.arange(block_size + 1)

    def offsets_at(self, step: int) -> np.ndarray:
        """Return the B first positions of step `step`'s blocks, int64.

        The bits come from Philox (Salmon et al. 2011) keyed by (seed, step): its raw output is
        the same in every numpy version, which `Generator.integers` does not promise.
        """
        key = np.array([self.seed, step], dtype=np.uint64)
        bits = np.random.Philox(key=key).random_raw(self.batch_size)
        unit = (bits >> np.uint64(11)) * 2.0**-53
        return np.minimum((unit * self.starts).astype(np.int64), self.starts - 1)

    def at(self, step: int, rows: slice = slice(None)) -> Tensor:
        """Return step `step`'s blocks, or some of its rows, as int64 (B, T + 1) on the CPU."""
        positions = self.offsets_at(step)[rows, None] + self.reach  # (B, T + 1)
        return torch.from_numpy(self.tokens[positions].astype(np.int64))
