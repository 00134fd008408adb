"""The next character of every stream on a CPU, compiled: for texts that are long, or many.

The steps are those of numpy_decoder.py, on the same weights, as loops that numba compiles when they
are first called. That takes two seconds, once for an installation; after it each step is one call,
which holds no lock that would keep other threads from theirs. A stream's numbers are the same to
the bit whatever is drawn beside it.

All products go through one tile: a few rows times a panel of columns, summed up in registers. BLAS
does likewise, but lays out its operands anew at every call, which for so few rows takes longer than
the product. Here the weights are cut into panels once, and keys and values are kept in panels.
Shapes in this file: N = streams, R = N filled up to whole tiles, or 1, S = characters held,
L = layers, C = n_embd, H = n_head, D = C / H, F = mlp_width, V = vocabulary, K = block size;
P(n) = panels of COLUMNS columns that n columns take.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from chargpt.config import NORM_EPS
from chargpt.inference.drawing import Ids
from chargpt.inference.numpy_decoder import Array, Weights

# With AVX-512 a tile's sums take half of the registers, enough to keep both multipliers busy; with
# AVX2 and NEON as many as there are room for.
ROWS = 4
COLUMNS = 64 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 16

ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
LOG2_E, LN_2 = np.float32(1.44269504), np.float32(0.69314718)
LEAST, MOST = np.float32(-87), np.float32(88)  # whose exponentials are float32 numbers

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Have a function compiled when it is first called; it may add up in any order."""
    made: Function = njit(
        nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"}, boundscheck=False
    )(function)
    return made


def kept(function: Function) -> Function:
    """Have a function compiled, and the result kept beside Python's own bytecode, if that can be.

    It is compiled anew when this file has changed, or the processor, but not for another file.
    """
    keeping, otherwise = cast("Any", compiled(function)), compiled(function)
    with suppress(RuntimeError):  # there is no folder that can be written to
        keeping.enable_caching()

    @wraps(function)
    def call(*arguments: object) -> None:
        nonlocal keeping
        try:
            keeping(*arguments)
        except Exception:  # what was kept cannot be read, or what is to be kept not be written
            keeping = otherwise
            keeping(*arguments)

    return cast("Function", call)


class Panels(NamedTuple):
    """A GPT's weights, each matrix cut into panels of columns, the last one filled with zeros."""

    embedding: Array  # (V, C)
    qkv: Array  # (L, P(3C), C, COLUMNS)
    gains: Array  # (L, 2, D)
    output: Array  # (L, P(C), C, COLUMNS)
    gate_up: Array  # (L, P(2F), C, COLUMNS)
    down: Array  # (L, P(C), F, COLUMNS)
    head: Array  # (P(V), C, COLUMNS)
    turns: Array  # (K, D), cosine and sine of each pair side by side


class Memory(NamedTuple):
    """What some streams hold, and room to work in."""

    keys: Array  # (L, N, H, P(K), D, COLUMNS)
    values: Array  # (L, N, H, P(D), K, COLUMNS)
    x: Array  # (R, C)
    unit: Array  # (R, C)
    change: Array  # (R, P(C) x COLUMNS)
    joint: Array  # (R, P(3C or 2F) x COLUMNS)
    mixed: Array  # (R, C + COLUMNS), since a panel of the last head may be wider than the head
    hidden: Array  # (R, F)
    scores: Array  # (1, P(K) x COLUMNS)
    logits: Array  # (R, P(V) x COLUMNS)


def _tile_of(rows: int) -> Any:
    """Return the product of so many rows and a panel, as LLVM's vectors."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(_: Any, a: Any, b: Any, c: Any) -> Any:
        """Do c[:rows, :COLUMNS] = a[:rows] @ b, where b is (depth, COLUMNS)."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, b, c = (
                context.make_array(kind)(context, builder, value)
                for kind, value in zip(signature.args, arguments, strict=True)
            )
            vector = ir.VectorType(ir.FloatType(), COLUMNS)
            nothing = ir.Constant(vector, ir.Undefined)
            first = ir.Constant(ir.VectorType(ir.IntType(32), COLUMNS), None)

            def row(array: Any, number: Any) -> Any:
                stride = builder.extract_value(array.strides, 0)
                return cgutils.pointer_add(builder, array.data, builder.mul(stride, number))

            numbers = [context.get_constant(types.intp, number) for number in range(rows)]
            factors = [row(a, number) for number in numbers]
            zeros = ir.Constant(vector, None)
            sums = [cgutils.alloca_once_value(builder, zeros) for _ in range(rows)]
            with cgutils.for_range(builder, builder.extract_value(b.shape, 0)) as loop:
                panel = builder.bitcast(row(b, loop.index), vector.as_pointer())
                columns = builder.load(panel, align=4)
                for factor, total in zip(factors, sums, strict=True):
                    number = builder.load(builder.gep(factor, [loop.index]))
                    lone = builder.insert_element(nothing, number, numbers[0])
                    repeated = builder.shuffle_vector(lone, nothing, first)
                    product = builder.fmul(repeated, columns, flags=("contract",))
                    summed = builder.fadd(builder.load(total), product, flags=("contract",))
                    builder.store(summed, total)
            for number, total in zip(numbers, sums, strict=True):
                place = builder.bitcast(row(c, number), vector.as_pointer())
                builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        return types.void(a, b, c), generate

    return tile


