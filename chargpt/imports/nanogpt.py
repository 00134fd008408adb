"""Import of nanoGPT's checkpoints of character-level models.

A checkpoint and `meta.pkl` are pickles, which can run code when they are read. Here they cannot:
a checkpoint may contain tensors and plain values only (`torch.load(weights_only=True)`), and
`meta.pkl` plain values only.

Shapes in this file: V = vocabulary size.
"""

import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from chargpt.config import Config, ModelConfig, validate
from chargpt.device import require_memory
from chargpt.errors import DeviceError, RunError, TextError
from chargpt.files import read_regular, require_new
from chargpt.models import build_model, count_parameters
from chargpt.store.checkpoint import RunState
from chargpt.store.folder import RunFolder
from chargpt.store.tensors import load_weights
from chargpt.text.prepare import prepare
from chargpt.text.source import find_text
from chargpt.text.tokenizer import CharTokenizer

MAX_META_BYTES = 64_000_000
MAX_CHECKPOINT_BYTES = 1 << 36
# of a pickle of dicts, strings and integers
PLAIN_OPCODES = set(
    "PROTO FRAME STOP MARK EMPTY_DICT DICT SETITEM SETITEMS MEMOIZE PUT BINPUT LONG_BINPUT GET "
    "BINGET LONG_BINGET INT BININT BININT1 BININT2 UNICODE SHORT_BINUNICODE BINUNICODE".split()
)
MODEL_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "dropout")
NAMES = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.output",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
OTHER_NAMES = {"wte": "embedding", "wpe": "position", "ln_f": "norm"}


def import_nanogpt(checkpoint: Path, meta: Path, out: Path, text: Path | None = None) -> Path:
    """Make a run of a checkpoint; return the run's folder.

    Args:
        checkpoint: `ckpt.pt`, as nanoGPT's training writes it.
        meta: `meta.pkl`, as its preparation of a character-level text writes it.
        out: folder of the run.
        text: that the model was trained on, for evaluation without naming it; its last tenth is the
            validation split, as nanoGPT has it.

    Raises:
        ChargptError: a file is not what it should be, or the folder is in use.
        OSError: the run cannot be written.
    """
    require_new(out)
    with _report_damage(meta):
        tokenizer, order = read_meta(meta)
    with _report_damage(checkpoint):
        saved = read_checkpoint(checkpoint)
        config, state, tensors = convert(saved, order, checkpoint.stat().st_size)
    model = build_model(config.model, tokenizer.vocab_size)
    load_weights(model, tensors, checkpoint)
    with RunFolder(out).locked(is_new=True) as folder:
        if text is not None:
            # whatever is rare, nanoGPT keeps it
            config = config.with_values({"text.path": str(text.absolute()), "text.rare": "keep"})
            corpus = prepare(find_text(config.text), config.text, folder.new_text)
            if corpus.tokenizer != tokenizer:
                different = set(corpus.tokenizer.characters) ^ set(tokenizer.characters)
                raise TextError(
                    f"{text} and {meta} have different characters, such as {min(different)!r}; "
                    "name the text of the model"
                )
            state = replace(state, corpus_key=corpus.key, text_name=corpus.name)
        folder.create_from_weights(config, tokenizer, state, model.state_dict())
    return out


@contextmanager
def _report_damage(path: Path) -> Iterator[None]:
    """Report whatever a damaged file makes the block raise as a RunError that names the file."""
    try:
        yield
    except DeviceError:  # too little memory
        raise
    except Exception as error:  # a damaged pickle may raise any
        cause = getattr(error, "strerror", None) or " ".join(str(error).split()) or "it is damaged"
        raise RunError(
            f"{path} is not a file of a character-level nanoGPT ({cause:.160}); give its ckpt.pt, "
            "and with --meta its meta.pkl"
        ) from None


