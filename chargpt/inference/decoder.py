"""The next character of every stream, in as little Python as it takes: the CPU's fast path.

At a few hundred thousand multiplications a character, the work around each operation is most of the
time. So the weights are laid out once: q, k and v in one matrix, gate and up in another, each
norm's gain multiplied into the matrix after it, the attention scale into the gains of q; what the
first layer's q, k and v are depends on the character alone, so it stands in a table. The two
numbers of a rotary pair, which the model keeps D / 2 apart, lie side by side in q and k here: a
rotation is then one product of complex numbers. A single stream is computed in numpy, whose
operations take the least time to begin with; many streams in torch, which uses every core.
Shapes in this file: N = streams, T = characters taken in, S = characters held, C = n_embd,
H = n_head, D = C / H, F = mlp_width, V = vocabulary, K = block size.
"""

from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from chargpt.models.attention import fused_attention
from chargpt.models.gpt import GPT
from chargpt.models.kernels import NORM_EPS

Array = npt.NDArray[np.float32]
EPS, ONE = np.float32(NORM_EPS), np.float32(1)


@dataclass
class Layer:
    """One block's weights as the decoder wants them, and what it remembers of the characters."""

    qkv: Tensor  # (C, 3C)
    gains: Tensor  # (2, 1, D), of q and k
    output: Tensor  # (C, C)
    gate_up: Tensor  # (C, 2F)
    down: Tensor  # (F, C)
    memory: Tensor  # (2, N, H, K, D): keys and values


