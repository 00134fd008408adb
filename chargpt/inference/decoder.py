"""The next character of every stream, in as little Python as it takes: the fast path.

At a few hundred thousand multiplications a character, the work around each operation is most of the
time. So the weights are laid out once: q, k and v in one matrix, gate and up in another. Each norm
only brings its row to length 1: its gain, times the root of the row's size, is multiplied into the
matrix after it, and the attention scale into the gains of q. What the first layer's q, k and v are
depends on the character alone, so it stands in a table. The two numbers of a rotary pair, which the
model keeps D / 2 apart, lie side by side in q and k here: a rotation is then one product of complex
numbers. On a CPU a single stream is computed in numpy, whose operations take the least time to
begin with; many streams in torch, which uses every core. On CUDA every step does the same to the
same memory, wherever its character stands, so that it can be replayed as a graph.
Shapes in this file: N = streams, T = characters taken in, S = characters held, C = n_embd,
H = n_head, D = C / H, F = mlp_width, V = vocabulary, K = block size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from chargpt.device import replayable
from chargpt.models.attention import fused_attention
from chargpt.models.gpt import GPT
from chargpt.models.kernels import NORM_EPS

Array = npt.NDArray[np.float32]
ONE = np.float32(1)
EXPONENT = 60  # up to it, e^score can be summed and multiplied without overflow


@dataclass
class Layer:
    """One block's weights as the decoder wants them, and what it remembers of the characters."""

    qkv: Tensor  # (C, 3C)
    gains: Tensor  # (2, 1, D), of q and k
    output: Tensor  # (C, C)
    gate_up: Tensor  # (C, 2F)
    down: Tensor  # (F, C)
    keys: Tensor  # (N, H, D, K), so that both products with the memory run along its rows
    values: Tensor  # (N, H, K, D)


