"""Random-offset batches: a pure function of (seed, step).

Nothing is stored and nothing is consumed: any step's batch can be had at any time, by any number
of workers, each taking its rows. Shapes in this file: B = batch, T = block size.
"""

import numpy as np
import torch
from torch import Tensor

MOST_RESIDENT = 2**31  # bytes of tokens that may lie on a GPU


class Batches:
    """Blocks of T + 1 consecutive tokens, drawn uniformly from all places where one fits."""

    def __init__(self, tokens: np.ndarray, block_size: int, batch_size: int, seed: int) -> None:
        assert len(tokens) > block_size, "the caller checks that a block fits"
        self.tokens = tokens
        self.batch_size = batch_size
        self.seed = seed
        self.starts = len(tokens) - block_size
        self.reach = np.arange(block_size + 1)
        self.resident: tuple[Tensor, Tensor] | None = None  # tokens and reach, on a device

    def to_device(self, device: torch.device) -> None:
        """Keep a copy of the tokens on a device, if it is small, and gather there from now on."""
        # torch indexes no wider unsigned integers than bytes
        narrow = np.dtype(np.uint8 if self.tokens.dtype == np.uint8 else np.int32)
        if len(self.tokens) * narrow.itemsize <= MOST_RESIDENT:
            tokens = torch.from_numpy(self.tokens.astype(narrow))
            self.resident = tokens.to(device), torch.from_numpy(self.reach).to(device)

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
        """Return step `step`'s blocks, or some of its rows, as int64 (B, T + 1).

        They are on the CPU, or where `to_device` has put the tokens.
        """
        offsets = self.offsets_at(step)[rows, None]  # (B, 1)
        if self.resident is not None:
            tokens, reach = self.resident
            first = torch.from_numpy(offsets)
            if tokens.is_cuda:  # a copy from pinned memory is not waited for
                first = first.pin_memory().to(tokens.device, non_blocking=True)
            else:
                first = first.to(tokens.device)
            return tokens[first + reach].long()
        positions = offsets + self.reach  # (B, T + 1)
        return torch.from_numpy(self.tokens[positions].astype(np.int64))
