"""Export to an ONNX file with a KV cache, for onnxruntime and other programs.

    tokens (B, T) int64, past_keys and past_values (L, B, H, S, D)
    -> logits (B, T, V), keys and values (L, B, H, S + T, D)

B, T and S may change from call to call; S is 0 at first, and S + T at most the block size. The
metadata of the file hold the tokenizer, as `tokenizer.json` of a run, and the block size.

Shapes in this file: B = batch, T = tokens, S = cached tokens, L = layers, C = n_embd, H = heads,
D = C / H, F = MLP width, V = vocabulary size.
"""

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from chargpt import __version__
from chargpt.config import NORM_EPS
from chargpt.errors import ConfigError
from chargpt.export.check import (
    ExportCheck,
    Logits,
    NotChecked,
    check_export,
    encode,
    exportable_model,
    require_package,
    temporary_export,
)
from chargpt.files import require_new
from chargpt.models import GPT
from chargpt.store.run import Run
from chargpt.text.tokenizer import CharTokenizer

DOMAIN, OPSET, IR_VERSION = "chargpt", 18, 8
MAX_BYTES = 2_000_000_000  # of weights, of which a protocol buffer can hold 2 GB
INPUTS, OUTPUTS = ("tokens", "past_keys", "past_values"), ("logits", "keys", "values")
# in the text form of ONNX; matrices are transposed: (inputs, outputs)
FUNCTIONS = (
    f"""
rms_norm (x, weight) => (y) {{
    axes = Constant <value_ints = [-1]> ()
    eps = Constant <value_float = {NORM_EPS}> ()
    square = Mul (x, x)
    mean = ReduceMean (square, axes)
    shifted = Add (mean, eps)
    rms = Sqrt (shifted)
    unit = Div (x, rms)
    y = Mul (unit, weight)
}}""",
    """
split_heads (x, heads) => (y) {
    by_head = Reshape (x, heads)
    y = Transpose <perm = [0, 2, 1, 3]> (by_head)
}""",
    """
rotary (x, cos, sin) => (y) {
    first, second = Split <axis = -1, num_outputs = 2> (x)
    negative = Neg (second)
    half_rotated = Concat <axis = -1> (negative, first)
    x_cos = Mul (x, cos)
    x_sin = Mul (half_rotated, sin)
    y = Add (x_cos, x_sin)
}""",
    """
attention (x, norm, query, key, value, output, query_norm, key_norm, past_k, past_v,
           cos, sin, mask, heads, sqrt_head_size) => (y, k, v) {
    normed = chargpt.rms_norm (x, norm)
    all_q = MatMul (normed, query)
    all_k = MatMul (normed, key)
    all_v = MatMul (normed, value)
    head_q = chargpt.split_heads (all_q, heads)
    head_k = chargpt.split_heads (all_k, heads)
    head_v = chargpt.split_heads (all_v, heads)
    unit_q = chargpt.rms_norm (head_q, query_norm)
    unit_k = chargpt.rms_norm (head_k, key_norm)
    q = chargpt.rotary (unit_q, cos, sin)
    new_k = chargpt.rotary (unit_k, cos, sin)
    k = Concat <axis = 2> (past_k, new_k)
    v = Concat <axis = 2> (past_v, head_v)
    k_transposed = Transpose <perm = [0, 1, 3, 2]> (k)
    product = MatMul (q, k_transposed)
    scaled = Div (product, sqrt_head_size)
    scores = Add (scaled, mask)
    weights = Softmax <axis = -1> (scores)
    head_y = MatMul (weights, v)
    rows = Transpose <perm = [0, 2, 1, 3]> (head_y)
    flat = Constant <value_ints = [0, 0, -1]> ()
    joined = Reshape (rows, flat)
    update = MatMul (joined, output)
    y = Add (x, update)
}""",
    """
mlp (x, norm, gate, up, down) => (y) {
    normed = chargpt.rms_norm (x, norm)
    gated = MatMul (normed, gate)
    logistic = Sigmoid (gated)
    activation = Mul (gated, logistic)
    up_projected = MatMul (normed, up)
    hidden = Mul (activation, up_projected)
    update = MatMul (hidden, down)
    y = Add (x, update)
}""",
    """
positions (past_keys, tokens, cos_table, sin_table) => (cos, sin, mask) {
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    past_shape = Shape <start = 3, end = 4> (past_keys)
    start = Squeeze (past_shape)
    length_shape = Shape <start = 1, end = 2> (tokens)
    length = Squeeze (length_shape)
    stop = Add (start, length)
    query_position = Range (start, stop, one)
    cos = Gather (cos_table, query_position)
    sin = Gather (sin_table, query_position)
    key_position = Range (zero, stop, one)
    query_column = Unsqueeze (query_position, one)
    is_visible = LessOrEqual (key_position, query_column)
    visible = Constant <value = float {0}> ()
    hidden = Constant <value_float = -1e30> ()
    mask = Where (is_visible, visible, hidden)
}""",
)