_tile, _tile_of_one = _tile_of(ROWS), _tile_of(1)


@compiled
def _multiply(a: Array, panels: Array, out: Array) -> None:
    """Do out = a @ panels: (R, depth) by (P, depth, COLUMNS) to (R, P x COLUMNS)."""
    for panel in range(len(panels)):
        columns = out[:, panel * COLUMNS :]
        if len(a) == 1:
            _tile_of_one(a, panels[panel], columns)
        else:
            for row in range(0, len(a), ROWS):
                _tile(a[row:], panels[panel], columns[row:])


@compiled
def _exp(x: np.float32) -> np.float32:
    """Return e^x to 4e-6 of it: 2^n times a polynomial, that of Cephes' expf.

    Unlike a library's, it becomes part of the loop around it, which then takes vectors. What lies
    beyond float32 is the largest or the smallest power that does not; NaN stays NaN.
    """
    within = x if x > LEAST else LEAST  # NaN is not
    within = within if within < MOST else MOST
    power = np.floor(within * LOG2_E + HALF)
    rest = within - power * LN_2
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    exponent = np.int32((np.int32(power) + np.int32(127)) << np.int32(23))
    result = (series * rest * rest + rest + ONE) * exponent.view(np.float32)
    return result if x == x else x


@compiled
def _normalise(x: Array, out: Array) -> None:
    """Bring each row of x (R, C) to length 1."""
    rows, width = x.shape
    for row in range(rows):
        total = np.float32(width * NORM_EPS)
        for column in range(width):
            total += x[row, column] * x[row, column]
        scale = ONE / np.sqrt(total)
        for column in range(width):
            out[row, column] = x[row, column] * scale


@compiled
def _turn(heads: Array, gains: Array, turns: Array) -> None:
    """Bring each head (H, D) to length 1, times its gains (D,), and turn its pairs."""
    count, size = heads.shape
    for head in range(count):
        total = np.float32(size * NORM_EPS)
        for place in range(size):
            total += heads[head, place] * heads[head, place]
        scale = ONE / np.sqrt(total)
        for place in range(0, size, 2):
            real = heads[head, place] * scale * gains[place]
            imaginary = heads[head, place + 1] * scale * gains[place + 1]
            cos, sin = turns[place], turns[place + 1]
            heads[head, place] = real * cos - imaginary * sin
            heads[head, place + 1] = real * sin + imaginary * cos