class PlainUnpickler(pickle.Unpickler):
    """Refuses classes and functions; `read_meta` has checked the other opcodes before."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_meta(path: Path) -> tuple[CharTokenizer, Tensor]:
    """Return the tokenizer of a `meta.pkl`, and the ids there of its characters, (V,)."""
    content = read_regular(path, MAX_META_BYTES)
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name not in PLAIN_OPCODES:
            raise ValueError(f"it contains {opcode.name}")
        if opcode.name.endswith("PUT") and int(argument or 0) > len(content):
            raise ValueError("it asks for more memory than it needs")  # a table of that size
    itos = PlainUnpickler(io.BytesIO(content)).load()["itos"]
    if sorted(itos) != list(range(len(itos))) or not itos:
        raise ValueError("its `itos` does not number the characters from 0 on")
    if not all(isinstance(each, str) and len(each) == 1 for each in itos.values()):
        raise ValueError("its `itos` does not map to single characters")
    by_character = {character: id_ for id_, character in itos.items()}
    characters = "".join(sorted(by_character))
    if len(characters) != len(itos):
        raise ValueError("its `itos` maps two numbers to one character")
    characters.encode()  # no surrogates
    return CharTokenizer(characters), torch.tensor([by_character[c] for c in characters])


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what a checkpoint contains: tensors and plain values, nothing else."""
    require_memory(2 * path.lstat().st_size, str(path))  # its bytes, and then its tensors
    content = read_regular(path, MAX_CHECKPOINT_BYTES)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > len(content):
        raise ValueError("it is compressed")
    tree = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(tree, dict):
        raise ValueError("it holds no dict")
    return tree


def convert(
    saved: dict[str, Any], order: Tensor, n_bytes: int
) -> tuple[Config, RunState, dict[str, Tensor]]:
    """Return config, state and weights of a checkpoint.

    Args:
        saved: what `read_checkpoint` returned.
        order: for each of our ids, the id of its character in the checkpoint, (V,).
        n_bytes: size of the file, which bounds that of the model.
    """
    args, step, loss = saved["model_args"], saved["iter_num"], saved["best_val_loss"]
    loss = loss.item() if isinstance(loss, Tensor) and loss.dim() == 0 else loss
    dataset = saved["config"]["dataset"]
    numbers = [*(args[key] for key in (*MODEL_ARGS, "vocab_size")), step, loss]
    # whatever else they are, converting or printing it could cost any time and memory
    if any(type(number) not in (int, float) for number in numbers) or type(dataset) is not str:
        raise ValueError("a setting has the wrong type")
    model_args = {key: args[key] for key in MODEL_ARGS}
    tree = {"model": {"kind": "gpt2", **model_args}, "train": {"max_steps": max(1, int(step))}}
    config = validate(tree, "its settings")
    vocab_size = len(order)
    if args["vocab_size"] != vocab_size:
        raise ValueError(f"it has {args['vocab_size']} tokens, and meta.pkl {vocab_size}")
    if 2 * count_parameters(config.model, vocab_size) > n_bytes:
        raise ValueError("it is too small for the sizes that it states")
    tensors = rename(saved["model"], config.model, vocab_size)
    tensors["embedding.weight"] = tensors["embedding.weight"][order].contiguous()
    known_loss = loss if 0 <= loss < math.inf else None
    state = RunState(
        int(step), best_step=int(step), best_nats_per_char=known_loss, text_name=dataset[:80]
    )
    return config, state, tensors


def rename(weights: dict[str, Tensor], model: ModelConfig, vocab_size: int) -> dict[str, Tensor]:
    """Return the weights under our names, with biases of 0 where there are none, or ValueError."""
    with torch.device("meta"):
        shapes = {
            name: tensor.shape
            for name, tensor in build_model(model, vocab_size).state_dict().items()
        }
    weights = {name.removeprefix("_orig_mod."): each for name, each in weights.items()}
    head = weights.pop("lm_head.weight")
    found = {_our_name(name): tensor for name, tensor in weights.items()}
    found.pop(None, None)
    for name, tensor in [*found.items(), ("embedding.weight", head)]:
        # before anything is copied: a tensor may be one number, repeated
        n_bytes = tensor.numel() * tensor.element_size()
        is_whole = tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() >= n_bytes
        if shapes.get(str(name)) != tensor.shape or not is_whole:
            raise ValueError(f"its {name!s:.60} has another shape than its settings say")
    if not torch.equal(head, found["embedding.weight"]):
        raise ValueError("its output head is not its embedding")
    tensors = {str(name): tensor.detach().float() for name, tensor in found.items()}
    for name, shape in shapes.items():
        if name.endswith(".bias"):
            tensors.setdefault(name, torch.zeros(shape))
    return tensors


def _our_name(name: str) -> str | None:
    """Return our name of a weight; None for the causal mask of old checkpoints."""
    prefix, _, kind = name.removeprefix("transformer.").rpartition(".")
    if prefix in OTHER_NAMES:
        return f"{OTHER_NAMES[prefix]}.{kind}"
    _, layer, rest = prefix.split(".", 2)
    return None if rest == "attn" else f"blocks.{int(layer)}.{NAMES[rest]}.{kind}"
