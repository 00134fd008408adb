"""One more character of every stream, in as little Python as it takes: the CPU's fast path.

At a few hundred thousand multiplications a character, torch's own work around each operation is
most of the time. Here the same arithmetic runs in numpy, on weights that were laid out once: q, k
and v in one matrix, gate and up in another, each norm's gain multiplied into the matrix after it,
and the gains of the QK-norm and the attention scale into the rotary tables.
Shapes in this file: N = streams, S = characters held, C = n_embd, H = n_head, D = C / H,
F = mlp_width, V = vocabulary, K = block size.
"""

from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chargpt.models.cache import KVCache
from chargpt.models.gpt import GPT
from chargpt.models.kernels import NORM_EPS

Array = npt.NDArray[np.float32]


class Decoder:
    """Goes on from what a cache holds, which it shares with the model."""

    def __init__(self, model: GPT, cache: KVCache) -> None:
        config = model.config
        self.cache = cache
        self.n_head = config.n_head
        self.keys, self.values = cache.keys.numpy(), cache.values.numpy()
        weights = {name: _array(tensor) for name, tensor in model.state_dict().items()}
        self.embedding = weights["embedding.weight"]  # (V, C)
        self.head = _transposed(weights["head.weight"] * weights["norm.weight"])  # (C, V)
        self.layers = [
            self._layer(config, weights, f"blocks.{n}.", _array(model.cos), _array(model.sin))
            for n in range(config.n_layer)
        ]

    @staticmethod
    def fits(model: object) -> TypeGuard[GPT]:
        """Return whether the model is of the one shape that this is written for."""
        return (
            isinstance(model, GPT)
            and model.device.type == "cpu"
            and model.config.attention == "full"
            and model.config.qk_norm
            and model.config.mlp != "none"
        )

    @staticmethod
    def _layer(
        config: Any, weights: dict[str, Array], place: str, cos: Array, sin: Array
    ) -> tuple[Array, ...]:
        def of(name: str) -> Array:
            return weights[f"{place}{name}.weight"]

        projections = ("attention.query", "attention.key", "attention.value")
        qkv = np.concatenate([of(name) for name in projections]) * of("attention_norm")
        gate_up = np.concatenate((of("mlp.gate"), of("mlp.up"))) * of("mlp_norm")
        # (K, 2, 1, D) for q and k: what multiplies a number, and what multiplies its partner
        scale = (config.n_embd // config.n_head) ** -0.5 if config.scaled else 1.0
        gains = np.stack((of("attention.query_norm") * scale, of("attention.key_norm")))[:, None]
        own = cos[:, None, None] * gains
        half = gains.shape[-1] // 2
        partner = sin[:, None, None] * np.roll(gains, half, axis=-1)
        partner[..., :half] *= -1
        return (
            _transposed(qkv),  # (C, 3C)
            own,
            partner,
            _transposed(of("attention.output")),  # (C, C)
            _transposed(gate_up),  # (C, 2F)
            _transposed(of("mlp.down")),  # (F, C)
        )

    def step(self, tokens: npt.NDArray[np.int64]) -> Array:
        """Take in one token of each stream, (N,); return the next one's logits, (N, V)."""
        x = self.embedding[tokens]  # (N, C)
        for layer, weights in enumerate(self.layers):
            qkv, own, partner, output, gate_up, down = weights
            x += _product(self._attend(_product(_norm(x), qkv), own, partner, layer), output)
            joint = _product(_norm(x), gate_up)  # (N, 2F)
            gate, up = joint[:, : len(down)], joint[:, len(down) :]
            x += _product(gate * up / (1 + np.exp(-gate)), down)
        self.cache.advance(1)
        return _product(_norm(x), self.head)

    def _attend(self, qkv: Array, own: Array, partner: Array, layer: int) -> Array:
        """Return the mixed values, (N, C), of q, k and v, (N, 3C); k and v go into the cache."""
        place = self.cache.length
        heads = qkv.reshape(len(qkv), 3, self.n_head, -1)  # (N, 3, H, D)
        qk = _norm(heads[:, :2])
        half = qk.shape[-1] // 2
        swapped = np.concatenate((qk[..., half:], qk[..., :half]), axis=-1)
        qk = qk * own[place] + swapped * partner[place]  # (N, 2, H, D)
        self.keys[layer, :, :, place] = qk[:, 1]
        self.values[layer, :, :, place] = heads[:, 2]
        scores = self.keys[layer, :, :, : place + 1] @ qk[:, 0, :, :, None]  # (N, H, S, 1)
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=2, keepdims=True)
        mixed: Array = scores.swapaxes(2, 3) @ self.values[layer, :, :, : place + 1]
        return mixed.reshape(len(qkv), -1)  # (N, H, 1, D) to (N, C)


def _product(x: Array, matrix: Array) -> Array:
    """Return x @ matrix; of many rows by torch, whose threads numpy's would only wait for."""
    if len(x) == 1:
        single: Array = x @ matrix
        return single
    return _array(torch.from_numpy(x) @ torch.from_numpy(matrix))


def _norm(x: Array) -> Array:
    """Return x over its root mean square, over the last dimension."""
    squares = np.einsum("...i,...i->...", x, x)[..., None]
    normed: Array = x / np.sqrt(squares / x.shape[-1] + NORM_EPS)
    return normed


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().numpy()
    return array


def _transposed(matrix: Array) -> Array:
    return np.ascontiguousarray(matrix.T)
