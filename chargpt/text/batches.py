"""Random-offset batches: a pure function of (seed, step).

There is no iterator state: any worker can compute its rows of any step's batch.
Shapes in this file: B = batch size, T = block size.
"""

import numpy as np
import torch
from torch import Tensor

MAX_CONTINUATIONS = 3  # bytes of a character in UTF-8 after the first
MAX_RESIDENT_BYTES = 2**31  # of tokens on a GPU


class Batches:
    """Blocks of T + 1 consecutive tokens at offsets that are uniform over the text.

    No block begins inside a character: ids from `first_continuation_id` on continue one.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        block_size: int,
        batch_size: int,
        seed: int,
        first_continuation_id: int | None = None,
    ) -> None:
        assert len(tokens) > block_size, "the caller checks that a block fits"
        self.tokens = tokens
        self.batch_size = batch_size
        self.seed = seed
        self.first_continuation_id = first_continuation_id
        self.n_offsets = len(tokens) - block_size
        self.index = np.arange(block_size + 1)
        self.resident: tuple[Tensor, Tensor] | None = None  # tokens and index, on a device

    def to_device(self, device: torch.device) -> None:
        """Copy the tokens to a device, if they are small, and gather batches there from now on."""
        # torch cannot index unsigned integers wider than bytes
        narrow = np.dtype(np.uint8 if self.tokens.dtype == np.uint8 else np.int32)
        if len(self.tokens) * narrow.itemsize <= MAX_RESIDENT_BYTES:
            tokens = torch.from_numpy(self.tokens.astype(narrow))
            self.resident = tokens.to(device), torch.from_numpy(self.index).to(device)

    def offsets_at(self, step: int) -> np.ndarray:
        """Return the offsets of the blocks of a step, int64 of shape (B,).

        The bits come from Philox (Salmon et al. 2011) keyed by (seed, step): its raw output is
        the same in every numpy version, which `Generator.integers` does not promise.
        """
        key = np.array([self.seed, step], dtype=np.uint64)
        bits = np.random.Philox(key=key).random_raw(self.batch_size)
        uniform = (bits >> np.uint64(11)) * 2.0**-53
        offsets = np.minimum((uniform * self.n_offsets).astype(np.int64), self.n_offsets - 1)
        if self.first_continuation_id is not None:
            for _ in range(MAX_CONTINUATIONS):
                offsets -= self.tokens[offsets] >= self.first_continuation_id
        return offsets

    def at(self, step: int, rows: slice = slice(None)) -> Tensor:
        """Return the blocks of a step, or some rows of them, as int64 (B, T + 1).

        They are on the CPU, or on the device of `to_device`.
        """
        offsets = self.offsets_at(step)[rows, None]  # (B, 1)
        if self.resident is not None:
            tokens, index = self.resident
            first = torch.from_numpy(offsets)
            if tokens.is_cuda:  # a copy from pinned memory does not synchronise
                first = first.pin_memory()
            return tokens[first.to(tokens.device, non_blocking=tokens.is_cuda) + index].long()
        positions = offsets + self.index  # (B, T + 1)
        return torch.from_numpy(self.tokens[positions].astype(np.int64))
