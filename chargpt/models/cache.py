"""Key/value cache: what attention has already worked out about the characters before.

Shapes in this file: B = batch, H = heads, T = new characters, S = characters held, D = head size.
"""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, in storage of a fixed size that is written in place."""

    def __init__(
        self,
        *,
        layers: int,
        batch_size: int,
        heads: int,
        capacity: int,
        head_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (layers, batch_size, heads, capacity, head_size)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.capacity = capacity
        self.length = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, H, T, D) after what is held; return all keys and values, (B, H, S, D).

        `length` moves only with `advance`, once every layer has stored its share.
        """
        end = self.length + keys.size(2)
        assert end <= self.capacity, f"cache of {self.capacity} cannot hold {end} characters"
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, count: int) -> None:
        """Count `count` more characters as held."""
        self.length += count

    def drop(self, count: int) -> None:
        """Drop the oldest `count` characters of a full cache, at least half of it."""
        assert self.length == self.capacity <= 2 * count
        self.length = self.capacity - count
        for held in (self.keys, self.values):
            held[:, :, :, : self.length] = held[:, :, :, count:]