def export_onnx(run: Run, path: Path, *, force: bool = False) -> ExportCheck | NotChecked:
    """Write a run as an ONNX file, in float32, and check it with onnxruntime.

    Args:
        run: of a GPT.
        path: of the file.
        force: replace a file.

    Raises:
        ConfigError: the file exists, a package is missing, or the model is of another kind.
        OperationError: the export differs from the run.
        OSError: it cannot be written.
    """
    model = exportable_model(run, "ONNX")
    require_package("onnx", "ONNX")
    if 4 * model.num_parameters() > MAX_BYTES:
        raise ConfigError(
            f"an ONNX file holds at most {MAX_BYTES / 1e9:.0f} GB of weights, and these are more; "
            "use `chargpt export hf`"
        )
    require_new(path, force=force)
    with temporary_export(path) as temporary:
        _write_onnx(temporary, run, model)
        return check_export(run, "onnxruntime", partial(OnnxRuntime, temporary))


def _write_onnx(path: Path, run: Run, model: GPT) -> None:
    onnx: Any = import_module("onnx")
    helper, config = onnx.helper, model.config
    kinds = {"tokens": onnx.TensorProto.INT64}
    past = (config.n_layer, "batch", config.n_head, "cached", config.head_size)
    shapes = {
        "tokens": ("batch", "length"),
        "past_keys": past,
        "past_values": past,
        "logits": ("batch", "length", model.vocab_size),
        "keys": (*past[:3], "cached + length", config.head_size),
        "values": (*past[:3], "cached + length", config.head_size),
    }
    inputs, outputs = (
        [
            helper.make_tensor_value_info(
                name, kinds.get(name, onnx.TensorProto.FLOAT), shapes[name]
            )
            for name in names
        ]
        for names in (INPUTS, OUTPUTS)
    )
    constants = [
        onnx.numpy_helper.from_array(array, name) for name, array in constants_of(model).items()
    ]
    nodes = [
        helper.make_node(kind, given, made, domain=DOMAIN if kind.islower() else "", **attributes)
        for kind, given, made, attributes in graph_nodes(config.n_layer)
    ]
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    header = f'<domain: "{DOMAIN}", opset_import: ["": {OPSET}, "{DOMAIN}": 1]>'
    proto = helper.make_model(
        helper.make_graph(nodes, "gpt", inputs, outputs, constants),
        functions=[onnx.parser.parse_function(header + text) for text in FUNCTIONS],
        opset_imports=opsets,
        ir_version=IR_VERSION,
        producer_name="chargpt",
        producer_version=__version__,
    )
    metadata = {"tokenizer": run.tokenizer.to_json(), "block_size": str(config.block_size)}
    helper.set_model_props(proto, metadata)
    onnx.checker.check_model(proto)
    onnx.save(proto, path)


