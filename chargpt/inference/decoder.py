"""Decoders: the next character of every stream, each sort of model and device by its fastest way.

A GPT of the default's shape is decoded on a CPU by numpy (numpy_decoder.py), or, if there is much
to draw, by compiled steps (compiled_decoder.py). On CUDA the same steps are taken in torch: each
does the same to the same memory, wherever its character stands, so that it can be replayed as a
graph. All else goes through the model itself and its cache.
Shapes in this file: N = streams, T = characters taken in, L = layers, C = n_embd, H = n_head,
D = C / H, F = mlp_width, V = vocabulary, K = block size.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from chargpt.config import NORM_EPS
from chargpt.device import capture_graph
from chargpt.inference.drawing import Decoder, Ids
from chargpt.inference.numpy_decoder import Array, NumpyDecoder, Weights
from chargpt.models import LanguageModel
from chargpt.models.cache import KVCache
from chargpt.models.gpt import GPT

WORTH_COMPILING = 4e10  # multiplications, which numpy takes longer for than to load numba and all
IN_CACHE = 4_000_000  # parameters that a processor's cache holds


def decoder_for(model: LanguageModel, streams: int, held: KVCache | None = None) -> Decoder:
    """Return what decodes a model the fastest where it is; it should be in evaluation mode.

    Args:
        model: of any sort. A GPT's weights are read now, another's at each step.
        streams: N.
        held: of one text, whose characters every stream shall hold; none by default.
    """
    if not has_fast_decoder(model):
        return ModelDecoder(model, streams, held)
    weights = weights_of(model)
    if model.device.type == "cpu":
        decoder: NumpyDecoder | GraphDecoder = NumpyDecoder(weights, streams)
    else:
        decoder = GraphDecoder(weights, streams, model.device)
    if held is not None:
        decoder.remember(*memory_of(held))
    return decoder


def decoders_for(
    model: LanguageModel, streams: int, held: KVCache | None = None, *, compiled: bool
) -> list[Decoder]:
    """Return what decodes a model by compiled steps in threads, or as `decoder_for` does.

    Args:
        model: as for `decoder_for`.
        streams: N, of all decoders together.
        held: of one text, whose characters every stream shall hold; none by default.
        compiled: whether to compile, where that can be done (`is_worth_compiling`).

    Returns:
        One decoder, or several, each for an even share of the streams and a thread of its own.
    """
    if compiled and has_fast_decoder(model) and model.device.type == "cpu":
        with suppress(ImportError):  # numba follows new versions of Python and numpy months later
            return _compiled_decoders(model, streams, held)
    return [decoder_for(model, streams, held)]


def is_worth_compiling(parameters: int, streams: int, length: int) -> bool:
    """Return whether so much is drawn the sooner by steps that have been compiled before.

    Args:
        parameters: of the model.
        streams: of the whole job, though it be drawn in groups.
        length: characters of each stream.
    """
    if streams == 1 and parameters > IN_CACHE:
        return False  # whoever computes, it waits for the weights
    # numpy takes as long for a lone row of numbers as for four
    return parameters * length * (streams + 3) >= WORTH_COMPILING


def _compiled_decoders(model: GPT, streams: int, held: KVCache | None) -> list[Decoder]:
    from chargpt.inference.compiled_decoder import ROWS, CompiledDecoder, panels_of  # takes long

    panels = panels_of(weights_of(model))
    parts = max(1, min(torch.get_num_threads(), streams // ROWS))
    shares = np.array_split(np.arange(streams), parts)
    decoders = [CompiledDecoder(panels, len(share)) for share in shares]
    if held is not None:
        keys, values = memory_of(held)
        for decoder in decoders:
            decoder.remember(keys, values)
    return list(decoders)


def has_fast_decoder(model: LanguageModel) -> TypeGuard[GPT]:
    """Return whether a model has the shape, and is on a device, with a decoder of its own."""
    return (
        isinstance(model, GPT)
        and model.device.type in ("cpu", "cuda")
        and model.config.attention == "full"
        and model.config.qk_norm
        and model.config.mlp != "none"
    )


@torch.no_grad()
def weights_of(model: GPT) -> Weights:
    """Return a model's weights as the decoders want them (numpy_decoder.py)."""
    config = model.config
    states = {name: tensor.float().cpu() for name, tensor in model.state_dict().items()}
    size = config.n_embd // config.n_head
    root = math.sqrt(config.n_embd)
    paired = _paired(size)

    def of(name: str) -> Tensor:
        """Return one weight of all layers, (L, ...)."""
        layers = range(config.n_layer)
        return torch.stack([states[f"blocks.{n}.{name}.weight"] for n in layers])

    def behind(norm: str, *names: str) -> Tensor:
        """Return the matrices that read a norm's output, (L, C, all their outputs)."""
        joint = torch.cat([of(name) for name in names], dim=1)  # (L, outputs, C)
        return (joint * (of(norm) * root)[:, None]).mT

    qkv = behind("attention_norm", *(f"attention.{name}" for name in ("query", "key", "value")))
    by_head = qkv.view(*qkv.shape[:2], 3, config.n_head, size)  # (L, C, 3, H, D)
    by_head[:, :, :2] = by_head[:, :, :2, :, paired]
    gains = torch.stack((of("attention.query_norm"), of("attention.key_norm")), dim=1)  # (L, 2, D)
    gains *= size**0.5
    if config.scaled:
        gains[:, 0] *= size**-0.5
    turns = torch.complex(model.cos, model.sin)[:, : size // 2].cpu()  # (K, D / 2)
    return Weights(
        embedding=_array(states["embedding.weight"].clone()),  # all else is copied by arithmetic
        qkv=_array(qkv),
        gains=_array(gains[:, :, None, paired]),
        output=_array(of("attention.output").mT),
        gate_up=_array(behind("mlp_norm", "mlp.gate", "mlp.up")),
        down=_array(of("mlp.down").mT),
        head=_array((states["head.weight"] * states["norm.weight"] * root).mT),
        turns=turns.numpy(),
    )


def memory_of(cache: KVCache) -> tuple[Array, Array]:
    """Return what a model's cache of one text holds, as decoders want it: (L, H, T, D) twice."""
    keys, values = cache.keys[:, 0, :, : cache.length], cache.values[:, 0, :, : cache.length]
    return _array(keys[..., _paired(keys.size(-1)).to(keys.device)]), _array(values)


def _paired(size: int) -> Tensor:
    """Return the places of a head's numbers, (D,), in pairs: 0, D / 2, 1, D / 2 + 1, ..."""
    return torch.arange(size).view(2, -1).mT.flatten()


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.float().cpu().contiguous().numpy()
    return array


class ModelDecoder:
    """Decodes by the model's own forward pass and its cache."""

    def __init__(self, model: LanguageModel, streams: int, held: KVCache | None) -> None:
        self.model = model
        self.cache = model.new_cache(streams)
        if held is not None:
            self.cache.keys[:] = held.keys
            self.cache.values[:] = held.values
            self.cache.advance(held.length)

    @torch.inference_mode()
    def step(self, ids: Ids) -> Array:
        """Take in a character of each stream, (N,); return the next ones' logits, (N, V)."""
        if self.cache.length == self.model.block_size:
            self.model.evict_oldest_half(self.cache)
        tokens = torch.from_numpy(ids[:, None]).to(self.model.device)
        return _array(self.model(tokens, self.cache)[:, -1])


class GraphDecoder:
    """Decodes in torch, every step the same, so that CUDA can replay it."""

    def __init__(self, weights: Weights, streams: int, device: torch.device) -> None:
        tensors = {
            name: torch.from_numpy(array).to(device) for name, array in vars(weights).items()
        }
        layers, width, _ = weights.qkv.shape
        block, half = weights.turns.shape
        self.device = device
        self.n_head = width // (2 * half)
        self.length = 0
        self.embedding, self.head = tensors["embedding"], tensors["head"]
        self.turns = tensors["turns"]
        memory = (layers, streams, self.n_head, block, 2 * half)
        self.keys = torch.zeros(memory, device=device)
        self.values = torch.zeros(memory, device=device)
        matrices = (tensors[name] for name in ("qkv", "gains", "output", "gate_up", "down"))
        self.layers = list(zip(*matrices, self.keys, self.values, strict=True))
        self.token = torch.zeros(streams, dtype=torch.int64, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.columns = torch.arange(block, device=device)  # (K,), of the memory
        self.again: Callable[[], Tensor] | None = None

    def remember(self, keys: Array, values: Array) -> None:
        """Let every stream hold nothing but these characters' keys and values, (L, H, T, D)."""
        self.length = keys.shape[2]
        for held, given in ((self.keys, keys), (self.values, values)):
            held[:, :, :, : self.length] = torch.from_numpy(given).to(self.device)[:, None]

    @torch.inference_mode()
    def step(self, ids: Ids) -> Array:
        """Take in a character of each stream, (N,); return the next ones' logits, (N, V)."""
        if self.length == len(self.columns):
            self._forget()
        self.token.copy_(torch.from_numpy(ids))
        self.place.fill_(self.length)
        if self.again is None:
            self.again = capture_graph(self._step, self.device)
        self.length += 1
        return _array(self.again())

    def _forget(self) -> None:
        """Drop the older half; what is kept moves to the start, its keys turned back as far."""
        kept = len(self.columns) // 2
        dropped = len(self.columns) - kept
        self.length = kept
        if kept:
            for memory in (self.keys, self.values):
                memory[..., :kept, :] = memory[..., dropped:, :]
            keys = self.keys[..., :kept, :]
            keys.copy_(_turned(keys, self.turns[dropped].conj_physical()))

    def _step(self) -> Tensor:
        """Return the logits, (N, V), after the characters of `token`, which stand at `place`."""
        hidden = self.columns > self.place  # (K,)
        turn = self.turns[self.place]  # (1, D / 2)
        x = self.embedding[self.token]  # (N, C)
        for qkv, gains, output, gate_up, down, keys, values in self.layers:
            heads = (_unit(x) @ qkv).view(len(x), 3, self.n_head, -1)  # (N, 3, H, D)
            q, k = _turned(_unit(heads[:, :2]).mul_(gains), turn).unbind(1)  # (N, H, D) each
            keys[:, :, self.place] = k[:, :, None]
            values[:, :, self.place] = heads[:, 2, :, None]
            scores = (keys @ q[..., None]).squeeze(-1)  # (N, H, K)
            weights = scores.masked_fill_(hidden, -math.inf).softmax(dim=-1)
            mixed = weights[:, :, None] @ values  # (N, H, 1, D)
            x += mixed.view_as(x) @ output
            gate, up = (_unit(x) @ gate_up).chunk(2, dim=-1)  # (N, F)
            x += F.silu(gate).mul_(up) @ down
        return _unit(x) @ self.head


def _unit(x: Tensor) -> Tensor:
    """Return x, each row of its last dimension brought to length 1."""
    squares = torch.linalg.vecdot(x, x)
    unit: Tensor = x * squares.add_(x.size(-1) * NORM_EPS).rsqrt_().unsqueeze(-1)
    return unit


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Return x (..., D), its pairs turned by complex numbers (D / 2,)."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)