class Decoder:
    """A model's weights, and what `streams` streams of characters have left in its memory.

    Attributes:
        length: how many characters of each stream are held, at most the model's block size.
    """

    def __init__(self, model: GPT, streams: int) -> None:
        config = model.config
        self.length = 0
        self.n_head = config.n_head
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.embedding = weights["embedding.weight"]  # (V, C)
        self.head = _turned(weights["head.weight"] * weights["norm.weight"])  # (C, V)
        half = model.cos.size(-1) // 2
        self.turns = torch.complex(model.cos, model.sin)[:, None, None, :half]  # (K, 1, 1, D/2)
        self.layers = [self._layer(model, weights, n, streams) for n in range(config.n_layer)]
        self.single = streams == 1
        if self.single:
            self.rows, self.head_rows = self.embedding.numpy(), self.head.numpy()
            self.single_turns = self.turns.numpy()
            self.arrays = [
                tuple(tensor.numpy() for tensor in vars(layer).values()) for layer in self.layers
            ]
            self.first_heads = (_unit_rows(self.embedding) @ self.layers[0].qkv).numpy()  # (V, 3C)

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

    def _layer(self, model: GPT, weights: dict[str, Tensor], n: int, streams: int) -> Layer:
        def of(name: str) -> Tensor:
            return weights[f"blocks.{n}.{name}.weight"]

        size = model.config.n_embd // model.config.n_head
        paired = torch.arange(size).view(2, -1).mT.flatten()  # 0, D / 2, 1, D / 2 + 1, ...
        qkv = torch.stack([of(f"attention.{name}") for name in ("query", "key", "value")])
        qkv = (qkv * of("attention_norm")).view(3, self.n_head, size, -1)
        qkv[:2] = qkv[:2, :, paired]
        gains = torch.stack((of("attention.query_norm"), of("attention.key_norm")))
        if model.config.scaled:
            gains[0] *= size**-0.5
        return Layer(
            qkv=_turned(qkv.flatten(0, 2)),
            gains=gains[:, None, paired],
            output=_turned(of("attention.output")),
            gate_up=_turned(torch.cat((of("mlp.gate"), of("mlp.up"))) * of("mlp_norm")),
            down=_turned(of("mlp.down")),
            memory=torch.zeros(2, streams, self.n_head, model.block_size, size),
        )

    def clear(self) -> None:
        """Forget all characters."""
        self.length = 0

    def step(self, tokens: npt.NDArray[np.int64]) -> Array:
        """Take in (N, T) tokens, several only at the start; return the next logits, (N, V)."""
        steps = tokens.shape[1]
        assert steps == 1 or self.length == 0, "a prompt comes first"
        if self.single and steps == 1:
            logits = self._one(int(tokens[0, 0]))[None]
        else:
            with torch.inference_mode():
                logits = self._many(torch.from_numpy(tokens)).numpy()
        self.length += steps
        return logits

    def _one(self, token: int) -> Array:
        """Return the logits, (V,), of the only stream."""
        place = self.length
        turns = self.single_turns[place]  # (1, 1, D / 2)
        x = self.rows[token].copy()  # (C,)
        for layer, (qkv, gains, output, gate_up, down, memory) in enumerate(self.arrays):
            heads = _unit(x).dot(qkv) if layer else self.first_heads[token].copy()
            heads = heads.reshape(3, self.n_head, -1)  # (3, H, D)
            qk = heads[:2]
            squares = np.vecdot(qk, qk)
            squares *= np.float32(1 / qk.shape[2])
            squares += EPS
            qk /= np.sqrt(squares)[..., None]
            qk *= gains
            pairs = qk.view(np.complex64)
            pairs *= turns
            memory[:, 0, :, place] = heads[1:]
            keys, values = memory[:, 0, :, : place + 1]  # (H, S, D)
            scores = np.matvec(keys, heads[0])  # (H, S)
            scores -= np.maximum.reduce(scores, axis=1, keepdims=True)
            np.exp(scores, out=scores)
            mixed = np.vecmat(scores, values)  # (H, D)
            mixed /= np.add.reduce(scores, axis=1, keepdims=True)
            x += mixed.reshape(-1).dot(output)
            joint = _unit(x).dot(gate_up)  # (2F,)
            gate, up = joint[: len(down)], joint[len(down) :]
            up *= gate
            np.negative(gate, out=gate)
            np.exp(gate, out=gate)
            gate += ONE
            up /= gate
            x += up.dot(down)
        logits: Array = _unit(x).dot(self.head_rows)
        return logits

    def _many(self, tokens: Tensor) -> Tensor:
        """Return the logits, (N, V), after (N, T) tokens."""
        start, steps = self.length, tokens.size(1)
        end = start + steps
        x = self.embedding[tokens]  # (N, T, C)
        for layer in self.layers:
            heads = (_unit_rows(x) @ layer.qkv).view(*tokens.shape, 3, self.n_head, -1)
            qk = _unit_rows(heads[:, :, :2]).mul_(layer.gains)  # (N, T, 2, H, D)
            pairs = torch.view_as_complex(qk.view(*qk.shape[:-1], -1, 2))  # (N, T, 2, H, D / 2)
            qk = torch.view_as_real(pairs.mul_(self.turns[start:end])).flatten(-2)
            q, k = qk.permute(2, 0, 3, 1, 4)  # (N, H, T, D) each
            v = heads[:, :, 2].transpose(1, 2)  # (N, H, T, D)
            keys, values = layer.memory
            keys[:, :, start:end], values[:, :, start:end] = k, v
            if steps > 1:
                mixed = fused_attention(q, k, v, scaled=False)  # (N, H, T, D)
            else:
                scores = keys[:, :, :end] @ q.mT  # (N, H, S, 1)
                mixed = scores.softmax(dim=2).mT @ values[:, :, :end]
            x += mixed.transpose(1, 2).reshape(x.shape) @ layer.output
            gate, up = (_unit_rows(x) @ layer.gate_up).chunk(2, dim=-1)  # (N, T, F)
            x += F.silu(gate).mul_(up) @ layer.down
        return _unit_rows(x[:, -1]) @ self.head


def _turned(matrix: Tensor) -> Tensor:
    """Return the transpose, laid out so that rows of activations times it is quick."""
    return matrix.mT.contiguous()


def _unit(x: Array) -> Array:
    """Return x (C,) over its root mean square."""
    unit: Array = x * np.float32((float(x.dot(x)) / len(x) + NORM_EPS) ** -0.5)
    return unit


def _unit_rows(x: Tensor) -> Tensor:
    """Return x over its root mean square, over the last dimension."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * norm.square_().div_(x.size(-1)).add_(NORM_EPS).rsqrt_()
