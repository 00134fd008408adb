"""Import: runs from the files of other programs.

A checkpoint of nanoGPT and its `meta.pkl` are pickles, which can run code when they are read. Here
they cannot: a checkpoint may contain tensors and plain values only
(`torch.load(weights_only=True)`), and `meta.pkl` plain values only.

Shapes in this file: V = vocabulary size.
"""

import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from chargpt.config import Config, validate
from chargpt.device import require_memory
from chargpt.errors import ChargptError, RunError, TextError
from chargpt.export.huggingface import ORIGIN, QWEN3_NAMES, WEIGHTS, their_name
from chargpt.files import read_json, read_regular, require_new
from chargpt.models import build_model, count_parameters
from chargpt.store.checkpoint import RunState, max_weight_bytes
from chargpt.store.folder import RunFolder
from chargpt.store.tensors import require_weights
from chargpt.text.source import find_text
from chargpt.text.tokenizer import CharTokenizer

MAX_FILE_BYTES = 64_000_000  # of settings and vocabulary
MAX_CHECKPOINT_BYTES = 1 << 36
# of a pickle of dicts, strings and integers
PLAIN_OPCODES = set(
    "PROTO FRAME STOP MARK EMPTY_DICT DICT SETITEM SETITEMS MEMOIZE PUT BINPUT LONG_BINPUT GET "
    "BINGET LONG_BINGET INT BININT BININT1 BININT2 UNICODE SHORT_BINUNICODE BINUNICODE".split()
)
MODEL_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "dropout")
NANOGPT_NAMES = {  # as QWEN3_NAMES
    "embedding": "transformer.wte",
    "position": "transformer.wpe",
    "norm": "transformer.ln_f",
    "blocks": "transformer.h",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def import_huggingface(folder: Path, out: Path) -> Path:
    """Make a run of a folder that `export_huggingface` wrote; return the run's folder.

    The run has the weights, settings and progress of the one exported, and no optimizer state.

    Raises:
        ChargptError: the folder is not such an export, or `out` is in use.
        OSError: the run cannot be written.
    """
    require_new(out)
    with _report_damage(folder, "a folder that `chargpt export hf` wrote"):
        path, origin = folder / WEIGHTS, read_json(folder / ORIGIN, MAX_FILE_BYTES)
        config = validate(origin["config"], str(folder / ORIGIN))
        if config.model.kind != "gpt":
            raise ValueError("it holds no GPT")
        tokenizer = CharTokenizer.from_json(origin["tokenizer"], str(folder / ORIGIN))
        state = replace(RunState.from_json(origin["state"].encode()), corpus_key=None)  # no text
        limit = max_weight_bytes(config.model, tokenizer.vocab_size)
        require_memory(2 * min(limit, path.lstat().st_size), str(path))  # bytes, and then tensors
        theirs = load_safetensors(read_regular(path, limit))
        weights = our_weights(theirs, QWEN3_NAMES, config, tokenizer.vocab_size, folder)
    with RunFolder(out).locked(is_new=True) as run:
        run.create_from_weights(config, tokenizer, state, weights)
    return out


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
    with _report_damage(meta, "the meta.pkl of a character-level nanoGPT"):
        tokenizer, order = read_meta(meta)
    with _report_damage(checkpoint, "the ckpt.pt of a character-level nanoGPT"):
        saved = read_checkpoint(checkpoint)
        config, state = convert_settings(saved, len(order), checkpoint)
        theirs = nanogpt_weights(saved["model"])
        weights = our_weights(theirs, NANOGPT_NAMES, config, len(order), checkpoint)
        weights["embedding.weight"] = weights["embedding.weight"][order]
    with RunFolder(out).locked(is_new=True) as folder:
        prepared = None
        if text is not None:
            # whatever is rare, nanoGPT keeps it
            config = config.with_values({"text.path": str(text.absolute()), "text.rare": "keep"})
            corpus = folder.prepare_text(find_text(config.text), config.text)
            if corpus.tokenizer != tokenizer:
                different = set(corpus.tokenizer.characters) ^ set(tokenizer.characters)
                raise TextError(
                    f"{text} and {meta} have different characters, such as {min(different)!r}; "
                    "name the text of the model"
                )
            state = replace(state, corpus_key=corpus.key, text_name=corpus.name)
            prepared = corpus.folder
        folder.create_from_weights(config, tokenizer, state, weights, prepared)
    return out


@contextmanager
def _report_damage(path: Path, what: str) -> Iterator[None]:
    """Report whatever a damaged file makes the block raise as a RunError that names the file."""
    try:
        yield
    except ChargptError:
        raise
    except Exception as error:  # a damaged pickle may raise any
        cause = getattr(error, "strerror", None) or " ".join(str(error).split()) or "it is damaged"
        raise RunError(f"{path} is not {what} ({cause:.160}); name another") from None


def our_weights(
    theirs: Mapping[str, Tensor],
    names: Mapping[str, str],
    config: Config,
    vocab_size: int,
    origin: Path,
) -> dict[str, Tensor]:
    """Return weights under our names, in float32, with biases of 0 where there are none.

    Args:
        theirs: the weights under the names of another program.
        names: of that program, as in `their_name`.
        config: of the run.
        vocab_size: V.
        origin: path of the weights.

    Raises:
        RunError: names or shapes are not those of the config, or a value is not finite.
    """
    with torch.device("meta"):
        model = build_model(config.model, vocab_size)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    ours = {their_name(name, names): name for name in shapes}
    biases = {name: torch.zeros(shape) for name, shape in shapes.items() if name.endswith(".bias")}
    weights = biases | {ours.get(name, name): tensor for name, tensor in theirs.items()}
    require_weights(model, weights, origin)
    # a sparse tensor has no contiguous form
    return {name: tensor.float().contiguous() for name, tensor in weights.items()}


class PlainUnpickler(pickle.Unpickler):
    """Refuses classes and functions; `read_meta` has checked the other opcodes before."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_meta(path: Path) -> tuple[CharTokenizer, Tensor]:
    """Return the tokenizer of a `meta.pkl`, and the ids there of its characters, (V,)."""
    content = read_regular(path, MAX_FILE_BYTES)
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name not in PLAIN_OPCODES:
            raise ValueError(f"it contains {opcode.name}")
        if opcode.name.endswith("PUT") and int(argument or 0) > len(content):
            raise ValueError("it asks for more memory than it needs")  # a table of that size
    itos = PlainUnpickler(io.BytesIO(content)).load()["itos"]
    ids = {character: id_ for id_, character in itos.items()}
    characters = "".join(sorted(ids))
    if set(map(len, ids)) != {1} or sorted(itos) != list(range(len(characters))):
        raise ValueError("its `itos` does not number different characters from 0 on")
    characters.encode()  # no surrogates
    order = torch.tensor([ids[character] for character in characters], dtype=torch.int64)
    return CharTokenizer(characters), order


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what a checkpoint contains: tensors and plain values, nothing else."""
    require_memory(2 * path.lstat().st_size, str(path))  # its bytes, and then its tensors
    content = read_regular(path, MAX_CHECKPOINT_BYTES)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > len(content):
            raise ValueError("it is compressed")
    tree: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return tree


def convert_settings(saved: dict[str, Any], vocab_size: int, path: Path) -> tuple[Config, RunState]:
    """Return config and state of a checkpoint, for V = `vocab_size`."""
    args, step, dataset = saved["model_args"], saved["iter_num"], saved["config"]["dataset"]
    numbers = [*(args[key] for key in (*MODEL_ARGS, "vocab_size")), step]
    # whatever else they are, converting or printing it could cost any time and memory
    if any(type(number) not in (int, float) for number in numbers) or type(dataset) is not str:
        raise ValueError("a setting has the wrong type")
    model = {"kind": "gpt2", **{key: args[key] for key in MODEL_ARGS}}
    step, loss = int(step), float(saved["best_val_loss"])
    best = loss if 0 <= loss < math.inf else None
    tree = {"model": model, "train": {"max_steps": max(1, step)}, "text": {"documents": None}}
    config = validate(tree, str(path))
    if args["vocab_size"] != vocab_size:
        raise ValueError(f"it has {args['vocab_size']} tokens, and meta.pkl {vocab_size}")
    if 2 * count_parameters(config.model, vocab_size) > path.stat().st_size:
        raise ValueError("it is too small for the sizes that it states")
    return config, RunState(step, best_step=step, best_nats_per_char=best, text_name=dataset[:80])


def nanogpt_weights(saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, without those that are stored twice or computed."""
    weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in saved.items()}
    for name, tensor in weights.items():  # before any is read: one number may stand for many
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"its {name:.60} repeats a number")
    if not torch.equal(weights.pop("lm_head.weight"), weights["transformer.wte.weight"]):
        raise ValueError("its output head is not its embedding")
    # the causal mask of old checkpoints
    return {name: each for name, each in weights.items() if not name.endswith(".attn.bias")}