class Decoder:
    """A model's weights, and what `streams` streams of characters have left in its memory.

    Attributes:
        length: how many characters of each stream are held, at most the model's block size.
    """

    def __init__(self, model: GPT, streams: int) -> None:
        config = model.config
        self.device = model.device
        self.length = 0
        self.n_head = config.n_head
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.embedding = weights["embedding.weight"]  # (V, C)
        gain = weights["norm.weight"] * math.sqrt(config.n_embd)
        self.head = _turned(weights["head.weight"] * gain)  # (C, V)
        half = model.cos.size(-1) // 2
        self.turns = torch.complex(model.cos, model.sin)[:, None, None, :half]  # (K, 1, 1, D/2)
        self.layers = [self._layer(model, weights, n, streams) for n in range(config.n_layer)]
        self.replays = self.device.type == "cuda"
        self.token = torch.zeros(streams, 1, dtype=torch.int64, device=self.device)
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.columns = torch.arange(model.block_size, device=self.device)  # (K,), of the memory
        self.again: Callable[[], Tensor] | None = None
        self.single = streams == 1 and self.device.type == "cpu"
        if self.single:
            # q and k have length 1 before their gains, and turning does not change it
            bounds = [layer.gains.abs().amax(dim=(1, 2)).prod() for layer in self.layers]
            self.may_overflow = not max(bounds) < EXPONENT
            self.head_eps = np.float32(config.n_embd // config.n_head * NORM_EPS)
            self.rows, self.head_rows = self.embedding.numpy(), self.head.numpy()
            self.single_turns = self.turns.numpy()
            self.arrays = [
                (*(tensor.numpy() for tensor in weights), keys[0].numpy(), values[0].numpy())
                for *weights, keys, values in (vars(layer).values() for layer in self.layers)
            ]
            self.first_heads = (_unit_rows(self.embedding) @ self.layers[0].qkv).numpy()  # (V, 3C)

    @staticmethod
    def fits(model: object) -> TypeGuard[GPT]:
        """Return whether the model is of the one shape that this is written for."""
        return (
            isinstance(model, GPT)
            and model.device.type in ("cpu", "cuda")
            and model.config.attention == "full"
            and model.config.qk_norm
            and model.config.mlp != "none"
        )

    def _layer(self, model: GPT, weights: dict[str, Tensor], n: int, streams: int) -> Layer:
        def of(name: str) -> Tensor:
            return weights[f"blocks.{n}.{name}.weight"]

        def gain(name: str) -> Tensor:
            return of(name) * math.sqrt(model.config.n_embd)

        size = model.config.n_embd // model.config.n_head
        places = torch.arange(size, device=self.device)
        paired = places.view(2, -1).mT.flatten()  # 0, D / 2, 1, D / 2 + 1, ...
        qkv = torch.stack([of(f"attention.{name}") for name in ("query", "key", "value")])
        qkv = (qkv * gain("attention_norm")).view(3, self.n_head, size, -1)
        qkv[:2] = qkv[:2, :, paired]
        gains = torch.stack((of("attention.query_norm"), of("attention.key_norm")))
        gains *= size**0.5
        if model.config.scaled:
            gains[0] *= size**-0.5
        return Layer(
            qkv=_turned(qkv.flatten(0, 2)),
            gains=gains[:, None, paired],
            output=_turned(of("attention.output")),
            gate_up=_turned(torch.cat((of("mlp.gate"), of("mlp.up"))) * gain("mlp_norm")),
            down=_turned(of("mlp.down")),
            keys=gains.new_zeros(streams, self.n_head, size, model.block_size),
            values=gains.new_zeros(streams, self.n_head, model.block_size, size),
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
                given = torch.from_numpy(tokens)
                if self.replays and steps == 1:
                    logits = self._replay(given).cpu().numpy()
                else:
                    places = slice(self.length, self.length + steps)
                    logits = self._many(given.to(self.device), places).cpu().numpy()
        self.length += steps
        return logits

    def _one(self, token: int) -> Array:
        """Return the logits, (V,), of the only stream."""
        place, end = self.length, self.length + 1
        turns = self.single_turns[place]  # (1, 1, D / 2)
        x = self.rows[token].copy()  # (C,)
        for layer, (qkv, gains, output, gate_up, down, keys, values) in enumerate(self.arrays):
            heads = _unit(x).dot(qkv) if layer else self.first_heads[token].copy()
            heads = heads.reshape(3, self.n_head, -1)  # (3, H, D)
            qk = heads[:2]
            norms = np.vecdot(qk, qk)
            norms += self.head_eps
            np.sqrt(norms, out=norms)
            qk /= norms[..., None]
            qk *= gains
            pairs = qk.view(np.complex64)
            pairs *= turns
            keys[..., place], values[:, place] = heads[1], heads[2]
            scores = np.vecmat(heads[0], keys[..., :end])  # (H, S)
            if self.may_overflow:
                scores -= np.maximum.reduce(scores, axis=1, keepdims=True)
            np.exp(scores, out=scores)
            mixed = np.vecmat(scores, values[:, :end])  # (H, D)
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

    def _replay(self, tokens: Tensor) -> Tensor:
        """Return the logits, (N, V), after (N, 1) tokens, by the same step at every place."""
        self.token.copy_(tokens)
        self.place.fill_(self.length)
        if self.again is None:
            self.again = replayable(lambda: self._many(self.token, self.place), self.device)
        return self.again()

    def _many(self, tokens: Tensor, places: slice | Tensor) -> Tensor:
        """Return the logits, (N, V), after (N, T) tokens.

        Args:
            tokens: (N, T).
            places: where they stand, T. If it is a tensor, of one, the whole memory is looked at,
                with what comes after that place hidden.
        """
        hidden = None if isinstance(places, slice) else self.columns > places  # (K,)
        seen = places.stop if isinstance(places, slice) else len(self.columns)  # S
        x = self.embedding[tokens]  # (N, T, C)
        for layer in self.layers:
            heads = (_unit_rows(x) @ layer.qkv).view(*tokens.shape, 3, self.n_head, -1)
            qk = _unit_rows(heads[:, :, :2]).mul_(layer.gains)  # (N, T, 2, H, D)
            pairs = torch.view_as_complex(qk.view(*qk.shape[:-1], -1, 2))  # (N, T, 2, H, D / 2)
            qk = torch.view_as_real(pairs.mul_(self.turns[places])).flatten(-2)
            q, k = qk.permute(2, 0, 3, 1, 4)  # (N, H, T, D) each
            v = heads[:, :, 2].transpose(1, 2)  # (N, H, T, D)
            layer.keys[..., places], layer.values[:, :, places] = k.mT, v
            if layer is self.layers[-1]:  # of which nothing but the last logits is wanted
                x, q = x[:, -1:], q[:, :, -1:]
            if tokens.size(1) > 1:
                mixed = fused_attention(q, k, v, scaled=False)  # (N, H, T, D)
            else:
                scores = q @ layer.keys[..., :seen]  # (N, H, 1, S)
                if hidden is not None:
                    scores.masked_fill_(hidden, -math.inf)
                mixed = scores.softmax(dim=-1) @ layer.values[:, :, :seen]  # (N, H, 1, D)
            x += mixed.transpose(1, 2).reshape(x.shape) @ layer.output
            gate, up = (_unit_rows(x) @ layer.gate_up).chunk(2, dim=-1)  # (N, T, F)
            x += F.silu(gate).mul_(up) @ layer.down
        return _unit_rows(x).squeeze(1) @ self.head


def _turned(matrix: Tensor) -> Tensor:
    """Return the transpose, laid out so that rows of activations times it is quick."""
    return matrix.mT.contiguous()


def _unit(x: Array) -> Array:
    """Return x (C,) brought to length 1."""
    unit: Array = x / math.sqrt(x.dot(x) + len(x) * NORM_EPS)
    return unit


def _unit_rows(x: Tensor) -> Tensor:
    """Return x, each row of its last dimension brought to length 1."""
    squares = torch.linalg.vecdot(x, x)
    unit: Tensor = x * squares.add_(x.size(-1) * NORM_EPS).rsqrt_().unsqueeze(-1)
    return unit
