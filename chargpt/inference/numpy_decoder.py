"""The next character of every stream on a CPU, in as little Python as it takes.

At a few hundred thousand multiplications a character, the work around each operation is most of the
time, and numpy's operations take the least to begin with.

The weights are laid out once: q, k and v in one matrix, gate and up in another. Each norm only
brings its row to length 1: its gain, times the root of the row's size, is multiplied into the
matrix after it, and the attention scale into the gains of q. What the first layer's q, k and v are
depends on the character alone, so it stands in a table. The two numbers of a rotary pair, which the
model keeps D / 2 apart, lie side by side in q and k here: a rotation is then one product of complex
numbers.
Shapes in this file: N = streams, S = characters held, L = layers, C = n_embd, H = n_head,
D = C / H, F = mlp_width, V = vocabulary, K = block size. A single stream's N is left out.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from chargpt.config import NORM_EPS
from chargpt.inference.drawing import Ids

Array = npt.NDArray[np.float32]
ONE = np.float32(1)
EXPONENT = 60  # up to it, e^score can be summed and multiplied without overflow


@dataclass(frozen=True)
class Weights:
    """A GPT's weights as the decoders want them."""

    embedding: Array  # (V, C)
    qkv: Array  # (L, C, 3C)
    gains: Array  # (L, 2, 1, D), of q and k
    output: Array  # (L, C, C)
    gate_up: Array  # (L, C, 2F)
    down: Array  # (L, F, C)
    head: Array  # (C, V)
    turns: npt.NDArray[np.complex64]  # (K, D / 2)


class NumpyDecoder:
    """What `streams` streams of characters have left in a model's memory.

    Attributes:
        length: how many characters of each stream are held, at most the block size.
    """

    def __init__(self, weights: Weights, streams: int) -> None:
        layers, width, _ = weights.qkv.shape
        block, half = weights.turns.shape
        heads = width // (2 * half)
        self.length = 0
        self.block_size = block
        self.shape = () if streams == 1 else (streams,)
        self.unit = _unit if streams == 1 else _units
        self.embedding, self.head, self.turns = weights.embedding, weights.head, weights.turns
        self.eps = np.float32(2 * half * NORM_EPS)
        # q and k have length 1 before their gains, and turning does not change it
        bounds = np.abs(weights.gains).max(axis=(2, 3)).prod(axis=1)  # (L,)
        self.may_overflow = not bounds.max() < EXPONENT
        memory = (layers, *self.shape, heads, block, 2 * half)
        self.keys, self.values = np.zeros(memory, np.float32), np.zeros(memory, np.float32)
        matrices = (weights.qkv, weights.gains, weights.output, weights.gate_up, weights.down)
        self.layers = list(zip(*matrices, self.keys, self.values, strict=True))
        self.heads_shape = (*self.shape, 3, heads, 2 * half)
        with np.errstate(all="ignore"):
            self.first_heads = _units(weights.embedding).dot(weights.qkv[0])  # (V, 3C)

    def remember(self, keys: Array, values: Array) -> None:
        """Let every stream hold nothing but these characters' keys and values, (L, H, S, D)."""
        self.length = keys.shape[2]
        for held, given in ((self.keys, keys), (self.values, values)):
            for layer, memory in enumerate(given):
                held[layer][..., : self.length, :] = memory

    @np.errstate(all="ignore")  # where exp overflows the result is right; the rest will be seen
    def step(self, ids: Ids) -> Array:
        """Take in a character of each stream, (N,); return the next ones' logits, (N, V)."""
        if self.length == self.block_size:
            self._forget()
        place, end = self.length, self.length + 1
        turns = self.turns[place]  # (D / 2,)
        tokens: Any = ids if self.shape else int(ids[0])
        x = self.embedding.take(tokens, axis=0)  # (N, C)
        for layer, (qkv, gains, output, gate_up, down, keys, values) in enumerate(self.layers):
            joint = self.unit(x).dot(qkv) if layer else self.first_heads.take(tokens, axis=0)
            heads = joint.reshape(self.heads_shape)  # (N, 3, H, D)
            qk = heads[..., :2, :, :]
            norms = np.vecdot(qk, qk)
            norms += self.eps
            np.sqrt(norms, out=norms)
            qk /= norms[..., None]
            qk *= gains
            pairs = qk.view(np.complex64)
            pairs *= turns
            keys[..., place, :] = heads[..., 1, :, :]
            values[..., place, :] = heads[..., 2, :, :]
            scores = np.matvec(keys[..., :end, :], heads[..., 0, :, :])  # (N, H, S)
            if self.may_overflow:
                scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            mixed = np.vecmat(scores, values[..., :end, :])  # (N, H, D)
            mixed /= np.add.reduce(scores, axis=-1, keepdims=True)
            x += mixed.reshape(x.shape).dot(output)
            joint = self.unit(x).dot(gate_up)  # (N, 2F)
            gate, up = joint[..., : len(down)], joint[..., len(down) :]
            up *= gate
            np.negative(gate, out=gate)
            np.exp(gate, out=gate)
            gate += ONE
            x += (up / gate).dot(down)
        self.length = end
        logits: Array = self.unit(x).dot(self.head)
        return logits if self.shape else logits[None]

    def _forget(self) -> None:
        """Drop the older half; what is kept moves to the start, its keys turned back as far."""
        kept = self.block_size // 2
        dropped = self.block_size - kept
        self.length = kept
        if kept:
            for memory in (self.keys, self.values):
                memory[..., :kept, :] = memory[..., dropped:, :]
            pairs = self.keys[..., :kept, :].view(np.complex64)
            pairs *= self.turns[dropped].conj()


def _unit(x: Array) -> Array:
    """Return x (C,) brought to length 1."""
    unit: Array = x / math.sqrt(x.dot(x) + len(x) * NORM_EPS)
    return unit


def _units(x: Array) -> Array:
    """Return x (N, C), each row brought to length 1."""
    norms = np.vecdot(x, x)
    norms += np.float32(x.shape[-1] * NORM_EPS)
    np.sqrt(norms, out=norms)
    unit: Array = x / norms[..., None]
    return unit