@compiled
def _keep(key: Array, value: Array, place: int, keys: Array, values: Array) -> None:
    """Put a head's key and value (D,) where its others are: one a column, and one a row."""
    for number in range(len(key)):
        keys[place // COLUMNS, number, place % COLUMNS] = key[number]
        values[number // COLUMNS, place, number % COLUMNS] = value[number]


@compiled
def _attend(
    query: Array, keys: Array, values: Array, length: int, scores: Array, out: Array
) -> None:
    """Mix a head's first `length` values as its query (1, D) and their keys say, to out (1, D)."""
    for panel in range((length + COLUMNS - 1) // COLUMNS):
        _tile_of_one(query, keys[panel], scores[:, panel * COLUMNS :])
    highest = scores[0, 0]
    for place in range(length):
        highest = max(highest, scores[0, place])
    total = ZERO
    for place in range(length):
        scores[0, place] = _exp(scores[0, place] - highest)
        total += scores[0, place]
    for panel in range(len(values)):
        _tile_of_one(scores, values[panel, :length], out[:, panel * COLUMNS :])
    scale = ONE / total
    for place in range(query.shape[1]):
        out[0, place] *= scale


@compiled
def _add(x: Array, change: Array) -> None:
    rows, width = x.shape
    for row in range(rows):
        for column in range(width):
            x[row, column] += change[row, column]


@compiled
def _gate(joint: Array, out: Array) -> None:
    """Do out = silu(gate) * up, (R, F), of which joint holds both."""
    rows, width = out.shape
    for row in range(rows):
        for column in range(width):
            gate = joint[row, column]
            out[row, column] = joint[row, width + column] * gate / (ONE + _exp(-gate))


@kept
def _step(ids: Ids, place: int, panels: Panels, memory: Memory) -> None:
    """Take in a character of each stream, which stand at `place`; leave the next ones' logits."""
    x, unit, change, joint, mixed = memory.x, memory.unit, memory.change, memory.joint, memory.mixed
    width = x.shape[1]
    layers, streams, heads, _, size, _ = memory.keys.shape
    for stream in range(streams):
        for column in range(width):
            x[stream, column] = panels.embedding[ids[stream], column]
    for layer in range(layers):
        _normalise(x, unit)
        _multiply(unit, panels.qkv[layer], joint)
        for stream in range(streams):
            q, k, v = joint[stream, : 3 * width].reshape(3, heads, size)
            _turn(q, panels.gains[layer, 0], panels.turns[place])
            _turn(k, panels.gains[layer, 1], panels.turns[place])
            for head in range(heads):
                keys, values = memory.keys[layer, stream, head], memory.values[layer, stream, head]
                _keep(k[head], v[head], place, keys, values)
                out = mixed[stream : stream + 1, head * size :]
                _attend(q[head : head + 1], keys, values, place + 1, memory.scores, out)
        _multiply(mixed, panels.output[layer], change)
        _add(x, change)
        _normalise(x, unit)
        _multiply(unit, panels.gate_up[layer], joint)
        _gate(joint, memory.hidden)
        _multiply(memory.hidden, panels.down[layer], change)
        _add(x, change)
    _normalise(x, unit)
    _multiply(unit, panels.head, memory.logits)


@kept
def _forget(kept: int, dropped: int, turn: Array, memory: Memory) -> None:
    """Move what stands behind the first `dropped` places to the start, its keys turned back."""
    layers, streams, heads, _, size, _ = memory.keys.shape
    for layer in range(layers):
        for stream in range(streams):
            for head in range(heads):
                keys, values = memory.keys[layer, stream, head], memory.values[layer, stream, head]
                for panel in range(len(values)):
                    for place in range(kept):
                        for column in range(COLUMNS):
                            values[panel, place, column] = values[panel, place + dropped, column]
                for number in range(0, size, 2):
                    cos, sin = turn[number], turn[number + 1]
                    for place in range(kept):
                        panel, column = divmod(place + dropped, COLUMNS)
                        a, b = keys[panel, number, column], keys[panel, number + 1, column]
                        panel, column = divmod(place, COLUMNS)
                        keys[panel, number, column] = a * cos + b * sin
                        keys[panel, number + 1, column] = b * cos - a * sin


class CompiledDecoder:
    """What `streams` streams of characters have left in a model's memory.

    Attributes:
        length: how many characters of each stream are held, at most the block size.
    """

    def __init__(self, panels: Panels, streams: int) -> None:
        self.length = 0
        self.panels = panels
        self.memory = _memory(panels, streams)

    def remember(self, keys: Array, values: Array) -> None:
        """Let every stream hold nothing but these characters' keys and values, (L, H, S, D)."""
        self.length = keys.shape[2]
        places = _panels(keys.swapaxes(-1, -2))  # (L, H, P(S), D, COLUMNS)
        self.memory.keys[:, :, :, : places.shape[2]] = places[:, None]
        self.memory.values[:, :, :, :, : self.length] = _panels(values)[:, None]

    def step(self, ids: Ids) -> Array:
        """Take in a character of each stream, (N,); return the next ones' logits, (N, V).

        They are overwritten by the next step.
        """
        block = len(self.panels.turns)
        if self.length == block:
            self.length = block // 2
            if self.length:
                dropped = block - self.length
                _forget(self.length, dropped, self.panels.turns[dropped], self.memory)
        _step(ids, self.length, self.panels, self.memory)
        self.length += 1
        return self.memory.logits[: len(ids), : len(self.panels.embedding)]


def panels_of(weights: Weights) -> Panels:
    """Return a GPT's weights in panels, which decoders share."""
    return Panels(
        embedding=weights.embedding,
        qkv=_panels(weights.qkv),
        gains=np.ascontiguousarray(weights.gains[:, :, 0]),
        output=_panels(weights.output),
        gate_up=_panels(weights.gate_up),
        down=_panels(weights.down),
        head=_panels(weights.head),
        turns=np.ascontiguousarray(weights.turns).view(np.float32),
    )


def _panels(matrix: Array) -> Array:
    """Return a matrix (..., depth, columns) in panels, (..., P(columns), depth, COLUMNS)."""
    *lead, depth, columns = matrix.shape
    width = _padded(columns)
    padded = np.zeros((*lead, depth, width), np.float32)
    padded[..., :columns] = matrix
    panels = padded.reshape(*lead, depth, width // COLUMNS, COLUMNS)
    return np.ascontiguousarray(np.moveaxis(panels, -2, -3))


def _padded(columns: int) -> int:
    return -(-columns // COLUMNS) * COLUMNS


def _memory(panels: Panels, streams: int) -> Memory:
    """Return the memory of so many streams, which hold nothing."""
    vocabulary, width = panels.embedding.shape
    block, size = panels.turns.shape
    layers, _, hidden, _ = panels.down.shape
    heads = width // size
    rows = 1 if streams == 1 else -(-streams // ROWS) * ROWS

    def zeros(*shape: int) -> Array:
        return np.zeros(shape, np.float32)

    return Memory(
        keys=zeros(layers, streams, heads, _padded(block) // COLUMNS, size, COLUMNS),
        values=zeros(layers, streams, heads, _padded(size) // COLUMNS, block, COLUMNS),
        x=zeros(rows, width),
        unit=zeros(rows, width),
        change=zeros(rows, _padded(width)),
        joint=zeros(rows, _padded(max(3 * width, 2 * hidden))),
        mixed=zeros(rows, width + COLUMNS),
        hidden=zeros(rows, hidden),
        scores=zeros(1, _padded(block)),
        logits=zeros(rows, _padded(vocabulary)),
    )