def constants_of(model: GPT) -> dict[str, Logits]:
    """Return the weights, matrices transposed, and the other constants of the graph, by name."""
    config = model.config
    arrays: dict[str, Any] = {
        "cos_table": model.cos.float().cpu().numpy(),
        "sin_table": model.sin.float().cpu().numpy(),
        "heads": np.array([0, 0, config.n_head, config.head_size]),
        "sqrt_head_size": np.array(config.head_size**0.5, dtype=np.float32),
        "first_axis": np.array([0]),
    }
    arrays |= {f"layer_{layer}": np.array(layer) for layer in range(config.n_layer)}
    for name, tensor in model.state_dict().items():
        weight = tensor.float().cpu().numpy()
        is_matrix = weight.ndim == 2 and name != "embedding.weight"
        arrays[name] = np.ascontiguousarray(weight.T) if is_matrix else weight
    return arrays


def graph_nodes(n_layer: int) -> Iterator[tuple[str, list[str], list[str], dict[str, Any]]]:
    """Yield operator or function, inputs, outputs and attributes of every node of the graph."""
    tables = ["past_keys", "tokens", "cos_table", "sin_table"]
    yield "positions", tables, ["cos", "sin", "mask"], {}
    yield "Gather", ["embedding.weight", "tokens"], ["x_0"], {}
    weights = ("query", "key", "value", "output", "query_norm", "key_norm")
    stacked: dict[str, list[str]] = {"keys": [], "values": []}
    for layer in range(n_layer):
        block = f"blocks.{layer}"
        for past in ("past_keys", "past_values"):
            yield "Gather", [past, f"layer_{layer}"], [f"{past}_{layer}"], {"axis": 0}
        attention = [f"{block}.attention.{name}.weight" for name in weights]
        given = [f"x_{layer}", f"{block}.attention_norm.weight", *attention]
        given += [f"past_keys_{layer}", f"past_values_{layer}", "cos", "sin", "mask", "heads"]
        given.append("sqrt_head_size")
        yield "attention", given, [f"y_{layer}", f"k_{layer}", f"v_{layer}"], {}
        mlp = [f"{block}.mlp.{name}.weight" for name in ("gate", "up", "down")]
        given = [f"y_{layer}", f"{block}.mlp_norm.weight", *mlp]
        yield "mlp", given, [f"x_{layer + 1}"], {}
        for name, part in (("keys", f"k_{layer}"), ("values", f"v_{layer}")):
            stacked[name].append(f"{name}_{layer}")
            yield "Unsqueeze", [part, "first_axis"], [f"{name}_{layer}"], {}
    yield "rms_norm", [f"x_{n_layer}", "norm.weight"], ["normed"], {}
    yield "MatMul", ["normed", "head.weight"], ["logits"], {}
    for name, parts in stacked.items():
        yield "Concat", parts, [name], {"axis": 0}


class OnnxRuntime:
    """The file as onnxruntime opens it."""

    def __init__(self, path: Path) -> None:
        onnxruntime: Any = import_module("onnxruntime")
        self.name = f"onnxruntime {onnxruntime.__version__}"
        self.session = onnxruntime.InferenceSession(str(path))
        metadata = self.session.get_modelmeta().custom_metadata_map
        self.tokenizer = CharTokenizer.from_json(metadata["tokenizer"], str(path))

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)

    def logits(self, tokens: list[int]) -> Logits:
        """Return logits (T, V), computed in two parts, the second with the cache of the first."""
        layers, _, heads, _, size = self.session.get_inputs()[1].shape
        keys = values = np.zeros((layers, 1, heads, 0, size), np.float32)
        middle, found = len(tokens) // 2, []
        for part in filter(None, (tokens[:middle], tokens[middle:])):
            given = dict(zip(INPUTS, (np.array([part], np.int64), keys, values), strict=True))
            logits, keys, values = self.session.run(None, given)
            found.append(logits[0])
        return np.concatenate(found)
